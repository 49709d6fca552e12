"""`nn.BlockSparseLinear` against `nn.Linear` with the same weight."""

import copy

import pytest
import torch
from torch import nn

from gossamer.blocksparse import Layout, from_dense
from gossamer.nn import BlockSparseLinear
from tests.strategies import seeded


def layout_of(device: torch.device, capacity: int | None = None) -> Layout:
    mask = torch.rand(3, 2, device=device, generator=seeded(3, device)) < 0.6
    return Layout.from_mask(mask, (16, 32), size=(40, 50), capacity=capacity)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(50,), (7, 50), (2, 3, 50), (0, 50)], ids=str)
def test_as_linear(shape: tuple[int, ...], bias: bool, device: torch.device) -> None:
    linear = nn.Linear(50, 40, bias, device=device)
    layout = layout_of(device, capacity=8)
    layer = BlockSparseLinear.from_linear(linear, layout)
    with torch.no_grad():
        linear.weight.copy_(from_dense(linear.weight, layout).to_dense())
    x, y = (torch.randn(shape, device=device, generator=seeded(0, device)).requires_grad_() for _ in range(2))
    got, want = layer(x), linear(y)
    torch.testing.assert_close(got, want)
    towards = torch.randn_like(want)
    got.backward(towards)
    want.backward(towards)
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(layer.values.grad, from_dense(linear.weight.grad, layout).values)
    if bias:
        torch.testing.assert_close(layer.bias.grad, linear.bias.grad)


def test_a_sparse_input(device: torch.device) -> None:
    layer = BlockSparseLinear(layout_of(device))
    x = from_dense(
        torch.randn(48, 50, device=device), Layout.random((3, 2), (16, 32), 0.5, size=(48, 50), device=device)
    )
    torch.testing.assert_close(layer(x), x.to_dense() @ layer.weight.to_dense().mT + layer.bias)


@pytest.mark.parametrize("size", [(32, 50), (40, 50)], ids=str)
@pytest.mark.parametrize("lead", [(2,), (2, 3), (0,), (2, 0)], ids=str)
def test_a_sparse_input_with_leading_dimensions(
    lead: tuple[int, ...], size: tuple[int, int], device: torch.device
) -> None:
    layer = BlockSparseLinear(layout_of(device))
    dense = torch.randn(*lead, *size, device=device, generator=seeded(0, device)).requires_grad_()
    grid = (*lead, -(-size[0] // 16), 2)
    mask = torch.rand(grid, device=device, generator=seeded(1, device)) < 0.6
    layout = Layout.from_mask(mask, (16, 32), size=size, capacity=mask.numel() + 2)
    x = from_dense(dense, layout)
    got, want = layer(x), x.to_dense() @ layer.weight.to_dense().mT + layer.bias
    torch.testing.assert_close(got, want)
    towards = torch.randn(want.shape, device=device, generator=seeded(2, device))
    leaves = (dense, layer.values, layer.bias)
    for a, b in zip(*(torch.autograd.grad(y, leaves, towards, retain_graph=True) for y in (got, want))):
        torch.testing.assert_close(a, b)


def test_what_overflowed_shows(device: torch.device) -> None:
    """Blocks of a batch, as one matrix, do not vanish."""
    layer = BlockSparseLinear(layout_of(device))
    for m in (32, 40):
        mask = torch.ones(2, -(-m // 16), 2, device=device).bool()
        layout = Layout.from_mask(mask, (16, 32), size=(m, 50), capacity=2)
        assert layer(from_dense(torch.ones(2, m, 50, device=device), layout)).isnan().all()


def test_state(device: torch.device) -> None:
    mask = torch.zeros(3, 2, dtype=torch.bool, device=device)
    mask[0], mask[2, 0] = 1, 1
    first = BlockSparseLinear(Layout.from_mask(mask, (16, 32), size=(40, 50), capacity=4))
    second = BlockSparseLinear(Layout.from_mask(mask.flip(0), (16, 32), size=(40, 50), capacity=4))
    kept = second.layout.positions.clone()
    x = torch.randn(5, 50, device=device)
    third = copy.deepcopy(second)
    second.load_state_dict(first.state_dict())
    assert torch.equal(second(x), first(x)) and torch.equal(third.layout.positions, kept)
    assert second.to(torch.float64).weight.dtype is torch.float64 and second.layout.positions.dtype is torch.int32
    assert "blocks=4 of 6" in repr(first)


@pytest.mark.native
def test_autocast_and_compile(compiled, device: torch.device) -> None:
    layer = BlockSparseLinear(layout_of(device))
    x = torch.randn(5, 50, device=device)
    torch.testing.assert_close(compiled(layer)(x), layer(x))
    with torch.autocast(device.type, torch.bfloat16):
        assert layer(x).dtype is torch.bfloat16


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"nn.BlockSparseLinear: layout must be \(rows, cols\) blocks of one matrix"):
        BlockSparseLinear(Layout.full((2, 3, 2), 16))
    with pytest.raises(TypeError, match=r"layout must be a blocksparse.Layout, got Tensor"):
        BlockSparseLinear(torch.ones(3, 3))
