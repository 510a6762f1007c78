"""Which pack files were read whole and found sound, so that a file changed since is read again and any other opens in milliseconds.

One small file a pack in ``checked/`` of the cache folder holds what ``stat`` said when the pack was last read against its
digest. Whatever writes to a file changes that; a bit that rots in silence does not: ``relay model pull`` reads every byte.
"""

import contextlib
import hashlib
import os
from pathlib import Path

from relay.models.pack import Pack


def check(pack: Pack, cache_dir: Path) -> None:
    """Read ``pack`` unless it is as it was when last read. Raises CorruptModelError."""
    note, state = _note(pack.path, cache_dir), _state(pack.path)
    try:
        known = note.read_text()
    except (OSError, UnicodeDecodeError):
        known = ""
    if known != state:
        pack.verify()
        remember(pack.path, cache_dir)


def remember(path: Path, cache_dir: Path) -> None:
    """The pack at ``path`` was just written or read whole. A cache that cannot be written forgets, and the pack is read again."""
    note = _note(path, cache_dir)
    with contextlib.suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True)
        temporary = note.with_name(f"{note.name}.{os.getpid()}")
        temporary.write_text(_state(path))
        os.replace(temporary, note)


def _note(path: Path, cache_dir: Path) -> Path:
    return cache_dir / "checked" / hashlib.blake2b(os.fsencode(path.resolve()), digest_size=12).hexdigest()


def _state(path: Path) -> str:
    found = path.stat()
    return f"{found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"
