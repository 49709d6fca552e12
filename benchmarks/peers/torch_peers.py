"""The ways of plain PyTorch to compute `acts @ W` with few nonzeros per row of `acts` [B, F], `W` [F, D]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.engine import Provider
from gossamer import rowsparse

dense = torch.matmul


@torch.compile(fullgraph=True, dynamic=False)
def compiled(acts: Tensor, W: Tensor) -> Tensor:
    """`acts @ W` through Inductor; `fullgraph` so that a failure to compile shows."""
    return acts @ W


def sparse_csr(acts: Tensor, W: Tensor) -> Tensor:
    """`torch.sparse`: to CSR, then its product; waits for the device."""
    return acts.to_sparse_csr() @ W


def to_bags(acts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`acts` as `embedding_bag` takes it: column indices [nnz], row starts [B], values [nnz]; waits for the device."""
    rows, columns = acts.nonzero(as_tuple=True)
    starts = torch.searchsorted(rows, torch.arange(len(acts), device=acts.device))
    return columns, starts, acts[rows, columns]


def bag(columns: Tensor, starts: Tensor, values: Tensor, W: Tensor) -> Tensor:
    """The product by `embedding_bag` from ready indices."""
    return functional.embedding_bag(columns, W, starts, mode="sum", per_sample_weights=values)


def embedding_bag(acts: Tensor, W: Tensor) -> Tensor:
    """`nonzero`, then `embedding_bag`; waits for the device."""
    return bag(*to_bags(acts), W)


def products_of_rows(ours: Callable[[rowsparse.Rows, Tensor], Tensor], capacity: int) -> tuple[Provider, ...]:
    """`ours`, of rows that are packed, and PyTorch's products, each with operands that are ready."""
    ready: dict[str, Any] = {"ours": True, "capturable": True}
    return (
        Provider("gossamer ELL", ours, prepare=lambda x, w: (rowsparse.pack(x, capacity=capacity), w), **ready),
        Provider("gossamer CSR", ours, prepare=lambda x, w: (rowsparse.pack(x, capacity="exact"), w), **ready),
        Provider("dense", dense, capturable=True),
        Provider("torch.sparse", torch.matmul, prepare=lambda x, w: (x.to_sparse_csr(), w)),
        Provider("embedding_bag", bag, prepare=lambda x, w: (*to_bags(x), w), capturable=True),
    )
