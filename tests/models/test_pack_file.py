"""The pack file: what goes in comes out, it opens without being read, and damage never passes for a model."""

from pathlib import Path

import numpy as np
import pytest
from tiny_models import config_json, random_tensors, write_folder

from relay.errors import CorruptModelError
from relay.kernels.packing import unpack_matrix
from relay.models import pack as pack_module
from relay.models.hf_config import parse_config
from relay.models.pack import PREAMBLE_BYTES, Pack
from relay.models.packer import write_pack
from relay.models.safetensors_source import SafetensorsSource


@pytest.fixture
def source(tmp_path: Path) -> SafetensorsSource:
    return SafetensorsSource(write_folder(tmp_path / "m", config_json("qwen2"), seed=3))


@pytest.fixture
def path(source: SafetensorsSource, tmp_path: Path) -> Path:
    write_pack(source, tmp_path / "m.pack")
    return tmp_path / "m.pack"


def test_round_trip(source: SafetensorsSource, path: Path) -> None:
    pack = Pack(path)
    assert pack.config == source.config
    tensors = random_tensors(source.config, 3)
    qkv = np.concatenate([tensors[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv"])
    bias = np.concatenate([tensors[f"model.layers.1.self_attn.{x}_proj.bias"] for x in "qkv"])
    gate_up = np.concatenate([tensors[f"model.layers.0.mlp.{x}_proj.weight"] for x in ("gate", "up")])
    np.testing.assert_array_equal(unpack_matrix(pack.matrix("layers.1.qkv")), qkv)
    np.testing.assert_array_equal(pack.vector("layers.1.qkv_bias"), bias)
    np.testing.assert_array_equal(unpack_matrix(pack.matrix("layers.0.gate_up")), gate_up)
    np.testing.assert_array_equal(unpack_matrix(pack.matrix("lm_head")), tensors["lm_head.weight"])
    assert pack.vector("rope.cos").shape == (512, 8)
    pack.verify()


def test_arrays_are_aligned_and_read_only(path: Path) -> None:
    pack = Pack(path)
    for entry in pack.header.entries:
        if entry.kind == "matrix":
            data = pack.matrix(entry.name).data
            assert data.ctypes.data % 4096 == 0
            with pytest.raises(ValueError, match="read-only"):
                data[0] = 1
        elif entry.kind == "vector":
            assert pack.vector(entry.name).ctypes.data % 64 == 0


def test_unknown_names_and_kinds_are_key_errors(path: Path) -> None:
    pack = Pack(path)
    for bad in ("layers.9.qkv", "final_norm"):
        with pytest.raises(KeyError):
            pack.matrix(bad)
    with pytest.raises(KeyError):
        pack.vector("layers.0.qkv")


def test_same_weights_same_digest_and_one_bit_another(tmp_path: Path) -> None:
    digests = []
    for name, change in (("a", 0.0), ("b", 0.0), ("c", 2.0**-20)):
        tensors = random_tensors(parse_config(config_json(), {}, ""))
        tensors["model.layers.0.mlp.up_proj.weight"][3, 5] += change
        source = SafetensorsSource(write_folder(tmp_path / name, config_json(), tensors=tensors))
        write_pack(source, tmp_path / f"{name}.pack")
        digests.append(Pack(tmp_path / f"{name}.pack").digest)
    assert digests[0] == digests[1] != digests[2]


def test_every_truncation_is_refused(path: Path) -> None:
    whole = path.read_bytes()
    for size in [0, 1, 100, PREAMBLE_BYTES - 1, PREAMBLE_BYTES, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(CorruptModelError) as refused:
            Pack(path, rebuild="relay model pull thing")
        assert str(refused.value).startswith(f"{path}: truncated")
        assert str(refused.value).endswith("rebuild it with: relay model pull thing")


def test_flipped_bits_are_found_at_opening_or_by_verify(path: Path) -> None:
    whole = path.read_bytes()
    header_offset = Pack(path)._preamble.header_offset
    at_opening = [0, 9, 17, 30, 45, 80, 110, header_offset, len(whole) - 1]
    for position in [*at_opening, PREAMBLE_BYTES, header_offset - 1, len(whole) // 3]:
        damaged = bytearray(whole)
        damaged[position] ^= 4
        path.write_bytes(damaged)
        if position in at_opening:
            with pytest.raises(CorruptModelError, match=r"m\.pack"):
                Pack(path)
        else:
            pack = Pack(path)
            with pytest.raises(CorruptModelError, match="content does not match its digest"):
                pack.verify()


def test_other_versions_and_other_files_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_module, "VERSION", 99)
    with pytest.raises(CorruptModelError, match="pack version 1, this Relay reads versions 99 and 2"):
        Pack(path)
    path.write_bytes(b"x" * 10000)
    with pytest.raises(CorruptModelError, match="not a pack file"):
        Pack(path)


def test_failed_packing_leaves_nothing(
    source: SafetensorsSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "packs" / "m.pack"

    def fail(name: str) -> np.ndarray:
        raise CorruptModelError("no")

    monkeypatch.setattr(source, "vector", fail)
    with pytest.raises(CorruptModelError, match="no"):
        write_pack(source, target)
    assert list(target.parent.iterdir()) == []


def test_opening_reads_only_preamble_and_header(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashing is counted, so that a full read at opening cannot slip in."""
    hashed = []
    real = pack_module.digest_of
    monkeypatch.setattr(pack_module, "digest_of", lambda data: hashed.append(len(data)) or real(data))
    pack = Pack(path)
    assert sum(hashed) < 200 + pack._preamble.header_bytes


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_weights_that_are_not_finite_are_refused(name: str, value: float, tmp_path: Path) -> None:
    raw = config_json()
    tensors = random_tensors(parse_config(raw, {}, ""), 0)
    tensors[name].reshape(-1)[7] = value
    part = "layers.1.up" if "up_proj" in name else "final_norm"
    with pytest.raises(CorruptModelError, match=rf"weight {part} holds values that are not finite"):
        write_pack(SafetensorsSource(write_folder(tmp_path / "m", raw, tensors=tensors)), tmp_path / "m.pack")
    assert not (tmp_path / "m.pack").exists()
