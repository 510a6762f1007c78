"""Weights are unpacked on the device to what the host would have made of them, rounded once to bf16."""

import pytest

from relay.cli.devices import need_of
from relay.config import ServeConfig, WorkerConfig
from relay.devices import RoleDevices
from relay.kernels import packing
from relay.kernels.probe import GEOMETRY, ProbeWeights, probe_program
from relay.kernels.ranks.split import split_program
from relay.kernels.weights import Encoding
from relay.models.config import ModelConfig, RopeConfig
from relay.models.llama import build_program

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
loading = pytest.importorskip("relay.kernels.cuda.loading")
weights = pytest.importorskip("relay.kernels.cuda.weights")


@pytest.mark.parametrize("name", ["embed", "0.qkv", "0.out", "0.gate_up", "0.down", "1.qkv"])
def test_every_encoding_is_unpacked_as_the_host_does(name: str) -> None:
    packed = ProbeWeights().matrix(name)
    want = torch.from_numpy(packing.unpack_matrix(packed)).bfloat16()
    got = weights.unpack(torch.from_numpy(packed.data.copy()), packed.n, packed.k, packed.encoding)
    assert got.shape == (packed.n, packed.k)
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))


def test_the_probe_has_every_encoding() -> None:
    found = {ProbeWeights().matrix(name).encoding for name in loading.shapes_of(probe_program())[0]}
    assert found == set(Encoding)


def test_weight_bytes_count_a_tied_matrix_once() -> None:
    g = GEOMETRY
    layer = g.hidden * (g.qkv_width + g.num_heads * g.head_dim + 2 * g.intermediate + g.intermediate)
    assert loading.weight_bytes(probe_program()) == 2 * (g.vocab * g.hidden + g.num_layers * layer)
    scales = 4 * (g.qkv_width + 2 * g.hidden + 2 * g.intermediate)
    coded = loading.weight_bytes(probe_program(), loading.coded_names(probe_program()))
    assert coded == 2 * g.vocab * g.hidden + g.num_layers * (layer + scales)


@pytest.mark.parametrize("quantization", ["", "int8"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_a_start_counts_what_a_rank_will_hold(tied: bool, ranks: int, quantization: str) -> None:
    model = ModelConfig(
        architecture="llama", vocab=65536, hidden=1024, intermediate=2048, num_layers=2, num_heads=16, num_kv_heads=8,
        head_dim=64, rms_eps=1e-5, max_positions=64, rope=RopeConfig(theta=1e4), tied_embeddings=tied,
    )  # fmt: skip
    devices = tuple(f"cuda:{index}" for index in range(ranks))
    worker = WorkerConfig.of("cuda", by_role=RoleDevices(devices, devices, ranks=ranks), quantization=quantization)
    program, kept = build_program(model), set()
    if ranks > 1:
        part = split_program(program, ranks, 0)
        program, kept = part.program, {name for name, cut in part.cuts.items() if cut.name == "embed"}
    coded = loading.coded_names(program, kept) if quantization else frozenset()
    assert need_of(ServeConfig(model="m", worker=worker), model).weight_bytes == pytest.approx(
        loading.weight_bytes(program, coded), rel=0.002
    )
