"""Products of dense and block-sparse operands, checked against dense float64."""

import itertools
import math
from dataclasses import replace

import torch
from torch import Tensor

from gossamer.blocksparse import BlockSparseTensor, Layout, from_dense, matmul
from gossamer.testing import assert_close
from tests.strategies import seeded

Operand = Tensor | BlockSparseTensor
MIXES = [mix for mix in itertools.product((False, True), repeat=3) if any(mix)]
TURNED = list(itertools.product((False, True), repeat=2))


def layout_of(
    lead: tuple[int, ...],
    size: tuple[int, int],
    block: tuple[int, int],
    density: float,
    generator: torch.Generator,
    room: int | None = None,
) -> Layout:
    shape = (*lead, -(-size[0] // block[0]), -(-size[1] // block[1]))
    mask = torch.rand(shape, device=generator.device, generator=generator) < density
    return Layout.from_mask(mask, block, size=size, capacity=None if room is None else mask.numel() + room)


def garbage(blocks: BlockSparseTensor) -> Tensor:
    """Values with NaN where they stand for no element: beyond the matrix, and behind the last block."""
    ones = from_dense(torch.ones(blocks.shape, device=blocks.device), blocks.layout)
    return torch.where(ones.values == 0, math.nan, blocks.values)


def draw(
    lead: tuple[int, ...], size: tuple[int, int], block: tuple[int, int], sparse: bool, turned: bool, density: float,
    dtype: torch.dtype, generator: torch.Generator,
) -> tuple[Operand, Tensor]:  # fmt: skip
    """An operand and its leaf. It is [rows, columns] of size, stored transposed if `turned`."""
    if turned:
        size, block = (size[1], size[0]), (block[1], block[0])
    x = torch.randn(*lead, *size, device=generator.device, generator=generator).to(dtype)
    if not sparse:
        return (leaf := x.requires_grad_()), leaf
    blocks = from_dense(x, layout_of(lead, size, block, density, generator, room=1))
    leaf = garbage(blocks).requires_grad_()
    return BlockSparseTensor(leaf, blocks.layout), leaf


def dense_of(operand: Operand, leaf: Tensor, dtype: torch.dtype, turned: bool) -> tuple[Tensor, Tensor]:
    """(dense [..., rows, columns] in a dtype, its leaf)."""
    x = leaf.detach().to(dtype).requires_grad_()
    wide = replace(operand, values=x.nan_to_num()).to_dense() if isinstance(operand, BlockSparseTensor) else x
    return (wide.mT if turned else wide), x


def check(
    a: Operand, a_leaf: Tensor, b: Operand, b_leaf: Tensor, out_layout: Layout | None, turned: tuple[bool, bool],
    generator: torch.Generator,
) -> None:  # fmt: skip
    """The result and both gradients."""
    out = matmul(a, b, out_layout, transpose_a=turned[0], transpose_b=turned[1])
    got = out if out_layout is None else out.values
    towards = torch.randn(got.shape, device=got.device, generator=generator).to(got.dtype)
    ours = (got, *torch.autograd.grad(got, [a_leaf, b_leaf], towards))
    results = []
    for dtype in (torch.float64, got.dtype):
        x, x_leaf = dense_of(a, a_leaf, dtype, turned[0])
        y, y_leaf = dense_of(b, b_leaf, dtype, turned[1])
        result = x @ y if out_layout is None else from_dense(x @ y, out_layout).values
        grads = torch.autograd.grad(result, [x_leaf, y_leaf], towards.to(dtype))
        results.append((result, *grads))
    for name, x, want, plain in zip(("result", "gradient of a", "gradient of b"), ours, *results):
        assert_close(x, reference64=want, plain=plain, factor=3.0, name=name)


def run(mix, turned, sizes, block, dtype, device: torch.device, lead=(2,), density=0.6) -> None:
    generator = seeded(1, device)
    (m, k, n), (bm, bk, bn) = sizes, block
    a = draw(lead, (m, k), (bm, bk), mix[0], turned[0], density, dtype, generator)
    b = draw(lead, (k, n), (bk, bn), mix[1], turned[1], density, dtype, generator)
    out_layout = layout_of(lead, (m, n), (bm, bn), density, generator, room=2) if mix[2] else None
    check(*a, *b, out_layout, turned, generator)
