"""What differs between the two-GPU benchmark's real run and the test of its script on CPUs."""

from dataclasses import dataclass, replace

from benchmarks.gpu_shapes import LLAMA_8B
from benchmarks.multi_gpu_load import Load
from relay.config import TransportName
from relay.models.config import ModelConfig, RopeConfig

LONG_8B = replace(LLAMA_8B, max_positions=40960)
TINY = ModelConfig(
    architecture="llama", vocab=512, hidden=64, intermediate=128, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=16, rms_eps=1e-5, max_positions=4096, rope=RopeConfig(theta=10000.0), tied_embeddings=False,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setup:
    """Sizes, loads, and what each thing is expected to take."""

    backend: str
    devices: tuple[str, str]
    load: Load
    budgets: tuple[int, ...]  # tokens a step of the colocated replicas, in the order of their worth
    rank_budgets: tuple[int, ...]
    extra_budgets: tuple[int, ...]  # colocated, not among the main parts
    prefill_budget: int  # of the split's P: one document, so that the first of two does not wait for the second
    factors: tuple[float, ...]
    transfers: tuple[tuple[int, int], ...]  # (tokens, trials)
    transports: tuple[TransportName, ...]  # the first is what the split is served with
    kill_streams: int  # on the victim
    kill_prompt: int
    kill_new: int
    flags: tuple[str, ...]
    block_size: int
    chunk: int
    ready_s: float  # what a start is expected to take
    ranks_ready_s: float  # what a start of ranks is expected to take
    start_s: float  # what a start may take
    settle_s: float  # what a worker's restart may take, before a part
    transfer_s: float  # what KV over one transport is expected to take
    verify_s: float
    kill_s: float

    def shape(self, name: str) -> tuple[str, ...]:
        """Flags of a shape; every one uses both devices."""
        first, second = self.devices
        split = ("--prefill", "1", "--decode", "1", "--max-num-batched-tokens", str(self.prefill_budget), "--transport")
        chosen = {
            "split": (*split, self.transports[0]),
            "split-other": (*split, self.transports[1]),
            "colocated": ("--prefill", "0", "--decode", "2"),
            "ranks": ("--prefill", "0", "--decode", "1", "--tensor-parallel-size", "2"),
        }[name]
        if self.backend != "cuda":
            return chosen
        placed = {
            "split": ("--prefill-devices", first, "--decode-devices", second),
            "split-other": ("--prefill-devices", first, "--decode-devices", second),
            "colocated": ("--decode-devices", f"{first},{second}"),
            "ranks": ("--decode-devices", f"{first},{second}"),
        }[name]
        return (*chosen, *placed)

    def ready_of(self, shape: str) -> float:
        """What a start of ``shape`` is expected to take."""
        return self.ranks_ready_s if shape == "ranks" else self.ready_s

    def load_s(self, factors: tuple[float, ...]) -> float:
        """What one server's loads are expected to take: warm-up, each factor with its last answers, the backlog."""
        return 4 + len(factors) * (self.load.seconds + 3) + 6


GPUS = Setup(
    backend="cuda",
    devices=("cuda:0", "cuda:1"),
    load=Load(),
    budgets=(512, 2048, 1024),
    rank_budgets=(512,),
    extra_budgets=(256,),
    prefill_budget=4096,
    factors=(1.2, 2.2),
    transfers=((2048, 9), (8192, 7), (16384, 3), (32768, 3)),
    transports=("ipc", "shm"),
    kill_streams=32,
    kill_prompt=512,
    kill_new=400,
    flags=("--max-model-len", "8192"),
    block_size=64,
    chunk=8192,
    ready_s=18.0,
    ranks_ready_s=34.0,
    start_s=90.0,
    settle_s=40.0,
    transfer_s=72.0,
    verify_s=115.0,
    kill_s=13.0,
)
CPUS = Setup(
    backend="cpu",
    devices=("cpu", "cpu"),
    load=Load(4, 80, 24, 2, 600, 8, 2.0, 500, slo_start_ms=2000, step_ms=100, drain_s=30),
    budgets=(64, 256),
    rank_budgets=(64,),
    extra_budgets=(),
    prefill_budget=256,
    factors=(1.0,),
    transfers=((512, 3), (2048, 2)),
    transports=("shm", "tcp"),
    kill_streams=4,
    kill_prompt=64,
    kill_new=3000,  # a second of them: the kill must find them under way
    flags=("--threads", "1", "--kv-cache-memory", "64M"),
    block_size=16,
    chunk=256,
    ready_s=2.0,
    ranks_ready_s=3.0,
    start_s=60.0,
    settle_s=30.0,
    transfer_s=4.0,
    verify_s=10.0,
    kill_s=8.0,
)
