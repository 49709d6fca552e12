"""A linear layer whose active entries are packed as they are computed."""

import math
from typing import Any

import torch
from torch import Tensor

from gossamer._core import autocast, checks
from gossamer._core.calls import Checked, key_of
from gossamer._core.operator import register
from gossamer._core.ops import undispatched
from gossamer.gemm._torch import linear_pack as _cpu
from gossamer.gemm.activations import Activation, resolve_fixed
from gossamer.gemm.linear_pack_path import PATHS, choose_path
from gossamer.gemm.records import LinearPack
from gossamer.rowsparse.container import unchecked, unchecked_source
from gossamer.rowsparse.formats import ELL, TwELL, empty_ell, empty_twell, threshold_dtype
from gossamer.rowsparse.matmul import gradients, matmul_operator
from gossamer.rowsparse.pack import default_capacity, tile_slots
from gossamer.rowsparse.transpose import transpose_keys
from gossamer.rowsparse.twell import lists

_checked: Checked[tuple[int, int | None]] = Checked()


def linear_pack(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Activation | str = "relu",
    *,
    format: str = "twell",
    capacity: int | None = None,
    tile: int = 256,
    slots: int | None = None,
) -> tuple[TwELL | ELL, Tensor]:
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
        format: `"twell"`, or `"ell"`, which is what the entries are multiplied from: a TwELL brought together.
        capacity: slots per row of an ELL; None takes what `rowsparse.pack` takes.
        tile: columns per tile, 1 to 32,767.
        slots: slots per row and tile; None takes tile / 16, at least 1.

    Returns:
        `(rows, nnz)`: a `TwELL` or `ELL` of shape `(..., N)` with positive values, and how many entries each row truly
        has, int32 `[...]`. A row that overflows its slots stays exact: the container keeps x, weight, bias and
        threshold, which must not be changed in place meanwhile, and operators compute it again. Slots without an entry
        hold anything. Differentiable in x, weight and bias.

    Raises:
        ValueError: shapes or devices do not fit, an activation or format that is not one of these, a capacity for a
            TwELL, or sizes out of range.
        TypeError: dtypes differ or are not floating, or a size is not an int.

    Source: Cetin et al., "Sparser, Faster, Lighter Transformer Language Models", sections 3.1 to 3.3.

    >>> rows, nnz = linear_pack(torch.tensor([[1.0, -1.0]]), torch.eye(2), tile=2, slots=1)
    >>> rows.values.tolist(), rows.indices.tolist(), nnz.tolist()
    ([[[1.0]]], [[[0]]], [1])
    """
    operator = "gemm.linear_pack"
    name, _, _, _, threshold, _ = resolve_fixed(operator, activation).parameters
    autocasts = autocast.enabled(x.device) if isinstance(x, Tensor) else False
    key = None if autocasts else key_of((x, weight, bias, threshold), (name, format), (capacity, tile, slots))
    known = _checked.get(key)
    if known is None:
        check_operands(operator, x, weight, bias, threshold)
        known = check_options(operator, weight.shape[0], format, capacity, tile, slots)
        if autocasts:
            x, weight = autocast.cast(x, weight)  # type: ignore[assignment]
        checks.same_dtype(operator, "x", x, weight=weight)
        _checked.keep(key, known)
    (n, _), leading = weight.shape, x.shape[:-1]
    slots, capacity = known
    if threshold is not None:
        threshold = threshold.detach()
        if threshold.dim() == 0 or threshold.dtype is not threshold_dtype(weight.dtype):
            threshold = threshold.to(threshold_dtype(weight.dtype)).expand(n)
    flat = x if x.dim() == 2 else x.reshape(math.prod(leading), x.shape[-1])
    squared = name == "relu2"
    call = LinearPack(flat, weight, bias, threshold, tile, slots, capacity, squared)
    values, indices, counts, nnz = linear_pack_operator(call)
    shape, source = (*leading, n), None
    if slots < min(tile, n) or (capacity is not None and capacity < n):
        if not torch.is_grad_enabled():
            # What overflowed has a gradient where the rest has one.
            flat, weight, bias = flat.detach(), weight.detach(), None if bias is None else bias.detach()
        source = unchecked_source(x=flat, weight=weight, bias=bias, threshold=threshold, squared=squared)
    if capacity is None:
        rows = unchecked(TwELL, values, indices, counts, shape, source, tile)
    else:
        rows = unchecked(ELL, values, indices, counts, shape, source)
    return rows, nnz if x.dim() == 2 else nnz.view(leading)


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


def check_options(
    operator: str, n: int, format: str, capacity: int | None, tile: int, slots: int | None
) -> tuple[int, int | None]:
    """(slots per row and tile, slots per row or None for a TwELL)."""
    if format not in ("twell", "ell"):
        raise ValueError(f'{operator}: format must be "twell" or "ell", got {format!r}.')
    slots = tile_slots(operator, tile, slots)
    if format == "twell":
        if capacity is not None:
            raise ValueError(f'{operator}: capacity belongs to format="ell". A TwELL takes tile and slots.')
        return slots, None
    if capacity is None:
        return slots, max(1, default_capacity(n))
    checks.positive(operator, "capacity", capacity, "It is the number of slots per row.")
    return slots, max(1, min(capacity, n))


def _fake(call: LinearPack) -> tuple[Tensor, ...]:
    x, m, n = call.x, call.x.shape[0], call.weight.shape[0]
    if call.capacity is None:
        packed = empty_twell(x, m, n, call.tile, call.slots)
    else:
        packed = empty_ell(x, m, call.capacity)
    return *packed, x.new_empty(m, dtype=torch.int32)


def _keep(call: LinearPack, results: Any) -> tuple[Tensor | None, ...]:
    values, indices, counts, _ = results
    return indices, counts, values if call.squared else None


def _backward(call: LinearPack, kept: Any, grads: Any, needs: Any) -> dict[str, Tensor | None]:
    """Every stored entry is active: the gradient of z is that of the values. Rows that overflowed are read from the
    source, which has a gradient of its own."""
    x, weight, bias = call[:3]
    (indices, counts, squares), grad, n = kept, grads[0], weight.shape[0]
    if squares is not None:
        # Slots without an entry hold anything, a NaN or a number below 0 as well; they are not read.
        grad = 2 * grad * squares.sqrt()
    if call.capacity is None:
        grad, indices, counts = lists(grad, indices, counts, call.tile, n)
    else:
        counts = torch.where(counts > call.capacity, 0, counts)
    found: dict[str, Tensor | None] = {}
    if needs.x:
        multiply = undispatched(matmul_operator, grad, weight)
        found["x"] = multiply(grad, indices, counts, None, weight, None, x.dtype)
    if needs.weight or needs.bias:
        columns = undispatched(transpose_keys, indices, counts)(indices, counts, n)
    if needs.weight:
        found["weight"] = gradients(x, indices, columns, grad, counts, None, None, weight.dtype)[0]
    if bias is not None and needs.bias:
        ones, wide = x.new_ones(x.shape[0], 1), threshold_dtype(weight.dtype)
        sums = gradients(ones, indices, columns, grad, counts, None, None, wide)[0]
        found["bias"] = sums[:, 0].to(bias.dtype)
    return found


@register(
    LinearPack,
    cpu=_cpu.linear_pack,
    fake=_fake,
    choose_path=choose_path,
    paths=PATHS,
    backward=_backward,
    saved=("x", "weight", "bias"),
    keep=_keep,
    differentiable=1,
)
def linear_pack_operator() -> Any:
    from gossamer.gemm._triton.linear_pack import linear_pack

    return linear_pack
