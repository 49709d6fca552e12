"""Several programs for a row, where rows are few and long."""

import pytest
import torch

from gossamer import gemm, rowsparse, sae
from gossamer.sae.encode_path import choose_path
from tests.sae.dense import selected, whole

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("m, n, capacity", [(2, 5000, 5000), (1, 9001, 64), (3, 2049, 700)])
@pytest.mark.parametrize("jump", [False, True])
def test_chunks(m: int, n: int, capacity: int, jump: bool, device: torch.device, generator: torch.Generator) -> None:
    # Whole numbers: pre-activations are exact, and many are equal.
    x, weight = (whole(shape, 2, generator, torch.float32) for shape in ((m, 6), (6, n)))
    assert choose_path("relu", m, 0, capacity, capacity < n, weight) == "chunks"
    threshold = torch.arange(n, device=device) % 4 + 0.5
    rows = sae.encode(x, weight, None, gemm.JumpReLU(threshold) if jump else "relu", capacity=capacity)
    z = x @ weight
    kept = selected(z, "jumprelu", threshold=threshold) if jump else selected(z, "relu")
    wanted = torch.where(kept, z, 0)
    assert torch.equal(rowsparse.unpack(rows), wanted)
    assert torch.equal(rows.packed.counts, (wanted != 0).sum(1).int())
