"""What must hold between two events. Tests and the simulator call ``violations`` after every event."""

from relay.control.attempts import Attempt
from relay.control.requests import MAX_ATTEMPTS, Choice
from relay.control.state import LIVE, ClusterState
from relay.control.transitions import AttemptState, ChoiceState, WorkerState


def violations(state: ClusterState) -> list[str]:
    """Every broken invariant, one line each; empty when all is well."""
    found: list[str] = []
    for request in state.requests.values():
        open_choices = [choice for choice in request.choices if choice.state is not ChoiceState.ENDED]
        if not open_choices:
            found.append(f"request {request.id} is kept without an open choice")
        if len(open_choices) != request.open_choices:
            found.append(f"request {request.id} counts {request.open_choices} open choices, has {len(open_choices)}")
        if request.suspicion.unexplained != sum(
            (request in worker.unexplained) + (request in worker.long_step) for worker in state.workers.values()
        ):
            found.append(f"request {request.id} counts {request.suspicion.unexplained} unexplained losses")
        for choice in request.choices:
            found += _choice(state, choice)
    found += _workers(state)
    for choice in state.queue:
        if choice.state is not ChoiceState.WAITING or choice.request.id not in state.requests:
            found.append(f"{choice} is queued")
    return found


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
        reserving = sum(a.state is AttemptState.RESERVING and a.decode is worker for a in worker.live)
        if worker.reserving != reserving:
            found.append(f"{worker.id} counts {worker.reserving} reservations, has {reserving}")
        for attempt in worker.live:
            if not attempt.on(worker) or attempt not in attempt.choice.attempts:
                found.append(f"{worker.id} holds {attempt}, which is elsewhere")
        if worker.state in (WorkerState.LOST, WorkerState.STOPPED, WorkerState.STARTING) and worker.live:
            found.append(f"{worker.id} is {worker.state.value} and holds {len(worker.live)} attempts")
    return found
