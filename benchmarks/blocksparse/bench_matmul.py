"""`blocksparse.matmul` at the published sizes: batch 4, n x n, inputs 25% sparse, the result 0 to 75%."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import block_sparse as peers
from gossamer import blocksparse
from gossamer.cli.bench import Case, Provider, copies

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

COPIES = 512
"""Copies of the inputs at most, which calls rotate among."""


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """n 1,024 to 8,192, blocks of 64, float32 and bfloat16; a small float32 one for `quick` and on the CPU."""
    if quick or device.type == "cpu":
        yield matmul_case(256, 32, 50, torch.float32)
        yield dense_case(256, 32, 75, torch.float32)
        return
    for dtype in (torch.bfloat16, torch.float32):
        for n, sparsity in peers.PUBLISHED:
            yield matmul_case(n, 64, sparsity, dtype)
    for block in (16, 32, 128):
        yield matmul_case(4096, block, 50, torch.bfloat16)
    for block in (64, 128):
        for sparsity in (2, 50, 75, 90):
            yield dense_case(8192, block, sparsity, torch.bfloat16)


def matmul_case(n: int, block: int, sparsity: int, dtype: torch.dtype, most: int = COPIES) -> Case:
    """All three block-sparse; where nothing of the result is missing, nothing of the inputs is."""
    inputs = 25 if sparsity else 0
    present = (1 - sparsity / 100, 1 - inputs / 100)

    def make(device: torch.device, generator: torch.Generator) -> list[Inputs]:
        def draw() -> Inputs:
            of_x, of_y, of_out = (peers.random_mask(n, block, s, device, generator) for s in (inputs, inputs, sparsity))
            x, y = (peers.random_dense(n, mask, dtype, generator) for mask in (of_x, of_y))
            return x, y, of_x, of_y, of_out

        return [draw() for _ in range(copies(device, 3 * peers.BATCH * n * n * dtype.itemsize, most))]

    return Case(
        room="blocksparse",
        name="matmul",
        parameters={"n": n, "block": block, "sparsity": sparsity},
        dtype=dtype,
        make=make,
        providers=(
            Provider(
                "gossamer",
                blocksparse.matmul,
                ours=True,
                prepare=lambda x, y, of_x, of_y, of_out: (
                    peers.from_dense(x, of_x),
                    peers.from_dense(y, of_y),
                    peers.layout_of(of_out, n),
                ),
                result=peers.to_dense,
                capturable=True,
                precision="high",
            ),
            Provider(
                "dense",
                torch.matmul,
                prepare=lambda x, y, *masks: (x, y),
                result=lambda out, x, y, of_x, of_y, of_out: (out * peers.elements(of_out, n),),
                capturable=True,
                precision="high",
            ),
            *peers.blksprs(
                "blksprs",
                prepare=lambda bs, x, y, of_x, of_y, of_out: (
                    bs.ops.to_sparse(x, of_x, block), of_x, bs.ops.to_sparse(y, of_y, block), of_y, of_out, block, {},
                ),
                call=lambda bs, *given: bs.ops.matmul(*given[:-1], layout_cache=given[-1]),
                result=lambda bs, out, x, y, of_x, of_y, of_out: bs.ops.to_dense(out, of_out, block),
                precision="high",
            ),
        ),
        reference=lambda x, y, of_x, of_y, of_out: (x.double() @ y.double() * peers.elements(of_out, n),),
        bytes=int(peers.BATCH * n * n * dtype.itemsize * (present[0] + 2 * present[1])),
        flops=int(2 * peers.BATCH * n**3 * present[0] * present[1] ** 2),
        sweep=peers.sweep_of(block, sparsity, dtype),
    )  # fmt: skip


def dense_case(n: int, block: int, sparsity: int, dtype: torch.dtype, most: int = COPIES) -> Case:
    """Block-sparse times dense, as a sparse layer computes."""

    def make(device: torch.device, generator: torch.Generator) -> list[tuple[Tensor, ...]]:
        def draw() -> tuple[Tensor, ...]:
            mask = peers.random_mask(n, block, sparsity, device, generator)
            y = torch.randn(peers.BATCH, n, n, device=device, generator=generator).to(dtype)
            return peers.random_dense(n, mask, dtype, generator), y, mask

        return [draw() for _ in range(copies(device, 3 * peers.BATCH * n * n * dtype.itemsize, most))]

    def bsr(x: Tensor, y: Tensor, mask: Tensor) -> tuple[Any, ...]:
        return [matrix.to_sparse_bsr((block, block)) for matrix in x], y

    present = 1 - sparsity / 100
    return Case(
        room="blocksparse",
        name="matmul_with_dense",
        parameters={"n": n, "block": block, "sparsity": sparsity},
        dtype=dtype,
        make=make,
        providers=(
            Provider(
                "gossamer",
                blocksparse.matmul,
                ours=True,
                prepare=lambda x, y, mask: (peers.from_dense(x, mask), y),
                capturable=True,
                precision="high",
            ),
            Provider("dense", torch.matmul, prepare=lambda x, y, mask: (x, y), capturable=True, precision="high"),
            Provider(
                "torch BSR",
                lambda xs, y: torch.stack([x @ matrix for x, matrix in zip(xs, y)]),
                prepare=bsr,
                precision="high",
            ),
            *([peers.stk_dsd()] if block == 128 and dtype in (torch.float16, torch.bfloat16) else []),
        ),
        reference=lambda x, y, mask: (x.double() @ y.double(),),
        bytes=int(peers.BATCH * n * n * dtype.itemsize * (2 + present)),
        flops=int(2 * peers.BATCH * n**3 * present),
    )


def mixed_case(n: int, block: int, sparsity: int, dtype: torch.dtype, mix: str, most: int = COPIES) -> Case:
    """Each of a, b and the result block-sparse or dense, as "S" and "D" in `mix` say, such as gradients are."""
    of_a, of_b, of_out = (letter == "S" for letter in mix)

    def make(device: torch.device, generator: torch.Generator) -> list[Inputs]:
        def draw() -> Inputs:
            missing = (sparsity if sparse else 0 for sparse in (of_a, of_b, of_out))
            mask_x, mask_y, mask = (peers.random_mask(n, block, share, device, generator) for share in missing)
            x, y = (peers.random_dense(n, of, dtype, generator) for of in (mask_x, mask_y))
            return x, y, mask_x, mask_y, mask

        return [draw() for _ in range(copies(device, 3 * peers.BATCH * n * n * dtype.itemsize, most))]

    def kept(out: Tensor, of: Tensor) -> tuple[Tensor]:
        return (out * peers.elements(of, n) if of_out else out,)

    return Case(
        room="blocksparse",
        name="matmul_mixed",
        parameters={"n": n, "block": block, "sparsity": sparsity, "mix": mix},
        dtype=dtype,
        make=make,
        providers=(
            Provider(
                "gossamer",
                blocksparse.matmul,
                ours=True,
                prepare=lambda x, y, mask_x, mask_y, mask: (
                    peers.from_dense(x, mask_x) if of_a else x,
                    peers.from_dense(y, mask_y) if of_b else y,
                    peers.layout_of(mask, n) if of_out else None,
                ),
                result=peers.to_dense if of_out else lambda out, *_: (out,),
                capturable=True,
                precision="high",
            ),
            Provider(
                "dense",
                torch.matmul,
                prepare=lambda x, y, *masks: (x, y),
                result=lambda out, x, y, mask_x, mask_y, mask: kept(out, mask),
                capturable=True,
                precision="high",
            ),
        ),
        reference=lambda x, y, mask_x, mask_y, mask: kept(x.double() @ y.double(), mask),
        bytes=int(peers.BATCH * n * n * dtype.itemsize * (3 - mix.count("S") * sparsity / 100)),
        flops=int(2 * peers.BATCH * n**3 * (1 - sparsity / 100) ** mix.count("S")),
    )
