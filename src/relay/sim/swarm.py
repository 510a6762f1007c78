"""What a seed draws before its run: topology, sizes, time-outs, load, and which faults occur how often."""

from dataclasses import dataclass

from relay.control_config import (
    AdmissionConfig,
    BreakerConfig,
    ControlConfig,
    DetectorConfig,
    HedgeConfig,
    RestartConfig,
    RetryConfig,
)
from relay.engine.limits import SchedulerLimits
from relay.kernels.kv_frames import Heads
from relay.protocol.messages import Role
from relay.sim.backend import HALVES
from relay.sim.tape import Tape
from relay.transfer.contract import TransferLimits
from relay.worker.core import WorkerConfig

MS = 1_000_000

FAULTS = (
    "kill_worker",
    "kill_engine",
    "crash_engine",
    "freeze_engine",
    "freeze_all",
    "slow",
    "cut_agent",
    "cut_engine",
    "cut_kv",
    "partition_from_gateway",
    "partition_to_gateway",
    "partition_full",
    "partition_kv",
    "jitter",
    "kv_corrupt",
    "kv_truncate",
    "kv_lose",
    "kv_repeat",
    "gateway_stall",
    "client_disconnect",
    "drain",
    "step_error",
    "new_numerics",
    "kill_gateway",
    "stranger",
    "control_repeat",
    "half_open",
    "vanish",
    "flap",
    "crash_loop",
    "restart_storm",
    "registry_blip",
    "drain_order",
    "rolling_restart",
    "rolling_upgrade",
    "clock_jump",
    "slow_reader",
    "client_retry",
    "kv_forge",
)
HARMLESS = (
    "stranger",
    "drain_order",
    "rolling_restart",
    "rolling_upgrade",
    "clock_jump",
    "slow_reader",
    "client_retry",
)  # nothing may fail because of these


@dataclass(frozen=True, slots=True)
class Swarm:
    """One drawn configuration."""

    slots: tuple[tuple[str, Role], ...]
    control: ControlConfig
    scheduler: SchedulerLimits
    worker: WorkerConfig
    transfer: TransferLimits
    latency_ns: int
    split_per_mille: int
    step_ns: int
    token_ns: int
    load_ms: int
    faults: tuple[str, ...]
    mean_fault_ms: int  # between two faults
    mean_outage_ms: int  # length of what has a length
    mean_arrival_ms: int
    requests: int
    chaos_ms: int
    clock_ns: int  # where the monotonic clock stands at the beginning
    poison: int  # requests that crash every engine
    poison_hangs: bool = False  # or keep its step from ending
    gateways: tuple[str, ...] = ("gateway",)
    kv_parts: tuple[Heads, ...] = ()  # heads lie together by these where KV is sent from; none: all together

    @property
    def kv_tokens(self) -> int:
        """What the KV pool of one worker holds."""
        return self.scheduler.num_blocks * self.scheduler.block_size


def draw(tape: Tape) -> Swarm:
    """A swarm from the tape. Sizes are tiny and time-outs short, so that bounds are met often."""
    between, of = tape.between, tape.of
    prefill, decode = tape.below(3, "prefill"), between(1, 3, "decode")
    if prefill:
        slots: list[tuple[str, Role]] = [(f"prefill-{index}", "prefill") for index in range(prefill)]
        slots += [(f"decode-{index}", "decode") for index in range(decode)]
    else:
        slots = [(f"worker-{index}", "both") for index in range(decode)]
    # One run in eight has none that may excuse anything; each kind is on in about a third of the others, so single kinds occur.
    harmless = tape.below(8, "faultless") == 0
    faults = HARMLESS if harmless else tuple([kind for kind in FAULTS if tape.chance(330, kind)])
    gateways = tuple([f"gateway-{index}" for index in range(of((1, 1, 2, 3), "gateways"))])
    return Swarm(
        gateways=gateways if len(gateways) > 1 else ("gateway",),
        slots=tuple(slots),
        control=_control(tape),
        scheduler=_scheduler(tape),
        worker=WorkerConfig(
            max_held=of((3, 8, 4096), "max_held"),
            retry_after_ms=of((10, 250), "retry_after_ms"),
            report_interval_ns=of((5, 50), "report_ms") * MS,
            drain_timeout_ns=of((100, 1000, 30_000), "drain_ms") * MS,
            orphan_hold_ns=of((50, 300, 2000), "hold_ms") * MS if len(gateways) > 1 else 0,
        ),
        transfer=_transfer(tape),
        latency_ns=of((30_000, 200_000, 2_000_000), "latency"),
        split_per_mille=of((0, 50), "split"),
        step_ns=of((1, 4, 15), "step_ms") * MS,
        token_ns=of((20_000, 200_000), "token_ns"),
        load_ms=of((5, 100, 800), "load_ms"),
        faults=faults,
        mean_fault_ms=of((30, 100, 400), "fault_ms"),
        mean_outage_ms=of((50, 400, 2000), "outage_ms"),
        mean_arrival_ms=of((2, 20, 100), "arrival_ms"),
        requests=between(3, 24, "requests"),
        chaos_ms=of((300, 1000, 3000), "chaos_ms"),
        poison=of((0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 2), "poison"),
        poison_hangs=tape.chance(300, "poison hangs"),
        clock_ns=of((1, 3600, 1_000_000_000), "clock") * 1000 * MS,  # whole windows of the breakers
        kv_parts=of(((), HALVES), "kv_parts"),
    )


def _control(tape: Tape) -> ControlConfig:
    of = tape.of
    dead_s = of((0.6, 0.9, 1.5), "dead_s")
    return ControlConfig(
        detector=DetectorConfig(
            suspect_after_s=of((0.4, 0.6), "suspect_s"),
            dead_after_s=dead_s,
            frozen_after_s=of((0.2, 0.5), "frozen_s"),
            start_deadline_s=5.0,
            step_deadline_s=of((1.0, 3.0), "step_deadline_s"),
            answer_deadline_s=of((0.5, 2.0, 10.0), "answer_s"),
            handoff_deadline_s=of((1.0, 4.0, 20.0), "handoff_s"),
            own_stall_s=of((0.2, 0.5), "own_stall_s"),
        ),
        restart=RestartConfig(
            first_delay_s=0.05,
            max_delay_s=of((0.2, 1.0), "restart_s"),
            stable_after_s=of((0.5, 5.0), "stable_s"),
            crash_loop_failures=of((3, 5), "crash_loop"),
            exit_wait_s=of((0.2, 1.0), "exit_wait_s"),
            report_wait_s=of((0.02, 0.2), "report_wait_s"),
        ),
        retry=RetryConfig(
            max_failures=of((8, 30), "max_failures"),
            backoff_s=of((0.005, 0.025), "backoff_s"),
            max_backoff_s=of((0.05, 0.5), "max_backoff_s"),
            full_patience_s=of((0.02, 0.5), "full_patience_s"),
            budget_per_mille=of((0, 500), "retry_per_mille"),
            budget_tokens_per_s=of((50, 2000), "retry_tokens_per_s"),
            budget_burst_tokens=of((60, 1 << 16), "retry_burst"),
        ),
        hedge=HedgeConfig(
            budget_per_mille=of((50, 1000, 1000, 1000), "hedge_per_mille"),
            slow_step_s=of((0.06, 0.3), "slow_step_s"),
            slow_factor=of((2, 8), "slow_factor"),
        ),
        breaker=BreakerConfig(
            window_s=of((0.5, 10.0), "breaker_window_s"),
            min_failures=of((1, 5), "breaker_failures"),
            open_s=of((0.1, 1.0), "breaker_open_s"),
            slow_start_s=of((0.2, 5.0), "slow_start_s"),
            slow_start_seqs=of((1, 2), "slow_start_seqs"),
        ),
        admission=AdmissionConfig(
            max_num_queued_reqs=of((2, 8, 512), "queued_reqs"),
            max_num_queued_tokens=of((200, 1 << 20), "queued_tokens"),
            no_worker_deadline_s=of((2.0, 20.0), "no_worker_s"),
        ),
        short_prompt_tokens=of((1, 16, 64), "short_prompt"),
        tick_s=of((0.02, 0.1), "tick_s"),
        story_entries=512,
    )


def _scheduler(tape: Tape) -> SchedulerLimits:
    of = tape.of
    block_size = of((16, 32), "block_size")
    max_num_seqs = of((1, 2, 4, 8), "max_num_seqs")
    return SchedulerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=of((16, 40, 128), "batched_tokens"),
        block_size=block_size,
        num_blocks=of((112, 160, 480), "kv_tokens") // block_size,
        max_model_len=112,
        growth_tokens=of((0, 8, 64), "growth"),
        max_num_waiting=of((4, 4096), "max_num_waiting"),
    )


def _transfer(tape: Tape) -> TransferLimits:
    of = tape.of
    max_frame_bytes = of((64, 256, 2048), "max_frame")
    return TransferLimits(
        min_frame_bytes=of((16, max_frame_bytes), "min_frame"),
        max_frame_bytes=max_frame_bytes,
        window_bytes=max_frame_bytes * of((2, 8), "window"),
        probe_ns=of((100, 500), "probe_ms") * MS,
        lease_ns=of((700, 1500, 3000), "lease_ms") * MS,
        open_lease_ns=of((2000, 10_000), "open_lease_ms") * MS,
    )
