"""The cache folder.

::

    packs-vN/NAME.pack, N the pack version.
                      NAME: a short name, ``org--name`` of a repository, ``local-STEM-PATHKEY-STATEKEY`` of files elsewhere;
                      ``.float32`` before ``.pack`` where weights were widened, ``.direct`` where they stay in their safetensors
    files/            fetched model files, kept so that packing anew needs no network
    locks/            one file a pack being made
    checked/          one file a pack, see ``checked.py``
"""

import contextlib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from relay.errors import CorruptModelError, ModelNotFoundError
from relay.models.catalogue import ALIASES
from relay.models.pack import VERSION, Pack

PACK_SUFFIX = ".pack"


@dataclass(frozen=True, slots=True)
class CachedPack:
    """One pack of the cache; ``problem`` is the line that opening it would end with, and then ``digest`` is empty."""

    name: str
    path: Path
    num_bytes: int
    digest: str
    architecture: str
    problem: str = ""


def packs_dir(cache_dir: Path) -> Path:
    return cache_dir / f"packs-v{VERSION}"


def repository_pack_name(repository: str) -> str:
    """org/name → the stem of its pack file."""
    return repository.replace("/", "--")


def local_pack_prefix(path: Path) -> str:
    """What the names of all packs made from the file or folder ``path`` begin with, whether it is still there or not."""
    resolved = path.resolve()
    return f"local-{resolved.stem}-{short_key(str(resolved))}-"


def short_key(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=6).hexdigest()


def cached_names(cache_dir: Path) -> list[str]:
    """Names of all packs, sorted."""
    return sorted(path.name.removesuffix(PACK_SUFFIX) for path in packs_dir(cache_dir).glob(f"[!.]*{PACK_SUFFIX}"))


def cached_packs(cache_dir: Path) -> list[CachedPack]:
    """What the cache holds; a damaged pack is listed with its problem."""
    return [_describe(packs_dir(cache_dir) / (name + PACK_SUFFIX), name) for name in cached_names(cache_dir)]


def remove_cached(cache_dir: Path, name: str) -> int:
    """Delete the packs of ``name``: as listed; a short name or org/name, then every storage of it and its fetched file; or the
    path of the file or folder they were made from, which itself stays.

    Returns the bytes freed. Processes that map a pack keep it until they end. Raises ModelNotFoundError if there is none.
    """
    stem = repository_pack_name(name)
    paths = [packs_dir(cache_dir) / (stem + suffix + PACK_SUFFIX) for suffix in ("", ".float32", ".direct")]
    if name in ALIASES:
        paths.append(cache_dir / "files" / ALIASES[name].file_name)
    with contextlib.suppress(
        OSError, RuntimeError
    ):  # too long for a name, or the home of an unknown user: no path then
        local = local_pack_prefix(Path(name).expanduser())
        made = [cached for cached in cached_names(cache_dir) if cached.startswith(local)]
        paths += [packs_dir(cache_dir) / (cached + PACK_SUFFIX) for cached in made]
    present = [path for path in paths if os.path.isfile(path)]  # Path.is_file raises for a name too long to be one
    if not present:
        raise ModelNotFoundError(f"model {name} is not in the cache {cache_dir}; 'relay model list' shows what is")
    freed = sum(path.stat().st_size for path in present)
    for path in present:
        path.unlink(missing_ok=True)
    return freed


def _describe(path: Path, name: str) -> CachedPack:
    num_bytes = path.stat().st_size
    try:
        pack = Pack(path, rebuild=f"relay model pull {name}")
        pack.check_files()
    except CorruptModelError as error:
        return CachedPack(name, path, num_bytes, "", "", str(error))
    return CachedPack(name, path, num_bytes, pack.digest, pack.config.architecture)
