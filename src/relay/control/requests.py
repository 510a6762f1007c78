"""What the gateway knows about one request and each of its choices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relay.control.attempts import Attempt
from relay.control.contract import Submission
from relay.control.transitions import CHOICE_TRANSITIONS, ChoiceState, Trigger
from relay.protocol.block_hash import UNIT_TOKENS, root_hash, unit_hashes

if TYPE_CHECKING:
    from relay.control.parking import Parked
    from relay.control.workers import Worker

TokenLogprobs = tuple[float, list[tuple[int, float]]]  # of one token: its own and the top alternatives

MAX_ATTEMPTS = 2  # live at once: one, and its hedge


class Choice:
    """One choice of one request: its committed tokens and its live attempts.

    ``attempts`` are the live ones, oldest first: one or two exactly in PLACED. ``num_attempts`` counts all that there ever were
    and is the number of the newest, so numbers only grow over the life of the choice.
    """

    __slots__ = (
        "attempts",
        "committed",
        "disagreements",
        "disputed",
        "distrusted",
        "evidence",
        "evidence_from",
        "failures",
        "full_since_ns",
        "index",
        "losses",
        "not_before_ns",
        "num_attempts",
        "park_after_ns",
        "parked",
        "refusals",
        "request",
        "reserve_after_ns",
        "resumes",
        "state",
        "transfer_failures",
        "troubled",
        "witnesses",
    )

    def __init__(self, request: Request, index: int) -> None:
        self.request = request
        self.index = index
        self.state = ChoiceState.WAITING
        self.attempts: list[Attempt] = []
        self.num_attempts = 0
        self.committed: list[int] = []
        # Why the next placement differs from the first; all cleared by a committed token.
        self.troubled = False
        self.failures = 0
        self.losses = 0  # attempts that ended with their worker
        self.transfer_failures = 0
        self.full_since_ns = 0
        self.not_before_ns = 0
        self.parked: Parked | None = None
        self.park_after_ns = 0
        self.refusals = 0  # for lack of room, in a row
        self.reserve_after_ns = 0  # until then nobody is asked for a reservation
        self.resumes = False  # the next placement computes again what one before it had
        # I4: what two attempts said of one position must be equal.
        self.evidence: list[TokenLogprobs | None] = []  # of committed positions from ``evidence_from`` on
        self.evidence_from = 0
        self.witnesses: tuple[str, ...] = ()  # workers of the attempt whose positions those are
        self.disagreements = 0
        self.disputed: int | None = None  # the next attempt begins here: its word decides
        self.distrusted: tuple[str, ...] = ()  # workers that disagreed about it

    def move(self, trigger: Trigger) -> None:
        """Take one transition of the table. An illegal one is a bug of the caller, not of a peer."""
        target = CHOICE_TRANSITIONS.get((self.state, trigger))
        if target is None:
            raise AssertionError(f"choice {self.request.id}.{self.index}: {trigger.name} in {self.state.name}")
        self.state = target

    def begin(self, decode: Worker, prefill: Worker | None, transfer: int, solo_until: int, now_ns: int) -> Attempt:
        """A new live attempt from prompt and committed tokens."""
        assert len(self.attempts) < MAX_ATTEMPTS
        self.num_attempts += 1
        attempt = Attempt(self, self.num_attempts, self.start, decode, prefill, transfer, solo_until, now_ns)
        self.attempts.append(attempt)
        return attempt

    def find(self, number: int) -> Attempt | None:
        """The live attempt of that number."""
        for attempt in self.attempts:
            if attempt.number == number:
                return attempt
        return None

    @property
    def numerics_id(self) -> str | None:
        """The numerics id this choice, with all others of its request, is pinned to; None: it has none yet."""
        return self.request.numerics_id

    @property
    def start(self) -> int:
        """Generated tokens a new attempt starts from: all that are committed, but none that is disputed."""
        return len(self.committed) if self.disputed is None else min(self.disputed, len(self.committed))

    @property
    def num_tokens(self) -> int:
        """Tokens a new attempt starts from: prompt and committed ones."""
        return len(self.request.submission.token_ids) + self.start

    def hashes(self, numerics_id: str) -> list[bytes]:
        """Unit hashes of what a new attempt starts from under one numerics id."""
        prompt = self.request.prompt_hashes(numerics_id)
        committed = self.committed[: self.start]
        if not committed:
            return prompt
        token_ids = self.request.submission.token_ids
        covered = len(prompt) * UNIT_TOKENS
        parent = prompt[-1] if prompt else root_hash(numerics_id, self.request.submission.cache_salt)
        return prompt + unit_hashes(parent, token_ids[covered:] + committed)

    def keep_evidence(self, witness: Attempt) -> None:
        """From here on another attempt than ``witness`` may speak of the same positions."""
        self.witnesses = tuple(worker.id for worker in witness.workers)
        if self.evidence_from + len(self.evidence) != len(self.committed):
            self.evidence_from, self.evidence = len(self.committed), []

    def progressed(self) -> None:
        """A token was committed: forget the troubles before it."""
        self.failures = self.losses = self.transfer_failures = self.full_since_ns = self.not_before_ns = 0
        self.refusals = self.reserve_after_ns = self.park_after_ns = 0
        suspicion = self.request.suspicion
        if self.num_tokens > suspicion.ends.get(self.index, 0):
            suspicion.clear(self.index)
        self.troubled = self.index in suspicion.ends
        self.disputed = None  # whoever began there has agreed with all that followed

    def __repr__(self) -> str:
        return f"<choice {self.request.id}.{self.index} attempt {self.num_attempts} {self.state.value}>"


class Suspicion:
    """What speaks against one request: engines that ended by themselves while they computed it.

    ``ends``: choice → the position up to which those steps were to compute it. A choice with a token behind that is innocent; when
    all that were named are, so is the request.
    """

    __slots__ = ("blames", "ends", "lingering", "unexplained")

    def __init__(self) -> None:
        self.blames = 0
        self.ends: dict[int, int] = {}
        self.lingering = 0  # engines where a step of an ended attempt may run still; nothing speaks against it yet
        self.unexplained = 0  # engines just lost under it, whose agents have not said why, and those that may hang

    @property
    def total(self) -> int:
        """Failover is faster than the agents' reports: what is not explained yet counts as a crash until it is."""
        return self.blames + self.unexplained

    def clear(self, choice: int) -> None:
        """``choice`` came past the place, or will not go there."""
        self.ends.pop(choice, None)
        if not self.ends:
            self.blames = 0

    def solo_until(self, max_blames: int) -> int:
        """Positions before this are computed alone: one more blame would end the request. 0: none."""
        return max(self.ends.values(), default=0) if self.blames >= max_blames - 1 else 0


class Request:
    """One client request: what was submitted and its choices.

    ``numerics_id``: what its answer is computed with, all choices of it: an answer names one, and its client asks with that for
    the rest. Pinned by the first token committed to any choice.
    """

    __slots__ = ("_hashes", "choices", "id", "numerics_id", "open_choices", "submission", "submitted_ns", "suspicion")

    def __init__(self, request: int, submission: Submission, now_ns: int) -> None:
        self.id = request
        self.submission = submission
        self.submitted_ns = now_ns
        self.numerics_id = submission.numerics_id or None
        self.choices = [Choice(self, index) for index in range(submission.n)]
        self.open_choices = submission.n
        self.suspicion = Suspicion()
        self._hashes: dict[str, list[bytes]] = {}

    def prompt_hashes(self, numerics_id: str) -> list[bytes]:
        """Unit hashes of the prompt, computed once for each numerics id."""
        hashes = self._hashes.get(numerics_id)
        if hashes is None:
            submission = self.submission
            hashes = unit_hashes(root_hash(numerics_id, submission.cache_salt), submission.token_ids)
            self._hashes[numerics_id] = hashes
        return hashes
