"""The numerics id: the short name of everything that determines an output bit.

Processes with equal ids may exchange KV blocks and resume each other's sequences; any other pair refuses.
"""

import hashlib
from collections.abc import Mapping

ID_BYTES = 8


def numerics_id(parts: Mapping[str, str]) -> str:
    """16 hex digits over ``parts`` (a backend's ``numerics()`` plus the pack's digest and the like).

    Independent of the order of ``parts``; names and values are length-prefixed, so no two different mappings
    serialise alike. Raises ValueError when there is nothing to name.
    """
    if not parts:
        raise ValueError("a numerics id needs at least one part")
    digest = hashlib.blake2b(digest_size=ID_BYTES, person=b"relay-numerics")
    for name in sorted(parts):
        for text in (name, parts[name]):
            encoded = text.encode()
            digest.update(len(encoded).to_bytes(4, "little") + encoded)
    return digest.hexdigest()
