"""Which devices each worker gets: a pure function of the flags, decided before anything starts."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from relay.errors import UsageError

MAX_RANKS = 8
GPU_OVERHEAD_BYTES = (
    2 << 30
)  # of each process on a GPU: CUDA context, library workspaces and captured graphs, which torch does not count
_DEVICE = re.compile(r"cuda:(0|[1-9][0-9]{0,2})")  # one name a device


@dataclass(frozen=True, slots=True)
class RoleDevices:
    """Devices by role, and how many of them make one worker. An empty list: the role takes the common one.

    ``decode`` is also the list of workers that do both phases.
    """

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    ranks: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= MAX_RANKS:
            raise UsageError(f"--tensor-parallel-size must be between 1 and {MAX_RANKS}, not {self.ranks}")
        for flag, devices in (("--prefill-devices", self.prefill), ("--decode-devices", self.decode)):
            if devices:
                check_names(flag, devices)
                groups(flag, devices, self.ranks)

    def num_workers(self, devices: tuple[str, ...]) -> int:
        """Workers where nobody said how many: one a device (or a group of ``ranks``), one without a list."""
        return max(1, len(devices) // self.ranks)


def check_names(flag: str, devices: Sequence[str]) -> None:
    """Raises UsageError for anything but cuda:N."""
    if not devices or not all(_DEVICE.fullmatch(device) for device in devices):
        raise UsageError(f"{flag} must be cuda:N, or several with commas, not {','.join(devices)!r}")


def groups(flag: str, devices: tuple[str, ...], ranks: int) -> list[tuple[str, ...]]:
    """``devices`` cut into neighbours of ``ranks``. Raises UsageError where that does not come out even."""
    if len(devices) % ranks:
        raise UsageError(
            f"{flag} names {len(devices)} device{'s' * (len(devices) != 1)}, which is no multiple of the {ranks} of "
            "--tensor-parallel-size; name that many for every worker"
        )
    found = [devices[start : start + ranks] for start in range(0, len(devices), ranks)]
    for group in found:
        if len(set(group)) < ranks:
            raise UsageError(
                f"{flag}: one worker cannot have {', '.join(group)}; each rank of --tensor-parallel-size needs a device"
            )
    return found


def place(
    slots: Sequence[tuple[str, str]], devices: tuple[str, ...], by_role: RoleDevices
) -> dict[str, tuple[str, ...]]:
    """Worker id → its devices in rank order, of ``slots`` (worker id, role). Workers take their role's list in turn, all workers
    without one take ``devices`` in turn. Raises UsageError."""
    found: dict[str, tuple[str, ...]] = {}
    taken: dict[str, int] = {}
    for worker, role in slots:
        flag, own = (
            ("--prefill-devices", by_role.prefill) if role == "prefill" else ("--decode-devices", by_role.decode)
        )
        if not own:
            flag, own = "--device", devices
        choices = groups(flag, own, by_role.ranks)
        found[worker] = choices[taken.get(flag, 0) % len(choices)]
        taken[flag] = taken.get(flag, 0) + 1
    return found
