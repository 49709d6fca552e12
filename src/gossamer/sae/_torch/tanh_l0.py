"""A smooth count of latents that fire, on the CPU."""

import torch
from torch import Tensor

from gossamer.rowsparse._torch.pack import overflowed_rows, refuse_overflow, stored
from gossamer.sae.records import SaeTanhL0, SaeTanhL0Bwd


def tanh_l0(call: SaeTanhL0) -> Tensor:
    """[M]."""
    values, indices, spans, source, scale = call
    if source is None:
        refuse_overflow("sae.tanh_l0", spans, values.shape[0])
    slots, rows = stored(indices, spans, scale.shape[0])
    out = scale.new_zeros(spans.shape[1])
    out.index_add_(0, rows, torch.tanh(values[slots] * scale[indices[slots]]))
    if source is not None:
        over = overflowed_rows(spans, values.shape[0])
        out[over] = torch.tanh(source[over] * scale).sum(1)
    return out


def tanh_l0_bwd(call: SaeTanhL0Bwd) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of values and source, and in the dtype of scale the terms of its own."""
    grad, values, indices, spans, source, scale = call
    slots, rows = stored(indices, spans, scale.shape[0])
    value, steep = values[slots], scale[indices[slots]]
    inner = grad[rows] * (1 - torch.tanh(value * steep).square())
    grad_values, slope = torch.zeros_like(values), torch.zeros_like(values, dtype=scale.dtype)
    grad_values[slots], slope[slots] = (inner * steep).to(values.dtype), (inner * value).to(scale.dtype)
    dense = values.new_zeros(0 if source is None else source.shape[0], scale.shape[0])
    slope_source = torch.zeros_like(dense, dtype=scale.dtype)
    if source is not None:
        over = overflowed_rows(spans, values.shape[0])
        flow = grad[over, None] * (1 - torch.tanh(source[over] * scale).square())
        dense[over] = (flow * scale).to(dense.dtype)
        slope_source[over] = (flow * source[over]).to(scale.dtype)
    return grad_values, dense, slope, slope_source
