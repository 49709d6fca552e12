"""Squared distances of rows and their gradients, against float64."""

import pytest
import torch
from torch import Tensor

from gossamer.sae.squared_error import squared_error
from gossamer.testing import assert_close


@pytest.mark.native
@pytest.mark.parametrize("shape", [(20, 64), (2, 3, 2304), (5, 0), (0, 7)])
@pytest.mark.parametrize("other", [torch.float32, None])
def test_with_gradients(
    shape: tuple[int, ...], other: torch.dtype | None, dtype: torch.dtype, device: torch.device,
    generator: torch.Generator,
) -> None:  # fmt: skip
    """Of one dtype and of two: differences and their squares are float32."""
    x = torch.randn(shape, device=device, generator=generator).to(other or dtype)
    y, grad = torch.randn(shape, device=device, generator=generator).to(dtype), torch.randn(shape[:-1], device=device)

    def results(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
        out = squared_error(x, y)
        return out, *torch.autograd.grad(out, (x, y), grad.to(out.dtype))

    got, exact = results(x, y), results(x.double(), y.double())
    assert [t.dtype for t in got] == [torch.float32, x.dtype, y.dtype]
    plain = (x.float() - y.float()).square().sum(-1)
    for ours, want, usual in zip(got, exact, (plain, *(t.to(dtype) for t in exact[1:])), strict=True):
        assert_close(ours, reference64=want, plain=usual)
