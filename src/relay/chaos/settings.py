"""What a chaos run is asked to do."""

from dataclasses import dataclass, field
from pathlib import Path

from relay.chaos.plan import Ground
from relay.chaos.requests import LONGEST_ANSWER, LONGEST_WORDS
from relay.chaos.shapes import Shape
from relay.errors import UsageError


@dataclass(frozen=True, slots=True)
class ChaosSettings:
    """``requests`` and ``faults`` are of each cell, that is of each shape and seed. ``serve`` are flags for ``relay serve``."""

    requests: int
    faults: int
    seeds: tuple[int, ...]
    shapes: tuple[Shape, ...]
    kinds: tuple[str, ...] = ()
    model: str = "smollm2"
    serve: tuple[str, ...] = ()
    concurrency: int = 6
    longest_words: int = LONGEST_WORDS
    longest_answer: int = LONGEST_ANSWER
    request_timeout_s: float = 180.0
    gateways: int = 1
    transport: str = "auto"  # of KV, as ``relay serve`` names it
    devices: tuple[str, ...] = ()  # GPUs of the workers; none: they run on CPUs
    netns: bool = False  # this process is in a network namespace of its own, where packets can be lost
    poison: int = 0  # requests that crash every engine they visit, beside the others
    inject: str = ""  # one worker of every cluster is made wrong by this: the run must turn red
    trace: Path | None = None  # folder for recordings of every gateway and worker, which are played again
    keep: Path | None = None  # folder of cells' results: those that are there already are not run again

    def ground(self, shape: Shape) -> Ground:
        """What there is to strike in a cluster of ``shape``."""
        shared = 0 < len(self.devices) < shape.size
        kv_seen = self.transport in ("auto", "tcp", "ipc")  # the others have no way through the proxy
        return Ground(shape, self.gateways, self.netns, shared, kv_seen)

    def __post_init__(self) -> None:
        if not 1 <= self.requests <= 100_000:
            raise UsageError(f"--requests must be 1 to 100000, not {self.requests}")
        if not 0 <= self.faults <= 100_000:
            raise UsageError(f"--faults must be 0 to 100000, not {self.faults}")
        if not 1 <= self.concurrency <= 512:
            raise UsageError(f"--concurrency must be 1 to 512, not {self.concurrency}")
        if not 1 <= self.gateways <= 16:
            raise UsageError(f"--gateways must be 1 to 16, not {self.gateways}")
        if not 1 <= self.longest_words <= 5000:
            raise UsageError(f"--longest-prompt must be 1 to 5000 words, not {self.longest_words}")
        if not 0 <= self.poison <= 100:
            raise UsageError(f"--poison must be 0 to 100 requests, not {self.poison}")
        if not 1 <= self.longest_answer <= 5000:
            raise UsageError(f"--longest-answer must be 1 to 5000 tokens, not {self.longest_answer}")
        if len(set(self.shapes)) != len(self.shapes) or len(set(self.seeds)) != len(self.seeds):
            raise UsageError("a shape or a seed is given twice")


@dataclass(slots=True)
class CellResult:
    """What one cluster went through. Everything here is plain data: it is kept as JSON between runs."""

    shape: str
    seed: int
    requests: int
    identical: int = 0
    different: int = 0
    failed: int = 0
    leaked: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    signals: dict[str, int] = field(default_factory=dict)
    packets_lost: dict[str, int] = field(default_factory=dict)  # by kind
    roles_struck: dict[str, int] = field(default_factory=dict)  # faults that left no unhurt worker of a role
    moments: dict[str, dict[str, int]] = field(default_factory=dict)  # kind → moment → choices struck
    resume_ms: dict[str, list[float]] = field(default_factory=dict)  # kind → every wait
    detect_ms: dict[str, list[float]] = field(default_factory=dict)
    reposted: int = 0  # answers whose connection broke with its gateway, continued at another
    resumed_tokens: list[int] = field(default_factory=list)  # prompt and committed tokens each resume began with
    disagreements: int = 0
    kv_transfers: dict[str, int] = field(default_factory=dict)  # by scheme, of those that a D acknowledged
    poison: int = 0
    quarantined: int = 0  # poison requests that ended with the error they should end with
    recordings: int = 0
    replayed: int = 0  # recordings whose decisions came out the same again
    replayed_events: int = 0
    crashes: int = 0  # engines that ended although nothing was done to them
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        whole = self.identical == self.requests and self.quarantined == self.poison
        return whole and not self.leaked and not self.problems
