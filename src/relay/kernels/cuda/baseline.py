"""Plain kernels, the yardstick for what the others gain: one kernel an operation, no tensor cores, keys and values contiguous.

Not a backend and not exact: products are sums on the ordinary units in blocks, scores and their softmax are written to memory
and read back, norms, rotation and residuals are separate passes of torch. ``PlainModel`` runs one sequence or a batch of equal
positions; ``benchmarks/gpu_baseline.py`` times it.
"""

import torch
import triton
import triton.language as tl

from relay.kernels.program import Attend, Buffer, Embed, Linear, Program, RmsNorm, RopeWriteKv, SelectRows, SiluMul


@triton.jit
def plain_linear_kernel(x, w, y, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """y = x @ w.T by products and sums on the ordinary units."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        rows = tl.load(x + m[:, None] * K + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        weights = tl.load(w + n[:, None] * K + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
        total += tl.sum(rows.to(tl.float32)[:, None, :] * weights.to(tl.float32)[None, :, :], 2)
    tl.store(y + m[:, None].to(tl.int64) * N + n[None, :], total, mask=(m < M)[:, None] & (n < N)[None, :])


def plain_linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """bf16 [rows, n]."""
    rows, depth = x.shape
    y = torch.empty(rows, w.shape[0], dtype=torch.bfloat16, device=x.device)
    bm, bn, bk = (1, 16, 256) if rows == 1 else (8, 16, 64) if rows <= 8 else (16, 16, 32)
    grid = (triton.cdiv(rows, bm), triton.cdiv(w.shape[0], bn))
    plain_linear_kernel[grid](x, w, y, rows, w.shape[0], depth, BM=bm, BN=bn, BK=bk)
    return y


@triton.jit
def plain_scores_kernel(
    q, keys, scores, T, S, first, scale, group, kv_heads, DIM: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr
):
    """scores[head, t, s] = scale * q[t, head] . keys[s, head // group], -inf where s lies after the query."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    s = tl.program_id(1) * BS + tl.arange(0, BS)
    head = tl.program_id(2)
    heads = kv_heads * group
    total = tl.zeros([BT, BS], tl.float32)
    for start in range(0, DIM, 32):
        d = start + tl.arange(0, 32)
        a = tl.load(q + (t[:, None] * heads + head) * DIM + d[None, :], mask=(t < T)[:, None], other=0.0)
        b = tl.load(keys + (s[:, None] * kv_heads + head // group) * DIM + d[None, :], mask=(s < S)[:, None], other=0.0)
        total += tl.sum(a.to(tl.float32)[:, None, :] * b.to(tl.float32)[None, :, :], 2)
    seen = s[None, :] <= first + t[:, None]
    at = scores + (head * T + t[:, None]).to(tl.int64) * S + s[None, :]
    tl.store(at, tl.where(seen, total * scale, float("-inf")), mask=(t < T)[:, None] & (s < S)[None, :])


@triton.jit
def plain_values_kernel(p, values, out, T, S, group, kv_heads, DIM: tl.constexpr, BS: tl.constexpr):
    """out[t, head] = sum over s of p[head, t, s] * values[s, head // group]."""
    t = tl.program_id(0)
    head = tl.program_id(1)
    d = tl.arange(0, DIM)
    total = tl.zeros([DIM], tl.float32)
    for start in range(0, S, BS):
        s = start + tl.arange(0, BS)
        weight = tl.load(p + (head * T + t).to(tl.int64) * S + s, mask=s < S, other=0.0)
        value = tl.load(
            values + (s[:, None] * kv_heads + head // group) * DIM + d[None, :], mask=(s < S)[:, None], other=0.0
        )
        total += tl.sum(weight[:, None] * value.to(tl.float32), 0)
    tl.store(out + (t * kv_heads * group + head) * DIM + d, total)


class PlainModel:
    """One sequence after another through ``program`` with the weights of a loaded backend, one operation at a time."""

    def __init__(
        self,
        program: Program,
        matrices: dict[str, torch.Tensor],
        vectors: dict[str, torch.Tensor],
        sequences: int,
        longest: int,
    ) -> None:
        g = program.geometry
        self._program, self._matrices, self._vectors = program, matrices, vectors
        shape = (g.num_layers, 2, sequences, longest, g.num_kv_heads, g.head_dim)
        self.kv = torch.zeros(shape, dtype=torch.bfloat16, device=matrices["embed"].device)

    def step(self, token_ids: torch.Tensor, first: int) -> torch.Tensor:
        """Logits of the last token of each sequence; ``token_ids`` [sequences, tokens] at positions ``first``.."""
        g = self._program.geometry
        sequences, tokens = token_ids.shape
        buffers: dict[Buffer, torch.Tensor] = {}
        for op in self._program.ops:
            match op:
                case Embed(weight, dst):
                    buffers[dst] = self._matrices[weight][token_ids.reshape(-1)]
                case RmsNorm(src, dst, weight, eps):
                    x = buffers[src].float()
                    x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
                    buffers[dst] = (x * self._vectors[weight]).bfloat16()
                case Linear(src, dst, weight, _, accumulate):
                    y = plain_linear(buffers[src], self._matrices[weight])
                    buffers[dst] = buffers[dst] + y if accumulate else y
                case RopeWriteKv(layer):
                    self._rotate(buffers[Buffer.QKV].view(sequences, tokens, -1, g.head_dim), layer, first)
                case Attend(layer, scale):
                    buffers[Buffer.A] = self._attend(
                        buffers[Buffer.QKV].view(sequences, tokens, -1, g.head_dim), layer, first, scale
                    )
                case SiluMul():
                    gate, up = buffers[Buffer.G].chunk(2, -1)
                    buffers[Buffer.U] = (gate * torch.sigmoid(gate)) * up
                case SelectRows(src, dst):
                    buffers[dst] = buffers[src].view(sequences, tokens, -1)[:, -1].contiguous()
        return buffers[Buffer.L]

    def _rotate(self, qkv: torch.Tensor, layer: int, first: int) -> None:
        g = self._program.geometry
        tokens = qkv.shape[1]
        cos = self._vectors["rope.cos"][first : first + tokens][None, :, None]
        sin = self._vectors["rope.sin"][first : first + tokens][None, :, None]
        turned = qkv[:, :, : g.num_heads + g.num_kv_heads]
        a, b = turned.float().chunk(2, -1)
        turned.copy_(torch.cat([a * cos - b * sin, b * cos + a * sin], -1))
        k, v = qkv[:, :, g.num_heads :].split(g.num_kv_heads, 2)
        self.kv[layer, 0, : len(qkv), first : first + tokens] = k
        self.kv[layer, 1, : len(qkv), first : first + tokens] = v

    def _attend(self, qkv: torch.Tensor, layer: int, first: int, scale: float) -> torch.Tensor:
        g = self._program.geometry
        sequences, tokens = qkv.shape[:2]
        seen = first + tokens
        group = g.num_heads // g.num_kv_heads
        out = torch.empty(sequences, tokens, g.num_heads * g.head_dim, dtype=torch.bfloat16, device=qkv.device)
        bt = 1 if tokens == 1 else 16
        for sequence in range(sequences):
            q = qkv[sequence, :, : g.num_heads].contiguous()
            scores = torch.empty(g.num_heads, tokens, seen, dtype=torch.float32, device=qkv.device)
            grid = (triton.cdiv(tokens, bt), triton.cdiv(seen, 32), g.num_heads)
            keys, values = self.kv[layer, 0, sequence], self.kv[layer, 1, sequence]
            plain_scores_kernel[grid](
                q, keys, scores, tokens, seen, first, scale, group, g.num_kv_heads, DIM=g.head_dim, BT=bt, BS=32
            )
            weights = torch.softmax(scores, -1)
            plain_values_kernel[(tokens, g.num_heads)](
                weights, values, out[sequence], tokens, seen, group, g.num_kv_heads, DIM=g.head_dim, BS=64
            )
        return out.view(sequences * tokens, -1)
