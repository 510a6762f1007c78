"""Rows of the machine's ceilings, measured between the same two processes as the transfers."""

import os
import socket
import statistics
import time
from typing import Any

from relay.bench.ceilings import PairEnd, make_pair, memcpy, region, send_socket
from relay.bench.kv_source import TargetProcess
from relay.bench.kv_target import Command
from relay.transfer.frame import Checksum

CEILINGS = ("memcpy", "two memcpys", "plain socket")
CEILING_OF = {"shm": "two memcpys", "tcp": "plain socket"}
FRAME_BYTES = 384 << 10  # a chunk of 256 tokens of one layer of SmolLM2 in fp32


class Ceilings:
    """``descriptors`` go to the target process when it starts."""

    def __init__(self) -> None:
        self.descriptors = make_pair(FRAME_BYTES)

    def measure(self, target: TargetProcess, size: int, runs: int, checksum: Checksum) -> list[dict[str, Any]]:
        """GB/s of copying about ``size`` bytes, with and without the checksum; median of ``runs`` after one to warm up."""
        rows = []
        for name in CEILINGS:
            for checked in (False, True):
                rates = [self.once(name, target, size, checksum if checked else None) for _ in range(runs + 1)][1:]
                rows.append({"ceiling": name, "checksum": checked, "bytes": size, "gb_s": statistics.median(rates)})
        return rows

    def once(self, name: str, target: TargetProcess, size: int, checksum: Checksum | None) -> float:
        """GB/s of copying ``size`` bytes, in whole frames, by the means of ceiling ``name``."""
        frames = max(1, size // FRAME_BYTES)
        return frames * FRAME_BYTES / self._seconds(name, target, frames, checksum) / 1e9

    def _seconds(self, name: str, target: TargetProcess, frames: int, checksum: Checksum | None) -> float:
        source = region(frames * FRAME_BYTES)
        command = Command("", frames=frames, frame_bytes=FRAME_BYTES, checksum=checksum is not None)
        if name == "memcpy":
            begin_ns = time.monotonic_ns()
            memcpy(source, FRAME_BYTES, checksum)
            return (time.monotonic_ns() - begin_ns) * 1e-9
        if name == "two memcpys":
            command.name, command.descriptors = "pair", list(self.descriptors)
            target.tell(command)
            target.wait("started")
            begin_ns = time.monotonic_ns()
            PairEnd(*self.descriptors, checksum).send(source, FRAME_BYTES)
            return (target.wait("done").at_ns - begin_ns) * 1e-9
        command.name = "socket"
        target.tell(command)
        port = int(target.wait("listening").addresses[0])
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            target.wait("started")
            begin_ns = time.monotonic_ns()
            send_socket(sock, source, FRAME_BYTES, checksum)
            return (target.wait("done").at_ns - begin_ns) * 1e-9

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
