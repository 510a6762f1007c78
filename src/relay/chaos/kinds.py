"""The kinds of faults: what is done, to whom, and how often one is drawn."""

from dataclasses import dataclass
from typing import Literal

Target = Literal["engine", "agent", "both", "role", "control", "kv", "gateway", "holder"]
Deed = Literal[
    "kill",
    "terminate",
    "drain_kill",
    "leave",
    "roll",
    "segfault",
    "stop",
    "slow",
    "cut",
    "delay",
    "truncate",
    "corrupt",
    "half_close",
    "one_way",
    "partition",
    "half_partition",
    "loss",
]
PACKET_DEEDS: tuple[Deed, ...] = ("partition", "half_partition", "loss")


@dataclass(frozen=True, slots=True)
class Kind:
    """``leave`` and ``roll`` are an operator's orders. ``target``: processes of one worker, every engine of one role, a control
    connection, a KV connection between workers, one of several gateways, or the process that holds a GPU's weights for several
    workers."""

    deed: Deed
    target: Target
    weight: int  # how often it is drawn, against the others

    @property
    def on_packets(self) -> bool:
        """Done to packets in the kernel: only in a network namespace of our own."""
        return self.deed in PACKET_DEEDS

    @property
    def fatal(self) -> bool:
        """It ends a worker that is not saved by luck, so there is a time after which the gateway knows."""
        return self.deed in ("kill", "segfault", "stop")


KINDS: dict[str, Kind] = {
    "kill_engine": Kind("kill", "engine", 10),
    "kill_agent": Kind("kill", "agent", 4),
    "kill_both": Kind("kill", "both", 4),
    "kill_role": Kind("kill", "role", 2),
    "terminate_engine": Kind("terminate", "engine", 1),
    "terminate_agent": Kind("terminate", "agent", 1),
    "restart_worker": Kind("leave", "engine", 1),
    "restart_rolling": Kind("roll", "engine", 1),
    "drain_kill_both": Kind("drain_kill", "both", 1),
    "segfault_engine": Kind("segfault", "engine", 2),
    "stop_engine": Kind("stop", "engine", 4),
    "stop_both": Kind("stop", "both", 3),
    "slow_engine": Kind("slow", "engine", 1),
    "cut_control": Kind("cut", "control", 1),
    "delay_control": Kind("delay", "control", 1),
    "truncate_control": Kind("truncate", "control", 1),
    "corrupt_control": Kind("corrupt", "control", 1),
    "half_close_control": Kind("half_close", "control", 1),
    "one_way_control": Kind("one_way", "control", 1),
    "cut_kv": Kind("cut", "kv", 1),
    "delay_kv": Kind("delay", "kv", 1),
    "truncate_kv": Kind("truncate", "kv", 1),
    "corrupt_kv": Kind("corrupt", "kv", 1),
    "half_close_kv": Kind("half_close", "kv", 1),
    "one_way_kv": Kind("one_way", "kv", 1),
    "kill_holder": Kind("kill", "holder", 2),
    "kill_gateway": Kind("kill", "gateway", 4),
    "stop_gateway": Kind("stop", "gateway", 2),
    "partition_control": Kind("partition", "control", 2),
    "half_partition_control": Kind("half_partition", "control", 2),
    "loss_control": Kind("loss", "control", 1),
    "partition_kv": Kind("partition", "kv", 2),
    "loss_kv": Kind("loss", "kv", 2),
}

# When a fault strikes: a word for what the choice in question is doing at that instant (``watch.py`` says how it is seen).
MOMENTS = (
    "reserved",  # D was asked for room and has not answered
    "accepted",  # D has made room, P has not begun
    "prefill",  # the prompt is being computed, nothing of it was sent
    "streaming",  # between the first KV frame and the handoff
    "handed_off",  # the handoff was sent, D has said nothing yet
    "decoding",  # tokens come
    "last_token",  # the last token was sent; what follows is the end
    "draining",  # the worker was told to end and finishes what it has
    "idle",  # nothing is placed on the worker
)
