"""The line an agent leaves in its output when its engine crashed: its launcher finds it there when no gateway could be told.

``engine crashed: JSON`` with an ``EngineExited`` as JSON. Whoever starts workers sees their
output anyway, on whatever machine, and needs no connection that the fault may have cut.
"""

import signal
from collections.abc import Iterable

import msgspec

from relay.protocol.messages import EngineExited

_START = "engine crashed: "
KILL_SIGNALS = (signal.SIGKILL, signal.SIGTERM)
MAX_ROWS = 128  # named in the line, which launchers cut: beyond that nobody is alone anyway


def ended_by_itself(message: EngineExited) -> bool:
    """Its engine crashed in a step: rows are named, and it neither left as asked nor was killed."""
    return bool(message.manifest) and message.status != 0 and message.signal not in KILL_SIGNALS


def last_word(message: EngineExited) -> str:
    """The line for all gateways."""
    if len(message.manifest) > MAX_ROWS:
        message = msgspec.structs.replace(message, manifest=message.manifest[:MAX_ROWS])
    return f"{_START}{msgspec.json.encode(message).decode()}"


def find_last_word(lines: Iterable[str]) -> EngineExited | None:
    """What the newest such line of ``lines`` says; None without one, or if it is damaged."""
    for line in reversed(list(lines)):
        if line.startswith(_START):
            try:
                return msgspec.json.decode(line[len(_START) :], type=EngineExited)
            except (msgspec.MsgspecError, RecursionError):
                return None
    return None
