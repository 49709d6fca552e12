"""`blocksparse.transpose` against transposed dense matrices."""

import pytest
import torch

from gossamer.blocksparse import BlockSparseTensor, Layout, from_dense
from tests.strategies import seeded


def problem(dtype: torch.dtype, device: torch.device, density: float = 0.5) -> BlockSparseTensor:
    generator = seeded(0, device)
    mask = torch.rand(2, 3, 5, device=device, generator=generator) < density
    layout = Layout.from_mask(mask, (16, 32), size=(40, 150), capacity=40)
    return from_dense(torch.randn(2, 40, 150, device=device, generator=generator).to(dtype), layout)


@pytest.mark.parametrize("density", [0.0, 0.5, 1.0])
def test_values(density: float, dtype: torch.dtype, device: torch.device) -> None:
    x = problem(dtype, device, density)
    turned = x.mT
    assert torch.equal(turned.to_dense(), x.to_dense().mT) and turned.shape == (2, 150, 40)
    assert not turned.values[int(x.layout.nnz) :].any()
    back = turned.mT
    assert back.layout.is_same(x.layout) and torch.equal(back.values, x.values)


def test_gradient(device: torch.device) -> None:
    x = problem(torch.float32, device).requires_grad_()
    towards = torch.randn(2, 150, 40, device=device)
    (grad,) = torch.autograd.grad(x.mT.to_dense(), x.values, towards)
    assert torch.equal(grad, from_dense(towards.mT, x.layout).values)


def test_a_transposed_layout_is_the_same_buffer(device: torch.device) -> None:
    """Arithmetic on transposed tensors of one layout works, wherever they were transposed."""
    layout = Layout.full((2, 3), 16, device=device)
    turned = layout.transpose()
    assert turned.buffer is layout.buffer and turned.transpose().is_same(layout) and not turned.is_same(layout)
    x, y = (from_dense(torch.randn(32, 48, device=device), layout) for _ in range(2))
    assert torch.equal((x.mT + y.mT).to_dense(), (x + y).to_dense().mT)


@pytest.mark.parametrize("kind", [torch.int64, torch.uint8, torch.bool])
def test_whole_numbers(kind: torch.dtype, device: torch.device) -> None:
    """Where blocks are lost there are the lowest ones."""
    dense = torch.arange(32 * 48, device=device).view(32, 48).remainder(100).to(kind)
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]], device=device)
    x = from_dense(dense, Layout.from_mask(mask, 16))
    assert torch.equal(x.mT.to_dense(), x.to_dense().mT)
    short = from_dense(dense, Layout.from_mask(mask, 16, capacity=3))
    lowest = False if kind is torch.bool else torch.iinfo(kind).min
    assert (short.mT.values == lowest).all()


@pytest.mark.kernels
@pytest.mark.parametrize("shape", [(2, 64, 64), (3, 70, 33), (1, 1, 130), (0, 16, 16), (2, 0, 5)], ids=str)
def test_turn(shape: tuple[int, ...], device: torch.device) -> None:
    """What products use that ask for an operand the other way around."""
    from gossamer.blocksparse._triton.transpose import turn

    x = torch.randn(shape, device=device, generator=seeded(0, device))
    assert torch.equal(turn(x), x.mT)
