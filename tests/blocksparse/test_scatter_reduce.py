"""`blocksparse.scatter` and `scatter_reduce` against PyTorch's on dense float64."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gossamer.blocksparse import BlockSparseTensor, Layout, from_dense, gather, scatter
from gossamer.testing import assert_close
from tests.blocksparse.blocks import dense_index, draw_two, elements, native, random_blocks, random_index, random_layout
from tests.blocksparse.test_gather import padded
from tests.strategies import seeded

REDUCTIONS = ("sum", "mean", "amax", "amin", "prod")
# leading dimensions, size and block of input; dim; leading dimensions and size of index
CASES = [
    ((2,), (20, 40), (16, 32), -1, (2,), (18, 50)),
    ((2,), (20, 20), (32, 16), -2, (2,), (40, 20)),
    ((2, 2), (10, 17), (16, 16), 0, (3, 2), (10, 17)),
    ((1, 3), (10, 17), (16, 16), 1, (1, 2), (10, 17)),
    ((3, 2), (20, 33), (16, 16), -1, (2, 1), (18, 40)),
]


def expected(x: Tensor, named: Tensor, dim: int, at: Tensor, src: Tensor, reduce: str, include_self: bool) -> Tensor:
    """PyTorch's, with one more place for what names nothing."""
    out = padded(x, dim).scatter_reduce(dim, at, src, reduce, include_self=include_self)
    return torch.where(named, out.narrow(dim, 0, x.shape[dim]), 0)


# The interpreter sees each case and each reduction with each way, but not all of them together.
COMBINATIONS = [
    (native if (CASES.index(case) + REDUCTIONS.index(reduce) + include_self) % 7 else pytest.param)(
        *case, reduce, include_self
    )
    for case, reduce, include_self in itertools.product(CASES, REDUCTIONS, (True, False))
]


@pytest.mark.parametrize("lead, size, block, dim, index_lead, index_size, reduce, include_self", COMBINATIONS, ids=str)
def test_scatter_reduce(
    lead, size, block, dim, index_lead, index_size, reduce: str, include_self: bool, device: torch.device
) -> None:
    check(lead, size, block, dim, index_lead, index_size, reduce, include_self, torch.float32, device)


@pytest.mark.parametrize("reduce", ["sum", native("mean"), native("amax"), native("amin"), native("prod")])
def test_dtypes(reduce: str, dtype: torch.dtype, device: torch.device) -> None:
    check((), (16, 20), (16, 16), -1, (), (16, 40), reduce, True, dtype, device)


@pytest.mark.full
@pytest.mark.parametrize("lead", [(1,), (16,)], ids=str)
@pytest.mark.parametrize("block", [(16, 16), (32, 32), (64, 64), (128, 128), (16, 128)], ids=str)
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("reduce", ["sum", "amax"])
def test_wide_grid(lead, block, dim: int, reduce: str, dtype: torch.dtype, device: torch.device) -> None:
    size = 3 * block[0] - 5, 3 * block[1]
    check(lead, size, block, dim, lead, size, reduce, True, dtype, device)


def check(
    lead, size, block, dim, index_lead, index_size, reduce: str, include_self: bool, dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    layout = random_layout(lead, size, block, device)
    other = random_layout(index_lead, index_size, block, device, seed=1, density=0.7)
    named, present = elements(layout), elements(other)
    x, src = random_blocks(layout, dtype), random_blocks(other, dtype, seed=1).requires_grad_()
    if not include_self:
        # PyTorch counts what is left out among equal extrema: no result is equal to it here.
        x = x + 100 * named
    x.requires_grad_()
    index = random_index(other, x.shape[dim])
    at = dense_index(index, x.shape[dim])
    out = scatter(
        from_dense(x, layout), dim, index, from_dense(src, other), reduce, include_self=include_self
    )  # fmt: skip
    assert out.layout is layout and out.dtype is dtype
    grad = torch.randn(out.shape, device=device).to(dtype)
    ours = out.to_dense(), *torch.autograd.grad(out.to_dense(), (x, src), grad)
    results = []
    for kind in (torch.float64, dtype):
        given, added = (t.detach().to(kind).requires_grad_() for t in (x, src))
        # As in dense matrices, in which what is not stored is given as zero and gets no gradient.
        want = expected(given * named, named, dim, at, added * present, reduce, include_self)
        results.append((want, *torch.autograd.grad(want, (given, added), grad.to(kind))))
    for name, a, want, plain in zip(("out", "input", "src"), ours, *results):
        if reduce == "prod" and name != "out" and dtype is not torch.float32:
            continue  # PyTorch's gradient divides rounded products: an error that budgets nothing
        assert_close(a, reference64=want, plain=plain, factor=4.0, name=name)


@pytest.mark.native
@pytest.mark.parametrize("lead, size, block, dim, index_lead, index_size", CASES, ids=str)
def test_into_nothing(lead, size, block, dim, index_lead, index_size, device: torch.device) -> None:
    """A layout instead of a tensor: zeros that take no part."""
    layout = random_layout(lead, size, block, device)
    other = random_layout(index_lead, index_size, block, device, seed=1)
    src = random_blocks(other, torch.float32, integers=True).requires_grad_()
    index = random_index(other, layout.dense_shape[dim], dtype=torch.int32)
    at = dense_index(index, layout.dense_shape[dim])
    for reduce in REDUCTIONS:
        out = scatter(layout, dim, index, from_dense(src, other), reduce).to_dense()
        nothing = torch.zeros(layout.dense_shape, device=device)
        want = expected(nothing, elements(layout), dim, at, src, reduce, False)
        torch.testing.assert_close(out, want, rtol=1e-6, atol=0)
        torch.testing.assert_close(*(torch.autograd.grad(t.square().sum(), src)[0] for t in (out, want)))


def last(x: Tensor, named: Tensor, dim: int, at: Tensor, src: Tensor) -> Tensor:
    """One entry after the other, the last remains."""
    x = padded(x, dim)
    for k in range(at.shape[dim]):
        x = x.scatter(dim, at.narrow(dim, k, 1), src.narrow(dim, k, 1))
    return torch.where(named, x.narrow(dim, 0, x.shape[dim] - 1), 0)


@pytest.mark.parametrize("lead, size, block, dim, index_lead, index_size", CASES, ids=str)
def test_scatter(lead, size, block, dim, index_lead, index_size, device: torch.device) -> None:
    dtype = torch.float16
    layout = random_layout(lead, size, block, device)
    other = random_layout(index_lead, index_size, block, device, seed=1)
    x, src = random_blocks(layout, dtype).requires_grad_(), random_blocks(other, dtype, seed=1).requires_grad_()
    index = random_index(other, x.shape[dim])
    out = scatter(from_dense(x, layout), dim, index, from_dense(src, other)).to_dense()
    want = last(x, elements(layout), dim, dense_index(index, x.shape[dim]), src)
    assert torch.equal(out, want)
    grad = torch.randn_like(out)
    ours, theirs = (torch.autograd.grad(t, (x, src), grad) for t in (out, want))
    for a, b, named in zip(ours, theirs, (elements(layout), elements(other))):
        assert torch.equal(a, torch.where(named, b, 0))


@pytest.mark.parametrize(
    "kind, dim",
    [(torch.bool, 0), native(torch.bool, -1), native(torch.uint8, 0), native(torch.uint8, -1), native(torch.int16, -1),
     native(torch.int64, 0), native(torch.int64, -1)],
)  # fmt: skip
def test_integers(kind: torch.dtype, dim: int, device: torch.device) -> None:
    layout = random_layout((2,), (10, 16), (16, 16), device)
    other = random_layout((2,), (10, 16), (16, 16), device, seed=1)
    x, src = random_blocks(layout, kind), random_blocks(other, kind, seed=1)
    index = random_index(other, x.shape[dim])
    at = dense_index(index, x.shape[dim])
    # PyTorch reduces no bool.
    wide = (t.to(torch.uint8) if kind is torch.bool else t for t in (x, src))
    x_wide, src_wide = wide
    for reduce in ("amax", "amin", "prod") if kind is torch.bool else ("sum", "amax", "amin", "prod"):
        for include_self in (True, False):
            out = scatter(
                from_dense(x, layout), dim, index, from_dense(src, other), reduce, include_self=include_self
            )  # fmt: skip
            want = expected(x_wide, elements(layout), dim, at, src_wide, reduce, include_self)
            assert torch.equal(out.to_dense(), want.to(kind)), (reduce, include_self)


@pytest.mark.native
@given(data=st.data())
def test_property(data: st.DataObject) -> None:
    """Any shape, block, density and dimension; small integers, whose sums are exact."""
    layout, other, dim = draw_two(data)
    x, src = (random_blocks(at, torch.float32, integers=True) for at in (layout, other))
    index = random_index(other, x.shape[dim])
    out = scatter(from_dense(x, layout), dim, index, from_dense(src, other), "sum")
    assert torch.equal(
        out.to_dense(), expected(x, elements(layout), dim, dense_index(index, x.shape[dim]), src, "sum", True)
    )


@pytest.mark.native
def test_source_of_another_layout(device: torch.device) -> None:
    """It is larger, and where it lacks a block, zeros are put."""
    layout, other = (random_layout((2,), (40, 50), (16, 32), device, seed=s) for s in (0, 1))
    larger = random_layout((2,), (70, 60), (16, 32), device, seed=2)
    src = random_blocks(larger, torch.float32, integers=True).requires_grad_()
    index = random_index(other, 50)
    at = dense_index(index, 50)
    x = random_blocks(layout, torch.float32, integers=True)
    for reduce in ("sum", "amax"):
        out = scatter(from_dense(x, layout), -1, index, from_dense(src, larger), reduce).to_dense()
        want = expected(x, elements(layout), -1, at, src[:, :40, :50], reduce, True)
        assert torch.equal(out, want)
    (grad,) = torch.autograd.grad(out.sum(), src)
    torch.testing.assert_close(grad, torch.autograd.grad(want.sum(), src)[0] * elements(larger))


def test_all_to_one_place(dtype: torch.dtype, device: torch.device) -> None:
    """The longest of sums, and of 16-bit numbers kept in float32 on the way: half of it would not move any more."""
    layout = Layout.from_mask(torch.ones(1, 8, device=device).bool(), 16)
    src = torch.ones(16, 128, device=device, dtype=dtype)
    src[:, 0] = 2048
    src[:, -1] = -2000
    index = from_dense(torch.full((16, 128), 5, device=device), layout)
    out = scatter(layout, -1, index, from_dense(src, layout), "sum").to_dense()
    assert (out[:, 5] == src.double().sum(1)).all() and not out[:, :5].any()


@pytest.mark.gpu
@pytest.mark.parametrize("places", [1, 7, 40, 8000])
@pytest.mark.parametrize("reduce", ["sum", "amax"])
def test_few_places_of_long_rows(places: int, reduce: str, device: torch.device, generator: torch.Generator) -> None:
    """Up to all of 32 entries meet at once; the bits are the same each time."""
    layout = random_layout((2,), (100, 8000), (64, 64), device, density=0.7)
    src = from_dense(torch.randn(2, 100, 8000, device=device, generator=generator), layout)
    index = from_dense(torch.randint(places, (2, 100, 8000), device=device, generator=generator), layout)
    whole = Layout.full((2, 2, 125), 64, size=(100, 8000), device=device)
    first, second = (scatter(whole, -1, index, src, reduce) for _ in range(2))
    assert torch.equal(first.values, second.values)
    named = elements(layout)
    at, x = torch.where(named, dense_index(index, 8000), 8000), src.to_dense()
    wide = torch.zeros(2, 100, 8001, device=device)
    plain, want = (wide.to(x.dtype).scatter_reduce(-1, at, x, reduce, include_self=False) for x in (x, x.double()))
    assert_close(first.to_dense(), reference64=want[..., :8000], plain=plain[..., :8000], factor=4.0)


def test_zeros_in_products(device: torch.device) -> None:
    """One zero among factors gets the product of the others; two leave nothing to any."""
    layout = Layout.from_mask(torch.ones(1, 1, device=device).bool(), 16)
    src = torch.full((16, 16), 2.0, device=device)
    src[0, 0] = src[1, 0] = src[1, 1] = 0
    src.requires_grad_()
    index = from_dense(torch.zeros(16, 16, dtype=torch.int64, device=device), layout)
    out = scatter(layout, -1, index, from_dense(src, layout), "prod").to_dense()
    (grad,) = torch.autograd.grad(out.sum(), src)
    assert out[:3, 0].tolist() == [0, 0, 2.0**16] and grad[0].tolist() == [2.0**15] + [0] * 15
    assert not grad[1].any() and (grad[2] == 2.0**15).all()


@pytest.mark.parametrize("reduce", ["sum", native("mean"), "amax", native("amin"), native("prod")])
def test_special_values(reduce: str, device: torch.device) -> None:
    layout = Layout.from_mask(torch.ones(1, 1, device=device).bool(), 16)
    src = torch.ones(16, 16, device=device)
    src[0, 3], src[1, 3] = math.nan, math.inf
    index = from_dense(torch.arange(16, device=device).expand(16, 16) // 4, layout)
    out = scatter(layout, 1, index, from_dense(src, layout), reduce).to_dense()
    assert out[0, 0].isnan() and out[2:].isfinite().all() and out[0, 1:].isfinite().all()
    assert out[1, 0] == (1 if reduce == "amin" else math.inf)


@pytest.mark.kernels
def test_out_of_range_is_none_on_a_gpu(device: torch.device) -> None:
    layout = Layout.from_mask(torch.ones(1, 1, device=device).bool(), 16)
    index = torch.arange(16, device=device).expand(16, 16).contiguous()
    index[3, 4], index[5, 6] = 16, -2
    out = scatter(layout, 1, from_dense(index, layout), from_dense(torch.ones(16, 16, device=device), layout))
    assert torch.equal(out.to_dense() == 1, index == torch.arange(16, device=device))


@pytest.mark.native
def test_out_of_range_raises_on_the_cpu() -> None:
    layout = Layout.from_mask(torch.ones(1, 1).bool(), 16)
    src, index = from_dense(torch.ones(16, 16), layout), from_dense(torch.full((16, 16), 99), layout)
    with pytest.raises(ValueError, match="index of a scatter must be -1, for none, or from 0 to 15, got 99"):
        scatter(layout, 0, index, src)


@pytest.mark.gpu
@pytest.mark.full
def test_more_than_2_to_the_31_elements() -> None:
    device = torch.device("cuda")
    layout = Layout.from_mask(torch.ones(3, 256, 256, device=device).bool(), 128)
    src = BlockSparseTensor(torch.zeros(layout.capacity, 128, 128, dtype=torch.float16, device=device), layout)
    src.values[-1] = 1
    index = BlockSparseTensor(torch.full(src.values.shape, 32767, dtype=torch.int32, device=device), layout)
    out = scatter(layout, -1, index, src, "sum")
    assert (out.values[-1, :, -1] == 128).all() and out.values.count_nonzero() == 128
    assert (gather(out, -1, index).values[-1] == 128).all()


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"src": torch.ones(32, 32)}, TypeError, "src must be a BlockSparseTensor, got Tensor"),
        ({"input": torch.ones(32, 32)}, TypeError, "input must be a BlockSparseTensor, got Tensor"),
        ({"dtype": torch.float16}, TypeError, "src must have the dtype of input, float32, got float16"),
        ({"reduce": "max"}, ValueError, "reduce must be one of sum, mean, amax, amin, prod, got 'max'"),
        ({"size": (16, 32)}, ValueError, r"index is \[32, 32\], src \[16, 32\]"),
        ({"dim": 5}, ValueError, "dim must be from -2 to 1, got 5"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_errors(change, error: type[Exception], message: str) -> None:
    device = torch.device("cpu")
    layout = random_layout((), (32, 32), (16, 16), device)
    other = random_layout((), change.get("size", (32, 32)), (16, 16), device)
    index = from_dense(torch.zeros(32, 32, dtype=torch.int64), layout)
    src = from_dense(torch.ones(other.dense_shape, dtype=change.get("dtype", torch.float32)), other)
    x = change.get("input", from_dense(torch.ones(32, 32), layout))
    with pytest.raises(error, match=rf"blocksparse\.scatter: .*{message}"):
        scatter(x, change.get("dim", 1), index, change.get("src", src), change.get("reduce", "sum"))


def test_reductions_that_a_dtype_lacks() -> None:
    layout = Layout.from_mask(torch.ones(1, 1).bool(), 16)
    index = from_dense(torch.zeros(16, 16, dtype=torch.int64), layout)
    for kind, reduce, rule in (
        (torch.int32, "mean", "a floating dtype, got int32"),
        (torch.bool, "sum", "numbers, got bool"),
    ):
        with pytest.raises(TypeError, match=f'reduce="{reduce}" needs {rule}'):
            scatter(layout, 0, index, from_dense(torch.ones(16, 16, dtype=kind), layout), reduce)


@pytest.mark.parametrize("include_self", [False, True])
@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin", "prod"])
def test_slots_beyond_the_matrix_take_no_part(reduce: str, include_self: bool, device: torch.device) -> None:
    """Slots beyond a cut block's matrix, behind the last block, and of no index hold anything, and get no gradient."""
    generator = seeded(0, device)
    layouts = [
        Layout.from_mask(torch.rand(3, 3, device=device, generator=generator) < 0.8, 16, size=(40, 33), capacity=10)
        for _ in range(2)
    ]
    inside = [from_dense(torch.ones(40, 33, device=device).bool(), layout).values for layout in layouts]
    before, src = (torch.randn(held.shape, device=device, generator=generator) for held in inside)
    for x, held in zip((before, src), inside):
        # Of neighbours beyond the matrix one is NaN and one is infinite.
        x[..., ::2] = torch.where(held[..., ::2], x[..., ::2], math.nan)
        x[..., 1::2] = torch.where(held[..., 1::2], x[..., 1::2], math.inf)
        x.requires_grad_()
    index = from_dense(torch.randint(-1, 40, (40, 33), device=device, generator=generator), layouts[1]).values
    index = torch.where(inside[1], index, 1 << 20)
    x, i, y = (BlockSparseTensor(*pair) for pair in ((before, layouts[0]), (index, layouts[1]), (src, layouts[1])))
    out = scatter(x, 0, i, y, reduce, include_self=include_self).to_dense()
    grads = torch.autograd.grad(out.sum(), (before, src))
    assert out.isfinite().all()
    for grad, held in zip(grads, inside):
        assert grad.isfinite().all() and not grad[~held].any()
    assert not grads[1][index < 0].any()


@pytest.mark.gpu
@pytest.mark.parametrize("reduce", ["last", "sum", "mean", "amax", "prod"])
def test_an_index_out_of_range_has_no_gradient(reduce: str) -> None:
    layout = Layout.full((2, 2), 16, device="cuda")
    index = torch.zeros(32, 32, device="cuda", dtype=torch.int64)
    index[3], index[5] = 32, -7
    src = torch.rand(32, 32, device="cuda", requires_grad=True)
    x, i, y = (from_dense(t, layout) for t in (torch.ones(32, 32, device="cuda"), index, src))
    if reduce == "last":
        out = scatter(x, 0, i, y)
    else:
        out = scatter(x, 0, i, y, reduce)
    (grad,) = torch.autograd.grad(out.to_dense().sum(), src)
    assert grad.isfinite().all() and not grad[3].any() and not grad[5].any()
