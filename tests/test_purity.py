"""Pure modules take time, randomness and ids as arguments; this lint keeps clocks, sockets and threads out of them."""

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
    "worker/commands.py",
    "worker/core.py",
    "worker/entries.py",
    "worker/events.py",
    "worker/held.py",
    "worker/report.py",
    "worker/table.py",
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


@pytest.mark.parametrize("path", pure_files(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_pure_module_imports_nothing_impure(path: Path) -> None:
    assert impure_imports(path.read_text()) == []


def test_the_lint_sees_an_impure_import() -> None:
    assert impure_imports("def f():\n    import time\n") == ["time"]
    assert impure_imports("from os import environ\n") == ["os"]
