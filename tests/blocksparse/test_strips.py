"""Strips of present blocks, as a product on Hopper walks them."""

import pytest
import torch

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("width, band", [(2, 16), (4, 16), (2, 32), (4, 64)])
@pytest.mark.parametrize("rows", [1, 16, 40, 1100])
@pytest.mark.parametrize("density", [0.0, 0.4, 1.0])
def test_each_block_is_in_one_strip(
    width: int, band: int, rows: int, density: float, mode: str, device: torch.device
) -> None:
    from gossamer.blocksparse._triton.strips import strips

    if mode == "interpreter" and rows > 40 and density > 0:
        pytest.skip("large for the interpreter")
    generator = torch.Generator().manual_seed(rows)
    counts = (torch.rand(rows, 11, generator=generator) < density).sum(1)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int().to(device)
    total = int(offsets[-1])
    # Room for all, for more, and for too few: what does not fit is in no strip.
    for capacity in (total, total + 5, total // 2):
        tiles, most = strips(offsets, capacity, width, band)
        number = int(tiles[0])
        assert number <= most
        covered = []
        for row, first in tiles[2 : 2 + 2 * number].view(-1, 2).tolist():
            end = min(int(offsets[row + 1]), capacity)
            assert offsets[row] <= first < end and (first - int(offsets[row])) % width == 0
            covered += range(first, min(first + width, end))
        assert sorted(covered) == list(range(min(total, capacity)))
