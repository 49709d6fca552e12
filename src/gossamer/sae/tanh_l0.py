"""A smooth count of latents that fire."""

from typing import Any

import torch
from torch import Tensor

from gossamer._core import checks
from gossamer._core.operator import register
from gossamer.rowsparse import Rows
from gossamer.rowsparse.formats import threshold_dtype
from gossamer.rowsparse.pack import parts
from gossamer.rowsparse.records import TransposeKeys
from gossamer.rowsparse.rows import check_container
from gossamer.rowsparse.transpose import transpose_keys
from gossamer.sae._torch import tanh_l0 as _cpu
from gossamer.sae.encode import sum_gradients_by_column
from gossamer.sae.records import SaeEncodeBwdColumns, SaeTanhL0, SaeTanhL0Bwd


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
    out: Tensor = _tanh_l0(SaeTanhL0(values, indices, spans, source, scale))
    return out.view(rows.shape[:-1])


def _backward(call: SaeTanhL0, kept: Any, grads: Any, needs: Any) -> dict[str, Tensor | None]:
    (values, indices, spans, source, scale), (grad,) = call, grads
    grad_values, grad_source, slope, slope_source = _tanh_l0_bwd(SaeTanhL0Bwd(grad, *call))
    grad_scale = None
    if needs.scale:
        offsets, keys, columns = transpose_keys(TransposeKeys(indices, spans, scale.shape[0]))
        none = grad.new_zeros(1).expand(spans.shape[1])
        stored = slope_source if source is None else source
        sums = sum_gradients_by_column(
            SaeEncodeBwdColumns(slope, slope_source, none, offsets, keys, columns, values, spans, stored, None, 0.0)
        )
        grad_scale = sums[0].to(scale.dtype)
    return {"values": grad_values, "source": None if source is None else grad_source, "scale": grad_scale}


def _fake_bwd(call: SaeTanhL0Bwd) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, values, _, spans, source, scale = call
    dense = values.new_empty(0 if source is None else spans.shape[1], scale.shape[0])
    slope, slope_source = (torch.empty_like(t, dtype=scale.dtype) for t in (values, dense))
    return torch.empty_like(values), dense, slope, slope_source


@register(
    SaeTanhL0,
    cpu=_cpu.tanh_l0,
    fake=lambda call: call.scale.new_empty(call.spans.shape[1]),
    backward=_backward,
    saved=SaeTanhL0._fields,
    repeats=True,
)
def _tanh_l0() -> Any:
    from gossamer.sae._triton.tanh_l0 import tanh_l0

    return tanh_l0


@register(SaeTanhL0Bwd, cpu=_cpu.tanh_l0_bwd, fake=_fake_bwd, once_differentiable="sae.tanh_l0", repeats=True)
def _tanh_l0_bwd() -> Any:
    from gossamer.sae._triton.tanh_l0 import tanh_l0_bwd

    return tanh_l0_bwd
