"""Two GPUs in one call: 1P + 1D against two colocated replicas against two ranks; KV between devices; killed workers.

``python -m benchmarks.multi_gpu --out FILE`` on two GPUs: an 8B shape with random weights, at most ``--limit`` seconds.
``--merge OLD`` keeps the parts of an earlier file that this call does not measure; OLD may be FILE.
``--cpu --tiny`` runs every part on CPUs with a model of a few kilobytes: a test of this script, its figures mean nothing.
Each part stands alone: what fails is recorded with its reason, what finds no time left is skipped and says so, and FILE is
rewritten after each. ``--plan`` prints what each part is expected to take. The load is argued for in ``multi_gpu_load``.

Parts on one server follow each other without another start: a kill comes last, on the server that was under load. ``kill``
takes the only D: P has the prompts' KV and computes again only what was generated. ``kill-replica`` takes one of two replicas: the
other has nothing of its requests and computes them whole. ``recomputed_tokens`` says which it was.
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.gpu_pack import write
from benchmarks.gpu_serve import counted, killed
from benchmarks.gpu_server import Server, Stream, serving
from benchmarks.gpu_shapes import SMOLLM2
from benchmarks.multi_gpu_load import drive
from benchmarks.multi_gpu_report import budget_of, compared
from benchmarks.multi_gpu_run import SKIPPED, Run
from benchmarks.multi_gpu_setup import CPUS, GPUS, LONG_8B, TINY, Setup
from benchmarks.multi_gpu_transfer import Pair, copy_rate
from benchmarks.standing import Standing, Void, ended, ending, missed_victim, moved_too_little
from relay.config import TransportName
from relay.models.checked import remember
from relay.worker.spec import WorkerSpec

SENT = "kv_transfers_sent_total"
COUNTED_S = 3.0  # by then the counters of what ended have reached the gateway, however busy the machine


@dataclass(frozen=True, slots=True)
class Part:
    """``measure`` of a part; ``needs_s`` without the start of its server, which is named by ``server`` (shape, flags)."""

    needs_s: float
    measure: Callable[..., Any]
    server: tuple[str, ...] = ()


class Bench:
    """The parts."""

    def __init__(self, setup: Setup, pack: Path, cache: Path, run: Run) -> None:
        self._setup, self._pack, self._cache, self._run = setup, pack, cache, run
        self.parts = self._parts()

    def _parts(self) -> dict[str, Part]:
        """Every part by name, in the order of their worth."""
        setup = self._setup
        loads, one = setup.load_s(setup.factors), setup.load_s(setup.factors[:1])
        load = partial(self.loads, setup.factors)
        found = {
            "split": Part(loads, load, ("split",)),
            "kill": Part(setup.kill_s, partial(self.kill, "decode-0", 1), ("split",)),
        }
        for budget in setup.budgets:
            server = ("colocated", *budget_flags(budget))
            found[f"colocated-{budget}"] = Part(loads, load, server)
            if budget == max(setup.budgets):  # where prompts are computed again in the fewest steps
                found["kill-replica"] = Part(setup.kill_s, partial(self.kill, "worker-0", 2), server)
        for budget in setup.rank_budgets:
            found[f"ranks-{budget}"] = Part(loads, load, ("ranks", *budget_flags(budget)))
        self.main = list(found)
        found["kv"] = Part(setup.transfer_s, partial(self.kv, setup.transports[0]))
        found["kv-other"] = Part(setup.transfer_s, partial(self.kv, setup.transports[1]))
        for budget in setup.extra_budgets:
            found[f"colocated-{budget}"] = Part(loads, load, ("colocated", *budget_flags(budget)))
        found["split-other"] = Part(one, partial(self.loads, setup.factors[:1]), ("split-other",))
        found["exact-ranks"] = Part(setup.verify_s, self.exact_ranks)
        return found

    def named(self, text: str) -> list[str]:
        """The parts that ``text`` asks for, those of a server together. Raises ValueError for a name that is none."""
        asked: dict[str, None] = {}
        groups = {"main": self.main, "all": list(self.parts)}
        for word in (name for group in text.split(",") for name in groups.get(group, [group])):
            found = [name for name in self.parts if name == word or budget_of(name, word) is not None]
            if not found:
                raise ValueError(f"no part is named {word}; there are {', '.join(self.parts)}")
            asked |= dict.fromkeys(found)
        ordered: dict[str, None] = {}
        for name in asked:
            server = self.parts[name].server
            ordered |= dict.fromkeys([each for each in asked if server and self.parts[each].server == server] or [name])
        return list(ordered)

    def measure(self, names: list[str]) -> None:
        """Measure ``names``, which ``named`` ordered: neighbours of one server on one start of it."""
        while names:
            part = self.parts[names[0]]
            group = [name for name in names if part.server and self.parts[name].server == part.server] or names[:1]
            names = [name for name in names if name not in group]
            if part.server:
                self._on_server(part.server, group)
            else:
                self._run.part(group[0], self._needs(group[0]), part.measure)

    def _on_server(self, server: tuple[str, ...], group: list[str]) -> None:
        setup, left = self._setup, list(group)
        needs = self._needs(group[0]) + setup.ready_of(server[0])
        if self._run.left_s() < needs:
            for name in group:
                self._run.problem(name, f"{SKIPPED}{self._run.left_s():.0f} s were left, it may take {needs:.0f}")
            return
        flags = (*setup.shape(server[0]), *server[1:])
        ready = min(setup.start_s, max(5.0, self._run.left_s() - 5))
        try:
            log = self._run.log(group[0])
            started = serving(
                str(self._pack), *flags, *setup.flags, backend=setup.backend, ready_within_s=ready, log=log
            )
            with started as running:
                while left:
                    name = left.pop(0)
                    self._run.part(name, self._needs(name), partial(self.parts[name].measure, running, flags))
                    if self._run.failed(name):
                        running.tell()
        except Exception as error:  # it did not start, or did not end: the other servers' parts run
            for name in left:
                self._run.problem(name, str(error)[-3000:])
            if not left:
                print("after", ", ".join(group), repr(error), flush=True)

    def _needs(self, name: str) -> float:
        return self.parts[name].needs_s if self._setup.backend == "cuda" else 0.0

    def _start_s(self, server: tuple[str, ...]) -> float:
        return self._setup.ready_of(server[0]) + 2 if server else 0.0

    def expected_s(self, names: list[str]) -> dict[str, float]:
        """Seconds that each of ``names`` is expected to take; the first on a server has its start."""
        started: set[tuple[str, ...]] = set()
        found = {}
        for name in names:
            part = self.parts[name]
            found[name] = part.needs_s + (self._start_s(part.server) if part.server not in started else 0)
            started.add(part.server)
        return found

    def loads(self, factors: tuple[float, ...], server: Server, flags: tuple[str, ...]) -> dict[str, Any]:
        """Each factor of the load and the backlog, after a short warm-up that is not counted.

        Raises Void, with what was measured, as soon as a worker has ended, or a split's prompts did not go from P to D.
        """
        setup = self._setup
        found: dict[str, Any] = {"flags": list(flags), "ready_s": round(server.ready_s, 2)}
        split = "--transport" in flags
        stood = self._settled(server, found)
        uvloop.run(drive(server, setup.load.times(0.5, 2.0)))
        _stood(server, stood, found)
        runs = {f"load x {factor:g}": setup.load.times(factor) for factor in factors}
        for name, load in {**runs, "backlog": setup.load.at_once()}.items():
            before = counted(server) if split else {}
            found[name] = row = uvloop.run(drive(server, load))
            if split:
                row["transfers"] = _moved(server, before, row["requests"])
            _show(f"{' '.join(flags)} {name}", row)
            _stood(server, stood, found)
            if split and (reason := moved_too_little(row["requests"], row["transfers"].get(SENT, 0.0))):
                raise Void(f"{name}: {reason}", found)
        return found

    def kill(self, victim: str, workers: int, server: Server, flags: tuple[str, ...]) -> dict[str, Any]:
        """Kill one of ``workers`` that decode, each with the same number of streams.

        Nobody waits for the victim's restart: a part that comes after this one on the same server does. Raises Void where another
        worker ended, or the victim had not the streams that were meant for it.
        """
        setup = self._setup
        found: dict[str, Any] = {"flags": list(flags), "meant_for_victim": setup.kill_streams}
        stood = self._settled(server, found)
        sizes = workers * setup.kill_streams, setup.kill_prompt, setup.kill_new, setup.load.vocab
        found |= uvloop.run(killed(server, victim, *sizes, again_within_s=0.0))
        _stood(server, stood, found, but=victim)
        if reason := missed_victim(found["on_victim"], setup.kill_streams):
            raise Void(reason, found)
        return found

    def _settled(self, server: Server, found: dict[str, Any]) -> dict[str, Standing]:
        """The workers before a part, once all are ready; recorded in ``found``. Raises RuntimeError if one does not become so."""
        stood = server.settle(max(0.0, min(self._setup.settle_s, self._run.left_s() - 5)))
        found["workers_before"] = {name: asdict(one) for name, one in stood.items()}
        return stood

    def kv(self, transport: TransportName) -> dict[str, Any]:
        """KV from the first device to the second, and the plain copy rate between them at the same sizes."""
        setup = self._setup
        specs = [self._spec(name, device, transport) for name, device in zip("pd", setup.devices, strict=True)]
        pair = Pair(*specs)
        found: dict[str, Any] = {}
        try:
            for tokens, trials in setup.transfers:
                if self._run.left_s() < 20:
                    found[str(tokens)] = "skipped: no time was left"
                    continue
                row = pair.measure(tokens, trials)
                rate = copy_rate(*setup.devices, size=int(row["megabytes"] * 1e6))
                row["copy"] = rate
                row["after_share_of_copy_rate"] = round(row["after_gb_per_s"] / rate["gb_per_s"], 4)
                found[str(tokens)] = row
                print(f"kv {transport}", {name: value for name, value in row.items() if name != "all_ms"}, flush=True)
        finally:
            pair.close()
        return found

    def exact_ranks(self) -> dict[str, Any]:
        """``relay verify`` with two ranks, on a model of SmolLM2's shape (the tiny one on CPUs)."""
        setup = self._setup
        pack = self._pack.with_name("verify.pack")
        write(pack, TINY if setup.backend == "cpu" else SMOLLM2)
        remember(pack, self._cache)
        command = [sys.executable, "-m", "relay.cli.main", "verify", str(pack), "--offline", "--json"]
        command += ["--cache-dir", str(self._cache), "--backend", setup.backend, "--tensor-parallel-size", "2"]
        command += ["--path", "batched", "--path", "chunks of 50", "--path", "prefix cache"]
        if setup.backend == "cuda":
            command += ["--device", ",".join(setup.devices)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=self._run.left_s())
        if not done.stdout.strip():
            raise RuntimeError(f"relay verify ended with {done.returncode}: {done.stderr[-1500:]}")
        found: dict[str, Any] = json.loads(done.stdout)
        print(f"verify with two ranks: {found['identical']} of {found['compared']} identical", flush=True)
        return found

    def external(self, port: int, model: str) -> dict[str, Any]:
        """The same load on another server that listens on ``port`` of this machine."""
        with socket.create_connection(("127.0.0.1", port), timeout=5):  # raises where nobody listens
            pass
        server = _External(f"http://127.0.0.1:{port}", model)
        return self.loads(self._setup.factors, server, ("vllm", model))

    def _spec(self, name: str, device: str, transport: TransportName) -> WorkerSpec:
        setup = self._setup
        longest = max(tokens for tokens, _ in setup.transfers) + setup.block_size
        config = TINY if setup.backend == "cpu" else LONG_8B
        value = 4 if setup.backend == "cpu" else 2
        token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * value
        return WorkerSpec(
            worker=f"bench-{name}",
            incarnation=1,
            gateways=[],
            pack_path=str(self._pack),
            backend=setup.backend,  # type: ignore[arg-type]
            device=device if setup.backend == "cuda" else "cuda:0",
            threads=1,
            kv_cache_memory_bytes=token * (longest + 2 * setup.block_size),
            kv_cache_dtype="float32" if setup.backend == "cpu" else "bfloat16",
            block_size=setup.block_size,
            transport=transport,
            max_num_seqs=4,
            max_num_batched_tokens=setup.chunk,
            max_model_len=longest,
        )


def _moved(server: Server, before: dict[str, float], requests: int) -> dict[str, float]:
    """KV transfers since ``before``, as soon as there are as many as ``requests``, or when ``COUNTED_S`` are over."""
    deadline = time.monotonic() + COUNTED_S
    while True:
        found = transferred(before, counted(server))
        if found.get(SENT, 0.0) >= requests or time.monotonic() > deadline:
            return found


def _stood(server: Server, before: dict[str, Standing], found: dict[str, Any], but: str = "") -> None:
    """Record the workers as they are now. Raises Void where one, ``but`` excepted, has ended since ``before``."""
    after = server.standings()
    found["workers_after"] = {name: asdict(one) for name, one in after.items()}
    if names := ended(before, after, but):
        raise Void(ending(names, after, server.log_text()), found)


class _External(Server):
    """A server of somebody else's, with the model's name in every body."""

    def __init__(self, url: str, model: str) -> None:
        self.url, self._model, self.ready_s = url, model, 0.0
        self.port = int(url.rsplit(":", 1)[1])

    def standings(self) -> dict[str, Standing]:
        return {}  # it shows none of its workers

    async def ask(self, body: dict[str, Any], stream: Stream | None = None) -> Stream:
        return await super().ask({"model": self._model, **body}, stream)


def budget_flags(budget: int) -> tuple[str, ...]:
    """Flags of ``budget`` tokens a step, with as many sequences as it has room for."""
    return ("--max-num-batched-tokens", str(budget), "--max-num-seqs", str(min(256, budget)))


def _show(name: str, row: dict[str, Any]) -> None:
    print(
        f"{name}: ITL p50 {row['itl_ms']['p50']} p99 {row['itl_ms']['p99']} ms, TTFT p50 {row['ttft_ms']['p50']} "
        f"p99 {row['ttft_ms']['p99']} ms, goodput {row['goodput_per_s']}/s, {row['output_tokens_per_s']} tok/s",
        row["errors"],
        flush=True,
    )


def transferred(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What the engines counted of KV transfers between two looks."""
    since = {name: value - before.get(name, 0.0) for name, value in after.items() if name.endswith("_total")}
    sent, count = since.get("kv_bytes_sent_total", 0.0), since.get(SENT, 0.0)
    if sent and count:
        since["hidden_share"] = round(1 - since.get("kv_late_bytes_sent_total", 0.0) / sent, 4)
        since["exposed_ms_each"] = round(since.get("kv_exposed_us_total", 0.0) / count / 1e3, 2)
    return since


def gpus() -> int:
    """How many there are."""
    import os

    from relay.cluster.nvml import detect

    return len(detect(os.environ).gpus)


def topology() -> Any:
    """What NVML says of this machine."""
    import os

    from relay.cluster.nvml import detect
    from relay.cluster.topology import describe

    return describe(detect(os.environ))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=450.0, help="seconds for everything")
    parser.add_argument("--parts", default="main", help="names with commas; colocated: every budget; main, all")
    parser.add_argument("--merge", type=Path, help="keep the parts of this file that are not measured now")
    parser.add_argument("--plan", action="store_true", help="only print what the parts are expected to take")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument(
        "--pack", type=Path, help="where the weights are or will be [default: /dev/shm, or a temporary folder]"
    )
    parser.add_argument("--cache-dir", type=Path, help="model cache [default: a folder beside the pack]")
    parser.add_argument("--vllm", nargs=2, metavar=("PORT", "MODEL"), help="drive a vLLM that listens here, too")
    arguments = parser.parse_args()
    if arguments.cpu != arguments.tiny:
        parser.error("--cpu and --tiny go together: the 8B shape is for GPUs, the tiny one proves only the script")
    setup = CPUS if arguments.cpu else GPUS
    earlier = json.loads(arguments.merge.read_text()) if arguments.merge else None
    try:
        run = Run(arguments.out, arguments.limit, setup.backend, earlier)
    except ValueError as error:
        parser.error(f"--merge: {error}")
    with tempfile.TemporaryDirectory(prefix="relay-multi-gpu-") as scratch:
        pack = arguments.pack or Path(scratch if arguments.cpu else "/dev/shm") / "bench.pack"
        cache = arguments.cache_dir or Path(scratch) / "cache"
        setup = replace(setup, flags=(*setup.flags, "--cache-dir", str(cache)))
        bench = Bench(setup, pack, cache, run)
        try:
            names = bench.named(arguments.parts)
        except ValueError as error:
            parser.error(f"--parts: {error}")
        expected = bench.expected_s(names)
        print(json.dumps({"expected_s": expected, "together_s": sum(expected.values())}, indent=1), flush=True)
        if arguments.plan:
            return
        run.part("topology", 0, topology)
        if setup.backend == "cuda" and (found := gpus()) < len(setup.devices):
            raise SystemExit(f"NVML shows {found} GPUs, this needs {len(setup.devices)}; --cpu --tiny tries the script")

        def prepare() -> dict[str, float]:
            if not pack.exists():
                write(pack, TINY if arguments.cpu else LONG_8B)
            remember(pack, cache)
            return {"pack_bytes": pack.stat().st_size}

        if run.part("prepare", 0, prepare) is None:
            raise SystemExit("no weights: nothing can be measured")
        bench.measure(names)
        if arguments.vllm:
            port, model = arguments.vllm
            found = run.part("vllm", 60, lambda: bench.external(int(port), model))
            if found is not None:
                run.found["vllm"] = found
        run.found["compared"] = compared(run.found["parts"])
        run.save()
        print(json.dumps({"compared": run.found["compared"], "problems": run.found["problems"]}, indent=1))
        raise SystemExit(any(run.failed(name) for name in run.found["problems"]))


if __name__ == "__main__":
    main()
