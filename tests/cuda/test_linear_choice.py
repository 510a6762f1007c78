"""Which implementation serves how many rows: pure decisions, no kernel runs."""

import importlib.util
from itertools import pairwise

import pytest

if importlib.util.find_spec("triton") is None or importlib.util.find_spec("torch") is None:
    pytest.skip("triton is not installed (extra gpu)", allow_module_level=True)

from relay.kernels.cuda.linear_choice import LinearLayer, row_counts, tiles_for


@pytest.mark.parametrize("largest", [1, 16, 24, 32, 33, 250, 256, 257, 1000, 8192, 10000])
def test_row_counts_cover_and_stay_close(largest: int) -> None:
    counts = row_counts(largest)
    assert counts == sorted(set(counts))
    assert counts[-1] >= largest
    assert all(count < largest for count in counts[:-1])
    assert all(b - a <= max(64, a // 8 + 1) for a, b in pairwise(counts))


def test_only_tested_rows_reach_the_library() -> None:
    layer = LinearLayer(4096, 14336)
    layer.tested, layer.failed = [32, 64, 256], [128]
    assert layer.padded(16) is None, "few rows are Triton's"
    assert [layer.padded(rows) for rows in (17, 32, 33, 65, 128, 256)] == [32, 32, 64, 256, 256, 256]
    assert layer.padded(257) is None, "what was not tested is Triton's"
    assert LinearLayer(128256, 4096).padded(64) is None


def test_every_shape_has_a_tile_for_every_small_batch() -> None:
    for shared in (99 << 10, 163 << 10, 227 << 10):
        for outputs, depth in ((6144, 4096), (4096, 14336), (576, 1536), (128256, 4096), (40, 96)):
            tiles = tiles_for(outputs, depth, shared)
            assert list(tiles) == [16, 32, 64]
            assert all(tile.tokens <= 64 for tile in tiles.values())
