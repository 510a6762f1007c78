"""A backend without arithmetic: K and V are hashes, and so is every token.

K/V of position t in layer l hash what the layer below saw of positions 0..t, read from the blocks. So token n is a hash of all
tokens before it, and a stale, partial, misplaced or foreign block changes every later token. ``oracle`` gives the same tokens
from a plain loop without blocks, slots or batches.
"""

from hashlib import blake2b

import numpy as np

from relay.kernels.backend import Batch, SampledToken
from relay.kernels.program import Attend, Buffer, Embed, Geometry, Linear, Op, Program, RopeWriteKv, SelectRows
from relay.kernels.weights import WeightSource
from relay.protocol.messages import FinishReason
from relay.protocol.sampling import SamplingParams

LAYERS = 2
VOCAB = 50
GEOMETRY = Geometry(LAYERS, 4, 4, 1, 1, 4, VOCAB, 4096)


def program() -> Program:
    ops: list[Op] = [Embed("embed")]
    for layer in range(LAYERS):
        ops += [RopeWriteKv(layer), Attend(layer, 1.0)]
    ops += [SelectRows(), Linear(Buffer.S, Buffer.L, "head")]
    return Program(tuple(ops), GEOMETRY)


def _hash(*parts: object) -> bytes:
    digest = blake2b(digest_size=8)
    for part in parts:
        digest.update(part if isinstance(part, bytes) else repr(part).encode() + b";")
    return digest.digest()


def _kv(layer: int, position: int, x: bytes) -> tuple[bytes, bytes]:
    return _hash("k", layer, position, x), _hash("v", layer, position, x)


def _draw(x: bytes, params: SamplingParams, choice: int, position: int, prompt: list[int], outputs: list[int]) -> int:
    """A token in 0..VOCAB-1, from logits and everything a sampler may look at. EOS and stop ids wait for ``min_tokens``."""
    masked = set(params.eos_token_ids + params.stop_token_ids) if len(outputs) < params.min_tokens else set()
    allowed = [token for token in range(VOCAB) if token not in masked]
    seen = (sorted(prompt), outputs) if params.has_penalties else ()
    word = _hash("draw", x, params.seed, choice, position, seen)
    return allowed[int.from_bytes(word, "little") % len(allowed)]


def logits_of(x: bytes) -> np.ndarray:
    return np.frombuffer(b"".join(_hash("logit", x, i) for i in range(VOCAB // 2)), np.float32)


def oracle(
    tokens: list[int], num_prompt: int, params: SamplingParams, choice: int, max_model_len: int
) -> tuple[list[int], FinishReason, list[bytes], list[bytes]]:
    """(all outputs, finish, logits row of every drawn token, canonical KV of every full unit)."""
    tokens = list(tokens)
    kv: list[list[tuple[bytes, bytes]]] = [[] for _ in range(LAYERS)]
    rows: list[bytes] = []
    while True:
        for position in range(len(kv[0]), len(tokens)):
            x = _hash("embed", tokens[position])
            for layer in range(LAYERS):
                kv[layer].append(_kv(layer, position, x))
                x = _hash("attend", layer, x, b"".join(k for k, _ in kv[layer]), b"".join(v for _, v in kv[layer]))
        rows.append(logits_of(x).tobytes())
        outputs = tokens[num_prompt:]
        token = _draw(x, params, choice, len(tokens), tokens[:num_prompt], outputs)
        tokens.append(token)
        ends = token in params.eos_token_ids + params.stop_token_ids and len(outputs) >= params.min_tokens
        if ends or len(outputs) + 1 >= params.max_tokens or len(tokens) >= max_model_len:
            units = [_unit(kv, first) for first in range(0, len(kv[0]) // 16 * 16, 16)]
            return tokens[num_prompt:], "stop" if ends else "length", rows, units


def _unit(kv: list[list[tuple[bytes, bytes]]], first: int) -> bytes:
    """Canonical bytes of the unit at ``first`` over all layers: K of its tokens, then V."""
    units = [layer[first : first + 16] for layer in kv]
    return b"".join(b"".join(k for k, _ in unit) + b"".join(v for _, v in unit) for unit in units)


class HashBackend:
    """Implements ``Backend``. Rows that hold ``poison`` raise; ``raises`` makes the next n runs raise, ``raises_late`` n samplings

    after they have changed the slots.
    """

    name = "hash"

    def __init__(self, poison: int | None = None) -> None:
        self.poison = poison
        self.raises = 0
        self.raises_late = 0
        self.tokens_computed = 0
        self.slots: dict[int, tuple[SamplingParams, int, list[int], list[int]]] = {}
        self._x: list[bytes] = []
        self._logits = np.zeros((0, VOCAB), np.float32)

    def load(self, program: Program, weights: WeightSource) -> None:
        raise NotImplementedError

    def allocate_kv(self, num_blocks: int, block_size: int, dtype: str = "float32") -> None:
        self.block_size = block_size
        self.kv = np.full((LAYERS, 2, num_blocks * block_size), 0xDEAD, np.uint64)

    def bind_slot(
        self, slot: int, params: SamplingParams, choice: int, prompt_ids: list[int], output_ids: list[int]
    ) -> None:
        assert slot not in self.slots, "slot is bound twice"
        self.slots[slot] = (params, choice, list(prompt_ids), list(output_ids))

    def release_slot(self, slot: int) -> None:
        del self.slots[slot]

    def _cells(self, table: np.ndarray, first: int, count: int) -> np.ndarray:
        positions = np.arange(first, first + count)
        return np.asarray(table)[positions // self.block_size] * self.block_size + positions % self.block_size

    def run(self, start: int, stop: int, batch: Batch) -> None:
        if start == 0 and self.raises:
            self.raises -= 1
            raise RuntimeError("injected")
        for index in range(start, stop):
            op = program().ops[index]
            if isinstance(op, Embed):
                self._embed(batch)
            elif isinstance(op, RopeWriteKv):
                self._each(batch, op.layer, self._write)
            elif isinstance(op, Attend):
                self._each(batch, op.layer, self._attend)

    def _embed(self, batch: Batch) -> None:
        self._x = []
        for row, slot in enumerate(batch.slots.tolist()):
            for i in range(batch.row_starts[row], batch.row_starts[row + 1]):
                token = int(batch.token_ids[i])
                if token < 0:
                    _, _, prompt, outputs = self.slots[slot]
                    token = (prompt + outputs)[-1]
                    assert len(prompt) + len(outputs) == batch.positions[i] + 1, (
                        "decode row is not at its slot's last token"
                    )
                if token == self.poison:
                    raise RuntimeError("poison")
                self._x.append(_hash("embed", token))
        self.tokens_computed += len(self._x)

    def _each(self, batch: Batch, layer: int, op) -> None:
        for row in range(len(batch.slots)):
            for i in range(batch.row_starts[row], batch.row_starts[row + 1]):
                op(layer, batch.block_tables[row], i, int(batch.positions[i]))

    def _write(self, layer: int, table: np.ndarray, i: int, position: int) -> None:
        k, v = _kv(layer, position, self._x[i])
        (cell,) = self._cells(table, position, 1)
        self.kv[layer, 0, cell] = int.from_bytes(k, "little")
        self.kv[layer, 1, cell] = int.from_bytes(v, "little")

    def _attend(self, layer: int, table: np.ndarray, i: int, position: int) -> None:
        cells = self._cells(table, 0, position + 1)
        self._x[i] = _hash(
            "attend", layer, self._x[i], self.kv[layer, 0, cells].tobytes(), self.kv[layer, 1, cells].tobytes()
        )

    def sample(self, batch: Batch) -> list[SampledToken]:
        drawn = []
        logits = []
        for row in batch.sampled_rows.tolist():
            last = int(batch.row_starts[row + 1]) - 1
            params, choice, prompt, outputs = self.slots[int(batch.slots[row])]
            token = _draw(self._x[last], params, choice, int(batch.positions[last]) + 1, prompt, outputs)
            outputs.append(token)
            logits.append(logits_of(self._x[last]))
            if params.logprobs is None:
                drawn.append(SampledToken(token))
            else:
                top = [(rank, -float(token + rank)) for rank in range(params.logprobs)]
                drawn.append(SampledToken(token, -float(token), top))
        self._logits = np.array(logits, np.float32)
        if self.raises_late:
            self.raises_late -= 1
            raise RuntimeError("injected")
        return drawn

    def logits(self) -> np.ndarray:
        return self._logits

    def kv_bytes_per_token_layer(self) -> int:
        return 16

    def read_kv(self, layer: int, block_table: np.ndarray, first: int, count: int, out: memoryview) -> None:
        cells = self._cells(block_table, first, count)
        out[: 16 * count] = self.kv[layer, 0, cells].tobytes() + self.kv[layer, 1, cells].tobytes()

    def write_kv(self, layer: int, block_table: np.ndarray, first: int, count: int, data: memoryview) -> None:
        cells = self._cells(block_table, first, count)
        values = np.frombuffer(data, np.uint64, 2 * count)
        self.kv[layer, 0, cells], self.kv[layer, 1, cells] = values[:count], values[count:]

    def copy_block(self, source: int, target: int) -> None:
        size = self.block_size
        self.kv[:, :, target * size : (target + 1) * size] = self.kv[:, :, source * size : (source + 1) * size]

    def numerics(self) -> dict[str, str]:
        return {"backend": "hash"}

    def close(self) -> None: ...
