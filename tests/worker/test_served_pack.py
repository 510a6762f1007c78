"""A worker opens the pack of its cluster's model or ends with one line, before anything is loaded."""

import os
import sys
import time
from pathlib import Path

import msgspec
import pytest

from relay.errors import CorruptModelError, ModelNotFoundError, UsageError
from relay.models.store import open_model
from relay.worker.assembly import assemble
from relay.worker.served_pack import open_pack
from relay.worker.spec import WorkerSpec

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

from tiny_models import config_json, write_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "m", config_json())


@pytest.fixture
def spec(folder: Path, tmp_path: Path) -> WorkerSpec:
    """Of a direct pack."""
    model = open_model(str(folder), cache_dir=tmp_path / "cache", for_device=True)
    return WorkerSpec(
        worker="w",
        incarnation=1,
        gateways=[],
        pack_path=str(model.pack.path),
        model_digest=model.digest,
        backend="reference",
    )


def test_no_pack_and_another_model(spec: WorkerSpec) -> None:
    with pytest.raises(ModelNotFoundError, match="no pack file at /none"):
        open_pack(msgspec.structs.replace(spec, pack_path="/none"))
    with pytest.raises(CorruptModelError, match=rf"model digest {spec.model_digest}, expected 00"):
        open_pack(msgspec.structs.replace(spec, model_digest="00"))


def test_a_backend_that_needs_panels_says_so(spec: WorkerSpec) -> None:
    with pytest.raises(UsageError, match="only --backend cuda takes weights out of safetensors"):
        assemble(spec)


def test_the_same_weights_in_a_touched_file_are_taken(spec: WorkerSpec, folder: Path) -> None:
    time.sleep(0.02)  # longer than a tick of the clock that files are stamped with
    os.utime(folder / "model.safetensors")
    embed = open_pack(spec).in_files("embed")
    assert embed is not None
    embed.parts[0].file.check()


def test_other_weights_are_refused_by_every_process(spec: WorkerSpec, folder: Path) -> None:
    write_folder(folder, config_json(), seed=1)
    for start in (open_pack, assemble):
        with pytest.raises(
            CorruptModelError, match=r"model\.safetensors: damaged or changed: the weights of embed do not"
        ):
            start(spec)
