"""The invariants, and where they are checked. A broken one raises ``Violation``, which stops the run.

I1 is checked by every client on every delivery (``clients.py``); the others here: after every event on what it touched, all of
it in ``audit`` (every 50 ms of virtual time) and ``quiesced`` (at the end).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from relay.config import SECOND
from relay.control import commands as c
from relay.control import events as e
from relay.control.invariants import violations
from relay.control.requests import Choice
from relay.control.state import LIVE
from relay.control.transitions import AttemptState, ChoiceState
from relay.ids import SequenceKey, WorkerKey
from relay.protocol.messages import Accept, Refuse, SequenceFailed, TokenEntry, Tokens
from relay.sim.agreement import Agreement
from relay.sim.backend import LAYERS
from relay.sim.bounds import AttemptRate, bounded, within_budget
from relay.sim.drains import Drains, tells_of_drain
from relay.sim.engine import TICK_NS, Ended, EngineProcess
from relay.sim.gateway import GatewayNode
from relay.sim.kernel import Violation
from relay.sim.leaks import no_leaks
from relay.sim.strangers import StrangerWatch
from relay.transfer.contract import ReceiveCompleted
from relay.worker.agent import HEARTBEAT_NS
from relay.worker.events import Event as WorkerEvent
from relay.worker.held import Held, HeldState

if TYPE_CHECKING:
    from relay.sim.world import World

OWNERLESS_NS = 75_000_000  # how long a healthy worker may hold what nobody wants any more
AUDIT_NS = 25_000_000
TICKS = 4  # how many ticks late a deadline may be noticed

_Fingerprint = tuple[int, ChoiceState, int, tuple[tuple[int, AttemptState], ...]]


def _fingerprint(choice: Choice) -> _Fingerprint:
    """All that an attempt which is over must not move."""
    attempts = tuple([(attempt.number, attempt.state) for attempt in choice.attempts])
    return len(choice.committed), choice.state, choice.num_attempts, attempts


def worker_patience_s(world: "World") -> float:
    """A disturbance that is over for longer cannot be why a worker is silent now."""
    return world.swarm.control.detector.dead_after_s + 2 * HEARTBEAT_NS / SECOND


class Checkers:
    """Holds what must be remembered between two events."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._stale: list[tuple[Choice, _Fingerprint]] = []
        self._ownerless: dict[tuple[str, int, SequenceKey], int] = {}
        self._agreement = Agreement(world)
        self._attempts = AttemptRate()
        self._drains = Drains(world)
        self._strangers = StrangerWatch(world)
        self.full_checks = 0

    # --- the gateway ----------------------------------------------------------------------------------------------

    def before_gateway(self, node: GatewayNode, event: e.Event) -> None:
        """Remember every choice that ``event`` speaks of without having the right to."""
        self._stale = []
        self._strangers.before(node, event)
        self._drains.before(node, event)
        if type(event) is not e.WorkerMessage:
            return
        message = event.message
        state = node.core.state
        current = state.current(event.worker)
        entries: Sequence[TokenEntry | Accept | Refuse | SequenceFailed]
        if isinstance(message, Tokens):
            entries = message.entries
            self._agreement.heard(event.worker, message)
        elif isinstance(message, Accept | Refuse | SequenceFailed):
            if current is not None and tells_of_drain(message):
                return  # news of the worker, whichever attempt it comes with: what it has is moved
            entries = [message]
        else:
            return
        stale: dict[Choice, _Fingerprint] = {}
        rightful: dict[Choice, None] = {}
        for entry in entries:
            choice = self._choice(entry.request, entry.choice)
            if choice is None or choice.state is ChoiceState.ENDED:
                continue
            attempt = choice.find(entry.attempt)
            if current is None or attempt is None or not attempt.on(current):
                self._world.kernel.sometimes("stale message")
                stale[choice] = _fingerprint(choice)
            else:
                rightful[choice] = None
        self._stale = [item for item in stale.items() if item[0] not in rightful]

    def after_gateway(self, node: GatewayNode, event: e.Event, commands: list[c.Command]) -> None:
        if node.core.state.alarm and not self._world.wrong_machines:
            raise Violation("I4", node.core.state.alarm)
        self._strangers.after(node, event, commands)
        self._drains.sent(node, commands)
        self._drains.rolled(node)
        within_budget(node)
        for choice, before in self._stale:
            now = _fingerprint(choice)
            if now[0] != before[0]:
                raise Violation("I3", f"{choice} took tokens from an attempt that is over ({type(event).__name__})")
            waited = before[1] is ChoiceState.WAITING  # then the queue may have let it go after this event
            if now != before and not waited and not self._ended_by_others(choice):
                raise Violation("I3", f"{choice} was {before[1].value}, and moved by an attempt that is over")
        message = event.message if type(event) is e.WorkerMessage else None
        if type(message) is Tokens:
            for entry in message.entries:
                spoken_of = self._choice(entry.request, entry.choice)
                if spoken_of is not None:
                    self._committed(spoken_of, commands)
            for command in commands:
                if type(command) is c.Deliver:
                    self._agreement.delivered(command.request, command.delivery, message)
        else:
            self._core_state(node)
        self._bounds(node)
        for command in commands:
            if type(command) is c.StopWorker and command.kill:
                self._rightly_killed(node, command.worker)

    def _rightly_killed(self, node: GatewayNode, key: WorkerKey) -> None:
        """I15: a worker dies of silence only if something has kept it, and not the gateway, from being heard."""
        world = self._world
        worker = node.core.state.workers[key.worker]
        window_ns = int(worker_patience_s(world) * SECOND)
        if worker.last_cause.startswith("silent") and world.undisturbed_ns(key.worker) > window_ns:
            raise Violation("I15", f"{key.worker} is killed ({worker.last_cause}), but only the gateway stood still")

    def _ended_by_others(self, choice: Choice) -> bool:
        """Other choices' messages in the same event may end a request as a whole."""
        return self._choice(choice.request.id, choice.index) is None

    def _choice(self, request_id: int, index: int) -> Choice | None:
        for node in self._world.gateways.values():
            request = node.core.state.requests.get(request_id) if node.alive else None
            if request is not None:
                return request.choices[index] if 0 <= index < len(request.choices) else None
        return None

    def _committed(self, choice: Choice, commands: list[c.Command]) -> None:
        """I2: what the core committed is what the client has, with what is being delivered to it now."""
        client = self._world.clients.get(choice.request.id)
        if client is None or not client.open:
            return
        coming = sum(
            len(command.delivery.token_ids)
            for command in commands
            if type(command) is c.Deliver
            and command.request == choice.request.id
            and command.delivery.choice == choice.index
        )
        have = len(client.answers[choice.index])
        if choice.index not in client.stopped and have + coming != len(choice.committed):
            raise Violation("I2", f"{choice} has committed {len(choice.committed)}, its client has {have} + {coming}")

    def _core_state(self, node: GatewayNode) -> None:
        self.full_checks += 1
        state = node.core.state
        found = violations(state)
        if found:
            raise Violation("core", "; ".join(found[:3]))
        for worker in state.workers.values():  # every live attempt is booked on its workers, as was just checked
            numerics_id = worker.numerics_id
            for attempt in worker.live:
                choice, decode = attempt.choice, attempt.decode
                if decode is not worker:
                    if decode.numerics_id != numerics_id:
                        raise Violation("I13", f"{attempt} crosses from {worker.id} to {decode.id}")
                elif choice.numerics_id is not None and numerics_id != choice.numerics_id:
                    raise Violation("I13", f"{choice} of {choice.numerics_id} is on {decode.id}: {numerics_id}")

    def _bounds(self, node: GatewayNode) -> None:
        state = node.core.state
        limits = state.config.admission
        if state.queue.num_new > limits.max_num_queued_reqs or state.queue.num_new < 0:
            raise Violation("I10", f"{state.queue.num_new} sequences wait, the bound is {limits.max_num_queued_reqs}")
        new = [choice for choice in state.queue if not choice.num_attempts]
        tokens = sum(len(choice.request.submission.token_ids) for choice in new)
        if (len(new), tokens) != (state.queue.num_new, state.queue.num_new_tokens):
            raise Violation("core", f"{len(new)} new sequences with {tokens} tokens wait, the queue miscounts them")
        if tokens > limits.max_num_queued_tokens:
            raise Violation("I10", f"{tokens} tokens wait, the bound is {limits.max_num_queued_tokens}")
        for worker in state.workers.values():
            if len(worker.live) > worker.max_live:
                raise Violation("I10", f"{worker.id} has {len(worker.live)} of {worker.max_live} sequences")

    # --- workers --------------------------------------------------------------------------------------------------

    def worker_event(self, engine: EngineProcess, event: WorkerEvent | Ended) -> None:
        """After every event of a worker core, but before a completed reception is acted on; and when its process ends."""
        if isinstance(event, Ended):
            self._drains.ended(engine, event)
            return
        if isinstance(event, ReceiveCompleted):
            self._received(engine, event.transfer)
            return
        self._drains.handled(engine)
        held = engine.core.held
        try:
            engine.scheduler.check()
            held.check()
            engine.core.orphans.check()
        except AssertionError as error:
            raise Violation("I9", f"{engine.key.worker}: {error}") from error
        if len(held) > self._world.swarm.worker.max_held:
            raise Violation("I10", f"{engine.key.worker} holds {len(held)} sequences")
        scheduled = engine.scheduler.keys()
        if len(scheduled) != len(held) or any(key not in held.by_key for key in scheduled):
            raise Violation("I8", f"{engine.key.worker} schedules {scheduled}, holds {list(held.by_key)}")

    def _received(self, engine: EngineProcess, transfer: int) -> None:
        """I7: every byte that decode is going to read is the one the oracle has."""
        held = engine.core.held.by_transfer.get(transfer)
        if held is None or held.state is not HeldState.RESERVED:
            return
        client = self._world.clients[held.key.request]
        oracle = client.oracles.get(held.key.request, client.submission, held.key.choice, engine.numerics)
        count = len(held.work.token_ids)
        table = engine.scheduler.block_table(held.key)
        for layer in range(LAYERS):
            cells = engine.backend.cells(layer, table, count)
            wanted = oracle.kv[layer][: count * 16]
            if cells != wanted:
                first = next(p for p in range(count) if cells[p * 16 : p * 16 + 16] != wanted[p * 16 : p * 16 + 16])
                raise Violation(
                    "I7",
                    f"{engine.key.worker}: transfer {transfer} is complete, position {first} of layer {layer} is wrong",
                )

    # --- everything, now and then ---------------------------------------------------------------------------------

    def audit(self) -> None:
        """Whole-cluster checks: one runner an attempt, and nothing kept that nobody wants."""
        nodes = [node for node in self._world.gateways.values() if node.alive]
        for gateway in nodes:
            self._core_state(gateway)
        now_ns = self._world.kernel.now_ns
        runners: dict[SequenceKey, str] = {}
        prefillers: dict[SequenceKey, str] = {}
        ownerless: dict[tuple[str, int, SequenceKey], int] = {}
        for node in self._world.workers.values():
            engine = node.running
            if engine is None:
                continue
            for key, held in engine.core.held.by_key.items():
                group = (
                    prefillers
                    if held.state in (HeldState.PREFILLING, HeldState.HANDED_OFF, HeldState.PARKED)
                    else runners
                )
                other = group.setdefault(key, node.key.worker)
                if other != node.key.worker:
                    raise Violation("I6", f"{key} is {held.state} on {other} and on {node.key.worker}")
                if not self._wanted(engine, held):
                    name = (*node.key, key)
                    since_ns = max(self._ownerless.get(name, now_ns), self._world.calm_since_ns(node.key.worker))
                    ownerless[name] = since_ns
                    if now_ns - since_ns > OWNERLESS_NS:
                        raise Violation(
                            "I8",
                            f"{node.key.worker} holds {key} ({held.state}), which nobody wants since "
                            f"{(now_ns - since_ns) // 1_000_000} ms",
                        )
            orphans = [t for t in engine.transport.open_transfers() if t not in engine.core.held.by_transfer]
            if orphans and not engine.inbox:
                raise Violation("I8", f"{node.key.worker} keeps transfers {orphans} of no sequence")
            self._transfers(engine)
        self._ownerless = ownerless
        self._attempts.audit(nodes, now_ns)
        for gateway in nodes:
            self._deadlines(gateway)
        self._drains.audit()
        bounded(self._world)

    def _deadlines(self, gateway: GatewayNode) -> None:
        """A calm gateway has noticed by now what it must notice."""
        world = self._world
        now_ns = world.kernel.now_ns
        state = gateway.core.state
        detector, slack_ns = state.config.detector, int(TICKS * state.config.tick_s * SECOND)
        # Its own stalls excuse it, and half of the workers silent at once let it wait once more.
        awake_ns = now_ns - world.calm_since_ns("")
        silence_ns = 2 * int(detector.dead_after_s * SECOND) + slack_ns
        for worker in state.workers.values():
            silent_ns = min(awake_ns, now_ns - gateway.spoke_ns.get(worker.key, now_ns))
            if worker.state in LIVE and silent_ns > silence_ns:
                raise Violation(
                    "detection", f"{worker.id} is {worker.state.value}, silent for {silent_ns / SECOND:.1f} s"
                )
            last_ns = gateway.heard_ns.get(worker.key, now_ns)
            frozen_ns = min(awake_ns, last_ns - gateway.frozen_ns.get(worker.key, last_ns))
            if worker.state in LIVE and frozen_ns > int(detector.frozen_after_s * SECOND) + 2 * HEARTBEAT_NS:
                raise Violation(
                    "detection", f"{worker.id} is {worker.state.value}, frozen for {frozen_ns / SECOND:.1f} s"
                )
        bounds = {AttemptState.RESERVING: detector.answer_deadline_s, AttemptState.HANDOFF: detector.handoff_deadline_s}
        choices = [choice for request in state.requests.values() for choice in request.choices]
        for attempt in [attempt for choice in choices for attempt in choice.attempts]:
            bound_s = bounds.get(attempt.state)
            age_ns = min(awake_ns, now_ns - attempt.changed_ns)
            if bound_s is not None and age_ns > int(bound_s * SECOND) + slack_ns:
                raise Violation("detection", f"{attempt} has had no answer for {age_ns / SECOND:.1f} s")

    def _transfers(self, engine: EngineProcess) -> None:
        """No transfer outlives its lease, whatever keeps its peer from being heard."""
        if engine.stopped:
            return
        now_ns = self._world.kernel.now_ns
        awake_ns = now_ns - engine.awake_since_ns
        for transfer, silent_ns, lease_ns in engine.transport.silences(now_ns):
            if min(awake_ns, silent_ns) > lease_ns + 2 * TICK_NS:
                raise Violation(
                    "detection",
                    f"{engine.key.worker}: transfer {transfer} lives, its peer is silent for {silent_ns / SECOND:.1f} s",
                )

    def _wanted(self, engine: EngineProcess, held: Held) -> bool:
        if held.gateway is None:  # an orphan, for as long as it may be
            next_ns = engine.core.orphans.next_ns()
            return next_ns is not None and self._world.kernel.now_ns <= next_ns
        key = held.name
        choice = self._choice(key.request, key.choice)
        if choice is None:
            return False
        attempt = choice.find(key.attempt)
        parked = choice.parked
        if parked is not None and (parked.worker, parked.attempt) == (engine.key, key.attempt) and parked.until_ns:
            return True  # P frees it when the lease ends
        return attempt is not None and any(worker.key == engine.key for worker in attempt.workers)

    def quiesced(self) -> None:
        """At the end: everything again, and that nothing is left."""
        for gateway in self._world.gateways.values():
            self._core_state(gateway)
        no_leaks(self._world)
