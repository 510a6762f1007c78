"""Which source runs."""

import os
import subprocess
from functools import cache
from pathlib import Path

from relay import __version__


@cache
def commit() -> str:
    """The commit of the source that runs, "+" behind it if it was changed since; the release where it is no checkout.

    ``RELAY_COMMIT`` names it where the source is a copy: what Git says of the folder around it may be of another commit.
    """
    if named := os.environ.get("RELAY_COMMIT"):
        return named
    package = Path(__file__).resolve().parent.parent
    try:
        root = _git(package, "rev-parse", "--show-toplevel")
        if Path(root) / "src" / "relay" != package:
            return f"release {__version__}"
        changed = _git(package, "status", "--porcelain", "--untracked-files=no", "--", ".")
        return _git(package, "rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return f"release {__version__}"


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
