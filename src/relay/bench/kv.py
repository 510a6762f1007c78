"""``relay bench kv``: how much of a KV transfer a prompt's own compute hides, over every wire, with its baseline in the same run.

*Exposed* is the time from the end of the prompt's last layer on P to the moment D could run its first decode step, less the same
for a transfer of zero bytes; *baseline* the same for bytes sent after prefill; *wire* the sum over frames of send start to
receiver's copy done, each frame alone.
"""

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from relay.bench.kv_source import BenchFailed, Prefilled, Source, TargetProcess
from relay.bench.kv_target import Command

NS = 1e-9


@dataclass(frozen=True, slots=True)
class Timeline:
    """One streamed prompt, frame by frame: (what, layer, start, end) in seconds from its first step."""

    tokens: int
    transport: str
    spans: list[tuple[str, int, float, float]]


@dataclass(slots=True)
class Samples:
    """Seconds, one a run."""

    exposed: list[float] = field(default_factory=list)
    baseline: list[float] = field(default_factory=list)
    zero: list[float] = field(default_factory=list)
    handoff: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    prefill_alone: list[float] = field(default_factory=list)
    wire: list[float] = field(default_factory=list)


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered) + 0.5) - 1))]


class KvBench:
    """Runs rounds in changing order: for each transport one prefill alone, with everything that follows it, and one streamed."""

    def __init__(self, source: Source, target: TargetProcess) -> None:
        self._source = source
        self._target = target
        self._order = random.Random(0)

    def measure(
        self, tokens: int, transports: Sequence[str], runs: int, note: Callable[[str], None]
    ) -> list[dict[str, Any]]:
        """One row a transport."""
        samples = {name: Samples() for name in transports}
        for name in transports:  # connections, page faults and caches are not what is measured
            self._streamed(tokens, name, Samples())
        for run in range(runs):
            steps = [(step, name) for step in (self._alone, self._streamed) for name in transports]
            self._order.shuffle(steps)
            for step, name in steps:
                step(tokens, name, samples[name])
            note(f"{tokens} tokens: run {run + 1} of {runs}")
        return [self._row(tokens, name, samples[name]) for name in transports]

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
        prefilled = source.prefill(tokens, transport, transfer)
        ready_ns = self._target.wait("completed", transfer).at_ns
        prefilled.release()
        samples.exposed.append((ready_ns - prefilled.last_layer_ns) * NS)
        samples.prefill.append((prefilled.last_layer_ns - prefilled.start_ns) * NS)

    def _alone(self, tokens: int, transport: str, samples: Samples) -> None:
        """A prefill that streams nothing and hands off zero bytes; then the whole transfer, at once and frame by frame."""
        source, target = self._source, self._target
        zero = source.open(transport, target, tokens, tokens)
        prefilled = source.prefill(tokens, transport, zero)
        ready_ns = target.wait("completed", zero).at_ns
        samples.prefill_alone.append((prefilled.last_layer_ns - prefilled.start_ns) * NS)
        samples.zero.append((ready_ns - prefilled.last_layer_ns) * NS)
        empty = source.open(transport, target, tokens, tokens)
        begin_ns = source.hand_off(transport, empty)
        samples.handoff.append((target.wait("completed", empty).at_ns - begin_ns) * NS)
        late = source.open(transport, target, tokens)
        begin_ns = source.send(transport, late, prefilled)
        samples.baseline.append((target.wait("completed", late).at_ns - begin_ns) * NS)
        samples.wire.append(self._wire(transport, tokens, prefilled))
        prefilled.release()

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

    def _row(self, tokens: int, transport: str, samples: Samples) -> dict[str, Any]:
        if self._source.failures:
            raise BenchFailed(f"a transfer failed: {self._source.failures[0].reason}")
        zero, handoff = statistics.median(samples.zero), statistics.median(samples.handoff)
        exposed = [value - zero for value in samples.exposed]
        baseline = statistics.median(samples.baseline) - handoff
        # What two medians of zero-byte transfers may differ by: the spread of one, both ways.
        noise = (percentile(samples.zero, 0.9) - percentile(samples.zero, 0.1)) / 2
        median = statistics.median(exposed)
        alone = statistics.median(samples.prefill_alone)
        size = tokens * self._source.token_bytes
        return {
            "transport": transport,
            "tokens": tokens,
            "bytes": size,
            "wire_s": statistics.median(samples.wire),
            "exposed_s": median,
            "exposed_p90_s": percentile(exposed, 0.9),
            "noise_s": noise,
            "baseline_exposed_s": baseline,
            "hidden_share": 1 - median / baseline,
            "prefill_s": alone,
            "below_noise": abs(median) <= noise,
            "prefill_slowdown": statistics.median(samples.prefill) / alone - 1,
            "burst_gb_s": size / statistics.median(samples.baseline) / 1e9,
            "runs": len(samples.exposed),
        }
