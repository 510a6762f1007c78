"""What must be as before when all requests have ended: blocks, sequences, descriptors, processes, shared memory."""

import os
from pathlib import Path
from typing import Any

SHARED_MEMORY = Path("/dev/shm")


def shared_memory() -> set[str]:
    """Names in /dev/shm that are ours by their name."""
    return {path.name for path in SHARED_MEMORY.iterdir() if path.name.startswith("relay")}


def unowned(names: set[str]) -> list[str]:
    """Those of ``names`` that no running process has mapped (somebody else's server may run beside us)."""
    found = set(names)
    for entry in Path("/proc").iterdir():
        if found and entry.name.isdigit():
            try:
                maps = (entry / "maps").read_text()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            found = {name for name in found if f"{SHARED_MEMORY}/{name}" not in maps}
    return sorted(found)


def descriptors(pid: int) -> list[str]:
    """What every open descriptor of ``pid`` is: a path, or a kind with its number taken off. Sorted."""
    folder = Path(f"/proc/{pid}/fd")
    kinds = []
    for entry in folder.iterdir():
        try:
            kinds.append(os.readlink(entry).partition(":[")[0])
        except FileNotFoundError:
            continue
    return sorted(kinds)


def descendants(pid: int) -> list[int]:
    """Every process below ``pid``."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, queue = [], [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def unquiet(status: dict[str, Any]) -> list[str]:
    """What is still held or not back, one line each; empty when all is quiet."""
    lines = [status["alarm"]] if status["alarm"] else []
    lines += [f"{count} requests {what}" for what, count in status["requests"].items() if count]
    for worker in status["workers"]:
        if worker["state"] != "ready":
            lines.append(f"{worker['id']} is {worker['state']}")
        lines += [
            f"{worker['id']}: {field} {worker[field]}"
            for field in ("kv_used", "running", "waiting", "placed")
            if worker[field]
        ]
    return lines
