"""The entries of rows above their k-th largest, where there are fewer slots than k."""

import pytest
import torch

from gossamer import gemm, rowsparse, sae
from gossamer.sae.encode_path import choose_path
from tests.sae.dense import selected, whole

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("m, n, k, capacity", [(3, 300, 20, 8), (2, 70, 64, 16), (1, 1000, 100, 99)])
def test_ties_go_to_the_lowest_index(
    m: int, n: int, k: int, capacity: int, device: torch.device, generator: torch.Generator
) -> None:
    # Whole numbers: pre-activations are exact, and many are equal.
    x, weight = (whole(shape, 2, generator, torch.float32) for shape in ((m, 6), (6, n)))
    assert choose_path("topk", m, k, capacity, True, weight) == "topk_rows"
    rows = sae.encode(x, weight, None, gemm.TopK(k), capacity=capacity)
    z = x @ weight
    wanted = torch.where(selected(z, "topk", k), z, 0)
    assert torch.equal(rowsparse.unpack(rows), wanted)
    assert torch.equal(rows.packed.counts, (wanted != 0).sum(1).int())
