"""What the gateway's pure core is told once: when silence is death, what may be tried again, what may wait.

Times are seconds here and become integer nanoseconds where pure code uses them.
"""

from dataclasses import dataclass, field

from relay.errors import UsageError

STEP_DEADLINE_S = 10.0


def check(condition: bool, text: str) -> None:
    """Raises UsageError(``text``) unless ``condition``."""
    if not condition:
        raise UsageError(text)


@dataclass(frozen=True, slots=True)
class DetectorConfig:
    """When silence becomes suspicion and death, and when slowness becomes a hang."""

    suspect_after_s: float = 1.0
    dead_after_s: float = 1.5
    frozen_after_s: float = 0.5  # engine stopped (state T) this long, as its agent reads it
    start_deadline_s: float = 180.0  # launch to both connections: loading and compiling have their own long deadline
    step_deadline_s: float = STEP_DEADLINE_S  # one engine step, not counting what it waited for a processor
    answer_deadline_s: float = 10.0  # Reserve to Accept or Refuse; an engine answers between steps
    handoff_deadline_s: float = 20.0  # first token reported by P to first token of D
    own_stall_s: float = (
        0.1  # a tick this late means that the gateway itself stood still: nobody else is blamed for that time
    )

    def __post_init__(self) -> None:
        check(
            0 < self.suspect_after_s <= self.dead_after_s, "suspect_after_s must be positive and at most dead_after_s"
        )


@dataclass(frozen=True, slots=True)
class RestartConfig:
    """How a lost worker comes back: at once, then with exponential delays; a loop of crashes counts as no worker.

    A worker that was ready and then killed comes back at once however often that happens, but after what it had has gone on
    elsewhere: its start takes half a second of processor time that the others' prefill needs.
    """

    first_delay_s: float = 0.1
    max_delay_s: float = 5.0
    stable_after_s: float = 10.0  # ready this long: earlier failures are forgotten
    crash_loop_failures: int = 5  # from here on a restarting worker is not counted as "starting"
    start_attempts: int = 3  # before the cluster was ever complete
    exit_wait_s: float = 2.0  # after a kill, wait this long for the launcher's exit event
    yield_s: float = 1.0  # the longest wait for that
    report_wait_s: float = 1.0  # after an engine's EOF, wait this long for its agent to say why; a crash is slow to end


@dataclass(frozen=True, slots=True)
class RetryConfig:
    """Bounds on placing one choice again. Counters restart whenever the choice commits a token."""

    max_failures: int = 8
    max_losses: int = 100  # workers killed under it, which is nobody's fault
    max_blames: int = 3  # crashes and hangs of the engine that computed it; the last one in a step of its own
    max_transfer_failures: int = 2  # then one worker does both phases
    backoff_s: float = 0.025
    max_backoff_s: float = 1.0
    full_patience_s: float = 0.5  # every D full for this long: compute where there is a queue instead of reserving
    park_lease_s: float = 10.0  # with every D full, P computes the prompt and keeps its KV so long; 0: never
    # Resumes are paid in tokens to compute; with nothing left they wait. All three bound what a storm of restarts adds.
    budget_per_mille: int = 500  # earned of every accepted or committed token
    budget_tokens_per_s: int = 2000
    budget_burst_tokens: int = 1 << 16

    def __post_init__(self) -> None:
        check(
            self.budget_per_mille >= 0 and self.budget_tokens_per_s >= 1 and self.budget_burst_tokens >= 1,
            "the retry budget needs a positive rate and burst: without them resumed requests would wait for ever",
        )


@dataclass(frozen=True, slots=True)
class HedgeConfig:
    """Second attempts on mere suspicion. ``budget_per_mille`` 0 turns them off."""

    budget_per_mille: int = 50  # extra tokens computed, of all accepted and committed ones
    burst_tokens: int = 1 << 14  # saved up at most
    slow_step_s: float = 2.0  # a step older than this, and
    slow_factor: int = 8  # than so many usual ones, makes its worker doubted

    def __post_init__(self) -> None:
        check(0 <= self.budget_per_mille <= 1000, "the hedge budget must be 0 to 1000 per mille")
        check(
            self.burst_tokens >= 1 and self.slow_step_s > 0 and self.slow_factor >= 1, "hedge bounds must be positive"
        )


@dataclass(frozen=True, slots=True)
class BreakerConfig:
    """When outcomes say that a worker or a link is better left alone, and how it comes back."""

    window_s: float = 10.0
    min_failures: int = 5
    failure_per_mille: int = 500
    open_s: float = 1.0  # doubled by every failure while half open
    max_open_s: float = 8.0
    slow_start_s: float = 5.0
    slow_start_seqs: int = 2  # at once, at first

    def __post_init__(self) -> None:
        check(self.min_failures >= 1 and 0 < self.failure_per_mille <= 1000, "breaker thresholds are out of range")
        check(
            self.window_s > 0 and 0 < self.open_s <= self.max_open_s and self.slow_start_s > 0,
            "breaker times must be positive, and open_s at most max_open_s",
        )
        check(self.slow_start_seqs >= 1, "slow_start_seqs must be at least 1")


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """What may wait. Over these: 429 and Retry-After."""

    max_num_queued_reqs: int = 512
    max_num_queued_tokens: int = 1 << 20
    retry_after_s: int = 1
    no_worker_deadline_s: float = 60.0  # waiting while no worker at all is ready

    def __post_init__(self) -> None:
        check(self.max_num_queued_reqs >= 1 and self.max_num_queued_tokens >= 1, "queue bounds must be positive")
        check(self.retry_after_s >= 1, "retry_after_s must be at least 1")


@dataclass(frozen=True, slots=True)
class ControlConfig:
    """Everything the gateway's pure core is told once."""

    detector: DetectorConfig = field(default_factory=DetectorConfig)
    restart: RestartConfig = field(default_factory=RestartConfig)
    retry: RetryConfig = field(default_factory=RetryConfig)
    hedge: HedgeConfig = field(default_factory=HedgeConfig)
    breaker: BreakerConfig = field(default_factory=BreakerConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    short_prompt_tokens: int = 64  # fewer uncached tokens than this: D prefills itself
    tick_s: float = 0.1
    story_entries: int = 8192
    gateway: str = "gateway-0"
    epoch: int = 1  # of this life of the gateway: grows with every start of any gateway
    shared_workers: bool = False  # other gateways use them too: a lost connection is not a lost worker
    adopt_wait_s: float = 0.1  # a client that came back waits so long for news of who computes its request already
    was_complete: bool = False  # every worker was ready once, in an earlier life
