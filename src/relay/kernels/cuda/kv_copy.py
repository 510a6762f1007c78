"""Between the paged cache and the canonical layout [token][kv_head][dim] of transfers: byte copies, no arithmetic."""

import threading

import numpy as np
import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["first", "count"])
def copy_kernel(
    k_cache,
    v_cache,
    table,
    flat,
    first,
    count,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ELEMENTS: tl.constexpr,
    STORE: tl.constexpr,
):
    """One token: K into flat[token], V into flat[count + token], or back where STORE."""
    token = tl.program_id(0)
    position = first + token
    e = tl.arange(0, ELEMENTS)
    inside = e < KV_HEADS * DIM
    block = tl.load(table + position // BLOCK).to(tl.int64)
    place = ((block * KV_HEADS + e // DIM) * BLOCK + position % BLOCK) * DIM + e % DIM
    k_at = flat + token.to(tl.int64) * (KV_HEADS * DIM) + e
    v_at = k_at + count.to(tl.int64) * (KV_HEADS * DIM)
    if STORE:
        tl.store(k_cache + place, tl.load(k_at, mask=inside), mask=inside)
        tl.store(v_cache + place, tl.load(v_at, mask=inside), mask=inside)
    else:
        tl.store(k_at, tl.load(k_cache + place, mask=inside), mask=inside)
        tl.store(v_at, tl.load(v_cache + place, mask=inside), mask=inside)


def copy_kv(
    k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor, flat: torch.Tensor, first: int, store: bool
) -> None:
    """Positions first.. of one sequence between its blocks and ``flat`` [2, count, kv_heads * dim]; ``store``: into the cache."""
    _, kv_heads, block_size, dim = k_cache.shape
    count = flat.shape[1]
    copy_kernel[(count,)](
        k_cache,
        v_cache,
        table,
        flat,
        first,
        count,
        KV_HEADS=kv_heads,
        DIM=dim,
        BLOCK=block_size,
        ELEMENTS=triton.next_power_of_2(kv_heads * dim),
        STORE=store,
    )


class KvTransfers:
    """Copies between host memory and the cache from any thread; each thread has a stream, so that transfers wait for no step."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._local = threading.local()

    def read(
        self,
        cache: tuple[torch.Tensor, torch.Tensor],
        block_table: np.ndarray,
        first: int,
        count: int,
        out: memoryview,
        written: torch.cuda.Event,
    ) -> None:
        """K then V of ``count`` positions into ``out``, once ``written`` has passed. Returns when the bytes are there."""
        k_cache, v_cache = cache
        stream = self._stream()
        stream.wait_event(written)
        with torch.cuda.stream(stream):
            flat = torch.empty(2, count, k_cache.shape[1] * k_cache.shape[3], dtype=k_cache.dtype, device=self._device)
            copy_kv(k_cache, v_cache, self._table(block_table), flat, first, store=False)
            host = flat.cpu()
        np.frombuffer(out, np.uint8)[: host.numel() * 2] = host.view(torch.uint8).numpy().reshape(-1)

    def write(
        self,
        cache: tuple[torch.Tensor, torch.Tensor],
        block_table: np.ndarray,
        first: int,
        count: int,
        data: memoryview,
    ) -> None:
        """The inverse. Returns when the cache holds the values."""
        k_cache, v_cache = cache
        width = k_cache.shape[1] * k_cache.shape[3]
        stream = self._stream()
        with torch.cuda.stream(stream):
            raw = torch.from_numpy(np.frombuffer(data, np.int16, 2 * count * width).copy())
            flat = raw.to(self._device).view(k_cache.dtype).view(2, count, width)
            copy_kv(k_cache, v_cache, self._table(block_table), flat, first, store=True)
            stream.synchronize()

    def _table(self, block_table: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(block_table, np.int32)).to(self._device)

    def _stream(self) -> torch.cuda.Stream:
        """The calling thread's stream."""
        if not hasattr(self._local, "stream"):
            torch.cuda.set_device(self._device)
            self._local.stream = torch.cuda.Stream(self._device)
        stream: torch.cuda.Stream = self._local.stream
        return stream
