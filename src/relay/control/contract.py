"""What the API layer asks of the control plane, and what it gets back.

The API builds a ``Submission`` (validated, tokenized, seed fixed), hands it to ``Gateway.submit`` with a ``TokenSink`` and
then only receives callbacks on the event loop: one ``tokens`` call a step and choice, no task switch a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from relay.protocol.messages import FinishReason
from relay.protocol.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The one model this gateway serves."""

    name: str
    model_digest: str
    numerics_id: str  # also the ``system_fingerprint``
    vocab_size: int
    max_model_len: int
    created: int  # unix seconds
    eos_token_ids: tuple[int, ...]


@dataclass(slots=True)
class Submission:
    """One prompt to be completed ``n`` times. ``deadline_ns`` is on the monotonic clock, None for none."""

    token_ids: list[int]
    params: SamplingParams
    n: int = 1
    cache_salt: str = ""
    capture: bool = False
    deadline_ns: int | None = None
    resume_key: bytes = b""  # equal wherever and whenever the client sends this prompt again; empty: it cannot
    returns: bool = False  # the client was answered before, by a gateway that may be gone
    numerics_id: str = ""  # what the client has of it was computed with these numerics; empty: it has nothing


@dataclass(slots=True)
class Delivery:
    """Newly committed tokens of one choice; ``position`` is the number committed before. Delivered exactly once, in order."""

    choice: int
    position: int
    token_ids: list[int]
    finish: FinishReason | None = None
    logprobs: list[tuple[float, list[tuple[int, float]]]] | None = None
    cached_tokens: int = 0  # of the first attempt, on the first delivery
    logit_digests: list[bytes] | None = None
    kv_digests: list[bytes] | None = None
    numerics_id: str = ""  # what these and all other tokens of the request were computed with


@dataclass(slots=True)
class RequestFailure:
    """The request ended without finishing: HTTP status, OpenAI ``code`` and one line for the user."""

    status: int
    code: str
    message: str
    retry_after_s: int | None = None


class TokenSink(Protocol):
    """Receives one request's tokens, on the event loop. Must not block or raise."""

    def tokens(self, delivery: Delivery) -> None: ...

    def failed(self, failure: RequestFailure) -> None:
        """At most once; nothing follows it."""
        ...


class SubmissionRefused(Exception):
    """``submit`` did not take the request; ``failure`` says why (429 queue_full, 503 no_workers, 400 can never fit)."""

    def __init__(self, failure: RequestFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Gateway(Protocol):
    """The control plane as the API sees it."""

    @property
    def model(self) -> ModelInfo: ...

    def submit(self, submission: Submission, sink: TokenSink) -> int:
        """Queue a request; returns its id. Raises SubmissionRefused."""
        ...

    def cancel(self, request: int) -> None:
        """The client is gone or needs no more: stop all choices everywhere. Idempotent."""
        ...

    def finish_choice(self, request: int, choice: int) -> None:
        """A stop string matched in the text path: stop this choice; overshoot tokens are dropped, not delivered."""
        ...

    def leave(self, workers: Sequence[str], *, stay_out: bool = False, rolling: bool = False) -> str:
        """Drain ``workers`` (empty: all) and restart them, or keep them out; ``rolling``: one at a time. Returns why not, or ""."""
        ...

    def ready(self) -> bool:
        """A request sent now would be served."""
        ...

    def health(self) -> tuple[bool, str]:
        """(healthy, one line why not): false when a worker has work and makes no progress."""
        ...

    def status(self) -> dict[str, object]:
        """What ``relay status --json`` prints."""
        ...

    def metrics(self) -> Sequence[tuple[str, dict[str, str], float]]:
        """(name, labels, value) samples of the control plane and its workers, for /metrics."""
        ...
