"""A client of the HTTP API written for tests of recovery: plain sockets, one thread a request, whole answers to compare."""

import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from urllib.parse import urlsplit

PATIENCE_S = 120.0


@dataclass
class Answer:
    """One choice, as the client saw it. ``finishes`` are all finish reasons it was told."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    finishes: list[str] = field(default_factory=list)


@dataclass
class Outcome:
    """Everything that must not depend on faults."""

    status: int = 0
    answers: dict[int, Answer] = field(default_factory=dict)
    usage: dict | None = None
    ends: int = 0  # [DONE] events, or one whole body
    problems: list[str] = field(default_factory=list)

    def add(self, event: dict) -> None:
        if "error" in event:
            self.problems.append(json.dumps(event["error"]))
            return
        if event.get("usage"):
            usage = dict(event["usage"])
            usage.pop("prompt_tokens_details", None)  # says what was cached, which faults may change
            self.usage = usage
        for choice in event.get("choices", []):
            answer = self.answers.setdefault(choice["index"], Answer())
            answer.text += _text(choice)
            answer.token_ids += choice.get("token_ids") or []
            answer.logprobs += _logprobs(choice.get("logprobs"))
            if choice.get("finish_reason") is not None:
                answer.finishes.append(choice["finish_reason"])


def _text(choice: dict) -> str:
    if "text" in choice:
        return choice["text"]
    return (choice.get("delta") or choice.get("message") or {}).get("content") or ""


def _logprobs(logprobs: dict | None) -> list:
    if not logprobs:
        return []
    if "content" in logprobs:
        return list(logprobs["content"] or [])
    columns = (logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], logprobs["text_offset"])
    return [list(row) for row in zip(*columns, strict=True)]


def ask(url: str, path: str, body: dict) -> Outcome:
    """POST ``body`` and read the whole answer, streamed or not. A broken connection is a problem of the outcome."""
    outcome = Outcome()
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=PATIENCE_S)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        outcome.status = response.status
        if not body.get("stream") or response.status != 200:
            outcome.add(json.loads(response.read()))
            outcome.ends = 1
            return outcome
        for line in response:
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                outcome.ends += 1
            elif outcome.ends:
                outcome.problems.append("an event after [DONE]")
            else:
                outcome.add(json.loads(line[6:]))
    except (OSError, http.client.HTTPException, ValueError) as error:
        outcome.problems.append(f"{type(error).__name__}: {error}")
    finally:
        connection.close()
    return outcome


def check_whole(outcome: Outcome, body: dict) -> None:
    """What is right whatever the tokens are: every choice there, ended once, counted."""
    assert outcome.problems == []
    assert outcome.status == 200
    assert outcome.ends == 1
    assert sorted(outcome.answers) == list(range(body.get("n", 1)))
    for answer in outcome.answers.values():
        assert len(answer.finishes) == 1
        assert answer.finishes[0] in ("stop", "length")


def ask_all(url: str, requests: list[tuple[str, dict]]) -> list[Outcome]:
    """All at once; outcomes in the order of ``requests``."""
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda request: ask(url, *request), requests))
