"""Layouts against the definition of their parts, entry by entry."""

import copy
import io
import itertools
import math

import pytest
import torch
from torch.utils import _pytree

from gossamer import blocksparse
from gossamer.blocksparse import Layout, from_dense
from gossamer.blocksparse._torch.layout import layout as cpu_layout
from gossamer.blocksparse.records import BlocksparseLayout
from tests.graphs import follows

SHAPES = [(1, 1), (3, 5), (2, 7, 1), (2, 3, 17, 40), (1, 130, 33), (2, 20, 300), (0, 4), (4, 0), (0, 3, 3)]


def random_mask(shape: tuple[int, ...], density: float, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(sum(shape))
    return torch.rand(shape, device=device, generator=generator) < density


def flattened(mask: torch.Tensor) -> torch.Tensor:
    return mask.reshape(math.prod(mask.shape[:-2]), *mask.shape[-2:])


def expected(mask: torch.Tensor) -> dict[str, list[int]]:
    mask = flattened(mask).cpu()
    blocks = mask.nonzero().tolist()
    number = {tuple(block): i for i, block in enumerate(blocks)}
    every = itertools.product(*map(range, mask.shape))
    return {
        "col_indices": [c for _, _, c in blocks],
        "row_indices": [z * mask.shape[1] + r for z, r, _ in blocks],
        "transpose_order": [number[tuple(b)] for b in sorted(blocks, key=lambda b: (b[0], b[2], b[1]))],
        "positions": [number.get(block, -1) for block in every],
    }


@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parts(shape: tuple[int, ...], density: float, device: torch.device) -> None:
    mask = random_mask(shape, density, device)
    nnz = int(mask.sum())
    for capacity in (None, nnz + 300, max(mask.numel(), 1)):
        layout = Layout.from_mask(mask, 16, capacity=capacity)
        assert torch.equal(layout.to_dense(), mask) and int(layout.nnz) == nnz and not layout.overflowed
        for name, entries in expected(mask).items():
            got = getattr(layout, name).tolist()
            assert got[: len(entries)] == entries, name
            assert set(got[len(entries) :]) <= {-1}, name
        flat = flattened(mask)
        assert layout.row_offsets.tolist() == [0, *flat.sum(2).flatten().cumsum(0).tolist()]
        assert layout.col_offsets.tolist() == [0, *flat.sum(1).flatten().cumsum(0).tolist()]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_element_of_the_buffer_is_written(shape: tuple[int, ...], device: torch.device) -> None:
    """Also those in front of a list that begins at a multiple of four: a buffer is compared, saved and hashed whole."""
    mask = random_mask(shape, 0.4, device)
    for capacity in (max(int(mask.sum()), 1), int(mask.sum()) + 1, int(mask.sum()) + 302):
        layout = Layout.from_mask(mask, 16, capacity=capacity)
        assert torch.equal(layout.buffer.cpu(), cpu_layout(BlocksparseLayout(flattened(mask).cpu(), layout.form)))


def test_overflow(device: torch.device) -> None:
    mask = random_mask((2, 9, 9), 0.5, device)
    full, short = Layout.from_mask(mask, 16), Layout.from_mask(mask, 16, capacity=30)
    assert short.overflowed and short.capacity == 30 and torch.equal(short.to_dense(), mask)
    for name in ("row_offsets", "col_offsets", "positions"):
        assert torch.equal(getattr(short, name), getattr(full, name))
    for name in ("col_indices", "row_indices"):
        assert torch.equal(getattr(short, name), getattr(full, name)[:30])
    assert torch.equal(short.transpose_order, full.transpose_order[:30].clamp(max=29))


@pytest.mark.parametrize("size, block", [((48, 64), (16, 16)), ((50, 70), (16, 32)), ((1, 1), (64, 16))], ids=str)
def test_from_dense_keeps_what_is_not_zero(size, block, device: torch.device) -> None:
    x = torch.zeros(2, *size, device=device)
    x[0, size[0] - 1, 0], x[1, 0, size[1] - 1] = 1, math.nan
    layout = Layout.from_dense(x, block)
    rows, cols = layout.shape[-2:]
    assert layout.to_dense().nonzero().tolist() == [[0, rows - 1, 0], [1, 0, cols - 1]]
    assert layout.size == size and int(Layout.from_dense(x.isnan(), block).nnz) == 1


def test_full_and_random(generator: torch.Generator, device: torch.device) -> None:
    full = Layout.full((2, 3, 5), (16, 32), size=(40, 150), device=device)
    assert full.to_dense().all() and full.capacity == 30 and full.size == (40, 150)
    drawn = Layout.random((4, 50, 50), 16, 0.25, generator=generator, device=device)
    assert 0.2 < int(drawn.nnz) / 10_000 < 0.3 and drawn.capacity == int(drawn.nnz)
    assert not Layout.random((3, 3), 16, 0.0, device=device).to_dense().any()


@pytest.mark.parametrize("density", [0.0, 0.1, 0.5, 1.0])
def test_product(density: float, device: torch.device) -> None:
    a = Layout.from_mask(random_mask((2, 7, 5), density, device), (16, 32), size=(100, 150))
    b = Layout.from_mask(random_mask((1, 5, 9), density, device), (32, 64), size=(150, 570))
    product = Layout.product(a, b)
    expected = (a.to_dense()[..., None] & b.to_dense()[:, None]).any(-2)
    assert torch.equal(product.to_dense(), expected)
    assert product.block_size == (16, 64) and product.size == (100, 570)


@pytest.mark.native
def test_product_counts_beyond_what_16_bits_hold(device: torch.device) -> None:
    a = Layout.full((1, 70_000), 16, device=device)
    assert Layout.product(a, a.transpose()).to_dense().all()


@pytest.mark.parametrize("capacity", [None, 100, 2])
def test_transpose(capacity: int | None, device: torch.device) -> None:
    mask = random_mask((2, 4, 3), 0.6, device)
    layout = Layout.from_mask(mask, (16, 32), size=(60, 70), capacity=capacity)
    turned = layout.transpose()
    assert torch.equal(turned.to_dense(), mask.mT) and turned.size == (70, 60) and turned.block_size == (32, 16)
    assert turned.capacity == layout.capacity and bool(turned.overflowed) == bool(layout.overflowed)
    if not layout.overflowed:
        nnz = int(layout.nnz)
        assert turned.transpose_order[:nnz][layout.transpose_order[:nnz].long()].tolist() == list(range(nnz))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_transposed_parts(shape: tuple[int, ...], device: torch.device) -> None:
    """The transposed layout is the one that the transposed mask makes."""
    mask = random_mask(shape, 0.4, device)
    for capacity in (None, int(mask.sum()) + 30):
        layout = Layout.from_mask(mask, 16, capacity=capacity)
        turned, wanted = layout.transpose(), Layout.from_mask(mask.mT, 16, capacity=layout.capacity)
        for name in ("shape", "block_size", "size", "capacity"):
            assert getattr(turned, name) == getattr(wanted, name)
        for name in ("row_offsets", "col_indices", "row_indices", "col_offsets", "transpose_order", "positions"):
            assert torch.equal(getattr(turned, name), getattr(wanted, name)), name


def test_transpose_of_what_overflowed(device: torch.device) -> None:
    """Nothing is right there, but whoever follows the lists stays inside."""
    mask = random_mask((2, 40, 30), 0.6, device)
    turned = Layout.from_mask(mask, 16, capacity=100).transpose()
    assert turned.overflowed and torch.equal(turned.to_dense(), mask.mT)
    for name, bound in (("col_indices", 40), ("row_indices", 60), ("transpose_order", 100)):
        entries = getattr(turned, name)
        assert int(entries.min()) >= -1 and int(entries.max()) < bound


def test_union_and_intersection(device: torch.device) -> None:
    masks = [random_mask(shape, 0.5, device) for shape in ((2, 3, 4), (3, 4), (1, 3, 4))]
    a, b, c = (Layout.from_mask(mask, 16) for mask in masks)
    assert torch.equal(a.union(b, c).to_dense(), masks[0] | masks[1] | masks[2])
    assert torch.equal(b.intersection(a, capacity=24).to_dense(), masks[0] & masks[1])
    with pytest.raises(ValueError, match=r"Layout.union: layouts must have one size and block size, got \(48, 64\)"):
        a.union(Layout.from_mask(masks[1], 32))
    with pytest.raises(ValueError, match=r"Layout.product: b must have 64 rows in blocks of 16 like the columns of a"):
        Layout.product(a, b)


def test_what_is_drawn(device: torch.device) -> None:
    layout = Layout.from_mask(torch.ones(3, 3, device=device).bool().tril(), 16)
    assert layout.draw() == "#..\n##.\n###"
    assert repr(layout) == f"{layout.summary()}\n{layout.draw()}"
    assert repr(Layout.full((100, 100), 16)) == Layout.full((100, 100), 16).summary()
    assert repr(Layout.full((0, 3, 3), 16)) == Layout.full((0, 3, 3), 16).summary()


@pytest.mark.native
def test_compile(compiled, device: torch.device) -> None:
    mask = random_mask((2, 9, 9), 0.5, device)
    layout = compiled(lambda mask: Layout.from_mask(mask, 32, capacity=162))(mask)
    assert torch.equal(layout.transpose_order, Layout.from_mask(mask, 32, capacity=162).transpose_order)


@pytest.mark.gpu
def test_capture() -> None:
    mask = random_mask((2, 9, 9), 0.5, torch.device("cuda"))
    follows(lambda: [Layout.from_mask(mask, 32, capacity=162).to_dense()], mask)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"mask": torch.ones(3).bool()}, r"mask must have shape \[..., rows, cols\], got \[3\]"),
        ({"block_size": 48}, "block_size must be 16, 32, 64 or 128, or a pair of these, got 48"),
        ({"block_size": 16.0}, "block_size must be 16, 32, 64 or 128, or a pair of these, got 16.0"),
        ({"size": (32, 33)}, r"size must be of 2 x 2 blocks of 16 x 16 like mask, got \(32, 33\)"),
        ({"capacity": 0}, "capacity must be at least 1, got 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_errors(change, message: str) -> None:
    with pytest.raises(ValueError, match=f"blocksparse.Layout.from_mask: {message}"):
        Layout.from_mask(**{"mask": torch.ones(2, 2).bool(), "block_size": 16, **change})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_scores_are_no_mask(dtype: torch.dtype) -> None:
    """Random scores all differ from 0: as a mask they would be every block."""
    with pytest.raises(TypeError, match=r"from_mask: mask must be bool or an integer, got .*select_blocks"):
        Layout.from_mask(torch.randn(2, 2).to(dtype), 16)


def test_copies_know_that_they_are_filled(device: torch.device) -> None:
    """Wherever a layout goes it knows its count; what shares its lists is the same layout to attention."""
    mask = torch.ones(2, 2, device=device).bool().tril()
    layout = Layout.from_mask(mask, 16)
    file = io.BytesIO()
    torch.save(layout, file)
    file.seek(0)
    leaves, spec = _pytree.tree_flatten(layout)
    rebuilt = _pytree.tree_unflatten(leaves, spec)
    for copied in (copy.copy(layout), copy.deepcopy(layout), layout.to("cpu"), torch.load(file), rebuilt):
        assert copied.filled and torch.equal(copied.positions.cpu(), layout.positions.cpu())
        assert not Layout.from_mask(mask, 16, capacity=4).filled
    q = torch.randn(1, 1, 32, 8, device=device)
    bias = from_dense(torch.randn(32, 32, device=device), layout)
    want = blocksparse.attention(q, q, q, layout, bias=bias)
    for same in (rebuilt, copy.copy(layout), layout.to(device)):
        assert same.is_same(layout) and torch.equal(blocksparse.attention(q, q, q, same, bias=bias), want)
