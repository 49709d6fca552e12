"""Layouts made from masks on the device, and selected from queries and keys, as masks that change at every step are."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.engine import Case, Provider, copies
from gossamer.blocksparse import Layout, select_blocks

Tensors = tuple[Tensor, ...]
HEADS = 16


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """16 heads by 128 x 128 blocks, as of 8,192 tokens, and larger and smaller ones."""
    if quick or device.type == "cpu":
        yield layout_case(16, 32, 25)
        yield select_case(512, 64, 64, 4, torch.float32)
        return
    for blocks in (32, 128, 512):
        for density in (10, 50):
            yield layout_case(HEADS, blocks, density)
    for length in (8192, 32768):
        yield select_case(length, 128, 64, 32, torch.bfloat16)


def layout_case(heads: int, blocks: int, density: int) -> Case:
    def make(device: torch.device, generator: torch.Generator) -> list[Tensors]:
        shape = (heads, blocks, blocks)
        count = copies(device, heads * blocks**2 * 9)
        return [(torch.rand(shape, device=device, generator=generator) * 100 < density,) for _ in range(count)]

    def plain(mask: Tensor) -> Tensors:
        """The lists of a mask, by PyTorch's own functions; it waits for the device."""
        _, rows, cols = mask.shape
        head, row, col = mask.nonzero(as_tuple=True)
        row_offsets = mask.sum(2).flatten().cumsum(0)
        col_offsets = mask.sum(1).flatten().cumsum(0)
        positions = mask.flatten().cumsum(0).sub_(1).masked_fill_(~mask.flatten(), -1)
        order = ((head * cols + col) * rows + row).argsort()
        return head * rows + row, col, row_offsets, col_offsets, positions, order

    def stored(out: Tensors, *_: Tensor) -> Tensors:
        return tuple(tensor[None].float() for tensor in out)

    def ours(out: Layout, mask: Tensor) -> Tensors:
        nnz = int(out.nnz)
        lists = (out.row_indices[:nnz], out.col_indices[:nnz])
        found = (*lists, out.row_offsets[1:], out.col_offsets[1:], out.positions, out.transpose_order[:nnz])
        return stored(found)

    entries = heads * blocks**2
    return Case(
        room="blocksparse",
        name="layout",
        parameters={"heads": heads, "blocks": blocks, "density": density},
        dtype=torch.float32,
        make=make,
        providers=(
            Provider(
                "gossamer",
                lambda mask: Layout.from_mask(mask, 64, capacity=mask.numel()),
                ours=True,
                result=ours,
                capturable=True,
            ),
            Provider("PyTorch, with a sync", plain, result=stored),
        ),
        reference=lambda mask: tuple(tensor[None].double() for tensor in plain(mask)),
        bytes=entries * 5 + int(entries * density / 100) * 12,
        flops=0,
        sweep="blocks" if density == 50 else None,
    )


def select_case(length: int, d: int, block: int, top: int, dtype: torch.dtype) -> Case:
    """Blocks of keys by the means of queries and keys, straight to a layout."""

    def make(device: torch.device, generator: torch.Generator) -> list[Tensors]:
        def draw() -> Tensors:
            q, k = (torch.randn(1, HEADS, length, d, device=device, generator=generator).to(dtype) for _ in range(2))
            return q, k

        return [draw() for _ in range(copies(device, 2 * HEADS * length * d * dtype.itemsize))]

    def plain(q: Tensor, k: Tensor, wide: torch.dtype = torch.float32) -> Tensor:
        """The mask alone, of which an attention kernel has yet to make its lists."""
        means = [x.unflatten(2, (-1, block)).mean(3, dtype=wide) for x in (q, k)]
        best = (means[0] @ means[1].transpose(2, 3)).topk(top, dim=3).indices
        shape = (*best.shape[:3], length // block)
        return torch.zeros(shape, dtype=torch.bool, device=q.device).scatter_(3, best, True)

    def values(q: Tensor, k: Tensor, mask: Tensor) -> Tensors:
        """The sum of the selected blocks' scores: which of two nearly equal ones is taken does not count."""
        means = [x.double().unflatten(2, (-1, block)).mean(3) for x in (q, k)]
        return ((means[0] @ means[1].transpose(2, 3)).masked_fill(~mask, 0).sum(3),)

    return Case(
        room="blocksparse",
        name="select_blocks",
        parameters={"T": length, "H": HEADS, "D": d, "block": block, "top": top},
        dtype=dtype,
        make=make,
        providers=(
            Provider(
                "gossamer",
                partial(select_blocks, block_size=block, top_k=top),
                ours=True,
                result=lambda out, q, k: values(q, k, out.to_dense()),
                capturable=True,
            ),
            Provider("dense", plain, result=lambda out, q, k: values(q, k, out), capturable=True, partial=True),
        ),
        reference=lambda q, k: values(q, k, plain(q, k, torch.float64)),
        bytes=2 * HEADS * length * d * dtype.itemsize,
        flops=2 * HEADS * (length // block) ** 2 * d,
    )
