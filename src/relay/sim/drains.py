"""I17: a drain takes nothing new, loses nothing and ends in time; a rolling restart takes one worker at a time."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from relay.config import SECOND
from relay.control import commands as c
from relay.control import events as e
from relay.control.core import TICK
from relay.control.transitions import WorkerState
from relay.ids import SequenceKey, WorkerKey
from relay.protocol.messages import HANDED_BACK, Message, Refuse, Reserve, Run, SequenceFailed
from relay.sim.engine import Ended, EngineProcess
from relay.sim.gateway import GatewayNode
from relay.sim.kernel import Violation

if TYPE_CHECKING:
    from relay.sim.world import World

SLACK_NS = SECOND // 50  # the timer was set, and what it does takes one turn of the loop


class Drains:
    """Remembers since when each engine drains."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._since_ns: dict[WorkerKey, int] = {}
        self._held: dict[WorkerKey, dict[SequenceKey, None]] = {}  # when the drain began
        self._serving: dict[str, None] = {}  # workers ready before the tick under way
        self._away: dict[str, None] = {}  # workers that were neither ready nor to stay out

    def before(self, node: GatewayNode, event: e.Event) -> None:
        """Only ticks begin drains of a rolling restart, and only those. An engine that says that it drains does."""
        self._serving, self._away = {}, {}
        if type(event) is e.WorkerMessage and tells_of_drain(event.message):
            engine = self._world.engine(event.worker)
            if engine is not None and not engine.core.draining:
                raise Violation("I17", f"{event.worker.worker} says that it drains, and does not: {event.message}")
        if type(event) is not e.TimerFired or event.key != TICK:
            return
        for worker in node.core.state.workers.values():
            if worker.state is WorkerState.READY:
                self._serving[worker.id] = None
            elif worker.state is not WorkerState.STOPPED:
                self._away[worker.id] = None

    def rolled(self, node: GatewayNode) -> None:
        """After the event."""
        workers = node.core.state.workers
        begun = [name for name in self._serving if workers[name].state is WorkerState.DRAINING]
        if begun:
            self._world.kernel.sometimes("a rolling restart took a worker")
        if len(begun) + bool(begun) * len(self._away) > 1:
            raise Violation("I17", f"a rolling restart takes {begun} while {list(self._away)} do not serve")

    def sent(self, node: GatewayNode, commands: Iterable[c.Command]) -> None:
        """Work goes to ready workers only; what has begun also to the last worker of its numerics, while it leaves by order."""
        state = node.core.state
        workers = state.workers
        for command in commands:
            if type(command) is c.SendToEngine and isinstance(command.message, Run | Reserve):
                worker = workers[command.worker.worker]
                request = state.requests.get(command.message.work.request)
                begun = request is None or request.numerics_id is not None  # None: it has ended meanwhile
                last = worker in state.last_of_their_kind() and begun
                if worker.state is WorkerState.DRAINING and worker.key == command.worker and not last:
                    raise Violation("I17", f"{worker.id} drains and is given {type(command.message).__name__}")

    def handled(self, engine: EngineProcess) -> None:
        """After an event of an engine: one that drains holds nothing that it did not hold when that began."""
        if not engine.core.draining:
            return
        held = engine.core.held.by_key
        known = self._held.setdefault(engine.key, dict.fromkeys(held))
        for key in held:
            if key not in known:
                raise Violation("I17", f"{engine.key.worker} drains, and has taken {key}")

    def ended(self, engine: EngineProcess, end: Ended) -> None:
        if end.status == 0 and len(engine.core.held):
            raise Violation("I17", f"{engine.key.worker} has drained, and still held {list(engine.core.held.by_key)}")

    def audit(self) -> None:
        world = self._world
        now_ns, timeout_ns = world.kernel.now_ns, world.swarm.worker.drain_timeout_ns
        for node in world.workers.values():
            engine = node.running
            if engine is None or not engine.core.draining or engine.stopped:
                continue
            since_ns = max(self._since_ns.setdefault(engine.key, now_ns), engine.awake_since_ns)
            if now_ns - since_ns > timeout_ns + SLACK_NS:
                raise Violation("I17", f"{node.key.worker} drains for {(now_ns - since_ns) / SECOND:.1f} s")


def tells_of_drain(message: Message) -> bool:
    """Only an engine that drains says that."""
    if isinstance(message, Refuse):
        return message.reason == "draining"
    return isinstance(message, SequenceFailed) and message.reason == HANDED_BACK
