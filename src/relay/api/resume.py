"""A request that is sent again: what the client's headers say, and everything that is derived from its idempotency key.

Any gateway derives the same from the same headers and body: the seed, the answer's id, and the key under which workers know the
request. So it can continue a stream it has never heard of.
"""

from dataclasses import dataclass
from hashlib import blake2b

from starlette.types import Scope

from relay.api.errors import ApiError

MAX_KEY_BYTES = 255
MAX_EVENT_ID_BYTES = 16 * 1024
RESUME_KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class Resume:
    """``digest`` names the request (empty: it has no idempotency key). ``consumed``: tokens the client has, by choice; None: it
    asks for the whole answer. ``numerics_id``: what those were computed with, where the client says so."""

    digest: bytes = b""
    consumed: tuple[int, ...] | None = None
    numerics_id: str = ""

    def of(self, purpose: str, number: int, size: int) -> bytes:
        """``size`` bytes that only this request, ``purpose`` and ``number`` give. Only with an idempotency key."""
        text = f"{purpose} {number}".encode()
        return blake2b(text, key=self.digest, digest_size=size).digest()

    def resume_key(self, model_digest: str, prompt: int) -> bytes:
        """The workers' name for one prompt of the request; empty without an idempotency key."""
        return self.of(f"resume {model_digest}", prompt, RESUME_KEY_BYTES) if self.digest else b""

    def seed(self, prompt: int) -> int:
        """0 ≤ seed < 2^64. Only with an idempotency key."""
        return int.from_bytes(self.of("seed", prompt, 8), "little")

    def consumed_of(self, choice: int) -> int:
        return self.consumed[choice] if self.consumed is not None else 0

    def check_choices(self, count: int) -> None:
        """Raises ApiError if ``consumed`` speaks of another number of choices."""
        if self.consumed is not None and len(self.consumed) != count:
            raise bad_header("Last-Event-ID", f"it names {len(self.consumed)} choices, the request has {count}")

    def check_tokens(self, choice: int, max_tokens: int) -> None:
        """Raises ApiError if the client says to have more of ``choice`` than there can be."""
        if self.consumed_of(choice) > max_tokens:
            have = self.consumed_of(choice)
            raise bad_header("Last-Event-ID", f"choice {choice} has at most {max_tokens} tokens, it says {have}")


def bad_header(name: str, why: str) -> ApiError:
    return ApiError(f"Invalid header '{name}': {why}.", param=name, code="invalid_header")


def read_resume(scope: Scope, body: bytes) -> Resume:
    """What the headers of a request say. Raises ApiError for headers that make no sense."""
    headers = dict(scope["headers"])
    key = headers.get(b"idempotency-key")
    last = headers.get(b"last-event-id")
    if key is None:
        if last is not None:
            raise ApiError(
                "A stream can be continued only with the 'Idempotency-Key' it was asked for with.",
                param="Last-Event-ID",
                code="idempotency_key_required",
            )
        return Resume()
    if not 0 < len(key) <= MAX_KEY_BYTES:
        raise bad_header("Idempotency-Key", f"it must have 1 to {MAX_KEY_BYTES} bytes")
    digest = blake2b(digest_size=32, person=b"relay-request")
    caller = headers.get(b"authorization", b"")  # two callers who chose the same key are not one
    for part in (scope["path"].encode(), caller, key, body):
        digest.update(len(part).to_bytes(8, "little") + part)
    consumed = None if last is None else _consumed(last)
    numerics_id = headers.get(b"relay-numerics-id", b"").decode("latin-1")
    return Resume(digest.digest(), consumed, numerics_id if consumed is not None and any(consumed) else "")


def _consumed(last: bytes) -> tuple[int, ...]:
    if len(last) > MAX_EVENT_ID_BYTES:
        raise bad_header("Last-Event-ID", "it is too long")
    parts = last.strip().split(b",")
    if not all(part.isdigit() and len(part) <= 9 for part in parts):
        raise bad_header(
            "Last-Event-ID", "it must be the tokens read of each choice, as in the 'id' of an event: '12' or '12,9'"
        )
    return tuple(map(int, parts))


def event_id(counts: list[int]) -> bytes:
    """The line of an event after which the client has so many tokens of each choice."""
    if len(counts) == 1:
        return b"id: %d\n" % counts[0]
    return b"id: " + ",".join(map(str, counts)).encode() + b"\n"
