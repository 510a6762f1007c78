"""Whether a server's workers stood through a measurement: figures of a part during which one ended are void."""

import re
from dataclasses import dataclass
from typing import Any

_NOISE = re.compile(r"relay\.api\.access|^(try|ready|workers) |KV blocks; ready in|^\s*$")
_MATTERS = re.compile(
    r"^\[[\w.-]+\] |lost|hung|ended|restart|refused|killed|fenced|suspect|Traceback|Error|WARNING|ERROR|CRITICAL"
)
LAST_LINES = 25
MOVED_SHARE = 0.95  # of a split's prompts must have gone from P to D
UNEVEN = 8  # a victim may have an eighth more or less streams than were meant for it


class Void(Exception):
    """A part's figures do not mean what the part says. ``figures``: what there was of them."""

    def __init__(self, reason: str, figures: dict[str, Any]) -> None:
        super().__init__(reason)
        self.figures = figures


@dataclass(frozen=True, slots=True)
class Standing:
    """One worker at one look at /status."""

    state: str
    incarnation: int
    last_loss: str

    @property
    def ready(self) -> bool:
        return self.state == "ready"


def standings(status: dict[str, Any]) -> dict[str, Standing]:
    """Every worker by its name."""
    return {
        row["id"]: Standing(row["state"], row["incarnation"], row.get("last_loss") or "") for row in status["workers"]
    }


def unready(now: dict[str, Standing]) -> str:
    """What is to be said of workers that can not serve; empty if all can."""
    return "; ".join(
        f"{name}, incarnation {one.incarnation}, is {one.state}: {one.last_loss or 'no reason known'}"
        for name, one in now.items()
        if not one.ready
    )


def ended(before: dict[str, Standing], after: dict[str, Standing], but: str = "") -> list[str]:
    """Workers that are not ready as the incarnation they were before; ``but`` may have ended."""
    return [name for name, one in before.items() if name != but and not _same(one, after.get(name))]


def _same(one: Standing, now: Standing | None) -> bool:
    return now is not None and now.ready and now.incarnation == one.incarnation


def ending(names: list[str], after: dict[str, Standing], log: str) -> str:
    """Which workers ended, why as the gateway knows, and the last lines of their logs."""
    found = []
    for name in names:
        lines = [line for line in matters(log) if re.search(rf"\b{re.escape(name)}\b", line)]
        cause = after[name].last_loss if name in after else "it is not in /status"
        found.append(f"worker {name} ended during this part: {cause}\n" + "\n".join(lines[-8:]))
    return "\n".join(found).strip()


def matters(log: str) -> list[str]:
    """The lines of a server's log that say how workers fared: what they wrote, losses and restarts, errors."""
    return [line for line in log.splitlines() if _MATTERS.search(line) and not _NOISE.search(line)]


def moved_too_little(requests: int, transfers: float) -> str:
    """What is to be said of a split whose prompts did not go from P to D; empty if they did."""
    if transfers >= MOVED_SHARE * requests:
        return ""
    return f"only {transfers:.0f} of {requests} prompts went from P to D: one worker served the rest alone"


def missed_victim(on_victim: int, meant: int) -> str:
    """What is to be said of a kill that took another number of streams than was meant; empty if it took that."""
    if abs(on_victim - meant) <= meant // UNEVEN:
        return ""
    return f"{on_victim} streams were on the victim when it was killed, {meant} were meant to be"
