"""Optional extras: how they are installed, and whether they are, found out without importing any of them."""

import importlib.util

from relay.errors import UsageError


def install_hint(extra: str) -> str:
    """The end of a line that says what is missing."""
    return (
        f"pip install '.[{extra}]' in a checkout of Relay (pip install 'relay-serving[{extra}]' where an index has it)"
    )


def require_gpu() -> None:
    """Raises UsageError where what computes on GPUs cannot be imported."""
    missing = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"--backend cuda needs {' and '.join(missing)}, which cannot be imported here: {install_hint('gpu')}"
        )
