"""Writes docs/invariants.md and docs/state-machines.md from the tables in the source.

    python -m benchmarks.pages            # rewrite what lies between the markers
    python -m benchmarks.pages --check    # exit 1 if a page is stale

What lies between ``<!-- NAME -->`` and ``<!-- /NAME -->`` belongs to this command. What found each mutant comes from
benchmarks/results/simulation/mutants.json; for one that is not in it the table says so.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from relay.control import transitions
from relay.sim.invariants import INVARIANTS
from relay.sim.mutants import MUTANTS
from relay.sim.scenarios.catalogue import SCENARIOS
from relay.transfer import receiver, sender
from relay.worker import held

ROOT = Path(__file__).parent.parent
FOUND = ROOT / "benchmarks" / "results" / "simulation" / "mutants.json"
COMMAND = "relay sim --mutants --json > benchmarks/results/simulation/mutants.json"

Transitions = Mapping[tuple[Any, Any], Any]

# (name of the block, states it may begin in, its table)
MACHINES: tuple[tuple[str, tuple[Enum, ...], Transitions], ...] = (
    ("choice", (transitions.ChoiceState.WAITING,), transitions.CHOICE_TRANSITIONS),
    (
        "attempt",
        (transitions.AttemptState.RESERVING, transitions.AttemptState.RUNNING),
        transitions.ATTEMPT_TRANSITIONS,
    ),
    ("worker", (transitions.WorkerState.STOPPED,), transitions.WORKER_TRANSITIONS),
    (
        "held",
        (held.HeldState.RUNNING, held.HeldState.PREFILLING, held.HeldState.RESERVED),
        held.TRANSITIONS,
    ),
    ("sender", (sender.SenderState.STREAMING,), sender.TRANSITIONS),
    ("receiver", (receiver.ReceiverState.RESERVED,), receiver.TRANSITIONS),
)


def diagram(starts: Iterable[Enum], table: Transitions) -> str:
    """A Mermaid state diagram. States without a way out end; triggers that lead the same way share an arrow."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for (state, trigger), target in table.items():
        arrows.setdefault((_id(state), _id(target)), []).append(str(trigger.value).replace("_", " "))
    lines = ["```mermaid", "stateDiagram-v2"]
    lines += [f"    [*] --> {_id(state)}" for state in starts]
    lines += [f"    {source} --> {target}: {', '.join(triggers)}" for (source, target), triggers in arrows.items()]
    sources = {_id(state) for state, _ in table}
    targets = dict.fromkeys(_id(target) for target in table.values())
    lines += [f"    {target} --> [*]" for target in targets if target not in sources]
    return "\n".join([*lines, "```"])


def _id(state: Enum) -> str:
    return str(state.value).replace(" ", "_")


def invariants() -> str:
    lines = ["| | statement | why | where asserted | mutants against it |", "|---|---|---|---|---|"]
    for invariant in INVARIANTS:
        asserted = "<br>".join(f"`{place.split(': ')[0]}`: {place.split(': ')[1]}" for place in invariant.asserted)
        against = ", ".join(mutant.name for mutant in MUTANTS if mutant.breaks == invariant.name)
        lines.append(f"| {invariant.name} | {invariant.statement} | {invariant.why} | {asserted} | {against} |")
    return "\n".join(lines)


def mutants(found: Mapping[str, Any]) -> str:
    needed, by = found.get("seeds_needed", {}), found.get("found_by", {})
    told = found.get("invariants", {})
    lines = ["| mutant | planted in | against | runs needed | found by | told as |", "|---|---|---|---|---|---|"]
    for mutant in MUTANTS:
        runs = needed.get(mutant.name)
        result = f"{runs} | {by[mutant.name]} | {told[mutant.name]}" if runs else "not measured yet | |"
        lines.append(f"| {mutant.name} | `{mutant.place}` | {mutant.breaks} | {result} |")
    return "\n".join(lines)


def scenarios() -> str:
    lines = ["| scenario | what happened there | what is played here |", "|---|---|---|"]
    lines += [f"| `{scenario.name}` | {scenario.incident} | {scenario.plan} |" for scenario in SCENARIOS]
    return "\n".join(lines)


def pages() -> dict[Path, str]:
    """Each page as it should be."""
    found = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    blocks = {"invariants": invariants(), "mutants": mutants(found), "scenarios": scenarios()}
    blocks |= {name: diagram(starts, table) for name, starts, table in MACHINES}
    return {
        path: _filled(path.read_text(), blocks)
        for path in (
            ROOT / "docs" / "invariants.md",
            ROOT / "docs" / "state-machines.md",
            ROOT / "docs" / "simulation.md",
        )
    }


def _filled(text: str, blocks: Mapping[str, str]) -> str:
    def fill(match: re.Match[str]) -> str:
        name = match[1]
        return f"<!-- {name} -->\n{blocks[name]}\n<!-- /{name} -->" if name in blocks else match[0]

    return re.sub(r"<!-- ([\w-]+) -->\n.*?<!-- /\1 -->", fill, text, flags=re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = [path for path, text in pages().items() if path.read_text() != text]
    for path in stale:
        if not check:
            path.write_text(pages()[path])
        print(f"{'stale' if check else 'written'}: {path.relative_to(ROOT)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
