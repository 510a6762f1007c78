"""What must hold between two events. Tests and the simulator call ``violations`` after every event."""

from relay.control.requests import Choice
from relay.control.state import LIVE, ClusterState
from relay.control.transitions import ChoiceState, WorkerState


def violations(state: ClusterState) -> list[str]:
    """Every broken invariant, one line each; empty when all is well."""
    found: list[str] = []
    for request in state.requests.values():
        open_choices = [choice for choice in request.choices if choice.state is not ChoiceState.ENDED]
        if not open_choices:
            found.append(f"request {request.id} is kept without an open choice")
        if len(open_choices) != request.open_choices:
            found.append(f"request {request.id} counts {request.open_choices} open choices, has {len(open_choices)}")
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
    placed = choice.state not in (ChoiceState.WAITING, ChoiceState.ENDED)
    if placed != (choice.decode is not None):
        found.append(f"{choice} is on {choice.decode and choice.decode.id}")
    needs_prefill = choice.state in (ChoiceState.RESERVING, ChoiceState.PREFILLING, ChoiceState.HANDOFF)
    if needs_prefill != (choice.prefill is not None):
        found.append(f"{choice} has P {choice.prefill and choice.prefill.id}")
    for worker in (choice.prefill, choice.decode):
        if worker is not None and choice not in worker.live:
            found.append(f"{choice} is not booked on {worker.id}")
        if worker is not None and worker.state not in LIVE:
            found.append(f"{choice} is on {worker.id}, which is {worker.state.value}")
    if len(choice.committed) > choice.request.submission.params.max_tokens:
        found.append(f"{choice} has more than max_tokens")
    return found


def _workers(state: ClusterState) -> list[str]:
    found = []
    for worker in state.workers.values():
        if worker.backlog_tokens != sum(worker.live.values()):
            found.append(f"{worker.id} counts a backlog of {worker.backlog_tokens}, has {sum(worker.live.values())}")
        reserving = sum(choice.state is ChoiceState.RESERVING and choice.decode is worker for choice in worker.live)
        if worker.reserving != reserving:
            found.append(f"{worker.id} counts {worker.reserving} reservations, has {reserving}")
        for choice in worker.live:
            if worker not in (choice.prefill, choice.decode):
                found.append(f"{worker.id} holds {choice}, which is elsewhere")
        if worker.state in (WorkerState.LOST, WorkerState.STOPPED, WorkerState.STARTING) and worker.live:
            found.append(f"{worker.id} is {worker.state.value} and holds {len(worker.live)} choices")
        if worker.exclusive is not None and worker.exclusive.state is ChoiceState.ENDED:
            found.append(f"{worker.id} is kept for a choice that ended")
    return found
