"""What every benchmark's JSON carries beside its figures: command, commit, machine, versions, date."""

import datetime
import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = [
    *("relay-serving", "numpy", "msgspec", "starlette", "uvicorn", "uvloop", "tokenizers", "gguf"),
    *("torch", "transformers", "triton"),
]


def provenance() -> dict[str, Any]:
    """The context of a figure. ``commit`` ends in +dirty when the tree differs from it."""
    root = Path(__file__).parent.parent
    git = ["git", "-C", str(root)]
    commit = subprocess.run(
        [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    dirty = subprocess.run(
        [*git, "status", "--porcelain", "src"], capture_output=True, text=True, check=False
    ).stdout.strip()
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    named = os.environ.get("RELAY_COMMIT")  # of a copy without its repository
    return {
        "command": " ".join(["python", *(without_folder(argument) for argument in sys.orig_argv[1:])]),
        "commit": named or commit + ("+dirty" if dirty else ""),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": {"python": platform.python_version(), **versions},
    }


def without_folder(argument: str) -> str:
    """A file of this machine by its name alone; what lies in memory has the same path everywhere."""
    return Path(argument).name if argument.startswith("/") and not argument.startswith("/dev/") else argument


def machine() -> dict[str, Any]:
    """Processor, cores and memory of this machine."""
    fields = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    total_kib = next(
        int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal")
    )
    flags = set(fields.get("flags", "").split())
    return {
        "processor": fields.get("model name", platform.machine()),
        "cores": sum(line.startswith("processor") for line in Path("/proc/cpuinfo").read_text().splitlines()),
        "memory_gib": round(total_kib / 2**20, 1),
        "isa": "avx512" if "avx512f" in flags else "avx2" if "avx2" in flags else platform.machine(),
        "kernel": platform.release(),
    }


def write(path: str | None, figures: dict[str, Any]) -> None:
    """Print the figures as JSON, and write them with their provenance to ``path`` if given."""
    document = {**provenance(), **figures}
    text = json.dumps(document, indent=1)
    print(text)
    if path:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text + "\n")
