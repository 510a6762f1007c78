"""A machine's NVML as ``pynvml`` shows it: as much of the module as ``relay.cluster.nvml`` calls."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

GIB = 1 << 30


class NVMLError(Exception):
    """As in pynvml."""


@dataclass
class FakeNvml:
    """``pairs``: (lower, higher) → names of P2P statuses for reads, writes and NVLink; pairs not in it have everything."""

    totals: list[int]
    free: list[int]
    pairs: dict[tuple[int, int], tuple[str, str, str]] = field(default_factory=dict)
    nvlinks: int = 18
    ancestor: int = 40
    broken: str = ""
    opened: int = 0

    NVMLError = NVMLError
    NVML_NVLINK_MAX_LINKS = 36
    NVML_P2P_CAPS_INDEX_READ = (0,)  # a tuple, as in nvidia-ml-py
    NVML_P2P_CAPS_INDEX_WRITE, NVML_P2P_CAPS_INDEX_NVLINK = 1, 2
    NVML_P2P_STATUS_OK = 0
    NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED = 1
    NVML_P2P_STATUS_GPU_NOT_SUPPORTED = 2
    NVML_P2P_STATUS_IOH_TOPOLOGY_NOT_SUPPORTED = 3
    NVML_P2P_STATUS_DISABLED_BY_REGKEY = 4
    NVML_P2P_STATUS_NOT_SUPPORTED = 5

    def nvmlInit(self) -> None:
        if self.broken:
            raise NVMLError(self.broken)
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.totals)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{'abcdefgh'[handle]}000"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=self.totals[handle], free=self.free[handle])

    def nvmlDeviceGetTopologyCommonAncestor(self, first: int, second: int) -> int:
        return self.ancestor

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if link >= self.nvlinks:
            raise NVMLError("Invalid Argument")
        return 1

    def nvmlDeviceGetP2PStatus(self, first: int, second: int, kind: int) -> int:
        assert type(kind) is int, "the library hands it to C"
        names = self.pairs.get((min(first, second), max(first, second)), ("OK", "OK", "OK"))
        return int(getattr(self, f"NVML_P2P_STATUS_{names[kind]}"))


def h200s(count: int, **values: Any) -> FakeNvml:
    """``count`` empty H200."""
    return FakeNvml([140 * GIB] * count, [139 * GIB] * count, **values)
