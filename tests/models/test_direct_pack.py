"""Packs whose matrices stay in safetensors: what they name, how they are found again, and what a changed file does."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import write_gguf
from safetensors.numpy import save_file
from tiny_models import config_json, random_tensors, write_folder

from relay.errors import CorruptModelError, ModelNotFoundError, UsageError
from relay.kernels.model_files import FileMatrix, OpenFiles
from relay.kernels.packing import unpack_matrix
from relay.models import references
from relay.models.cache import cached_packs, packs_dir, remove_cached
from relay.models.hf_config import parse_config
from relay.models.loaded import LoadedModel
from relay.models.pack import Pack
from relay.models.progress import NoProgress
from relay.models.safetensors_source import SafetensorsSource
from relay.models.store import ModelStore, open_model

LAST = "model.layers.1.mlp.up_proj.weight"


def tensors(seed: int = 0, **changes: Any) -> dict[str, np.ndarray]:
    return random_tensors(parse_config(config_json(**changes), {}, ""), seed)


def direct(folder: Path, cache: Path) -> LoadedModel:
    return open_model(str(folder), cache_dir=cache, for_device=True)


def shards(folder: Path, everything: dict[str, np.ndarray], count: int = 3) -> Path:
    """``everything`` in ``count`` files with an index."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_json()))
    names, weight_map = sorted(everything), {}
    for i in range(count):
        part = {name: everything[name] for name in names[i::count]}
        save_file(part, folder / f"model-{i}.safetensors")
        weight_map.update(dict.fromkeys(part, f"model-{i}.safetensors"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def values(matrix: FileMatrix) -> np.ndarray:
    """fp32 [n, k] of the files, read plainly."""
    rows = []
    with OpenFiles() as files:
        for part in matrix.parts:
            raw = bytearray(matrix.part_bytes(part))
            files.descriptor(part.file)
            files.read(part.file, part.offset, memoryview(raw))
            rows.append(np.frombuffer(raw, "<f4").reshape(-1, matrix.stored_k))
        files.check()
    first, last = matrix.columns or (0, matrix.stored_k)
    return np.concatenate(rows)[:, first:last]


def test_it_names_what_a_full_pack_holds(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", config_json("qwen2"), seed=3)
    full = open_model(str(folder), cache_dir=tmp_path / "cache")
    model = direct(folder, tmp_path / "cache")
    assert (model.name, model.config, model.max_model_len) == (full.name, full.config, full.max_model_len)
    compared = 0
    for entry in full.pack.header.entries:
        if entry.kind == "matrix":
            found = model.pack.in_files(entry.name)
            assert found is not None
            assert (found.n, found.k) == entry.shape
            np.testing.assert_array_equal(values(found), unpack_matrix(full.pack.matrix(entry.name)))
            assert full.pack.in_files(entry.name) is None
            compared += 1
        elif entry.kind == "vector":
            np.testing.assert_array_equal(model.pack.vector(entry.name), full.pack.vector(entry.name))
            assert model.pack.in_files(entry.name) is None
    assert compared == 2 * 4 + 2
    assert model.tokenizer_files == full.tokenizer_files
    assert sum(rows.values for rows in model.pack.matrices()) == sum(rows.values for rows in full.pack.matrices())
    assert model.pack.file_bytes < 60_000 < full.pack.file_bytes
    model.pack.verify()


def test_backends_that_need_panels_refuse(tmp_path: Path) -> None:
    pack = direct(write_folder(tmp_path / "m", config_json()), tmp_path / "cache").pack
    with pytest.raises(UsageError, match="only --backend cuda takes weights out of safetensors"):
        pack.matrix("embed")
    for name in ("layers.7.qkv", "final_norm"):
        with pytest.raises(KeyError):
            pack.matrix(name)


def test_the_digest_is_of_the_weights_alone(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    single = direct(write_folder(tmp_path / "a", config_json()), cache)
    digest = single.digest
    elsewhere = shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert direct(elsewhere, cache).digest == direct(shards(tmp_path / "c", tensors()), cache).digest == digest
    assert open_model(str(elsewhere), cache_dir=cache).digest != digest  # the packed form: a digest of other bytes
    for name in ("lm_head.weight", LAST, "model.norm.weight", "model.layers.0.self_attn.k_proj.weight"):
        changed = tensors()
        changed[name].reshape(-1)[-1] = np.nextafter(changed[name].reshape(-1)[-1], np.float32(9))
        assert direct(write_folder(tmp_path / name, config_json(), tensors=changed), cache).digest != digest
    stored = {name: tensor.astype(np.float16) for name, tensor in tensors().items()}
    assert direct(write_folder(tmp_path / "half", config_json(), tensors=stored), cache).digest != digest


def test_leaves_are_joined_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small leaves and several threads: a swap of two leaves of one tensor is another digest, a second run the same."""
    monkeypatch.setattr(references, "LEAF_BYTES", 256)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(7))
    everything = tensors()
    swapped = tensors()
    swapped["model.embed_tokens.weight"][[0, 1]] = everything["model.embed_tokens.weight"][[1, 0]]  # rows of 256 bytes
    digests = [
        direct(write_folder(tmp_path / name, config_json(), tensors=given), tmp_path / "cache").digest
        for name, given in (("a", everything), ("b", everything), ("c", swapped))
    ]
    assert digests[0] == digests[1] != digests[2]


def test_a_second_start_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "m", config_json())
    first = direct(folder, tmp_path / "cache")

    def fail(*arguments: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr("relay.models.pack.read_whole", fail)
    monkeypatch.setattr("relay.models.direct_packer.read_whole", fail)
    assert direct(folder, tmp_path / "cache").digest == first.digest
    os.utime(folder / "model.safetensors")
    with pytest.raises(AssertionError, match="read again"):
        direct(folder, tmp_path / "cache")


def test_a_touched_file_is_read_again_to_the_same_digest(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", config_json())
    before = direct(folder, tmp_path / "cache")
    file = folder / "model.safetensors"
    status = file.stat()
    time.sleep(0.02)  # longer than a tick of the clock that files are stamped with
    os.chmod(file, 0o600)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))  # only the time of the inode's change differs
    with pytest.raises(CorruptModelError, match="changed since its weights were read whole; a new start"):
        before.pack.check_files()
    after = direct(folder, tmp_path / "cache")
    assert (after.digest, after.pack.path) == (before.digest, before.pack.path)
    after.pack.check_files()


def test_an_edited_file_is_a_new_model_and_its_old_pack_goes(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", config_json())
    old = direct(folder, tmp_path / "cache")
    full = open_model(str(folder), cache_dir=tmp_path / "cache")
    time.sleep(0.02)
    write_folder(folder, config_json(), seed=1)
    new = direct(folder, tmp_path / "cache")
    assert new.digest != old.digest
    assert not old.pack.path.exists()
    assert full.pack.path.exists()  # of another storage: it goes when it is made anew itself
    with pytest.raises(CorruptModelError, match=r"model\.safetensors: changed since"):
        old.pack.check_files()
    with pytest.raises(CorruptModelError, match=r"model\.safetensors: changed since"), OpenFiles() as files:
        files.descriptor(old.pack.in_files("embed").parts[0].file)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (lambda file: file.unlink(), "cannot be read (No such file or directory)"),
        (lambda file: os.truncate(file, 5000), "(it had "),
    ],
)
def test_a_pack_given_by_itself_whose_files_changed(harm: Any, text: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", config_json())
    path = direct(folder, tmp_path / "cache").pack.path
    harm(folder / "model.safetensors")
    with pytest.raises(CorruptModelError) as refused:
        open_model(str(path), cache_dir=tmp_path / "cache")
    assert str(folder / "model.safetensors") in str(refused.value)
    assert text in str(refused.value)
    assert "\n" not in str(refused.value)
    (listed,) = cached_packs(tmp_path / "cache")
    assert text in listed.problem


def test_a_file_cut_off_after_it_was_opened(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", config_json())
    embed = direct(folder, tmp_path / "cache").pack.in_files("embed")
    assert embed is not None
    file = embed.parts[0].file
    with OpenFiles() as files:
        files.descriptor(file)
        time.sleep(0.02)
        os.truncate(file.path, 3000)
        with pytest.raises(CorruptModelError, match="truncated at byte 3000 while it was read"):
            files.read(file, 2000, memoryview(bytearray(5000)))
        with pytest.raises(CorruptModelError, match="changed since"):
            files.check()


def test_a_damaged_direct_pack_is_made_anew(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", config_json())
    model = direct(folder, tmp_path / "cache")
    whole = model.pack.path.read_bytes()
    for position in (9, 4096, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[position] ^= 4
        model.pack.path.write_bytes(damaged)
        if position == len(whole) - 1:
            with pytest.raises(CorruptModelError, match="places of its weights do not match"):
                Pack(model.pack.path)
        if position == 4096:  # found by reading it against its digest, which the file's times ask for
            with pytest.raises(CorruptModelError, match="rebuild it with: relay model pull --storage direct"):
                direct(folder, tmp_path / "cache")
            ModelStore(tmp_path / "cache").pull(str(folder), "direct")
        again = direct(folder, tmp_path / "cache")
        assert again.digest == model.digest
        again.pack.verify()


def test_rot_that_leaves_the_times_is_found_by_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "m", config_json())
    model = direct(folder, tmp_path / "cache")
    status = (folder / "model.safetensors").stat()
    with (folder / "model.safetensors").open("r+b") as file:
        embed = model.pack.in_files("embed")
        assert embed is not None
        file.seek(embed.parts[0].offset)
        first = file.read(1)[0]
        file.seek(embed.parts[0].offset)
        file.write(bytes([first ^ 1]))
    os.utime(folder / "model.safetensors", ns=(status.st_atime_ns, status.st_mtime_ns))
    monkeypatch.setattr("relay.kernels.model_files.ModelFile.check", lambda *arguments: None)
    direct(folder, tmp_path / "cache")
    with pytest.raises(CorruptModelError, match="is damaged: its content does not match its digest"):
        model.pack.verify()
    assert ModelStore(tmp_path / "cache").pull(str(folder), "direct").digest != model.digest


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("name", [LAST, "model.norm.weight"])
@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_weights_that_are_not_finite_are_refused(name: str, value: float, kind: type, tmp_path: Path) -> None:
    everything = {key: tensor.astype(kind) for key, tensor in tensors().items()}
    everything[name].reshape(-1)[-1] = value
    folder = write_folder(tmp_path / "m", config_json(), tensors=everything)
    part = "layers.1.up" if name == LAST else "final_norm"
    with pytest.raises(CorruptModelError, match=rf"m: damaged: weight {part} holds values that are not finite"):
        direct(folder, tmp_path / "cache")
    assert not list(packs_dir(tmp_path / "cache").glob("*"))


def test_wrong_shapes_and_types_are_named(tmp_path: Path) -> None:
    wrong = {**tensors(), LAST: np.zeros((96, 63), np.float32)}
    folder = write_folder(tmp_path / "shape", config_json(), tensors=wrong)
    with pytest.raises(
        CorruptModelError, match=r"weight layers\.1\.up has shape \[96, 63\], the config asks for \[96, 64\]"
    ):
        direct(folder, tmp_path / "cache")
    odd = {**tensors(), LAST: np.ones((96, 64), np.float64)}
    with pytest.raises(CorruptModelError, match=rf"tensor {LAST} has dtype F64; served: F32, F16, BF16"):
        direct(write_folder(tmp_path / "type", config_json(), tensors=odd), tmp_path / "cache")


def test_missing_tensors_shards_and_bytes(tmp_path: Path) -> None:
    missing = tensors()
    del missing[LAST]
    with pytest.raises(CorruptModelError, match=f"tensor {LAST} is missing"):
        direct(write_folder(tmp_path / "missing", config_json(), tensors=missing), tmp_path / "cache")
    folder = shards(tmp_path / "shards", tensors())
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(CorruptModelError, match=r"model-1\.safetensors: cannot be read"):
        direct(folder, tmp_path / "cache")
    folder = write_folder(tmp_path / "short", config_json())
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 1)
    with pytest.raises(CorruptModelError, match="ends 1 bytes after the end of the file"):
        direct(folder, tmp_path / "cache")


def test_only_safetensors_are_direct(tmp_path: Path) -> None:
    config = parse_config(config_json(), {}, "")
    gguf = write_gguf(tmp_path / "m.gguf", config, random_tensors(config, 0))
    assert open_model(str(gguf), cache_dir=tmp_path / "cache", for_device=True).pack.header.storage == "native"
    with pytest.raises(UsageError, match=r"--storage direct: .*m\.gguf is no folder of safetensors"):
        ModelStore(tmp_path / "cache").open(str(gguf), "direct")


class Hub:
    """One repository, as a folder that may be cleared."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, 0

    def packaged(self, model: Any, target: Path, progress: NoProgress) -> None:
        raise AssertionError("asked for a packaged model")

    def repository(self, repository: str, revision: str | None, offline: bool) -> Path:
        self.calls += 1
        if not self.folder.exists():
            raise ModelNotFoundError(f"{repository} is not here")
        return self.folder


def test_a_repository_is_asked_for_again_only_where_its_files_went(tmp_path: Path) -> None:
    hub = Hub(write_folder(tmp_path / "hub", config_json()))
    store = ModelStore(tmp_path / "cache", fetcher=hub)
    assert store.in_safetensors("org/name")
    assert not store.in_safetensors("smollm2")
    first = store.open("org/name", "direct")
    assert store.open("org/name", "direct").name == "org/name"
    assert hub.calls == 1
    shutil.rmtree(hub.folder)
    with pytest.raises(ModelNotFoundError, match="org/name is not here"):
        store.open("org/name", "direct")
    write_folder(hub.folder, config_json())
    assert store.open("org/name", "direct").digest == first.digest
    assert not store.in_safetensors("org--name.direct")
    assert store.open("org--name.direct").digest == first.digest  # as listed
    assert remove_cached(tmp_path / "cache", "org/name") == first.pack.file_bytes


def test_cuts_are_those_of_the_matrix(tmp_path: Path) -> None:
    found = direct(write_folder(tmp_path / "m", config_json()), tmp_path / "cache").pack.in_files("layers.0.qkv")
    assert found is not None  # [64 + 32 + 32, 64]
    whole = values(found)
    rows = [(32, 64), (80, 128), (0, 1)]
    cut = found.cut(rows, (8, 40))
    assert (cut.n, cut.k) == (81, 32)
    np.testing.assert_array_equal(values(cut), np.concatenate([whole[a:b, 8:40] for a, b in rows]))
    for bad_rows, columns in (([(0, 129)], None), ([(3, 3)], None), ([(0, 4)], (8, 65)), ([(0, 4)], (8, 8))):
        with pytest.raises(ValueError, match="of \\[128, 64\\]"):
            found.cut(bad_rows, columns)


def test_a_missing_source_is_no_direct_pack(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", config_json())
    source = SafetensorsSource(folder)
    place = source.place("embed")
    assert (place.path, place.shape) == (folder / "model.safetensors", (96, 64))
    with pytest.raises(KeyError):
        source.place("layers.9.q")
