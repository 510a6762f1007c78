"""Pure modules take time, randomness and ids as arguments; this lint keeps clocks, sockets and threads out of them.

It also keeps out what differs from run to run without saying so: the order of sets, and ``hash`` and ``id`` of objects.
"""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "relay"

# Whole folders, but for the shells in them; of the folders that are mostly shells, the pure files.
PURE = [
    "control",
    "engine",
    "protocol",
    "sim",
    "cluster/topology.py",
    "devices.py",
    "transfer/contract.py",
    "transfer/coverage.py",
    "transfer/frame.py",
    "transfer/nixl/bridge.py",
    "transfer/nixl/staging.py",
    "transfer/receiver.py",
    "transfer/ring.py",
    "transfer/sender.py",
    "transfer/watchdog.py",
    "worker/announce.py",
    "worker/commands.py",
    "worker/core.py",
    "worker/custody.py",
    "worker/entries.py",
    "worker/events.py",
    "worker/held.py",
    "worker/kv_counters.py",
    "worker/orders.py",
    "worker/orphans.py",
    "worker/owners.py",
    "worker/parking.py",
    "worker/report.py",
    "worker/table.py",
    "worker/token_log.py",
]

SHELLS = {
    "control/connection.py",
    "control/shell.py",
    "sim/pool.py",
    "sim/run.py",
    "sim/shrink.py",
    "sim/sweep.py",
    "sim/tape.py",
    "sim/wall_clock.py",
}

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
    return [file for file in files if str(file.relative_to(SOURCE)) not in SHELLS]


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


WHOLE = {"int", "round", "len", "ord"}  # calls that give an int whatever they take


def _is_time(node: ast.expr) -> bool:
    return _name(node).endswith("_ns")


def _is_float(node: ast.expr) -> bool:
    """Whether the value is, or may be, a float: a literal, a quotient, seconds (``x_s``), or arithmetic with such."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, float)
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Div) or _is_float(node.left) or _is_float(node.right)
    if isinstance(node, ast.UnaryOp):
        return _is_float(node.operand)
    if isinstance(node, ast.IfExp):
        return _is_float(node.body) or _is_float(node.orelse)
    if isinstance(node, ast.BoolOp):
        return any(_is_float(value) for value in node.values)
    if isinstance(node, ast.Call):
        name = _name(node.func)
        return name not in WHOLE and (name == "float" or any(_is_float(argument) for argument in node.args))
    return _name(node).endswith("_s") and not _is_time(node)


def float_deadlines(source: str) -> list[int]:
    """Lines where a time in nanoseconds (``x_ns``) is given, added to or compared with a float: rounding would decide."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.AnnAssign | ast.AugAssign) and node.value is not None:
            pairs = [(node.target, node.value)]
        elif isinstance(node, ast.Call):
            pairs = [(ast.Name(keyword.arg), keyword.value) for keyword in node.keywords if keyword.arg]
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            times = any(_is_time(part) for side in sides for part in ast.walk(side) if isinstance(part, ast.expr))
            pairs = [(ast.Name("limit_ns"), side) for side in sides] if times else []
        else:
            continue
        found += [node.lineno for target, value in pairs if _is_time(target) and _is_float(value)]
    return sorted(set(found))


@pytest.mark.parametrize("path", pure_files(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_pure_module_has_no_float_deadlines(path: Path) -> None:
    assert float_deadlines(path.read_text()) == []


def test_the_lint_sees_float_deadlines() -> None:
    for line in (
        "deadline_ns = now_ns + 1.5 * SECOND",
        "self.at_ns = now_ns / 2",
        "a.b_ns: int = config.wait_s * SECOND",
        "f(at_ns=x / 2)",
        "x_ns += timeout_s",
        "late = now_ns - since_ns > config.wait_s * SECOND",
        "x_ns = min(a_ns, 2.0)",
        "x_ns = a_ns if b else 0.5",
    ):
        assert float_deadlines(line) == [1], line
    for line in (
        "deadline_ns = now_ns + int(config.wait_s * SECOND)",
        "x_ns = now_ns // 2",
        "seconds = (now_ns - since_ns) / SECOND",
        "late = now_ns - since_ns > int(1.5 * SECOND)",
        "age_s = now_ns / SECOND",
    ):
        assert float_deadlines(line) == [], line


@pytest.mark.parametrize("path", pure_files(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_pure_module_imports_nothing_impure(path: Path) -> None:
    assert impure_imports(path.read_text()) == []


def test_the_lint_sees_an_impure_import() -> None:
    assert impure_imports("def f():\n    import time\n") == ["time"]
    assert impure_imports("from os import environ\n") == ["os"]


@pytest.mark.parametrize("entry", sorted(SHELLS))
def test_a_shell_is_named_one_because_it_imports_what_pure_modules_may_not(entry):
    assert impure_imports((SOURCE / entry).read_text())
