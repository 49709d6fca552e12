"""`blocksparse.matmul` at the published sizes: batch 4, n x n, inputs 25% sparse, the result 0 to 75%."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine import Case, Provider, copies
from benchmarks.peers import block_sparse as peers
from gossamer import blocksparse

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
    other = peers.blksprs(
        "blksprs",
        prepare=lambda bs, x, y, of_x, of_y, of_out: (
            bs.ops.to_sparse(x, of_x, block), of_x, bs.ops.to_sparse(y, of_y, block), of_y, of_out, block, {},
        ),
        call=lambda bs, *given: bs.ops.matmul(*given[:-1], layout_cache=given[-1]),
        result=lambda bs, out, x, y, of_x, of_y, of_out: bs.ops.to_dense(out, of_out, block),
        precision="high",
    )  # fmt: skip
    parameters = {"n": n, "block": block, "sparsity": sparsity}
    case = _product("matmul", parameters, "SSS", (inputs, inputs, sparsity), dtype, most, other)
    return replace(case, sweep=peers.sweep_of(block, sparsity, dtype))


def mixed_case(n: int, block: int, sparsity: int, dtype: torch.dtype, mix: str, most: int = COPIES) -> Case:
    """Each of a, b and the result block-sparse or dense, as "S" and "D" in `mix` say, such as gradients are."""
    parameters = {"n": n, "block": block, "sparsity": sparsity, "mix": mix}
    return _product("matmul_mixed", parameters, mix, (sparsity, sparsity, sparsity), dtype, most)


def dense_case(n: int, block: int, sparsity: int, dtype: torch.dtype, most: int = COPIES) -> Case:
    """Block-sparse times dense, as a sparse layer computes."""

    def bsr(x: Tensor, y: Tensor, *_: Tensor) -> tuple[Any, ...]:
        return [matrix.to_sparse_bsr((block, block)) for matrix in x], y

    others = [
        Provider(
            "torch BSR",
            lambda xs, y: torch.stack([x @ matrix for x, matrix in zip(xs, y)]),
            prepare=bsr,
            precision="high",
        )
    ]
    if block == 128 and dtype in (torch.float16, torch.bfloat16):
        others.append(peers.stk_dsd())
    parameters = {"n": n, "block": block, "sparsity": sparsity}
    return _product("matmul_with_dense", parameters, "SDD", (sparsity, 0, 0), dtype, most, others)


def _product(
    name: str,
    parameters: dict[str, Any],
    mix: str,
    missing: tuple[int, int, int],
    dtype: torch.dtype,
    most: int,
    others: Sequence[Provider] = (),
) -> Case:
    """A product of which a, b and the result are block-sparse, with so much `missing`, where `mix` has "S"."""
    n, block = parameters["n"], parameters["block"]
    of_a, of_b, of_out = (letter == "S" for letter in mix)
    a, b, out = (1 - share / 100 if letter == "S" else 1.0 for letter, share in zip(mix, missing))

    def make(device: torch.device, generator: torch.Generator) -> list[Inputs]:
        def draw() -> Inputs:
            shares = (share if letter == "S" else 0 for letter, share in zip(mix, missing))
            mask_x, mask_y, mask = (peers.random_mask(n, block, share, device, generator) for share in shares)
            x, y = (peers.random_dense(n, of, dtype, generator) for of in (mask_x, mask_y))
            return x, y, mask_x, mask_y, mask

        return [draw() for _ in range(copies(device, 3 * peers.BATCH * n * n * dtype.itemsize, most))]

    def kept(out: Tensor, of: Tensor) -> tuple[Tensor]:
        return (out * peers.elements(of, n) if of_out else out,)

    return Case(
        room="blocksparse",
        name=name,
        parameters=parameters,
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
            *others,
        ),
        reference=lambda x, y, mask_x, mask_y, mask: kept(x.double() @ y.double(), mask),
        bytes=int(peers.BATCH * n * n * dtype.itemsize * (a + b + out)),
        flops=int(2 * peers.BATCH * n**3 * a * b * out),
    )
