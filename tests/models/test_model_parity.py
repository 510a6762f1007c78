"""Tiny random models: our program on our packed weights gives transformers' logits."""

import json
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from numpy_program import all_logits
from tiny_models import config_json, random_tensors, write_folder

from relay.errors import CorruptModelError
from relay.kernels.backend import Backend
from relay.models.hf_config import parse_config
from relay.models.store import open_model

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from teacher_forcing import BLOCK_SIZE, forced_logits

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = pytest.mark.peers

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
CASES = {
    "llama": config_json(),
    "llama-tied": config_json(tie_word_embeddings=True),
    "llama-bias": config_json(attention_bias=True),
    "llama-one-kv-head": config_json(num_key_value_heads=1),
    "llama-no-gqa": config_json(num_key_value_heads=4),
    "llama-odd-sizes": config_json(
        hidden_size=72, intermediate_size=100, num_attention_heads=3, num_key_value_heads=1, vocab_size=131
    ),
    "llama-linear-rope": config_json(rope_scaling={"type": "linear", "factor": 2.0}),
    "llama-yarn-rope": config_json(rope_scaling=YARN),
    "llama-yarn-attention": config_json(
        rope_scaling={**YARN, "attention_factor": 1.3, "beta_fast": 16, "beta_slow": 2}
    ),
    "llama-yarn-mscale": config_json(rope_scaling={**YARN, "mscale": 0.7, "mscale_all_dim": 0.3}),
    "llama-rope-parameters": config_json(rope_theta=None, rope_parameters={"rope_theta": 500000.0, **LLAMA3}),
    "mistral": config_json("mistral"),
    "mistral-wide-window": config_json("mistral", sliding_window=512),
    "qwen2": config_json("qwen2"),
    "qwen2-tied": config_json("qwen2", tie_word_embeddings=True),
    "qwen2-window-off": config_json("qwen2", use_sliding_window=False, sliding_window=8),
    "qwen3": config_json("qwen3", head_dim=32),
    "qwen3-bias-tied": config_json("qwen3", head_dim=16, attention_bias=True, tie_word_embeddings=True),
    # B76: head_dim in the config is not hidden / heads
    **{f"head-dim-{kv}-kv": config_json(head_dim=32, num_key_value_heads=kv) for kv in (1, 2, 4)},
}


def drop_none(raw: dict) -> dict:
    return {key: value for key, value in raw.items() if value is not None or key == "sliding_window"}


def reference_logits(folder: Path, token_ids: list[int]) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
    with torch.no_grad():
        return model.eval()(torch.tensor([token_ids])).logits[0].numpy()


def our_logits(folder: Path, cache: Path, token_ids: list[int]) -> np.ndarray:
    model = open_model(str(folder), cache_dir=cache, offline=True)
    return all_logits(model.program, model.pack, token_ids)


def assert_same_logits(ours: np.ndarray, theirs: np.ndarray, tolerance: float = 2e-5) -> None:
    """max|Δ| / max|logit| of every row."""
    error = np.abs(ours - theirs).max(axis=1) / np.abs(theirs).max(axis=1)
    assert error.max() <= tolerance, f"row {error.argmax()}: {error.max():.3g}"


def tokens(count: int, vocab: int, seed: int = 7) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, count).tolist()


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    raw = drop_none(CASES[name])
    folder = write_folder(tmp_path / name, raw)
    ids = tokens(80, raw["vocab_size"])
    assert_same_logits(our_logits(folder, tmp_path / "cache", ids), reference_logits(folder, ids))


@pytest.mark.parametrize(
    "name", ["llama-bias", "mistral", "qwen2", "qwen3-bias-tied", "head-dim-1-kv", "llama-yarn-rope"]
)
@pytest.mark.parametrize("kind", ["cpu", "reference"])
def test_backends_give_transformers_logits(name: str, kind: str, tmp_path: Path, cpu_kernels: None) -> None:
    """A prefilled prompt and one decode step a token, on the real backends."""
    raw = drop_none(CASES[name])
    folder = write_folder(tmp_path / name, raw)
    ids = tokens(40, raw["vocab_size"])
    theirs = reference_logits(folder, ids)
    model = open_model(str(folder), cache_dir=tmp_path / "cache")
    backend = make_backend(kind)
    backend.load(model.program, model.pack)
    backend.allocate_kv(4, BLOCK_SIZE, "float32")
    ours = forced_logits(backend, model.program, ids[:20], ids[20:])
    backend.close()
    assert_same_logits(ours, theirs[19:39])


def make_backend(kind: str) -> Backend:
    if kind == "reference":
        from relay.kernels.reference.backend import ReferenceBackend

        return ReferenceBackend()
    from relay.kernels.cpu.backend import CpuBackend

    return CpuBackend(1, max_tokens=64, max_sampled=4)


def test_llama3_rope_over_300_tokens(tmp_path: Path) -> None:
    """B74: scaling of type llama3 is applied, not just read."""
    folder = write_folder(tmp_path / "llama3", config_json(rope_scaling=LLAMA3))
    plain = write_folder(tmp_path / "plain", config_json())
    ids = tokens(300, 96)
    ours, theirs = our_logits(folder, tmp_path / "cache", ids), reference_logits(folder, ids)
    for position in (0, 63, 64, 299):
        assert np.abs(ours[position] - theirs[position]).max() < 1e-4
    assert_same_logits(ours, theirs)
    unscaled = our_logits(plain, tmp_path / "cache", ids)
    assert np.abs(unscaled[299] - ours[299]).max() > 1e-2, "the scaling changes nothing here: the test could not fail"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head_in_file", [True, False])
def test_tied_and_untied_heads(tied: bool, head_in_file: bool, tmp_path: Path) -> None:
    """B78: all four combinations of the flag and the tensor in the file (where the two disagree, the file's head counts)."""
    raw = config_json(tie_word_embeddings=tied)
    tensors = random_tensors(parse_config({**raw, "tie_word_embeddings": False}, {}, ""))
    if not head_in_file:
        del tensors["lm_head.weight"]
    if tied and head_in_file:
        copied = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
        config = open_model(
            str(write_folder(tmp_path / "copied", raw, tensors=copied)), cache_dir=tmp_path / "cache"
        ).config
        assert config.tied_embeddings
    folder = write_folder(tmp_path / "model", raw, tensors=tensors)
    if not tied and not head_in_file:
        with pytest.raises(
            CorruptModelError, match=r"lm_head\.weight is missing although tie_word_embeddings is false"
        ):
            open_model(str(folder), cache_dir=tmp_path / "cache", offline=True)
        return
    ids = tokens(20, 96)
    assert_same_logits(our_logits(folder, tmp_path / "cache", ids), reference_logits(folder, ids))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sharded_half_precision_as_transformers_saves_it(dtype: str, tmp_path: Path) -> None:
    raw = config_json("qwen3", head_dim=32)
    config = transformers.AutoConfig.for_model(**raw)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
    folder = tmp_path / "sharded"
    model.save_pretrained(folder, max_shard_size="60KB")
    assert len(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]) > 20
    assert len(list(folder.glob("*.safetensors"))) > 2
    ids = tokens(40, 96)
    assert_same_logits(our_logits(folder, tmp_path / "cache", ids), reference_logits(folder, ids))
    encodings = {
        e.encoding
        for e in open_model(str(folder), cache_dir=tmp_path / "cache").pack.header.entries
        if e.kind == "matrix"
    }
    assert encodings == {"BF16" if dtype == "bfloat16" else "F16"}


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_folder_saved_by_transformers(model_type: str, tmp_path: Path) -> None:
    """The config.json that this transformers writes (rope_parameters and all) is read back as it meant it."""
    raw = drop_none(config_json(model_type, head_dim=16))
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**raw))
    model.save_pretrained(tmp_path / "saved")
    ids = tokens(40, 96)
    assert_same_logits(
        our_logits(tmp_path / "saved", tmp_path / "cache", ids), reference_logits(tmp_path / "saved", ids)
    )


def test_float32_storage_gives_the_same_weights(tmp_path: Path) -> None:
    torch.manual_seed(4)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config_json()))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "half")
    ids = tokens(30, 96)
    packs = [open_model(str(tmp_path / "half"), cache_dir=tmp_path / "cache", storage=s) for s in ("native", "float32")]
    native, wide = (all_logits(p.program, p.pack, ids) for p in packs)
    assert packs[1].pack.file_bytes > packs[0].pack.file_bytes
    np.testing.assert_array_equal(native, wide)
