"""What must hold between two events. Tests and the simulator call ``violations`` after every event."""

from collections import Counter

from relay.control.attempts import Attempt
from relay.control.requests import MAX_ATTEMPTS, Choice, Request
from relay.control.state import LIVE, ClusterState
from relay.control.transitions import AttemptState, ChoiceState, WorkerState


def violations(state: ClusterState) -> list[str]:
    """Every broken invariant, one line each; empty when all is well."""
    found: list[str] = []
    lost = [
        request
        for worker in state.workers.values()
        for request in (*worker.unexplained, *worker.long_step, *worker.watched)
    ]
    unexplained: dict[Request, int] = Counter(lost) if lost else {}
    lingering = Counter(request for worker in state.workers.values() for request in worker.lingering)
    for request in state.requests.values():
        num_open = 0
        for choice in request.choices:
            num_open += choice.state is not ChoiceState.ENDED
            if not _plainly_fine(state, choice):
                found += _choice(state, choice)
        if not num_open:
            found.append(f"request {request.id} is kept without an open choice")
        if num_open != request.open_choices:
            found.append(f"request {request.id} counts {request.open_choices} open choices, has {num_open}")
        if request.suspicion.unexplained != unexplained.get(request, 0):
            found.append(f"request {request.id} counts {request.suspicion.unexplained} unexplained losses")
        if request.suspicion.lingering != lingering[request]:
            found.append(f"request {request.id} counts {request.suspicion.lingering} steps left behind")
    found += _workers(state)
    for choice in state.queue:
        if choice.state is not ChoiceState.WAITING or choice.request.id not in state.requests:
            found.append(f"{choice} is queued")
    return found


def _plainly_fine(state: ClusterState, choice: Choice) -> bool:
    """Whether ``_choice`` would find nothing, for the states that nearly all choices are in; False sends it there."""
    attempts, committed = choice.attempts, len(choice.committed)
    if committed > choice.request.submission.params.max_tokens:
        return False
    if choice.state is not ChoiceState.PLACED:
        return not attempts and (choice.state is ChoiceState.WAITING) is (choice in state.queue)
    if len(attempts) != 1 or choice in state.queue:
        return False
    attempt = attempts[0]
    decode, prefill = attempt.decode, attempt.prefill
    if attempt not in decode.live or decode.state not in LIVE:
        return False
    if prefill is None:
        placed = attempt.state is AttemptState.RUNNING
    else:
        placed = (
            attempt.state not in (AttemptState.RUNNING, AttemptState.ENDED)
            and prefill is not decode
            and attempt in prefill.live
            and prefill.state in LIVE
        )
    return placed and not attempt.hedge and attempt.number <= choice.num_attempts and attempt.start <= committed


def _choice(state: ClusterState, choice: Choice) -> list[str]:
    found = []
    waiting = choice.state is ChoiceState.WAITING
    if waiting != (choice in state.queue):
        found.append(f"{choice} and the queue disagree")
    placed = choice.state is ChoiceState.PLACED
    if placed != bool(choice.attempts) or len(choice.attempts) > MAX_ATTEMPTS:
        found.append(f"{choice} has live attempts {choice.attempts}")
    numbers = [attempt.number for attempt in choice.attempts]
    if numbers != sorted(set(numbers)) or (numbers and numbers[-1] > choice.num_attempts):
        found.append(f"{choice} has live attempts {numbers}")
    if [attempt.hedge for attempt in choice.attempts] not in ([], [False], [False, True]):
        found.append(f"{choice} has more than one live attempt and no hedge, or a hedge alone")
    workers = [worker.id for attempt in choice.attempts for worker in attempt.workers]
    if len(workers) != len(set(workers)):
        found.append(f"{choice} is more than once on one of {workers}")
    for attempt in choice.attempts:
        found += _attempt(attempt)
    if len(choice.committed) > choice.request.submission.params.max_tokens:
        found.append(f"{choice} has more than max_tokens")
    return found


def _attempt(attempt: Attempt) -> list[str]:
    found = []
    if attempt.state is AttemptState.ENDED:
        found.append(f"{attempt} is over and live")
    if (attempt.state is AttemptState.RUNNING) != (attempt.prefill is None):
        found.append(f"{attempt} has P {attempt.prefill and attempt.prefill.id}")
    if attempt.start > len(attempt.choice.committed):
        found.append(f"{attempt} begins after {attempt.start} tokens of {len(attempt.choice.committed)}")
    for worker in attempt.workers:
        if attempt not in worker.live:
            found.append(f"{attempt} is not booked on {worker.id}")
        if worker.state not in LIVE:
            found.append(f"{attempt} is on {worker.id}, which is {worker.state.value}")
    return found


def _workers(state: ClusterState) -> list[str]:
    found = []
    for worker in state.workers.values():
        if worker.backlog_tokens != sum(worker.live.values()):
            found.append(f"{worker.id} counts a backlog of {worker.backlog_tokens}, has {sum(worker.live.values())}")
        reserving = 0
        for attempt in worker.live:
            reserving += attempt.state is AttemptState.RESERVING and attempt.decode is worker
            if not attempt.on(worker) or attempt not in attempt.choice.attempts:
                found.append(f"{worker.id} holds {attempt}, which is elsewhere")
        if worker.reserving != reserving:
            found.append(f"{worker.id} counts {worker.reserving} reservations, has {reserving}")
        if worker.state in (WorkerState.LOST, WorkerState.STOPPED, WorkerState.STARTING) and worker.live:
            found.append(f"{worker.id} is {worker.state.value} and holds {len(worker.live)} attempts")
    return found
