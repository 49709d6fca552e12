"""Functions on blocks without a published time: conversions, pieces, joined heads, sums and norms of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.engine import Case
from benchmarks.peers import block_sparse as peers
from gossamer import blocksparse
from gossamer.blocksparse import BlockSparseTensor

Op = tuple[Callable[..., Any], Callable[[Tensor], Tensor], float]
"""Ours on blocks, the same on a dense tensor, and how many times the present blocks are moved."""


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """n 4,096, blocks of 64, bfloat16; small float32 ones for `quick` and on the CPU."""
    small = quick or device.type == "cpu"
    n, block, dtype = (256, 32, torch.float32) if small else (4096, 64, torch.bfloat16)
    for name, op in _operators(n).items():
        for sparsity in (50,) if small else (25, 75):
            yield _case(name, op, n, block, sparsity, dtype)


def _operators(n: int) -> dict[str, Op]:
    half = n // 2
    return {
        "to_dense": (lambda x: x.to_dense(), lambda x: x * 1, 2),
        "merge": (lambda x: blocksparse.merge(x, 0), lambda x: torch.cat(x.unbind(0), -1), 2),
        "split": (
            lambda x: blocksparse.split(x, half, -1, capacity=x.layout.capacity)[1],
            lambda x: x.split(half, -1)[1] * 1,
            1,
        ),
        "sum": (lambda x: x.sum(-1), lambda x: x.sum(-1), 1),
        "rms_norm": (blocksparse.rms_norm, lambda x: F.rms_norm(x, x.shape[-1:]), 2),
        "layer_norm": (blocksparse.layer_norm, lambda x: F.layer_norm(x, x.shape[-1:]), 2),
    }


def _case(name: str, op: Op, n: int, block: int, sparsity: int, dtype: torch.dtype) -> Case:
    ours, dense, moved = op

    def result(out: Any, x: Tensor, mask: Tensor) -> tuple[Tensor]:
        out = out.to_dense() if isinstance(out, BlockSparseTensor) else out
        # Only a norm fills what is absent.
        return (out * peers.elements(mask, n) if name == "layer_norm" else out,)

    providers = peers.gossamer(ours, result=result), peers.dense(dense, result=result)
    reference = lambda x, mask: result(dense(x.double()), x, mask)  # noqa: E731
    return peers.case_of_one(name, n, block, sparsity, dtype, moved, 2, providers=providers, reference=reference)
