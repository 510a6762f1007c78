"""Planted bugs: one-line changes of the cores that the simulation must find. They prove that the alarm rings.

Each is a patch of one attribute of a production class for the length of a run; nothing of it exists in production.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from relay.control import admission
from relay.control.attempts import Attempt
from relay.control.blame import Blame
from relay.control.commands import SendToEngine
from relay.control.detector import Detector
from relay.control.membership import Membership
from relay.control.placement import Dispatcher
from relay.control.requests import Choice
from relay.control.router import Router
from relay.control.state import ClusterState
from relay.control.stream import TokenPath
from relay.control.workers import Worker
from relay.engine.block_pool import BlockPool
from relay.engine.kv_space import KvSpace
from relay.engine.prefix_cache import PrefixCache
from relay.engine.scheduler import Scheduler
from relay.errors import UsageError
from relay.sim.run import run_seed
from relay.transfer.receiver import Receiver
from relay.transfer.sender import Sender
from relay.worker.core import WorkerCore
from relay.worker.table import HeldTable

SEEDS = 500


@dataclass(frozen=True, slots=True)
class Mutant:
    """``change(original)`` returns what takes the place of ``owner.attribute``."""

    name: str
    owner: Any  # a class or a module
    attribute: str
    change: Callable[[Any], Any]


def _nothing(original: Any) -> Any:
    return lambda *arguments, **keywords: None


def _resume_off_by_one(original: Any) -> Any:
    def work(attempt: Attempt) -> Any:
        body = original(attempt)
        if attempt.number > 1 and attempt.start:
            body.token_ids = body.token_ids[:-1] + body.token_ids[-2:-1]
        return body

    return work


def _no_attempt_check(original: Any) -> Any:
    def placed(dispatcher: Dispatcher, worker: Worker, message: Any) -> Attempt | None:
        request = dispatcher._state.requests.get(message.request)
        attempts = request.choices[message.choice].attempts if request is not None else []
        return next((attempt for attempt in attempts if attempt.on(worker)), None)

    return placed


def _failures_of_any_attempt(original: Any) -> Any:
    def failed(path: TokenPath, worker: Worker, message: Any, now_ns: int) -> None:
        request = path._state.requests.get(message.request)
        if request is not None:
            message.attempt = request.choices[message.choice].num_attempts
        original(path, worker, message, now_ns)

    return failed


def _no_cancel(original: Any) -> Any:
    def cancel_at(dispatcher: Dispatcher, attempt: Attempt, worker: Worker) -> None:
        return None

    return cancel_at


def _cancel_only_prefill(original: Any) -> Any:
    def cancel(dispatcher: Dispatcher, attempt: Attempt) -> None:
        if attempt.prefill is not None:
            dispatcher._cancel_at(attempt, attempt.prefill)

    return cancel


def _trim_keeps_all(original: Any) -> Any:
    def trim(path: TokenPath, attempt: Attempt, worker: Worker, entry: Any, now_ns: int) -> Any:
        return entry

    return trim


def _blind_to_incarnation(original: Any) -> Any:
    def current(state: ClusterState, key: Any) -> Worker | None:
        return state.workers.get(key.worker)

    return current


def _any_numerics(original: Any) -> Any:
    return lambda router, worker, choice: True


def _stale_epoch(original: Any) -> Any:
    def hear(receiver: Receiver, header: Any, now_ns: int) -> bool:
        return not receiver.over

    return hear


def _release_twice(original: Any) -> Any:
    def release(pool: BlockPool, blocks: Any, after_step: int = 0) -> None:
        listed = list(blocks)
        original(pool, listed, after_step)
        shared = [block for block in listed if pool.references(block)]
        original(pool, shared[:1], after_step)

    return release


def _no_quarantine(original: Any) -> Any:
    return lambda pool, blocks, after_step=0: original(pool, blocks, 0)


def _publish_early(original: Any) -> Any:
    """Blocks are named when they are planned, not when they are computed."""

    def publish(space: KvSpace, sequence: Any) -> None:
        computed = sequence.num_computed
        sequence.num_computed = max(computed, min(sequence.capacity, len(sequence.token_ids)))
        original(space, sequence)
        sequence.num_computed = computed

    return publish


def _whole_prompt_cached(original: Any) -> Any:
    """A reservation counts one block more as cached than it is."""

    def match(space: KvSpace, sequence: Any, limit: int) -> list[int]:
        found: list[int] = original(space, sequence, limit)
        return found + found[-1:] if found and (len(found) + 1) * space._block_size <= limit else found

    return match


def _retry_at_once(original: Any) -> Any:
    def refusal(state: ClusterState, submission: Any) -> Any:
        failure = original(state, submission)
        if failure is not None:
            failure.retry_after_s = 0
        return failure

    return refusal


def _forget_victims(original: Any) -> Any:
    """A lost worker's choices stay on it."""

    def lose(membership: Membership, worker: Worker, cause: str, now_ns: int, **keywords: Any) -> None:
        kept, worker.live = worker.live, {}
        original(membership, worker, cause, now_ns, **keywords)
        worker.live = kept

    return lose


def _no_reopen(original: Any) -> Any:
    def failed(path: TokenPath, worker: Worker, message: Any, now_ns: int) -> None:
        return None

    return failed


def _never_acknowledge(original: Any) -> Any:
    def send_ended(core: WorkerCore, transfer: int) -> None:
        return None

    return send_ended


def _activate_forgets(original: Any) -> Any:
    """D does not report the first token, so it is lost when P's report is."""

    def activate(scheduler: Scheduler, key: Any, first_token: Any) -> Any:
        first_token.token_id = (first_token.token_id + 1) % 8
        return original(scheduler, key, first_token)

    return activate


def _old_attempt_wins(original: Any) -> Any:
    """A worker that holds an older attempt refuses the newer one."""

    def attempt(table: HeldTable, request: int, choice: int) -> Any:
        held = original(table, request, choice)
        return held if held is None or held.key.attempt > 1 else None

    return attempt


def _skips_a_layer(original: Any) -> Any:
    """The last layer of a prompt's last chunk is not sent, and D does not count layers."""
    return property(lambda receiver: receiver._layers_missing < receiver.layout.num_layers)


def _sends_unwritten(original: Any) -> Any:
    """All layers count as written when the first one is."""

    def written(sender: Sender, layer: int, first: int, count: int) -> None:
        if layer == 0:
            for each in range(sender.layout.num_layers):
                original(sender, each, first, count)

    return written


def _queue_unbounded(original: Any) -> Any:
    return lambda state, submission: None


def _youngest_forgotten(original: Any) -> Any:
    """A preempted sequence is not queued again."""

    def preempt(scheduler: Scheduler, sequence: Any) -> None:
        original(scheduler, sequence)
        scheduler._roster.waiting.remove(sequence)

    return preempt


def _last_token_from_cache(original: Any) -> Any:
    """Salt and numerics id do not separate prefixes: only the tokens of a block name it."""

    def lookup(cache: Any, parent: bytes, unit_hash: bytes, token_ids: Any) -> int | None:
        for block, known in cache._blocks.items():
            if known.token_ids == token_ids:
                return int(block)
        return None

    return lookup


def _no_rollback(original: Any) -> Any:
    """After a step that raised, the rest goes on as if it had been computed."""

    def roll_back(scheduler: Scheduler, flight: Any, error: str, blamed: Any) -> Any:
        for row, sequence in zip(flight.rows, flight.sequences, strict=True):
            sequence.num_computed = max(sequence.num_computed, min(sequence.num_planned, row.start + row.count))
        return original(scheduler, flight, error, blamed)

    return roll_back


def _frozen_is_fine(original: Any) -> Any:
    def heartbeat(membership: Membership, worker: Worker, beat: Any, now_ns: int) -> None:
        beat.engine_state = "S"
        beat.phase_age_ms = 0
        original(membership, worker, beat, now_ns)

    return heartbeat


def _own_stall_blames_others(original: Any) -> Any:
    return lambda detector, now_ns: None


def _double_send(original: Any) -> Any:
    def place(dispatcher: Dispatcher, choice: Choice, placement: Any, now_ns: int) -> None:
        original(dispatcher, choice, placement, now_ns)
        used = (placement.decode, placement.prefill)
        other = next((w for w in dispatcher._state.ready_workers() if w not in used), None)
        last = dispatcher._state.commands[-1] if dispatcher._state.commands else None
        if other is not None and isinstance(last, SendToEngine):
            dispatcher._state.commands.append(SendToEngine(other.key, last.message))

    return place


def _unbooked(original: Any) -> Any:
    def unbook(worker: Worker, attempt: Attempt) -> None:
        worker.live.pop(attempt, None)

    return unbook


MUTANTS = (
    Mutant("resume off by one", Attempt, "work", _resume_off_by_one),
    Mutant("no attempt check on answers", Dispatcher, "_placed", _no_attempt_check),
    Mutant("no attempt check on failures", TokenPath, "failed", _failures_of_any_attempt),
    Mutant("no cancel fan-out", Dispatcher, "_cancel_at", _no_cancel),
    Mutant("cancel does not reach decode", Dispatcher, "_cancel", _cancel_only_prefill),
    Mutant("repeated tokens are delivered again", TokenPath, "_trim", _trim_keeps_all),
    Mutant("incarnation ignored", ClusterState, "current", _blind_to_incarnation),
    Mutant("numerics id ignored", Router, "_may_serve", _any_numerics),
    Mutant("a layer short accepted", Receiver, "covered", _skips_a_layer),
    Mutant("stale epoch and attempt accepted", Receiver, "_hear", _stale_epoch),
    Mutant("shared block released twice", BlockPool, "release", _release_twice),
    Mutant("blocks return under a step in flight", BlockPool, "release", _no_quarantine),
    Mutant("blocks published before computed", KvSpace, "publish", _publish_early),
    Mutant("one block too many from the cache", KvSpace, "match", _whole_prompt_cached),
    Mutant("Retry-After 0", admission, "refusal", _retry_at_once),
    Mutant("choices stay on a lost worker", Membership, "lose", _forget_victims),
    Mutant("a lost worker is not started again", Membership, "_schedule_restart", _nothing),
    Mutant("failed attempts are ignored", TokenPath, "failed", _no_reopen),
    Mutant("acknowledged blocks are kept", WorkerCore, "_send_ended", _never_acknowledge),
    Mutant("silence is never death", Detector, "_silence", _nothing),
    Mutant("answers are never late", Detector, "_answers", _nothing),
    Mutant("crashes are never blamed", Blame, "accuse", _nothing),
    Mutant("handed-off token replaced", Scheduler, "activate", _activate_forgets),
    Mutant("first attempts are not superseded", HeldTable, "attempt", _old_attempt_wins),
    Mutant("layers sent before they are written", Sender, "written", _sends_unwritten),
    Mutant("queue without a bound", admission, "_overload", _queue_unbounded),
    Mutant("preempted sequences are forgotten", Scheduler, "_preempt", _youngest_forgotten),
    Mutant("blocks named by their tokens alone", PrefixCache, "lookup", _last_token_from_cache),
    Mutant("a failed step counts as computed", Scheduler, "_roll_back", _no_rollback),
    Mutant("a frozen engine is fine", Membership, "heartbeat", _frozen_is_fine),
    Mutant("own stall is others' death", Detector, "_forgive_own_stall", _own_stall_blames_others),
    Mutant("work sent to two workers", Dispatcher, "_place", _double_send),
    Mutant("backlog not given back", Worker, "unbook", _unbooked),
    Mutant("leases never expire on P", Sender, "tick", _nothing),
    Mutant("leases never expire on D", Receiver, "tick", _nothing),
    Mutant("preempted prompts not announced anew", WorkerCore, "_revoke_preempted", _nothing),
)


def by_name(name: str) -> Mutant:
    """Raises UsageError with all names for one that is unknown."""
    found = next((mutant for mutant in MUTANTS if mutant.name == name), None)
    if found is None:
        raise UsageError(f"no mutant is named {name!r}; there are {', '.join(mutant.name for mutant in MUTANTS)}")
    return found


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """The bug is there inside the block."""
    original = mutant.owner.__dict__[mutant.attribute]
    setattr(mutant.owner, mutant.attribute, mutant.change(original))
    try:
        yield
    finally:
        setattr(mutant.owner, mutant.attribute, original)


def seeds_needed(mutant: Mutant, seeds: int = SEEDS, first: int = 0) -> int | None:
    """How many seeds it takes to find ``mutant``; None if ``seeds`` are not enough."""
    with planted(mutant):
        for count in range(1, seeds + 1):
            if run_seed(first + count - 1).failure is not None:
                return count
    return None
