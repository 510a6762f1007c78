"""What a KV frame costs its threads in processor time: production links over CUDA IPC's socket, device memory that is not there.

``python -m benchmarks.frame_host [--out FILE] [--tokens 2048,8192,32768] [--trials N] [--beside SRC] [--profile | --timeline]``.
No GPU: P and D are processes whose transports, links and channels are the engine's, with the limits and the area of an H200
worker and an 8B shape; their stores copy nothing and every copy has ended when it is asked for. So what is left is the host's
work alone. ``streamed``: layers are announced one by one in chunks of 2,048 tokens, by a thread that sleeps in between;
``loaded``: by one that computes in Python in between, as the thread does that launches steps; ``after``: all layers at once and
then the handoff; ``busy``: the same while another thread of P computes in Python all the time. ``prompt_us`` is what announcing
took in all, ``wall_us`` the time from the handoff, or from the first layer of ``after`` and ``busy``, to D's completion.
``--beside`` measures the package of another checkout too, transfer by transfer in turn, and gives the ratios. With rates and what
a launch costs (``--gather-gb-per-s 340 --scatter-gb-per-s 1500 --launch-us 120``) copies take their time: what a burst takes
beyond them is the links' own, waits and bubbles included. With the extra gpu installed the host part of a launch is timed as well
(``launch_parts_us``): the plan, and all of ``stage`` and ``collect`` but what torch and the driver do.
"""

import argparse
import cProfile
import json
import os
import pstats
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks import report
from benchmarks.transfer_timeline import Stamp, Stamps, lines_of, merged, noted_store, noted_wire

ROOT = Path(__file__).parent.parent
LAYERS, HEADS, DIM = 32, 8, 128
BLOCK = 64
CHUNK = 2048
LAYER_S = 0.0004  # between two layers of a streamed prompt
DEVICE_BYTES = 141 << 30
TICK_S = 0.2
PATIENCE_S = 60
KINDS = ("streamed", "loaded", "after", "busy")
THREADS = {
    "p": {"MainThread": "p_announcing", "kv-send-d": "p_writer", "kv-ack-d-0": "p_answers"},
    "d": {"kv-receive": "d_reader", "kv-reply-p": "d_writer"},
}


class NoMemory:
    """Stands for ``relay.kernels.cuda.ipc.DeviceMemory``: nothing reads or writes it."""

    def allocate(self, size: int) -> object:
        return object()

    def handle(self, area: object) -> bytes:
        return bytes(64)

    def open(self, handle: bytes, size: int) -> object:
        return object()

    def close(self, area: object) -> None: ...


class Ended:
    """Copies that are over at ``end_s``; all digests are 0."""

    def __init__(self, count: int, end_s: float) -> None:
        self._sums, self._end_s = [0] * count, end_s

    def ended(self) -> bool:
        return time.monotonic() >= self._end_s

    def wait(self) -> list[int]:
        if self._end_s:
            time.sleep(max(0.0, self._end_s - time.monotonic()))
        return self._sums


class NoStore:
    """A device's ``StagedStore`` that copies nothing. At ``rate`` bytes a second copies take time, one after the other; 0: none."""

    stage_depth = 12  # as the backend's

    def __init__(self, rate: float, launch_us: float) -> None:
        self.launches = 0
        self._rate, self._launch_ns = rate, int(launch_us * 1e3)
        self._free_s = 0.0  # when the last copy ends

    def register(self, region: memoryview) -> None: ...

    def unregister(self, region: memoryview) -> None: ...

    def allocate(self, size: int) -> memoryview:
        return memoryview(bytearray(size))

    def stage(self, frames: Sequence[Any]) -> Ended:
        self.launches += 1
        end_ns = time.thread_time_ns() + self._launch_ns
        while time.thread_time_ns() < end_ns:
            pass
        if not self._rate:
            return Ended(len(frames), 0)
        size = sum(place.size for _, place in frames)
        self._free_s = max(self._free_s, time.monotonic()) + size / self._rate
        return Ended(len(frames), self._free_s)

    collect = stage


class Clocks:
    """Processor time and waits of this process's threads since ``start``, by what the threads do."""

    def __init__(self, role: str) -> None:
        self._names = THREADS[role]
        self._before: dict[str, tuple[int, int]] = {}

    def start(self) -> None:
        self._before = self._now()

    def read(self) -> dict[str, tuple[int, int]]:
        """(ns, waits) of each."""
        now = self._now()
        return {name: (now[name][0] - ns, now[name][1] - waits) for name, (ns, waits) in self._before.items()}

    def _now(self) -> dict[str, tuple[int, int]]:
        found = {}
        for thread in threading.enumerate():
            name = self._names.get(thread.name)
            if name is not None and thread.ident is not None:
                status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
                waits = int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
                found[name] = (time.clock_gettime_ns(time.pthread_getcpuclockid(thread.ident)), waits)
        return found


class End:
    """One process's transport, which obeys lines of JSON."""

    def __init__(self, role: str, rate: float, launch_us: float, *, profiled: bool, timeline: bool) -> None:
        from relay.kernels.cpu.crc32c import crc32c
        from relay.transfer.contract import Identity, Layout
        from relay.transfer.ipc import IpcWire
        from relay.transfer.transport import WiredTransport
        from relay.worker.device import area_bytes, flow_of
        from relay.worker.engine_process import SWITCH_INTERVAL_S

        sys.setswitchinterval(SWITCH_INTERVAL_S)  # as an engine does
        self.profiles: list[cProfile.Profile] = []
        if profiled:
            self._profile_threads()
        self.store = NoStore(rate, launch_us)
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.clocks = Clocks(role)
        self.stamps = Stamps() if timeline else None
        store: Any = self.store  # staged stores are asked for nothing else than it has
        wire: Any = IpcWire("here", NoMemory(), area_bytes(DEVICE_BYTES))
        if self.stamps is not None:
            store, wire = noted_store(store, self.stamps), noted_wire(wire, self.stamps)
        layout = Layout(LAYERS, HEADS, DIM, "bfloat16")
        self.transport = WiredTransport(
            Identity(role, 1, "digest", "numerics", layout),
            store,
            self.events.put,
            [wire],
            flow_of("cuda").limits,
            checksum=crc32c,
        )
        threading.Thread(target=self._tick, daemon=True).start()

    def _tick(self) -> None:
        while True:
            time.sleep(TICK_S)
            self.transport.tick(time.monotonic_ns())

    def _profile_threads(self) -> None:
        from relay.transfer.inbound import InboundLink
        from relay.transfer.outbound import OutboundLink

        for link, name in ((OutboundLink, "_run"), (InboundLink, "run")):
            honest = getattr(link, name)

            def profiled(self_: Any, honest: Callable[[Any], None] = honest) -> None:
                profile = cProfile.Profile(time.thread_time_ns, 1e-9)
                self.profiles.append(profile)
                profile.runcall(honest, self_)

            setattr(link, name, profiled)

    def figures(self) -> dict[str, Any]:
        stamps: list[Stamp] = [] if self.stamps is None else self.stamps.stop("COMPLETE")
        return {"threads": self.clocks.read(), "launches": self.store.launches, "stamps": stamps}

    def begin(self) -> None:
        if self.stamps is not None:
            self.stamps.start()
        self.store.launches = 0
        self.clocks.start()

    def print_profile(self) -> None:
        """Once its threads have ended: one that waits would count this thread's time."""
        self.transport.close()
        for thread in threading.enumerate():
            if thread.name.startswith(("kv-send", "kv-receive")):
                thread.join(PATIENCE_S)
        for profile in self.profiles:
            pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(30)


def target(end: End) -> None:
    """D: (transfer, tokens) to receive, then what it cost."""
    from relay.transfer.contract import ReceiveCompleted, ReceiveOrder

    _say(end.transport.addresses)
    for line in sys.stdin:
        transfer, tokens = json.loads(line)
        table = tuple(range(-(-tokens // BLOCK)))
        end.transport.open_receive(ReceiveOrder(transfer, 0, "p", 1, 0, tokens, table))
        end.begin()
        _say("open")
        event = end.events.get(timeout=PATIENCE_S)
        there_ns = time.monotonic_ns()
        assert isinstance(event, ReceiveCompleted), event
        time.sleep(0.002)  # the answer has left
        _say({**end.figures(), "there_ns": there_ns})
    end.print_profile()


def source(end: End) -> None:
    """P: (transfer, tokens, kind, addresses) to send, then what it cost."""
    from relay.transfer.contract import SendAcknowledged, SendOrder
    from relay.transfer.frame import Handoff

    def announce(transfer: int, tokens: int, chunk: int, pause: Callable[[], None]) -> int:
        """The thread's own processor time."""
        cpu_ns = 0
        table = np.arange(-(-tokens // BLOCK), dtype=np.int32)
        for first in range(0, tokens, chunk):
            for layer in range(LAYERS):
                before = time.thread_time_ns()
                end.transport.layer_written(transfer, layer, first, min(chunk, tokens - first), table)
                cpu_ns += time.thread_time_ns() - before
                pause()
        return cpu_ns

    def compute_a_layer() -> None:
        end_ns = time.thread_time_ns() + int(LAYER_S * 1e9)
        while time.thread_time_ns() < end_ns:
            sum(range(200))

    pauses = {"streamed": partial(time.sleep, LAYER_S), "loaded": compute_a_layer}
    over = threading.Event()

    def compute() -> None:
        while not over.is_set():
            sum(range(1000))

    _say("ready")
    for line in sys.stdin:
        transfer, tokens, kind, addresses = json.loads(line)
        end.transport.open_send(SendOrder(transfer, 0, "d", 1, tuple(addresses), 0, tokens))
        time.sleep(0.02)  # the link is there, the probe has left
        over.clear()
        other = threading.Thread(target=compute)
        if kind == "busy":
            other.start()
        end.begin()
        begin_ns = time.monotonic_ns()
        streamed = kind in pauses
        cpu_ns = announce(transfer, tokens, CHUNK if streamed else tokens, pauses.get(kind, lambda: None))
        prompt_ns = time.monotonic_ns() - begin_ns
        if streamed:
            begin_ns += prompt_ns
        end.transport.send_handoff(transfer, Handoff(token_id=1))
        event = end.events.get(timeout=PATIENCE_S)
        over.set()
        if kind == "busy":
            other.join()
        assert isinstance(event, SendAcknowledged), event
        assert event.stats is not None
        time.sleep(0.002)
        figures = end.figures()
        figures["threads"]["p_announcing"] = (cpu_ns, figures["threads"].get("p_announcing", (0, 0))[1])
        _say({**figures, "begin_ns": begin_ns, "prompt_us": prompt_ns / 1e3, "frames": event.stats.frames})
    end.print_profile()


def _say(what: Any) -> None:
    print(json.dumps(what), flush=True)


class Process:
    """An end in a process of its own, with the package in ``tree``."""

    def __init__(self, role: str, tree: Path, *options: str) -> None:
        command = [sys.executable, "-m", "benchmarks.frame_host", "--role", role, *options]
        environment = {**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{ROOT}"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
        )

    def tell(self, *words: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"an end of the transfer ended with {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait()


class Pair:
    """P and D of one checkout."""

    def __init__(self, tree: Path, options: Sequence[str]) -> None:
        self._target = Process("d", tree, *options)
        self._addresses = self._target.hear()
        self._source = Process("p", tree, *options)
        assert self._source.hear() == "ready"
        self._transfer = 0
        self.timeline: list[list[Any]] = []

    def carry(self, tokens: int, kind: str) -> dict[str, float]:
        """One transfer's figures: µs of processor time and waits of each thread, µs in all, frames and launches."""
        self._transfer += 1
        self._target.tell(self._transfer, tokens)
        assert self._target.hear() == "open"
        self._source.tell(self._transfer, tokens, kind, self._addresses)
        there, sent = self._target.hear(), self._source.hear()
        figures: dict[str, float] = {}
        for name, (ns, waits) in (sent["threads"] | there["threads"]).items():
            figures[f"{name}_us"], figures[f"{name}_waits"] = ns / 1e3, waits
        figures["wall_us"] = (there["there_ns"] - sent["begin_ns"]) / 1e3
        if sent["stamps"]:
            completed: Stamp = (there["there_ns"], "completed", "")
            self.timeline = merged(sent["begin_ns"], sent["stamps"], [*there["stamps"], completed])
        return figures | {
            "prompt_us": sent["prompt_us"],
            "frames": sent["frames"],
            "p_launches": sent["launches"],
            "d_launches": there["launches"],
        }

    def close(self) -> None:
        self._source.close()
        self._target.close()


def measure(pairs: dict[str, Pair], tokens: int, kind: str, trials: int) -> dict[str, Any]:
    """One row: medians of each checkout, a burst and a frame, and how the first compares with the second."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in pairs}
    for trial in range(trials + 2):
        for name, pair in list(pairs.items())[:: 1 if trial % 2 else -1]:  # neither is always the second
            figures = pair.carry(tokens, kind)
            if trial >= 2:
                found[name].append(figures)
    medians = {
        name: {key: round(statistics.median(one.get(key, 0) for one in all_of), 1) for key in all_of[0]}
        for name, all_of in found.items()
    }
    row: dict[str, Any] = {"tokens": tokens, "kind": kind, "trials": trials}
    for name, figures in medians.items():
        times = [key for key in figures if key.endswith("_us") and key not in ("wall_us", "prompt_us")]
        each = {f"{key}_a_frame": round(figures[key] / figures["frames"], 1) for key in times}
        row[name] = {**figures, **each}
    if len(medians) == 2:
        ours, theirs = medians.values()
        row["ratio"] = {key: round(ours[key] / theirs[key], 3) for key in ours if theirs.get(key)}
    return row


def launch_us(trials: int = 100) -> dict[str, Any]:
    """µs a call of what a launch needs before the driver is called; empty without the extra gpu."""
    try:
        import torch

        from relay.kernels.cuda import kv_copy, kv_move
        from relay.kernels.cuda.written import LayerEvents
        from relay.kernels.kv_frames import KvRange, Span
    except ImportError as error:
        print(f"the host part of launches is not timed: {error}", file=sys.stderr, flush=True)
        return {}

    class Stand:
        """A stream or an event: nothing happens."""

        def __init__(self, *_: object, **__: object) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

        def record(self, *_: object) -> None: ...

        def synchronize(self) -> None: ...

        def wait_event(self, *_: object) -> None: ...

        def query(self) -> bool:
            return True

    class Area:
        tensor = torch.empty(1, dtype=torch.uint8)

    def timed(call: Callable[[], Any]) -> float:
        spent = []
        for _ in range(trials):
            before = time.thread_time_ns()
            call()
            spent.append(time.thread_time_ns() - before)
        return round(statistics.median(spent) / 1e3, 1)

    found: dict[str, Any] = {}
    with ExitStack() as stack:
        stand_ins: dict[str, Any] = {"Stream": Stand, "Event": Stand, "stream": Stand, "set_device": lambda *_: None}
        stack.enter_context(mock.patch.multiple(torch.cuda, **stand_ins))
        stack.enter_context(mock.patch.object(kv_copy, "move"))
        stack.enter_context(mock.patch.object(kv_copy, "pinned", lambda size: torch.empty(size, dtype=torch.uint8)))
        for tokens, layers, frames in ((2048, 4, 1), (2048, 4, 8), (2048, 16, 2), (32768, 1, 1)):
            table = np.arange(tokens // BLOCK, dtype=np.int32)
            ranges = [KvRange(one * layers % LAYERS, layers, 0, tokens, table) for one in range(frames)]
            events = LayerEvents(tuple(range(1, LAYERS + 1)), len(table), BLOCK)
            for layer in range(LAYERS):
                events.ran(layer, layer + 1)
            transfers = kv_copy.KvTransfers("cpu")
            shape = (LAYERS, 2, 1, HEADS, BLOCK, DIM)
            transfers.use([(0, torch.empty(shape, dtype=torch.bfloat16))])
            placed = [(one, Span(Area, 64 * number, 64)) for number, one in enumerate(ranges)]
            offsets = [64 * number for number in range(frames)]
            found[f"{frames} of {layers} layers, {tokens} tokens"] = {
                "plan": timed(partial(kv_move.Plan, ranges, offsets, BLOCK, HEADS)),
                "stage": timed(partial(transfers.stage, placed, events)),
                "collect": timed(partial(transfers.collect, placed)),
            }
    return found


def launches(trees: dict[str, Path], rounds: int) -> dict[str, Any]:
    """``launch_us`` of each checkout, medians over rounds in turn, and how the first compares with the second."""
    processes = {name: Process("launches", tree) for name, tree in trees.items()}
    found: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in trees}
    for _ in range(rounds):
        for name, process in processes.items():
            process.tell()
            found[name].append(process.hear())
    for process in processes.values():
        process.close()
    medians = {
        name: {
            f"{call}, {frames}": round(statistics.median(one[frames][call] for one in all_of), 1)
            for frames in all_of[0]
            for call in all_of[0][frames]
        }
        for name, all_of in found.items()
    }
    if len(medians) == 2:
        ours, theirs = medians.values()
        medians["ratio"] = {key: round(ours[key] / theirs[key], 3) for key in ours}
    return medians


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--tokens", default="2048,8192,32768")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--trials", type=int, default=15)
    parser.add_argument("--beside", type=Path, help="the src folder of another checkout")
    parser.add_argument("--profile", action="store_true", help="where P's writer and D's reader spend their time")
    parser.add_argument(
        "--timeline", action="store_true", help="each row's last transfer step by step, on standard error"
    )
    parser.add_argument("--gather-gb-per-s", type=float, default=0, help="copies out take so long; 0: no time")
    parser.add_argument("--scatter-gb-per-s", type=float, default=0, help="and copies in")
    parser.add_argument(
        "--launch-us", type=float, default=0, help="of processor time that a launch takes at either end"
    )
    parser.add_argument("--role", choices=["p", "d", "launches"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "launches":
        for _ in sys.stdin:
            _say(launch_us())
        return
    if arguments.role:
        rate = arguments.gather_gb_per_s if arguments.role == "p" else arguments.scatter_gb_per_s
        end = End(
            arguments.role,
            rate * 1e9,
            arguments.launch_us,
            profiled=arguments.profile,
            timeline=arguments.timeline,
        )
        (source if arguments.role == "p" else target)(end)
        return
    trees = {"this": ROOT / "src", **({"beside": arguments.beside.resolve()} if arguments.beside else {})}
    options = ["--profile"] * arguments.profile + ["--timeline"] * arguments.timeline
    options += ["--gather-gb-per-s", str(arguments.gather_gb_per_s)]
    options += ["--scatter-gb-per-s", str(arguments.scatter_gb_per_s)]
    options += ["--launch-us", str(arguments.launch_us)]
    pairs = {name: Pair(tree, options) for name, tree in trees.items()}
    rows = []
    for tokens in arguments.tokens.split(","):
        for kind in arguments.kinds.split(","):
            rows.append(measure(pairs, int(tokens), kind, arguments.trials))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            for name, pair in pairs.items():
                if pair.timeline:
                    print(name, lines_of(pair.timeline), sep="\n", file=sys.stderr, flush=True)
    for pair in pairs.values():
        pair.close()
    given = {name: getattr(arguments, name) for name in ("profile", "gather_gb_per_s", "scatter_gb_per_s", "launch_us")}
    report.write(arguments.out, {**given, "rows": rows, "launch_parts_us": launches(trees, rounds=9)})


if __name__ == "__main__":
    main()
