"""`rowsparse.sampled_matmul`: (x [M, D] @ weight [N, D].T) at a pattern, as the backward of decode needs it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine import Case, Provider, copies, error_beside_mean, random_matrix, random_rows
from gossamer import rowsparse


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """The value gradient of a 65,536-wide SAE at batch 4,096; a small one for `quick` and on the CPU."""
    if quick or device.type == "cpu":
        yield sampled_matmul(64, 4096, 256, 32, torch.float32)
        return
    for dtype in (torch.bfloat16, torch.float32):
        yield sampled_matmul(4096, 65536, 2304, 72, dtype)


def sampled_matmul(M: int, N: int, D: int, nnz: int, dtype: torch.dtype) -> Case:
    capacity = max(128, 1 << nnz.bit_length())

    def make(device: torch.device, generator: torch.Generator) -> list[tuple[Tensor, ...]]:
        return [
            (
                random_matrix(M, D, dtype, device, generator),
                random_matrix(N, D, dtype, device, generator),
                random_rows(M, N, nnz, dtype, device, generator),
            )
            for _ in range(copies(device, (M * D + N * D) * dtype.itemsize))
        ]

    def sampled_addmm(x: Tensor, weight: Tensor, pattern: Tensor) -> Tensor:
        return torch.sparse.sampled_addmm(pattern, x, weight.T, beta=0)

    return Case(
        room="rowsparse",
        name="sampled_matmul",
        parameters={"M": M, "N": N, "D": D, "nnz": nnz},
        dtype=dtype,
        make=make,
        providers=(
            Provider(
                "gossamer",
                rowsparse.sampled_matmul,
                ours=True,
                prepare=lambda x, weight, mask: (x, weight, rowsparse.pack(mask, capacity=capacity)),
                result=_dense_of_rows,
                capturable=True,
            ),
            Provider(
                "dense",
                lambda x, weight, mask: x @ weight.T,
                result=lambda out, x, weight, mask: (out * (mask != 0),),
                capturable=True,
            ),
            Provider(
                "torch.sparse.sampled_addmm",
                sampled_addmm,
                prepare=lambda x, weight, mask: (x, weight, mask.to_sparse_csr()),
                result=_dense_of_rows,
            ),
        ),
        reference=lambda x, weight, mask: ((x.double() @ weight.double().T).mul_(mask != 0),),
        bytes=(M * D + min(M * nnz, N) * D + M * nnz) * dtype.itemsize + 4 * M * nnz,
        flops=2 * M * nnz * D,
        error=error_beside_mean,
    )


def _dense_of_rows(rows: Any, *_: Tensor) -> tuple[Tensor]:
    return (rows.to_dense(),)
