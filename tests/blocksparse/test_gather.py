"""`blocksparse.gather` and `Layout.from_indices` against `torch.gather` of dense float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gossamer.blocksparse import BlockSparseTensor, Layout, from_dense, gather, layout_of_indices
from gossamer.testing import assert_close
from tests.blocksparse.blocks import dense_index, draw_two, elements, native, random_blocks, random_index, random_layout

# leading dimensions, size and block of input; dim; leading dimensions and size of index
CASES = [
    ((2,), (20, 50), (16, 32), -1, (2,), (18, 40)),
    ((2,), (20, 20), (32, 16), -2, (2,), (40, 20)),
    ((3, 2), (10, 33), (16, 16), 0, (2, 2), (10, 17)),
    ((1, 3), (20, 33), (32, 16), 1, (1, 2), (20, 33)),
    ((3, 2), (20, 33), (16, 16), -1, (2, 1), (18, 40)),
    ((2, 3), (10, 17), (16, 16), 0, (3, 1), (10, 17)),
]


def padded(x: Tensor, dim: int) -> Tensor:
    """One more at the end of a dimension, of zeros: what names nothing finds it."""
    shape = list(x.shape)
    shape[dim] = 1
    return torch.cat([x, x.new_zeros(shape)], dim)


def expected(x: Tensor, dim: int, index: BlockSparseTensor) -> Tensor:
    at = dense_index(index, x.shape[dim])
    for k in range(x.dim()):
        if k != dim % x.dim():
            x = x.narrow(k, 0, at.shape[k])
    return padded(x, dim).gather(dim, at)


@pytest.mark.parametrize("lead, size, block, dim, index_lead, index_size", CASES, ids=str)
def test_gather(lead, size, block, dim, index_lead, index_size, device: torch.device) -> None:
    check(lead, size, block, dim, index_lead, index_size, torch.float32, torch.int64, device)


@pytest.mark.parametrize("index_dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_dtypes(index_dtype: torch.dtype, dtype: torch.dtype, device: torch.device) -> None:
    check((), (20, 40), (16, 16), -1, (), (20, 50), dtype, index_dtype, device)


@pytest.mark.full
@pytest.mark.parametrize("lead", [(1,), (16,)], ids=str)
@pytest.mark.parametrize("block", [(16, 16), (32, 32), (64, 64), (128, 128), (16, 128)], ids=str)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_wide_grid(lead, block, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    size = 3 * block[0] - 5, 3 * block[1]
    check(lead, size, block, dim, lead, size, dtype, torch.int64, device)


def check(
    lead, size, block, dim, index_lead, index_size, dtype: torch.dtype, index_dtype: torch.dtype, device: torch.device
) -> None:
    layout = random_layout(lead, size, block, device)
    other = random_layout(index_lead, index_size, block, device, seed=1)
    x = random_blocks(layout, dtype).requires_grad_()
    index = random_index(other, x.shape[dim], dtype=index_dtype)
    out = gather(from_dense(x, layout), dim, index)
    assert out.layout is other
    assert torch.equal(out.to_dense(), expected(x, dim, index))
    # What nothing takes part in is zero here: no garbage spreads.
    assert not out.values[~from_dense(torch.ones_like(out.to_dense(), dtype=torch.bool), other).values].any()
    grad = torch.randn(out.shape, device=device).to(dtype)
    (ours,) = torch.autograd.grad(out.to_dense(), x, grad)
    wide = x.detach().double().requires_grad_()
    plain = x.detach().clone().requires_grad_()
    (want,) = torch.autograd.grad(expected(wide, dim, index), wide, grad.double())
    (usual,) = torch.autograd.grad(expected(plain, dim, index), plain, grad)
    named = elements(layout)
    assert_close(ours, reference64=want * named, plain=usual * named)


@pytest.mark.parametrize("kind", [torch.bool, native(torch.uint8), native(torch.int16), torch.int64])
def test_integers(kind: torch.dtype, device: torch.device) -> None:
    layout = random_layout((), (20, 40), (16, 16), device)
    x = random_blocks(layout, kind)
    index = random_index(random_layout((), (20, 40), (16, 16), device, seed=1), 40)
    assert torch.equal(gather(from_dense(x, layout), -1, index).to_dense(), expected(x, -1, index))


@pytest.mark.native
@given(data=st.data())
def test_property(data: st.DataObject) -> None:
    """Any shape, block, density and dimension."""
    layout, other, dim = draw_two(data)
    x = random_blocks(layout, torch.float32)
    index = random_index(other, x.shape[dim])
    out = gather(from_dense(x, layout), dim, index)
    assert torch.equal(out.to_dense(), expected(x, dim, index))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_layout_of_indices(dim: int, device: torch.device) -> None:
    """It has a block exactly where there is an element that an index names."""
    other = random_layout((2,), (20, 40), (16, 32), device, density=0.4)
    bound = (3, 50, 100)[dim]
    index = random_index(other, bound)
    layout = layout_of_indices(index, dim, bound, capacity=40)
    shape = [2, 20, 40]
    shape[dim] = bound
    assert layout.dense_shape == tuple(shape) and layout.block_size == (16, 32)
    named = torch.zeros(shape, dtype=torch.bool, device=device)
    named = padded(named, dim).scatter_(dim, dense_index(index, bound), True).narrow(dim, 0, bound)
    assert torch.equal(layout.to_dense(), Layout.from_mask(_blocks(named, 16, 32), (16, 32)).to_dense())
    x = random_blocks(layout, torch.float32)
    assert torch.equal(gather(from_dense(x, layout), dim, index).to_dense(), expected(x, dim, index))


def _blocks(named: Tensor, height: int, width: int) -> Tensor:
    m, n = named.shape[1:]
    wide = torch.nn.functional.pad(named, (0, -n % width, 0, -m % height))
    return wide.unflatten(2, (-1, width)).unflatten(1, (-1, height)).any(-1).any(2)


def test_special_values(device: torch.device) -> None:
    layout = Layout.from_mask(torch.ones(1, 1, device=device).bool(), 16)
    x = torch.zeros(16, 16, device=device)
    x[0, 3], x[1, 3] = math.nan, math.inf
    index = from_dense(torch.full((16, 16), 3, device=device), layout)
    out = gather(from_dense(x, layout), 1, index).to_dense()
    assert out[0].isnan().all() and out[1].isposinf().all() and not out[2:].any()


@pytest.mark.kernels
def test_out_of_range_is_nan_on_a_gpu(device: torch.device) -> None:
    layout = Layout.from_mask(torch.ones(1, 1, device=device).bool(), 16)
    index = torch.zeros(16, 16, dtype=torch.int64, device=device)
    index[3, 4], index[5, 6] = 16, -2
    blocks = from_dense(index, layout)
    out = gather(from_dense(torch.ones(16, 16, device=device), layout), 0, blocks).to_dense()
    assert torch.equal(out.isnan(), (index == 16) | (index == -2))
    whole = gather(from_dense(torch.ones(16, 16, dtype=torch.int32, device=device), layout), 0, blocks).to_dense()
    assert whole[3, 4] == whole[5, 6] == torch.iinfo(torch.int32).min
    assert layout_of_indices(blocks, 0, 16).to_dense().all()


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"input": torch.ones(32, 32)}, TypeError, "input must be a BlockSparseTensor, got Tensor"),
        ({"index": torch.ones(32, 32)}, TypeError, "index must be a BlockSparseTensor, got Tensor"),
        ({"dtype": torch.float32}, TypeError, "index must be int8, int16, int32 or int64, got float32"),
        ({"dim": 2}, ValueError, "dim must be from -2 to 1, got 2"),
        (
            {"size": (33, 32)},
            ValueError,
            r"index must have .* be at most as long along each but dim 1; input is \[32, 32\], index \[33, 32\]",
        ),
        (
            {"block": (32, 16)},
            ValueError,
            "index must have blocks of 16 x 16 like input, got 32 x 16. Use blocksparse.adapt",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_errors(change, error: type[Exception], message: str) -> None:
    device = torch.device("cpu")
    layout = random_layout((), (32, 32), (16, 16), device)
    other = random_layout((), change.get("size", (32, 32)), change.get("block", (16, 16)), device)
    index = from_dense(torch.zeros(other.dense_shape, dtype=change.get("dtype", torch.int64)), other)
    x = change.get("input", from_dense(torch.ones(32, 32), layout))
    with pytest.raises(error, match=f"blocksparse.gather: {message}"):
        gather(x, change.get("dim", 1), change.get("index", index))


@pytest.mark.native
def test_out_of_range_raises_on_the_cpu() -> None:
    layout = Layout.from_mask(torch.ones(1, 1).bool(), 16)
    x = from_dense(torch.ones(16, 16), layout)
    for wrong in (16, -2):
        index = from_dense(torch.full((16, 16), wrong), layout)
        with pytest.raises(ValueError, match=f"index of a gather must be -1, for none, or from 0 to 15, got {wrong}"):
            gather(x, 0, index)
