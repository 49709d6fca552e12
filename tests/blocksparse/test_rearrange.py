"""Repeats, pieces, joins and other blocks, against PyTorch's on dense tensors: these are moves, and exact."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gossamer._core import checks
from gossamer.blocksparse import (
    BlockSparseTensor,
    Layout,
    adapt,
    cat,
    from_dense,
    merge,
    repeat,
    split,
    stack,
)
from tests.blocksparse.blocks import drawn, elements, native, random_blocks, random_layout, repeat_interleave

# Whole blocks, and cut ones.
SIZES = [(32, 64), (20, 40)]
BLOCK = (16, 32)


def operand(
    size: tuple[int, int], dtype: torch.dtype, device: torch.device, *, lead: tuple[int, ...] = (2, 1), seed: int = 0
) -> tuple[Tensor, BlockSparseTensor]:
    layout = random_layout(lead, size, BLOCK, device, seed=seed)
    x = random_blocks(layout, dtype, seed=seed)
    if dtype.is_floating_point:
        x.requires_grad_()
    return x, from_dense(x, layout)


def check(out: BlockSparseTensor, want: Tensor, leaves: Sequence[Tensor], stored: Sequence[Tensor]) -> None:
    """Equal, and so are gradients, sums of small integers; elements that are not `stored` have none."""
    got = out.to_dense()
    assert out.layout.nnz <= out.layout.capacity and torch.equal(got, want)
    if leaves:
        grad = torch.randint(-3, 4, want.shape, device=want.device).to(want.dtype)
        ours, theirs = (torch.autograd.grad(t, leaves, grad, retain_graph=True) for t in (got, want))
        for a, b, named in zip(ours, theirs, stored):
            assert torch.equal(a, torch.where(named, b, 0))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(
    "sizes",
    [
        native((1, 2, 1, 1)),
        native((1, 1, 2, 1)),
        native((1, 1, 1, 2)),
        native((2, 2, 1, 3)),
        (2, 1, 1, 2),
        native((2, 1, 1, 2, 2)),
    ],
    ids=str,
)
def test_repeat(size, sizes, device: torch.device) -> None:
    x, blocks = operand(size, torch.float32, device)
    check(repeat(blocks, sizes), x.repeat(sizes), [x], [elements(blocks.layout)])


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dim", [native(0), 1, native(2), 3, native(-3)])
def test_repeat_interleave(size, dim: int, device: torch.device) -> None:
    x, blocks = operand(size, torch.float32, device)
    check(repeat_interleave(blocks, 3, dim), x.repeat_interleave(3, dim), [x], [elements(blocks.layout)])


def test_copies_of_many_blocks(device: torch.device) -> None:
    """Of matrices that have not all equally many blocks."""
    layout = random_layout((2,), (192, 192), (16, 16), device, density=0.7)
    x = torch.randn(2, 192, 192, device=device)
    blocks = from_dense(x, layout)
    got = repeat_interleave(blocks, 3, 0).to_dense()
    assert torch.equal(got, blocks.to_dense().repeat_interleave(3, 0))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(
    "dim, parts",
    [(0, 1), native(1, 2), native(-2, 16), (2, (4, 0, 16)), native(3, (32, 8)), native(-1, 15)],
    ids=str,
)
def test_split(size, dim: int, parts, device: torch.device) -> None:
    x, blocks = operand(size, torch.float32, device)
    if not isinstance(parts, int):
        parts = [*parts[:-1], x.shape[dim] - sum(parts[:-1])]
    pieces, wanted = split(blocks, parts, dim), x.split(parts, dim)
    assert len(pieces) == len(wanted)
    for piece, want in zip(pieces, wanted):
        check(piece, want, [x], [elements(blocks.layout)])


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dim", [native(0), 1, 2, native(3)])
def test_cat(size, dim: int, device: torch.device) -> None:
    x, a = operand(size, torch.float32, device)
    shape = [2, 1, *size]
    shape[dim] += 1 if dim < 2 else 5
    y, b = operand((shape[2], shape[3]), torch.float32, device, lead=(shape[0], shape[1]), seed=1)
    stored = [elements(t.layout) for t in (a, b)]
    check(cat([a, b, a], dim), torch.cat([x, y, x], dim), [x, y], stored)
    check(cat([b], dim), y * 1, [y], stored[1:])


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dim", [0, native(1), 2, native(-3)])
def test_stack(size, dim: int, device: torch.device) -> None:
    """Tensors with other blocks, and heads that are made and joined again."""
    x, a = operand(size, torch.float32, device)
    y, b = operand(size, torch.float32, device, seed=1)
    check(stack([a, b, a], dim), torch.stack([x, y, x], dim), [x, y], [elements(t.layout) for t in (a, b)])
    width = size[1] // 4
    heads = stack(split(a, width, -1), 2)
    assert torch.equal(heads.to_dense(), x.unflatten(3, (4, width)).movedim(3, 2))
    check(merge(heads, 2), x * 1, [x], [elements(a.layout)])


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(
    "dim, into", [(1, -1), (1, -2), native(0, -1), (0, 3), native(0, 1), native(1, 0), native(-3, -2)], ids=str
)
def test_merge(size, dim: int, into: int, device: torch.device) -> None:
    """Heads next to each other, in one call, as `torch.cat` of the slices."""
    x, blocks = operand(size, torch.float32, device, lead=(2, 3))
    dim, into = dim % 4, into % 4
    want = torch.cat(x.unbind(dim), into - (into > dim))
    check(merge(blocks, dim, into), want, [x], [elements(blocks.layout)])


def test_merge_of_other_layouts(dtype: torch.dtype, device: torch.device) -> None:
    """One dimension, no block, a given layout, one that overflowed."""
    x, blocks = operand((20, 40), dtype, device, lead=(3,))
    stored = [elements(blocks.layout)]
    check(merge(blocks, 0), torch.cat(x.unbind(0), -1), [x], stored)
    target = random_layout((), (60, 40), BLOCK, device, seed=4)
    out = merge(blocks, 0, -2, layout=target)
    assert out.layout is target
    check(out, torch.cat(x.unbind(0), 0) * elements(target), [x], stored)
    none = Layout.from_mask(torch.zeros(3, 2, 2, dtype=torch.bool, device=device), 16, capacity=1)
    assert merge(BlockSparseTensor(torch.ones(1, 16, 16, device=device), none), 0).to_dense().eq(0).all()
    over = Layout.from_mask(torch.ones(3, 2, 2, device=device).bool(), 16, capacity=5)
    assert merge(BlockSparseTensor(torch.ones(5, 16, 16, device=device), over), 0).to_dense().isnan().all()


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("block", [16, native(32), 64, native((64, 16)), native((16, 128))], ids=str)
def test_adapt(size, block, device: torch.device) -> None:
    x, blocks = operand(size, torch.float32, device)
    layout = adapt(blocks.layout, block)
    check(adapt(blocks, layout), x * 1, [x], [elements(blocks.layout)])
    # It covers the old one, and no block of it is without any of the old one's.
    height, width = layout.block_size
    grid = torch.nn.functional.pad(elements(blocks.layout), (0, -size[1] % width, 0, -size[0] % height))
    grid = grid.unflatten(-1, (-1, width)).any(-1).unflatten(-2, (-1, height)).any(-2)
    assert torch.equal(layout.to_dense(), grid)


@pytest.mark.native
def test_fewer_blocks(device: torch.device) -> None:
    """What a given layout lacks is left out; what it has besides is zero."""
    x, blocks = operand((40, 70), torch.float32, device)
    other = random_layout((2, 1), (40, 70), (32, 16), device, seed=3)
    check(adapt(blocks, other), x * elements(other), [x], [elements(blocks.layout)])
    target = random_layout((4, 1), (40, 70), BLOCK, device, seed=4)
    out = repeat(blocks, (2, 1, 1, 1), layout=target)
    assert out.layout is target
    check(out, x.repeat(2, 1, 1, 1) * elements(target), [x], [elements(blocks.layout)])
    out = cat([blocks, blocks], 0, layout=target)
    check(out, torch.cat([x, x]) * elements(target), [x], [elements(blocks.layout)])


def test_dtypes(dtype: torch.dtype, device: torch.device) -> None:
    x, blocks = operand((20, 40), dtype, device, lead=())
    stored = [elements(blocks.layout)]
    check(repeat(blocks, (2, 2)), x.repeat(2, 2), [x], stored)
    check(adapt(blocks, adapt(blocks.layout, 64)), x * 1, [x], stored)
    for piece, want in zip(split(blocks, 17, capacity=9), x.split(17)):
        assert piece.layout.capacity == 9
        check(piece, want, [x], stored)


@pytest.mark.parametrize("kind", [torch.bool, native(torch.uint8), native(torch.int16), torch.int64])
def test_integers(kind: torch.dtype, device: torch.device) -> None:
    x, blocks = operand((20, 40), kind, device, lead=(1, 1))
    check(repeat(blocks, (1, 1, 2, 2)), x.repeat(1, 1, 2, 2), [], [])
    check(cat([blocks, blocks], -1), torch.cat([x, x], -1), [], [])
    check(adapt(blocks, adapt(blocks.layout, 64)), x, [], [])


@pytest.mark.native
@given(data=st.data())
def test_property(data: st.DataObject) -> None:
    """Any shape, block and dimension: pieces, joined again, are what they were; and repeats are repeats."""
    block, lead, size, density, device = drawn(data)
    dim = data.draw(st.integers(0, len(lead) + 1))
    layout = random_layout(lead, size, block, device, density=density)
    x = random_blocks(layout, torch.float32)
    blocks = from_dense(x, layout)
    at = data.draw(st.integers(0, x.shape[dim]))
    pieces = split(blocks, [at, x.shape[dim] - at], dim)
    for piece, want in zip(pieces, x.split([at, x.shape[dim] - at], dim)):
        assert torch.equal(piece.to_dense(), want)
    again = cat(pieces, dim)
    assert torch.equal(again.to_dense(), x) and not (layout.to_dense() & ~again.layout.to_dense()).any()
    times = data.draw(st.integers(1, 3))
    assert torch.equal(repeat_interleave(blocks, times, dim).to_dense(), x.repeat_interleave(times, dim))
    sizes = [times if k == dim else 1 for k in range(x.dim())]
    assert torch.equal(repeat(blocks, sizes).to_dense(), x.repeat(sizes))
    other = data.draw(st.sampled_from([16, 64, (128, 32)]))
    assert torch.equal(adapt(blocks, adapt(layout, other)).to_dense(), x)


def test_pieces_without_room_are_nan(device: torch.device) -> None:
    whole = from_dense(torch.ones(32, 32, device=device), Layout.full((2, 2), 16, device=device))
    assert split(whole, 16, capacity=1)[0].values.isnan().all()


@pytest.mark.native
def test_what_follows_from_a_repetition_is_made_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in inference, where a gradient may follow; and a graph's memory is not kept."""
    x, blocks = operand((32, 64), torch.float32, device)
    with torch.inference_mode():
        first = repeat_interleave(blocks.detach(), 2, -1).layout
    again = repeat_interleave(blocks, 2, -1)
    assert again.layout is first and repeat_interleave(blocks, 3, -1).layout is not first
    check(again, x.repeat_interleave(2, -1), [x], [elements(blocks.layout)])
    for times in range(1, 40):
        repeat(blocks, (1, 1, times, 1))
    assert repeat_interleave(blocks, 2, -1).layout is not first
    monkeypatch.setattr(checks, "capturing", lambda: True)
    _, other = operand((32, 64), torch.float32, device, seed=1)
    assert repeat(other, (2, 1, 1, 1)).layout is not repeat(other, (2, 1, 1, 1)).layout


@pytest.mark.gpu
@pytest.mark.full
def test_more_than_2_to_the_31_elements() -> None:
    device = torch.device("cuda")
    layout = Layout.from_mask(torch.ones(3, 256, 256, device=device).bool(), 128)
    x = BlockSparseTensor(torch.zeros(layout.capacity, 128, 128, dtype=torch.float16, device=device), layout)
    x.values[-1, -1] = torch.arange(128, device=device)
    for out in (repeat_interleave(x, 1, 0), cat([x], 1), adapt(x, adapt(layout, 64))):
        last, _ = out.values.view(3, -1, *out.values.shape[1:])[2, -1, -1].max(0)
        assert int(last) == 127 and out.values.count_nonzero() == 127


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda x: repeat(x, (2,)), ValueError, r"repeat: sizes must name each of the 2 dimensions of x, got \(2,\)"),
        (lambda x: repeat(x, (-1, 1)), ValueError, "repeat: sizes must be at least 1, got -1"),
        (lambda x: repeat(x.values, (1, 1)), TypeError, "repeat: x must be a BlockSparseTensor, got Tensor"),
        (lambda x: repeat(x, (2, 1), layout=x.layout), ValueError, r"repeat: layout must be of \[64, 32\] elements"),
        (
            lambda x: split(x, (3, 4)),
            ValueError,
            r"split: split_size must add up to 32, the size of dim 0, got \[3, 4\]",
        ),
        (lambda x: cat([]), ValueError, "cat: tensors must hold at least one"),
        (lambda x: cat([x, BlockSparseTensor(x.values.half(), x.layout)]), TypeError, r"tensors\[1\] must be float32"),
        (
            lambda x: cat([x, repeat(x, (1, 2))]),
            ValueError,
            r"cat: tensors\[1\] must be like tensors\[0\] but for dim 0",
        ),
        (lambda x: repeat(x, 2), TypeError, "repeat: sizes must be a list or tuple of ints, got int"),
        (lambda x: split(x, 1.5), TypeError, "split: split_size must be a list or tuple of ints, got float"),
        (lambda x: split(x, [16.0, 16.0]), TypeError, r"split: split_size must be a list or tuple of ints, got \[16.0"),
        (lambda x: cat(x), TypeError, "cat: tensors must be a list or tuple of BlockSparseTensors, got BlockSparseT"),
        (lambda x: stack(x for _ in range(2)), TypeError, "stack: tensors must be a list or tuple of .* got generator"),
        (lambda x: stack([]), ValueError, "stack: tensors must hold at least one"),
        (
            lambda x: stack([x, x], 1),
            ValueError,
            "stack: dim must be a place for a leading dimension, from 0 to 0, got 1",
        ),
        (lambda x: stack([x, x.values]), TypeError, r"stack: tensors\[1\] must be a BlockSparseTensor"),
        (
            lambda x: merge(x, 0),
            ValueError,
            r"merge: dim must be a leading dimension of x that is not empty, .* got dim 0 and into 1",
        ),
        (lambda x: merge(x, 2), ValueError, "merge: dim must be from -2 to 1, got 2"),
        (lambda x: merge(x.values, 0), TypeError, "merge: x must be a BlockSparseTensor, got Tensor"),
        (lambda x: adapt(x, x), TypeError, "adapt: to must be a blocksparse.Layout"),
        (lambda x: adapt(x, repeat(x, (1, 2)).layout), ValueError, r"must be of \[32, 32\] elements like x"),
        (lambda x: adapt(x.layout, 48), ValueError, "adapt: block_size must be 16, 32, 64 or 128"),
    ],
)
def test_errors(call, error: type[Exception], message: str) -> None:
    x = from_dense(torch.ones(32, 32), Layout.from_mask(torch.eye(2).bool(), 16))
    with pytest.raises(error, match=message):
        call(x)


@pytest.mark.parametrize("lead, size", [((), (32, 32)), ((2,), (40, 24)), ((2, 2), (16, 32))], ids=str)
def test_empty_pieces(lead: tuple[int, ...], size: tuple[int, int], device: torch.device) -> None:
    """Pieces of length 0, and no repetition at all, along every dimension, with their gradients."""
    x = torch.randn(*lead, *size, device=device, requires_grad=True)
    blocks = from_dense(x, Layout.full((*lead, -(-size[0] // 16), -(-size[1] // 16)), 16, size=size, device=device))
    for dim, total in enumerate(x.shape):
        for sizes in ([0, total], [total, 0], [1, 0, total - 1]):
            pieces = split(blocks, sizes, dim)
            for piece, want in zip(pieces, x.split(sizes, dim), strict=True):
                assert torch.equal(piece.to_dense(), want)
                (got,) = torch.autograd.grad(piece.to_dense().sum(), x, retain_graph=True)
                assert torch.equal(got, torch.autograd.grad(want.sum(), x, retain_graph=True)[0])
            assert torch.equal(cat(pieces, dim).to_dense(), x)
        once, times = repeat_interleave(blocks, 0, dim), [1] * x.dim()
        times[dim], times[dim - 1] = 0, 2
        for none, want in ((once, x.repeat_interleave(0, dim)), (repeat(blocks, times), x.repeat(times))):
            assert torch.equal(none.to_dense(), want)
            (got,) = torch.autograd.grad(none.values.sum(), x, retain_graph=True)
            assert not got.any()
    with pytest.raises(ValueError, match=r"repeat: sizes must be at least 1, got -1"):
        repeat_interleave(blocks, -1, 0)


@pytest.mark.parametrize("capacity", [None, 9])
@pytest.mark.parametrize("to", [16, (32, 16), "layout"], ids=str)
def test_blocks_of_zeros_are_pruned(to, capacity: int | None, device: torch.device) -> None:
    """Elements beyond the matrix and behind the last block, NaN here, hold no block; NaN in the matrix does."""
    dense = torch.zeros(2, 40, 44, device=device)
    dense[0, 3, 20], dense[0, 39, 43], dense[1, 17, 0] = 1, math.nan, -2
    dense.requires_grad_()
    layout = Layout.from_mask(torch.ones(2, 2, 2, device=device).bool(), 32, size=(40, 44), capacity=10)
    x = from_dense(dense, layout)
    inside = from_dense(torch.ones_like(dense).bool(), layout).values
    x = BlockSparseTensor(torch.where(inside, x.values, math.nan), layout)
    target = Layout.full((2, 3, 3), 16, size=(40, 44), device=device) if to == "layout" else to
    out = adapt(x, target, prune=True, capacity=capacity)
    want = Layout.from_dense(dense, 16 if to == "layout" else to)
    assert torch.equal(out.layout.to_dense(), want.to_dense())
    assert out.layout.capacity == (int(want.nnz) if capacity is None else capacity)
    torch.testing.assert_close(out.to_dense(), dense, equal_nan=True)
    (grad,) = torch.autograd.grad(out.to_dense().sum(), dense)
    assert torch.equal(grad, want.element_mask().float())


def test_pruning_what_overflowed(device: torch.device) -> None:
    layout = Layout.from_mask(torch.ones(3, 3, device=device).bool(), 16, capacity=8)
    x = BlockSparseTensor(torch.ones(8, 16, 16, device=device), layout)
    out = adapt(x, 16, prune=True)
    assert bool(out.layout.overflowed) and out.to_dense().isnan().all()
