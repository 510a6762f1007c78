"""Attention: P3 on every position of thousands of rows, then speed against torch SDPA and the device copy.

``python -m benchmarks.gpu_attention --out DIR`` on a GPU. With ``--hopper`` only the Hopper prefill kernel, in bf16, then in fp16
(``--dtype`` for one of them); exit status 1 if any row differs.
"""

import argparse
import itertools
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_timing import Report, copy_rate, graph_time_us
from relay.kernels.cuda.attention_decode import decode_attention, decode_scratch, split_count
from relay.kernels.cuda.attention_prefill import prefill_attention, prefill_work

PREFILL = [(64, 4, 2), (128, 8, 2)]
DECODE = [(16, 4, 3), (16, 4, 7), (16, 1, 3), (64, 4, 3)]


class Case:
    """One sequence of ``length`` tokens in a shuffled cache whose free memory holds NaN."""

    def __init__(
        self, group: int, kv_heads: int, dim: int, block: int, length: int, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.q_heads, self.kv_heads, self.dim, self.length = group * kv_heads, kv_heads, dim, length
        blocks = -(-length // block)
        shape = (blocks + 3, kv_heads, block, dim)
        nan = float("nan")
        self.k = torch.full(shape, nan, device="cuda", dtype=dtype)
        self.v = torch.full(shape, nan, device="cuda", dtype=dtype)
        order = torch.randperm(blocks + 3)[:blocks]
        self.keys = torch.randn(blocks * block, kv_heads, dim, device="cuda").to(dtype)
        self.values = torch.randn(blocks * block, kv_heads, dim, device="cuda").to(dtype)
        self.values[..., ::4] *= 2.0**-18  # subnormal in fp16
        self.keys[length:] = nan
        self.values[length:] = nan
        self.k[order] = self.keys.view(blocks, block, kv_heads, dim).transpose(1, 2)
        self.v[order] = self.values.view(blocks, block, kv_heads, dim).transpose(1, 2)
        self.table = order.to(torch.int32).cuda()[None]
        self.qkv = torch.randn(length, (self.q_heads + 2 * kv_heads) * dim, device="cuda").to(dtype) * 1.5
        self.group = group

    def prefill(self, first: int, stop: int, config: tuple[int, int, int] | str) -> torch.Tensor:
        out = torch.full((stop - first, self.q_heads * self.dim), float("nan"), device="cuda", dtype=torch.float32)
        qkv = self.qkv[first:stop].contiguous()
        if isinstance(config, str):
            from relay.kernels.cuda import attention_hopper

            work = prefill_work([(0, 0, stop - first, first)], self.group, attention_hopper.TILE_ROWS)
            items = torch.tensor(work, dtype=torch.int32, device="cuda")
            attention_hopper.prefill_attention(
                qkv, self.k, self.v, self.table, items, out, self.dim**-0.5, random.choice((stop, 1 << 30))
            )
            return out
        rows, warps, stages = config
        work = torch.tensor(
            prefill_work([(0, 0, stop - first, first)], self.group, rows), dtype=torch.int32, device="cuda"
        )
        prefill_attention(
            qkv, self.k, self.v, self.table, work, out, self.dim**-0.5, tile_rows=rows, warps=warps, stages=stages
        )
        return out

    def decode(self, positions: torch.Tensor, config: tuple[int, int, int]) -> torch.Tensor:
        """Every position as an entry of its own, all in one launch."""
        count = positions.shape[0]
        out = torch.full((count, self.q_heads * self.dim), float("nan"), device="cuda", dtype=torch.float32)
        tokens = torch.arange(count, dtype=torch.int32, device="cuda")
        splits = split_count(int(positions.max()) + 1)
        rows, warps, stages = config
        decode_attention(
            self.qkv[positions.long()].contiguous(),
            self.k,
            self.v,
            self.table,
            positions,
            tokens,
            torch.zeros_like(tokens),
            decode_scratch(count, self.q_heads, self.dim, splits, "cuda"),
            out,
            self.dim**-0.5,
            splits,
            tile_rows=rows,
            warps=warps,
            stages=stages,
        )
        return out

    def spoil(self, position: int) -> None:
        """What the cache holds of a token whose numbers overflowed (see ``rope``): its K is NaN."""
        self.k[self.table[0, position // self.k.shape[2]].long(), :, position % self.k.shape[2]] = float("nan")

    def exact(self, stop: int) -> torch.Tensor:
        q = self.qkv[:stop, : self.q_heads * self.dim].double().view(stop, self.q_heads, self.dim).transpose(0, 1)
        k = self.keys[:stop].double().transpose(0, 1).repeat_interleave(self.group, 0)
        v = self.values[:stop].double().transpose(0, 1).repeat_interleave(self.group, 0)
        s = (q @ k.transpose(1, 2)) * self.dim**-0.5
        s = s.masked_fill(torch.ones(stop, stop, device="cuda").triu(1).bool(), float("-inf"))
        return (s.softmax(-1) @ v).transpose(0, 1).reshape(stop, -1)


def different(a: torch.Tensor, b: torch.Tensor) -> int:
    """Rows that differ (NaN differs from everything)."""
    return int((~(a == b).all(1)).sum())


CASES = [
    (4, 8, 128, 64, 3000),
    (4, 8, 128, 16, 1300),
    (1, 2, 128, 64, 1100),
    (3, 3, 64, 16, 1300),
    (8, 2, 64, 128, 1100),
    (4, 2, 128, 64, 513),
]


def check(report: Report, hopper: bool, dtype: torch.dtype) -> int:
    """The number of comparisons in which any row differed."""
    result: dict[str, Any] = {}
    random.seed(1)
    half = dtype == torch.float16  # shapes that the Hopper kernel does not serve have been looked at in bf16
    found = 0
    for group, kv_heads, dim, block, length in [case for case in CASES if not half or case[3] % 64 == 0]:
        case = Case(group, kv_heads, dim, block, length, dtype)
        name = f"group {group} dim {dim} block {block} length {length}"
        reference = case.prefill(0, length, (64, 4, 2))
        stop = min(length, 1024)
        exact = case.exact(stop)
        row: dict[str, Any] = {"relative_error": ((reference[:stop] - exact).norm() / exact.norm()).item()}
        every = torch.arange(length, dtype=torch.int32, device="cuda")
        configs: list[Any] = [*PREFILL]
        if hopper:
            configs = ["hopper"] if block % 64 == 0 else []
        for config in configs:
            for chunk in (length, 1000, 512, 100, 7, 1, 0):
                try:
                    if chunk:
                        lower = length - 40 * chunk if chunk < 100 else 0
                        edges = [*range(max(0, lower), length, chunk), length]
                    else:
                        edges = [0, *sorted(random.sample(range(1, length), 12)), length]
                    got = torch.cat([case.prefill(a, b, config) for a, b in itertools.pairwise(edges)])
                    bad = different(got, reference[edges[0] :])
                except Exception as error:
                    bad = f"{type(error).__name__}: {str(error)[:120]}"
                row[f"prefill {config} chunk {chunk or 'random'}"] = bad
                if isinstance(bad, str):
                    break
        for config in DECODE[: 1 if hopper else None]:
            try:
                row[f"decode {config}"] = different(case.decode(every, config), reference)
            except Exception as error:
                row[f"decode {config}"] = f"{type(error).__name__}: {str(error)[:120]}"
        spoilt = length - 40
        case.spoil(spoilt)
        for config in configs:
            got = case.prefill(0, length, config)
            unseen = int((~got[spoilt:].isnan().all(1)).sum())
            row[f"prefill {config} overflow"] = different(got[:spoilt], reference[:spoilt]) + unseen
        result[name] = row
        wrong = {k: v for k, v in row.items() if v != 0 and k != "relative_error"}
        found += len(wrong)
        print(dtype, name, "error", row["relative_error"], "checks", len(row) - 1, "wrong", wrong, flush=True)
    report.put(_section("different_rows", dtype), result)
    return found


def _section(name: str, dtype: torch.dtype) -> str:
    return f"{name}_float16" if dtype == torch.float16 else name


def time_prefill(report: Report, hopper: bool, dtype: torch.dtype) -> None:
    table: dict[str, Any] = {}
    half = dtype == torch.float16
    for length in (2048, 8192) if half else (2048, 8192, 16384):
        case = Case(4, 8, 128, 64, length, dtype)
        flops = 2.0 * length * length * 128 * 32
        out = torch.empty(length, 32 * 128, device="cuda", dtype=dtype)
        row: dict[str, float] = {}
        for rows, warps, stages in PREFILL[: 1 if half else 0 if hopper else None]:
            work = torch.tensor(prefill_work([(0, 0, length, 0)], 4, rows), dtype=torch.int32, device="cuda")
            try:
                row[f"triton {rows}/{warps}/{stages}"] = graph_time_us(
                    lambda: prefill_attention(
                        case.qkv,
                        case.k,
                        case.v,
                        case.table,
                        work,
                        out,
                        128**-0.5,
                        tile_rows=rows,
                        warps=warps,
                        stages=stages,
                    )
                )
            except Exception as error:
                print(rows, warps, stages, str(error)[:100])
        if hopper:
            from relay.kernels.cuda import attention_hopper

            items = prefill_work([(0, 0, length, 0)], 4, attention_hopper.TILE_ROWS)
            work = torch.tensor(items, dtype=torch.int32, device="cuda")
            grids = [("as chosen", length), ("one item a program", 1 << 30), ("persistent", 1)]
            for label, keys in grids[: 1 if half else None]:
                row[f"hopper {label}"] = graph_time_us(
                    lambda: attention_hopper.prefill_attention(
                        case.qkv, case.k, case.v, case.table, work, out, 128**-0.5, keys
                    )
                )
        q = torch.randn(1, 32, length, 128, device="cuda").to(dtype)
        k, v = (torch.randn(1, 32, length, 128, device="cuda").to(dtype) for _ in range(2))
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)[: 1 if half else None]:
            try:
                with sdpa_kernel(backend):
                    row[backend.name] = graph_time_us(
                        lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                    )
            except Exception as error:
                print(backend, str(error)[:100])
        table[str(length)] = {name: round(flops / us / 1e6, 1) for name, us in row.items()}
        print(dtype, "prefill TFLOP/s", length, table[str(length)], flush=True)
    report.put(_section("prefill_tflops", dtype), table)


def time_decode(report: Report) -> None:
    table: dict[str, Any] = {}
    for batch, length in (
        (1, 576),
        (8, 576),
        (64, 576),
        (256, 576),
        (8, 4096),
        (64, 4096),
        (128, 4096),
        (1, -576),
        (64, -576),
    ):
        for block in (64, 16) if length > 0 else (64,):
            kv_heads, dim, group = (8, 128, 4) if length > 0 else (3, 64, 3)  # a negative length: SmolLM2's shape
            length = abs(length)
            blocks = batch * -(-length // block)
            k = torch.randn(blocks, kv_heads, block, dim, device="cuda").bfloat16()
            v = torch.randn(blocks, kv_heads, block, dim, device="cuda").bfloat16()
            tables = torch.randperm(blocks, device="cuda").to(torch.int32).view(batch, -1)
            qkv = torch.randn(batch, (group + 2) * kv_heads * dim, device="cuda").bfloat16()
            positions = torch.full((batch,), length - 1, dtype=torch.int32, device="cuda")
            tokens = torch.arange(batch, dtype=torch.int32, device="cuda")
            out = torch.empty(batch, group * kv_heads * dim, device="cuda", dtype=torch.bfloat16)
            splits = split_count(length)
            scratch = decode_scratch(batch, group * kv_heads, dim, splits, "cuda")
            row: dict[str, float] = {}
            for rows, warps, stages in DECODE:
                try:
                    row[f"{rows}/{warps}/{stages}"] = graph_time_us(
                        lambda: [
                            decode_attention(
                                qkv,
                                k,
                                v,
                                tables,
                                positions,
                                tokens,
                                tokens,
                                scratch,
                                out,
                                dim**-0.5,
                                splits,
                                tile_rows=rows,
                                warps=warps,
                                stages=stages,
                            )
                            for _ in range(4)
                        ],
                        4,
                    )
                except Exception as error:
                    print(rows, warps, stages, str(error)[:100])
            moved = 2 * batch * length * kv_heads * dim * 2
            share = {n: round(moved / us * 1e6 / report.data["copy_bytes_per_s"], 3) for n, us in row.items()}
            table[f"{batch}x{length} block {block} dim {dim}"] = {
                "us": {n: round(us, 1) for n, us in row.items()},
                "share": share,
            }
            print("decode", batch, length, block, table[f"{batch}x{length} block {block} dim {dim}"], flush=True)
    report.put("decode", table)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hopper", action="store_true", help="check and time the Hopper prefill kernel only")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], help="with --hopper: this type alone")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    hopper = arguments.hopper
    dtypes = [arguments.dtype] if arguments.dtype else ["bfloat16", *(["float16"] if hopper else [])]
    only = f"_{arguments.dtype}" if arguments.dtype else ""
    report = Report(arguments.out / f"attention{'_hopper' if hopper else ''}{only}.json")
    report.put("copy_bytes_per_s", copy_rate())
    wrong = 0
    for name in dtypes:
        wrong += check(report, hopper, getattr(torch, name))
        time_prefill(report, hopper, getattr(torch, name))
    if not hopper:
        time_decode(report)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
