"""Recordings of a cell's gateway and workers, played again: the same events must lead to the same decisions."""

from collections.abc import Callable
from pathlib import Path

from relay.chaos.settings import CellResult
from relay.control.record import GatewayPlayer
from relay.record.frames import Head, read
from relay.record.replay import Player, replay
from relay.worker.record import WorkerPlayer

PLAYERS: dict[str, Callable[[Head], Player]] = {"gateway": GatewayPlayer.of, "worker": WorkerPlayer.of}


def play_again(folder: Path, result: CellResult) -> None:
    """Replay every recording under ``folder``. A process that was killed leaves one that is cut off: what is there is played."""
    for path in sorted(folder.glob("*.relay")):
        if not path.stat().st_size:
            continue  # killed before it had anything to record
        recording = read(path, cut=True)
        played = replay(recording, PLAYERS[recording.head.kind](recording.head))
        result.recordings += 1
        result.replayed += played.difference is None
        result.replayed_events += played.events
        if played.difference is not None:
            result.problems.append(f"{path} replayed to other decisions: {played.difference}")
    if not result.recordings:
        result.problems.append(f"no recordings under {folder}")
