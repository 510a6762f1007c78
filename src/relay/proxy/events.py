"""Server-sent events cut out of a byte stream, sans-IO: what may be passed on whole, and the id to go on from."""

END = b"\n\n"
DONE = b"data: [DONE]"
MAX_EVENT_BYTES = 16 * 1024 * 1024


class EventBuffer:
    """``feed`` bytes as they come; it returns whole events only, so that a stream that breaks never leaves half of one."""

    def __init__(self) -> None:
        self._rest = b""
        self.last_id: bytes | None = None  # of the last whole event that had one
        self.done = False  # [DONE] was among them

    def feed(self, data: bytes) -> bytes:
        """The events that ``data`` completes, as they are. Raises ValueError for one that never ends."""
        rest = self._rest + data
        end = rest.rfind(END)
        if end < 0:
            if len(rest) > MAX_EVENT_BYTES:
                raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
            self._rest = rest
            return b""
        whole, self._rest = rest[: end + len(END)], rest[end + len(END) :]
        for event in whole.split(END):
            for line in event.split(b"\n"):
                if line.startswith(b"id:"):
                    self.last_id = line[3:].strip()
                elif line == DONE:
                    self.done = True
        return whole

    def drop(self) -> None:
        """The connection broke: what came of an event is void."""
        self._rest = b""
