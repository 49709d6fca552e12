"""Random block-sparse matrices for benchmarks, and their peers: blksprs, stk and PyTorch's BSR."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine import Case, Provider, copies
from gossamer import blocksparse

BATCH = 4
PUBLISHED = (
    *((n, sparsity) for n in (1024, 4096, 8192) for sparsity in (0, 50)),
    *((n, sparsity) for n in (1024, 4096, 8192) for sparsity in (25, 75)),
    *((2048, sparsity) for sparsity in (0, 25, 50, 75)),
)
"""Sizes and percentages of the published tables; where time is short, a run has spread its first cases over them."""


def random_mask(n: int, block: int, sparsity: int, device: torch.device, generator: torch.Generator) -> Tensor:
    """Bool `[BATCH, n / block, n / block]`; every row of blocks has one."""
    shape = (BATCH, n // block, n // block)
    mask = torch.rand(shape, device=device, generator=generator) >= sparsity / 100
    mask.diagonal(dim1=1, dim2=2).fill_(True)
    return mask


def random_dense(n: int, mask: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """`[BATCH, n, n]` of normal numbers, zeros in absent blocks."""
    x = torch.randn(BATCH, n, n, device=mask.device, generator=generator)
    return (x * elements(mask, n)).to(dtype)


def elements(mask: Tensor, n: int) -> Tensor:
    """A mask of blocks, element by element."""
    block = n // mask.shape[-1]
    return mask.repeat_interleave(block, 1).repeat_interleave(block, 2)


def sweep_of(block: int, sparsity: int, dtype: torch.dtype) -> str | None:
    """One line a plot: the cases that differ in n alone."""
    return "n" if (block, sparsity, dtype) == (64, 50, torch.bfloat16) else None


def layout_of(mask: Tensor, n: int) -> blocksparse.Layout:
    return blocksparse.Layout.from_mask(mask, n // mask.shape[-1])


def from_dense(x: Tensor, mask: Tensor) -> blocksparse.BlockSparseTensor:
    return blocksparse.from_dense(x, layout_of(mask, x.shape[-1]))


def to_dense(output: blocksparse.BlockSparseTensor, *_: Any) -> tuple[Tensor, ...]:
    return (output.to_dense(),)


def gossamer(call: Callable[..., Any], name: str = "gossamer", result: Callable[..., Any] = to_dense) -> Provider:
    """Ours, of one block-sparse tensor."""
    prepare = lambda x, mask: (from_dense(x, mask),)  # noqa: E731
    return Provider(name, call, ours=True, prepare=prepare, result=result, capturable=True)


def dense(call: Callable[[Tensor], Any], name: str = "dense", result: Callable[..., Any] | None = None) -> Provider:
    """The same of the dense matrices."""
    result = result or (lambda out, *_: (out,))
    return Provider(name, call, prepare=lambda x, mask: (x,), result=result, capturable=True)


def case_of_one(
    name: str, n: int, block: int, sparsity: int, dtype: torch.dtype, moved: float, drawn: float | None = None,
    most: int = 512, **more: Any,
) -> Case:  # fmt: skip
    """A case of matrices and the mask of their blocks, of which a call moves `moved` times the blocks that are present,
    or `drawn` times the matrices where it fills what is absent; `most` copies of the inputs."""

    def draw(device: torch.device, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        mask = random_mask(n, block, sparsity, device, generator)
        return random_dense(n, mask, dtype, generator), mask

    def make(device: torch.device, generator: torch.Generator) -> list[tuple[Tensor, Tensor]]:
        size = int(BATCH * n * n * dtype.itemsize * (moved if drawn is None else drawn))
        return [draw(device, generator) for _ in range(copies(device, size, most))]

    return Case(
        room="blocksparse",
        name=name,
        parameters=more.pop("parameters", {"n": n, "block": block, "sparsity": sparsity}),
        dtype=dtype,
        make=make,
        bytes=int(moved * BATCH * n * n * (1 - sparsity / 100) * dtype.itemsize),
        flops=0,
        **more,
    )


def stk_dsd() -> Provider:
    """MegaBlocks' block-sparse times dense, a matrix of the batch at a time; its kernels know blocks of 128."""

    def prepare(x: Tensor, y: Tensor, *_: Tensor) -> tuple[Any, ...]:
        import stk.ops  # type: ignore[import-not-found]

        return [stk.ops.to_sparse(matrix, 128) for matrix in x], y, stk.ops.dsd

    return Provider(
        "stk",
        lambda xs, y, dsd: torch.stack([dsd(x, matrix) for x, matrix in zip(xs, y)]),
        prepare=prepare,
        devices=("cuda",),
    )


def blksprs(
    name: str,
    prepare: Callable[..., tuple[Any, ...]],
    call: Callable[..., Any],
    result: Callable[..., Any],
    precision: str = "highest",
) -> tuple[Provider, ...]:
    """The provider of an operator of blksprs where it is installed; the three functions take its module first. Its
    products of float32 are TF32's: they run at `precision` "high"."""
    if find_spec("blksprs") is None:
        return ()
    import blksprs as module

    return (
        Provider(
            name,
            lambda *given: call(module, *given),
            prepare=lambda *inputs: prepare(module, *inputs),
            result=lambda output, *inputs: (result(module, output, *inputs),),
            devices=("cuda",),
            precision=precision,
        ),
    )
