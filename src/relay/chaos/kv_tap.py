"""Reads the frames of a KV connection as they pass: headers alone, payloads are only counted."""

from collections.abc import Callable

from relay.chaos.pipe import Injury, Pipe
from relay.transfer.checksum import crc32c
from relay.transfer.frame import HEADER_BYTES, FrameError, Kind, parse

OnFrame = Callable[[int, bool, Pipe, str], Injury | None]
"""(transfer, whether it is the handoff, the pipe it goes through, the target's worker id) → what to do from this frame on."""


class KvTap:
    """One connection from P (who dialled) to D."""

    def __init__(self, on_frame: OnFrame, target: str) -> None:
        self._on_frame = on_frame
        self._target = target
        self._header = bytearray()
        self._payload_left = 0
        self._blind = False  # what passes is no frame (any more): only bytes are passed on
        self.pipe: Pipe | None = None

    def up(self, data: bytes) -> tuple[bytes, Injury | None]:
        offset = 0
        injury: Injury | None = None
        while offset < len(data) and not self._blind:
            if self._payload_left:
                step = min(self._payload_left, len(data) - offset)
                self._payload_left -= step
                offset += step
                continue
            step = min(HEADER_BYTES - len(self._header), len(data) - offset)
            self._header += data[offset : offset + step]
            offset += step
            if len(self._header) == HEADER_BYTES:
                found = self._frame()
                if found is not None and injury is None:
                    injury = Injury(found.harm, min(offset + found.offset, len(data)), found.seconds, found.bit)
        return data, injury

    def down(self, data: bytes) -> tuple[bytes, Injury | None]:
        return data, None

    def _frame(self) -> Injury | None:
        try:
            header, _ = parse(bytes(self._header), crc32c)
        except FrameError:
            self._blind = True
            return None
        finally:
            self._header.clear()
        self._payload_left = header.payload_bytes
        if header.kind not in (Kind.KV, Kind.HANDOFF) or self.pipe is None:
            return None
        return self._on_frame(header.transfer, header.kind is Kind.HANDOFF, self.pipe, self._target)
