"""The pack that a spec names, as every process of a worker opens it."""

from pathlib import Path

from relay.errors import CorruptModelError, ModelNotFoundError
from relay.models.pack import Pack
from relay.worker.spec import WorkerSpec


def open_pack(spec: WorkerSpec) -> Pack:
    """Raises ModelNotFoundError, and CorruptModelError for another model or files that no longer hold its weights."""
    try:
        pack = Pack(Path(spec.pack_path))
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"no pack file at {spec.pack_path}") from error
    if spec.model_digest and pack.digest != spec.model_digest:
        raise CorruptModelError(f"{spec.pack_path}: model digest {pack.digest}, expected {spec.model_digest}")
    pack.take_files()
    return pack
