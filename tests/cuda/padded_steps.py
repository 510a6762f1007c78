"""Steps replayed from graphs, as far as they run without a GPU: a graph's stand-in launches what was captured, padding and all."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch

from relay.kernels.backend import Batch, SampledToken
from relay.kernels.cuda.backend import CudaBackend
from relay.kernels.cuda.staging import Staging
from relay.kernels.probe import GEOMETRY, ProbeWeights, probe_program
from relay.protocol.sampling import SamplingParams
from tests.cuda.batches import batch_of

BLOCK = 16
KINDS = (
    SamplingParams(max_tokens=9, temperature=0.9, seed=3),
    SamplingParams(max_tokens=9, temperature=0.0),
    SamplingParams(max_tokens=9, temperature=0.9, top_k=7, seed=5),
)


class Graph:
    """Captures the one launch of a whole step."""

    def __init__(self) -> None:
        self.replay = lambda: None

    def pool(self) -> None: ...


class Everything(set[object]):
    def __contains__(self, _: object) -> bool:
        return True


@contextmanager
def graphs() -> Iterator[None]:
    """``torch.cuda``'s graphs for backends made within."""
    launch_all = CudaBackend.launch_all
    capturing: list[Graph] = []

    @contextmanager
    def capture(graph: Graph, **_: object) -> Iterator[None]:
        capturing.append(graph)
        yield
        capturing.pop()

    def launch(backend: CudaBackend, step: object, draw: bool) -> None:
        if capturing:
            capturing[-1].replay = lambda: launch_all(backend, step, draw)
        else:
            launch_all(backend, step, draw)

    host, chance = Staging.host, np.random.default_rng(2)

    def used_before(staging: Staging, words: int) -> tuple[np.ndarray, int]:
        packed, slot = host(staging, words)
        packed[:] = chance.integers(0, 4, words)
        return packed, slot

    with (
        mock.patch.object(Staging, "host", used_before),
        mock.patch.multiple(torch.cuda, CUDAGraph=Graph, graph=capture),
        mock.patch.object(CudaBackend, "launch_all", launch),
    ):
        yield


def steps() -> list[Batch]:
    """Prompts cut at odd places, alone and beside decode rows, then more sequences than a graph for a few has programs."""
    tokens = [(7 * i + i // 3) % GEOMETRY.vocab for i in range(60)]
    tables = [[3, 9, 1], [8, 2, 11], [5, 12, 14], [20, 21, 22], *([block] for block in range(23, 31))]
    middle = batch_of([(tokens[:23], 0, tables[0], 0)])
    middle.sampled_rows = np.zeros(0, np.int32)  # a chunk that ends no prompt draws nothing
    return [
        middle,
        batch_of([(tokens[:9], 0, tables[1], 1), (tokens[23:37], 23, tables[0], 0)]),
        batch_of([([-1], 37, tables[0], 0), (tokens[:17], 0, tables[2], 2), ([-1], 9, tables[1], 1)]),
        batch_of([(tokens[i : i + 3], 0, table, i) for i, table in enumerate(tables[4:])]),
    ]


def outcome(
    backend: CudaBackend, batch: Batch, replayed: bool
) -> tuple[list[SampledToken], np.ndarray, bytes, list[int]]:
    """What a step draws, its logits, and all KV and every slot's last token behind it."""
    batch.capture_logits = len(batch.sampled_rows) > 0
    ops = len(probe_program().ops)
    backend.run(0, ops, batch)
    assert backend._replayed == replayed
    drawn = backend.sample(batch)
    logits = backend.logits() if batch.capture_logits else np.zeros(0, np.float32)
    kv = backend.pool.view(torch.int16).numpy().tobytes()
    return drawn, logits, kv, backend._tables.last_tokens[:8].tolist()


def check_padded_steps() -> None:
    """Every step is the same bits from a graph as op by op, and what is padding writes nothing."""
    from tests.cuda.interpreted import without_a_device

    with without_a_device(), graphs():
        backends = []
        for replayed in (False, True):
            backend = CudaBackend("cpu", max_rows=8, max_tokens=32, graphs=replayed)
            backend.load(probe_program(), ProbeWeights())
            backend.allocate_kv(32, BLOCK, "bfloat16")
            backend.reserve(32, 8)  # as warm-up does: growing drops the graphs
            if backend._graphs is not None:
                backend._graphs._seen = Everything()  # so that the first step of a size is captured
            backend.pool.fill_(float("nan"))
            for slot in range(8):
                backend.bind_slot(slot, KINDS[slot % 3], 0, [1], [])
            backends.append(backend)
        for number, (plain, padded) in enumerate(zip(steps(), steps(), strict=True)):
            want, found = outcome(backends[0], plain, False), outcome(backends[1], padded, True)
            assert want[0] == found[0], f"step {number}: draws {want[0]} {found[0]}"
            assert np.array_equal(want[1], found[1]), f"step {number}: logits"
            assert want[2] == found[2], f"step {number}: KV"
            assert want[3] == found[3], f"step {number}: last tokens"
        sizes = {size for size, _ in backends[1]._graphs._graphs}
        assert {size.decodes > 0 for size in sizes} == {False, True}
        assert len({size.programs for size in sizes if size.rows == 32}) == 2, "none for many prompts"
