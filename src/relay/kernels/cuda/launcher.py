"""Launches that look only at what can have changed since the last.

Triton binds, specialises and hashes every argument of every launch: 20 to 30 µs of a processor, and a step with a prompt has
hundreds of launches. A ``Launcher`` keeps the compiled kernel by all that compiling it depends on (device, types, constants,
and of integers what Triton specialises on) and hands addresses to it directly; tensor maps of the copy engine are kept as well.
Memory that does not lie at a multiple of 16 bytes, for which nothing was compiled, takes Triton's way.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from relay.kernels.cuda.launch import INTERPRETED, launch_options

_MOST_MAPS = 4096  # of a kernel; a model has a few hundred


def _device() -> int:
    return int(torch._C._cuda_getDevice())  # torch.cuda.current_device() asks each time whether CUDA was begun


def _stream(device: int) -> int:
    return int(torch._C._cuda_getCurrentRawStream(device))


class Tiles(NamedTuple):
    """A matrix [rows, ..., columns] that the copy engine brings tile by tile; its rows are ``stride(0)`` apart."""

    tensor: torch.Tensor
    block: tuple[int, ...]
    layout: Any = None  # of a tile in shared memory, where the kernel is Gluon's

    def descriptor(self) -> Any:
        if self.layout is None:
            return TensorDescriptor.from_tensor(self.tensor, list(self.block))
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

        return GluonDescriptor.from_tensor(self.tensor, list(self.block), self.layout)


class Options(NamedTuple):
    """Of a kernel's compilation; None: Triton's default."""

    pdl: bool
    warps: int | None = None
    stages: int | None = None

    def named(self) -> dict[str, Any]:
        given = {"num_warps": self.warps, "num_stages": self.stages}
        return {**{name: value for name, value in given.items() if value is not None}, **launch_options(self.pdl)}


class _Compiled:
    """A compiled kernel and what its launch takes besides the arguments."""

    def __init__(self, kernel: Any) -> None:
        launcher = kernel.run
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            raise RuntimeError(f"{kernel.name} wants scratch memory, which a kept launch does not allocate")
        self._launch: Callable[..., None] = launcher.launch
        self._metas: list[Any] = list(getattr(kernel.metadata, "tensordesc_meta", None) or [])
        if self._metas:  # Triton's wrapper around it would make the maps anew
            self._launch = inspect.getclosurevars(launcher.launch).nonlocals["launcher"]
        self._maps: dict[tuple[Any, ...], list[Any]] = {}
        self._function = kernel.function
        self._options = (launcher.launch_cooperative_grid, launcher.launch_pdl, None, None, kernel.packed_metadata)

    def launch(self, grid: tuple[int, int, int], stream: int, arguments: list[Any], fixed: tuple[Any, ...]) -> None:
        self._launch(*grid, stream, self._function, *self._options, None, None, None, *arguments, *fixed)

    def map_of(self, tiles: Tiles, number: int) -> list[Any]:
        """What stands for the ``number``-th descriptor among the arguments."""
        tensor = tiles.tensor
        key = (number, tensor.data_ptr(), tensor.shape, tensor.stride(), tiles.block)
        found = self._maps.get(key)
        if found is None:
            from triton.backends.nvidia.driver import make_tensordesc_arg

            if len(self._maps) >= _MOST_MAPS:
                self._maps.clear()
            found = self._maps[key] = make_tensordesc_arg(tiles.descriptor(), self._metas[number])
        return found


class Launcher:
    """Launches ``kernel``, whose parameters are memory first, then integers that may differ, then all that is fixed."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[tuple[Any, ...], _Compiled] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        memory: tuple[torch.Tensor | Tiles, ...],
        integers: tuple[int, ...],
        fixed: tuple[Any, ...],
        options: Options,
    ) -> None:
        """On the current stream of the current device. ``fixed``: scalars and constants, hashable. Raises what Triton raises."""
        if INTERPRETED:
            self._launch_anew(grid, memory, integers, fixed, options)
            return
        device = _device()
        addresses: list[Any] = []
        key: list[Any] = [device, fixed, options]
        misplaced = described = 0
        for one in memory:
            if type(one) is Tiles:
                addresses.append(one)
                key.append(one.tensor.dtype)
                key.append(one.block)
                described += 1
            else:
                address = one.data_ptr()  # type: ignore[union-attr]
                misplaced |= address
                addresses.append(address)
                key.append(one.dtype)  # type: ignore[union-attr]
        for value in integers:  # what Triton looks at: multiples of 16, ones, and whether 32 bits are enough
            key.append((not value & 15, value == 1, value > 0x7FFFFFFF))
        if misplaced & 15:
            self._launch_anew(grid, memory, integers, fixed, options)
            return
        known = tuple(key)
        compiled = self._compiled.get(known)
        if compiled is None:
            self._compiled[known] = _Compiled(self._launch_anew(grid, memory, integers, fixed, options))
            return
        if described:
            arguments: list[Any] = []
            number = 0
            for one in addresses:
                if type(one) is Tiles:
                    arguments += compiled.map_of(one, number)
                    number += 1
                else:
                    arguments.append(one)
            addresses = arguments
        compiled.launch(grid, _stream(device), addresses + list(integers), fixed)

    def _launch_anew(
        self,
        grid: tuple[int, int, int],
        memory: tuple[torch.Tensor | Tiles, ...],
        integers: tuple[int, ...],
        fixed: tuple[Any, ...],
        options: Options,
    ) -> Any:
        """As Triton does it, compiling where nothing is compiled yet."""
        given = [one.descriptor() if isinstance(one, Tiles) else one for one in memory]
        named = {} if INTERPRETED else options.named()
        return self._kernel[grid](*given, *integers, *fixed, **named)
