"""`blocksparse.softmax` and `transpose` at the published sizes: batch 4, n x n, 0 to 75% sparse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.engine import Case
from benchmarks.engine.case import BUDGETS
from benchmarks.peers import block_sparse as peers
from gossamer import blocksparse

COPIES = 512
"""Copies of the inputs at most, which calls rotate among."""


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """n 1,024 to 8,192, blocks of 64, float32 and bfloat16; small float32 ones for `quick` and on the CPU."""
    if quick or device.type == "cpu":
        yield softmax_case(256, 32, 50, torch.float32, False)
        yield softmax_case(256, 32, 50, torch.float32, True)
        yield transpose_case(256, 32, 50, torch.float32)
        return
    for dtype in (torch.bfloat16, torch.float32):
        for n, sparsity in peers.PUBLISHED:
            yield softmax_case(n, 64, sparsity, dtype, False)
            yield transpose_case(n, 64, sparsity, dtype)
        for n in (1024, 4096, 8192, 2048):
            yield softmax_case(n, 64, 50, dtype, True)


def softmax_case(n: int, block: int, sparsity: int, dtype: torch.dtype, training: bool, most: int = COPIES) -> Case:
    def dense(x: Tensor) -> Tensor:
        return x.softmax(-1)

    def reference(x: Tensor, mask: Tensor) -> Tensor:
        return x.double().masked_fill(~peers.elements(mask, n), -torch.inf).softmax(-1)

    def trained(x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        x = x.double().requires_grad_()
        return (torch.autograd.grad(reference(x, mask).square().sum() / 2, x)[0],)

    def ours(x: blocksparse.BlockSparseTensor) -> blocksparse.BlockSparseTensor:
        x = x.detach().requires_grad_()
        out = blocksparse.softmax(x).values
        (grad,) = torch.autograd.grad(out, x.values, out.detach())
        return blocksparse.BlockSparseTensor(grad, x.layout)

    def theirs(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        out = x.softmax(-1)
        return torch.autograd.grad(out, x, out.detach())[0]

    # Its softmax takes float32 alone, so that it moves twice the bytes in 16 bits.
    name = "blksprs" if dtype is torch.float32 else "blksprs, float32"
    products = () if training else peers.blksprs(
        name,
        prepare=lambda bs, x, mask: (bs.ops.to_sparse(x.float(), mask, block), mask, block, {}),
        call=lambda bs, *given: bs.ops.softmax(*given[:-1], layout_cache=given[-1]),
        result=lambda bs, out, x, mask: bs.ops.to_dense(out, mask, block),
    )  # fmt: skip
    inside = lambda x, mask: (x.masked_fill(~peers.elements(mask, n), -torch.inf),)  # noqa: E731
    return peers.case_of_one(
        "softmax_training" if training else "softmax", n, block, sparsity, dtype, 5 if training else 2, 2, most,
        providers=(
            peers.gossamer(ours if training else blocksparse.softmax),
            replace(peers.dense(theirs if training else dense, "dense, -inf in absent blocks"), prepare=inside),
            *products,
        ),
        reference=trained if training else lambda x, mask: (reference(x, mask),),
        sweep=peers.sweep_of(block, sparsity, dtype),
        grad=training,
        # The input is the rounded result, and gradients of a row cancel: 16 bits are rounded twice. Gradients of long
        # rows are near the smallest numbers of float16.
        budget=({torch.float16: 8}.get(dtype, 2) * BUDGETS[dtype]) if training and dtype.itemsize == 2 else None,
    )  # fmt: skip


def transpose_case(n: int, block: int, sparsity: int, dtype: torch.dtype, most: int = COPIES) -> Case:
    return peers.case_of_one(
        "transpose", n, block, sparsity, dtype, 2, 2, most,
        providers=(
            peers.gossamer(lambda x: x.mT),
            peers.dense(lambda x: x.mT.contiguous(), "dense, contiguous"),
            *peers.blksprs(
                "blksprs",
                prepare=lambda bs, x, mask: (bs.ops.to_sparse(x, mask, block), mask, block),
                call=lambda bs, *given: bs.ops.transpose(*given)[0],
                result=lambda bs, out, x, mask: bs.ops.to_dense(out, mask.mT.contiguous(), block),
            ),
        ),
        reference=lambda x, mask: (x.double().mT,),
        sweep=peers.sweep_of(block, sparsity, dtype),
    )  # fmt: skip
