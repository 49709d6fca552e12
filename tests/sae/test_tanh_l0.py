"""sae.tanh_l0, against dense float64."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gossamer import rowsparse
from gossamer.rowsparse import Rows
from gossamer.sae import decode, encode, tanh_l0
from gossamer.testing import assert_close, dense64
from tests import strategies
from tests.sae.dense import PACKINGS


@given(data=st.data())
def test_tanh_l0(data: st.DataObject, dtype: torch.dtype, device: torch.device) -> None:
    leading, n = data.draw(strategies.LEADING), data.draw(st.integers(1, 70))
    generator = strategies.seeded(data.draw(strategies.SEEDS), device)
    drawn = torch.randn(*leading, n, device=device, generator=generator)
    acts = torch.where(drawn > data.draw(st.sampled_from([-9.0, 0.5, 2.0])), drawn, 0).to(dtype)
    scale = torch.rand(n, device=device, generator=generator) * data.draw(st.sampled_from([1e-3, 1.0, 40.0]))
    rows = rowsparse.pack(acts, capacity=data.draw(st.integers(1, 70)))
    out = tanh_l0(rows, scale)
    assert out.shape == tuple(leading) and out.dtype is torch.float32
    reference = torch.tanh(acts.double() * scale.double()).sum(-1)
    # PyTorch's tanh is right to the last place; a few are enough.
    torch.testing.assert_close(out.double(), reference, rtol=2e-6, atol=1e-6 if acts.lt(0).any() else 0)


@pytest.mark.parametrize("capacity", [2, 6, 40])
def test_gradients(
    capacity: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator, mode: str
) -> None:
    """Of values, through what made them, and of scale; with rows that overflow, and a second consumer."""
    if mode == "interpreter" and (capacity != 6 or dtype is not torch.float32):
        pytest.skip("slow in the interpreter")
    x = torch.randn(5, 8, device=device, generator=generator).to(dtype)
    W = (torch.randn(8, 40, device=device, generator=generator) / 3).to(dtype)
    scale = torch.rand(40, device=device, generator=generator) * 3
    weights = torch.randn(5, device=device, generator=generator)
    W_dec = torch.randn(40, 8, device=device, generator=generator).to(dtype)

    def ours(x: Tensor, W: Tensor, scale: Tensor) -> Tensor:
        rows = encode(x, W, capacity=capacity)
        return (tanh_l0(rows, scale) * weights).sum() + decode(rows, W_dec).float().sum()

    def dense(x: Tensor, W: Tensor, scale: Tensor) -> Tensor:
        acts = torch.relu(x @ W)
        return (torch.tanh(acts * scale).sum(-1) * weights).sum() + (acts @ W_dec.to(x.dtype)).sum()

    def gradients(function: object, dtype: torch.dtype | None) -> list[Tensor]:
        leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in (x, W, scale)]
        return list(torch.autograd.grad(function(*leaves), leaves))  # type: ignore[operator]

    exact, plain = gradients(dense, torch.float64), gradients(dense, torch.float32)
    for name, got, want, other in zip(("x", "W", "scale"), gradients(ours, None), exact, plain, strict=True):
        if dtype is torch.float32:
            assert_close(got, reference64=want, plain=other, name=name)
        else:
            # Activations and their gradients are rounded on the way.
            torch.testing.assert_close(got.double(), want, rtol=4e-2, atol=4e-2)


@pytest.mark.parametrize("options", PACKINGS, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 40), (5, 17), (0, 9), (3, 0)])
def test_any_container(
    options: dict[str, Any], shape: tuple[int, ...], device: torch.device, generator: torch.Generator
) -> None:
    acts = torch.randn(shape, device=device, generator=generator).relu().requires_grad_()
    scale = (torch.rand(shape[-1], device=device, generator=generator) * 3).requires_grad_()
    weights = torch.randn(shape[:-1], device=device, generator=generator)
    out = tanh_l0(strategies.pack_as(acts, **options), scale)
    assert out.shape == shape[:-1] and out.dtype is torch.float32
    wide = [t.detach().double().requires_grad_() for t in (acts, scale)]
    want = torch.tanh(wide[0] * wide[1]).sum(-1)
    torch.testing.assert_close(out.double(), want, rtol=2e-6, atol=1e-6)
    got = torch.autograd.grad((out * weights).sum(), (acts, scale), materialize_grads=True)
    exact = torch.autograd.grad((want * weights).sum(), wide)
    # What is not stored has no gradient.
    torch.testing.assert_close(got[0].double(), torch.where(acts != 0, exact[0], 0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[1].double(), exact[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [*PACKINGS, {"capacity": 3}], ids=str)
def test_the_gradient_of_scale_has_the_precision_of_scale(
    options: dict[str, Any], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """Of 16-bit values too, with rows that overflow and columns that many rows add to."""
    acts = torch.randn(64, 20, device=device, generator=generator).relu().to(dtype)
    scale = torch.rand(20, device=device, generator=generator) * 3
    weights = torch.randn(64, device=device, generator=generator)
    found = []
    terms = weights.double()[:, None] * acts.double() / torch.cosh(acts.double() * scale.double()).square()
    magnitude = terms.square().sum(0).sqrt()
    for wide in (None, torch.float64, torch.float32):
        leaf = scale.to(wide or scale.dtype).requires_grad_()
        if wide is None:
            out = tanh_l0(strategies.pack_as(acts, **options), leaf)
        else:
            out = torch.tanh(acts.to(wide) * leaf).sum(-1)
        found += torch.autograd.grad((out * weights).sum(), leaf)
    assert_close(found[0], reference64=found[1], plain=found[2], length=64, magnitude=magnitude)


@pytest.mark.kernels
def test_the_slope_of_large_arguments_keeps_its_digits(device: torch.device) -> None:
    """1 - tanh(x)^2 in float32 is 0 from 9 on; the true slope at 9 is 6e-8."""
    x = torch.tensor([[0.0, 1e-3, 0.5, 3.0, 6.0, 9.0, 12.0, 30.0]], device=device).mT.contiguous().requires_grad_()
    spans = torch.stack([torch.arange(8), torch.ones(8, dtype=torch.int64)]).to(device)
    rows = Rows(x[:, 0], torch.zeros(8, dtype=torch.int32, device=device), spans, (8, 1))
    (got,) = torch.autograd.grad(tanh_l0(rows, torch.ones(1, device=device)).sum(), x)
    want = 1 / torch.cosh(x.detach().double()).square()
    # A GPU's exponential of -2 x rounds its argument, whose error counts 4 |x| times at most.
    assert ((got - want).abs() <= (4 * x.detach().abs() + 8) * 2.0**-24 * want).all()


def test_entries_of_value_0_have_a_gradient(device: torch.device) -> None:
    indices, spans = torch.tensor([0, 3], dtype=torch.int32, device=device), torch.tensor([[0], [2]], device=device)
    values = torch.tensor([0.0, 50.0], device=device, requires_grad=True)
    rows = Rows(values, indices, spans, (1, 4))
    scale = torch.full((4,), 4.0, device=device)
    out = tanh_l0(rows, scale)
    out.sum().backward()
    assert out.tolist() == [1.0] and values.grad.tolist() == [4.0, 0.0]


def test_nan_and_repeated_indices(device: torch.device) -> None:
    indices = torch.tensor([1, 1, 2, -1], dtype=torch.int32, device=device)
    values = torch.tensor([9.0, 9.0, float("nan"), 1.0], device=device)
    rows = Rows(values, indices, torch.tensor([[0, 2], [2, 1]], device=device), (2, 4))
    out = tanh_l0(rows, torch.ones(4, device=device))
    assert out[0].item() == pytest.approx(2.0) and out[1].isnan()


def test_slots_behind_the_last_entry_are_never_multiplied(device: torch.device) -> None:
    spans = torch.tensor([[0, 1], [1, 1]], device=device)
    indices = torch.tensor([3, 0, 1], dtype=torch.int32, device=device)
    values = torch.tensor([0.5, 0.25, float("nan")], device=device, requires_grad=True)
    scale = torch.ones(4, device=device, requires_grad=True)
    out = tanh_l0(Rows(values, indices, spans, (2, 4)), scale)
    out.sum().backward()
    assert out.isfinite().all() and scale.grad.isfinite().all() and values.grad[:2].isfinite().all()


def test_slots_of_a_matrix_without_columns(device: torch.device) -> None:
    indices = torch.full((6,), -1, dtype=torch.int32, device=device)
    values = torch.full((6,), float("nan"), device=device, requires_grad=True)
    rows = Rows(values, indices, torch.tensor([[0, 3], [3, 1]], device=device), (2, 0))
    out = tanh_l0(rows, torch.ones(0, device=device))
    out.sum().backward()
    assert not out.any() and not values.grad.any()


def test_errors(device: torch.device) -> None:
    rows = rowsparse.pack(torch.ones(2, 3, device=device))
    with pytest.raises(TypeError, match=r"sae.tanh_l0: rows must be rowsparse.Rows, got Tensor"):
        tanh_l0(dense64(rows), torch.ones(3, device=device))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"sae.tanh_l0: scale must have shape \[d_sae\] = \[3\] like rows, got \[4\]"):
        tanh_l0(rows, torch.ones(4, device=device))
    scale = torch.ones(3, device=device, requires_grad=True)
    (first,) = torch.autograd.grad(tanh_l0(rows, scale).sum(), scale)
    assert first.shape == (3,)
    with pytest.raises(NotImplementedError, match=r"sae.tanh_l0: second derivatives are not implemented"):
        torch.autograd.grad(tanh_l0(rows, scale).sum(), scale, create_graph=True)
