"""Linears with int8 weights: bits of every tile against the 16-bit accumulators, then times by shape and rows beside 16 bits.

``python -m benchmarks.gpu_int8 --out DIR`` on a Hopper GPU: about 15 s, most of it compiling (in processes of its own).
"""

import argparse
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import torch

from benchmarks.gpu_linear import SHAPES
from benchmarks.gpu_timing import Report, copy_rate, graph_time_us
from relay.kernels.cuda.int8_product import Int8Tile as T
from relay.kernels.cuda.linear import LinearTile, linear
from relay.kernels.cuda.linear_choice import LinearLayer, probing_rows, use_exact_library
from relay.kernels.cuda.linear_int8 import linear_int8, pack_codes, tile_elsewhere, tile_for

NAMES = ("qkv", "o", "gate_up", "down")
ROWS = (1, 8, 16, 32, 64, 128)
TILES = {  # what is chosen, then neighbours of it
    8: [T(8, 32, 512, 4), T(8, 64, 256, 4), T(8, 32, 256, 8), T(8, 64, 512, 5, hopper=True)],
    16: [T(16, 64, 512, 4, hopper=True), T(16, 64, 256, 4), T(16, 32, 256, 6), T(16, 128, 256, 5, hopper=True)],
    32: [T(32, 64, 256, 6, hopper=True), T(32, 128, 256, 4, hopper=True), T(32, 64, 128, 6)],
    64: [T(64, 64, 256, 4, hopper=True), T(64, 128, 128, 4, hopper=True), T(64, 128, 128, 6, hopper=True)],
    128: [T(64, 64, 256, 4, hopper=True), T(128, 128, 128, 4, hopper=True), T(128, 64, 128, 5, hopper=True)],
}
ALL = list(dict.fromkeys([*(tile for tiles in TILES.values() for tile in tiles), *map(tile_elsewhere, ROWS)]))
TYPES = (torch.bfloat16, torch.float16)
PROCESSES = 12


def operands(outputs: int, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.randint(-127, 128, (outputs, depth), dtype=torch.int8, device="cuda")
    return codes, torch.rand(outputs, device="cuda") + 0.5


def wanted() -> list[tuple[T, torch.dtype, torch.dtype]]:
    """What is compiled: tile, type of x, type of y."""
    kinds = [(torch.bfloat16, torch.bfloat16), *((kind, torch.float32) for kind in TYPES)]
    return [(tile, *pair) for tile in ALL for pair in kinds]


def warm(part: int) -> None:
    """Fill the compile cache with this process's share of the kernels, and run each once: a line for each that ended."""
    codes, scales = operands(512, 4096)
    packed = pack_codes(codes)
    for tile, kind, out in wanted()[part::PROCESSES]:
        x = probing_rows(tile.tokens, 4096, codes.device, kind)
        y = torch.empty(tile.tokens, 512, device="cuda", dtype=out)
        try:
            linear_int8(x, packed, scales, y, tile)
            if out == torch.float32:  # other constants: compiled once more
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
    failed: set[T] = set()
    for name, (outputs, depth) in {**{n: SHAPES[n] for n in ("o", "down")}, "ragged": (1008, 1120)}.items():
        codes, scales = operands(outputs, depth)
        packed = pack_codes(codes)
        for kind in TYPES:
            x = probing_rows(160, depth, codes.device, kind)
            sums = torch.empty(160, outputs, device="cuda")
            linear(x, codes.to(kind), sums, LinearTile(64, 64, 64, 4, 3))
            for tile in ALL:
                if str(tile) not in good:
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
            floor = outputs * depth / report.data["copy_bytes_per_s"] * 1e6
            times = sorted((us, key) for key, us in row.items() if key != "bf16")
            print(f"{name:8}{rows:4} rows: floor {floor:5.1f} bf16 {row['bf16']:6.1f}", flush=True)
            print(*(f"  {us:6.2f} {key}" for us, key in times), sep="\n", flush=True)
        w16, made, w8 = [], [], []
    report.put("int8_us", table)
    return table


def summary(report: Report, table: dict[str, dict[str, float]]) -> None:
    """Per layer: the best tile of each shape and the chosen ones, next to 16 bits."""
    found: dict[int, dict[str, float]] = {}
    for rows in ROWS:
        sums = dict.fromkeys(("bf16", "best", "chosen"), 0.0)
        for name in NAMES:
            times = table[f"{name}/{rows}"]
            sums["bf16"] += times["bf16"]
            sums["best"] += min(us for key, us in times.items() if key != "bf16")
            sums["chosen"] += times[str(tile_for(rows, SHAPES[name][0]))]
        found[rows] = {key: round(us, 1) for key, us in sums.items()}
        print("layer", rows, found[rows], flush=True)
    report.put("layer_us", found)
    report.put(
        "bf16_faster_from", min((rows for rows in ROWS if found[rows]["chosen"] >= found[rows]["bf16"]), default=None)
    )


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
    table = sweep(report, exact)
    if failed := [tile for tile in ALL if str(tile) not in exact]:
        sys.exit(f"these failed, no sums without them: {failed}")
    summary(report, table)


if __name__ == "__main__":
    main()
