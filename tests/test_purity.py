"""Pure modules take time, randomness and ids as arguments; this lint keeps clocks, sockets and threads out of them.

It also keeps out what differs from run to run without saying so: the order of sets, and ``hash`` and ``id`` of objects.
"""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "relay"

PURE = [
    "protocol",
    "engine/admission.py",
    "engine/block_pool.py",
    "engine/kv_space.py",
    "engine/limits.py",
    "engine/roster.py",
    "engine/slots.py",
    "engine/step_builder.py",
    "engine/prefix_cache.py",
    "engine/sequence.py",
    "engine/scheduler.py",
    "engine/step.py",
    "transfer/contract.py",
    "transfer/frame.py",
    "transfer/sender.py",
    "transfer/receiver.py",
    "transfer/ring.py",
    "transfer/watchdog.py",
    "worker/commands.py",
    "worker/commands.py",
    "worker/core.py",
    "worker/entries.py",
    "worker/events.py",
    "worker/held.py",
    "worker/kv_counters.py",
    "worker/orders.py",
    "worker/parking.py",
    "worker/report.py",
    "worker/table.py",
    "transfer/contract.py",
    "sim/backend.py",
    "sim/checkers.py",
    "sim/clients.py",
    "sim/engine.py",
    "sim/faults.py",
    "sim/gateway.py",
    "sim/kernel.py",
    "sim/kv_link.py",
    "sim/mutants.py",
    "sim/network.py",
    "sim/process.py",
    "sim/swarm.py",
    "sim/worker.py",
    "sim/workload.py",
    "sim/world.py",
    "worker/entries.py",
    "worker/events.py",
    "worker/held.py",
    "worker/kv_counters.py",
    "worker/orders.py",
    "worker/parking.py",
    "worker/report.py",
    "worker/table.py",
    "control/attempts.py",
    "control/breaker.py",
    "control/budget.py",
    "control/hedging.py",
    "control/contract.py",
    "control/core.py",
    "control/detector.py",
    "control/invariants.py",
    "control/membership.py",
    "control/placement.py",
    "control/queue.py",
    "control/report.py",
    "control/state.py",
    "control/story.py",
    "control/stream.py",
    "control/transitions.py",
    "control/events.py",
    "control/commands.py",
    "control/requests.py",
    "control/workers.py",
    "control/router.py",
    "control/admission.py",
]

BANNED = {
    "time",
    "random",
    "secrets",
    "uuid",
    "asyncio",
    "socket",
    "select",
    "threading",
    "multiprocessing",
    "subprocess",
    "os",
}


def pure_files() -> list[Path]:
    files: list[Path] = []
    for entry in PURE:
        path = SOURCE / entry
        assert path.exists(), f"{entry} is listed as pure and does not exist"
        files += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return files


def impure_imports(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        found += [name for name in names if name.split(".")[0] in BANNED]
    return found


ORDERLESS_USES = {"sorted", "any", "all", "sum", "min", "max", "len", "set", "frozenset"}


def _is_set_type(annotation: ast.expr) -> bool:
    base = annotation.value if isinstance(annotation, ast.Subscript) else annotation
    return isinstance(base, ast.Name) and base.id in {"set", "frozenset"}


def _name(node: ast.expr) -> str:
    """``x`` of ``x`` and of ``self.x``."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def unordered_iterations(source: str) -> list[int]:
    """Lines that go through a set in its own order, or ask for ``hash`` or ``id`` of an object."""
    tree = ast.parse(source)
    sets = {_name(n.target) for n in ast.walk(tree) if isinstance(n, ast.AnnAssign) and _is_set_type(n.annotation)}
    sets |= {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg) and n.annotation and _is_set_type(n.annotation)}

    def is_set(node: ast.expr) -> bool:
        if isinstance(node, ast.Set | ast.SetComp):
            return True
        if isinstance(node, ast.Call):
            return _name(node.func) in {"set", "frozenset"}
        if isinstance(node, ast.BinOp):
            return is_set(node.left) or is_set(node.right)
        return bool(_name(node)) and _name(node) in sets

    harmless: list[ast.AST] = [n for n in ast.walk(tree) if isinstance(n, ast.SetComp)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node.func) in ORDERLESS_USES:
            harmless += node.args
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.For) and is_set(node.iter):
            found.append(node.lineno)
        elif isinstance(node, ast.ListComp | ast.DictComp | ast.GeneratorExp) and node not in harmless:
            found += [node.lineno for part in node.generators if is_set(part.iter)]
        elif isinstance(node, ast.Starred) and is_set(node.value):
            found.append(node.lineno)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            takes_order = node.func.id in {"list", "tuple", "iter", "enumerate", "zip", "next"}
            if node.func.id in {"hash", "id"} or (takes_order and any(is_set(a) for a in node.args)):
                found.append(node.lineno)
    return found


@pytest.mark.parametrize("path", pure_files(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_pure_module_depends_on_no_hidden_order(path: Path) -> None:
    assert unordered_iterations(path.read_text()) == []


def test_the_lint_sees_hidden_order() -> None:
    assert unordered_iterations("for x in {1, 2}: pass") == [1]
    assert unordered_iterations(
        "class A:\n def f(self):\n  self.s: set[int] = set()\n  return [x for x in self.s]"
    ) == [4]
    assert unordered_iterations("def f(s: set[str]):\n return list(s)") == [2]
    assert unordered_iterations("x = hash(y)") == [1]
    assert unordered_iterations("def f(s: set[str]):\n return sorted(x for x in s), 1 in s, {x for x in s}") == []


@pytest.mark.parametrize("path", pure_files(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_pure_module_imports_nothing_impure(path: Path) -> None:
    assert impure_imports(path.read_text()) == []


def test_the_lint_sees_an_impure_import() -> None:
    assert impure_imports("def f():\n    import time\n") == ["time"]
    assert impure_imports("from os import environ\n") == ["os"]
