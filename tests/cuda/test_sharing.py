"""One copy of the weights for the workers of a GPU, with one process's memory in the place of CUDA's handles."""

import importlib.util
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Literal
from unittest import mock

import pytest

if importlib.util.find_spec("triton") is None or importlib.util.find_spec("torch") is None:
    pytest.skip("triton is not installed (extra gpu)", allow_module_level=True)

import torch

from relay.errors import CorruptModelError
from relay.kernels.cuda.backend import CudaBackend
from relay.kernels.cuda.holding import hold_weights
from relay.kernels.cuda.linear_choice import LinearLayer
from relay.kernels.cuda.linear_int8 import quantize
from relay.kernels.cuda.loading import coded_names
from relay.kernels.cuda.sharing import attach_weights, export_weights
from relay.kernels.cuda.weights import HeldWeights
from relay.kernels.probe import GEOMETRY, ProbeWeights, probe_program
from relay.worker import weights_process
from relay.worker.spec import WorkerSpec
from tests.cuda.interpreted import without_a_device


class Handles:
    """Every export gets a handle of its own, which opens the same bytes."""

    def __init__(self) -> None:
        self.storages: list[torch.UntypedStorage] = []

    def share(self, storage: torch.UntypedStorage) -> tuple[int, bytes, int, int, bytes, int, bytes, bool]:
        self.storages.append(storage)
        return 0, len(self.storages).to_bytes(8, "little"), storage.nbytes(), 512, b"counter", 8, b"event", True

    def attach(self, device: int, handle: bytes, size: int, *rest: object) -> torch.UntypedStorage:
        storage = self.storages[int.from_bytes(handle, "little") - 1]
        assert (device, storage.nbytes(), *rest) == (0, size, 512, b"counter", 8, b"event", True)
        return storage


@pytest.fixture(autouse=True)
def cuda_stand_in() -> Iterator[None]:
    handles = Handles()
    with (
        without_a_device(),
        mock.patch.object(torch.cuda, "init"),
        mock.patch.object(torch.UntypedStorage, "_share_cuda_", lambda one: handles.share(one), create=True),
        mock.patch.object(torch.UntypedStorage, "_new_shared_cuda", handles.attach, create=True),
        mock.patch.object(LinearLayer, "test"),
    ):
        yield


def hold(quantized: bool, dtype: str = "float16") -> Callable[[], bytes]:
    return hold_weights(probe_program(), ProbeWeights(), "cpu", dtype, quantized)


def backend_of(shared: HeldWeights | None, quantized: bool) -> CudaBackend:
    backend = CudaBackend("cpu", 4, 32, False, shared=shared, sharers=2, dtype="float16", quantized=quantized)
    backend.load(probe_program(), ProbeWeights())
    return backend


@pytest.mark.parametrize("quantized", [False, True])
def test_workers_use_the_memory_of_the_holder(quantized: bool) -> None:
    coded = coded_names(probe_program()) if quantized else frozenset()
    with mock.patch("relay.kernels.cuda.loading.quantize", side_effect=quantize) as quantizing:
        message_for_one_more = hold(quantized)
        messages = [message_for_one_more() for _ in range(2)]
        backends = [backend_of(attach_weights(message, "cpu"), quantized) for message in messages]
        assert quantizing.call_count == len(coded), "quantised more than once"
    assert messages[0] != messages[1], "torch counts references by handle"
    first, second, own = (one._device for one in (*backends, backend_of(None, quantized)))
    assert first.scales.keys() == own.scales.keys() == coded
    for ours, theirs, copies in (
        (first.matrices, second.matrices, own.matrices),
        (first.scales, second.scales, own.scales),
    ):
        assert ours.keys() == theirs.keys() == copies.keys()
        for name, tensor in ours.items():
            assert tensor.data_ptr() == theirs[name].data_ptr() != copies[name].data_ptr(), name
            assert (tensor.shape, tensor.stride()) == (copies[name].shape, copies[name].stride()), name
            assert torch.equal(tensor, copies[name]), name


def test_tensors_that_share_a_storage_stay_where_they_are_in_it() -> None:
    both = torch.arange(12.0).view(4, 3)
    found = attach_weights(export_weights(HeldWeights({"low": both[:1], "high": both[1:]}, {"scale": both[3]})), "cpu")
    assert torch.equal(found.matrices["low"], both[:1])
    assert torch.equal(found.matrices["high"], both[1:])
    assert torch.equal(found.scales["scale"], both[3])


def test_a_worker_bears_its_part_of_what_it_borrows() -> None:
    reserved = []

    def fit(device: str, geometry: object, block_size: int, fraction: float, borrowed: int) -> int:
        reserved.append(borrowed)
        return 1

    with mock.patch("relay.kernels.cuda.backend.kv_blocks_that_fit", fit):
        for quantized in (False, True):
            held = attach_weights(hold(quantized)(), "cpu")
            assert backend_of(held, quantized).kv_blocks_that_fit(16) == 1
            tensors = [*held.matrices.values(), *held.scales.values()]
            assert reserved[-1] == sum(one.numel() * one.element_size() for one in tensors) // 2
        assert backend_of(None, True).kv_blocks_that_fit(16) == 1
    assert reserved[0] > reserved[1] > 0 == reserved[2]


DAMAGE: dict[str, Callable[[HeldWeights], object]] = {
    "one is missing": lambda held: held.matrices.pop("1.down"),
    "one too many": lambda held: held.matrices.update(other=held.matrices["embed"]),
    "other shape": lambda held: held.matrices.update({"1.down": held.matrices["embed"]}),
    "other type": lambda held: held.matrices.update(embed=held.matrices["embed"].bfloat16()),
    "a scale too many": lambda held: held.scales.update(embed=torch.ones(GEOMETRY.vocab)),
    "fewer scales": lambda held: held.scales.update({"1.down": torch.ones(1)}),
    "no scale": lambda held: held.scales.pop("1.down"),
    "fewer codes": lambda held: held.matrices.update({"1.down": held.matrices["1.down"][:1]}),
}


@pytest.mark.parametrize(
    ("quantized", "damage"), [(False, one) for one in DAMAGE if one != "no scale"] + [(True, one) for one in DAMAGE]
)
def test_weights_of_another_model_are_refused(quantized: bool, damage: str) -> None:
    held = attach_weights(hold(quantized)(), "cpu")
    DAMAGE[damage](held)
    with pytest.raises(CorruptModelError, match="not this model's"):
        backend_of(held, quantized)


@pytest.mark.parametrize("quantized", [False, True])
def test_weights_held_in_another_form_are_refused(quantized: bool) -> None:
    with pytest.raises(CorruptModelError, match="not this model's"):
        backend_of(attach_weights(hold(not quantized)(), "cpu"), quantized)
    with pytest.raises(CorruptModelError, match="not this model's"):
        backend_of(attach_weights(hold(quantized, "bfloat16")(), "cpu"), quantized)


@pytest.mark.parametrize("quantization", ["", "int8"])
def test_the_holder_loads_what_its_spec_says(quantization: Literal["", "int8"]) -> None:
    spec = WorkerSpec(
        worker="decode-0", incarnation=1, gateways=[], pack_path="p", device="cpu", kv_cache_dtype="float16",
        quantization=quantization,
    )  # fmt: skip
    pack = SimpleNamespace(
        digest="", config=None, matrix=ProbeWeights().matrix, vector=ProbeWeights().vector, take_files=lambda: None
    )
    with (
        mock.patch("relay.worker.served_pack.Pack", return_value=pack),
        mock.patch("relay.models.llama.build_program", return_value=probe_program()),
        mock.patch("relay.worker.weights_process.report_for"),
    ):
        held = attach_weights(weights_process._load(spec)(), "cpu")
    backend = backend_of(held, quantization == "int8")
    assert backend._device.matrices["embed"].dtype == torch.float16
    assert bool(backend._device.scales) == (quantization == "int8")
