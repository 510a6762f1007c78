"""Packets that never arrive: nft rules on what comes in, a table for each fault, loaded and taken away as a whole."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from relay.errors import RelayError

NFT_TIMEOUT_S = 10.0


class PacketsUnavailable(RelayError):
    """Packets cannot be lost here; the text says why."""

    exit_code = 8


@dataclass(frozen=True, slots=True)
class Flow:
    """TCP packets from port ``source`` to port ``target``; 0: any."""

    source: int
    target: int

    @property
    def back(self) -> "Flow":
        return Flow(self.target, self.source)


def rules(table: str, flows: Sequence[Flow], percent: int) -> str:
    """What nft is told so that ``percent`` of 100 packets of ``flows`` are lost, each by a die of its own. They are lost where they
    arrive: to the sender they have left, as on a real wire."""
    lines = [f"table inet {table} {{", "  chain lost {", "    type filter hook input priority 0; policy accept;"]
    for flow in flows:
        ports = [f"tcp sport {flow.source}"] * (flow.source > 0) + [f"tcp dport {flow.target}"] * (flow.target > 0)
        die = [f"numgen random mod 100 < {percent}"] * (percent < 100)
        lines.append("    " + " ".join([*ports, *die, "counter", "drop"]))
    return "\n".join([*lines, "  }", "}", ""])


class Packets:
    """``lose`` and ``heal`` return when the kernel has it: some 15 ms each."""

    def __init__(self) -> None:
        self._number = 0

    def lose(self, flows: Sequence[Flow], percent: int) -> str:
        """Until ``heal`` is given what this returns. Raises PacketsUnavailable."""
        self._number += 1
        table = f"relay_chaos_{self._number}"
        _nft(["-f", "-"], rules(table, flows, percent))
        return table

    def lost(self, table: str) -> int:
        """Packets so far. Raises PacketsUnavailable."""
        words = _nft(["list", "table", "inet", table]).split()
        return sum(int(count) for word, count in pairwise(words) if word == "packets")

    def heal(self, table: str) -> None:
        """Raises PacketsUnavailable."""
        _nft(["delete", "table", "inet", table])


def _nft(arguments: list[str], text: str = "") -> str:
    try:
        ended = subprocess.run(
            ["nft", *arguments], input=text, capture_output=True, text=True, timeout=NFT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PacketsUnavailable(f"nft: {error}") from error
    if ended.returncode != 0:
        raise PacketsUnavailable(
            f"nft: {ended.stderr.strip().splitlines()[0] if ended.stderr.strip() else ended.returncode}"
        )
    return ended.stdout
