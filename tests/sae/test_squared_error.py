"""Squared distances of rows and their gradients, against float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gossamer.sae.squared_error import squared_error
from gossamer.testing import assert_close, assert_exact
from tests import strategies


def plain(x: Tensor, y: Tensor) -> Tensor:
    wide = torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)
    return (x.to(wide) - y.to(wide)).square().sum(-1)


def with_gradients(function: Callable[..., Tensor], x: Tensor, y: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
    out = function(x, y)
    return out, *torch.autograd.grad(out, (x, y), grad.to(out.dtype))


@given(data=st.data())
def test_with_gradients(data: st.DataObject, dtype: torch.dtype, device: torch.device) -> None:
    """Any shape and layout, also of two dtypes, and gradients that are all one number; small integers, so exact."""
    leading, size = data.draw(strategies.LEADING), data.draw(st.sampled_from([0, 1, 7, 64, 1000, 1025]))
    generator = strategies.seeded(data.draw(strategies.SEEDS), device)

    def drawn(*shape: int) -> Tensor:
        return torch.randint(-4, 5, shape, device=device, generator=generator).float()

    x = drawn(*leading, size).to(data.draw(st.sampled_from([dtype, torch.float32])))
    x, y = strategies.laid_out(x, data.draw(strategies.LAYOUTS)), drawn(*leading, size).to(dtype)
    y = strategies.laid_out(y, data.draw(strategies.LAYOUTS))
    grad = data.draw(st.sampled_from([drawn(*leading), torch.full((), 0.5, device=device).expand(leading)]))
    got = with_gradients(squared_error, x, y, grad)
    assert [t.dtype for t in got] == [torch.promote_types(x.dtype, torch.float32), x.dtype, dtype]
    for name, actual, want in zip(
        ("error", "grad x", "grad y"), got, with_gradients(plain, x.double(), y.double(), grad), strict=True
    ):
        assert_exact(actual, want, name=name)


@pytest.mark.parametrize("d", [64, 2304])
def test_rounding(d: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator, scale: int) -> None:
    x, y = (torch.randn(20 * scale, d, device=device, generator=generator).to(dtype) for _ in range(2))
    grad = torch.randn(20 * scale, device=device, generator=generator)
    usual, want = (with_gradients(plain, *pair, grad) for pair in ((x, y), (x.double(), y.double())))
    for actual, exact, other in zip(with_gradients(squared_error, x, y, grad), want, usual, strict=True):
        assert_close(actual, reference64=exact, plain=other)


@pytest.mark.native
def test_any_number_of_times() -> None:
    """Second and third derivatives, in all that they depend on. float64 runs on the CPU."""
    x, y = (torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(squared_error, (x, y))
    assert torch.autograd.gradgradcheck(squared_error, (x, y))
    assert torch.autograd.gradgradcheck(lambda x, y: slope(squared_error, x, y), (x * 0.1, y * 0.1))


def slope(function: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(function(x, y).exp().sum(), y, create_graph=True)
    return grad


def test_second_derivatives(device: torch.device, generator: torch.Generator) -> None:
    x, y = (torch.rand(3, 5, device=device, generator=generator).requires_grad_() for _ in range(2))
    got, want = (torch.autograd.grad(slope(each, x, y).square().sum(), (x, y)) for each in (squared_error, plain))
    torch.testing.assert_close(got, want)


def test_only_what_is_asked_for(device: torch.device) -> None:
    x, y = torch.randn(4, 6, device=device), torch.randn(4, 6, device=device, requires_grad=True)
    squared_error(x, y).sum().backward()
    torch.testing.assert_close(y.grad, 2 * (y - x).detach())
    squared_error(y, x).sum().backward()
    torch.testing.assert_close(y.grad, 4 * (y - x).detach())


def test_layout_is_what_is_promised(device: torch.device) -> None:
    """What Inductor takes for granted: the gradient of a transposed tensor is contiguous."""
    x, y = torch.randn(4, 6, device=device), torch.randn(6, 4, device=device).t()
    assert torch.ops.gossamer.sae_squared_error_bwd(torch.ones(4, device=device), x, y).is_contiguous()


def test_nan_and_infinity_pass(device: torch.device) -> None:
    x = torch.tensor([[1.0, torch.nan], [torch.inf, 0.0], [1.0, 2.0]], device=device)
    out, _, grad = with_gradients(squared_error, x, torch.zeros_like(x), torch.ones(3, device=device))
    torch.testing.assert_close(out.cpu(), torch.tensor([torch.nan, torch.inf, 5.0]), equal_nan=True)
    torch.testing.assert_close(grad, -2 * x, equal_nan=True)


def test_compiled(device: torch.device, compiled: Callable[[Any], Any]) -> None:
    x, y = torch.randn(4, 6, device=device), torch.randn(4, 6, device=device, requires_grad=True)
    compiled(lambda x, y: squared_error(x, y).mean())(x, y).backward()
    torch.testing.assert_close(y.grad, 0.5 * (y - x).detach())


@pytest.mark.parametrize(
    ("x", "y", "error", "match"),
    [
        (torch.ones(2, 3), torch.ones(3), ValueError, r"one shape \[..., D\], got \[2, 3\] and \[3\]"),
        (torch.ones(()), torch.ones(()), ValueError, r"one shape"),
        (torch.ones(2, 3), torch.ones(2, 3, dtype=torch.int64), TypeError, "y must"),
        (torch.ones(2, 3), torch.ones(2, 3, device="meta"), ValueError, "y must be on cpu like x, got meta"),
        ([1.0], torch.ones(1), TypeError, "x must be a torch.Tensor, got list"),
    ],
)
def test_errors(x: Any, y: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=rf"sae.squared_error: .*{match}"):
        squared_error(x, y)
