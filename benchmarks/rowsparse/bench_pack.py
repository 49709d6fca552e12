"""`rowsparse.pack` and `rowsparse.transpose`: dense to lists, and lists to their transpose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine import Case, Provider, copies, random_rows
from gossamer import rowsparse


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Latents of a 65,536-wide SAE, float32 at batch 32 and bfloat16 at 4,096; small for `quick` and on the CPU."""
    if quick or device.type == "cpu":
        shapes = [(64, 8192, 32, torch.float32)]
    else:
        shapes = [(32, 65536, 64, torch.float32), (4096, 65536, 72, torch.bfloat16)]
    for shape in shapes:
        yield pack(*shape)
        yield _transpose(*shape)


def pack(M: int, N: int, nnz: int, dtype: torch.dtype) -> Case:
    capacity = max(128, 1 << nnz.bit_length())

    def published_fixed(x: Tensor) -> Any:
        from benchmarks.peers import jumprelu_sae_kernels

        return jumprelu_sae_kernels.pack_fixed(x, capacity, validate=False)

    def published_exact(x: Tensor) -> Any:
        from benchmarks.peers import jumprelu_sae_kernels

        return jumprelu_sae_kernels.pack_exact(x)

    def from_fixed(rows: Any, x: Tensor) -> tuple[Tensor]:
        columns, values = rows.indices.view(M, capacity), rows.values.view(M, capacity)
        used = torch.arange(capacity, device=x.device) < rows.counts[:, None]
        dense = torch.zeros(M, N + 1, dtype=x.dtype, device=x.device)
        return (dense.scatter_(1, torch.where(used, columns, N).long(), values)[:, :N],)

    def from_exact(rows: Any, x: Tensor) -> tuple[Tensor]:
        parts = rows.row_offsets, rows.indices, rows.values
        return (torch.sparse_csr_tensor(*parts, size=x.shape).to_dense(),)

    return Case(
        room="rowsparse",
        name="pack",
        parameters={"M": M, "N": N, "nnz": nnz},
        dtype=dtype,
        make=lambda device, generator: _inputs(M, N, nnz, dtype, device, generator),
        providers=(
            Provider(
                "gossamer ELL",
                lambda x: rowsparse.pack(x, capacity=capacity),
                ours=True,
                result=_dense_of_rows,
                capturable=True,
            ),
            Provider("gossamer CSR", lambda x: rowsparse.pack(x, capacity="exact"), ours=True, result=_dense_of_rows),
            Provider("to_sparse_csr", Tensor.to_sparse_csr, result=_dense_of_rows),
            Provider("nonzero + gather", _nonzero, result=lambda out, x: (torch.zeros_like(x).index_put_(*out),)),
            Provider(
                "jumprelu-sae-kernels, fixed, unsafe",
                published_fixed,
                result=from_fixed,
                devices=("cuda",),
                capturable=True,
            ),
            Provider("jumprelu-sae-kernels, exact", published_exact, result=from_exact, devices=("cuda",)),
        ),
        reference=lambda x: (x.double(),),
        bytes=M * N * dtype.itemsize + M * nnz * (dtype.itemsize + 4),
        flops=0,
    )


def _transpose(M: int, N: int, nnz: int, dtype: torch.dtype) -> Case:
    return Case(
        room="rowsparse",
        name="transpose",
        parameters={"M": M, "N": N, "nnz": nnz},
        dtype=dtype,
        make=lambda device, generator: _inputs(M, N, nnz, dtype, device, generator),
        providers=(
            Provider(
                "gossamer",
                rowsparse.transpose,
                ours=True,
                prepare=lambda x: (rowsparse.pack(x, capacity=max(128, 1 << nnz.bit_length())),),
                result=_dense_of_rows,
                capturable=True,
            ),
            Provider(
                "torch.sparse",
                lambda x: x.to_sparse_csc(),
                prepare=lambda x: (x.to_sparse_csr(),),
                result=lambda out, _: (out.to_dense().T,),
            ),
        ),
        reference=lambda x: (x.double().T,),
        bytes=2 * M * nnz * (dtype.itemsize + 4) + 8 * N,
        flops=0,
    )


def _inputs(
    M: int, N: int, nnz: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> list[tuple[Tensor]]:
    count = copies(device, M * N * dtype.itemsize)
    return [(random_rows(M, N, nnz, dtype, device, generator),) for _ in range(count)]


def _dense_of_rows(rows: Any, _: Tensor) -> tuple[Tensor]:
    return (rows.to_dense(),)


def _nonzero(x: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    where = x.nonzero(as_tuple=True)
    return where, x[where]
