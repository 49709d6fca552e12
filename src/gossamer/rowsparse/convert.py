"""One container to another, and to and from PyTorch's sparse tensors."""

import math

import torch
from torch import Tensor

from gossamer._core import checks
from gossamer.rowsparse.formats import CSR, ELL, Rows, TwELL, check_tile, offsets_of
from gossamer.rowsparse.pack import check_container
from gossamer.rowsparse.settle import build_ell, build_twell, entries


def convert(rows: Rows, format: str, *, capacity: int | None = None, tile: int = 256, slots: int | None = None) -> Rows:
    """The same entries in another format, every one of them stored; holes are left out.

    The operators of this package take every container as it is: this is for what needs one format, and costs a
    device-to-host sync.

    Args:
        rows: `ELL`, `CSR` or `TwELL`.
        format: `"ell"`, `"csr"` or `"twell"`.
        capacity: slots per row of an ELL; None takes what the fullest row needs.
        tile: columns per tile of a TwELL, 1 to 32,767.
        slots: slots per row and tile of a TwELL; None takes what the fullest tile of a row needs.

    Returns:
        A container without a source, differentiable in the values and the source.

    Raises:
        TypeError: rows is not a container, or capacity, tile or slots is not an int.
        ValueError: an unknown format, an argument that belongs to another one, entries that capacity or slots leave no
            room for, more than 32,767 of them in a row's tile, an index outside [0, N) or its tile, or a row that
            overflowed without a source.
        NotImplementedError: under CUDA-graph capture or `torch.compile`.

    Source: Cetin et al., "Sparser, Faster, Lighter Transformer Language Models", section 3.1, for the conversion of
        tiles to one list a row.

    >>> convert(pack(torch.tensor([[0.0, 2.0], [3.0, 4.0]])), "csr").row_offsets.tolist()
    [0, 1, 3]
    """
    operator = "rowsparse.convert"
    check_container(operator, rows)
    if format not in ("ell", "csr", "twell"):
        raise ValueError(f'{operator}: format must be "ell", "csr" or "twell", got {format!r}.')
    if format != "ell" and capacity is not None:
        raise ValueError(f'{operator}: capacity belongs to format="ell". A TwELL takes tile and slots, a CSR neither.')
    if format != "twell" and (slots is not None or tile != 256):
        raise ValueError(f'{operator}: tile and slots belong to format="twell". An ELL takes capacity, a CSR neither.')
    check_tile(operator, tile)
    for name, size in (("capacity", capacity), ("slots", slots)):
        if size is not None:
            checks.positive(operator, name, size, "None takes what is needed.")
    checks.no_wait(operator, "a conversion", "Give the container to the operator as it is.")
    m, n = rows.num_rows, rows.num_columns
    row, columns, values = entries(rows, operator)
    if format == "csr":
        return CSR(offsets_of(torch.bincount(row, minlength=m)), columns.int(), values, rows.shape)
    if format == "ell":
        return ELL(*build_ell(operator, row, columns, values, m, capacity), rows.shape)
    return TwELL(*build_twell(operator, row, columns, values, m, n, tile, slots), rows.shape, tile)


def to_torch_sparse(rows: Rows, layout: torch.layout) -> Tensor:
    """`RowSparse.to_torch_sparse`"""
    if layout not in (torch.sparse_csr, torch.sparse_coo):
        raise ValueError(
            f"rowsparse.{type(rows).__name__}: layout must be torch.sparse_csr or torch.sparse_coo, got {layout}."
        )
    row, columns, values = entries(rows.settle())
    shape: tuple[int, ...]
    if layout is torch.sparse_csr:
        at, shape = torch.stack([row, columns]), (rows.num_rows, rows.num_columns)
    else:
        leading = torch.unravel_index(row, rows.shape[:-1]) if len(rows.shape) > 1 else ()
        at, shape = torch.stack([*leading, columns]), rows.shape
    sparse = torch.sparse_coo_tensor(at, values, shape, check_invariants=False).coalesce()
    return sparse if layout is torch.sparse_coo else sparse.to_sparse_csr()


def from_torch_sparse(tensor: Tensor) -> CSR:
    """A sparse tensor of PyTorch as a `CSR`; every stored entry is kept, and repeated ones are added up.

    Args:
        tensor: `[..., N]` in any sparse layout whose entries are single numbers, floating.

    Returns:
        `CSR` of shape `(..., N)` without a source, differentiable in the values.

    Raises:
        TypeError: it is not sparse, or not floating.
        ValueError: a hybrid tensor, whose entries are tensors; offsets that do not start at 0, that decrease, or that
            do not end at the number of entries; an index out of range.

    Source: this package; `torch.sparse`.

    >>> from_torch_sparse(torch.eye(2).to_sparse()).row_offsets.tolist()
    [0, 1, 2]
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
    offsets = offsets_of(torch.bincount(row, minlength=math.prod(shape[:-1])))
    return CSR(offsets, columns.int(), coo.values(), shape)


def _check_layout(operator: str, tensor: Tensor) -> None:
    """Raises where a tensor breaks the rules of its layout, at which PyTorch does not look by default."""
    if tensor.layout is torch.sparse_coo:
        indices = tensor._indices()
        _check_range(operator, "indices", indices, torch.tensor(tensor.shape, device=indices.device)[:, None])
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
    _check_range(operator, "indices", indices, torch.tensor(tensor.shape[dim] // block[dim], device=indices.device))


def _check_range(operator: str, name: str, indices: Tensor, sizes: Tensor) -> None:
    outside = (indices < 0) | (indices >= sizes)
    if bool(outside.any()):
        raise ValueError(
            f"{operator}: {name} must lie in [0, size) of their dimension, got {int(indices[outside][0])}."
        )
