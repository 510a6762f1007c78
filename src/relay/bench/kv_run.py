"""The whole of ``relay bench kv``: engines, target process, rounds, ceilings, one document."""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

from relay.bench.kv import KvBench, Timeline
from relay.bench.kv_ceilings import Ceilings
from relay.bench.kv_source import INCARNATION, Source, TargetProcess
from relay.models.loaded import LoadedModel
from relay.transfer.contract import Layout
from relay.worker.engine_process import SWITCH_INTERVAL_S
from relay.worker.spec import WorkerSpec

TIMELINE_TOKENS = 2048
SPARE_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class KvSettings:
    """``threads`` of the prefill engine, 0: all cores. ``seconds``: see ``KvBench.measure``."""

    tokens: list[int]
    transports: list[str]
    dtypes: list[str]
    runs: int
    seconds: float
    threads: int = 0


def run_kv(
    model: LoadedModel, settings: KvSettings, note: Callable[[str], None]
) -> tuple[dict[str, Any], list[Timeline]]:
    """(document, timelines of the run nearest to ``TIMELINE_TOKENS``). Raises RelayError."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as an engine does
    rows: list[dict[str, Any]] = []
    ceilings: list[dict[str, Any]] = []
    timelines: list[Timeline] = []
    for dtype in settings.dtypes:
        spec = _spec(model, settings, cast(Literal["float32", "bfloat16"], dtype))
        pipes = Ceilings()
        source = Source(model, spec("bench-p", settings.threads))
        target = TargetProcess(spec("bench-d", 1), pipes.descriptors)
        try:
            bench = KvBench(source, target, pipes)
            for tokens in settings.tokens:
                for row in bench.measure(tokens, settings.transports, settings.runs, settings.seconds, note):
                    rows.append({**row, "kv_cache_dtype": dtype})
            if not ceilings:
                largest = min(max(settings.tokens), TIMELINE_TOKENS) * source.token_bytes
                ceilings = pipes.measure(target, largest, settings.runs, source.checksum)
                nearest = min(settings.tokens, key=lambda tokens: abs(tokens - TIMELINE_TOKENS))
                timelines = [bench.timeline(nearest, name) for name in settings.transports]
        finally:
            target.close()
            source.close()
            pipes.close()
    document = {"model": model.name, "settings": asdict(settings), "rows": rows, "ceilings": ceilings}
    return document, timelines


def _spec(
    model: LoadedModel, settings: KvSettings, dtype: Literal["float32", "bfloat16"]
) -> Callable[[str, int], WorkerSpec]:
    """Specs as ``relay serve`` makes them, with a pool for the longest prompt and a little more."""
    geometry = model.program.geometry
    layout = Layout(geometry.num_layers, geometry.num_kv_heads, geometry.head_dim, dtype)
    block_size = 16
    blocks = -(-max(settings.tokens) // block_size) + SPARE_BLOCKS
    memory = blocks * block_size * layout.token_bytes * geometry.num_layers

    def spec(name: str, threads: int) -> WorkerSpec:
        return WorkerSpec(
            worker=name,
            incarnation=INCARNATION,
            gateways=[],
            pack_path=str(model.pack.path),
            model_digest=model.digest,
            threads=threads,
            kv_cache_memory_bytes=memory,
            kv_cache_dtype=dtype,
            block_size=block_size,
            growth_tokens=0,
        )

    return spec
