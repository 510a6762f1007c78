"""Weights straight out of safetensors are on the device what a pack of them is, bit for bit: every type, ranks, int8."""

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from relay.errors import CorruptModelError
from relay.kernels.model_files import FileMatrix
from relay.kernels.perturbed import NudgedWeights
from relay.kernels.program import Program
from relay.kernels.ranks.split import split_program
from relay.kernels.ranks.weights import RankWeights
from relay.kernels.weights import WeightSource
from relay.models.config import ModelConfig, RopeConfig
from relay.models.direct_packer import write_direct_pack
from relay.models.layout import MatrixItem, weight_items
from relay.models.llama import build_program
from relay.models.pack import Pack
from relay.models.packer import write_pack
from relay.models.safetensors_source import SafetensorsSource, file_name

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
file_upload = pytest.importorskip("relay.kernels.cuda.file_upload")
loading = pytest.importorskip("relay.kernels.cuda.loading")
weights = pytest.importorskip("relay.kernels.cuda.weights")
Device = pytest.importorskip("relay.kernels.cuda.ops").Device

CONFIG = ModelConfig(
    architecture="qwen3", vocab=200, hidden=96, intermediate=256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32,
    rms_eps=1e-5, max_positions=64, rope=RopeConfig(theta=1e4), tied_embeddings=False, qk_norm=True,
)  # fmt: skip
NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


def write_safetensors(path: Path, tensors: "dict[str, torch.Tensor]") -> None:
    """As the library writes it, but that tensors begin wherever the one before ends."""
    header, at = {}, 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    raw += b" " * (1 - len(raw) % 2)  # so that every tensor begins at an odd place
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for tensor in tensors.values():
            file.write(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def model_folder(folder: Path, stored: str) -> SafetensorsSource:
    """Random weights of CONFIG in two shards; ``stored``: one type, or "mixed"."""
    folder.mkdir()
    raw = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 200, "hidden_size": 96,
        "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "rope_theta": 1e4, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw))
    generator = torch.Generator().manual_seed(5)
    kinds = list(NAMES)
    shards: list[dict[str, torch.Tensor]] = [{}, {}]
    for item in weight_items(CONFIG):
        wide = item.rows if isinstance(item, MatrixItem) else item.sizes
        for index, (part, rows) in enumerate(zip(item.parts, wide, strict=True)):
            shape = (rows, item.k) if isinstance(item, MatrixItem) else (rows,)
            values = torch.randn(shape, generator=generator) * 3
            kind = kinds[index] if stored == "mixed" else getattr(torch, stored)
            shards[len(shards[0]) > 9][file_name(part)] = values.to(kind)
    weight_map = {}
    for index, shard in enumerate(shards):
        write_safetensors(folder / f"{index}.safetensors", shard)
        weight_map.update(dict.fromkeys(shard, f"{index}.safetensors"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    source = SafetensorsSource(folder)
    assert source.config == CONFIG
    return source


def both_ways(tmp_path: Path, stored: str) -> tuple[Pack, Pack]:
    source = model_folder(tmp_path / "m", stored)
    write_pack(source, tmp_path / "full.pack")
    write_direct_pack(source, tmp_path / "direct.pack")
    return Pack(tmp_path / "full.pack"), Pack(tmp_path / "direct.pack")


def loaded(
    pack: WeightSource,
    program: Program,
    dtype: str,
    quantized: bool = False,
    moved: "list[int] | None" = None,
    on: str = "cpu",
) -> dict[str, torch.Tensor]:
    """Every tensor that a backend on device ``on`` has after its load."""
    device = Device(on, max_decodes=8)
    progress = weights.no_progress if moved is None else moved.append
    upload = weights.WeightUpload(on, progress, weights.TYPES[dtype])
    with ExitStack() as stack:
        if on == "cpu":
            stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor))
            stack.enter_context(mock.patch.object(torch.cuda, "Event"))
        coded = loading.coded_names(program) if quantized else frozenset()
        loading.load_weights(program, pack, device, upload, coded=coded)
    found = {f"matrix {name}": tensor for name, tensor in device.matrices.items()}
    found |= {f"scale {name}": tensor for name, tensor in device.scales.items()}
    return found | {f"vector {name}": tensor for name, tensor in device.vectors.items()}


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
        assert got[name].is_contiguous(), name
        assert torch.equal(got[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32", "mixed"])
def test_every_tensor_is_that_of_the_pack(
    stored: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_upload, "CHUNK_BYTES", 4098)  # many chunks; none ends where a row or a value does
    full, direct = both_ways(tmp_path, stored)
    program = build_program(CONFIG)
    moved: list[int] = []
    want = loaded(full, program, dtype)
    assert len(want) == 2 * 4 + 2 + 2 * 4 + 1 + 2
    assert_same(loaded(direct, program, dtype, moved=moved), want)
    assert sum(moved) == sum(rows.num_bytes for rows in direct.matrices())
    assert len(moved) > 100


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("stored", ["bfloat16", "mixed"])
def test_on_a_device(stored: str, quantized: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_upload, "CHUNK_BYTES", 4098)
    full, direct = both_ways(tmp_path, stored)
    program = build_program(CONFIG)
    want = loaded(full, program, "bfloat16", quantized, on="cuda:0")
    for _ in range(5):
        assert_same(loaded(direct, program, "bfloat16", quantized, on="cuda:0"), want)


@pytest.mark.parametrize("threads", [1, 3, 64])
def test_any_number_of_readers(threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_upload, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(threads))
    full, direct = both_ways(tmp_path, "bfloat16")
    program = build_program(CONFIG)
    assert_same(loaded(direct, program, "bfloat16"), loaded(full, program, "bfloat16"))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_no_buffer_is_filled_again_before_its_copy_has_ended(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that copies as late as it may: only when something waits for it."""
    queue: list[Callable[[], None]] = []
    waits = 0

    class Event:
        def record(self) -> None:
            self.at = len(queue)

        def synchronize(self) -> None:
            nonlocal waits
            waits += 1
            assert len(queue) - self.at >= 2, "no copy was queued behind the one that is waited for"
            run(self.at)

    def run(until: int) -> None:
        for index in range(until):
            queue[index]()
            queue[index] = lambda: None

    class Late(file_upload.FileUpload):
        def _copy(self, matrix: FileMatrix, chunk: object, stage: torch.Tensor) -> None:
            super()._copy(matrix, chunk, torch.zeros_like(stage))  # makes room
            super_copy, state = super()._copy, dict(self._open)

            def copy() -> None:
                now, self._open = self._open, state
                super_copy(matrix, chunk, stage)
                self._open = now

            queue.append(copy)

    monkeypatch.setattr(file_upload, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(file_upload, "_stage", lambda pinned: torch.empty(1000, dtype=torch.uint8))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(threads))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    full, direct = both_ways(tmp_path, "bfloat16")
    program = build_program(CONFIG)
    upload = Late("cpu")
    upload._queues = True
    found: dict[str, torch.Tensor] = {}
    names = loading.shapes_of(program)[0]
    upload.load({name: direct.in_files(name) for name in names}, found.__setitem__)
    assert waits == len(queue) - (2 * threads + 1) > 100
    run(len(queue))
    want = loaded(full, program, "bfloat16")
    assert_same({f"matrix {name}": found[name] for name in found}, {k: v for k, v in want.items() if "matrix" in k})


def test_int8_has_the_same_codes_and_scales(tmp_path: Path) -> None:
    full, direct = both_ways(tmp_path, "bfloat16")
    program = build_program(CONFIG)
    want = loaded(full, program, "bfloat16", quantized=True)
    assert sum(name.startswith("scale") for name in want) == 9
    assert_same(loaded(direct, program, "bfloat16", quantized=True), want)


@pytest.mark.parametrize("stored", ["bfloat16", "mixed"])
def test_ranks_take_their_rows_and_columns(stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_upload, "CHUNK_BYTES", 4098)
    full, direct = both_ways(tmp_path, stored)
    for rank in range(2):
        part = split_program(build_program(CONFIG), 2, rank)
        got, want = (loaded(RankWeights(pack, part.cuts), part.program, "bfloat16") for pack in (direct, full))
        assert any(cut.depth for cut in part.cuts.values())
        assert_same(got, want)


def test_a_wrapper_between_hides_nothing(tmp_path: Path) -> None:
    _, direct = both_ways(tmp_path, "bfloat16")
    program = build_program(CONFIG)
    want = loaded(direct, program, "bfloat16")
    got = loaded(NudgedWeights(direct, "layers.0.mlp_norm", coarse=True), program, "bfloat16")
    assert not torch.equal(got.pop("vector layers.0.mlp_norm"), want.pop("vector layers.0.mlp_norm"))
    assert_same(got, want)


def test_a_shape_that_is_not_the_programs(tmp_path: Path) -> None:
    _, direct = both_ways(tmp_path, "bfloat16")
    program = build_program(replace(CONFIG, intermediate=128))
    with pytest.raises(
        CorruptModelError, match=r"weight layers\.0\.gate_up is \[512, 96\], the program needs \[256, 96\]"
    ):
        loaded(direct, program, "bfloat16")
    with pytest.raises(CorruptModelError, match=r"the model has no weight layers\.2\.qkv"):
        loaded(direct, build_program(replace(CONFIG, num_layers=3)), "bfloat16")


def test_a_file_that_changed_before_or_while_it_is_read(tmp_path: Path) -> None:
    _, direct = both_ways(tmp_path, "bfloat16")
    program = build_program(CONFIG)
    file = tmp_path / "m" / "1.safetensors"

    def touch(count: int) -> None:
        if not touched:
            time.sleep(0.02)  # longer than a tick of the clock that files are stamped with
            os.utime(file)
            touched.append(count)

    touched: list[int] = []
    with (
        mock.patch.object(weights, "no_progress", touch),
        pytest.raises(CorruptModelError, match="changed after") as error,
    ):
        loaded(direct, program, "bfloat16")
    assert touched
    assert str(file) in str(error.value)
    with pytest.raises(CorruptModelError, match=r"1\.safetensors: changed after its weights were read whole"):
        loaded(direct, program, "bfloat16")
    file.unlink()
    with pytest.raises(CorruptModelError, match=r"1\.safetensors: cannot be read \(No such file"):
        loaded(direct, program, "bfloat16")


def test_a_file_that_is_cut_off_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_upload, "CHUNK_BYTES", 1000)
    _, direct = both_ways(tmp_path, "bfloat16")
    file = tmp_path / "m" / "1.safetensors"

    def cut_off(count: int) -> None:
        os.truncate(file, 5000)

    with (
        mock.patch.object(weights, "no_progress", cut_off),
        pytest.raises(CorruptModelError, match=r"1\.safetensors: truncated: byte"),
    ):
        loaded(direct, build_program(CONFIG), "bfloat16")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weights")]
