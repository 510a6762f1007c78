"""The machine that runs this, for figures."""

import platform
from pathlib import Path


def machine() -> str:
    """Processor and cores, in one line."""
    model = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    cores = sum(line.startswith("processor") for line in _lines("/proc/cpuinfo"))
    return f"{model}, {cores} cores"


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()
