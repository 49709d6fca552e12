"""`blocksparse.gather` along columns at the published sizes: batch 4, n x n, input and index 0 to 75% sparse."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.engine import Case, Provider, copies
from benchmarks.peers import block_sparse as peers
from gossamer import blocksparse

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """n 1,024 to 8,192, blocks of 64, float32 and bfloat16; small float32 ones for `quick` and on the CPU."""
    if quick or device.type == "cpu":
        for training in (False, True):
            yield _gather(256, 32, 50, torch.float32, training)
        return
    for dtype in (torch.bfloat16, torch.float32):
        for n, sparsity in peers.PUBLISHED:
            yield _gather(n, 64, sparsity, dtype, False)
        for n in (1024, 4096, 8192, 2048):
            yield _gather(n, 64, 50, dtype, True)


def draw(n: int, block: int, sparsity: int, dtype: torch.dtype, device: torch.device, seed: torch.Generator) -> Inputs:
    """x and the mask of its blocks, indices into its columns and the mask of theirs."""
    of_x, of_index = (peers.random_mask(n, block, sparsity, device, seed) for _ in range(2))
    index = torch.randint(n, (peers.BATCH, n, n), device=device, generator=seed)
    return peers.random_dense(n, of_x, dtype, seed), of_x, index, of_index


def _gather(n: int, block: int, sparsity: int, dtype: torch.dtype, training: bool) -> Case:
    def make(device: torch.device, generator: torch.Generator) -> list[Inputs]:
        touched = peers.BATCH * n * n * (8 + 2 * dtype.itemsize)
        return [draw(n, block, sparsity, dtype, device, generator) for _ in range(copies(device, touched))]

    def reference(x: Tensor, of_x: Tensor, index: Tensor, of_index: Tensor) -> tuple[Tensor]:
        x = x.double().requires_grad_(training)
        out = x.gather(-1, index) * peers.elements(of_index, n)
        return (torch.autograd.grad(out.square().sum() / 2, x)[0] * peers.elements(of_x, n),) if training else (out,)

    def ours(x: blocksparse.BlockSparseTensor, index: blocksparse.BlockSparseTensor) -> blocksparse.BlockSparseTensor:
        if not training:
            return blocksparse.gather(x, -1, index)
        values = x.values.detach().requires_grad_()
        out = blocksparse.gather(blocksparse.BlockSparseTensor(values, x.layout), -1, index).values
        return blocksparse.BlockSparseTensor(torch.autograd.grad(out, values, out.detach())[0], x.layout)

    def dense(x: Tensor, index: Tensor, named: Tensor) -> Tensor:
        if not training:
            return x.gather(-1, index)
        x = x.detach().requires_grad_()
        out = x.gather(-1, index)
        return torch.autograd.grad(out, x, out.detach() * named)[0]

    def kept(out: Tensor, x: Tensor, of_x: Tensor, index: Tensor, of_index: Tensor) -> tuple[Tensor]:
        return (out * peers.elements(of_x if training else of_index, n),)

    products = () if training else peers.blksprs(
        "blksprs",
        prepare=lambda bs, x, of_x, index, of_index: (
            bs.ops.to_sparse(x, of_x, block), of_x, -1, bs.ops.to_sparse(index, of_index, block), of_index, block, {}
        ),
        call=lambda bs, *given: bs.ops.gather(*given[:-1], layout_cache=given[-1]),
        result=lambda bs, out, x, of_x, index, of_index: bs.ops.to_dense(out, of_index, block),
    )  # fmt: skip
    moved = peers.BATCH * n * n * (1 - sparsity / 100)
    return Case(
        room="blocksparse",
        name="gather_training" if training else "gather",
        parameters={"n": n, "block": block, "sparsity": sparsity},
        dtype=dtype,
        make=make,
        providers=(
            Provider(
                "gossamer",
                ours,
                ours=True,
                prepare=lambda x, of_x, index, of_index: (peers.from_dense(x, of_x), peers.from_dense(index, of_index)),
                result=peers.to_dense,
                capturable=True,
            ),
            Provider(
                "dense",
                dense,
                prepare=lambda x, of_x, index, of_index: (x, index, peers.elements(of_index, n)),
                result=kept,
                capturable=True,
            ),
            *products,
        ),
        reference=reference,
        bytes=int(moved * (8 + 2 * dtype.itemsize) * (2 if training else 1)),
        flops=0,
        sweep=peers.sweep_of(block, sparsity, dtype),
        grad=training,
    )
