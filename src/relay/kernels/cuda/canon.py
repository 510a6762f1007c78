"""The constants of the GPU canon (docs/decisions/0004-gpu-canon.md) as the numerics id takes them."""

from typing import Final

from relay.kernels.canon import GREEDY_BELOW, WEIGHT_BITS
from relay.kernels.cuda.softmax import LOWEST, SPLIT, TILE
from relay.protocol.block_hash import UNIT_TOKENS

GPU_CANON_VERSION: Final = 1


def gpu_parts() -> dict[str, str]:
    """Version and constants. What the compiler made of them is the probe's business."""
    return {
        "canon": f"gpu {GPU_CANON_VERSION}",
        "tile": str(TILE),
        "split": str(SPLIT),
        "unit": str(UNIT_TOKENS),
        "max_start": repr(LOWEST.value),
        "sampling": f"{GREEDY_BELOW!r} {WEIGHT_BITS}",
    }
