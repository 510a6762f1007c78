"""What will be done to a cluster, drawn from a seed before anything starts. Pure: the same seed, the same plan."""

import random
from dataclasses import dataclass

from relay.chaos.kinds import KINDS, Kind
from relay.chaos.shapes import Shape
from relay.errors import UsageError

# Moments that an order or a token shows at the instant it passes. The others are hit by chance and counted.
AIMED = ("reserved", "accepted", "prefill", "streaming", "handed_off", "decoding", "last_token")
PREFILL_MOMENTS = ("accepted", "prefill", "streaming", "handed_off")
AIMED_SHARE = 0.5
IDLE_SHARE = 0.1
LONGER = 2  # so that some partitions outlast the 3 s of TCP_USER_TIMEOUT


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. ``moment`` "" strikes when its turn comes, whatever its victim does; otherwise a choice of the victim must be
    there; for a KV connection it is the ``nth`` frame of a transfer."""

    kind: str
    role: str  # of the victim; for a KV connection that of its target D
    moment: str
    nth: int
    idle: bool  # without a moment: strike whoever comes first, not a worker that has work
    wait_s: float  # after its turn has come
    hold_s: float  # how long a stop, slowness, delay, one-way silence, partition or loss lasts
    aim: int  # decides among victims and processes, and the bit that is flipped


@dataclass(frozen=True, slots=True)
class Ground:
    """What there is to strike: the workers, the gateways, whether packets can be lost, whether processes hold weights for
    several workers, and whether any KV goes through the proxy."""

    shape: Shape
    gateways: int = 1
    netns: bool = False
    holders: bool = False
    kv_seen: bool = True

    def has(self, kind: Kind) -> bool:
        """Several gateways: the loss of an only one ends everything. KV connections: between prefill and decode workers."""
        if kind.target == "gateway":
            return self.gateways > 1
        if kind.target == "holder":
            return self.holders
        if kind.target == "kv" and not (self.shape.prefill and self.kv_seen):
            return False
        return self.netns or not kind.on_packets


def choose_kinds(names: list[str], ground: Ground) -> dict[str, int]:
    """Weights of the kinds that are possible on ``ground``. Raises UsageError for an unknown name, for one that needs a flag
    that was not given, or if none is left."""
    unknown = [name for name in names if name not in KINDS]
    if unknown:
        raise UsageError(f"--kinds: no kind is called {unknown[0]!r}; there are {', '.join(KINDS)}")
    for name in names:
        if KINDS[name].target == "gateway" and ground.gateways == 1:
            raise UsageError(f"--kinds: {name} needs --gateways 2 or more")
        if KINDS[name].target == "holder" and not ground.holders:
            raise UsageError(f"--kinds: {name} needs --backend cuda and several workers on a GPU")
        if KINDS[name].target == "kv" and not ground.kv_seen:
            raise UsageError(f"--kinds: {name} needs a --transport that can be TCP: auto, tcp or ipc")
        if KINDS[name].on_packets and not ground.netns:
            raise UsageError(f"--kinds: {name} needs --netns")
    chosen = {name: KINDS[name].weight for name in names or KINDS if ground.has(KINDS[name])}
    if not chosen:
        raise UsageError(f"--kinds: a colocated shape ({ground.shape.name}) has no KV connections")
    return chosen


def draw_plan(seed: int, ground: Ground, count: int, kinds: list[str]) -> list[Fault]:
    """``count`` faults, every kind about as often as its weight says and, where ``count`` allows it, at least once."""
    shape = ground.shape
    dice = random.Random(f"faults {seed} {shape.name}")
    weights = choose_kinds(kinds, ground)
    names = list(weights)[:count]
    names += dice.choices(list(weights), list(weights.values()), k=count - len(names))
    dice.shuffle(names)
    return [_draw(dice, name, shape) for name in names]


def _draw(dice: random.Random, name: str, shape: Shape) -> Fault:
    kind = KINDS[name]
    role = dice.choice(shape.roles)
    moment = ""
    if kind.target == "kv":
        role, moment = "decode", "streaming"
    elif dice.random() < AIMED_SHARE:
        moments = list(AIMED)
        if not shape.prefill:
            moments = ["prefill", "decoding", "last_token"]
        elif role == "prefill":
            moments = list(PREFILL_MOMENTS[1:])
        moment = dice.choice(moments)
    hold_s = dice.choice((0.15, 0.4, 0.8, 1.6, 2.5)) * (LONGER if kind.on_packets else 1)
    return Fault(
        kind=name,
        role=role,
        moment=moment,
        nth=dice.choice((1, 2, 7, 30, 31, 60)),
        idle=dice.random() < IDLE_SHARE,
        wait_s=dice.uniform(0.0, 0.4),
        hold_s=hold_s,
        aim=dice.getrandbits(32),
    )
