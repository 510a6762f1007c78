"""Linears with int8 weights: bits of every tile against the 16-bit accumulators, then the fastest tile by shape and rows.

``python -m benchmarks.gpu_int8 --out DIR`` on a GPU: about a minute, of which compiling (in processes of its own) is a third.
"""

import argparse
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_linear import SHAPES
from benchmarks.gpu_timing import Report, copy_rate, graph_time_us
from relay.kernels.cuda.int8_few import FewTile as F
from relay.kernels.cuda.linear import LinearTile, linear
from relay.kernels.cuda.linear_choice import LinearLayer, probing_rows, use_exact_library
from relay.kernels.cuda.linear_int8 import Int8Tile as T
from relay.kernels.cuda.linear_int8 import linear_int8, pack_codes, tile_for

NAMES = ("qkv", "o", "gate_up", "down")
ROWS = (1, 8, 16, 32, 64, 128)
TILES: dict[int, list[F | T]] = {
    8: [
        F(8, 32, 256, 6, 2),
        F(8, 32, 256, 8, 2),
        F(8, 32, 256, 12, 2),
        F(8, 32, 512, 4, 2),
        F(8, 32, 256, 8, 2, early=False),
        F(8, 16, 256, 8, 1),
        F(8, 16, 512, 6, 1),
        F(8, 64, 256, 4, 4),
        F(8, 64, 256, 8, 4),
        F(8, 128, 256, 5, 8),
        F(8, 64, 256, 4, 4, wgmma=True),
        F(8, 64, 256, 8, 4, wgmma=True),
        F(8, 128, 128, 8, 8, wgmma=True),
        F(8, 32, 256, 6, 2, tma=True),
        F(8, 32, 512, 5, 2, tma=True),
        F(8, 32, 512, 8, 2, tma=True),
        F(8, 16, 512, 5, 1, tma=True),
        F(8, 64, 256, 5, 4, tma=True),
        F(8, 64, 512, 5, 4, tma=True),
        F(8, 64, 512, 5, 4, tma=True, early=False),
        F(8, 64, 512, 5, 4, tma=True, wgmma=True),
        F(8, 128, 256, 5, 8, tma=True, wgmma=True),
        T(16, 64, 256, 4, 5),
    ],
    16: [
        F(16, 32, 256, 4, 2),
        F(16, 32, 256, 6, 2),
        F(16, 32, 256, 10, 2),
        F(16, 32, 512, 4, 2),
        F(16, 16, 256, 6, 1),
        F(16, 64, 256, 4, 4),
        F(16, 64, 128, 8, 4),
        F(16, 128, 128, 6, 8),
        F(16, 64, 256, 4, 4, wgmma=True),
        F(16, 64, 256, 8, 4, wgmma=True),
        F(16, 128, 128, 8, 8, wgmma=True),
        F(16, 32, 256, 6, 2, tma=True),
        F(16, 32, 512, 6, 2, tma=True),
        F(16, 64, 256, 4, 4, tma=True),
        F(16, 64, 512, 4, 4, tma=True),
        F(16, 64, 512, 4, 4, tma=True, wgmma=True),
        F(16, 128, 256, 5, 8, tma=True, wgmma=True),
        T(16, 64, 256, 4, 5),
    ],
    32: [
        F(32, 32, 128, 6, 2),
        F(32, 32, 256, 5, 2),
        F(32, 64, 128, 6, 4),
        F(32, 128, 128, 5, 8),
        F(32, 64, 128, 6, 4, wgmma=True),
        F(32, 64, 256, 5, 4, wgmma=True),
        F(32, 128, 128, 6, 8, wgmma=True),
        F(32, 32, 256, 6, 2, tma=True),
        F(32, 64, 256, 6, 4, tma=True),
        F(32, 64, 256, 6, 4, tma=True, wgmma=True),
        F(32, 128, 256, 4, 8, tma=True, wgmma=True),
        T(32, 64, 128, 4, 6),
    ],
    64: [
        F(64, 32, 128, 6, 2),
        F(64, 64, 128, 5, 4),
        F(64, 64, 128, 6, 4, wgmma=True),
        F(64, 64, 256, 4, 4, wgmma=True),
        F(64, 128, 128, 6, 8, wgmma=True),
        F(64, 32, 128, 8, 2, tma=True),
        F(64, 64, 256, 4, 4, tma=True, wgmma=True),
        F(64, 128, 128, 6, 8, tma=True, wgmma=True),
        F(64, 128, 128, 4, 8, tma=True, wgmma=True),
        T(64, 64, 128, 4, 6),
        T(64, 128, 128, 8, 5),
    ],
    128: [
        F(128, 64, 128, 4, 4, wgmma=True),
        F(128, 128, 128, 4, 8, wgmma=True),
        F(128, 128, 64, 6, 8, wgmma=True),
        F(64, 128, 128, 6, 8, wgmma=True),
        F(128, 64, 128, 5, 4, tma=True, wgmma=True),
        F(128, 128, 128, 4, 8, tma=True, wgmma=True),
        F(64, 64, 256, 4, 4, tma=True, wgmma=True),
        T(128, 128, 64, 8, 4),
        T(64, 64, 128, 4, 5),
    ],
}
ALL = [tile for tiles in TILES.values() for tile in tiles]
ALL += [
    F(8, 64, 256, 6, 4),
    F(16, 64, 256, 6, 4),
    F(32, 64, 128, 6, 4),
    F(64, 64, 128, 6, 4),
]  # what tile_for gives now
FLOAT16 = [F(8, 32, 256, 6, 2), F(8, 32, 512, 5, 2, tma=True), F(64, 64, 128, 6, 4, wgmma=True), T(128, 128, 64, 8, 4)]
RAGGED = FLOAT16 + [tile for tile in dict.fromkeys(ALL) if isinstance(tile, F) and tile.tma]
PROCESSES = 12


def operands(outputs: int, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.randint(-127, 128, (outputs, depth), dtype=torch.int8, device="cuda")
    return codes, torch.rand(outputs, device="cuda") + 0.5


def wanted() -> list[tuple[F | T, torch.dtype, torch.dtype]]:
    """What is compiled: tile, type of x, type of y."""
    made: list[tuple[F | T, torch.dtype, torch.dtype]] = []
    for tile in sorted(dict.fromkeys(ALL), key=lambda tile: getattr(tile, "tma", False)):
        made += [(tile, torch.bfloat16, torch.bfloat16), (tile, torch.bfloat16, torch.float32)]
        made += [(tile, torch.float16, torch.float32)] * (tile in FLOAT16)
    return made


def warm(part: int) -> None:
    """Fill the compile cache with this process's share of the kernels, and run each once: a line for each that ended."""
    codes, scales = operands(512, 4096)
    packed = pack_codes(codes)
    for tile, kind, out in wanted()[part::PROCESSES]:
        x = probing_rows(tile.tokens, 4096, codes.device, kind)
        y = torch.empty(tile.tokens, 512, device="cuda", dtype=out)
        try:
            linear_int8(x, packed, scales, y, tile)
            if tile in RAGGED and out == torch.float32:  # other constants: compiled once more
                codes_, scales_ = operands(1008, 1120)
                x = probing_rows(tile.tokens, 1120, codes.device, kind)
                linear_int8(x, pack_codes(codes_), scales_, torch.empty(tile.tokens, 1008, device="cuda"), tile)
            torch.cuda.synchronize()
            print("ended", tile, flush=True)
        except Exception as error:
            print(tile, kind, type(error).__name__, str(error)[:200], file=sys.stderr, flush=True)


def usable(seconds: float = 75) -> set[str]:
    """Names of the tiles whose kernels compile, run and end; a process that hangs is killed."""
    command = [sys.executable, "-m", "benchmarks.gpu_int8", "--warm"]
    processes = [
        subprocess.Popen([*command, str(part)], stdout=subprocess.PIPE, text=True) for part in range(PROCESSES)
    ]
    until = time.monotonic() + seconds
    ended: Counter[str] = Counter()
    for process in processes:
        try:
            text = process.communicate(timeout=max(1, until - time.monotonic()))[0]
        except subprocess.TimeoutExpired:
            process.kill()
            text = process.communicate()[0]
        ended.update(line[6:] for line in text.splitlines() if line.startswith("ended "))
    needed = Counter(str(tile) for tile, _, _ in wanted())
    left_out = [name for name in needed if ended[name] < needed[name]]
    print(f"{len(needed) - len(left_out)} of {len(needed)} tiles run; left out:", *left_out, flush=True)
    return {name for name in needed if name not in left_out}


def check_bits(report: Report, good: set[str]) -> set[str]:
    """fp32 results of every tile against the 16-bit kernel's accumulators times the scales; the names of those equal."""
    wrong: list[str] = []
    checked = 0
    failed: set[F | T] = set()
    for name, (outputs, depth) in {**{n: SHAPES[n] for n in ("o", "down")}, "ragged": (1008, 1120)}.items():
        codes, scales = operands(outputs, depth)
        packed = pack_codes(codes)
        for kind, tiles in ((torch.bfloat16, list(dict.fromkeys(ALL))), (torch.float16, FLOAT16)):
            x = probing_rows(160, depth, codes.device, kind)
            sums = torch.empty(160, outputs, device="cuda")
            linear(x, codes.to(kind), sums, LinearTile(64, 64, 64, 4, 3))
            for tile in tiles:
                if str(tile) not in good or (name == "ragged" and tile not in RAGGED):
                    continue
                for rows in (1, 3, 8, 16, 17, 33, 64, 160):
                    y = torch.full((rows, outputs), float("nan"), device="cuda")
                    try:
                        linear_int8(x[160 - rows :], packed, scales, y, tile)
                    except Exception as error:
                        wrong.append(f"{name} {tile} {type(error).__name__}: {str(error)[:120]}")
                        failed.add(tile)
                        break
                    checked += 1
                    if not torch.equal(y, sums[160 - rows :] * scales):
                        wrong.append(f"{name} {kind} {rows} {tile}")
                        failed.add(tile)
    print(f"bits: {checked} products, {len(wrong)} wrong", *wrong[:12], sep="\n", flush=True)
    report.put("bits", {"checked": checked, "wrong": wrong, "tiles": len(good)})
    return good - {str(tile) for tile in failed}


def sweep(report: Report, good: set[str]) -> dict[str, dict[str, float]]:
    """Times by shape, rows and tile, weights rotated past the L2."""
    table: dict[str, dict[str, float]] = {}
    for name in NAMES:
        outputs, depth = SHAPES[name]
        copies = max(2, -(-(200 << 20) // (outputs * depth)))
        w16 = [torch.randn(outputs, depth, device="cuda").bfloat16() for _ in range(copies)]
        made = [operands(outputs, depth) for _ in range(copies)]
        w8 = [(pack_codes(codes), scales) for codes, scales in made]
        layer = LinearLayer(outputs, depth)
        layer.test(w16[0], max(ROWS))
        x = probing_rows(256, depth, w16[0].device)
        y = torch.empty(256, outputs, dtype=torch.bfloat16, device="cuda")
        for rows in ROWS:
            row = {"bf16": graph_time_us(lambda: [layer(x, w, y, rows) for w in w16], copies)}
            for tile in [*TILES[max(8, rows)], tile_for(rows, outputs)]:
                if str(tile) not in row and str(tile) in good:
                    try:
                        row[str(tile)] = graph_time_us(
                            lambda: [linear_int8(x[:rows], w, s, y[:rows], tile) for w, s in w8], copies
                        )
                    except Exception as error:
                        print(name, rows, tile, type(error).__name__, str(error)[:100], flush=True)
            table[f"{name}/{rows}"] = {key: round(us, 2) for key, us in row.items()}
            best = sorted((us, key) for key, us in row.items() if key != "bf16")[:4]
            now = row.get(str(tile_for(rows, outputs)), 0.0)
            floor = outputs * depth / report.data["copy_bytes_per_s"] * 1e6
            print(
                f"{name:8}{rows:4} rows: floor {floor:5.1f} bf16 {row['bf16']:6.1f} now {now:6.1f}",
                *(f"| {us:.1f} {short(key)}" for us, key in best),
                flush=True,
            )
        w16, made, w8 = [], [], []
    report.put("int8_us", table)
    return table


def short(name: str) -> str:
    """A tile's fields without their names."""
    kind, fields = name.rstrip(")").split("(")
    return kind[0] + "(" + ",".join(part.split("=")[1] for part in fields.split(", ")) + ")"


def summary(report: Report, table: dict[str, dict[str, float]]) -> None:
    """Per layer: the best tile of each shape, and one tile for all shapes, next to 16 bits."""
    found: dict[int, Any] = {}
    for rows in ROWS:
        shapes = [table[f"{name}/{rows}"] for name in NAMES]
        tiles = [key for key in shapes[0] if key != "bf16" and all(key in times for times in shapes)]
        best = sum(min(us for key, us in times.items() if key != "bf16") for times in shapes)
        single = min(tiles, key=lambda key: sum(times[key] for times in shapes))
        found[rows] = {
            "bf16": round(sum(times["bf16"] for times in shapes), 1),
            "best": round(best, 1),
            "one_tile": round(sum(times[single] for times in shapes), 1),
            "tile": single,
        }
        print("layer", rows, found[rows], flush=True)
    report.put("layer_us", found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--warm", type=int, help="only compile this share of the kernels")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.warm is not None:
        warm(arguments.warm)
        return
    began = time.monotonic()
    good = usable()
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    report = Report(arguments.out / "int8.json")
    report.put("copy_bytes_per_s", copy_rate())
    use_exact_library()
    exact = check_bits(report, good)
    summary(report, sweep(report, exact))


if __name__ == "__main__":
    main()
