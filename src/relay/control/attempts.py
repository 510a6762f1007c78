"""One placement of one choice: where it is and how far it has come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relay.control.transitions import ATTEMPT_TRANSITIONS, AttemptState, AttemptTrigger
from relay.protocol.messages import Work

if TYPE_CHECKING:
    from relay.control.requests import Choice
    from relay.control.workers import Worker


class Attempt:
    """Attempt ``number`` of ``choice``, which begins after the first ``start`` generated tokens: all that are committed, or fewer
    when it shall say some of them again.

    ``decode`` is the worker that holds (or will hold) the sequence, ``prefill`` is P while it still matters: both phases on one
    worker have none. An attempt that ended is never used again; what still arrives for it finds no live attempt of its number.
    Two live attempts of a choice share no worker.
    """

    __slots__ = (
        "changed_ns",
        "choice",
        "decode",
        "hedge",
        "hedged",
        "number",
        "parks",
        "prefill",
        "solo_until",
        "start",
        "started_ns",
        "state",
        "transfer",
    )

    def __init__(
        self,
        choice: Choice,
        number: int,
        start: int,
        decode: Worker,
        prefill: Worker | None,
        transfer: int,
        solo_until: int,
        now_ns: int,
    ) -> None:
        self.choice = choice
        self.number = number
        self.decode = decode
        self.prefill = prefill
        self.transfer = transfer  # 0 without P
        self.solo_until = solo_until
        self.start = start
        self.state = AttemptState.RUNNING if prefill is None else AttemptState.RESERVING
        self.started_ns = self.changed_ns = now_ns
        self.hedge = False  # opened beside another one that was only doubted
        self.parks = False  # ends with its first token, whose KV stays on P
        self.hedged = False  # it had its hedge: a second one would not help

    def move(self, trigger: AttemptTrigger, now_ns: int) -> None:
        """Take one transition of the table. An illegal one is a bug of the caller, not of a peer."""
        target = ATTEMPT_TRANSITIONS.get((self.state, trigger))
        if target is None:
            raise AssertionError(f"{self}: {trigger.name} in {self.state.name}")
        self.state = target
        self.changed_ns = now_ns

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Those it is booked on: P first."""
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)

    @property
    def doubted(self) -> bool:
        """Whether anything says that it may be on a bad worker."""
        return any(worker.doubted for worker in self.workers)

    def on(self, worker: Worker) -> bool:
        return worker is self.decode or worker is self.prefill

    @property
    def num_tokens(self) -> int:
        """Tokens in ``work``."""
        return len(self.choice.request.submission.token_ids) + self.start

    def work(self) -> Work:
        """What an engine is sent: the same for D and P, whatever was committed in between."""
        request = self.choice.request
        submission = request.submission
        return Work(
            request=request.id,
            choice=self.choice.index,
            attempt=self.number,
            token_ids=submission.token_ids + self.choice.committed[: self.start],
            num_prompt=len(submission.token_ids),
            params=submission.params,
            cache_salt=submission.cache_salt,
            capture=submission.capture,
            resume_key=submission.resume_key,
            solo_until=self.solo_until,
        )

    def __repr__(self) -> str:
        choice = self.choice
        return f"<attempt {choice.request.id}.{choice.index}.{self.number} {self.state.value}>"
