"""A small streaming client: raw asyncio, no HTTP library, so that the client costs the measured machine little."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Completion:
    """One streamed completion as the client saw it. Times in seconds on the monotonic clock."""

    started: float
    arrivals: list[float] = field(default_factory=list)  # one an SSE chunk with text
    text: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    finished: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0] - self.started

    @property
    def e2e_s(self) -> float:
        return self.finished - self.started

    @property
    def tpot_s(self) -> float:
        """(E2E - TTFT) / (N - 1), over the last text chunk rather than the end of the stream."""
        return (self.arrivals[-1] - self.arrivals[0]) / max(1, self.output_tokens - 1)


async def complete(url: str, body: dict[str, Any], expected_tokens: int) -> Completion:
    """POST ``body`` to ``url``/v1/completions with streaming; ``expected_tokens`` is used where no usage is sent."""
    parts = urlsplit(url)
    payload = json.dumps({**body, "stream": True}).encode()
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 22)
    result = Completion(started=time.perf_counter())
    try:
        writer.write(
            f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n".encode()
            + payload
        )
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"{status!r} {(await reader.read(2000))!r}")
        async for raw in reader:
            line = raw.strip()
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                break
            chunk = json.loads(data)
            if "error" in chunk:
                raise RuntimeError(str(chunk["error"]))
            text = "".join(choice.get("text") or "" for choice in chunk.get("choices", []))
            if text:
                result.arrivals.append(time.perf_counter())
                result.text += text
            usage = chunk.get("usage")
            if usage:
                result.prompt_tokens = usage["prompt_tokens"]
                result.output_tokens = usage["completion_tokens"]
        result.finished = time.perf_counter()
    finally:
        writer.close()
    result.output_tokens = result.output_tokens or expected_tokens
    if not result.arrivals:
        raise RuntimeError("the stream carried no text")
    return result
