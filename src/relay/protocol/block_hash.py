"""The chained hash that names a prefix of tokens; router and engine must agree on it, so it lives here.

A prefix is hashed in units of ``UNIT_TOKENS`` tokens whatever the block size. The hash of unit i covers the salt,
the namespace (numerics id) and every token before and in unit i. 16 bytes of BLAKE2b: a collision would need 2^64 units, and
the engine compares the tokens themselves on a hit as well.
"""

import hashlib
from array import array
from collections.abc import Sequence

UNIT_TOKENS = 16
HASH_BYTES = 16


def root_hash(namespace: str, salt: str) -> bytes:
    """The parent of the first unit. ``namespace`` is the numerics id, ``salt`` the request's ``cache_salt``."""
    digest = hashlib.blake2b(digest_size=HASH_BYTES, person=b"relay-prefix")
    encoded = namespace.encode()
    digest.update(len(encoded).to_bytes(4, "little") + encoded + salt.encode())
    return digest.digest()


def unit_hashes(parent: bytes, token_ids: Sequence[int]) -> list[bytes]:
    """Hashes of the full units of ``token_ids``, chained from ``parent``; a partial last unit has none."""
    raw = array("I", token_ids).tobytes()
    step = UNIT_TOKENS * 4
    hashes = []
    for end in range(step, len(raw) + 1, step):
        parent = hashlib.blake2b(parent + raw[end - step : end], digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return hashes
