"""What the gateway tells about itself: status, health and metrics."""

from relay.config import SECOND
from relay.control.breaker import BreakerState
from relay.control.state import ClusterState
from relay.control.transitions import WorkerState
from relay.control.workers import Worker

NO_PROGRESS_S = 30.0
ALWAYS = (
    "hedges",
    "hedges_won",
    "hedge_tokens",
    "token_disagreements",
    "resumes_delayed",
)  # shown before they happen, too


def status(state: ClusterState, now_ns: int) -> dict[str, object]:
    """What ``relay status --json`` prints."""
    return {
        "model": state.model.name,
        "model_digest": state.model.model_digest,
        "numerics_id": state.model.numerics_id,
        "ready": bool(state.ready_workers()) and not state.draining,
        "draining": state.draining,
        "requests": {"running": _num_running(state), "waiting": len(state.queue)},
        "alarm": state.alarm,
        "rollout": {"left": list(state.rollout), "problem": state.rollout_problem},
        "links": {
            f"{prefill}>{decode}": breaker.at(now_ns).value
            for (prefill, decode), breaker in state.breakers.links.items()
        },
        "workers": [_worker(state, worker, now_ns) for worker in state.workers.values()],
    }


def _num_running(state: ClusterState) -> int:
    """Choices that are placed and have not ended."""
    return sum(request.open_choices for request in state.requests.values()) - len(state.queue)


def _worker(state: ClusterState, worker: Worker, now_ns: int) -> dict[str, object]:
    alive = worker.state in (WorkerState.STARTING, WorkerState.READY, WorkerState.DRAINING)
    load = worker.load if alive else None
    return {
        "id": worker.id,
        "pid": worker.engine.pid if alive and worker.engine else None,
        "agent_pid": worker.agent.pid if alive and worker.agent else None,
        "role": worker.role,
        "state": worker.state.value,
        "incarnation": worker.incarnation,
        "kv_used": load.kv_used if load else 0,
        "kv_total": load.kv_total if load else (worker.engine.kv_blocks if worker.engine else 0),
        "running": load.running if load else 0,
        "waiting": load.waiting if load else 0,
        "placed": len(worker.live),
        "suspect": worker.suspect,
        "slow": worker.slow,
        "breaker": state.breakers.workers[worker.id].at(now_ns).value,
        "transports": _transports(worker),
        "devices": list(worker.engine.devices) if worker.engine else [],
        "numerics_id": worker.numerics_id,
        "state_age_s": round((now_ns - worker.changed_ns) / SECOND, 3),
        "last_loss": worker.last_cause,
        "last_loss_s": worker.lost_ns / SECOND or None,
    }


def _transports(worker: Worker) -> dict[str, int]:
    """How KV can reach this worker, and the transfers it sent and received so far by each way."""
    counters = worker.load.counters if worker.load else {}
    schemes = worker.engine.transports if worker.engine else ()
    ways = ("kv_transfers_sent", "kv_transfers_received")
    return {scheme: int(sum(counters.get(f"{way}_{scheme}", 0) for way in ways)) for scheme in schemes}


def health(state: ClusterState, now_ns: int) -> tuple[bool, str]:
    """False when a worker has work and moves nothing. Being without workers is readiness, not health."""
    if state.alarm:
        return False, f"{state.alarm}; a machine computes wrongly"
    for worker in state.ready_workers():
        age_s = (now_ns - worker.progress_ns) / SECOND
        stepping = worker.beat is not None and worker.beat.phase == "stepping"
        if worker.live and stepping and age_s > NO_PROGRESS_S:
            return False, f"{worker.id} has {len(worker.live)} sequences and produced nothing for {age_s:.0f} s"
    return True, ""


def metrics(state: ClusterState, now_ns: int) -> list[tuple[str, dict[str, str], float]]:
    """(name, labels, value). Names ending in ``_total`` only grow, until the gateway restarts."""
    samples: list[tuple[str, dict[str, str], float]] = [
        ("relay_num_requests_running", {}, _num_running(state)),
        ("relay_num_requests_waiting", {}, len(state.queue)),
        ("relay_num_tokens_waiting", {}, state.queue.num_new_tokens),
    ]
    counters = {**dict.fromkeys(ALWAYS, 0), **state.counters}
    samples += [(f"relay_{name}_total", {}, count) for name, count in sorted(counters.items())]
    samples += [
        ("relay_hedge_budget_tokens", {}, state.hedge_budget.tokens),
        ("relay_retry_budget_tokens", {}, state.retry_budget.tokens),
    ]
    for (prefill, decode), breaker in state.breakers.links.items():
        label = {"worker": "", "link": f"{prefill}>{decode}"}
        samples.append(("relay_breaker_open", label, float(breaker.at(now_ns) is BreakerState.OPEN)))
    for worker in state.workers.values():
        label = {"worker": worker.id, "role": worker.role}
        samples.append(("relay_worker_up", label, float(worker.state is WorkerState.READY)))
        opened = state.breakers.workers[worker.id].at(now_ns) is BreakerState.OPEN
        samples.append(("relay_breaker_open", {"worker": worker.id, "link": ""}, float(opened)))
        samples.append(("relay_worker_incarnation", label, worker.incarnation))
        samples.append(("relay_worker_sequences", label, len(worker.live)))
        samples.append(("relay_worker_backlog_tokens", label, worker.backlog_tokens))
        if worker.load is not None:
            samples.append(("relay_worker_kv_used", label, worker.load.kv_used))
            samples.append(("relay_worker_kv_total", label, worker.load.kv_total))
            samples += [
                (f"relay_worker_{name}_total", label, value) for name, value in sorted(worker.load.counters.items())
            ]
    return samples
