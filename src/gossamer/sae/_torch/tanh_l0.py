"""A smooth count of what fires, on the CPU."""

import torch
from torch import Tensor

from gossamer.rowsparse._torch.pack import refuse_overflow


def tanh_l0(values: Tensor, indices: Tensor, nnz: Tensor, source: Tensor | None, scale: Tensor) -> Tensor:
    """Operator `sae_tanh_l0` -> [M]."""
    if source is None:
        refuse_overflow("sae.tanh_l0", values.shape[1], nnz)
    steep, held = _at(values, indices, nnz, scale)
    out = torch.where(held, torch.tanh(values * steep), 0).sum(1)
    if source is not None:
        over = nnz > values.shape[1]
        out[over] = torch.tanh(source[over] * scale).sum(1)
    return out.to(scale.dtype)


def tanh_l0_bwd(
    grad: Tensor, values: Tensor, indices: Tensor, nnz: Tensor, source: Tensor | None, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Operator `sae_tanh_l0_bwd` -> gradients of values and source, and in the dtype of scale the terms of its own."""
    steep, held = _at(values, indices, nnz, scale)
    inner = torch.where(held, grad[:, None] * (1 - torch.tanh(values * steep).square()), 0)
    dense = values.new_zeros(0 if source is None else source.shape[0], scale.shape[0])
    slope_source = torch.zeros_like(dense, dtype=scale.dtype)
    if source is not None:
        over = nnz > values.shape[1]
        flow = grad[over, None] * (1 - torch.tanh(source[over] * scale).square())
        dense[over] = (flow * scale).to(dense.dtype)
        slope_source[over] = (flow * source[over]).to(scale.dtype)
    return (inner * steep).to(values.dtype), dense, (inner * values).to(scale.dtype), slope_source


def _at(values: Tensor, indices: Tensor, nnz: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(scale of each slot, whether it holds an entry of a row that fits its slots)"""
    held = (indices >= 0) & (torch.arange(values.shape[1]) < nnz[:, None]) & (nnz <= values.shape[1])[:, None]
    return scale[torch.where(held, indices, 0)] if scale.numel() else torch.zeros_like(values), held
