"""What the gateway knows about one request and each of its choices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relay.control.contract import Submission
from relay.control.transitions import CHOICE_TRANSITIONS, ChoiceState, Trigger
from relay.protocol.block_hash import UNIT_TOKENS, root_hash, unit_hashes
from relay.protocol.messages import TokenEntry, Work

if TYPE_CHECKING:
    from relay.control.workers import Worker

MAX_AHEAD_TOKENS = 256


class Choice:
    """One choice of one request: its committed tokens and the one live attempt.

    ``attempt`` numbers placements from 1 and is 0 before the first. ``prefill`` is P while it still matters, ``decode`` the worker
    that holds (or will hold) the sequence; both are None exactly in WAITING and ENDED.
    """

    __slots__ = (
        "ahead",
        "attempt",
        "blame_mark",
        "blames",
        "changed_ns",
        "committed",
        "decode",
        "failures",
        "full_since_ns",
        "index",
        "losses",
        "not_before_ns",
        "numerics_id",
        "prefill",
        "request",
        "state",
        "transfer",
        "transfer_failures",
        "troubled",
        "unexplained",
    )

    def __init__(self, request: Request, index: int, now_ns: int) -> None:
        self.request = request
        self.index = index
        self.state = ChoiceState.WAITING
        self.attempt = 0
        self.prefill: Worker | None = None
        self.decode: Worker | None = None
        self.transfer = 0
        self.committed: list[int] = []
        self.ahead: list[TokenEntry] = []  # of D, while P's first token is still on its way here
        self.changed_ns = now_ns  # of the last state change
        self.numerics_id: str | None = None  # pinned by the first committed token
        # Why the next placement differs from the first; all cleared by a committed token.
        self.troubled = False
        self.failures = 0
        self.losses = 0  # attempts that ended with their worker
        self.transfer_failures = 0
        self.blames = 0
        self.blame_mark = 0
        self.unexplained = 0  # engines just lost under it, whose agents have not said yet whether they crashed
        self.full_since_ns = 0
        self.not_before_ns = 0

    def move(self, trigger: Trigger, now_ns: int) -> None:
        """Take one transition of the table. An illegal one is a bug of the caller, not of a peer."""
        target = CHOICE_TRANSITIONS.get((self.state, trigger))
        if target is None:
            raise AssertionError(f"choice {self.request.id}.{self.index}: {trigger.name} in {self.state.name}")
        self.state = target
        self.changed_ns = now_ns

    @property
    def num_tokens(self) -> int:
        """Tokens a new attempt starts from: prompt and committed ones."""
        return len(self.request.submission.token_ids) + len(self.committed)

    def work(self) -> Work:
        """The message body of the current attempt."""
        submission = self.request.submission
        return Work(
            request=self.request.id,
            choice=self.index,
            attempt=self.attempt,
            token_ids=submission.token_ids + self.committed,
            num_prompt=len(submission.token_ids),
            params=submission.params,
            cache_salt=submission.cache_salt,
            capture=submission.capture,
        )

    def hashes(self, numerics_id: str) -> list[bytes]:
        """Unit hashes of prompt and committed tokens under one numerics id."""
        prompt = self.request.prompt_hashes(numerics_id)
        if not self.committed:
            return prompt
        token_ids = self.request.submission.token_ids
        covered = len(prompt) * UNIT_TOKENS
        parent = prompt[-1] if prompt else root_hash(numerics_id, self.request.submission.cache_salt)
        return prompt + unit_hashes(parent, token_ids[covered:] + self.committed)

    def progressed(self) -> None:
        """A token was committed: forget the troubles before it."""
        self.failures = self.losses = self.transfer_failures = self.full_since_ns = self.not_before_ns = 0
        if len(self.committed) > self.blame_mark:
            self.blames = 0
        self.troubled = self.blames > 0

    def __repr__(self) -> str:
        return f"<choice {self.request.id}.{self.index} attempt {self.attempt} {self.state.value}>"


class Request:
    """One client request: what was submitted and its choices."""

    __slots__ = ("_hashes", "choices", "id", "open_choices", "submission", "submitted_ns")

    def __init__(self, request: int, submission: Submission, now_ns: int) -> None:
        self.id = request
        self.submission = submission
        self.submitted_ns = now_ns
        self.choices = [Choice(self, index, now_ns) for index in range(submission.n)]
        self.open_choices = submission.n
        self._hashes: dict[str, list[bytes]] = {}

    def prompt_hashes(self, numerics_id: str) -> list[bytes]:
        """Unit hashes of the prompt, computed once for each numerics id."""
        hashes = self._hashes.get(numerics_id)
        if hashes is None:
            submission = self.submission
            hashes = unit_hashes(root_hash(numerics_id, submission.cache_salt), submission.token_ids)
            self._hashes[numerics_id] = hashes
        return hashes
