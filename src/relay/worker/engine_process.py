"""The engine process: ``python -m relay.worker.engine_process --spec FILE_OR_JSON [--agent-pid N --status PATH]``.

Opens the pack, sizes the KV pool, dials the gateways and runs the shell. Ends with 0 after a drain, with 8 when every gateway is
lost, with an error's own code when it could not start.
"""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from relay.clock import MonotonicClock
from relay.errors import RelayError, StartupError
from relay.worker.host import die_with_parent, host_identity
from relay.worker.spec import WorkerSpec, decode_spec
from relay.worker.status_page import Phase, StatusPage

SWITCH_INTERVAL_S = 0.0005  # a step between two C calls must not wait 5 ms for the core thread


def main() -> None:
    parser = argparse.ArgumentParser(prog="relay-engine")
    parser.add_argument("--spec", required=True, help="WorkerSpec as JSON, or the path of a file holding it")
    parser.add_argument("--agent-pid", type=int, default=0, help="end with this parent process")
    parser.add_argument("--status", default="", help="path of the agent's status page")
    arguments = parser.parse_args()
    threading.excepthook = _end_with_thread
    name = "worker"
    try:
        if arguments.agent_pid and not die_with_parent(arguments.agent_pid):
            raise StartupError("the agent ended before its engine started")
        spec = decode_spec(arguments.spec)
        name = spec.worker
        status, reason = serve(spec, StatusPage.open(arguments.status))
    except RelayError as error:
        status, reason = error.exit_code, str(error)
    if status:
        print(f"{name}: {reason}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    # Step and transfer threads may be inside C calls; there is nothing left that an orderly end of the interpreter would save.
    os._exit(status)


def _end_with_thread(args: threading.ExceptHookArgs) -> None:
    """A step or transfer thread died of a bug: an engine that looks alive without it would be worse than a dead one."""
    if isinstance(args.exc_value, RelayError):
        print(args.exc_value, file=sys.stderr, flush=True)
        os._exit(args.exc_value.exit_code)
    threading.__excepthook__(args)
    sys.stderr.flush()
    os._exit(1)


def declare_compiling(page: StatusPage, clock: MonotonicClock) -> None:
    """Show kernels that are compiled after the start, by whatever thread, as that: no deadline of steps counts their time."""
    from relay.kernels.cuda.launch import watch_compiler

    watch_compiler(*compile_phases(page, clock.now_ns))


def compile_phases(page: StatusPage, now_ns: Callable[[], int]) -> tuple[Callable[[], None], Callable[[], None]]:
    """What to call before and after a compilation: "compiling", then the phase that was before, its age counted anew."""
    interrupted: list[Phase] = []

    def begin() -> None:
        interrupted.append(page.phase)
        page.set_phase("compiling", now_ns())

    def end() -> None:
        page.set_phase(interrupted.pop(), now_ns())

    return begin, end


def serve(spec: WorkerSpec, page: StatusPage) -> tuple[int, str]:
    """Run one engine to its end: (exit status, reason). Raises RelayError while starting."""
    clock = MonotonicClock()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the launcher's business
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    page.hold()
    page.set_phase("loading", clock.now_ns())
    from relay.worker.assembly import assemble

    began_ns = clock.now_ns()
    phases = {"loading": 0.0}

    def announce(phase: Phase) -> None:
        phases[phase] = (clock.now_ns() - began_ns) / 1e9
        page.set_phase(phase, clock.now_ns())

    engine = assemble(spec, announce)
    if engine.overlapped:
        declare_compiling(page, clock)
        starts = ", ".join(f"{phase} from {seconds:.1f} s" for phase, seconds in phases.items())
        ready_s = (clock.now_ns() - began_ns) / 1e9
        print(f"{engine.limits.num_blocks} KV blocks; ready in {ready_s:.1f} s ({starts})", file=sys.stderr, flush=True)
    from relay.protocol.messages import GatewayToEngine, Hello
    from relay.transfer.transport import WiredTransport
    from relay.transfer.wire import open_wires
    from relay.worker.control_link import LinkLost
    from relay.worker.core import WorkerConfig, WorkerCore
    from relay.worker.device import device_wires, flow_of
    from relay.worker.engine_shell import EngineShell
    from relay.worker.entries import DigestKv
    from relay.worker.events import DrainRequested
    from relay.worker.gateway_links import GatewayLinks
    from relay.worker.inbox import Inbox
    from relay.worker.record import WorkerRecorder, WorkerSettings
    from relay.worker.step_thread import StepThread

    inbox = Inbox()
    flow = flow_of(spec.backend)
    first = device_wires(spec, host_identity())
    wires = open_wires(spec.transport, host_identity(), spec.kv_host, spec.kv_port, flow.ring_bytes, first)
    transport = WiredTransport(
        engine.identity,
        engine.backend,
        inbox.post,
        wires,
        flow.limits,
        checksum=engine.checksum,
        clock=clock,
    )
    config = WorkerConfig(
        drain_timeout_ns=int(spec.drain_timeout_s * 1e9), orphan_hold_ns=int(spec.orphan_hold_s * 1e9)
    )
    digest_kv: DigestKv = engine.runner.kv_digests
    recorder = None
    if spec.record:
        settings = WorkerSettings(config, engine.limits, engine.identity.numerics_id)
        path = Path(spec.record) / f"{spec.worker}-{spec.incarnation}-{os.getpid()}.relay"
        recorder = WorkerRecorder(path, f"{spec.worker} incarnation {spec.incarnation}", settings)
        digest_kv = recorder.digests(digest_kv)
    core = WorkerCore(config, engine.scheduler, digest_kv)
    shell = EngineShell(core, transport, inbox, page, clock, recorder)
    steps = StepThread(
        engine.runner, transport, engine.num_layers, page, inbox.post, clock, overlapped=engine.overlapped
    )
    signal.signal(signal.SIGTERM, lambda number, frame: inbox.post(DrainRequested()))
    hello = Hello(
        process="engine",
        worker=spec.worker,
        incarnation=spec.incarnation,
        pid=os.getpid(),
        role=spec.role,
        host=host_identity(),
        kv_addresses=transport.addresses,
        transports=tuple(wire.scheme for wire in wires),
        tensor_parallel=spec.ranks,
        devices=(spec.rank_devices or [spec.device]) if spec.backend == "cuda" else [],
        model_digest=engine.identity.model_digest,
        numerics_id=engine.identity.numerics_id,
        kv_blocks=engine.limits.num_blocks,
        block_size=engine.limits.block_size,
        max_model_len=engine.limits.max_model_len,
        max_num_seqs=engine.limits.max_num_seqs,
    )

    def say_hello() -> Hello:
        return msgspec.structs.replace(hello, orphans=core.orphans.keys())

    links = GatewayLinks(spec.gateways, GatewayToEngine, say_hello, clock.now_ns, again=spec.orphan_hold_s > 0)
    try:
        links.dial_first()
    except LinkLost as error:
        raise StartupError(str(error)) from error
    page.set_phase("ready", clock.now_ns())
    steps.start()
    ended = shell.run(links, steps.submit)
    return ended.status, ended.reason


if __name__ == "__main__":
    main()
