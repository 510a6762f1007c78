"""What a kept launch hands to a compiled kernel, and when it is not the one to use. No GPU: the kernel is a stand-in."""

import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")
launcher = pytest.importorskip("relay.kernels.cuda.launcher")
Launcher, Options, Tiles = launcher.Launcher, launcher.Options, launcher.Tiles

GRID = (3, 2, 1)


class Kernel:
    """Stands for a Triton kernel: compiles for each launch that takes Triton's way, and notes the others."""

    def __init__(self, metas: list[Any] | None = None) -> None:
        self.anew: list[tuple[Any, ...]] = []
        self.kept: list[tuple[Any, ...]] = []
        self._metas = metas

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def launch(*arguments: Any, **options: Any) -> Any:
            self.anew.append((grid, arguments, options))
            return self._compiled(len(self.anew))

        return launch

    def _compiled(self, number: int) -> Any:
        launcher = self._note
        if self._metas:

            def inner(*arguments: Any) -> None:  # as Triton's wrapper: its maps would be made anew
                launcher("wrapped", *arguments)

        run = types.SimpleNamespace(
            global_scratch_size=0,
            profile_scratch_size=0,
            launch=inner if self._metas else launcher,
            launch_cooperative_grid=False,
            launch_pdl=True,
        )
        metadata = types.SimpleNamespace(tensordesc_meta=self._metas)
        return types.SimpleNamespace(
            run=run, name="k", metadata=metadata, function=1000 + number, packed_metadata=(4, 1, 0)
        )

    def _note(self, *arguments: Any) -> None:
        self.kept.append(arguments)


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "INTERPRETED", False)
    monkeypatch.setattr(launcher, "_device", lambda: 0)
    monkeypatch.setattr(launcher, "_stream", lambda device: 77)


def aligned(count: int, dtype: Any, shift: int = 0) -> Any:
    """A tensor whose memory begins ``shift`` elements after a multiple of 64 bytes."""
    raw = torch.zeros(count + 128, dtype=dtype)
    first = -(raw.data_ptr() // raw.element_size()) % (64 // raw.element_size())
    return raw[first + shift : first + shift + count]


def test_second_launch_hands_over_addresses_in_the_kernels_order() -> None:
    kernel = Kernel()
    launch = Launcher(kernel)
    a, b = aligned(32, torch.bfloat16), aligned(32, torch.float32)
    launch(GRID, (a, b), (48,), (0.5, 7, True), Options(True, 8, 2))
    assert [grid for grid, *_ in kernel.anew] == [GRID]
    assert kernel.anew[0][1] == (a, b, 48, 0.5, 7, True)
    assert kernel.anew[0][2] == {"num_warps": 8, "num_stages": 2, "enable_fp_fusion": False, "launch_pdl": True}
    other = aligned(32, torch.bfloat16)
    launch((9, 1, 1), (other, b), (64,), (0.5, 7, True), Options(True, 8, 2))
    assert len(kernel.anew) == 1
    head = (9, 1, 1, 77, 1001, False, True, None, None, (4, 1, 0), None, None, None)
    assert kernel.kept == [(*head, other.data_ptr(), b.data_ptr(), 64, 0.5, 7, True)]


@pytest.mark.parametrize("change", ["dtype", "fixed", "options", "odd", "eight", "one", "wide", "unsigned", "device"])
def test_whatever_compiling_depends_on_compiles_anew(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    launch = Launcher(kernel)
    memory, integers, fixed, options = (aligned(32, torch.bfloat16),), (48,), (7,), Options(True, 4)
    launch(GRID, memory, integers, fixed, options)
    match change:
        case "dtype":
            memory = (aligned(32, torch.float16),)
        case "fixed":
            fixed = (8,)
        case "options":
            options = Options(False, 4)
        case "odd":
            integers = (49,)
        case "eight":
            integers = (40,)
        case "one":
            integers = (1,)
        case "wide":
            integers = (1 << 32,)
        case "unsigned":
            integers = (1 << 31,)
        case "device":
            monkeypatch.setattr(launcher, "_device", lambda: 1)
    launch(GRID, memory, integers, fixed, options)
    assert (len(kernel.anew), len(kernel.kept)) == (2, 0)
    launch(GRID, memory, integers, fixed, options)
    assert [arguments[4] for arguments in kernel.kept] == [1002]


def test_memory_at_an_odd_place_always_takes_tritons_way() -> None:
    kernel = Kernel()
    launch = Launcher(kernel)
    for shift in (0, 1, 1, 0):
        launch(GRID, (aligned(32, torch.bfloat16, shift),), (), (7,), Options(False))
    assert (len(kernel.anew), len(kernel.kept)) == (3, 1)
    odd, even = aligned(32, torch.bfloat16, 1), aligned(32, torch.bfloat16)
    for memory in ((even, even), (odd, even), (even, odd), (even, even)):
        launch(GRID, memory, (), (7,), Options(False))
    assert (len(kernel.anew), len(kernel.kept)) == (6, 2)


def test_a_tensor_map_is_made_once_for_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton.backends.nvidia.driver as driver

    made: list[Any] = []

    def make(descriptor: Any, meta: Any) -> list[Any]:
        made.append((descriptor.base.data_ptr(), list(descriptor.shape), list(descriptor.block_shape), meta))
        return [f"map {len(made)}", *descriptor.shape, *descriptor.strides]

    monkeypatch.setattr(driver, "make_tensordesc_arg", make)
    kernel = Kernel(metas=["first", "second"])
    launch = Launcher(kernel)
    x, w = aligned(64 * 32, torch.bfloat16).view(64, 32), aligned(64 * 32, torch.bfloat16).view(64, 32)
    for _ in range(3):
        launch(GRID, (Tiles(x, (16, 32)), Tiles(w, (32, 32)), w), (16,), (5,), Options(False))
    assert made == [(x.data_ptr(), [64, 32], [16, 32], "first"), (w.data_ptr(), [64, 32], [32, 32], "second")]
    maps = ("map 1", 64, 32, 32, 1, "map 2", 64, 32, 32, 1)
    assert [arguments[13:] for arguments in kernel.kept] == [(*maps, w.data_ptr(), 16, 5)] * 2
    launch(GRID, (Tiles(x[:48], (16, 32)), Tiles(w, (32, 32)), w), (16,), (5,), Options(False))
    assert len(made) == 3
    assert kernel.kept[-1][13:15] == ("map 3", 48)
    again = aligned(64 * 32, torch.bfloat16).view(64, 32)  # of the same shape elsewhere
    wide = x.view(-1).as_strided((32, 32), (64, 1))  # of other rows at the same place
    narrow = x.view(-1).as_strided((32, 32), (32, 1))
    for number, other in enumerate((again, wide, narrow), 4):
        launch(GRID, (Tiles(other, (16, 32)), Tiles(w, (32, 32)), w), (16,), (5,), Options(False))
        assert kernel.kept[-1][13] == f"map {number}"
        assert made[-1][0] == other.data_ptr()
    launch(GRID, (Tiles(w, (16, 32)), Tiles(w, (16, 32)), w), (16,), (5,), Options(False))  # compiled anew
    launch(GRID, (Tiles(w, (16, 32)), Tiles(w, (16, 32)), w), (16,), (5,), Options(False))
    assert [meta for *_, meta in made[6:]] == ["first", "second"], "a map is what its parameter was compiled for"


def test_tiles_of_another_type_or_size_compile_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton.backends.nvidia.driver as driver

    monkeypatch.setattr(driver, "make_tensordesc_arg", lambda descriptor, meta: ["map"])
    kernel = Kernel(metas=["first"])
    launch = Launcher(kernel)
    for dtype, block in ((torch.bfloat16, (16, 32)), (torch.float16, (16, 32)), (torch.bfloat16, (32, 32))):
        for _ in range(2):
            x = aligned(64 * 32, dtype).view(64, 32)
            launch(GRID, (Tiles(x, block),), (), (5,), Options(False))
    assert [arguments[4] for arguments in kernel.kept] == [1001, 1002, 1003]


def test_a_kernel_that_wants_scratch_memory_is_refused() -> None:
    kernel = Kernel()
    compiled = kernel._compiled(1)
    compiled.run.global_scratch_size = 64
    with pytest.raises(RuntimeError, match="scratch"):
        launcher._Compiled(compiled)
