"""A linear layer whose active entries are packed as they are computed."""

import math
from typing import Any

import torch
from torch import Tensor

from gossamer._core import autocast, checks
from gossamer._core.calls import Checked, key_of
from gossamer._core.operator import register
from gossamer.gemm._torch import linear_pack as _cpu
from gossamer.gemm.activations import Activation, resolve_fixed
from gossamer.gemm.linear_pack_path import PATHS, SLOTS, choose_path
from gossamer.gemm.records import LinearPack
from gossamer.rowsparse.entries import fitting
from gossamer.rowsparse.formats import empty_slots, threshold_dtype
from gossamer.rowsparse.linear_source import LinearSource
from gossamer.rowsparse.matmul import gradients, matmul_operator
from gossamer.rowsparse.pack import check_room, default_capacity
from gossamer.rowsparse.records import Matmul, TransposeKeys
from gossamer.rowsparse.rows import Rows, unchecked
from gossamer.rowsparse.transpose import transpose_keys

_checked: Checked[int] = Checked()
"""Slots per row of each kind of call."""


def linear_pack(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Activation | str = "relu",
    *,
    capacity: int | None = None,
) -> Rows:
    """activation(x @ weight.T + bias) as a row-sparse container, packed block by block as it is computed.

    Without gradients the dense matrix is never in memory beyond a block of rows; with them, the gradient of rows that
    overflow takes memory for all.

    z below is the pre-activation, rounded to the dtype of weight.

    Args:
        x: `[..., K]`, float, any strides.
        weight: `[N, K]` as in `nn.Linear`, any strides (so `W_enc.T` as well); the dtype and device of x.
        bias: `[N]`, added in float32, or None.
        activation: `"relu"` keeps z > 0, `"relu2"` its square, and `JumpReLU(threshold)`, which has no bandwidth here,
            keeps z > threshold, which has no gradient. NaN is kept.
        capacity: slots per row; None takes what `rowsparse.pack` takes. The path "hopper" packs 256 columns at a time,
            to 16 slots, before it brings a row together: a row with more entries there overflows as well.

    Returns:
        `Rows` of shape `(..., N)` with positive values; `rows.counts` has the true number of entries of each row. A row
        that overflows stays exact: the container keeps x, weight, bias and threshold, which must not be changed in
        place meanwhile, and operators compute it again. Differentiable in x, weight and bias.

    Raises:
        ValueError: shapes or devices do not fit, another activation, or a capacity below 1.
        TypeError: dtypes differ or are not floating, or capacity is not an int.

    Source: Cetin et al., "Sparser, Faster, Lighter Transformer Language Models", sections 3.1 to 3.3.

    >>> rows = linear_pack(torch.tensor([[1.0, -1.0]]), torch.eye(2), capacity=1)
    >>> rows.values.tolist(), rows.indices.tolist(), rows.counts.tolist()
    ([1.0], [0], [1])
    """
    operator = "gemm.linear_pack"
    name, _, _, _, threshold, _ = resolve_fixed(operator, activation).parameters
    key = key_of((x, weight, bias, threshold), (name,), (capacity,))
    room = _checked.get(key)
    if room is None:
        check_operands(operator, x, weight, bias, threshold)
        n = weight.shape[0]
        if capacity is not None:
            checks.positive(operator, "capacity", capacity, "It is the number of slots per row.")
        room = max(1, default_capacity(n) if capacity is None else min(capacity, n))
        check_room(operator, math.prod(x.shape[:-1]), room)
        x, weight = autocast.cast(x, weight)  # type: ignore[assignment]
        checks.same_dtype(operator, "x", x, weight=weight)
        _checked.keep(key, room)
    (n, _), leading = weight.shape, x.shape[:-1]
    if threshold is not None:
        threshold = threshold.detach()
        if threshold.dim() == 0 or threshold.dtype is not threshold_dtype(weight.dtype):
            threshold = threshold.to(threshold_dtype(weight.dtype)).expand(n)
    flat = x if x.dim() == 2 else x.reshape(math.prod(leading), x.shape[-1])
    squared = name == "relu2"
    call = LinearPack(flat, weight, bias, threshold, room, squared)
    values, indices, spans = linear_pack_operator(call)
    source = None
    if n > min(room, SLOTS):
        if not torch.is_grad_enabled():
            # A row that overflowed has a gradient where the others have one.
            flat, weight, bias = flat.detach(), weight.detach(), None if bias is None else bias.detach()
        source = LinearSource(flat, weight, bias, threshold, squared)
    return unchecked(values, indices, spans, (*leading, n), source)


def check_operands(operator: str, x: Tensor, weight: Tensor, bias: Tensor | None, threshold: Tensor | None) -> None:
    given = {name: tensor for name, tensor in (("bias", bias), ("threshold", threshold)) if tensor is not None}
    checks.floating(operator, x=x, weight=weight, **given)
    if x.dim() == 0:
        raise ValueError(f"{operator}: x must have shape [..., K], got a scalar.")
    checks.matrix(operator, "weight", weight, "[N, K]", 1, x.shape[-1], "x")
    for name, tensor in given.items():
        if name == "bias" or tensor.dim() != 0:
            letters = "[N]" if name == "bias" else "[N] or []"
            checks.shape(operator, name, tensor, (weight.shape[0],), letters, "like weight")
    checks.columns(operator, "weight", weight.shape[0])
    checks.same_device(operator, "x", x.device, weight=weight, **given)


def _backward(call: LinearPack, kept: Any, grads: Any, needs: Any) -> dict[str, Tensor | None]:
    """Every stored entry is active: the gradient of z is that of the values. Rows that overflowed are read from the
    source, which has a gradient of its own."""
    x, weight, bias = call[:3]
    (indices, spans, squares), grad, n = kept, grads[0], weight.shape[0]
    if squares is not None:
        grad = 2 * grad * squares.sqrt()
    spans = fitting(spans, indices.shape[0])
    found: dict[str, Tensor | None] = {}
    if needs.x:
        found["x"] = matmul_operator(Matmul(grad, indices, spans, None, weight, None, x.dtype))
    if needs.weight or needs.bias:
        columns = transpose_keys(TransposeKeys(indices, spans, n))
    if needs.weight:
        found["weight"] = gradients(x, indices, columns, grad, spans, None, None, weight.dtype)[0]
    if bias is not None and needs.bias:
        ones, wide = x.new_ones(x.shape[0], 1), threshold_dtype(weight.dtype)
        sums = gradients(ones, indices, columns, grad, spans, None, None, wide)[0]
        found["bias"] = sums[:, 0].to(bias.dtype)
    return found


@register(
    LinearPack,
    cpu=_cpu.linear_pack,
    fake=lambda call: empty_slots(call.x, call.x.shape[0], call.x.shape[0] * call.capacity),
    choose_path=choose_path,
    paths=PATHS,
    backward=_backward,
    saved=("x", "weight", "bias"),
    keep=lambda call, results: (*results[1:], results[0] if call.squared else None),
    differentiable=1,
    repeats=True,
)
def linear_pack_operator() -> Any:
    from gossamer.gemm._triton.linear_pack import linear_pack

    return linear_pack
