"""To and from PyTorch's sparse tensors."""

import math

import torch
from torch import Tensor

from gossamer._core import checks
from gossamer.rowsparse.entries import listed
from gossamer.rowsparse.formats import spans_of
from gossamer.rowsparse.rows import Rows


def to_torch_sparse(rows: Rows, layout: torch.layout) -> Tensor:
    """`Rows.to_torch_sparse`"""
    if layout not in (torch.sparse_csr, torch.sparse_coo):
        raise ValueError(f"rowsparse.Rows: layout must be torch.sparse_csr or torch.sparse_coo, got {layout}.")
    row, columns, values = listed(rows.complete())
    shape: tuple[int, ...]
    if layout is torch.sparse_csr:
        at, shape = torch.stack([row, columns]), (rows.num_rows, rows.num_columns)
    else:
        leading = torch.unravel_index(row, rows.shape[:-1]) if len(rows.shape) > 1 else ()
        at, shape = torch.stack([*leading, columns]), rows.shape
    sparse = torch.sparse_coo_tensor(at, values, shape, check_invariants=False).coalesce()
    return sparse if layout is torch.sparse_coo else sparse.to_sparse_csr()


def from_torch_sparse(tensor: Tensor) -> Rows:
    """A sparse tensor of PyTorch as `Rows`; every stored entry is kept, and repeated ones are added up.

    Args:
        tensor: `[..., N]` in any sparse layout whose entries are single numbers, floating.

    Returns:
        `Rows` of shape `(..., N)` without a source, differentiable in the values.

    Raises:
        TypeError: it is not sparse, or not floating.
        ValueError: a hybrid tensor, whose entries are tensors; offsets that do not start at 0, that decrease, or that
            do not end at the number of entries; an index out of range.

    Source: this package; `torch.sparse`.

    >>> from_torch_sparse(torch.eye(2).to_sparse()).spans.tolist()
    [[0, 1], [1, 1]]
    """
    operator = "rowsparse.from_torch_sparse"
    checks.tensors(operator, tensor=tensor)
    if tensor.layout is torch.strided:
        raise TypeError(f"{operator}: tensor must be sparse, got a strided one. Use rowsparse.pack.")
    if tensor.dtype not in checks.FLOATS:
        raise TypeError(f"{operator}: tensor must be floating, got {checks.name_of(tensor.dtype)}.")
    if tensor.dense_dim():
        raise ValueError(f"{operator}: entries must be single numbers, got tensors of {tensor.dense_dim()} dimensions.")
    _check_layout(operator, tensor)
    coo = (tensor if tensor.layout is torch.sparse_coo else tensor.to_sparse()).coalesce()
    *leading, columns = coo.indices()
    shape = tuple(coo.shape)
    row = torch.zeros_like(columns)
    for size, index in zip(shape, leading):
        row = row * size + index
    spans = spans_of(torch.bincount(row, minlength=math.prod(shape[:-1])))
    return Rows(coo.values(), columns.int(), spans, shape)


def _check_layout(operator: str, tensor: Tensor) -> None:
    """Raises where a tensor breaks the rules of its layout, at which PyTorch does not look by default."""
    if tensor.layout is torch.sparse_coo:
        indices = tensor._indices()
        _check_range(operator, indices, torch.tensor(tensor.shape, device=indices.device)[:, None])
        return
    by_rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    if by_rows:
        name, offsets, indices = "crow_indices", tensor.crow_indices(), tensor.col_indices()
    else:
        name, offsets, indices = "ccol_indices", tensor.ccol_indices(), tensor.row_indices()
    wrong = (offsets[..., :1] != 0).any() | (offsets[..., -1:] != indices.shape[-1]).any()
    if bool(wrong | (offsets.diff(dim=-1) < 0).any()):
        raise ValueError(
            f"{operator}: {name} must start at 0, never decrease, and end at the number of entries, "
            f"{indices.shape[-1]}, got {offsets.flatten()[:8].tolist()} at its beginning."
        )
    block = tensor.values().shape[-2:] if tensor.layout in (torch.sparse_bsr, torch.sparse_bsc) else (1, 1)
    dim = -1 if by_rows else -2
    _check_range(operator, indices, torch.tensor(tensor.shape[dim] // block[dim], device=indices.device))


def _check_range(operator: str, indices: Tensor, sizes: Tensor) -> None:
    outside = (indices < 0) | (indices >= sizes)
    if bool(outside.any()):
        raise ValueError(
            f"{operator}: indices must lie in [0, size) of their dimension, got {int(indices[outside][0])}."
        )
