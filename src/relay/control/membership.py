"""Workers come, die and come back: handshake, loss, restart with backoff, and blame for crashes."""

from dataclasses import replace

from relay.config import MILLISECOND, PROTOCOL_TEXT_LIMIT, SECOND
from relay.control.blame import Blame, crashed, exit_text
from relay.control.commands import (
    AcceptConnection,
    CancelTimer,
    CloseWorker,
    ClusterReady,
    LaunchWorker,
    RejectConnection,
    SetTimer,
    StopWorker,
    WorkerGaveUp,
)
from relay.control.events import ConnectionLost, LauncherExited, WorkerConnected, WorkerStarted
from relay.control.leaving import Leaving
from relay.control.placement import Dispatcher
from relay.control.state import LIVE, ClusterState
from relay.control.transitions import ChoiceState, WorkerState, WorkerTrigger
from relay.control.workers import Worker
from relay.protocol.messages import (
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    EngineExited,
    Heartbeat,
    Hello,
)

SIGNALLED = 128
KILL_SIGNALS = frozenset({9, 15})  # somebody else's doing
FATAL_STATUSES = frozenset({2, 3, 4, 5, 6})  # a start that cannot succeed by trying again (relay.errors)


class Membership:
    """Keeps the set of workers at what was asked for."""

    def __init__(self, state: ClusterState, dispatcher: Dispatcher) -> None:
        self._state = state
        self._dispatcher = dispatcher
        self.leaving = Leaving(state, dispatcher, self.launch)
        self._blame = Blame(state, dispatcher)

    # --- coming ---------------------------------------------------------------------------------------------------

    def launch(self, worker: Worker, now_ns: int) -> None:
        worker.begin(worker.incarnation + 1, now_ns)
        self._state.commands.append(LaunchWorker(worker.key, worker.role, worker.last_cause))

    def connected(self, event: WorkerConnected, now_ns: int) -> None:
        hello = event.hello
        problem = self._problem(hello)
        if problem:
            self._state.counters["connections_rejected"] += 1
            self._state.commands.append(RejectConnection(event.connection, problem[:PROTOCOL_TEXT_LIMIT]))
            return
        worker = self._state.workers[hello.worker]
        if worker.state is WorkerState.LOST:
            self._rejoin(worker, now_ns)
        if hello.process == "agent":
            worker.agent, worker.agent_open = hello, True
            worker.heard_ns = now_ns
        else:
            worker.engine, worker.engine_open = hello, True
            worker.kv_tokens = hello.kv_blocks * hello.block_size
            worker.orphans = dict.fromkeys(hello.orphans)
            known = [other.numerics_id for other in self._state.workers.values() if other.engine is not None]
            if self._state.model.numerics_id not in known:  # the first one ever, or the last of an upgrade
                self._state.model = replace(self._state.model, numerics_id=hello.numerics_id)
        self._state.commands.append(AcceptConnection(event.connection, worker.key, hello.process))
        if worker.agent_open and worker.engine_open and worker.state is WorkerState.STARTING:
            worker.move(WorkerTrigger.CONNECT, now_ns)
            worker.heard_ns = now_ns
            if worker.incarnation > 1:
                self._state.breakers.workers[worker.id].start_slowly(now_ns)
            self._state.no_worker_since_ns = None  # here and not at the next tick: it may be dead again by then
            self._check_complete()
            self._dispatcher.pump(now_ns)

    def _problem(self, hello: Hello) -> str:
        """Why this hello is refused, or an empty string."""
        worker = self._state.workers.get(hello.worker)
        if worker is None:
            return f"unknown worker {hello.worker!r}"
        if hello.protocol_min > PROTOCOL_MAX or hello.protocol_max < PROTOCOL_MIN:
            theirs = f"{hello.protocol_min} to {hello.protocol_max}"
            return f"protocol {theirs} of the worker does not meet {PROTOCOL_MIN} to {PROTOCOL_MAX} of the gateway"
        rejoins = worker.state is WorkerState.LOST and worker.cut and not worker.exited
        if hello.incarnation != worker.incarnation or (self._state.current(worker.key) is None and not rejoins):
            return (
                f"incarnation {hello.incarnation} of {hello.worker} is fenced; the present one is {worker.incarnation}"
            )
        if not rejoins and (worker.engine_open if hello.process == "engine" else worker.agent_open):
            return f"the {hello.process} of {hello.worker} is connected already"
        model = self._state.model
        if hello.process == "engine":
            if model.model_digest and hello.model_digest != model.model_digest:
                return f"model digest {hello.model_digest} of the worker is not {model.model_digest} of the gateway"
            if hello.kv_blocks < 1 or hello.block_size < 1:
                return f"{hello.worker} offers {hello.kv_blocks} KV blocks of {hello.block_size} tokens"
        return ""

    def _check_complete(self) -> None:
        if self._state.was_complete:
            return
        if all(worker.state is WorkerState.READY for worker in self._state.workers.values()):
            self._state.was_complete = True
            self._state.commands.append(ClusterReady())

    # --- going ----------------------------------------------------------------------------------------------------

    def connection_lost(self, event: ConnectionLost, now_ns: int) -> None:
        worker = self._state.workers.get(event.worker.worker)
        if worker is None or worker.incarnation != event.worker.incarnation:
            return
        if event.process == "agent":
            worker.agent_open = False
        else:
            worker.engine_open = False
        if self._state.current(event.worker) is not None:
            # An engine's end is explained by its agent a moment later: leave the agent that moment.
            wait_for_report = event.process == "engine" and worker.agent_open
            cause = f"{event.process} connection ended: {event.reason}"
            self.lose(worker, cause, now_ns, fence=not wait_for_report, cut=self._state.config.shared_workers)
        elif worker.exited and not worker.agent_open:  # else the agent's last words are still to come
            self._gone(worker, now_ns)

    def engine_exited(self, worker: Worker, message: EngineExited, now_ns: int) -> None:
        """The agent saw its engine end. May come before or after the engine's EOF, or twice: its launcher passes it on too."""
        how = exit_text(message)
        worker.engine_exit = message
        if crashed(message):
            self._blame.accuse(worker, message.manifest, message.alone, how, now_ns)
        self._blame.explained(worker)
        if worker.state not in (WorkerState.LOST, WorkerState.STOPPED):
            drained = worker.refuses and message.status == 0  # its agent follows by itself, and with the same status
            self.lose(worker, how, now_ns, fence=not drained)
        worker.last_cause = how
        worker.cut = False
        self._dispatcher.pump(now_ns)

    def launcher_exited(self, event: LauncherExited, now_ns: int) -> None:
        worker = self._state.workers.get(event.worker.worker)
        if worker is None or worker.incarnation != event.worker.incarnation or worker.state is WorkerState.STOPPED:
            return
        if event.engine is not None:
            self.engine_exited(worker, event.engine, now_ns)
        how = event.reason or (f"signal {event.signal}" if event.signal is not None else f"status {event.status}")
        if worker.state is not WorkerState.LOST:
            self.lose(worker, f"process exited with {how}", now_ns, fence=False)
        worker.exit = event
        # Its agent's last words may still be on their way: its EOF or the fence timer ends the wait.
        if not worker.agent_open or event.engine is not None:
            self._gone(worker, now_ns)

    def _gone(self, worker: Worker, now_ns: int) -> None:
        """The processes of a lost worker are gone and have nothing left to say."""
        self._blame.explained(worker)
        self._state.commands.append(CloseWorker(worker.key))
        self._state.commands += [CancelTimer(("fence", worker.id)), CancelTimer(("reap", worker.id))]
        restart = self._state.config.restart
        end = worker.engine_exit or worker.exit  # the engine's own end says more than its agent's
        status, signal = (end.status, end.signal) if end else (None, None)
        if status is not None and status > SIGNALLED:  # an agent ends with its engine's signal as a shell would say it
            signal, status = status - SIGNALLED, None
        if worker.served and signal in KILL_SIGNALS:
            worker.failures = min(worker.failures, 1)  # however often it is killed: that is no crash loop
        if not self._state.was_complete and (status in FATAL_STATUSES or worker.failures >= restart.start_attempts):
            worker.gave_up = True
            worker.move(WorkerTrigger.STOP, now_ns)
            self._state.commands.append(WorkerGaveUp(worker.key, status, signal, worker.last_cause))
            return
        if worker.stay_out:
            worker.move(WorkerTrigger.STOP, now_ns)
            return
        self._schedule_restart(worker, now_ns)

    def lose(
        self,
        worker: Worker,
        cause: str,
        now_ns: int,
        *,
        fence: bool,
        hung: EngineExited | None = None,
        cut: bool = False,
    ) -> None:
        """Fence this incarnation and reopen everything placed on it.

        ``fence`` False: its agent may still report for a moment. ``hung``: it failed by itself, whoever kills it; all are told.
        ``cut``: it may be well, and of use to others; it is not killed and may connect again.
        """
        if worker.state is WorkerState.STARTING or now_ns - worker.changed_ns < int(
            self._state.config.restart.stable_after_s * SECOND
        ):
            worker.failures += 0 if worker.state is WorkerState.DRAINING else 1
        else:
            worker.failures = 0 if worker.state is WorkerState.DRAINING else 1
        worker.served = worker.state in LIVE and hung is None
        self._state.counters["workers_drained" if worker.refuses and not worker.live else "workers_lost"] += 1
        if worker.state is not WorkerState.DRAINING:
            self._state.breakers.workers[worker.id].failed(now_ns)
        worker.move(WorkerTrigger.LOSE, now_ns)
        worker.cut = cut
        worker.last_cause, worker.lost_ns = cause, now_ns
        worker.suspect = worker.slow = False
        worker.forget_cache()
        if worker.engine_exit is None and hung is None:
            self._blame.await_report(worker)
        self._blame.long_step(worker, ())
        for request in list(worker.watched):
            worker.unwatch(request)
        for request in list(worker.lingering):
            worker.unlinger(request)
        worker.displaced = [attempt.choice for attempt in worker.live]
        for attempt in list(worker.live):
            if attempt in worker.live:  # failing one request may have ended others of its choices
                if worker.refuses:  # it left as asked, before it had heard of this
                    self._dispatcher.close(attempt, now_ns, f"{worker.id} has drained")
                else:
                    self._dispatcher.reopen(attempt, now_ns, f"{worker.id} lost ({cause})", innocent=True)
        restart = self._state.config.restart
        if fence:
            self._fence(worker, now_ns, hung)
        else:
            wait_ns = int(restart.report_wait_s * SECOND)
            self._state.commands.append(SetTimer(("fence", worker.id), now_ns + wait_ns))
        self._dispatcher.pump(now_ns)

    def _fence(self, worker: Worker, now_ns: int, hung: EngineExited | None = None) -> None:
        worker.agent_open = worker.engine_open = False
        self._state.commands.append(CloseWorker(worker.key))
        if not worker.cut:
            self._state.commands.append(StopWorker(worker.key, kill=True, word=hung))
        wait_ns = int(self._state.config.restart.exit_wait_s * SECOND)
        self._state.commands.append(SetTimer(("reap", worker.id), now_ns + wait_ns))

    def started(self, event: WorkerStarted, now_ns: int) -> None:
        """Another gateway had a new incarnation launched: whatever this one holds of an older one is over."""
        worker = self._state.workers.get(event.worker.worker)
        if worker is None or event.worker.incarnation <= worker.incarnation or self._state.stopped:
            return
        if worker.state not in (WorkerState.LOST, WorkerState.STOPPED):
            self.lose(worker, f"replaced by incarnation {event.worker.incarnation}", now_ns, fence=False)
        self._forget(worker)
        worker.gave_up = False
        worker.begin(event.worker.incarnation, now_ns)

    def _rejoin(self, worker: Worker, now_ns: int) -> None:
        """Its connection was lost, and it is here again: what it held for us before is over, it itself is not."""
        self._blame.rejoined(worker)
        self._forget(worker)
        self._state.counters["workers_rejoined"] += 1
        worker.begin(worker.incarnation, now_ns)

    def _forget(self, worker: Worker) -> None:
        """Nothing of the life before, or of the connections before, is waited for any more."""
        self._blame.explained(worker)
        self._state.commands.append(CloseWorker(worker.key))
        self._state.commands += [CancelTimer((kind, worker.id)) for kind in ("fence", "reap", "launch")]

    # --- coming back ----------------------------------------------------------------------------------------------

    def timer(self, kind: str, worker: Worker, now_ns: int) -> None:
        """``fence``: the agent had its moment. ``reap``: no exit was seen, go on without. ``launch``: the delay is over."""
        if worker.state is not WorkerState.LOST:
            return
        if kind == "fence":
            if worker.exited:
                self._gone(worker, now_ns)
            else:
                self._fence(worker, now_ns)
        elif kind == "reap":
            self._gone(worker, now_ns)
        elif kind == "launch":
            self.launch(worker, now_ns)

    def _schedule_restart(self, worker: Worker, now_ns: int) -> None:
        if self._state.stopped:
            return
        restart = self._state.config.restart
        if worker.failures <= 1:
            if self._state.ready_workers() and resuming(worker):
                worker.yielding = True
                self._state.commands.append(SetTimer(("launch", worker.id), now_ns + int(restart.yield_s * SECOND)))
            else:
                self.launch(worker, now_ns)
            return
        delay_s = min(restart.max_delay_s, restart.first_delay_s * 2 ** min(worker.failures - 2, 30))
        self._state.commands.append(SetTimer(("launch", worker.id), now_ns + int(delay_s * SECOND)))

    def tick(self, now_ns: int) -> None:
        """Start those that have waited for what they had to go on elsewhere."""
        for worker in self._state.workers.values():
            if worker.yielding and worker.state is WorkerState.LOST and not resuming(worker):
                self._state.commands.append(CancelTimer(("launch", worker.id)))
                self.launch(worker, now_ns)

    # --- stopping -------------------------------------------------------------------------------------------------

    def stop_all(self, now_ns: int) -> None:
        for worker in self._state.workers.values():
            if worker.state is WorkerState.STOPPED:
                continue
            worker.move(WorkerTrigger.STOP, now_ns)
            self._state.commands.append(StopWorker(worker.key, kill=False))
            for kind in ("fence", "reap", "launch"):
                self._state.commands.append(CancelTimer((kind, worker.id)))

    # --- hearing --------------------------------------------------------------------------------------------------

    def heartbeat(self, worker: Worker, beat: Heartbeat, now_ns: int) -> None:
        worker.heard_ns = now_ns
        worker.hear_beat(beat, now_ns)
        worker.suspect = False
        if beat.engine_state == "X":
            self.lose(worker, "engine ended", now_ns, fence=False)
            wait_ns = int(self._state.config.restart.exit_wait_s * SECOND)  # its memory has to be taken down first
            self._state.commands.append(SetTimer(("fence", worker.id), now_ns + wait_ns))
            return
        if beat.engine_state in ("T", "t"):
            worker.frozen_since_ns = worker.frozen_since_ns or now_ns
            if now_ns - worker.frozen_since_ns >= int(self._state.config.detector.frozen_after_s * SECOND):
                self.lose(worker, "engine frozen", now_ns, fence=True)
            return
        worker.frozen_since_ns = 0
        self._blame.heard(worker, beat)
        deadline_ms = self._state.config.detector.step_deadline_s * SECOND / MILLISECOND
        if beat.phase == "stepping" and beat.phase_age_ms > deadline_ms:
            hung = EngineExited(manifest=beat.manifest, alone=beat.alone, hung_ms=beat.phase_age_ms)
            how = exit_text(hung)
            self._blame.accuse(worker, beat.manifest, beat.alone, how, now_ns)
            self.lose(worker, how, now_ns, fence=True, hung=hung)
        elif beat.phase == "draining" and worker.state in LIVE:
            self.leaving.said(worker, now_ns)


def resuming(worker: Worker) -> bool:
    """Something that it was computing has no next token yet."""
    return any(choice.losses and choice.state is not ChoiceState.ENDED for choice in worker.displaced)
