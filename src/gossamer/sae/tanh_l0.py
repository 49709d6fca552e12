"""A smooth count of latents that fire."""

from typing import Any

import torch
from torch import Tensor

from gossamer._core import checks
from gossamer._core.ops import register, save_inputs, undispatched
from gossamer.rowsparse import Rows
from gossamer.rowsparse.formats import threshold_dtype
from gossamer.rowsparse.pack import parts
from gossamer.rowsparse.rows import check_container
from gossamer.rowsparse.transpose import transpose_keys
from gossamer.sae._torch import tanh_l0 as _cpu
from gossamer.sae.encode import sum_gradients_by_column


def tanh_l0(rows: Rows, scale: Tensor) -> Tensor:
    """sum over latents of tanh(scale * value): below L0, near it where scale * value is large, with a gradient.

    Args:
        rows: `Rows` of shape `(..., d_sae)`, such as `encode` returns. Entries whose value is 0
            add 0, but have a gradient: with a bandwidth it reaches the threshold.
        scale: `[d_sae]`, float, for instance 4 times the norms of the decoder's rows.

    Returns:
        `[...]`, in float32 at least, without a host sync. Differentiable in the values and in scale, once.

    Raises:
        TypeError: rows is no container, or scale not floating.
        ValueError: shapes or devices do not fit; on the CPU, a row that overflowed without a source (on a GPU it gives
            NaN).

    Source: Conerly et al. 2025, "Dictionary Learning Optimization Techniques", the sparsity penalty.

    >>> from gossamer import rowsparse
    >>> tanh_l0(rowsparse.pack(torch.tensor([[0.0, 9.0], [8.0, 9.0]])), torch.full((2,), 4.0)).tolist()
    [1.0, 2.0]
    """
    operator = "sae.tanh_l0"
    check_container(operator, rows)
    checks.floating(operator, scale=scale)
    checks.shape(operator, "scale", scale, (rows.num_columns,), "[d_sae]", "like rows")
    checks.same_device(operator, "rows", rows.device, scale=scale)
    values, indices, spans, source = parts(operator, rows)
    scale = scale.to(threshold_dtype(values.dtype))
    out: Tensor = undispatched(_tanh_l0, values, source, scale)(values, indices, spans, source, scale)
    return out.view(rows.shape[:-1])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    values, indices, spans, source, scale = ctx.saved_tensors
    call = undispatched(_tanh_l0_bwd, grad, values, scale)
    grad_values, grad_source, slope, slope_source = call(grad, values, indices, spans, source, scale)
    grad_scale = None
    if ctx.needs_input_grad[4]:
        columns = undispatched(transpose_keys, indices, spans)(indices, spans, scale.shape[0])
        none = grad.new_zeros(1).expand(spans.shape[1])
        stored = slope_source if source is None else source
        sums = undispatched(sum_gradients_by_column, slope, values)(
            slope, slope_source, none, *columns, values, spans, stored, None, 0.0
        )
        grad_scale = sums[0].to(scale.dtype)
    return grad_values, None, None, None if source is None else grad_source, grad_scale


def _fake_bwd(*operands: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, values, _, spans, source, scale = operands
    dense = values.new_empty(0 if source is None else spans.shape[1], scale.shape[0])
    return torch.empty_like(values), dense, *(torch.empty_like(t, dtype=scale.dtype) for t in (values, dense))


_tanh_l0 = register(
    "sae_tanh_l0(Tensor values, Tensor indices, Tensor spans, Tensor? source, Tensor scale) -> Tensor",
    cpu=_cpu.tanh_l0,
    strided=("source",),
    fake=lambda values, indices, spans, source, scale: scale.new_empty(spans.shape[1]),
    setup_context=save_inputs,
    backward=_backward,
)
_tanh_l0_bwd = register(
    "sae_tanh_l0_bwd(Tensor grad, Tensor values, Tensor indices, Tensor spans, Tensor? source, Tensor scale) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    cpu=_cpu.tanh_l0_bwd,
    strided=("grad", "source"),
    fake=_fake_bwd,
    once_differentiable="sae.tanh_l0",
)
