"""Layouts, tensors, rows and attention at random shapes, against dense masks and dense PyTorch.

Elements are small integers where sums are compared for equality.
"""

import math
import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer import blocksparse
from gossamer._core.ops import INTERPRET
from gossamer.blocksparse import Layout, from_dense
from tests.blocksparse import attention_oracle
from tests.blocksparse.blocks import elements, random_blocks

FEW = settings(max_examples=4 if INTERPRET else 25)
LEADING = st.sampled_from([(), (1,), (3,), (2, 2), (0,)])
SIZES = st.tuples(st.integers(1, 90), st.integers(1, 90))
BLOCKS = st.tuples(st.sampled_from([16, 32]), st.sampled_from([16, 32, 64]))
DENSITIES = st.sampled_from([0.0, 0.2, 0.6, 1.0])


@st.composite
def layouts(draw, device: torch.device, *, lead=None, size=None, block=None) -> Layout:
    """With room for just its blocks, or for more."""
    lead = draw(LEADING) if lead is None else lead
    size = draw(SIZES) if size is None else size
    block = draw(BLOCKS) if block is None else block
    generator = torch.Generator(device).manual_seed(draw(st.integers(0, 1 << 30)))
    shape = (*lead, -(-size[0] // block[0]), -(-size[1] // block[1]))
    mask = torch.rand(shape, device=device, generator=generator) < draw(DENSITIES)
    room = None if draw(st.booleans()) else mask.numel() + 1
    return Layout.from_mask(mask, block, size=size, capacity=room)


def covers(mask: Tensor, block: tuple[int, int]) -> Tensor:
    """The blocks that hold any of a mask's elements."""
    pad = (0, -mask.shape[-1] % block[1], 0, -mask.shape[-2] % block[0])
    wide = torch.nn.functional.pad(mask, pad)
    grid = wide.view(*mask.shape[:-2], wide.shape[-2] // block[0], block[0], wide.shape[-1] // block[1], block[1])
    return grid.any(-1).any(-2)


@FEW
@given(data=st.data())
def test_layouts(data, device: torch.device) -> None:
    """Every part of a layout, and those of others that are made of it."""
    a = data.draw(layouts(device))
    b = data.draw(layouts(device, lead=a.shape[:-2], size=a.size, block=a.block_size))
    x, y = a.to_dense(), b.to_dense()
    blocks = x.flatten().nonzero().flatten()
    count, (rows, cols) = len(blocks), a.shape[-2:]
    assert int(a.nnz) == count and a.filled == (a.capacity == count)
    assert torch.equal(a.row_indices[:count].long(), blocks // cols) and (a.row_indices[count:] == -1).all()
    assert torch.equal(a.col_indices[:count].long(), blocks % cols) and (a.col_indices[count:] == -1).all()
    ends = x.sum(-1).flatten().cumsum(0), x.sum(-2).flatten().cumsum(0)
    assert torch.equal(a.row_offsets[1:].long(), ends[0]) and torch.equal(a.col_offsets[1:].long(), ends[1])
    turned = a.transpose()
    assert torch.equal(turned.to_dense(), x.mT) and turned.size == a.size[::-1] and turned.capacity == a.capacity
    assert torch.equal(a.union(b).to_dense(), x | y) and torch.equal(a.intersection(b).to_dense(), x & y)
    assert torch.equal(a.union(b, capacity=2 * x.numel() + 1).to_dense(), x | y)
    product = Layout.product(a, b.transpose(), capacity=max(math.prod(a.shape[:-2]) * rows * rows, 1))
    assert torch.equal(product.to_dense(), (x.float() @ y.float().mT) != 0)
    block = data.draw(BLOCKS)
    adapted = blocksparse.adapt(a, block)
    assert torch.equal(adapted.to_dense(), covers(elements(a), block)) and adapted.size == a.size
    blocksparse.validate(a, a.transpose().transpose())


@pytest.mark.native
@settings(max_examples=40)
@given(data=st.data())
def test_patterns(data, device: torch.device) -> None:
    """Against their definitions element by element, with the capacity that the host has counted."""
    (m, n), block = data.draw(SIZES), data.draw(BLOCKS)
    behind, ahead, tokens = (data.draw(st.integers(0, 70)) for _ in range(3))
    dilation = data.draw(st.one_of(st.just(1), st.integers(1, 70)))
    apart = torch.arange(m, device=device)[:, None] + (n - m) - torch.arange(n, device=device)
    position = torch.arange(m, device=device)[:, None] + (n - m)
    first = (torch.arange(n, device=device) < tokens) | ((position >= 0) & (position < tokens))
    cases = (
        (blocksparse.causal((m, n), block, device=device), apart >= 0),
        (
            blocksparse.sliding_window((m, n), block, (behind, ahead), dilation=dilation, device=device),
            (apart <= behind) & (apart >= -ahead) & (apart % dilation == 0),
        ),
        (blocksparse.global_tokens((m, n), block, tokens, device=device), first),
    )
    for layout, mask in cases:
        want = covers(mask, block)
        assert torch.equal(layout.to_dense(), want) and layout.capacity == max(int(want.sum()), 1)


@FEW
@given(data=st.data())
def test_dense_and_back_and_transposed(data, dtype: torch.dtype, device: torch.device) -> None:
    layout = data.draw(layouts(device))
    x = torch.randn(layout.dense_shape, device=device).to(dtype).requires_grad_()
    fill = data.draw(st.sampled_from([0.0, -1.5]))
    blocks, kept = from_dense(x, layout), elements(layout)
    assert torch.equal(blocks.to_dense(fill), torch.where(kept, x, fill))
    turned = blocks.mT
    assert torch.equal(turned.to_dense(fill), torch.where(kept, x, fill).mT)
    towards = torch.randn(turned.shape, device=device).to(dtype)
    (grad,) = torch.autograd.grad(turned.to_dense(), x, towards)
    assert torch.equal(grad, torch.where(kept, towards.mT, 0))
    other = data.draw(layouts(device, lead=layout.shape[:-2], size=layout.size))
    adapted = blocksparse.adapt(blocks, other).to_dense()
    assert torch.equal(adapted, torch.where(kept & elements(other), x, 0))


@FEW
@given(data=st.data())
def test_rows(data, device: torch.device) -> None:
    """Reductions and vectors, exact; integers as well."""
    layout, dim = data.draw(layouts(device)), data.draw(st.sampled_from([-1, -2]))
    kind = data.draw(st.sampled_from([torch.float32, torch.int32, torch.uint8]))
    x = random_blocks(layout, torch.float32, seed=data.draw(st.integers(0, 99)), integers=True).to(kind)
    blocks, kept = from_dense(x, layout), elements(layout)
    least = -math.inf if kind.is_floating_point else torch.iinfo(kind).min
    assert torch.equal(blocks.sum(dim), torch.where(kept, x, 0).sum(dim))
    assert torch.equal(blocks.amax(dim), torch.where(kept, x, least).amax(dim))
    x, blocks = x.float(), blocks.to(torch.float32)
    shape = (x.shape[-2], 1) if dim == -1 else (1, x.shape[-1])
    vector = torch.randint(-3, 4, shape, device=device).float()
    for function in (operator.add, operator.sub, operator.mul):
        want = torch.where(kept, function(x, vector), 0)
        assert torch.equal(function(blocks, vector).to_dense(), want)


@pytest.mark.native
@FEW
@given(data=st.data())
def test_norms(data, device: torch.device) -> None:
    layout = data.draw(layouts(device))
    n, kept = layout.size[1], elements(layout)
    x = random_blocks(layout, torch.float32, seed=data.draw(st.integers(0, 99)))
    weight, bias = torch.randn(2, n, device=device)
    norms = torch.nn.functional
    for got, want in (
        (blocksparse.layer_norm(from_dense(x, layout), weight, bias), norms.layer_norm(x, (n,), weight, bias)),
        (blocksparse.rms_norm(from_dense(x, layout), weight), norms.rms_norm(x, (n,), weight)),
    ):
        torch.testing.assert_close(got.to_dense(), torch.where(kept, want, 0), rtol=1e-4, atol=1e-4)


@settings(max_examples=4 if INTERPRET else 25)
@given(data=st.data())
def test_attention(data, device: torch.device) -> None:
    """Result and gradients in float32, with heads that share keys, lengths, a mask and a bias."""
    heads = data.draw(st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]))
    lead = data.draw(st.sampled_from([(), (1,), (heads[0],), (2, 1), (2, heads[0])]))
    block = (16, data.draw(st.sampled_from([16, 32]))) if INTERPRET else data.draw(BLOCKS)
    size = data.draw(st.tuples(st.integers(1, 40), st.integers(1, 40)))
    d = data.draw(st.sampled_from([8, 16, 24]))
    density = data.draw(st.sampled_from([0.2, 0.6, 1.0]))
    given = attention_oracle.problem(device, torch.float32, lead, block, size, heads, d, density)
    generator = torch.Generator(device).manual_seed(data.draw(st.integers(0, 1 << 30)))
    options = {"causal": data.draw(st.booleans()), "scale": data.draw(st.sampled_from([None, 0.3]))}
    if data.draw(st.booleans()):
        options["lengths"] = torch.randint(0, size[1] + 1, (2,), device=device, generator=generator)
    if data.draw(st.booleans()):
        options["mask"] = torch.rand(2, 1, *size, device=device, generator=generator) < 0.7
    if data.draw(st.booleans()):
        options["bias"] = torch.randn(heads[0], *size, device=device, generator=generator).requires_grad_()
    attention_oracle.check(*given, **options)


@pytest.mark.full
@settings(max_examples=30 if INTERPRET else 200)
@given(data=st.data())
def test_layouts_at_length(data, device: torch.device) -> None:
    a = data.draw(layouts(device))
    b = data.draw(layouts(device, lead=a.shape[:-2], size=a.size, block=a.block_size))
    x, y = random_blocks(a, torch.float32, integers=True), random_blocks(b, torch.float32, seed=1, integers=True)
    left, right = from_dense(x, a), from_dense(y, b)
    assert torch.equal(blocksparse.matmul(left, right, transpose_b=True), x @ y.mT)
    union = a.union(b)
    added = blocksparse.adapt(left, union) + blocksparse.adapt(right, union)
    assert torch.equal(added.to_dense(), x + y)
