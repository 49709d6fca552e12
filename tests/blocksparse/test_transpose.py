"""`blocksparse.transpose` against transposed dense matrices."""

import gc
import weakref

import pytest
import torch

from gossamer.blocksparse import BlockSparseTensor, Layout, from_dense, transpose
from tests.strategies import seeded


def problem(dtype: torch.dtype, device: torch.device, density: float = 0.5) -> BlockSparseTensor:
    generator = seeded(0, device)
    mask = torch.rand(2, 3, 5, device=device, generator=generator) < density
    layout = Layout.from_mask(mask, (16, 32), size=(40, 150), capacity=40)
    return from_dense(torch.randn(2, 40, 150, device=device, generator=generator).to(dtype), layout)


@pytest.mark.parametrize("density", [0.0, 0.5, 1.0])
def test_values(density: float, dtype: torch.dtype, device: torch.device) -> None:
    x = problem(dtype, device, density)
    turned = transpose(x)
    assert torch.equal(turned.to_dense(), x.to_dense().mT) and turned.shape == (2, 150, 40)
    assert not turned.values[int(x.layout.nnz) :].any()
    back = transpose(turned)
    assert back.layout is x.layout and torch.equal(back.values, x.values)


def test_gradient(device: torch.device) -> None:
    x = problem(torch.float32, device).requires_grad_()
    towards = torch.randn(2, 150, 40, device=device)
    (grad,) = torch.autograd.grad(transpose(x).to_dense(), x.values, towards)
    assert torch.equal(grad, from_dense(towards.mT, x.layout).values)


def test_a_layout_and_its_transpose_live_as_long_as_they_are_used(device: torch.device) -> None:
    layout = Layout.full((2, 3), 16, device=device)
    turned = layout.transpose()
    assert layout.transpose() is turned and turned.transpose() is layout
    found = weakref.ref(layout)
    gc.disable()
    try:
        del layout
        assert found() is None
    finally:
        gc.enable()
    assert torch.equal(turned.transpose().positions, Layout.full((2, 3), 16, device=device).positions)


def test_overflow_is_nan(device: torch.device) -> None:
    layout = Layout.from_mask(torch.ones(3, 3, device=device).bool(), 16, capacity=8)
    assert transpose(BlockSparseTensor(torch.ones(8, 16, 16, device=device), layout)).values.isnan().all()


@pytest.mark.parametrize("kind", [torch.int64, torch.uint8, torch.bool])
def test_whole_numbers(kind: torch.dtype, device: torch.device) -> None:
    """Where blocks are lost there are the lowest ones."""
    dense = torch.arange(32 * 48, device=device).view(32, 48).remainder(100).to(kind)
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]], device=device)
    x = from_dense(dense, Layout.from_mask(mask, 16))
    assert torch.equal(transpose(x).to_dense(), x.to_dense().mT)
    short = from_dense(dense, Layout.from_mask(mask, 16, capacity=3))
    lowest = False if kind is torch.bool else torch.iinfo(kind).min
    assert (transpose(short).values == lowest).all()


@pytest.mark.native
def test_compile(compiled, device: torch.device) -> None:
    x = problem(torch.float32, device)
    assert torch.equal(compiled(lambda x: transpose(x).to_dense())(x), x.to_dense().mT)


def test_errors() -> None:
    with pytest.raises(TypeError, match=r"blocksparse.transpose: x must be a BlockSparseTensor, got Tensor"):
        transpose(torch.ones(3, 3))


@pytest.mark.kernels
@pytest.mark.parametrize("shape", [(2, 64, 64), (3, 70, 33), (1, 1, 130), (0, 16, 16), (2, 0, 5)], ids=str)
def test_turn(shape: tuple[int, ...], device: torch.device) -> None:
    """What products use that ask for an operand the other way around."""
    from gossamer.blocksparse._triton.transpose import turn

    x = torch.randn(shape, device=device, generator=seeded(0, device))
    assert torch.equal(turn(x), x.mT)
