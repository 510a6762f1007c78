"""Simulated clients: each knows the oracle's tokens and checks its own stream as it arrives (I1)."""

from dataclasses import dataclass, field, replace

from relay.control.contract import Delivery, RequestFailure, Submission
from relay.sim.backend import Oracle
from relay.sim.kernel import Violation


@dataclass(slots=True)
class Expectation:
    """What a request may end with besides finishing."""

    poison: bool = False
    faults_before: int = 0  # faults injected when it was submitted
    probe: bool = False  # sent after the healing: must finish


class Oracles:
    """Oracles by (submission, choice, numerics id), made when first needed."""

    def __init__(self, max_len: int) -> None:
        self._max_len = max_len
        self._known: dict[tuple[int, int, str], Oracle] = {}

    def get(self, request: int, submission: Submission, choice: int, numerics: str) -> Oracle:
        key = (request, choice, numerics)
        oracle = self._known.get(key)
        if oracle is None:
            oracle = Oracle(numerics, submission.token_ids, submission.params, choice, self._max_len)
            self._known[key] = oracle
        return oracle


@dataclass(slots=True)
class Client:
    """One request as its client sees it."""

    request: int
    submission: Submission
    expectation: Expectation
    oracles: Oracles
    tokens: list[list[int]] = field(default_factory=list)
    numerics: list[str] = field(default_factory=list)  # ids it may be answered with: any that exists, or what it reads
    finished: dict[int, str] = field(default_factory=dict)
    stopped: dict[int, None] = field(default_factory=dict)
    ended: bool = False
    cancelled: bool = False
    deceived: bool = False  # a machine is wrong on purpose, and the client cannot know
    failure: RequestFailure | None = None
    unread: int | None = None  # tokens written for a slow reader; None: it reads at once
    answers: list[list[int]] = field(default_factory=list)  # what the present gateway has said, by choice
    gateway: str = ""  # the present one; empty: the client is on its way to another
    returns: bool = False  # it was with a gateway before

    def begin(self, numerics: list[str]) -> None:
        self.tokens = [[] for _ in range(self.submission.n)]
        self.numerics = list(numerics)
        self.answers = [[] for _ in range(self.submission.n)]

    def lose(self, unread: int, numerics: list[str]) -> None:
        """The gateway is gone, and with it the last ``unread`` tokens of each choice, said but not read.

        Who has read nothing may be answered with any of ``numerics``.
        """
        self.gateway = ""
        for choice, seen in enumerate(self.tokens):
            lost = min(unread, len(seen)) if choice not in self.stopped else 0
            if lost:
                del seen[len(seen) - lost :]
                self.finished.pop(choice, None)
        if not self.has_read:
            self.numerics = list(numerics)

    def again(self, request: int, gateway: str) -> Submission:
        """Ask ``gateway`` for the same, with what was read so far; ``request`` is the new name."""
        self.request, self.gateway = request, gateway
        self.answers = [[] for _ in range(self.submission.n)]
        return replace(self.submission, returns=True, numerics_id=self.numerics[0] if self.has_read else "")

    @property
    def has_read(self) -> bool:
        """Whether it has any token: what those were computed with is what all others must be, of every choice."""
        return any(self.tokens)

    @property
    def open(self) -> bool:
        return not self.ended and not self.cancelled

    def deliver(self, delivery: Delivery) -> None:
        choice = delivery.choice
        name = f"request {self.request}.{choice}"
        if not self.open or choice in self.stopped:
            raise Violation("I1", f"{name}: tokens after the end")
        said, seen = self.answers[choice], self.tokens[choice]
        if delivery.position != len(said):
            raise Violation("I1", f"{name}: position {delivery.position} after {len(said)} tokens")
        said += delivery.token_ids
        read = min(len(said), len(seen))
        if said[:read] != seen[:read]:
            raise Violation("I16", f"{name}: {self.gateway} says {said}, the one before it said {seen}")
        if choice in self.finished:
            if len(said) > len(seen):
                raise Violation("I1", f"{name}: tokens after the end")
            return
        if len(said) < len(seen) or (len(said) == len(seen) and delivery.finish is None):
            return
        if delivery.numerics_id not in self.numerics:
            text = f"tokens of {delivery.numerics_id!r}, where its client expects {self.numerics}"
            raise Violation("I13", f"{name}: {text}")
        self.numerics = [delivery.numerics_id]
        seen += said[read:]
        if self.deceived:
            if delivery.finish is not None:
                self.finished[choice] = delivery.finish
            return
        oracle = self.oracles.get(self.request, self.submission, choice, delivery.numerics_id)
        if oracle.outputs[: len(seen)] != seen:
            raise Violation("I1", f"{name}: tokens {seen}, the oracle says {oracle.outputs}")
        self._check_logprobs(delivery, oracle, name)
        if delivery.finish is not None:
            if len(seen) != len(oracle.outputs) or delivery.finish != oracle.finish:
                raise Violation(
                    "I1", f"{name}: finished ({delivery.finish}) after {len(seen)} of {len(oracle.outputs)} tokens"
                )
            self.finished[choice] = delivery.finish

    def _check_logprobs(self, delivery: Delivery, oracle: Oracle, name: str) -> None:
        if self.submission.params.logprobs is None:
            return
        first, last = delivery.position, delivery.position + len(delivery.token_ids)
        given = [(logprob, list(top)) for logprob, top in delivery.logprobs or []]
        wanted = oracle.logprobs[first:last]
        if wanted != given:
            raise Violation("I1", f"{name}: logprobs {given} from position {first} on, the oracle says {wanted}")

    def end(self, failure: RequestFailure | None) -> None:
        if self.ended:
            raise Violation("I1", f"request {self.request} ended twice")
        self.ended = True
        self.failure = failure
        if failure is None and not self.cancelled:
            for choice in range(self.submission.n):
                if choice not in self.finished and choice not in self.stopped:
                    raise Violation("I1", f"request {self.request} ended, choice {choice} did not finish")
