"""The dense transposition behind gradients."""

import pytest
import torch

from gossamer.rowsparse.dense_transpose import dense_transpose
from gossamer.rowsparse.records import DenseTranspose


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 1), (1, 70), (70, 1), (64, 64), (130, 67), (3, 300)])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "padded", "strided"])
def test_dense_transpose(
    shape: tuple[int, int], layout: str, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    m, n = shape
    drawn = torch.randn(2 * m + 1, 2 * n + 1, device=device, generator=generator).to(dtype)
    x = {
        "contiguous": drawn[:m, :n].contiguous(),
        "transposed": drawn[:m, :n].t().contiguous().t(),
        "padded": drawn[1 : m + 1, 1 : n + 1],
        "strided": drawn[: 2 * m : 2, : 2 * n : 2],
    }[layout]
    out = dense_transpose(DenseTranspose(x))
    assert out.shape == (n, m) and out.is_contiguous() and torch.equal(out, x.t())
    assert not out.numel() or out.data_ptr() != x.data_ptr()


def test_its_gradient(device: torch.device) -> None:
    x = torch.randn(3, 5, device=device, requires_grad=True)
    weights = torch.randn(5, 3, device=device)
    (dense_transpose(DenseTranspose(x)) * weights).sum().backward()
    assert torch.equal(x.grad, weights.t())
