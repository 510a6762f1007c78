"""``relay bench kv``: how much of a KV transfer a prompt's own compute hides, over every wire, with its baseline in the same run.

*Exposed* is the time from the end of the prompt's last layer on P to the moment D could run its first decode step, less the same
for a transfer of zero bytes; *baseline* the same for bytes sent after prefill; *wire* the sum over frames of send start to
receiver's copy done, each frame alone.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from relay.bench.kv_ceilings import CEILING_OF, Ceilings
from relay.bench.kv_source import BenchFailed, Prefilled, Source, TargetProcess
from relay.bench.kv_target import Command
from relay.bench.stamps import transfer_cpu_s

NS = 1e-9
LEAST_RUNS = 3


@dataclass(frozen=True, slots=True)
class Timeline:
    """One streamed prompt, frame by frame: (what, layer, start, end) in seconds from its first step."""

    tokens: int
    transport: str
    spans: list[tuple[str, int, float, float]]


@dataclass(slots=True)
class Samples:
    """Of one transport, one value a run: seconds, GB/s, or a ratio of two times that followed each other."""

    exposed: list[float] = field(default_factory=list)
    baseline: list[float] = field(default_factory=list)
    zero: list[float] = field(default_factory=list)
    handoff: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    send_cpu: list[float] = field(default_factory=list)
    receive_cpu: list[float] = field(default_factory=list)
    wire: list[float] = field(default_factory=list)
    burst: list[float] = field(default_factory=list)
    ceiling: list[float] = field(default_factory=list)


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered) + 0.5) - 1))]


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Of each value to the one measured beside it."""
    return [value / other for value, other in zip(values, others, strict=True)]


class KvBench:
    """Runs rounds in changing order: one prefill alone with all that follows it, and for each transport one streamed."""

    def __init__(self, source: Source, target: TargetProcess, ceilings: Ceilings) -> None:
        self._source = source
        self._target = target
        self._ceilings = ceilings
        self._order = random.Random(0)

    def measure(
        self, tokens: int, transports: Sequence[str], runs: int, seconds: float, note: Callable[[str], None]
    ) -> list[dict[str, Any]]:
        """One row a transport, of ``runs`` rounds or, from ``LEAST_RUNS`` on, as many as begin within ``seconds``."""
        samples = {name: Samples() for name in transports}
        self._round(tokens, {name: Samples() for name in transports})  # connections, page faults, caches
        alone: list[float] = []
        begin = time.monotonic()
        while len(alone) < runs and (len(alone) < LEAST_RUNS or time.monotonic() - begin < seconds):
            alone.append(self._round(tokens, samples))
            note(f"{tokens} tokens: run {len(alone)} of {runs}")
        return [self._row(tokens, name, samples[name], alone) for name in transports]

    def _round(self, tokens: int, samples: dict[str, Samples]) -> float:
        """Seconds of the prefill that streamed nothing."""
        names = [*samples, ""]
        self._order.shuffle(names)
        alone = 0.0
        for name in names:
            if name:
                self._streamed(tokens, name, samples[name])
            else:
                alone = self._alone(tokens, samples)
        return alone

    def timeline(self, tokens: int, transport: str) -> Timeline:
        """One streamed prompt with the times of everything that happened to its KV."""
        source, target = self._source, self._target
        self._copies()
        transfer = source.open(transport, target, tokens)
        prefilled = source.prefill(tokens, transport, transfer)
        target.wait("completed", transfer)
        prefilled.release()
        reads, writes = self._copies()
        begin = prefilled.start_ns
        spans: list[tuple[str, int, float, float]] = []
        previous = begin
        for layer, at_ns in prefilled.layers_ns:
            spans.append(("compute", layer, (previous - begin) * NS, (at_ns - begin) * NS))
            previous = at_ns
        spans.append(("compute", source.num_layers, (previous - begin) * NS, (prefilled.last_layer_ns - begin) * NS))
        received = {(layer, first): (start, end) for layer, first, start, end in writes}
        for layer, first, start, end in reads:
            there, done = received[layer, first]
            spans.append(("pack", layer, (start - begin) * NS, (end - begin) * NS))
            spans.append(("wire", layer, (end - begin) * NS, (there - begin) * NS))
            spans.append(("scatter", layer, (there - begin) * NS, (done - begin) * NS))
        return Timeline(tokens, transport, spans)

    def _streamed(self, tokens: int, transport: str, samples: Samples) -> None:
        source = self._source
        transfer = source.open(transport, self._target, tokens)
        before = self._cpu()
        prefilled = source.prefill(tokens, transport, transfer)
        ready_ns = self._target.wait("completed", transfer).at_ns
        after = self._cpu()
        prefilled.release()
        samples.exposed.append((ready_ns - prefilled.last_layer_ns) * NS)
        samples.prefill.append((prefilled.last_layer_ns - prefilled.start_ns) * NS)
        samples.send_cpu.append(after[0] - before[0])
        samples.receive_cpu.append(after[1] - before[1])

    def _alone(self, tokens: int, samples: dict[str, Samples]) -> float:
        """A prefill that streams nothing. Then for each transport: a handoff of zero bytes, everything at once beside its
        ceiling, and frame by frame. Zero bytes take from the last layer to the first token, and then the handoff.
        """
        source, target = self._source, self._target
        empty = {name: source.open(name, target, tokens, tokens) for name in samples}
        prefilled = source.prefill(tokens)
        drawn_ns = time.monotonic_ns()
        for name in self._order.sample(list(samples), len(samples)):
            begin_ns = source.hand_off(name, empty[name])
            handoff = (target.wait("completed", empty[name]).at_ns - begin_ns) * NS
            samples[name].handoff.append(handoff)
            samples[name].zero.append((drawn_ns - prefilled.last_layer_ns) * NS + handoff)
        size = tokens * source.token_bytes
        for name in self._order.sample(list(samples), len(samples)):
            late = source.open(name, target, tokens)
            begin_ns = source.send(name, late, prefilled)
            seconds = (target.wait("completed", late).at_ns - begin_ns) * NS
            samples[name].baseline.append(seconds)
            samples[name].burst.append(size / seconds / 1e9)
            samples[name].ceiling.append(self._ceilings.once(CEILING_OF[name], target, size, source.checksum))
            samples[name].wire.append(self._wire(name, tokens, prefilled))
        prefilled.release()
        return (prefilled.last_layer_ns - prefilled.start_ns) * NS

    def _cpu(self) -> tuple[float, float]:
        """Seconds of processor time that (P's, D's) transfer threads have used."""
        self._target.tell(Command("cpu"))
        return transfer_cpu_s(), self._target.wait("cpu").cpu_s

    def _wire(self, transport: str, tokens: int, prefilled: Prefilled) -> float:
        """The sum over frames of send start to copy done, each frame with the wire to itself."""
        source, target = self._source, self._target
        self._copies()
        transfer = source.open(transport, target, tokens, echo=True)
        frames = source.send_slowly(transport, transfer, prefilled, lambda: target.wait("frame"))
        target.wait("completed", transfer)
        reads, writes = self._copies()
        assert len(reads) == len(writes) == frames
        done = {(layer, first): end for layer, first, _, end in writes}
        return sum((done[layer, first] - start) * NS for layer, first, start, _ in reads)

    def _copies(self) -> tuple[list[tuple[int, int, int, int]], list[tuple[int, int, int, int]]]:
        """(P's, D's) copies since the last call."""
        reads, self._source.store.reads = self._source.store.reads, []
        self._target.tell(Command("copies"))
        writes = self._target.wait("copies").copies
        return [(c.layer, c.first, c.start_ns, c.end_ns) for c in reads], writes

    def _row(self, tokens: int, transport: str, samples: Samples, alone: list[float]) -> dict[str, Any]:
        if self._source.failures:
            raise BenchFailed(f"a transfer failed: {self._source.failures[0].reason}")
        median = statistics.median
        zero = median(samples.zero)
        exposed = [value - zero for value in samples.exposed]
        baseline = median(samples.baseline) - median(samples.handoff)
        # What two medians of zero-byte transfers may differ by: the spread of one, both ways.
        noise = (percentile(samples.zero, 0.9) - percentile(samples.zero, 0.1)) / 2
        return {
            "transport": transport,
            "tokens": tokens,
            "bytes": tokens * self._source.token_bytes,
            "wire_s": median(samples.wire),
            "exposed_s": median(exposed),
            "exposed_p90_s": percentile(exposed, 0.9),
            "noise_s": noise,
            "baseline_exposed_s": baseline,
            "hidden_share": 1 - median(exposed) / baseline,
            "prefill_s": median(alone),
            "below_noise": abs(median(exposed)) <= noise,
            "prefill_slowdown": median(ratios(samples.prefill, alone)) - 1,
            "send_cpu_s": median(samples.send_cpu),
            "receive_cpu_s": median(samples.receive_cpu),
            "burst_gb_s": median(samples.burst),
            "ceiling_gb_s": median(samples.ceiling),
            "burst_of_ceiling": median(ratios(samples.burst, samples.ceiling)),
            "runs": len(alone),
        }
