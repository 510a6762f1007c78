"""What a launcher passes to start one worker: plain data, so that it may cross to another machine as JSON.

Started as ``python -m relay.worker.agent --spec FILE_OR_JSON``; the agent starts the engine with the same text. No file
descriptor, object or environment variable is inherited: everything a worker needs to know is here.
"""

from pathlib import Path
from typing import Literal

import msgspec

from relay.config import KvDtype, TransportName
from relay.errors import UsageError
from relay.protocol.messages import Role


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One life of one worker. ``incarnation`` is the gateway's and grows with every start of ``worker``."""

    worker: str
    incarnation: int
    role: Role = "both"
    gateways: list[str]  # "tcp://host:port" of the worker listener of every gateway
    pack_path: str
    model_digest: str = ""  # refuse to start on any other pack; empty: take what the file says
    backend: Literal["cpu", "cuda", "reference"] = "cpu"
    device: str = "cuda:0"  # of the cuda backend
    ranks: int = 1  # processes that share this worker's work, each with a part of heads, width and vocabulary
    rank_devices: list[str] = []  # of the cuda backend with several ranks, by rank; the first is ``device``
    weights_socket: str = ""  # abstract Unix socket of the process that holds the device's weights; empty: load a copy
    gpu_sharers: int = 1  # workers that use those weights
    gpu_memory_fraction: float = 0.9  # of that device's memory for this worker, where kv_cache_memory_bytes is 0
    threads: int = 0  # 0: one a core
    kv_cache_memory_bytes: int = 1 << 30  # 0: what gpu_memory_fraction leaves
    kv_cache_dtype: KvDtype = "float32"  # of the cuda backend: also of its weights and activations
    quantization: Literal["", "int8"] = ""  # of the cuda backend's weights
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 256
    growth_tokens: int = 128  # see engine/limits.py
    max_model_len: int = 0  # 0: the model's own limit
    kv_host: str = "127.0.0.1"  # where the KV listener binds and what it advertises
    kv_port: int = 0  # 0: ephemeral
    transport: TransportName = (
        "auto"  # how KV travels: shared memory where both engines can, else TCP; or only one of them
    )
    perturb: str = ""  # a kernels.perturbed kind: `relay verify --inject` makes one worker wrong on purpose
    record: str = ""  # a folder: record there what the core is told and decides; empty: do not
    drain_timeout_s: float = 30.0  # after SIGTERM or Drain: how long running requests may take to finish
    orphan_hold_s: float = (
        0.0  # live on without any gateway, and keep what a lost one ordered, for so long; 0: end with it
    )


def encode_spec(spec: WorkerSpec) -> str:
    """One line of JSON."""
    return msgspec.json.encode(spec).decode()


def decode_spec(text: str) -> WorkerSpec:
    """The inverse of ``encode_spec``; ``text`` may also be the path of a file holding it. Raises UsageError."""
    try:
        raw = text if text.lstrip().startswith("{") else Path(text).read_text()
        return msgspec.json.decode(raw, type=WorkerSpec)
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise UsageError(f"bad worker spec: {error}") from error


def parse_address(address: str) -> tuple[str, int]:
    """("host", port) of "tcp://host:port". Raises UsageError."""
    scheme, separator, rest = address.partition("://")
    host, colon, port = rest.rpartition(":")
    if scheme != "tcp" or not separator or not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"bad address {address!r}: expected tcp://host:port")
    return host.strip("[]"), int(port)
