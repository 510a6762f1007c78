"""What the machine can do at best: copies without a protocol, over regions as large as the transfer and in frames as large as its.

``pair``: one process copies frames into shared memory, another out of it, at the same time: what shared memory could reach.
``socket``: one writes frames to a TCP socket, the other reads them and copies them to their place. Both with and without CRC32C.
"""

import mmap
import os
import socket

import numpy as np

from relay.transfer.frame import Checksum

SLOTS = 4  # frames under way between the two processes


class PairEnd:
    """One end of the two pipelined copies: a memfd of ``SLOTS`` frames and two counters, by descriptor."""

    def __init__(self, memory: int, filled: int, emptied: int, checksum: Checksum | None) -> None:
        self._bytes = np.frombuffer(mmap.mmap(memory, os.fstat(memory).st_size), np.uint8)
        self._filled = filled
        self._emptied = emptied
        self._checksum = checksum

    def send(self, source: np.ndarray, frame_bytes: int) -> None:
        """Copy ``source``, uint8 of whole frames, into the slots."""
        for index in range(len(source) // frame_bytes):
            if index >= SLOTS:
                os.eventfd_read(self._emptied)
            slot = self._slot(index, frame_bytes)
            np.copyto(slot, source[index * frame_bytes : (index + 1) * frame_bytes])
            self._check(slot)
            os.eventfd_write(self._filled, 1)
        for _ in range(min(SLOTS, len(source) // frame_bytes)):
            os.eventfd_read(self._emptied)  # the next run begins with empty slots

    def receive(self, frames: int, frame_bytes: int) -> None:
        target = region(frames * frame_bytes)
        for index in range(frames):
            os.eventfd_read(self._filled)
            slot = self._slot(index, frame_bytes)
            self._check(slot)
            np.copyto(target[index * frame_bytes : (index + 1) * frame_bytes], slot)
            os.eventfd_write(self._emptied, 1)

    def _slot(self, index: int, frame_bytes: int) -> np.ndarray:
        begin = index % SLOTS * frame_bytes
        return self._bytes[begin : begin + frame_bytes]

    def _check(self, data: np.ndarray) -> None:
        if self._checksum is not None:
            self._checksum(data.data, 0)


def make_pair(frame_bytes: int) -> tuple[int, int, int]:
    """(memory, filled, emptied) for ``PairEnd``; the counters are semaphores."""
    memory = os.memfd_create("relay-ceiling")
    os.ftruncate(memory, SLOTS * frame_bytes)
    for number in (counters := [os.eventfd(0, os.EFD_SEMAPHORE) for _ in range(2)]):
        os.set_inheritable(number, True)
    os.set_inheritable(memory, True)
    return memory, counters[0], counters[1]


_regions: dict[int, np.ndarray] = {}


def region(size: int) -> np.ndarray:
    """uint8 [size], touched before it is used, and kept."""
    if size not in _regions:
        _regions.clear()
        _regions[size] = np.ones(size, np.uint8)
    return _regions[size]


def memcpy(source: np.ndarray, frame_bytes: int, checksum: Checksum | None) -> None:
    """One process, one copy."""
    target = np.empty(frame_bytes, np.uint8)
    for begin in range(0, len(source), frame_bytes):
        np.copyto(target, source[begin : begin + frame_bytes])
        if checksum is not None:
            checksum(target.data, 0)


def send_socket(sock: socket.socket, source: np.ndarray, frame_bytes: int, checksum: Checksum | None) -> None:
    """Frame by frame, through one buffer as a pool's bytes must go."""
    buffer = np.empty(frame_bytes, np.uint8)
    for begin in range(0, len(source), frame_bytes):
        np.copyto(buffer, source[begin : begin + frame_bytes])
        if checksum is not None:
            checksum(buffer.data, 0)
        sock.sendall(buffer.data)


def receive_socket(sock: socket.socket, frames: int, frame_bytes: int, checksum: Checksum | None) -> None:
    target = region(frames * frame_bytes)
    buffer = np.empty(frame_bytes, np.uint8)
    for index in range(frames):
        received = 0
        while received < frame_bytes:
            received += sock.recv_into(buffer.data[received:])
        if checksum is not None:
            checksum(buffer.data, 0)
        np.copyto(target[index * frame_bytes : (index + 1) * frame_bytes], buffer)
