"""The line an agent leaves in its output when its engine crashed: its launcher finds it there when no gateway could be told.

One line a gateway, ``engine crashed for gateway N: JSON`` with an ``EngineExited`` as JSON. Whoever starts workers sees their
output anyway, on whatever machine, and needs no connection that the fault may have cut.
"""

from collections.abc import Iterable

import msgspec

from relay.protocol.messages import EngineExited

MAX_ROWS = 128  # named in the line, which launchers cut: beyond that nobody is alone anyway


def last_word(gateway: int, message: EngineExited) -> str:
    """The line for the engine's gateway number ``gateway``."""
    if len(message.manifest) > MAX_ROWS:
        message = msgspec.structs.replace(message, manifest=message.manifest[:MAX_ROWS])
    return f"engine crashed for gateway {gateway}: {msgspec.json.encode(message).decode()}"


def find_last_word(lines: Iterable[str], gateway: int) -> EngineExited | None:
    """What the newest such line of ``lines`` says; None without one, or if it is damaged."""
    start = f"engine crashed for gateway {gateway}: "
    for line in reversed(list(lines)):
        if line.startswith(start):
            try:
                return msgspec.json.decode(line[len(start) :], type=EngineExited)
            except msgspec.MsgspecError:
                return None
    return None
