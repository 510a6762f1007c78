"""Linear layers: bits of every tile and of cuBLAS against the canon, then speed by shape and batch.

``python -m benchmarks.gpu_linear --out DIR`` on a GPU; ``--warm I N`` only fills the compile cache (run several at once).
"""

import argparse
import itertools
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_timing import Report, copy_rate, graph_time_us
from relay.kernels.cuda import linear as module
from relay.kernels.cuda.launch import pdl_enabled
from relay.kernels.cuda.linear import LinearTile as T
from relay.kernels.cuda.linear import linear

SHAPES = {  # outputs, depth
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "lm_head": (128256, 4096),
}
SMALL = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "lm_head": (49152, 576)}
TILES = {
    16: [
        T(16, 32, 128, 4, 5),
        T(16, 32, 128, 4, 8),
        T(16, 16, 256, 2, 5),
        T(16, 32, 256, 4, 4),
        T(16, 64, 128, 4, 5),
        T(16, 32, 128, 4, 6, tma=True),
        T(16, 32, 128, 4, 9, tma=True),
        T(16, 16, 256, 2, 6, tma=True),
        T(16, 32, 256, 4, 4, tma=True),
        T(16, 32, 256, 4, 6, tma=True),
        T(16, 64, 128, 4, 5, tma=True),
        T(16, 64, 128, 4, 5, swap=True, tma=True),
        T(16, 128, 64, 4, 6, swap=True, tma=True),
        T(16, 16, 512, 2, 4, tma=True),
    ],
    32: [
        T(32, 32, 128, 4, 6, tma=True),
        T(32, 32, 256, 4, 4, tma=True),
        T(32, 64, 128, 4, 5, tma=True),
        T(32, 64, 128, 4, 5, swap=True, tma=True),
        T(32, 128, 64, 4, 5, swap=True, tma=True),
        T(32, 32, 128, 4, 5),
    ],
    64: [
        T(64, 32, 128, 4, 6, tma=True),
        T(64, 64, 128, 4, 4, tma=True),
        T(64, 64, 64, 4, 6, tma=True),
        T(64, 128, 64, 4, 5, tma=True),
        T(64, 32, 256, 4, 4, tma=True),
        T(64, 64, 128, 4, 5),
        T(64, 128, 64, 8, 5, swap=True, tma=True),
        T(32, 64, 128, 4, 5, tma=True),
        T(32, 128, 64, 4, 5, swap=True, tma=True),
    ],
    128: [
        T(128, 32, 128, 4, 5, tma=True),
        T(128, 64, 64, 4, 6, tma=True),
        T(128, 64, 128, 8, 4, tma=True),
        T(128, 128, 64, 8, 4, tma=True),
        T(64, 64, 128, 4, 4, tma=True),
        T(64, 128, 64, 4, 5, tma=True),
    ],
    256: [
        T(128, 64, 64, 4, 6, tma=True),
        T(128, 128, 64, 8, 4, tma=True),
        T(128, 256, 64, 8, 4, tma=True),
        T(64, 128, 64, 4, 5, tma=True),
    ],
}
LIBRARIES = ("cublas", "cublaslt", "cublaslt-nosplit")
REFERENCE = T(128, 128, 64, 8, 4)
BATCHES = {1: 16, 8: 16, 16: 16, 32: 32, 64: 64, 128: 128, 256: 256}


def wide_values(rows: int, columns: int) -> torch.Tensor:
    """bf16 values over several binades, so that a different order of additions shows in the result."""
    x = torch.randn(rows, columns, device="cuda")
    return (x * torch.exp2(torch.randint(-3, 4, (1, columns), device="cuda").float())).to(torch.bfloat16)


def choose_library(name: str) -> None:
    """ "cublas", "cublaslt" or "cublaslt-nosplit"; only the last may not split K."""
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = True
    torch.backends.cuda.preferred_blas_library(name.split("-")[0])
    if name.endswith("nosplit"):
        matmul.allow_bf16_reduced_precision_reduction = (False, False)


def cublas(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> None:
    torch.mm(x, w.t(), out=y)


def warm(part: int, parts: int) -> None:
    tiles = list(dict.fromkeys(itertools.chain(*TILES.values(), [REFERENCE])))
    w = wide_values(512, 4096)
    for index, tile in enumerate(tiles):
        if index % parts == part:
            for dtype in (torch.bfloat16, torch.float32):
                try:
                    x = wide_values(tile.tokens, 4096)
                    linear(x, w, torch.empty(tile.tokens, 512, device="cuda", dtype=dtype), tile)
                except Exception as error:
                    print(tile, type(error).__name__, str(error)[:100])


def check_bits(report: Report) -> None:
    """P1 and P2 on fp32 results; cuBLAS on bf16 results by M."""
    tiles: dict[str, Any] = {}
    for name in ("o", "down"):
        outputs, depth = SHAPES[name]
        w = wide_values(outputs, depth)
        x = wide_values(257, depth)
        reference = torch.empty(257, outputs, device="cuda", dtype=torch.float32)
        linear(x, w, reference, REFERENCE)
        exact = x[:64].double() @ w.double().t()
        error = ((reference[:64] - exact).norm() / exact.norm()).item()
        different: list[str] = []
        checked = 0
        for tile in dict.fromkeys(itertools.chain(*TILES.values())):
            for m in (1, 7, 16, 64, 257):
                y = torch.full((m, outputs), float("nan"), device="cuda", dtype=torch.float32)
                try:
                    linear(x[257 - m :].contiguous(), w, y, tile)
                except Exception as fault:
                    different.append(f"{tile} {type(fault).__name__}: {str(fault)[:80]}")
                    break
                checked += 1
                if not torch.equal(y, reference[257 - m :]):
                    different.append(f"{tile} M={m}")
        tiles[name] = {"checked": checked, "different": different, "relative_error": error}
        print(name, tiles[name], flush=True)
    report.put("tile_bits", tiles)
    libraries: dict[str, Any] = {}
    sizes = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096)
    for label, shapes in (("8b", SHAPES), ("smollm2", SMALL)):
        for name, (outputs, depth) in shapes.items():
            w = wide_values(outputs, depth)
            x = wide_values(sizes[-1], depth)
            top = 1024 if name == "lm_head" else sizes[-1]
            reference = torch.empty(top, outputs, device="cuda", dtype=torch.bfloat16)
            linear(x[:top], w, reference, REFERENCE)
            row: dict[str, list[int]] = {}
            for library in LIBRARIES:
                choose_library(library)
                bad = []
                for m in sizes:
                    if m > top:
                        continue
                    y = torch.empty(m, outputs, device="cuda", dtype=torch.bfloat16)
                    cublas(x[:m], w, y)
                    if not torch.equal(y, reference[:m]):
                        bad.append(m)
                row[library] = bad
            libraries[f"{label}/{name}"] = row
            del w, x, reference
    choose_library("cublas")
    report.put("library_differs_at", libraries)


def sweep(report: Report, shapes: dict[str, tuple[int, int]], label: str, batches: tuple[int, ...]) -> None:
    """Time of one product per choice, weights rotated past the L2."""
    table: dict[str, Any] = {}
    for name, (outputs, depth) in shapes.items():
        size = outputs * depth * 2
        copies = max(2, min(40, -(-(600 << 20) // size)))
        weights = [wide_values(outputs, depth) for _ in range(copies)]
        for m in batches:
            x = wide_values(m, depth)
            y = torch.empty(m, outputs, device="cuda", dtype=torch.bfloat16)
            row: dict[str, float] = {}
            for library in LIBRARIES:
                choose_library(library)
                try:
                    row[library] = graph_time_us(lambda: [cublas(x, w, y) for w in weights], copies)
                except Exception as error:
                    print(library, name, m, str(error)[:100])
            choose_library("cublas")
            for tile in TILES[BATCHES[m]]:
                try:
                    row[str(tile)[10:]] = graph_time_us(lambda: [linear(x, w, y, tile) for w in weights], copies)
                except Exception as error:
                    row[str(tile)[10:]] = float("inf")
                    print(tile, name, m, type(error).__name__, str(error)[:100])
            best = sorted(row.items(), key=lambda item: item[1])[:4]
            table[f"{name}/{m}"] = {k: round(v, 2) for k, v in row.items()}
            floor = (size + 2 * m * (outputs + depth)) / report.data["copy_bytes_per_s"] * 1e6
            print(
                f"{label} {name} M={m} floor {floor:.1f} cublas {row['cublas']:.1f}",
                [(k, round(v, 1)) for k, v in best],
            )
        weights = []
    report.put(f"linear_us/{label}", table)


def tall(report: Report) -> None:
    """M >= 2,048: TFLOP/s of F.linear and of our own tiles."""
    table: dict[str, Any] = {}
    for name, (outputs, depth) in list(SHAPES.items())[:4]:
        w = [wide_values(outputs, depth) for _ in range(2)]
        for m in (512, 2048, 8192, 16384):
            x = wide_values(m, depth)
            y = torch.empty(m, outputs, device="cuda", dtype=torch.bfloat16)
            row = {}
            for library in LIBRARIES:
                choose_library(library)
                row[library] = graph_time_us(lambda: [cublas(x, v, y) for v in w], 2, 9)
            choose_library("cublas")
            for tile in (T(128, 256, 64, 8, 4, tma=True), T(128, 128, 64, 8, 4, tma=True)):
                row[str(tile)[10:]] = graph_time_us(lambda: [linear(x, v, y, tile) for v in w], 2, 5)
            table[f"{name}/{m}"] = {k: round(2 * m * outputs * depth / v / 1e6, 1) for k, v in row.items()}
            print("tall", name, m, table[f"{name}/{m}"], flush=True)
    report.put("linear_tflops", table)


def decode_step(report: Report) -> None:
    """All 128 linear layers of one 8B decode step in one graph: cuBLAS default, and the best exact choice by shape."""
    layers = 32
    names = list(SHAPES)[:4]
    weights = [{n: wide_values(*SHAPES[n]) for n in names} for _ in range(layers)]
    bytes_read = sum(w.numel() * 2 for w in weights[0].values()) * layers
    bad = report.data["library_differs_at"]
    times = report.data["linear_us/8b"]
    result: dict[str, Any] = {"limit_us": bytes_read / report.data["copy_bytes_per_s"] * 1e6}
    for m in (1, 8, 16, 64):
        xs = {n: wide_values(m, SHAPES[n][1]) for n in names}
        ys = {n: torch.empty(m, SHAPES[n][0], device="cuda", dtype=torch.bfloat16) for n in names}
        choice: dict[str, str] = {}
        for n in names:
            row = times[f"{n}/{m}"]
            allowed = {k: v for k, v in row.items() if not k.startswith("cublas") or m not in bad[f"8b/{n}"][k]}
            choice[n] = min(allowed, key=lambda k: allowed[k])
        own = {
            n: min((k for k in times[f"{n}/{m}"] if not k.startswith("cublas")), key=lambda k: times[f"{n}/{m}"][k])
            for n in names
        }

        def step(pick: dict[str, str], prefetch: int) -> None:
            for layer in weights:
                for n in names:
                    kind = pick[n]
                    if kind.startswith("cublas"):
                        choose_library(kind)
                        cublas(xs[n], layer[n], ys[n])
                    else:
                        tile = eval_tile(kind, prefetch)
                        linear(xs[n], layer[n], ys[n], tile)
            choose_library("cublas")

        row = {"cublas": graph_time_us(lambda: step(dict.fromkeys(names, "cublas"), 0))}
        row["cublaslt-nosplit"] = graph_time_us(lambda: step(dict.fromkeys(names, "cublaslt-nosplit"), 0))
        row["best exact"] = graph_time_us(lambda: step(choice, 0))
        row["best Triton"] = graph_time_us(lambda: step(own, 0))
        for prefetch in (512, 1024, 2048):
            row[f"best Triton prefetch {prefetch}"] = graph_time_us(lambda: step(own, prefetch))
        row["best exact prefetch 1024"] = graph_time_us(lambda: step(choice, 1024))
        kept = pdl_enabled
        module.pdl_enabled = lambda: False  # type: ignore[attr-defined]
        row["best Triton, no dependent launch"] = graph_time_us(lambda: step(own, 0))
        module.pdl_enabled = kept  # type: ignore[attr-defined]
        result[str(m)] = {"us": {k: round(v, 1) for k, v in row.items()}, "choice": choice, "own": own}
        print("decode step", m, result[str(m)]["us"], choice, flush=True)
    report.put("decode_step_linears", result)


def eval_tile(text: str, prefetch: int) -> T:
    """The tile whose name is ``text``, with another prefetch."""
    from dataclasses import replace

    for tile in itertools.chain(*TILES.values()):
        if str(tile)[10:] == text:
            return replace(tile, prefetch=prefetch)
    raise KeyError(text)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tall", action="store_true", help="only the large batches")
    parser.add_argument("--warm", type=int, nargs=2)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.warm:
        warm(*arguments.warm)
        return
    report = Report(arguments.out / ("linear_tall.json" if arguments.tall else "linear.json"))
    report.put("copy_bytes_per_s", copy_rate())
    if arguments.tall:
        tall(report)
        return
    check_bits(report)
    sweep(report, SHAPES, "8b", (1, 8, 16, 32, 64, 128, 256))
    decode_step(report)
    sweep(report, SMALL, "smollm2", (1, 64))
    tall(report)


if __name__ == "__main__":
    main()
