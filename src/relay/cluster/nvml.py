"""Asks NVML for the GPUs of this machine: no torch, no CUDA context, a few milliseconds. nvidia-ml-py is in the extra ``gpu``."""

import importlib
from collections.abc import Mapping
from typing import Any

from relay.cluster.topology import Gpu, Link, Topology
from relay.extras import install_hint

PATHS = {
    0: "one board",
    10: "one PCIe switch",
    20: "PCIe switches",
    30: "one PCIe host bridge",
    40: "one NUMA node",
    50: "across CPUs",
}


def detect(environment: Mapping[str, str], nvml: Any = None) -> Topology:
    """Devices as CUDA numbers them in ``environment`` (CUDA_VISIBLE_DEVICES). ``nvml``: the module ``pynvml``, or one like it.

    Never raises: what cannot be asked becomes ``Topology.problem``.
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ModuleNotFoundError:
            return Topology(problem=f"nvidia-ml-py is not installed: {install_hint('gpu')}")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Topology(problem=f"NVML: {error}")
    try:
        return _read(nvml, environment)
    except nvml.NVMLError as error:
        return Topology(problem=f"NVML: {error}")
    finally:
        nvml.nvmlShutdown()


def _read(nvml: Any, environment: Mapping[str, str]) -> Topology:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    uuids = [nvml.nvmlDeviceGetUUID(handle) for handle in handles]
    visible = _visible(environment.get("CUDA_VISIBLE_DEVICES"), uuids)
    if visible is None:
        return Topology(
            problem=f"CUDA_VISIBLE_DEVICES={environment['CUDA_VISIBLE_DEVICES']} names what NVML does not list"
        )
    gpus = []
    for index, number in enumerate(visible):
        memory = nvml.nvmlDeviceGetMemoryInfo(handles[number])
        name = nvml.nvmlDeviceGetName(handles[number])
        gpus.append(Gpu(index, name, uuids[number], int(memory.total), int(memory.free)))
    links = {
        (low, high): _link(nvml, handles[visible[low]], handles[visible[high]])
        for low in range(len(visible))
        for high in range(low + 1, len(visible))
    }
    return Topology(tuple(gpus), links)


def _visible(given: str | None, uuids: list[str]) -> list[int] | None:
    """NVML's indices in CUDA's order; None for names that NVML does not know (MIG slices among them).

    NVML counts by PCI address. CUDA does too where all devices are of one kind, or with CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    if given is None:
        return list(range(len(uuids)))
    found: list[int] = []
    for part in (part.strip() for part in given.split(",")):
        if part.isascii() and part.isdecimal() and int(part) < len(uuids):
            found.append(int(part))
            continue
        if part in ("", "-1", "NoDevFiles"):
            break  # CUDA ends its list at the first invalid entry
        matches = [index for index, uuid in enumerate(uuids) if uuid.startswith(part)]
        if len(matches) != 1:
            return None
        found.append(matches[0])
    return found


def _link(nvml: Any, first: Any, second: Any) -> Link:
    status = {
        kind: _status(nvml, first, second, _number(getattr(nvml, f"NVML_P2P_CAPS_INDEX_{kind}")))
        for kind in ("READ", "WRITE", "NVLINK")
    }
    nvlinks = _nvlinks(nvml, first) if status["NVLINK"] == "" else 0
    try:
        path = PATHS.get(int(nvml.nvmlDeviceGetTopologyCommonAncestor(first, second)), "an unknown path")
    except nvml.NVMLError as error:
        path = f"path unknown ({error})"
    if nvlinks:
        path = f"{nvlinks} NVLinks, {path}"
    reason = status["READ"] or status["WRITE"]
    return Link(path, nvlinks, peers=not reason, reason=reason)


def _number(constant: Any) -> int:
    """nvidia-ml-py has NVML_P2P_CAPS_INDEX_READ as a tuple of one, by a comma too many."""
    return int(constant[0] if isinstance(constant, tuple) else constant)


def _status(nvml: Any, first: Any, second: Any, kind: int) -> str:
    """Empty for "can", else why not."""
    try:
        status = nvml.nvmlDeviceGetP2PStatus(first, second, kind)
    except nvml.NVMLError as error:
        return f"NVML: {error}"
    names = {
        "OK": "",
        "CHIPSET_NOT_SUPPORTED": "the chipset does not support it",
        "GPU_NOT_SUPPORTED": "the GPU does not support it",
        "IOH_TOPOLOGY_NOT_SUPPORTED": "they are on different host bridges",
        "DISABLED_BY_REGKEY": "the driver's settings forbid it",
        "NOT_SUPPORTED": "not supported",
    }
    return next(
        (text for name, text in names.items() if status == getattr(nvml, f"NVML_P2P_STATUS_{name}")),
        f"NVML's status {status}",
    )


def _nvlinks(nvml: Any, handle: Any) -> int:
    """Links of one device that are up: with a switch between them all of them lead to every peer."""
    count = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            count += bool(nvml.nvmlDeviceGetNvLinkState(handle, link))
        except nvml.NVMLError:
            break  # there are no more
    return count
