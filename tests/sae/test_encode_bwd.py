"""Gradients of an encoder at the entries that it kept."""

import pytest
import torch

from gossamer import sae
from tests.sae.dense import whole

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("m, n, capacity", [(4, 300, 300), (3, 300, 8), (1, 9, 9)])
def test_gradients_at_entries(m: int, n: int, capacity: int, device: torch.device, generator: torch.Generator) -> None:
    # Whole numbers: pre-activations are exact, and many are equal.
    x, weight = (whole(shape, 2, generator, torch.float32).requires_grad_() for shape in ((m, 6), (6, n)))
    bias = torch.zeros(n, device=device).requires_grad_()
    leaves = (x, weight, bias)
    weights = (torch.arange(m * n, device=device) % 5 - 2).view(m, n).float()
    rows = sae.encode(x, weight, bias, capacity=capacity)
    ours = torch.autograd.grad((rows.to_dense() * weights).sum(), leaves)
    wanted = torch.autograd.grad(((x @ weight + bias).relu() * weights).sum(), leaves)
    for name, a, b in zip(("x", "W_enc", "b_enc"), ours, wanted):
        assert b.any() and torch.equal(a, b), name
