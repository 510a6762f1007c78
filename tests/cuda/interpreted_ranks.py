"""Ranks under Triton's interpreter: processes over shared host memory meet by the kernels' own flags.

``python -m tests.cuda.interpreted_ranks RANKS`` (or ``worker [int8]``, ``ipc``, ``shm``), with TRITON_INTERPRET=1.
"""

import functools
import itertools
import queue
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.multiprocessing as multiprocessing
from triton.runtime.interpreter import GridExecutor

from relay.kernels import packing
from relay.kernels.backend import Batch
from relay.kernels.cuda.backend import CudaBackend
from relay.kernels.cuda.kv_copy import KvTransfers
from relay.kernels.cuda.linear_choice import LinearLayer
from relay.kernels.cuda.linear_int8 import pack_codes
from relay.kernels.cuda.loading import shapes_of
from relay.kernels.cuda.ops import Device, compile_ops
from relay.kernels.cuda.rank_meetings import MAX_RANKS, STATE_WORDS, Links, plan_areas, sum_ranks
from relay.kernels.cuda.rank_share import CudaRankShare
from relay.kernels.cuda.ranked_backend import RankedCudaBackend
from relay.kernels.cuda.step import exact_layout, fill, shape_of
from relay.kernels.kv_frames import KvRange, Span, payload_digest
from relay.kernels.probe import ProbeWeights, probe_program
from relay.kernels.program import Buffer
from relay.kernels.ranks import calls
from relay.kernels.ranks.follower import obey
from relay.kernels.ranks.split import fold, split_program
from relay.kernels.ranks.weights import RankWeights
from relay.kernels.reference import quantized as int8
from relay.protocol.sampling import SamplingParams
from relay.transfer.contract import (
    Identity,
    Layout,
    ReceiveCompleted,
    ReceiveOrder,
    SendAcknowledged,
    SendOrder,
    TransferEvent,
    TransferLimits,
)
from relay.transfer.frame import Handoff
from relay.transfer.ipc import IpcWire
from relay.transfer.transport import WiredTransport
from relay.transfer.wire import ShmWire
from tests.cuda import tensor_core_model
from tests.cuda.batches import batch_of
from tests.cuda.interpreted import OneProcess, one_at_a_time, without_a_device

ROWS = 32
BLOCK, BLOCKS = 16, 16
TOKENS = [(7 * i) % 200 for i in range(9)]


class Rank:
    """One rank of the probe's program on the CPU; all areas and flags are shared memory."""

    def __init__(self, rank: int, ranks: int, areas: list[torch.Tensor], flags: list[torch.Tensor]) -> None:
        self.part = part = split_program(probe_program(), ranks, rank)
        weights = RankWeights(ProbeWeights(), part.cuts)
        device = self.device = Device("cpu", max_decodes=8)
        matrices, vectors = shapes_of(part.program)
        for name, (n, k) in matrices.items():
            device.matrices[name] = torch.from_numpy(packing.unpack_matrix(weights.matrix(name))).bfloat16()
            assert device.matrices[name].shape == (n, k)
            device.layers[n, k] = LinearLayer(n, k)
        for name in vectors:
            device.vectors[name] = torch.from_numpy(np.array(weights.vector(name)))
        g = part.program.geometry
        for buffer in Buffer:
            device.buffers[buffer] = torch.full((ROWS, g.width(buffer)), float("nan"), dtype=torch.bfloat16)
        device.product = torch.full((ROWS, g.hidden), float("nan"), dtype=torch.bfloat16)
        shape = (g.num_layers, 2, BLOCKS, g.num_kv_heads, BLOCK, g.head_dim)
        device.use_cache(torch.full(shape, float("nan"), dtype=torch.bfloat16))
        device.last_tokens = torch.zeros(9, dtype=torch.int32)
        device.areas = plan_areas(part, ROWS, ROWS)
        device.links = Links(rank, ranks, areas, flags, torch.zeros(STATE_WORDS, dtype=torch.int32))
        self.launches = compile_ops(part.program, device, part.meetings)

    def logits(self, batch: Batch) -> torch.Tensor:
        g = self.part.program.geometry
        shape = shape_of(batch, g.num_heads // g.num_kv_heads, 64)
        layout = exact_layout(batch, shape)
        packed = np.zeros(layout.words, np.int32)
        fill(layout, packed, batch, shape, 8)
        step = layout.views(torch.from_numpy(packed))
        for launch in self.launches:
            launch(step)
        return self.device.buffers[Buffer.L][: step.sampled].float().clone()


def live(rank: int, ranks: int, areas: list[torch.Tensor], flags: list[torch.Tensor], answers: Any) -> None:
    """Whole, in chunks, decoded beside another: the same calls in every rank."""
    tensor_core_model.install()
    one = Rank(rank, ranks, areas, flags)
    whole = one.logits(batch_of([(TOKENS, 0, [3, 1], 0)]))
    assert torch.isfinite(whole).all()
    kv = one.device.kv[:, :, [3, 1]].clone()
    one.logits(batch_of([(TOKENS[:8], 0, [9, 4], 1)]))
    beside = one.logits(batch_of([(TOKENS[8:], 8, [9, 4], 2), (TOKENS[:3], 0, [12], 3)]))
    assert torch.equal(beside[:1], whole), "a chunk, then decode beside a prompt, differs"
    assert torch.equal(one.device.kv[:, :, [9], :, :9], kv[:, :, :1, :, :9]), "KV differs"
    epoch, through = one.device.links.state[:2].tolist()
    meetings = len(one.part.meetings) * 3
    assert (epoch, through) == (meetings, 0), (epoch, through, meetings)
    answers.put((rank, whole.numpy()))


def add(rank: int, ranks: int, areas: list[torch.Tensor], flags: list[torch.Tensor], answers: Any) -> None:
    """Sums whose result is a small integer that depends on the order: the interpreter truncates to bf16 where a device rounds."""
    links = Links(rank, ranks, areas, flags, torch.zeros(STATE_WORDS, dtype=torch.int32))
    orders = list(itertools.permutations([1.0, 2.0**24, 1.0, -(2.0**24)]))
    columns = torch.tensor([orders[(7 * column) % len(orders)] for column in range(1500)])
    values = [columns[:, other % 4].reshape(5, 300) for other in range(ranks)]
    if ranks < 4:
        values = [value % 5 for value in values]  # whose sums stay small
    x, bias = (torch.arange(1500) % 7).reshape(5, 300).bfloat16(), (torch.arange(300) % 3).float()
    areas[rank][64 : 64 + 1500] = values[rank].reshape(-1).bfloat16()
    want = x.float() + bias + fold(values)
    sum_ranks(links, x, 64, bias)
    other = functools.reduce(torch.add, values)
    assert ranks < 4 or not torch.equal(fold(values), other), "the order makes no difference here"
    answers.put((rank, x.float().numpy(), torch.equal(x.float(), want)))


class FileMemory:
    """Stands for the driver: memory that other processes open by name."""

    def __init__(self, folder: str, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._names = itertools.count()

    def allocate(self, size: int) -> SimpleNamespace:
        return self._map(f"rank{self._rank}-{next(self._names)}", size, "w+")

    def handle(self, area: SimpleNamespace) -> bytes:
        return area.name.encode()

    def open(self, handle: bytes, size: int) -> SimpleNamespace:
        return self._map(handle.decode(), size, "r+")

    def _map(self, name: str, size: int, mode: Any) -> SimpleNamespace:
        values = np.memmap(f"{self._folder}/{name}", np.uint8, mode, shape=size)
        return SimpleNamespace(name=name, tensor=torch.from_numpy(values))


@contextmanager
def share_of(rank: int, folder: str, quantized: bool) -> Iterator[CudaRankShare]:
    """A share on no device whose numerics nobody computes."""
    with (
        without_a_device(),
        mock.patch("relay.kernels.cuda.rank_share.DeviceMemory", return_value=FileMemory(folder, rank)),
        mock.patch.object(CudaBackend, "numerics", return_value={"name": "stand-in"}),
    ):
        backend = CudaBackend("cpu", max_rows=4, max_tokens=32, graphs=False, quantized=quantized)
        yield CudaRankShare(backend, "cpu", 2, rank, 32, 4)


def follow(link: Any, folder: str, quantized: bool) -> None:
    """The second rank of ``check_worker``, as ``relay.worker.rank_process`` lives."""
    tensor_core_model.install()
    with share_of(1, folder, quantized) as share:
        share.load(probe_program(), ProbeWeights())
        if quantized:
            check_codes(share, 1)
        calls.send(link, calls.encode(calls.Loaded(share.backend.numerics(), share.handle())))
        obey(share, link, 0, 1)


def check_codes(share: CudaRankShare, rank: int) -> None:
    """Every linear of the rank is quantised from its own part, a shorter depth included; the part of the tied head is not."""
    part = split_program(probe_program(), 2, rank)
    device = share.backend._device
    for name, cut in part.cuts.items():
        if cut.name.endswith("bias"):
            continue
        w = torch.from_numpy(packing.unpack_matrix(RankWeights(ProbeWeights(), part.cuts).matrix(name))).bfloat16()
        if cut.name == "embed":
            assert torch.equal(device.matrices[name], w)
            continue
        codes, scales = int8.quantize(w.float().numpy())
        assert np.array_equal(device.scales[name].numpy(), scales), name
        assert torch.equal(device.matrices[name], pack_codes(torch.from_numpy(codes))), name
    assert len(device.scales) == 8


def whole_logits(prompt: list[int]) -> np.ndarray:
    """Of one int8 backend on one device."""
    one = CudaBackend("cpu", max_rows=4, max_tokens=32, graphs=False, quantized=True)
    one.load(probe_program(), ProbeWeights())
    one.allocate_kv(BLOCKS, BLOCK, "bfloat16")
    batch = batch_of([(prompt, 0, [3, 1], 0)])
    batch.capture_logits = True
    one.bind_slot(0, SamplingParams(max_tokens=9), 0, prompt, [])
    one.run(0, len(probe_program().ops), batch)
    one.sample(batch)
    return one.logits()[0]


@contextmanager
def worker_of_two(quantized: bool = False) -> Iterator[RankedCudaBackend]:
    """Loaded, with room for KV; at the end both ranks must have ended well."""
    ours, theirs = socket.socketpair()
    with tempfile.TemporaryDirectory() as folder, share_of(0, folder, quantized) as share:
        process = multiprocessing.get_context("spawn").Process(target=follow, args=(theirs, folder, quantized))
        process.start()
        theirs.close()
        watch = SimpleNamespace(start=lambda: None, stop=lambda: None)
        backend = RankedCudaBackend(share, [ours], 0, watch)
        backend.load(probe_program(), ProbeWeights())
        if quantized:
            check_codes(share, 0)
        assert backend.kv_blocks_that_fit(BLOCK, 0.9) > 0
        backend.allocate_kv(BLOCKS, BLOCK, "bfloat16")
        yield backend
        backend.close()
        process.join(20)
        assert process.exitcode == 0


def check_worker(quantized: bool = False) -> None:
    """A whole worker of two ranks: loading, meeting, steps ahead, a chunk that samples nothing, KV of both ranks, the end."""
    tensor_core_model.install()
    program, stop = probe_program(), len(probe_program().ops)
    with worker_of_two(quantized) as backend:
        prompt = TOKENS
        for slot in (0, 1):
            backend.bind_slot(slot, SamplingParams(max_tokens=9, temperature=0.9, seed=4), 0, prompt, [])
        first = batch_of([(prompt[:5], 0, [3, 1], 0)])
        first.sampled_rows = first.sampled_rows[:0]
        backend.run(0, stop, first)
        second = batch_of([(prompt[5:], 5, [3, 1], 0), (prompt, 0, [7, 2], 1)])
        second.capture_logits = True
        start = 0
        assert all(met > written for met, written in zip(backend.sink_points, program.sink_points, strict=True))
        for end in [*backend.sink_points, stop]:
            backend.run(start, end, second)
            start = end
        third = batch_of([([-1], 9, [3, 1], 0), ([-1], 9, [7, 2], 1)])
        third.capture_logits = True
        backend.run(0, stop, third)
        a, b = backend.sample(second)
        logits = backend.logits().copy()
        assert a == b
        assert np.array_equal(logits[0], logits[1]), "a chunk and a whole prompt differ"
        if quantized:
            whole = whole_logits(prompt)
            error = np.linalg.norm(logits[0] - whole) / np.linalg.norm(whole)
            assert 0 < error < 0.05, f"{error}: scales of a shorter depth are others, and near"
        again = backend.sample(third)
        assert again[0] == again[1]
        assert np.array_equal(*backend.logits())
        assert backend.kv_bytes_per_token_layer() == 2 * 2 * 32 * 2
        found = []
        for table in ([3, 1], [7, 2]):
            for layer in range(2):
                raw = bytearray(9 * backend.kv_bytes_per_token_layer())
                backend.read_kv(layer, np.array(table, np.int32), 0, 9, memoryview(raw))
                backend.write_kv(layer, np.array([table[0] + 5, 4], np.int32), 0, 9, memoryview(raw))
                found.append(bytes(raw))
        assert found[:2] == found[2:], "KV differs"
        assert all(any(raw) for raw in found)
        check_frames(backend, found[0], found[1])
        moved = batch_of([([a.token_id], 9, [8, 4], 0), ([a.token_id], 9, [12, 4], 1)])
        moved.capture_logits = True
        backend.bind_slot(0, SamplingParams(max_tokens=9, temperature=0.0), 0, prompt, [a.token_id])
        backend.run(0, stop, moved)
        backend.sample(moved)
        assert np.array_equal(*backend.logits()), "KV that was moved differs"


def check_transfer(scheme: str) -> None:
    """From a worker of two ranks to another, layer by layer while the prompt is computed: frames of each rank's heads, KV equal,
    and the next step of D draws what P's would."""
    tensor_core_model.install()
    minute = 60_000_000_000
    limits = TransferLimits(512, 8192, 1 << 16, lease_ns=minute, open_lease_ns=minute, stall_ns=minute, join_bytes=2048)
    layout = Layout(2, 2, 32, "bfloat16")
    prompt, tables = [(7 * i) % 200 for i in range(40)], ([3, 1, 9], [6, 0, 11])
    events: queue.SimpleQueue[TransferEvent] = queue.SimpleQueue()
    with ExitStack() as stack:
        source, target = (stack.enter_context(worker_of_two()) for _ in range(2))
        stack.enter_context(mock.patch.object(KvTransfers, "register"))
        stack.enter_context(mock.patch.object(GridExecutor, "__call__", one_at_a_time(GridExecutor.__call__)))
        ends = []
        for name, backend in (("p", source), ("d", target)):
            wire = IpcWire("here", OneProcess("cpu"), 1 << 18) if scheme == "ipc" else ShmWire("here")
            identity = Identity(name, 1, "model", "numerics", layout)
            ends.append(WiredTransport(identity, backend, events.put, [wire], limits=limits))
            stack.callback(ends[-1].close)
        ends[1].open_receive(ReceiveOrder(7, 1, "p", 1, 5, len(prompt), tuple(tables[1])))
        ends[0].open_send(SendOrder(7, 1, "d", 1, tuple(ends[1].addresses), 5, len(prompt)))
        stop = len(probe_program().ops)
        source.bind_slot(0, SamplingParams(max_tokens=9, temperature=0.0), 0, prompt, [])
        for first, last in ((0, 17), (17, 40)):
            batch = batch_of([(prompt[first:last], first, tables[0], 0)])
            start = 0
            for layer, end in enumerate(source.sink_points):
                source.run(start, end, batch)
                ends[0].layer_written(7, layer, first, last - first, np.array(tables[0], np.int32))
                start = end
            source.run(start, stop, batch)
        (token,) = source.sample(batch)
        ends[0].send_handoff(7, Handoff(token_id=token.token_id))
        found = [events.get(timeout=120) for _ in range(2)]
        assert {type(event) for event in found} == {SendAcknowledged, ReceiveCompleted}, found
        completed = next(event for event in found if isinstance(event, ReceiveCompleted))
        assert completed.stats is not None
        assert completed.stats.scheme == scheme
        assert completed.stats.bytes == 35 * 2 * layout.token_bytes
        assert completed.stats.frames >= 4, "a frame has heads of one rank"
        size = 35 * layout.token_bytes
        for layer in range(2):
            raws = bytearray(size), bytearray(size)
            for backend, table, raw in zip((source, target), tables, raws, strict=True):
                backend.read_kv(layer, np.array(table, np.int32), 5, 35, memoryview(raw))
            assert raws[0] == raws[1], f"layer {layer} differs"
            assert any(raws[0])
        begin = batch_of([(prompt[:5], 0, tables[1], 0)])  # what was not sent, as from D's cache
        target.bind_slot(0, SamplingParams(max_tokens=9, temperature=0.0), 0, prompt, [token.token_id])
        begin.sampled_rows = begin.sampled_rows[:0]
        target.run(0, stop, begin)
        drawn = []
        for backend, table in zip((source, target), tables, strict=True):
            step = batch_of([([token.token_id], 40, table, 0)])
            step.capture_logits = True
            backend.run(0, stop, step)
            drawn.append((backend.sample(step), backend.logits().copy()))
        assert drawn[0][0] == drawn[1][0]
        assert np.array_equal(drawn[0][1], drawn[1][1])


def check_frames(backend: RankedCudaBackend, *layers: bytes) -> None:
    """Frames of all heads and of each rank's, staged to a device's memory and to the host, and collected."""
    whole = np.stack(
        [np.frombuffer(raw, np.uint8).reshape(2, 9, 2, -1) for raw in layers]
    )  # layer, K or V, token, head
    assert backend.kv_parts == ((0, 1), (1, 1))
    table, other = np.array([3, 1], np.int32), np.array([8, 4], np.int32)
    for heads in (None, *backend.kv_parts):
        first, count = heads or (0, 2)
        want = np.ascontiguousarray(whole[:, :, :, first : first + count]).tobytes()
        one = KvRange(0, 2, 0, 9, table, heads)
        host = bytearray(len(want))
        assert backend.stage([(one, memoryview(host))]).wait() == [payload_digest(want)]
        assert host == want
        area = SimpleNamespace(tensor=torch.zeros(64 + len(want), dtype=torch.uint8))
        assert backend.stage([(one, Span(area, 64, len(want)))]).wait() == [payload_digest(want)]
        assert area.tensor[64:].numpy().tobytes() == want
        back = KvRange(0, 2, 0, 9, other, heads)
        nothing = bytes(len(want))
        both = [(back, memoryview(bytearray(nothing))), (KvRange(0, 2, 0, 9, other, heads), Span(area, 64, len(want)))]
        assert backend.collect(both[:1]).wait() == [payload_digest(nothing)]
        assert backend.collect(both[1:]).wait() == [payload_digest(want)]
        again = bytearray(len(want))
        assert backend.stage([(back, memoryview(again))]).wait() == [payload_digest(want)]
        assert again == want


def together(task: Any, ranks: int) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    areas = [torch.full((1 << 15,), float("nan"), dtype=torch.bfloat16).share_memory_() for _ in range(ranks)]
    flags = [torch.zeros(MAX_RANKS, dtype=torch.int32).share_memory_() for _ in range(ranks)]
    answers = context.Queue()
    processes = [context.Process(target=task, args=(rank, ranks, areas, flags, answers)) for rank in range(ranks)]
    for process in processes:
        process.start()
    try:
        return sorted((answers.get(timeout=120) for _ in processes), key=lambda answer: answer[0])
    finally:
        for process in processes:
            process.join(5)
            process.kill()


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        check_worker(sys.argv[2:] == ["int8"])
        sys.exit()
    if sys.argv[1] in ("ipc", "shm"):
        check_transfer(sys.argv[1])
        sys.exit()
    count = int(sys.argv[1])
    sums = together(add, count)
    assert all(equal for _, _, equal in sums)
    assert all(np.array_equal(found, sums[0][1]) for _, found, _ in sums)
    if count == 2:
        logits = [found for _, found in together(live, count)]
        assert all(np.array_equal(found, logits[0]) for found in logits), "ranks hold different logits"
