"""`rowsparse.matmul` at the down projection of a sparse feed-forward block: rows [M, N] @ weight [N, D]."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.engine import Case, copies, random_matrix, random_rows
from benchmarks.peers import torch_peers
from gossamer import rowsparse


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """The feed-forward shapes of N 5632, D 2048 in bfloat16; a small float32 one for `quick` and on the CPU."""
    if quick or device.type == "cpu":
        yield matmul(256, 1024, 256, 29, torch.float32)
        return
    for M, nnz in ((2048, 29), (16384, 29), (16384, 98)):
        yield matmul(M, 5632, 2048, nnz, torch.bfloat16)
    # Slots that say more or less of the entries in them.
    for sizes in ((256, 14336, 4096), (2048, 32768, 1024), (4096, 14336, 4096), (16384, 5632, 2048)):
        for nnz in (30, 98, 200):
            for slots in (2 * nnz, 4 * nnz):
                case = matmul(*sizes, nnz, torch.bfloat16, slots)
                yield replace(
                    case,
                    name="matmul_slots",
                    parameters={**case.parameters, "slots": slots},
                    providers=case.providers[:3],
                )


def matmul(M: int, N: int, D: int, nnz: int, dtype: torch.dtype, slots: int | None = None) -> Case:
    capacity = slots or 2 * nnz

    def make(device: torch.device, generator: torch.Generator) -> list[tuple[Tensor, ...]]:
        return [
            (random_rows(M, N, nnz, dtype, device, generator), random_matrix(N, D, dtype, device, generator))
            for _ in range(copies(device, (M * N + N * D + M * D) * dtype.itemsize))
        ]

    return Case(
        room="rowsparse",
        name="matmul",
        parameters={"M": M, "N": N, "D": D, "nnz": nnz},
        dtype=dtype,
        make=make,
        providers=torch_peers.products_of_rows(rowsparse.matmul, capacity),
        reference=lambda x, weight: (x.double() @ weight.double(),),
        bytes=M * nnz * (dtype.itemsize + 4) + (min(M * nnz, N) * D + M * D) * dtype.itemsize,
        flops=2 * M * nnz * D,
    )
