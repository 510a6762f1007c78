"""Between the paged cache and the canonical layout of transfers: byte copies on streams of their own, no arithmetic.

Copies run on a stream a calling thread, and nobody waits for the device but who needs the bytes: a copy out waits there for the
events of its layers' writes; a copy in is behind an event that the next step waits for. Any number of frames are gathered by one
kernel, which also takes their digests, into memory of another device or process, or into a buffer that is copied to the host, and
scattered by one: a launch costs half a millisecond of Python, and where two processes share a device in turns, a turn.
"""

import itertools
import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from relay.kernels.cuda.kv_move import Plan, move, shared_heads
from relay.kernels.cuda.launch import device_errors
from relay.kernels.cuda.written import LayerEvents
from relay.kernels.kv_frames import KvRange, Place, Span, folded

FRAMES = 12  # pinned buffers of a thread for frames out of memory that is not pinned
PLANS = 24  # and buffers for plans
PLAN_WORDS = 1 << 12  # of such a buffer, at least


Pool = tuple[int, torch.Tensor]
"""(first head, cache): [layers, K or V, blocks, heads, tokens, dim]; of this device or of another one that it reaches."""


def pinned(size: int) -> torch.Tensor:
    """uint8 [size] of pinned host memory, its contents undefined."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class _Sums:
    """Digests of a launch's frames, in pinned memory that another launch will use: to be read once the copy there has ended."""

    def __init__(self, where: torch.Tensor) -> None:
        self._where: torch.Tensor | None = where
        self._values: list[int] = []

    def read(self) -> list[int]:
        if self._where is not None:
            self._values, self._where = self._where.tolist(), None
        return self._values


class _Launch(NamedTuple):
    """Frames in one memory of a device: it, their numbers, where they begin, and where they are copied on to, if they are."""

    flat: torch.Tensor
    numbers: list[int]
    offsets: list[int]
    targets: list[torch.Tensor]


class _PlanBuffer:
    """Memory for a plan here and on the device. Its first words come back as the sums."""

    def __init__(self, device: str, words: int) -> None:
        self.host = pinned(4 * words).view(torch.int32)
        self.array = self.host.numpy()
        self.device = torch.empty(words, dtype=torch.int32, device=device)
        self.event: torch.cuda.Event | None = None
        self.sums: _Sums | None = None


class _PlanBuffers:
    """Used in turn, each again when its last launch has ended."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._buffers: list[_PlanBuffer] = []
        self._next = 0

    def take(self, words: int) -> _PlanBuffer:
        """One of at least ``words``."""
        if len(self._buffers) < PLANS:
            self._buffers.append(_PlanBuffer(self._device, max(words, PLAN_WORDS)))
            return self._buffers[-1]
        index = self._next
        self._next = (index + 1) % PLANS
        buffer = self._buffers[index]
        if buffer.event is not None and buffer.sums is not None:
            buffer.event.synchronize()
            buffer.sums.read()
        if len(buffer.array) < words:
            buffer = self._buffers[index] = _PlanBuffer(self._device, words)
        return buffer


class Moving:
    """Copies of frames that are under way."""

    def __init__(
        self,
        event: torch.cuda.Event,
        sums: list[tuple[list[int], _Sums]],
        unpinned: Sequence[tuple[torch.Tensor, memoryview]] = (),
    ) -> None:
        """``sums``: (numbers of frames, where their sums will be on the host) of each launch; ``event`` is behind the last.
        ``unpinned``: bytes of frames whose own memory is not pinned, and that memory."""
        self._event, self._sums, self._unpinned = event, sums, unpinned

    def ended(self) -> bool:
        try:
            return bool(self._event.query())
        except Exception:  # ``wait`` says what is wrong
            return True

    @device_errors()
    def wait(self) -> list[int]:
        """Return when the bytes are where they should be: the digest of each frame."""
        self._event.synchronize()
        for host, out in self._unpinned:
            np.frombuffer(out, np.uint8)[: host.numel()] = host.numpy()
        found: dict[int, int] = {}
        for frames, totals in self._sums:  # of a frame with heads in several pools there are several
            for frame, total in zip(frames, totals.read(), strict=True):
                found[frame] = found.get(frame, 0) + total
        return [folded(found[frame] & 0xFFFFFFFFFFFFFFFF) for frame in range(len(found))]


class _Slots:
    """Pinned buffers that are used again when their last copy has ended."""

    def __init__(self, count: int, least_bytes: int) -> None:
        self._count, self._least = count, least_bytes
        self._slots: list[tuple[torch.Tensor, torch.cuda.Event | None]] = []
        self._next = 0

    def take(self, size: int) -> tuple[torch.Tensor, int]:
        """A buffer of at least ``size`` bytes, and its number for ``used``."""
        if len(self._slots) < self._count:
            self._slots.append((pinned(max(size, self._least)), None))
            return self._slots[-1][0], len(self._slots) - 1
        index = self._next
        self._next = (index + 1) % self._count
        buffer, event = self._slots[index]
        if event is not None:
            event.synchronize()
        if buffer.numel() < size:
            buffer = pinned(size)
            self._slots[index] = (buffer, None)
        return buffer, index

    def used(self, index: int, event: torch.cuda.Event) -> None:
        self._slots[index] = (self._slots[index][0], event)


class _Lane:
    """What one thread copies with."""

    def __init__(self, device: str, number: int) -> None:
        torch.cuda.set_device(device)
        self.number = number
        # First where a multiprocessor is free: a prompt's products take all of them.
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.frames = _Slots(FRAMES, 1 << 20)
        self.plans = _PlanBuffers(device)


class KvTransfers:
    """Copies between frames and the cache from any thread (``relay.transfer.store.StagedStore``'s part of a backend)."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._local = threading.local()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._pools: list[Pool] = []
        self._heads = 0
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

    def allocate(self, size: int) -> memoryview:
        """Pinned memory that copies may go to, as long as it is referenced."""
        self._lane()  # sets the thread's device
        values = pinned(size).numpy()
        address = values.ctypes.data
        with self._lock:
            self._regions[address] = size
        weakref.finalize(values, self._regions.pop, address, None)
        return memoryview(values)

    def use(self, pools: Sequence[Pool]) -> None:
        """Copies are from and to these from now on: one after the other they have all heads."""
        self._pools = list(pools)
        self._heads = sum(kv.shape[3] for _, kv in pools)

    def frame_bytes(self, one: KvRange) -> int:
        """Of its payload."""
        heads = one.heads[1] if one.heads is not None else self._heads
        return one.layers * 2 * one.count * heads * self._pools[0][1].shape[5] * 2

    def stage(self, frames: Sequence[tuple[KvRange, Place]], events: LayerEvents) -> Moving:
        """Begin to copy the frames into their places, once their layers are written."""
        lane = self._lane()
        ranges = [one for one, _ in frames]
        for written in events.of(ranges):
            lane.stream.wait_event(written)
        self._follow(lane)
        launches, hosts = _by_memory(frames)
        unpinned: list[tuple[torch.Tensor, memoryview]] = []
        with torch.cuda.stream(lane.stream):
            if hosts:
                launches.append(self._to_host(ranges, hosts, unpinned))
            sums, event = self._move_all(lane, ranges, launches, store=False)
        return Moving(event, sums, unpinned)

    def collect(self, frames: Sequence[tuple[KvRange, Place]]) -> Moving:
        """The inverse, for any number of frames: what is queued from now on finds them in the cache.

        Their memory must stay as it is until ``wait``.
        """
        lane = self._lane()
        self._follow(lane)  # a copy of an aborted transfer into blocks that are this one's now may still be queued
        launches, hosts = _by_memory(frames)
        ranges = [one for one, _ in frames]
        buffers: list[int] = []
        with torch.cuda.stream(lane.stream):
            if hosts:
                launches.append(self._to_device(lane, ranges, hosts, buffers))
            sums, event = self._move_all(lane, ranges, launches, store=True)
            for index in buffers:
                lane.frames.used(index, event)
        with self._lock:
            self._written[lane.number] = self._unseen[lane.number] = event
        return Moving(event, sums)

    def _side_by_side(
        self, ranges: Sequence[KvRange], hosts: list[tuple[int, memoryview]]
    ) -> tuple[torch.Tensor, list[int], list[int]]:
        """Memory on the device for the frames of ``hosts``, their sizes, and where they begin."""
        sizes = [self.frame_bytes(ranges[number]) for number, _ in hosts]
        offsets = [0]
        for size in sizes:
            offsets.append(offsets[-1] + -(-size // 16) * 16)
        return torch.empty(offsets.pop(), dtype=torch.uint8, device=self._device), sizes, offsets

    def _to_host(
        self,
        ranges: Sequence[KvRange],
        hosts: list[tuple[int, memoryview]],
        unpinned: list[tuple[torch.Tensor, memoryview]],
    ) -> _Launch:
        """Frames that are to be copied on to host memory; appends to ``unpinned`` those that wait in a buffer of their own."""
        flat, sizes, offsets = self._side_by_side(ranges, hosts)
        targets = []
        for (_, place), size in zip(hosts, sizes, strict=True):
            if self._is_pinned(place):
                targets.append(torch.frombuffer(place, dtype=torch.uint8)[:size])
            else:
                targets.append(pinned(size))
                unpinned.append((targets[-1], place))
        return _Launch(flat, [number for number, _ in hosts], offsets, targets)

    def _to_device(
        self, lane: _Lane, ranges: Sequence[KvRange], hosts: list[tuple[int, memoryview]], buffers: list[int]
    ) -> _Launch:
        """Frames that were in host memory; appends to ``buffers`` what they went through."""
        flat, sizes, offsets = self._side_by_side(ranges, hosts)
        for (_, data), size, at in zip(hosts, sizes, offsets, strict=True):
            if self._is_pinned(data):
                source = torch.frombuffer(data, dtype=torch.uint8)[:size]
            else:
                buffer, index = lane.frames.take(size)
                buffer.numpy()[:size] = np.frombuffer(data, np.uint8, size)
                buffers.append(index)
                source = buffer[:size]
            flat[at : at + size].copy_(source, non_blocking=True)
            if len(buffers) == FRAMES:  # none may be taken twice before it was used
                event = torch.cuda.Event(blocking=True)
                event.record()
                while buffers:
                    lane.frames.used(buffers.pop(), event)
        return _Launch(flat, [number for number, _ in hosts], offsets, [])

    def _move_all(
        self, lane: _Lane, ranges: Sequence[KvRange], launches: list[_Launch], *, store: bool
    ) -> tuple[list[tuple[list[int], _Sums]], torch.cuda.Event]:
        """Queue ``launches``, at least one: the frames of each and what their sums will be, the event behind the last."""
        sums: list[tuple[list[int], _Sums]] = []
        for launch in launches:
            found, event = self._move(lane, [ranges[number] for number in launch.numbers], launch, store=store)
            sums += [([launch.numbers[one] for one in mine], totals) for mine, totals in found]
        return sums, event

    def _move(
        self, lane: _Lane, ranges: list[KvRange], launch: _Launch, *, store: bool
    ) -> tuple[list[tuple[list[int], _Sums]], torch.cuda.Event]:
        """One kernel a pool that has heads of a frame, and behind them the copies to the targets: the ranges of each kernel and
        what their sums will be, and the event behind the last."""
        flat, offsets = launch.flat, launch.offsets
        launched: list[tuple[list[int], _PlanBuffer, int]] = []
        for first_head, kv in self._pools:
            heads = kv.shape[3]
            mine = [number for number, one in enumerate(ranges) if shared_heads(one, first_head, heads, self._heads)]
            if not mine:
                continue
            these, at = [ranges[number] for number in mine], [offsets[number] for number in mine]
            plan = Plan(these, at, kv.shape[4], heads, first_head, self._heads)
            size = len(plan.words)
            buffer = lane.plans.take(size)
            buffer.array[:size] = plan.words
            words = buffer.device[:size]
            words.copy_(buffer.host[:size], non_blocking=True)
            move(kv, flat, plan, words, store=store)
            launched.append((mine, buffer, 2 * plan.frames))
        for offset, target in zip(offsets, launch.targets, strict=False):  # all have one, or none
            target.copy_(flat[offset : offset + target.numel()], non_blocking=True)
        for _, buffer, words_of_sums in launched:
            buffer.host[:words_of_sums].copy_(buffer.device[:words_of_sums], non_blocking=True)
        event = torch.cuda.Event(blocking=True)
        event.record()
        sums: list[tuple[list[int], _Sums]] = []
        for mine, buffer, words_of_sums in launched:
            buffer.event, buffer.sums = event, _Sums(buffer.host[:words_of_sums].view(torch.int64))
            sums.append((mine, buffer.sums))
        return sums, event

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
            for number in [one for one in self._written if one != lane.number and self._written[one].query()]:
                del self._written[number]
            others = [event for number, event in self._written.items() if number != lane.number]
        for event in others:
            lane.stream.wait_event(event)

    def _is_pinned(self, out: memoryview) -> bool:
        address = np.frombuffer(out, np.uint8).ctypes.data
        with self._lock:
            return any(
                start <= address and address + len(out) <= start + size for start, size in list(self._regions.items())
            )

    def _lane(self) -> _Lane:
        """The calling thread's."""
        if not hasattr(self._local, "lane"):
            self._local.lane = _Lane(self._device, next(self._numbers))
        lane: _Lane = self._local.lane
        return lane


def _by_memory(frames: Sequence[tuple[KvRange, Place]]) -> tuple[list[_Launch], list[tuple[int, memoryview]]]:
    """The frames that lie on devices, by their memory, and the others with their numbers."""
    spans: dict[int, _Launch] = {}
    hosts: list[tuple[int, memoryview]] = []
    for number, (_, place) in enumerate(frames):
        if isinstance(place, Span):
            group = spans.setdefault(id(place.region), _Launch(place.region.tensor, [], [], []))
            group.numbers.append(number)
            group.offsets.append(place.offset)
        else:
            hosts.append((number, place))
    return list(spans.values()), hosts
