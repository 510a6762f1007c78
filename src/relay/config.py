"""Every setting of a cluster, with its default and its check: the one configuration path.

``relay serve`` builds a ``ServeConfig`` from its flags; nothing reads settings from anywhere else. Bounds that nobody sets are
constants of the modules they bound. Times are seconds here and become integer nanoseconds where pure code uses them.
"""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from relay.control_config import (
    STEP_DEADLINE_S,
    ControlConfig,
    check,
)
from relay.devices import RoleDevices, check_names
from relay.errors import UsageError

BackendName = Literal["cpu", "cuda", "reference"]
BACKENDS: tuple[BackendName, ...] = ("cpu", "cuda", "reference")
DTYPES = ("auto", "float32", "bfloat16", "float16")  # of activations
KV_DTYPES = ("auto", "float32", "bfloat16", "float16")
TransportName = Literal["auto", "tcp", "shm", "ipc", "nixl"]
TRANSPORTS: tuple[TransportName, ...] = ("auto", "tcp", "shm", "ipc", "nixl")  # of KV between workers
KvDtype = Literal["float32", "bfloat16", "float16"]
LOG_LEVELS = ("debug", "info", "warning", "error")
UNIT_TOKENS = 16
MAX_THREADS = 1024
MAX_BLOCK_SIZE = 1 << 12
MAX_STEP_TOKENS = 1 << 16
PROTOCOL_TEXT_LIMIT = 1024
_GPU_FLAGS = {"devices": "--device", "gpu_memory_utilization": "--gpu-memory-utilization"}
_WORKER_ADDRESS = re.compile(r"tcp://[^\s,]+:\d{1,5}")

SECOND = 1_000_000_000
MILLISECOND = 1_000_000


@dataclass(frozen=True, slots=True)
class BackendDefaults:
    """What suits a backend where the user says nothing. ``kv_cache_memory_bytes`` 0: what the device has left."""

    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 256
    kv_cache_memory_bytes: int = 1 << 30
    kv_cache_dtype: Literal["float32", "bfloat16"] = "float32"
    step_deadline_s: float = STEP_DEADLINE_S


DEFAULTS: dict[BackendName, BackendDefaults] = {
    "cpu": BackendDefaults(),
    "cuda": BackendDefaults(64, 256, 2048, 0, "bfloat16", step_deadline_s=2.0),
    "reference": BackendDefaults(step_deadline_s=600.0),  # an interpreter is no engine to hurry
}


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What one worker is given; None means that the worker's own default for the model applies."""

    backend: BackendName = "cpu"
    threads: int = 0  # 0: all cores
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: Literal["", "int8"] = ""  # of weights
    kv_cache_memory_bytes: int = 1 << 30
    block_size: int = 16
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 256
    transport: TransportName = "auto"
    growth_tokens: int = 128  # room kept for each running sequence to grow; less means more sequences and preemptions
    record: Path | None = None  # folder for recordings of the cores, see record/
    devices: tuple[str, ...] = (
        "cuda:0",
    )  # of the cuda backend; workers without a list of their role take them in turn
    by_role: RoleDevices = field(default_factory=RoleDevices)
    gpu_memory_utilization: float = 0.9  # of each device, shared by the workers on it

    def __post_init__(self) -> None:
        check(self.backend in BACKENDS, f"--backend: {self.backend!r} is none of {', '.join(BACKENDS)}")
        check(0 <= self.threads <= MAX_THREADS, f"--threads must be 0 (all cores) to {MAX_THREADS}, not {self.threads}")
        check(self.transport in TRANSPORTS, f"--transport: {self.transport!r} is none of {', '.join(TRANSPORTS)}")
        check(self.dtype in DTYPES, f"--dtype: {self.dtype!r} is none of {', '.join(DTYPES)}")
        check(
            self.kv_cache_dtype in KV_DTYPES,
            f"--kv-cache-dtype: {self.kv_cache_dtype!r} is none of {', '.join(KV_DTYPES)}",
        )
        check(
            UNIT_TOKENS <= self.block_size <= MAX_BLOCK_SIZE and self.block_size % UNIT_TOKENS == 0,
            f"--block-size must be a multiple of {UNIT_TOKENS} up to {MAX_BLOCK_SIZE}, not {self.block_size}",
        )
        check(self.max_model_len is None or self.max_model_len >= 1, "--max-model-len must be at least 1")
        check(self.max_num_seqs >= 1, "--max-num-seqs must be at least 1")
        check(
            UNIT_TOKENS <= self.max_num_batched_tokens <= MAX_STEP_TOKENS,
            f"--max-num-batched-tokens must be {UNIT_TOKENS} to {MAX_STEP_TOKENS}, not {self.max_num_batched_tokens}",
        )
        check(
            self.max_num_batched_tokens >= self.max_num_seqs,
            "--max-num-batched-tokens must be at least --max-num-seqs: a step holds one token of every running sequence",
        )
        check(
            self.kv_cache_memory_bytes > 0 or (self.backend == "cuda" and self.kv_cache_memory_bytes == 0),
            "--kv-cache-memory must be positive",
        )
        check(
            0 < self.gpu_memory_utilization <= 1,
            f"--gpu-memory-utilization must be over 0 and at most 1, not {self.gpu_memory_utilization:g}",
        )
        check_names("--device", self.devices)
        check(
            self.backend == "cuda" or not (self.by_role.prefill or self.by_role.decode),
            f"--prefill-devices and --decode-devices need --backend cuda, not {self.backend}",
        )
        check(
            self.backend != "reference" or self.by_role.ranks == 1,
            f"--tensor-parallel-size {self.by_role.ranks}: the {self.backend} backend runs one rank a worker; use replicas",
        )
        if self.backend == "cuda":
            check(
                "auto" in (self.dtype, self.kv_cache_dtype) or self.dtype == self.kv_cache_dtype,
                "--kv-cache-dtype: the cuda backend keeps KV in the type of --dtype, bfloat16 or float16",
            )
            check(
                "float32" not in (self.dtype, self.kv_cache_dtype),
                "--dtype, --kv-cache-dtype: the cuda backend computes and keeps KV in bfloat16 or float16, not float32",
            )
            check(
                self.block_size & (self.block_size - 1) == 0,
                f"--block-size: the cuda backend needs a power of two, not {self.block_size}",
            )
        else:
            check(
                self.dtype not in ("bfloat16", "float16"),
                f"--dtype {self.dtype} needs --backend cuda, not {self.backend}",
            )
            check(
                self.kv_cache_dtype != "float16", f"--kv-cache-dtype float16 needs --backend cuda, not {self.backend}"
            )
            check(not self.quantization, f"--quantization {self.quantization} needs --backend cuda, not {self.backend}")
            check(self.transport != "ipc", f"--transport ipc needs --backend cuda, not {self.backend}")

    @classmethod
    def of(cls, backend: BackendName, **values: Any) -> "WorkerConfig":
        """``backend``'s defaults under ``values``; a value of None counts as not given. Raises UsageError."""
        defaults = DEFAULTS[backend]
        given = {name: value for name, value in values.items() if value is not None}
        for name, flag in _GPU_FLAGS.items():
            check(backend == "cuda" or name not in given, f"{flag} needs --backend cuda, not {backend}")
        usual = {
            "block_size": defaults.block_size,
            "max_num_seqs": defaults.max_num_seqs,
            "max_num_batched_tokens": max(defaults.max_num_batched_tokens, given.get("max_num_seqs", 0)),
            "kv_cache_memory_bytes": defaults.kv_cache_memory_bytes,
        }
        if "max_num_batched_tokens" in given:
            usual["max_num_seqs"] = max(1, min(usual["max_num_seqs"], given["max_num_batched_tokens"]))
        return cls(backend=backend, **{**usual, **given})

    @property
    def resolved_kv_dtype(self) -> KvDtype:
        """``kv_cache_dtype`` with "auto" resolved."""
        if self.backend == "cuda":
            return "float16" if "float16" in (self.dtype, self.kv_cache_dtype) else "bfloat16"
        return "bfloat16" if self.kv_cache_dtype == "bfloat16" else DEFAULTS[self.backend].kv_cache_dtype

    @property
    def kv_bytes_per_value(self) -> int:
        return 4 if self.resolved_kv_dtype == "float32" else 2


def control_for(backend: BackendName, control: ControlConfig) -> ControlConfig:
    """``control`` with a step deadline that ``backend`` can meet, where nobody chose another."""
    detector = control.detector
    if detector.step_deadline_s != STEP_DEADLINE_S:
        return control
    return replace(control, detector=replace(detector, step_deadline_s=DEFAULTS[backend].step_deadline_s))


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """``relay serve``: where to listen, what to serve, with which workers."""

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    prefill: int = 1
    decode: int = 1
    seed: int | None = None
    offline: bool = False
    cache_dir: Path | None = None
    log_level: str = "info"
    grace_s: float = 30.0
    gateways: int = 1  # processes that serve HTTP on the one port; more than one: under a supervisor
    orphan_hold_s: float = 10.0  # with several gateways: how long workers keep what a lost one ordered
    worker_port: int = (
        0  # of the listener that workers dial; with several gateways that of the first, the next ports follow
    )
    worker_address: str | None = (
        None  # what they dial instead, where something stands in between; with commas for each gateway
    )
    perturb: tuple[str, ...] = ()  # "worker=kind" of ``kernels.perturbed``; "all" is every worker
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    control: ControlConfig = field(default_factory=ControlConfig)

    def __post_init__(self) -> None:
        check(0 <= self.port <= 65535, f"--port must be between 0 and 65535, not {self.port}")
        check(
            0 <= self.worker_port <= 65536 - self.gateways,
            f"--worker-port must be between 0 and {65536 - self.gateways}, not {self.worker_port}",
        )
        check(
            self.worker_address is None or all(_WORKER_ADDRESS.fullmatch(one) for one in self.worker_addresses),
            f"--worker-address must be tcp://HOST:PORT, not {self.worker_address!r}",
        )
        check(1 <= self.gateways <= 16, f"--gateways must be between 1 and 16, not {self.gateways}")
        check(0 < self.orphan_hold_s <= 3600, "--orphan-hold must be a number of seconds up to 3600")
        check(
            self.worker_address is None or len(self.worker_addresses) == self.gateways,
            f"--worker-address must name an address for each of the {self.gateways} gateways",
        )
        check(self.served_model_name != "", "--served-model-name must not be empty")
        check(0 <= self.prefill <= 64, "--prefill must be between 0 and 64")
        check(1 <= self.decode <= 64, "--decode must be between 1 and 64 (with --prefill 0 they do both phases)")
        check(
            self.prefill > 0 or not self.worker.by_role.prefill,
            "--prefill-devices names devices, but with --prefill 0 there are no prefill workers; name them in --decode-devices",
        )
        check(self.seed is None or 0 <= self.seed < 1 << 64, "--seed must be between 0 and 2^64 - 1")
        check(self.grace_s >= 0, "--grace must be a number of seconds of at least 0")
        check(self.log_level in LOG_LEVELS, f"--log-level: {self.log_level!r} is none of {', '.join(LOG_LEVELS)}")

    def resolved_control(self) -> ControlConfig:
        """``control`` with the step deadline of the backend, unless another one was set."""
        return control_for(self.worker.backend, self.control)

    @property
    def perturbations(self) -> dict[str, str]:
        """Worker id → what makes it wrong on purpose. Raises UsageError."""
        ids = [worker for worker, _ in self.slots]
        found: dict[str, str] = {}
        for text in self.perturb:
            worker, _, kind = text.partition("=")
            check(
                worker in (*ids, "all") and kind != "", f"--perturb {text!r}: write WORKER=KIND, WORKER of {ids} or all"
            )
            found |= dict.fromkeys(ids if worker == "all" else [worker], kind)
        return found

    @property
    def worker_addresses(self) -> list[str]:
        """What workers are told to dial, by gateway; empty: the gateways' own addresses."""
        return self.worker_address.split(",") if self.worker_address is not None else []

    @property
    def slots(self) -> list[tuple[str, Literal["prefill", "decode", "both"]]]:
        """(worker id, role) of every worker to start."""
        if self.prefill == 0:
            return [(f"worker-{index}", "both") for index in range(self.decode)]
        prefill: list[tuple[str, Literal["prefill", "decode", "both"]]]
        prefill = [(f"prefill-{index}", "prefill") for index in range(self.prefill)]
        return prefill + [(f"decode-{index}", "decode") for index in range(self.decode)]


_SUFFIXES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_bytes(text: str) -> int:
    """``512M``, ``2GiB``, ``1.5g`` or plain bytes → bytes. Raises UsageError."""
    stripped = text.strip().lower()
    number = stripped.rstrip("ib").rstrip("kmgt")
    suffix = stripped[len(number) :].rstrip("b").rstrip("i")
    try:
        value = float(number)
        factor = _SUFFIXES[suffix]
    except (ValueError, KeyError):
        raise UsageError(f"{text!r} is not a size; write for example 512M or 2G") from None
    check(0 < value < float("inf"), f"{text!r} is not a positive size")
    return int(value * factor)
