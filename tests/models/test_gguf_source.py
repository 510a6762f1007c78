"""GGUF files: every stored type comes back exactly, q and k rows in their own order, damage named."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_files import permuted, write_gguf
from numpy_program import all_logits
from tiny_models import config_json, random_tensors, write_folder

from relay.errors import CorruptModelError
from relay.kernels.packing import unpack_matrix, widen
from relay.models.config import ModelConfig
from relay.models.gguf_source import GgufSource
from relay.models.hf_config import parse_config
from relay.models.store import open_model

T = gguf.GGMLQuantizationType


def config_of(model_type: str = "llama", **changes) -> ModelConfig:
    return parse_config(config_json(model_type, **changes), {}, "")


@pytest.mark.parametrize(
    ("kind", "encoding"),
    [
        (T.F32, "F32"),
        (T.F16, "F16"),
        (T.BF16, "BF16"),
        (T.Q8_0, "Q8_0"),
        (T.Q4_1, "Q4_1"),
        (T.Q4_0, "Q4_1"),
        (T.Q5_0, "F32"),
    ],
)
def test_every_type_widens_to_the_gguf_packages_values(kind: T, encoding: str, tmp_path: Path) -> None:
    config = config_of(head_dim=32)
    tensors = random_tensors(config)
    source = GgufSource(write_gguf(tmp_path / "m.gguf", config, tensors, kind))
    assert source.config.head_dim == 32
    heads = {"q": ("self_attn.q_proj", 4), "k": ("self_attn.k_proj", 2), "down": ("mlp.down_proj", None)}
    for part, (name, count) in heads.items():
        matrix = source.matrix(f"layers.1.{part}")
        assert matrix.encoding.name == encoding
        original = tensors[f"model.layers.1.{name}.weight"]
        stored = original if count is None else permuted(original, count)
        expected = gguf.dequantize(gguf.quantize(stored, kind), kind)
        if count is not None:  # quantised by row, so that undoing the order of rows commutes with quantising
            expected = gguf.dequantize(gguf.quantize(original, kind), kind)
        np.testing.assert_array_equal(widen(matrix), expected)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_gguf_and_safetensors_of_one_model_are_one_model(model_type: str, tmp_path: Path) -> None:
    changes = {"head_dim": 32, "attention_bias": True} if model_type != "qwen2" else {}
    raw = config_json(model_type, **changes)
    config = parse_config(raw, {}, "")
    tensors = random_tensors(config)
    folder = open_model(str(write_folder(tmp_path / "hf", raw, tensors=tensors)), cache_dir=tmp_path / "cache")
    file = open_model(str(write_gguf(tmp_path / "m.gguf", config, tensors)), cache_dir=tmp_path / "cache")
    for entry in folder.pack.header.entries:
        if entry.kind == "matrix":
            np.testing.assert_array_equal(
                unpack_matrix(file.pack.matrix(entry.name)), unpack_matrix(folder.pack.matrix(entry.name))
            )
        elif entry.kind == "vector":
            np.testing.assert_array_equal(file.pack.vector(entry.name), folder.pack.vector(entry.name))
    ids = [5, 17, 3, 90, 2, 44]
    np.testing.assert_array_equal(
        all_logits(file.program, file.pack, ids), all_logits(folder.program, folder.pack, ids)
    )


def test_tied_head_is_a_missing_output_tensor(tmp_path: Path) -> None:
    config = config_of(tie_word_embeddings=True)
    assert GgufSource(write_gguf(tmp_path / "m.gguf", config, random_tensors(config))).config.tied_embeddings


def test_rope_frequency_factors_are_read(tmp_path: Path) -> None:
    config = config_of()
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    path = write_gguf(tmp_path / "m.gguf", config, random_tensors(config), extra={"rope_freqs.weight": factors})
    assert GgufSource(path).config.rope.frequency_factors == tuple(factors.tolist())


def test_rope_scaling_types(tmp_path: Path) -> None:
    config = config_of()
    tensors = random_tensors(config)
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    rope = GgufSource(write_gguf(tmp_path / "l.gguf", config, tensors, metadata=linear)).config.rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)
    yarn = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 128,
    }
    rope = GgufSource(write_gguf(tmp_path / "y.gguf", config, tensors, metadata=yarn)).config.rope
    assert (rope.kind, rope.original_max_position) == ("yarn", 128)
    with pytest.raises(CorruptModelError, match="'longrope' is not served"):
        GgufSource(write_gguf(tmp_path / "x.gguf", config, tensors, metadata={"llama.rope.scaling.type": "longrope"}))


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ({"llama.expert_count": 8}, "expert_count"),
        ({"llama.attention.sliding_window": 16}, "sliding_window 16"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count"),
    ],
)
def test_unserved_metadata_is_refused_by_name(metadata: dict, text: str, tmp_path: Path) -> None:
    config = config_of()
    path = write_gguf(tmp_path / "m.gguf", config, random_tensors(config), metadata=metadata)
    with pytest.raises(CorruptModelError, match=text):
        GgufSource(path)


def test_unknown_tensor_is_refused(tmp_path: Path) -> None:
    config = config_of()
    extra = {"blk.0.ffn_gate_inp.weight": np.zeros((4, 64), np.float32)}
    with pytest.raises(CorruptModelError, match=r"blk\.0\.ffn_gate_inp\.weight belongs to no llama"):
        GgufSource(write_gguf(tmp_path / "m.gguf", config, random_tensors(config), extra=extra))


def test_damaged_files_end_in_one_line_naming_file_and_tensor(tmp_path: Path) -> None:
    config = config_of()
    whole = write_gguf(tmp_path / "whole.gguf", config, random_tensors(config)).read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [0, 3, 4, 20, 100, len(whole) // 8, len(whole) // 2, len(whole) - 100]:
        cut.write_bytes(whole[:size])
        with pytest.raises(CorruptModelError) as refused:
            GgufSource(cut)
        text = str(refused.value)
        assert str(cut) in text
        assert "\n" not in text
        assert any(
            words in text for words in ("(empty)", "not begin", "version", "header is truncated", "truncated: tensor")
        )
    assert "truncated: tensor lm_head" not in text
    assert "truncated: tensor output.weight" in text
    cut.write_bytes(b"NOPE" + whole[4:])
    with pytest.raises(CorruptModelError, match="does not begin as one"):
        GgufSource(cut)
    cut.write_bytes(b"GGUF\x63\0\0\0" + whole[8:])
    with pytest.raises(CorruptModelError, match="version 99; 2 and 3 are served"):
        GgufSource(cut)


def test_random_damage_never_escapes_as_another_error(tmp_path: Path) -> None:
    config = config_of()
    whole = bytearray(write_gguf(tmp_path / "whole.gguf", config, random_tensors(config)).read_bytes())
    rng = np.random.default_rng(0)
    header = whole.index(b"blk.1.ffn_down") + 200
    refused = []
    for _ in range(150):
        damaged = bytearray(whole)
        for position in rng.integers(0, header, 3):
            damaged[position] = rng.integers(0, 256)
        path = tmp_path / "damaged.gguf"
        path.write_bytes(damaged)
        try:
            source = GgufSource(path)
            source.tokenizer  # noqa: B018 - reads the metadata
        except CorruptModelError as error:
            refused.append(str(error))
    assert len(refused) > 30
    assert all(str(path) in text for text in refused)


def test_impossible_sizes_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    config = config_of()
    tensors = random_tensors(config)
    for changes in ({"max_positions": 1 << 30}, {"hidden": 1 << 30}, {"num_kv_heads": 3}):
        path = tmp_path / "m.gguf"
        fine = write_gguf(path, config, tensors).read_bytes()
        for field, key in (
            ("max_positions", "context_length"),
            ("hidden", "embedding_length"),
            ("num_kv_heads", "head_count_kv"),
        ):
            if field in changes:
                at = fine.index(key.encode()) + len(key) + 4  # after the key: type, then the value
                path.write_bytes(fine[:at] + changes[field].to_bytes(4, "little") + fine[at + 4 :])
        with pytest.raises(CorruptModelError, match="impossible sizes"):
            GgufSource(path)
