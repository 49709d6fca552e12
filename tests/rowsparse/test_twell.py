"""Tile-wise lists between a product and the lister, against the definition of the format."""

import math

import pytest
import torch

from gossamer.rowsparse.formats import empty_twell
from gossamer.testing import random_rows

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("tile, slots", [(8, 2), (8, 8), (100, 3), (33, 33), (1, 1)])
@pytest.mark.parametrize("limited", [False, True])
def test_tiles(
    tile: int, slots: int, limited: bool, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """Each tile has its true count, and its first entries; NaN is one, -0 is none."""
    from gossamer.rowsparse._triton.twell import launch_pack_twell

    x = random_rows((6, 100), l0=[0, 1, 3, 7, 30, 100], dtype=dtype, device=device, generator=generator)
    x[1, :3] = torch.tensor([math.nan, -0.0, math.inf])
    threshold = torch.rand(100, device=device, generator=generator) if limited else None
    values, indices, counts = out = empty_twell(x, 6, 100, tile, slots)
    launch_pack_twell(x, threshold, tile, out)
    kept = ~(x.float() <= (0 if threshold is None else threshold))
    for row in range(6):
        for at in range(-(-100 // tile)):
            columns = kept[row, at * tile : (at + 1) * tile].nonzero().squeeze(1)
            held = min(len(columns), slots)
            assert int(counts[row, at]) == len(columns)
            assert indices[row, at, :held].tolist() == columns[:held].tolist()
            entries = x[row, at * tile : (at + 1) * tile][columns[:held]]
            torch.testing.assert_close(values[row, at, :held], entries, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("capacity", [1, 3, 40, 100])
@pytest.mark.parametrize("tile, slots", [(8, 2), (8, 8), (100, 3), (33, 33)])
def test_one_list_a_row(
    tile: int, slots: int, capacity: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """A row overflows with more entries than `capacity`, or more in a tile than this has slots for."""
    from gossamer.rowsparse._triton.twell import gather_tiles, launch_pack_twell

    counts = [0, 1, 3, 7, 30, 100]
    x = random_rows((6, 100), l0=counts, dtype=dtype, device=device, generator=generator).abs()
    packed = empty_twell(x, 6, 100, tile, slots)
    launch_pack_twell(x, None, tile, packed)
    values, indices, spans = gather_tiles(*packed, tile, capacity)
    crowded = (packed[2] > slots).any(1)
    assert spans[1].tolist() == counts
    for row, count in enumerate(counts):
        start = int(spans[0, row])
        if crowded[row] or count > capacity:
            assert start + count > 6 * capacity
            continue
        assert start == row * capacity
        columns = x[row].nonzero().squeeze(1)
        assert indices[start : start + capacity].tolist() == [*columns.tolist(), *[-1] * (capacity - count)]
        assert torch.equal(values[start : start + count], x[row, columns])
        assert not values[start + count : start + capacity].any()
