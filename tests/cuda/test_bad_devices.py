"""No GPU, too old a GPU, too little memory, a CUDA error: one line each, with torch.cuda as such a machine would have it."""

import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from unittest import mock

import pytest

if importlib.util.find_spec("triton") is None or importlib.util.find_spec("torch") is None:
    pytest.skip("triton is not installed (extra gpu)", allow_module_level=True)

import torch
from triton.runtime.errors import OutOfResources

from relay.errors import DeviceLostError, DoesNotFitError, UsageError
from relay.kernels.cuda.backend import CudaBackend
from relay.kernels.cuda.draws import Draw, Draws
from relay.kernels.cuda.holding import hold_weights
from relay.kernels.cuda.launch import device_errors
from relay.kernels.cuda.memory import GIB, check_device, kv_block_bytes, kv_blocks_that_fit
from relay.kernels.probe import probe_program
from tests.cuda.batches import batch_of
from tests.cuda.interpreted import without_a_device


def test_a_machine_without_a_gpu() -> None:
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=False),
        pytest.raises(UsageError, match="--backend cpu"),
    ):
        check_device("cuda:0")


def test_a_device_that_is_not_there() -> None:
    with (
        without_a_device(),
        pytest.raises(UsageError, match="--device cuda:7: torch sees 1 CUDA device, numbered from 0"),
    ):
        check_device("cuda:7")


def test_a_gpu_that_is_too_old() -> None:
    old = {"get_device_capability": lambda *_: (7, 5), "get_device_name": lambda *_: "Tesla T4"}
    expected = pytest.raises(UsageError, match=r"Tesla T4 has compute capability 7\.5; .* needs 8\.0")
    with without_a_device(), mock.patch.multiple(torch.cuda, **old), expected:
        check_device("cuda:0")


def backend() -> CudaBackend:
    made = CudaBackend("cpu", max_rows=4, max_tokens=32, graphs=False)
    made._program = probe_program()
    return made


@pytest.mark.parametrize("what", ["sizing", "warm-up"])
def test_memory_that_runs_out_beside_the_weights(what: str) -> None:
    with without_a_device():
        made = backend()
        full = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        start = (lambda: made.kv_blocks_that_fit(16)) if what == "sizing" else (lambda: made.warm_up(64))
        with mock.patch.object(torch, "zeros", side_effect=full), pytest.raises(DoesNotFitError) as caught:
            start()
    line = str(caught.value)
    assert "32 tokens in 4 rows" in line
    assert "8192 of 16384 MiB are free" in line
    assert "--gpu-memory-utilization" in line
    assert "\n" not in line


@pytest.mark.parametrize("graphs", [True, False])
def test_a_kernel_that_the_gpu_has_too_little_shared_memory_for(graphs: bool) -> None:
    """In the capture of a graph's step as in a prompt's: what Triton raises before it launches anything."""
    with without_a_device():
        made = CudaBackend("cpu", max_rows=4, max_tokens=32, graphs=graphs)
        made._program, made._block_size = probe_program(), 16
        made._launches = []
        refused = OutOfResources(147480, 101376, "shared memory")
        step = "launch_all" if graphs else "run"
        with (
            mock.patch.object(made, "reserve"),
            mock.patch("relay.kernels.cuda.graphs.Layout"),
            mock.patch.object(made, step, side_effect=refused),
            pytest.raises(DoesNotFitError) as caught,
        ):
            made.warm_up(64)
    line = str(caught.value)
    assert "more shared memory than this GPU has: 147480, the limit is 101376" in line
    assert "--backend cpu" in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("free_gib", "borrowed_gib", "words"),
    [
        (
            8,
            6,
            "may use 7.20 GiB (45% of it), its weights and buffers take 6.00 GiB, and 2.00 GiB are kept for",
        ),
        (0.5, 0, "only 0.50 GiB of it are free, of which 0.50 GiB stay so; end what else uses it"),
    ],
)
def test_no_room_for_a_kv_block_is_told_in_numbers(free_gib: float, borrowed_gib: int, words: str) -> None:
    sizes = {"mem_get_info": lambda *_: (int(free_gib * GIB), 16 * GIB), "memory_reserved": lambda *_: 1 << 20}
    geometry = probe_program().geometry
    with without_a_device(), mock.patch.multiple(torch.cuda, **sizes), pytest.raises(DoesNotFitError) as caught:
        kv_blocks_that_fit("cuda:0", geometry, 64, 0.45, borrowed_gib * GIB)
    line = str(caught.value)
    size = f"{kv_block_bytes(geometry, 64) / GIB:.4f} GiB"
    assert line.startswith(f"no room for a KV block, which needs {size} for its 64 tokens: cuda:0 has 16.00 GiB; ")
    assert words in line
    assert "\n" not in line


def test_the_last_block_that_fits() -> None:
    """At exactly a block's room there is one; a byte less is refused."""
    geometry = probe_program().geometry
    block = kv_block_bytes(geometry, 16)
    for missing, expected in ((0, pytest.raises(DoesNotFitError)), (-1, nullcontext())):
        kept = 512 << 20  # a quarter of what a process may take beside torch
        sizes = {"mem_get_info": lambda *_, free=kept + block - 1 - missing: (free, 1 << 40)}
        with without_a_device(), mock.patch.multiple(torch.cuda, **sizes), expected:
            assert kv_blocks_that_fit("cuda:0", geometry, 16, 1.0) == 1


def holding(weights: object) -> Callable[[], bytes]:
    with (
        mock.patch("relay.kernels.cuda.holding.check_device"),
        mock.patch("relay.kernels.cuda.holding.load_matrices", weights),
    ):
        return hold_weights(probe_program(), mock.Mock(), "cuda:0")


def test_memory_that_runs_out_where_weights_are_held() -> None:
    full = mock.Mock(side_effect=torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    with without_a_device():
        with pytest.raises(DoesNotFitError, match=r"the weights need \d+ MiB on cuda:0"):
            holding(full)
        with mock.patch("relay.kernels.cuda.holding.export_weights", full):
            message = holding(mock.Mock())
            with pytest.raises(DoesNotFitError, match=r"the weights need \d+ MiB on cuda:0"):
                message()
        with mock.patch.object(torch.cuda, "set_device", full), pytest.raises(DoesNotFitError):
            holding(mock.Mock())


def test_a_cuda_error_that_is_seen_while_a_step_is_watched() -> None:
    """The device is asked for the end of a step far more often than for anything else."""
    with without_a_device():
        made = backend()
        batch = batch_of([([1], 0, [0], 0)])
        event = mock.Mock()
        event.query.side_effect = torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore")
        host = torch.zeros(1, 2, dtype=torch.int32)
        made._draws = Draws(4)
        made._draws._waiting.append(Draw(batch, [-1], host, None, event, None))
        with pytest.raises(DeviceLostError, match=r"illegal memory access was encountered; this worker ends$"):
            made.ended(batch)


@pytest.mark.parametrize("lost", [True, False])
def test_what_a_library_says_on_a_lost_device_is_not_the_step_s_own_fault(
    lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuBLASLt on a lost context makes torch complain of its settings: only the device can say that it is gone."""

    def synchronize() -> None:
        if lost:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    expected, words = (
        (DeviceLostError, r"^the GPU failed: CUDA error: an illegal memory access was encountered; this worker ends$")
        if lost
        else (RuntimeError, "^allow_splitk=False requires the cuBLASLt backend$")
    )
    with pytest.raises(expected, match=words), device_errors():
        raise RuntimeError("allow_splitk=False requires the cuBLASLt backend")
