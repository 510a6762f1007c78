"""Reads a streamed answer and checks its framing."""

import json
from typing import Any

import httpx


def stream(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream, framing checked: events of an id and one data line, nothing after [DONE]."""
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        raw = b"".join(response.iter_raw()).decode("utf-8", "strict")
        assert response.status_code == 200, raw
        assert response.headers["content-type"].startswith("text/event-stream")
    assert raw.endswith("data: [DONE]\n\n")
    events = raw.removesuffix("data: [DONE]\n\n").split("\n\n")
    assert events.pop() == ""
    lines = [event.split("\n") for event in events]
    assert all(len(event) == 2 and event[0].startswith("id: ") and event[1].startswith("data: ") for event in lines)
    return [json.loads(data.removeprefix("data: ")) for _, data in lines]


def joined(chunks: list[dict[str, Any]]) -> dict[int, str]:
    """Text by choice index."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            text = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + text
    return texts


def finish_reasons(chunks: list[dict[str, Any]]) -> dict[int, list[str]]:
    """Finish reasons by choice index."""
    reasons: dict[int, list[str]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert "finish_reason" in choice
            if choice["finish_reason"]:
                reasons.setdefault(choice["index"], []).append(choice["finish_reason"])
    return reasons
