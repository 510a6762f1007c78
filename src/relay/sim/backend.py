"""A backend without arithmetic: K and V are hashes, and so is every token.

K/V of position t in layer l hash what the layer below saw of positions 0..t, read from the blocks. So token n is a hash of
numerics id, seed, parameters, prompt and the tokens before it, and a stale, partial, misplaced or foreign block changes every
later token. ``Oracle`` gives the same tokens from a plain loop without blocks, slots or batches.
"""

from collections.abc import Callable
from hashlib import blake2b

import numpy as np

from relay.kernels.backend import Batch, SampledToken
from relay.kernels.kv_frames import Heads
from relay.kernels.program import Attend, Buffer, Embed, Geometry, Linear, Op, Program, RopeWriteKv, SelectRows
from relay.kernels.weights import WeightSource
from relay.protocol.messages import FinishReason
from relay.protocol.sampling import SamplingParams
from relay.transfer.contract import Layout

LAYERS = 2
VOCAB = 64
POISON = VOCAB - 1  # never drawn by itself; an engine that embeds it crashes
LATE = 1 << 20  # a seed of LATE + n draws it as output n: a poison of which no prompt tells
CELL = 16  # bytes of K and V of a token in a layer
GEOMETRY = Geometry(LAYERS, 4, 4, 1, 1, 2, VOCAB, 4096)
LAYOUT = Layout(LAYERS, 2, 1, "float32")
HALVES = ((0, 1), (1, 1))  # its heads, as two ranks have them


class EngineCrash(BaseException):
    """The engine process dies here: no ``except Exception`` of the engine may hold it up, as none would a segmentation fault."""


class EngineHang(BaseException):
    """The step never ends: an endless loop, a device that does not answer."""


def program() -> Program:
    ops: list[Op] = [Embed("embed")]
    for layer in range(LAYERS):
        ops += [RopeWriteKv(layer), Attend(layer, 1.0)]
    ops += [SelectRows(), Linear(Buffer.S, Buffer.L, "head")]
    return Program(tuple(ops), GEOMETRY)


PROGRAM = program()
_SALTS = tuple(b"layer %d" % layer for layer in range(LAYERS))


def _embed(numerics: bytes, token: int) -> bytes:
    return numerics + token.to_bytes(4, "little")


def _cell(layer: int, position: int, x: bytes) -> bytes:
    """K (8 bytes) and V (8 bytes)."""
    return blake2b(b"%d/%d/%b" % (layer, position, x), digest_size=CELL).digest()


def _draw(x: bytes, params: SamplingParams, choice: int, prompt: list[int], outputs: list[int]) -> SampledToken:
    """A token below POISON unless the seed says so, with logprobs where they are asked for. EOS and stop ids wait for
    ``min_tokens``; penalties see the outputs."""
    seen = (sorted(prompt), outputs) if params.has_penalties else ""
    text = f"{params.seed} {choice} {len(prompt) + len(outputs)} {seen}".encode()
    word = int.from_bytes(blake2b(text + x, digest_size=8).digest(), "little")
    if len(outputs) >= params.min_tokens:
        token = word % POISON
    else:
        masked = params.eos_token_ids + params.stop_token_ids
        allowed = [token for token in range(POISON) if token not in masked]
        token = allowed[word % len(allowed)]
    if params.seed == LATE + len(outputs):
        token = POISON
    if params.logprobs is None:
        return SampledToken(token)
    top = [((token + rank) % POISON, -(1 + (word >> 8 * rank) % 997) / 64) for rank in range(params.logprobs)]
    return SampledToken(token, -(word % 991) / 64, top)


class Oracle:
    """All that one choice may ever say under one numerics id, and the KV of every position."""

    def __init__(self, numerics: str, prompt: list[int], params: SamplingParams, choice: int, max_len: int) -> None:
        self.kv = [bytearray() for _ in range(LAYERS)]
        self.outputs: list[int] = []
        self.logprobs: list[tuple[float, list[tuple[int, float]]]] = []  # where they are asked for
        self.finish: FinishReason = "length"
        name = numerics.encode()
        chains = [blake2b(salt, digest_size=16) for salt in _SALTS]
        tokens = list(prompt)
        position = 0
        while True:
            x = b""
            for position in range(position, len(tokens)):  # noqa: B020 - goes on where it stopped
                x = _embed(name, tokens[position])
                for layer, chain in enumerate(chains):
                    cell = _cell(layer, position, x)
                    self.kv[layer] += cell
                    chain.update(cell)
                    last = chain.copy()
                    last.update(x)
                    x = last.digest()
            position = len(tokens)
            drawn = _draw(x, params, choice, prompt, self.outputs)
            token = drawn.token_id
            if drawn.logprob is not None:
                self.logprobs.append((drawn.logprob, drawn.top))
            ends = token in params.eos_token_ids + params.stop_token_ids and len(self.outputs) >= params.min_tokens
            tokens.append(token)
            self.outputs.append(token)
            if ends:
                self.finish = "stop"
                return
            if len(self.outputs) >= params.max_tokens or len(tokens) >= max_len:
                return


class HashBackend:
    """Implements ``Backend``. ``trouble(token_ids, rows)`` is called at the start of each step and may raise."""

    name = "hash"

    def __init__(self, numerics: str, trouble: Callable[[list[int], int], None]) -> None:
        self._numerics = numerics.encode()
        self._trouble = trouble
        self.wrong = ""  # "token" or "logprob": what a broken machine gets wrong, silently
        self._block_size = 0
        self._kv: list[bytearray] = []
        self._slots: dict[int, tuple[SamplingParams, int, list[int], list[int]]] = {}
        self._rows: list[tuple[list[int], int, int]] = []  # (block table, first position, index of its first token)
        self._x: list[list[bytes]] = []

    def load(self, program: Program, weights: WeightSource) -> None:
        raise NotImplementedError("the program is fixed")

    def allocate_kv(self, num_blocks: int, block_size: int, dtype: str) -> None:
        self._block_size = block_size
        self._kv = [bytearray(b"\xde" * (num_blocks * block_size * CELL)) for _ in range(LAYERS)]

    def bind_slot(
        self, slot: int, params: SamplingParams, choice: int, prompt_ids: list[int], output_ids: list[int]
    ) -> None:
        if slot in self._slots:
            raise AssertionError(f"slot {slot} is bound twice")
        self._slots[slot] = (params, choice, list(prompt_ids), list(output_ids))

    def release_slot(self, slot: int) -> None:
        del self._slots[slot]

    def run(self, start: int, stop: int, batch: Batch) -> None:
        for op in PROGRAM.ops[start:stop]:
            if isinstance(op, Embed):
                self._begin(batch)
            elif isinstance(op, RopeWriteKv):
                self._write(op.layer)
            elif isinstance(op, Attend):
                self._attend(op.layer)

    def _begin(self, batch: Batch) -> None:
        token_ids = batch.token_ids.tolist()
        starts = batch.row_starts.tolist()
        positions = batch.positions.tolist()
        tables = batch.block_tables.tolist()
        self._rows, self._x = [], []
        for row, slot in enumerate(batch.slots.tolist()):
            first, last = starts[row], starts[row + 1]
            if token_ids[first] < 0:
                _, _, prompt, outputs = self._slots[slot]
                if len(prompt) + len(outputs) != positions[first] + 1:
                    raise AssertionError(f"decode row of slot {slot} is not at its slot's last token")
                token_ids[first] = outputs[-1] if outputs else prompt[-1]
            self._rows.append((tables[row], positions[first], first))
            self._x.append([_embed(self._numerics, token) for token in token_ids[first:last]])
        self._trouble(token_ids, len(self._rows))

    def _write(self, layer: int) -> None:
        kv, size = self._kv[layer], self._block_size
        for (table, first, _), xs in zip(self._rows, self._x, strict=True):
            for position, x in enumerate(xs, first):
                at = (table[position // size] * size + position % size) * CELL
                kv[at : at + CELL] = _cell(layer, position, x)

    def _attend(self, layer: int) -> None:
        kv, size = self._kv[layer], self._block_size
        width = size * CELL
        for row, ((table, first, _), xs) in enumerate(zip(self._rows, self._x, strict=True)):
            chain = blake2b(_SALTS[layer], digest_size=16)
            whole, rest = divmod(first, size)
            for block in table[:whole]:
                chain.update(kv[block * width : (block + 1) * width])
            if rest:
                at = table[whole] * width
                chain.update(kv[at : at + rest * CELL])
            seen = []
            for position, x in enumerate(xs, first):
                at = (table[position // size] * size + position % size) * CELL
                chain.update(kv[at : at + CELL])
                last = chain.copy()
                last.update(x)
                seen.append(last.digest())
            self._x[row] = seen

    def sample(self, batch: Batch) -> list[SampledToken]:
        drawn = []
        slots = batch.slots.tolist()
        for row in batch.sampled_rows.tolist():
            params, choice, prompt, outputs = self._slots[slots[row]]
            token = _draw(self._x[row][-1], params, choice, prompt, outputs)
            if self.wrong == "token":
                token.token_id = (token.token_id + 1) % POISON
            elif self.wrong == "logprob" and token.logprob is not None:
                token.logprob -= 0.5
            outputs.append(token.token_id)
            drawn.append(token)
        return drawn

    def logits(self) -> np.ndarray:
        raise NotImplementedError("hashes have no logits")

    def kv_bytes_per_token_layer(self) -> int:
        return CELL

    def cells(self, layer: int, block_table: list[int], count: int) -> bytes:
        """K and V of positions 0..count-1, token by token, for checkers."""
        kv, width = self._kv[layer], self._block_size * CELL
        return b"".join([kv[block * width : (block + 1) * width] for block in block_table])[: count * CELL]

    def _indices(self, block_table: np.ndarray, first: int, count: int) -> np.ndarray:
        positions = np.arange(first, first + count)
        cells: np.ndarray = np.asarray(block_table)[positions // self._block_size] * self._block_size
        return cells + positions % self._block_size

    def read_kv(
        self, layer: int, block_table: np.ndarray, first: int, count: int, out: memoryview, heads: Heads | None = None
    ) -> None:
        cells = self._heads_of(layer, heads)[self._indices(block_table, first, count)]
        out[:] = cells[:, 0].tobytes() + cells[:, 1].tobytes()

    def write_kv(
        self, layer: int, block_table: np.ndarray, first: int, count: int, data: memoryview, heads: Heads | None = None
    ) -> None:
        cells = self._heads_of(layer, heads)
        values = np.frombuffer(data, np.uint32).reshape(2, count, cells.shape[2])
        cells[self._indices(block_table, first, count)] = values.swapaxes(0, 1)

    def _heads_of(self, layer: int, heads: Heads | None) -> np.ndarray:
        """[cell, K or V, head]: a head is half of a value."""
        first, count = heads or (0, LAYOUT.num_kv_heads)
        return np.frombuffer(self._kv[layer], np.uint32).reshape(-1, 2, 2)[:, :, first : first + count]

    def copy_block(self, source: int, target: int) -> None:
        width = self._block_size * CELL
        for kv in self._kv:
            kv[target * width : (target + 1) * width] = kv[source * width : (source + 1) * width]

    def numerics(self) -> dict[str, str]:
        return {"backend": "hash"}

    def close(self) -> None: ...
