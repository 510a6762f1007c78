"""The GPUs of this machine as a value, and what is wrong with a placement on them. Pure: ``nvml.py`` does the asking."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from relay.devices import GPU_OVERHEAD_BYTES
from relay.errors import DoesNotFitError, UsageError

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device as CUDA numbers it."""

    index: int
    name: str
    uuid: str
    total_bytes: int
    free_bytes: int

    @property
    def device(self) -> str:
        return f"cuda:{self.index}"


@dataclass(frozen=True, slots=True)
class Link:
    """Between two devices: ``path`` for people, ``nvlinks`` of the first device that are up, ``peers``: may each read the other."""

    path: str
    nvlinks: int
    peers: bool
    reason: str = ""  # why not


@dataclass(frozen=True, slots=True)
class Topology:
    """``problem``: why nothing is known; then there are no devices in it. ``links`` by (lower index, higher index)."""

    gpus: tuple[Gpu, ...] = ()
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    problem: str = ""

    def link(self, first: str, second: str) -> Link | None:
        """None where nothing is known of the pair, or it is one device."""
        low, high = sorted((index_of(first), index_of(second)))
        return self.links.get((low, high))


@dataclass(frozen=True, slots=True)
class Need:
    """What a placement asks of memory: the model's weights in bytes on a device, KV for each worker (0: what is left, at least
    ``least_kv_bytes``), the part of a device that workers may use. All of one rank."""

    weight_bytes: int
    kv_bytes: int
    least_kv_bytes: int
    utilization: float


def index_of(device: str) -> int:
    return int(device.partition(":")[2] or 0)


def describe(topology: Topology) -> list[str]:
    """Lines for people: devices, then pairs."""
    if topology.problem:
        return [f"not detected: {topology.problem}"]
    lines = [
        f"{gpu.device} {gpu.name}, {gpu.total_bytes / GIB:.1f} GiB, {gpu.free_bytes / GIB:.1f} free"
        for gpu in topology.gpus
    ]
    for (low, high), link in sorted(topology.links.items()):
        peers = "peer access" if link.peers else f"no peer access ({link.reason})"
        lines.append(f"cuda:{low} - cuda:{high}: {link.path}, {peers}")
    return lines


def check(
    placement: Mapping[str, tuple[str, ...]], roles: Mapping[str, str], topology: Topology, need: Need, transport: str
) -> list[str]:
    """What people should know although it works. Raises UsageError or DoesNotFitError, one line, for what cannot work.

    ``placement`` and ``roles`` by worker. Nothing is refused where nothing is known of the devices.
    """
    if topology.problem:
        return []
    for worker, devices in placement.items():
        for device in devices:
            _check_exists(worker, device, topology)
    users: dict[str, list[str]] = {}
    for worker, devices in placement.items():
        for device in devices:
            users.setdefault(device, []).append(worker)
    for device, workers in users.items():
        _check_room(device, workers, placement, topology, need)
    for worker, devices in placement.items():
        _check_ranks(worker, devices, topology)
    return _host_paths(placement, roles, topology, transport)


def _check_exists(worker: str, device: str, topology: Topology) -> None:
    if index_of(device) in {gpu.index for gpu in topology.gpus}:
        return
    if not topology.gpus:
        raise UsageError(f"{device} for {worker}: NVML finds no GPU; check the driver, or serve with --backend cpu")
    have = ", ".join(f"{gpu.device} ({gpu.name})" for gpu in topology.gpus)
    raise UsageError(f"{device} for {worker} does not exist: this machine has {have}; name one of these")


def _check_room(
    device: str, workers: list[str], placement: Mapping[str, tuple[str, ...]], topology: Topology, need: Need
) -> None:
    gpu = next(gpu for gpu in topology.gpus if gpu.device == device)
    who = " and ".join(workers)
    if len(workers) > 1 and any(len(placement[worker]) > 1 for worker in workers):
        raise UsageError(
            f"{who} are both placed on {device}: a device of a tensor-parallel worker is that worker's alone; "
            "name other devices, or fewer workers"
        )
    each = GPU_OVERHEAD_BYTES + (need.kv_bytes or need.least_kv_bytes)
    needed = need.weight_bytes + len(workers) * each
    allowed = min(int(need.utilization * gpu.total_bytes), gpu.free_bytes)
    if needed <= allowed:
        return
    several = f"{len(workers)} x " if len(workers) > 1 else ""
    advice = (
        "give each a device of its own (--prefill-devices, --decode-devices), start fewer, or give them less (--kv-cache-memory)"
        if len(workers) > 1
        else "use a larger GPU or more of them (--tensor-parallel-size), or less --kv-cache-memory"
    )
    raise DoesNotFitError(
        f"{who} do{'es' * (len(workers) == 1)} not fit on {device} ({gpu.name}): {need.weight_bytes / GIB:.1f} GiB of weights and "
        f"{several}{each / GIB:.1f} GiB for KV and overhead, but {allowed / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB may be "
        f"used ({gpu.free_bytes / GIB:.1f} free, --gpu-memory-utilization {need.utilization:g}); {advice}"
    )


def _check_ranks(worker: str, devices: tuple[str, ...], topology: Topology) -> None:
    """Ranks read each other's memory, so every pair of them must be peers."""
    for index, first in enumerate(devices):
        for second in devices[index + 1 :]:
            link = topology.link(first, second)
            if link is not None and not link.peers:
                raise UsageError(
                    f"{worker}: no peer access between {first} and {second} ({link.path}; {link.reason}), which "
                    "--tensor-parallel-size needs; choose devices that are peers (`relay devices` lists them) or serve replicas"
                )


def _host_paths(
    placement: Mapping[str, tuple[str, ...]], roles: Mapping[str, str], topology: Topology, transport: str
) -> list[str]:
    """A line for every two devices of a P and a D between which KV must go through host memory. Raises UsageError for ``ipc``.

    Of a worker's ranks the first moves the KV of all.
    """
    first_devices: dict[str, dict[str, str]] = {"prefill": {}, "decode": {}}  # role → device → one worker on it
    for worker, devices in placement.items():
        if roles[worker] in first_devices:
            first_devices[roles[worker]].setdefault(devices[0], worker)
    notes: list[str] = []
    told: set[frozenset[str]] = set()
    for source, prefill in first_devices["prefill"].items():
        for target, decode in first_devices["decode"].items():
            link, pair = topology.link(source, target), frozenset((source, target))
            if link is None or link.peers or pair in told:
                continue
            told.add(pair)
            found = f"no peer access between {source} ({prefill}) and {target} ({decode}): {link.path}, {link.reason}"
            if transport == "ipc":
                raise UsageError(
                    f"--transport ipc: {found}; serve with --transport auto or shm, or choose devices that are peers "
                    "(`relay devices` lists them)"
                )
            notes.append(
                f"{found}; KV between them goes through host memory; for the direct way choose devices that are peers "
                "(`relay devices` lists them)"
            )
    return notes
