"""Between the paged cache and the canonical layout [token][kv_head][dim] of transfers: byte copies, no arithmetic.

Copies run on streams of their own, one a calling thread, and nobody waits for the device but who needs the bytes: a copy out
waits there for the event of its layer's write; a copy in is behind an event that the next step waits for. So a device that two
processes share in turns costs one turn for many frames and not one each.
"""

import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
import torch
import triton
import triton.language as tl

from relay.kernels.cuda.launch import device_errors
from relay.kernels.cuda.written import LayerEvents


@triton.jit(do_not_specialize=["first", "count"])
def copy_kernel(
    k_cache,
    v_cache,
    table,
    flat,
    first,
    count,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ELEMENTS: tl.constexpr,
    STORE: tl.constexpr,
):
    """One token: K into flat[token], V into flat[count + token], or back where STORE."""
    token = tl.program_id(0)
    position = first + token
    e = tl.arange(0, ELEMENTS)
    inside = e < KV_HEADS * DIM
    block = tl.load(table + position // BLOCK).to(tl.int64)
    place = ((block * KV_HEADS + e // DIM) * BLOCK + position % BLOCK) * DIM + e % DIM
    k_at = flat + token.to(tl.int64) * (KV_HEADS * DIM) + e
    v_at = k_at + count.to(tl.int64) * (KV_HEADS * DIM)
    if STORE:
        tl.store(k_cache + place, tl.load(k_at, mask=inside), mask=inside)
        tl.store(v_cache + place, tl.load(v_at, mask=inside), mask=inside)
    else:
        tl.store(k_at, tl.load(k_cache + place, mask=inside), mask=inside)
        tl.store(v_at, tl.load(v_cache + place, mask=inside), mask=inside)


def copy_kv(
    k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor, flat: torch.Tensor, first: int, store: bool
) -> None:
    """Positions first.. of one sequence between its blocks and ``flat`` [2, count, kv_heads * dim]; ``store``: into the cache."""
    _, kv_heads, block_size, dim = k_cache.shape
    count = flat.shape[1]
    copy_kernel[(count,)](
        k_cache,
        v_cache,
        table,
        flat,
        first,
        count,
        KV_HEADS=kv_heads,
        DIM=dim,
        BLOCK=block_size,
        ELEMENTS=triton.next_power_of_2(kv_heads * dim),
        STORE=store,
    )


SLOTS = 24  # pinned buffers of a thread that copies in
TABLES = 32  # block tables a thread keeps on the device


def pinned(size: int) -> torch.Tensor:
    """uint8 [size] of pinned host memory, its contents undefined."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class Copy:
    """A copy out of the cache that is under way. ``host`` holds the bytes where ``out`` itself is not pinned."""

    def __init__(self, event: torch.cuda.Event, host: torch.Tensor | None, out: memoryview) -> None:
        self._event, self._host, self._out = event, host, out

    @device_errors()
    def wait(self) -> None:
        """Return when the bytes are in ``out``."""
        self._event.synchronize()
        if self._host is not None:
            np.frombuffer(self._out, np.uint8)[: self._host.numel()] = self._host.numpy()


class Copies:
    """Those of the layers of one frame."""

    def __init__(self, copies: Iterable[Copy]) -> None:
        self._copies = list(copies)

    def wait(self) -> None:
        """Return when all bytes are there."""
        for copy in self._copies:
            copy.wait()


class Ordered:
    """A copy into the cache: every step and every read that is queued from now on sees it."""

    def wait(self) -> None:
        """Nothing to wait for: the source was copied before."""


class _Lane:
    """What one thread copies with."""

    def __init__(self, device: str, number: int) -> None:
        torch.cuda.set_device(device)
        self.device = device
        self.number = number
        self.stream = torch.cuda.Stream(device)
        self._tables: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._slots: list[tuple[torch.Tensor, torch.cuda.Event | None]] = []
        self._next = 0

    def table(self, block_table: np.ndarray) -> torch.Tensor:
        """``block_table`` on the device, on the lane's stream."""
        values = np.ascontiguousarray(block_table, np.int32)
        key = values.tobytes()
        found = self._tables.get(key)
        if found is None:
            found = torch.from_numpy(values.copy()).pin_memory().to(self.device, non_blocking=True)
            self._tables[key] = found
            if len(self._tables) > TABLES:
                self._tables.popitem(last=False)
        return found

    def slot(self, size: int) -> tuple[torch.Tensor, int]:
        """A pinned buffer of at least ``size`` bytes whose last copy has ended, and its number for ``used``."""
        if len(self._slots) < SLOTS:
            self._slots.append((pinned(max(size, 1 << 20)), None))
            return self._slots[-1][0], len(self._slots) - 1
        index = self._next
        self._next = (index + 1) % SLOTS
        buffer, event = self._slots[index]
        if event is not None:
            event.synchronize()
        if buffer.numel() < size:
            buffer = pinned(size)
            self._slots[index] = (buffer, None)
        return buffer, index

    def used(self, index: int, event: torch.cuda.Event) -> None:
        self._slots[index] = (self._slots[index][0], event)


class KvTransfers:
    """Copies between host memory and the cache from any thread (``relay.transfer.store.StagedStore``'s part of a backend)."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._local = threading.local()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._regions: dict[int, int] = {}  # pinned for us: address → bytes
        self._written: dict[int, torch.cuda.Event] = {}  # by lane: its last copy in
        self._unseen: dict[int, torch.cuda.Event] = {}  # of those, what steps do not wait for yet

    def register(self, region: memoryview) -> None:
        """Pin memory that copies will go to. Memory that cannot be pinned is copied to through a buffer."""
        self._lane()
        values = np.frombuffer(region, np.uint8)
        address = values.ctypes.data
        if int(torch.cuda.cudart().cudaHostRegister(address, values.nbytes, 0)) == 0:
            with self._lock:
                self._regions[address] = values.nbytes

    def unregister(self, region: memoryview) -> None:
        """No copy to ``region`` is under way any more."""
        address = np.frombuffer(region, np.uint8).ctypes.data
        with self._lock:
            known = self._regions.pop(address, 0)
        if known:
            torch.cuda.cudart().cudaHostUnregister(address)

    def stage(
        self,
        cache: tuple[torch.Tensor, torch.Tensor],
        block_table: np.ndarray,
        first: int,
        count: int,
        out: memoryview,
        layer: int,
        events: LayerEvents,
    ) -> Copy:
        """Begin to copy K then V of ``count`` positions into ``out``, once they are written."""
        k_cache, v_cache = cache
        lane = self._lane()
        for written in events.of(layer, block_table, first, count):
            lane.stream.wait_event(written)
        self._follow(lane)
        with torch.cuda.stream(lane.stream):
            flat = torch.empty(2, count, k_cache.shape[1] * k_cache.shape[3], dtype=k_cache.dtype, device=self._device)
            copy_kv(k_cache, v_cache, lane.table(block_table), flat, first, store=False)
            raw = flat.view(torch.uint8).view(-1)
            direct = self._is_pinned(out)
            host = None if direct else pinned(raw.numel())
            target = torch.frombuffer(out, dtype=torch.uint8)[: raw.numel()] if host is None else host
            target.copy_(raw, non_blocking=True)
            event = torch.cuda.Event(blocking=True)
            event.record()
        return Copy(event, host, out)

    def collect(
        self,
        cache: tuple[torch.Tensor, torch.Tensor],
        block_table: np.ndarray,
        first: int,
        count: int,
        data: memoryview,
    ) -> Ordered:
        """The inverse: ``data`` may be overwritten on return, and what is queued from then on finds it in the cache."""
        k_cache, v_cache = cache
        width = k_cache.shape[1] * k_cache.shape[3]
        size = 2 * count * width * 2
        lane = self._lane()
        buffer, index = lane.slot(size)
        buffer.numpy()[:size] = np.frombuffer(data, np.uint8, size)
        self._follow(lane)  # a copy of an aborted transfer into blocks that are this one's now may still be queued
        with torch.cuda.stream(lane.stream):
            flat = buffer[:size].to(self._device, non_blocking=True).view(k_cache.dtype).view(2, count, width)
            copy_kv(k_cache, v_cache, lane.table(block_table), flat, first, store=True)
            event = torch.cuda.Event(blocking=True)
            event.record()
        lane.used(index, event)
        with self._lock:
            self._written[lane.number] = self._unseen[lane.number] = event
        return Ordered()

    def join(self, stream: torch.cuda.Stream) -> None:
        """``stream`` waits for all that was copied in so far."""
        if not self._unseen:
            return
        with self._lock:
            events, self._unseen = list(self._unseen.values()), {}
        for event in events:
            stream.wait_event(event)

    def _follow(self, lane: _Lane) -> None:
        """What ``lane`` does next comes after all other lanes' copies into the cache."""
        with self._lock:
            self._written = {number: event for number, event in self._written.items() if not event.query()}
            others = [event for number, event in self._written.items() if number != lane.number]
        for event in others:
            lane.stream.wait_event(event)

    def _is_pinned(self, out: memoryview) -> bool:
        address = np.frombuffer(out, np.uint8).ctypes.data
        with self._lock:
            return any(start <= address and address + len(out) <= start + size for start, size in self._regions.items())

    def _lane(self) -> _Lane:
        """The calling thread's."""
        if not hasattr(self._local, "lane"):
            self._local.lane = _Lane(self._device, next(self._numbers))
        lane: _Lane = self._local.lane
        return lane
