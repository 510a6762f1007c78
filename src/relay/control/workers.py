"""What the gateway knows about one worker: its life, its connections, its load and its prefix cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from relay.config import MILLISECOND
from relay.control.events import LauncherExited
from relay.control.refusals import Refusals
from relay.control.transitions import WORKER_TRANSITIONS, AttemptState, WorkerState, WorkerTrigger
from relay.ids import WorkerKey
from relay.protocol.messages import CacheChanged, EngineExited, Heartbeat, Hello, Load, Role

if TYPE_CHECKING:
    from relay.control.attempts import Attempt
    from relay.control.requests import Choice, Request

REPORT_PATIENCE_NS = 200 * MILLISECOND
STEP_MEMORY = 7  # the usual step is an average that forgets an eighth with each sample
MAX_CACHED_UNITS = 1 << 20


class Worker:
    """One slot of the cluster over all its incarnations.

    ``live`` maps every attempt placed here (as P or D) to the prefill tokens booked for it; ``backlog_tokens`` is their sum.
    """

    def __init__(self, worker: str, role: Role) -> None:
        self.id = worker
        self.role = role
        self.state = WorkerState.STOPPED
        self.incarnation = 0
        self.changed_ns = 0
        # connections and identity
        self.agent: Hello | None = None
        self.engine: Hello | None = None
        self.agent_open = False
        self.engine_open = False
        self.kv_tokens = 0  # of the last incarnation that said hello: survives a restart for admission
        # failure detection
        self.heard_ns = 0
        self.beat: Heartbeat | None = None
        self.beat_ns = 0
        self.step_ns = 0  # usual length of its steps, as heartbeats tell; 0: not known yet
        self.frozen_since_ns = 0
        self.suspect = False  # silent
        self.slow = False  # its present step takes far too long
        self.failures = 0  # consecutive lives that ended before they were stable
        self.served = False  # the life just lost had been ready and did not end by a hang
        self.unexplained: list[Request] = []  # what a lost engine had, while its agent may still say why it ended
        self.long_step: list[Request] = []  # what its engine computes in a step that may hang
        self.watched: dict[
            Request, int | None
        ] = {}  # suspects whose last step may still run → the step seen first since
        self.lingering: dict[Request, int | None] = {}  # the same of those that are not suspects
        self.blamed = False  # this life's crash or hang has been counted
        self.last_cause = ""
        self.lost_ns = 0  # when its last loss was noticed; 0: it was never lost
        self.displaced: list[Choice] = []  # that it was computing when it was lost
        self.yielding = False  # its next start waits until these have gone on
        self.exit: LauncherExited | None = None
        self.engine_exit: EngineExited | None = None
        self.gave_up = False
        # leaving on purpose
        self.refuses = False  # its engine was told to drain: it takes nothing any more
        self.stay_out = False  # after its drain it is not started again
        # load
        self.load: Load | None = None
        self.live: dict[Attempt, int] = {}
        self.backlog_tokens = 0
        self.progress_ns = 0
        self.reserving_refused = Refusals()  # reservations
        self.queueing_refused = Refusals()  # any work at all
        self.tight = False  # after a refusal: one reservation at a time until one is accepted
        self.reserving = 0
        # prefix cache
        self.cached: set[bytes] = set()
        self.expected: dict[bytes, Attempt] = {}  # units that work placed here will bring, and whose they are
        self.promises: dict[Attempt, list[bytes]] = {}
        self.cache_sequence = -1
        self.orphans: dict[tuple[bytes, int], None] = {}  # (resume key, choice) of what it computes for no gateway
        self.cut = False  # only its connection was lost, and others may use it: it may connect again

    @property
    def exited(self) -> bool:
        return self.exit is not None

    @property
    def key(self) -> WorkerKey:
        return WorkerKey(self.id, self.incarnation)

    @property
    def numerics_id(self) -> str:
        return self.engine.numerics_id if self.engine else ""

    @property
    def max_live(self) -> int:
        """Attempts placed here at once; more wait in the gateway, where they can still go elsewhere."""
        return self.engine.max_num_seqs if self.engine and self.engine.max_num_seqs > 0 else 256

    @property
    def has_room(self) -> bool:
        return len(self.live) < self.max_live and not self.queueing_refused.blocked

    @property
    def can_reserve(self) -> bool:
        return self.has_room and not self.full and not (self.tight and self.reserving)

    @property
    def full(self) -> bool:
        """It has refused a reservation, or more, and there is no news."""
        return self.reserving_refused.blocked or self.queueing_refused.blocked

    @property
    def doubted(self) -> bool:
        """Something may be wrong here: others are preferred, and what runs here may get a second attempt."""
        return self.suspect or self.slow

    def hear_beat(self, beat: Heartbeat, now_ns: int) -> None:
        """Remember the heartbeat, and learn from two of them how long a step usually takes."""
        before = self.beat
        if before is not None and before.phase == beat.phase == "stepping" and beat.step > before.step:
            sample_ns = (now_ns - self.beat_ns) // (beat.step - before.step)
            self.step_ns = (STEP_MEMORY * self.step_ns + sample_ns) // (STEP_MEMORY + 1) if self.step_ns else sample_ns
        self.beat, self.beat_ns = beat, now_ns

    def move(self, trigger: WorkerTrigger, now_ns: int) -> None:
        """Take one transition of the table."""
        target = WORKER_TRANSITIONS.get((self.state, trigger))
        if target is None:
            raise AssertionError(f"worker {self.id}: {trigger.name} in {self.state.name}")
        self.state = target
        self.changed_ns = now_ns

    def begin(self, incarnation: int, now_ns: int) -> None:
        """A new life: nothing known about the old one holds, except what the crash statistics need."""
        self.move(WorkerTrigger.LAUNCH, now_ns)
        self.incarnation = incarnation
        self.cut = False
        self.displaced, self.yielding = [], False
        self.orphans = {}
        self.agent = self.engine = None
        self.agent_open = self.engine_open = False
        self.beat = None
        self.step_ns = 0
        self.frozen_since_ns = 0
        self.suspect = self.slow = False
        self.exit = self.engine_exit = None
        self.heard_ns = self.progress_ns = now_ns
        self.blamed = self.refuses = self.stay_out = False
        self.load = None
        self.reserving_refused, self.queueing_refused = Refusals(), Refusals()
        self.tight = False
        self.forget_cache()

    # --- placements -----------------------------------------------------------------------------------------------

    def book(self, attempt: Attempt, prefill_tokens: int, now_ns: int) -> None:
        if not self.live:
            self.progress_ns = now_ns
        self.live[attempt] = prefill_tokens
        self.backlog_tokens += prefill_tokens

    def prefilled(self, attempt: Attempt) -> None:
        """The prompt of ``attempt`` is computed; it still runs here."""
        self.queueing_refused.taken(attempt.started_ns)
        self.backlog_tokens -= self.live.get(attempt, 0)
        if attempt in self.live:
            self.live[attempt] = 0

    def unbook(self, attempt: Attempt) -> None:
        self.backlog_tokens -= self.live.pop(attempt, 0)
        self.stop_expecting(attempt)

    def has_news(self) -> None:
        """Something has left it: there may be room."""
        self.reserving_refused.blocked = self.queueing_refused.blocked = False

    def pass_time(self, now_ns: int) -> None:
        self.reserving_refused.pass_time(now_ns)
        self.queueing_refused.pass_time(now_ns)

    def watch(self, request: Request) -> None:
        """An attempt of a suspect ended while its step may run here: until that is over, it may hang unnoticed."""
        if request not in self.watched:
            request.suspicion.unexplained += 1
        self.watched[request] = None

    def unwatch(self, request: Request) -> None:
        del self.watched[request]
        request.suspicion.unexplained -= 1

    def linger(self, request: Request) -> None:
        """An attempt of one that is no suspect ended while its step may run here: if that hangs, the next may be another."""
        if request in self.long_step:
            return  # that counts already
        if request not in self.lingering:
            request.suspicion.lingering += 1
        self.lingering[request] = None

    def unlinger(self, request: Request) -> None:
        del self.lingering[request]
        request.suspicion.lingering -= 1

    # --- prefix cache ---------------------------------------------------------------------------------------------

    def forget_cache(self) -> None:
        self.cached.clear()
        self.expected.clear()
        self.promises.clear()
        self.cache_sequence = -1

    def cache_changed(self, message: CacheChanged) -> None:
        """Follow the engine's prefix cache. After a gap only later changes are known: a hint, so it may be incomplete."""
        if message.reset or message.sequence != self.cache_sequence + 1:
            self.cached.clear()
        self.cache_sequence = message.sequence
        self.cached.difference_update(message.removed)
        self.cached.update(message.added)
        for unit in message.added:
            self.expected.pop(unit, None)
        if len(self.cached) > MAX_CACHED_UNITS:
            self.cached.clear()

    def expect(self, attempt: Attempt, hashes: Iterable[bytes]) -> None:
        """``attempt`` was placed here: its prefix will be cached, so that what shares it should follow."""
        units = [unit for unit in hashes if unit not in self.cached and unit not in self.expected]
        self.promises[attempt] = units
        self.expected.update(dict.fromkeys(units, attempt))

    def stop_expecting(self, attempt: Attempt) -> None:
        """Kept or broken, the promise of ``attempt`` is over."""
        for unit in self.promises.pop(attempt, ()):
            if self.expected.get(unit) is attempt:
                del self.expected[unit]

    def stop_expecting_old(self, now_ns: int) -> None:
        """What runs has had its blocks published; what was not reported since is not cached (evicted, or too short)."""
        for attempt in list(self.promises):
            if (
                attempt.state is AttemptState.RUNNING
                and attempt.choice.committed
                and now_ns - attempt.changed_ns >= REPORT_PATIENCE_NS
            ):
                self.stop_expecting(attempt)

    def cached_units(self, hashes: list[bytes]) -> int:
        """Length of the longest prefix of ``hashes`` that is cached here, in units."""
        count = 0
        for unit in hashes:
            if unit not in self.cached:
                break
            count += 1
        return count

    def coming_units(self, hashes: list[bytes]) -> int:
        """The same with what placed work will bring."""
        count = 0
        for unit in hashes:
            if unit not in self.cached and unit not in self.expected:
                break
            count += 1
        return count
