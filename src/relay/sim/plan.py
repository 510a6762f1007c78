"""When requests arrive and which faults strike when, drawn up front, so that each can be left out without moving the others."""

from dataclasses import dataclass

from relay.sim.swarm import MS, Swarm
from relay.sim.tape import Tape


@dataclass(frozen=True, slots=True)
class Planned:
    """``name`` ("request 3", "fault 2") is that of the stream its own choices come from. Times count from chaos on."""

    number: int
    name: str
    at_ns: int
    kind: str = ""


def draw(tape: Tape, swarm: Swarm) -> tuple[list[Planned], list[Planned]]:
    """(requests, faults), without those that the tape's edits leave out."""
    with tape.within("requests"):
        requests = _spread(tape, "request", swarm.mean_arrival_ms, swarm.requests, 0)
    with tape.within("faults"):
        many = 0 if not swarm.faults else swarm.chaos_ms
        faults = [
            Planned(one.number, one.name, one.at_ns, tape.of(swarm.faults, "fault"))
            for one in _spread(tape, "fault", swarm.mean_fault_ms, many, swarm.chaos_ms)
        ]
    without = tape.edits.without
    if tape.edits.directed is not None:
        faults = []
    return [one for one in requests if one.name not in without], [one for one in faults if one.name not in without]


def _spread(tape: Tape, name: str, mean_ms: int, most: int, until_ms: int) -> list[Planned]:
    """At most ``most``, with gaps of ``mean_ms`` between them, before ``until_ms`` (0: whenever)."""
    found: list[Planned] = []
    at_ms = 0
    while len(found) < most:
        at_ms += tape.between(1, 2 * mean_ms, "gap ms")
        if until_ms and at_ms >= until_ms:
            break
        found.append(Planned(len(found) + 1, f"{name} {len(found) + 1}", at_ms * MS))
    return found
