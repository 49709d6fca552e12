"""`blocksparse.scatter` along columns at the published sizes: batch 4, n x n, source and index 0 to 75% sparse,
the target without sparse blocks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.engine import Case, Provider, copies
from benchmarks.peers import block_sparse as peers
from gossamer import blocksparse

Inputs = tuple[Tensor, Tensor, Tensor]


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """n 1,024 to 8,192, blocks of 64, float32 and bfloat16; small float32 ones for `quick` and on the CPU."""
    if quick or device.type == "cpu":
        for dim, reduce in ((-1, "sum"), (-2, "sum"), (-1, "amax")):
            yield _scatter(256, 32, 50, torch.float32, dim, reduce)
        return
    for dtype in (torch.bfloat16, torch.float32):
        for n, sparsity in peers.PUBLISHED:
            yield _scatter(n, 64, sparsity, dtype, -1, "sum")
        for n in (1024, 4096, 8192, 2048):
            yield _scatter(n, 64, 50, dtype, -2, "sum")
    yield _scatter(4096, 64, 50, torch.bfloat16, -1, "amax")


def _scatter(n: int, block: int, sparsity: int, dtype: torch.dtype, dim: int, reduce: str) -> Case:
    def make(device: torch.device, generator: torch.Generator) -> list[Inputs]:
        def draw() -> Inputs:
            mask = peers.random_mask(n, block, sparsity, device, generator)
            index = torch.randint(n, (peers.BATCH, n, n), device=device, generator=generator)
            return peers.random_dense(n, mask, dtype, generator), index, mask

        return [draw() for _ in range(copies(device, peers.BATCH * n * n * (8 + 2 * dtype.itemsize)))]

    def prepare(src: Tensor, index: Tensor, mask: Tensor) -> tuple:
        layout, full = peers.layout_of(mask, n), peers.layout_of(torch.ones_like(mask), n)
        return full, blocksparse.from_dense(index, layout), blocksparse.from_dense(src, layout)

    def dense(src: Tensor, index: Tensor, wide: torch.dtype = dtype) -> Tensor:
        target = torch.zeros(src.shape, dtype=wide, device=src.device)
        return target.scatter_reduce(dim, index, src.to(wide), reduce, include_self=False)

    def reference(src: Tensor, index: Tensor, mask: Tensor) -> tuple[Tensor]:
        if reduce == "sum":
            return (dense(src, index, torch.float64),)
        # Elements that are not stored take no part: they are put behind the last place.
        shape = list(src.shape)
        shape[dim] += 1
        target = torch.zeros(shape, dtype=torch.float64, device=src.device)
        at = torch.where(peers.elements(mask, n), index, n)
        return (target.scatter_reduce(dim, at, src.double(), reduce, include_self=False).narrow(dim, 0, n),)

    # In bfloat16 blksprs 2.5 ends in an illegal memory access (PyTorch 2.11, Triton 3.6, in its search of a tile) that
    # takes every case behind it along: there it gets a source of float32.
    name = "blksprs, in no fixed order" if dtype is torch.float32 else "blksprs, float32, in no fixed order"
    products = () if reduce != "sum" else peers.blksprs(
        name,
        prepare=lambda bs, src, index, mask: (
            bs.ops.to_sparse(src.float(), mask, block), mask, dim, bs.ops.to_sparse(index, mask, block),
            torch.ones_like(mask), block, {},
        ),
        call=lambda bs, *given: bs.ops.scatter_reduce(*given[:-1], reduce_op="sum", layout_cache=given[-1]),
        result=lambda bs, out, src, index, mask: bs.ops.to_dense(out, torch.ones_like(mask), block),
    )  # fmt: skip
    kept, all_of_it = peers.BATCH * n * n * (1 - sparsity / 100), peers.BATCH * n * n
    return Case(
        room="blocksparse",
        name="scatter_reduce",
        parameters={"n": n, "block": block, "sparsity": sparsity, "dim": dim, "reduce": reduce},
        dtype=dtype,
        make=make,
        providers=(
            Provider(
                "gossamer",
                lambda full, index, src: blocksparse.scatter(full, dim, index, src, reduce),
                ours=True,
                prepare=prepare,
                result=peers.to_dense,
                capturable=True,
            ),
            Provider(
                "dense, in no fixed order",
                dense,
                prepare=lambda src, index, mask: (src, index),
                result=lambda out, *_: (out,),
                capturable=True,
                devices=("cpu", "cuda") if reduce == "sum" else (),
            ),
            *products,
        ),
        reference=reference,
        bytes=int(kept * (8 + dtype.itemsize) + all_of_it * dtype.itemsize),
        flops=0,
        sweep=peers.sweep_of(block, sparsity, dtype) if (dim, reduce) == (-1, "sum") else None,
        # 16-bit sums of several numbers, rounded once here and each time by the peers.
        budget=5e-2 if dtype is torch.bfloat16 else None,
    )
