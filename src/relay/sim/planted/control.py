"""Bugs in the gateway's core."""

from dataclasses import replace
from typing import Any

from relay.config import SECOND
from relay.control import admission, placement
from relay.control.attempts import Attempt
from relay.control.blame import Blame
from relay.control.commands import Deliver, SendToEngine
from relay.control.core import GatewayCore
from relay.control.detector import Detector
from relay.control.membership import Membership
from relay.control.placement import Dispatcher
from relay.control.requests import Choice, Suspicion
from relay.control.router import Router
from relay.control.state import ClusterState
from relay.control.stream import TokenPath
from relay.control.transitions import WorkerState
from relay.control.workers import Worker
from relay.sim.planted.mutant import Mutant, nothing


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


def _asked_at_once(original: Any) -> Any:
    def full(dispatcher: Dispatcher, attempt: Attempt, worker: Worker, hint_ns: int, now_ns: int) -> None:
        dispatcher.close(attempt, now_ns, f"{worker.id} is full", refused_by=worker)

    return full


def _no_patience(original: Any) -> Any:
    return lambda refusals, retry: 0


def _queue_unbounded(original: Any) -> Any:
    return lambda state, submission: None


def _tokens_of_one_choice(original: Any) -> Any:
    """The prompt of a request of several choices counts once, though each of them waits with it."""

    def overload(state: ClusterState, submission: Any) -> Any:
        failure = original(state, replace(submission, n=1))
        if failure is None and state.queue.num_new + submission.n > state.config.admission.max_num_queued_reqs:
            failure = original(state, submission)
        return failure

    return overload


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


def _committed_as_prompt(original: Any) -> Any:
    """A resumed attempt counts the committed tokens as part of the prompt."""

    def work(attempt: Attempt) -> Any:
        body = original(attempt)
        body.num_prompt = len(body.token_ids)
        return body

    return work


def _drained_are_ready(original: Any) -> Any:
    def ready_workers(state: ClusterState) -> list[Worker]:
        live = (WorkerState.READY, WorkerState.DRAINING)
        return [worker for worker in state.workers.values() if worker.state in live]

    return ready_workers


def _restart_at_once(original: Any) -> Any:
    def schedule_restart(membership: Membership, worker: Worker, now_ns: int) -> None:
        membership.launch(worker, now_ns)

    return schedule_restart


def _numerics_differ(original: Any) -> Any:
    """The stream is not pinned to the numerics it began with."""

    def first(path: TokenPath, choice: Choice, worker: Worker, entry: Any) -> int:
        cached: int = original(path, choice, worker, entry)
        choice.request.numerics_id = None
        return cached

    return first


def _cached_untold(original: Any) -> Any:
    def first(path: TokenPath, choice: Choice, worker: Worker, entry: Any) -> int:
        original(path, choice, worker, entry)
        return 0

    return first


def _old_lives_may_connect(original: Any) -> Any:
    """The incarnation of a hello is not looked at."""

    def problem(membership: Membership, hello: Any) -> str:
        worker = membership._state.workers.get(hello.worker)
        if worker is not None and hello.incarnation < worker.incarnation:
            hello.incarnation = worker.incarnation
        text: str = original(membership, hello)
        return "" if "connected already" in text else text

    return problem


def _blame_everyone(original: Any) -> Any:
    """All that was placed on the engine is blamed, computed in that step or not."""

    def accuse(blame: Blame, worker: Worker, rows: Any, alone: bool, how: str, now_ns: int) -> None:
        rows = list(rows)
        if not rows or worker.blamed:
            return
        named = {row.request for row in rows}
        everyone = [
            type(rows[0])(attempt.choice.request.id, attempt.choice.index, attempt.number, attempt.num_tokens)
            for attempt in worker.live
            if attempt.choice.request.id not in named
        ]
        original(blame, worker, rows + everyone, True, how, now_ns)

    return accuse


def _together(original: Any) -> Any:
    """A suspect shares its steps with others."""
    return lambda suspicion, max_blames: 0


def _lost_delivery(original: Any) -> Any:
    """Now and then a committed token is not sent to the client."""

    def commit(path: TokenPath, attempt: Attempt, worker: Worker, entry: Any, now_ns: int) -> None:
        original(path, attempt, worker, entry, now_ns)
        commands = path._state.commands
        if commands and isinstance(commands[-1], Deliver) and commands[-1].delivery.position == 1:
            commands.pop()

    return commit


def _wall_clock(original: Any) -> Any:
    """Now and then it is an hour later, for a moment."""

    def handle(core: GatewayCore, event: Any, now_ns: int) -> Any:
        jump_ns = 3600 * SECOND if now_ns // (SECOND // 4) % 8 == 7 else 0
        return original(core, event, now_ns + jump_ns)

    return handle


TABLE = (
    Mutant("resume off by one", "I1", Attempt, "work", _resume_off_by_one),
    Mutant("committed tokens count as prompt", "I1", Attempt, "work", _committed_as_prompt),
    Mutant("repeated tokens are delivered again", "I1", TokenPath, "_trim", _trim_keeps_all),
    Mutant("a committed token is not delivered", "I2", TokenPath, "_commit", _lost_delivery),
    Mutant("no attempt check on answers", "I3", Dispatcher, "_placed", _no_attempt_check),
    Mutant("no attempt check on failures", "I3", TokenPath, "failed", _failures_of_any_attempt),
    Mutant("incarnation ignored", "I3", ClusterState, "current", _blind_to_incarnation),
    Mutant("old lives may connect", "I18", Membership, "_problem", _old_lives_may_connect),
    Mutant("failed attempts are ignored", "I5", TokenPath, "failed", _no_reopen),
    Mutant("deadlines are forgotten", "I5", GatewayCore, "_deadlines", nothing),
    Mutant("Retry-After 0", "I5", admission, "refusal", _retry_at_once),
    Mutant("work sent to two workers", "I6", Dispatcher, "_place", _double_send),
    Mutant("no cancel fan-out", "I8", Dispatcher, "_cancel_at", _no_cancel),
    Mutant("cancel does not reach decode", "I8", Dispatcher, "_cancel", _cancel_only_prefill),
    Mutant("backlog not given back", "I8", Worker, "unbook", _unbooked),
    Mutant("promises of ended work are kept", "I8", Worker, "stop_expecting", nothing),
    Mutant("refused work is asked for again at once", "I10", Dispatcher, "_full", _asked_at_once),
    Mutant("any news ends the wait of refused work", "I10", placement, "choice_delay_ns", _no_patience),
    Mutant("queue without a bound", "I10", admission, "_overload", _queue_unbounded),
    Mutant("cached tokens are not told", "I4", TokenPath, "_first", _cached_untold),
    Mutant("several choices queue as one", "I10", admission, "_overload", _tokens_of_one_choice),
    Mutant("crashes are never blamed", "I11", Blame, "accuse", nothing),
    Mutant("everyone in flight is blamed", "I11", Blame, "accuse", _blame_everyone),
    Mutant("suspects do not step alone", "I11", Suspicion, "solo_until", _together),
    Mutant("choices stay on a lost worker", "core", Membership, "lose", _forget_victims),
    Mutant("a lost worker is not started again", "I12", Membership, "_schedule_restart", nothing),
    Mutant("a crash loop starts again at once", "I12", Membership, "_schedule_restart", _restart_at_once),
    Mutant("a lost worker is not killed", "I12", Membership, "_fence", nothing),
    Mutant("numerics id ignored", "I13", Router, "_may_serve", _any_numerics),
    Mutant("numerics id not pinned", "I13", TokenPath, "_first", _numerics_differ),
    Mutant("time jumps as wall clocks do", "I14", GatewayCore, "handle", _wall_clock),
    Mutant("own stall is others' death", "I15", Detector, "_forgive_own_stall", _own_stall_blames_others),
    Mutant("draining workers are given work", "I17", ClusterState, "ready_workers", _drained_are_ready),
    Mutant("silence is never death", "detection", Detector, "_silence", nothing),
    Mutant("answers are never late", "detection", Detector, "_answers", nothing),
    Mutant("a frozen engine is fine", "detection", Membership, "heartbeat", _frozen_is_fine),
)
