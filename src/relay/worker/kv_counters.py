"""What transfers add to a worker's counters, all of which only grow; ``/metrics`` shows them as ``relay_worker_<name>_total``.

Hidden share = 1 − kv_late_bytes_sent / kv_bytes_sent: what had left P before it drew the first token.
"""

from collections import Counter

from relay.transfer.contract import TransferStats


def count_sent(counters: Counter[str], stats: TransferStats | None) -> None:
    """P: D acknowledged."""
    counters["kv_transfers_sent"] += 1
    if stats is None:
        return
    counters["kv_bytes_sent"] += stats.bytes
    counters["kv_frames_sent"] += stats.frames
    counters["kv_late_bytes_sent"] += stats.late_bytes
    counters["kv_exposed_us"] += stats.exposed_ns // 1000
    counters[f"kv_transfers_sent_{stats.scheme}"] += 1


def count_received(counters: Counter[str], tokens: int, stats: TransferStats | None) -> None:
    """D: complete; ``tokens`` were not cached here."""
    counters["kv_transfers_received"] += 1
    counters["kv_tokens_received"] += tokens
    if stats is None:
        return
    counters["kv_bytes_received"] += stats.bytes
    counters["kv_frames_received"] += stats.frames
    counters[f"kv_transfers_received_{stats.scheme}"] += 1
