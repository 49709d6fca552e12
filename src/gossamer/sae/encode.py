"""Sparse encoding for sparse autoencoders."""

import math
from typing import Any

import torch
from torch import Tensor

from gossamer._core import autocast, checks
from gossamer._core.calls import Checked, key_of
from gossamer._core.compiling import together
from gossamer._core.operator import register
from gossamer._core.ops import needs_gradient
from gossamer.gemm import AbsTopK, BatchTopK, GroupMax, JumpReLU, TopK, linear_pack
from gossamer.gemm.activations import Activation, Parameters, ReLU, resolve
from gossamer.rowsparse import Rows
from gossamer.rowsparse.dense_product import dense_product
from gossamer.rowsparse.dense_transpose import dense_transpose
from gossamer.rowsparse.entries import fitting, slots_of
from gossamer.rowsparse.formats import empty_slots, sums_over_rows, threshold_dtype
from gossamer.rowsparse.matmul import gradients, matmul_operator
from gossamer.rowsparse.pack import check_capacity as check_slots
from gossamer.rowsparse.pack import check_room
from gossamer.rowsparse.records import DenseTranspose, Matmul, TransposeKeys
from gossamer.rowsparse.rows import unchecked
from gossamer.rowsparse.transpose import transpose_keys
from gossamer.sae._torch import encode as _cpu
from gossamer.sae.encode_path import RANKED, Path, choose_path, named, row_stride
from gossamer.sae.records import SaeEncode, SaeEncodeBwdColumns, SaeEncodeBwdSource

ACTIVATIONS = (ReLU, JumpReLU, TopK, AbsTopK, BatchTopK, GroupMax)
_checked: Checked[tuple[int | None, Path]] = Checked()
"""Of each kind of call, the slots per row by a threshold, and the path without gradients."""


def encode(
    x: Tensor,
    W_enc: Tensor,
    b_enc: Tensor | None = None,
    activation: Activation | str = "relu",
    *,
    b_dec: Tensor | None = None,
    capacity: int | str | None = None,
    group: Any = None,
) -> Rows:
    """activation((x - b_dec) @ W_enc + b_enc) as row-sparse latents: a product, and a pass that packs, or both in one.

    z below is the pre-activation, in the dtype of W_enc.

    Args:
        x: `[..., d_in]`, float, any strides.
        W_enc: `[d_in, d_sae]`, as in SAELens; the dtype and device of x.
        b_enc: `[d_sae]`, added in float32, or None.
        activation: `"relu"` keeps z > 0; `gemm.JumpReLU(threshold)` keeps z > threshold, and with a bandwidth
            gives the threshold a gradient; `gemm.TopK(k)` keeps the k largest of each row, and
            `gemm.BatchTopK(k)` the k * M largest of all M rows together; `gemm.GroupMax(k)` keeps the largest of each
            of k groups of d_sae / k consecutive latents. An element that is not above 0 is never kept, but by
            `gemm.AbsTopK(k)`, which keeps the k of each row that are farthest from 0.
        b_dec: `[d_in]`, subtracted from x in float32, or None.
        capacity: slots per row for ReLU and JumpReLU, as in `rowsparse.pack`. A row with more entries stays exact: the
            container keeps its dense activation, or the operands of the product, W_enc, b_enc and threshold, which must
            then not change before the rows are read. With `"exact"` no row can overflow, and in training the
            pre-activations are freed, where slots keep them and their gradient for rows that overflow. TopK and
            GroupMax have k slots a row and BatchTopK k * M in all, and none of them takes a capacity.
        group: None, or a `torch.distributed` process group over whose ranks the latents are spread: see below.

    Returns:
        `Rows` of shape `(..., d_sae)` with positive values (zeros too in the window of a JumpReLU, and negative ones of
        AbsTopK) sorted by column, without a host sync. Differentiable in x, W_enc, b_enc, b_dec and, with a bandwidth,
        in threshold: with r the rectangle |z - threshold| < bandwidth / 2, d value / d threshold = -threshold /
        bandwidth where r. `rows.l0` has the L0 of each row; with a bandwidth it has a gradient for the threshold, -1 /
        bandwidth where r, and with `ste_to_input` the opposite one for z.

    With a group each rank gives its slice of W_enc, b_enc, threshold and scale, `[..., d_sae_r]`, and gets its own
    latents, whose columns and `l0` count within the slice. Ranks in order hold consecutive latents, not always as many;
    x and b_dec are the same on all ranks, and their gradients are summed over them: all ranks have to call backward, on
    one loss. TopK keeps the k largest of each row over all ranks, BatchTopK the k * M largest over all ranks; a k above
    the number of all latents keeps all that are above 0. Ties go to the lowest index in the whole, NaN counts as
    largest. ReLU and JumpReLU communicate in the backward pass alone. TopK gathers k values of each row and rank,
    BatchTopK sums 2, 4 or 7 histograms of 512 counts (for 16, 32 and 64 bits) and gathers a count of each row and rank;
    with NCCL the host waits for nothing. GroupMax takes no group.

    Raises:
        ValueError: shapes or devices do not fit, an unknown activation, k above d_sae (of GroupMax: no divisor of it),
            a capacity below 1 or for an activation that takes none, or `group` is no process group of this process.
        TypeError: dtypes differ or are not floating, or capacity is no int.
        NotImplementedError: `capacity="exact"` under CUDA-graph capture or `torch.compile`.

    Source: Rajamanoharan et al. 2024, "Jumping Ahead", section 3; Gao et al. 2024 (TopK, and sharded latents); Bussmann
    et al. 2024 (BatchTopK); Conerly et al. 2025, "Dictionary Learning Optimization Techniques" (ste_to_input).

    >>> encode(torch.tensor([[1.0, 3.0, 2.0]]), torch.eye(3), None, gemm.TopK(2)).indices.tolist()
    [1, 2]
    """
    if group is not None:
        from gossamer.sae.sharded import encode_sharded

        return encode_sharded(x, W_enc, b_enc, activation, b_dec, capacity, group)
    return run("sae.encode", x, W_enc, b_enc, activation, b_dec, capacity)


def run(
    operator: str,
    x: Tensor,
    W_enc: Tensor,
    b_enc: Tensor | None,
    activation: Activation | str,
    b_dec: Tensor | None,
    capacity: int | str | None,
) -> Rows:
    """`encode` by one process; `operator` names the public function."""
    if type(activation) not in ACTIVATIONS:
        activation = resolve(operator, activation, ACTIVATIONS)
    parameters: Parameters = activation.parameters  # type: ignore[union-attr]
    name, k, bandwidth, ste_to_input, threshold, scale = parameters
    operands = (x, W_enc, b_enc, b_dec, threshold, scale)
    options = (name, k, bandwidth, ste_to_input)
    key = key_of(operands, options, (capacity,))
    known = _checked.get(key)
    if known is None:
        W_enc = check_operands(operator, x, W_enc, b_enc, b_dec, parameters)
        slots, m = check_capacity(operator, parameters, capacity, W_enc.shape[1]), math.prod(x.shape[:-1])
        check_room(operator, m, slots or k)
        known = slots, choose_path(name, m, k, W_enc, slots)
        _checked.keep(key, known)
    slots, path = known
    if capacity == "exact":
        checks.no_wait(operator, 'capacity="exact"', "Give the number of slots per row.")
    n, leading = W_enc.shape[1], x.shape[:-1]
    if threshold is not None and (threshold.dim() == 0 or threshold.dtype is not threshold_dtype(W_enc.dtype)):
        threshold = threshold.to(threshold_dtype(W_enc.dtype)).expand(n)
    if threshold is not None and threshold.stride(0) > 1:
        # A column times its stride has to fit 32 bits.
        threshold = threshold.contiguous()
    if scale is not None:
        scale = scale.detach()
    window = bandwidth if bandwidth is not None and has_window(threshold, ste_to_input) else 0.0
    flat = x if x.dim() == 2 else x.reshape(math.prod(leading), x.shape[-1])
    if path == "tiles" and not window and not needs_gradient(x, W_enc, b_enc, b_dec, threshold):
        with named(path):
            rows = _in_tiles(flat, W_enc, b_enc, b_dec, threshold, slots)
        return rows if x.dim() == 2 else rows.reshape(*leading, n)
    call = SaeEncode(flat, W_enc, b_enc, b_dec, threshold, name, k, window, slots, scale, ste_to_input)
    values, indices, spans, source, l0 = _sae_encode(call)
    may_overflow = name in ("relu", "jumprelu") and slots is not None and slots < n
    return unchecked(values, indices, spans, (*leading, n), source if may_overflow else None, l0)


def has_window(threshold: Tensor | None, ste_to_input: bool) -> bool:
    """Whether an estimate is made in the window around thresholds: for them, or for z."""
    return torch.is_grad_enabled() and (ste_to_input or (threshold is not None and threshold.requires_grad))


def _in_tiles(
    x: Tensor, W_enc: Tensor, b_enc: Tensor | None, b_dec: Tensor | None, threshold: Tensor | None, capacity: int | None
) -> Rows:
    """Of x [M, d_in]: without gradients nobody needs the pre-activations, and they are never written."""
    # x is copied: the caller may change it before the rows that overflowed are read.
    inner = x.to(W_enc.dtype, copy=True) if b_dec is None else (x - b_dec).to(W_enc.dtype)
    fixed = "relu" if threshold is None else JumpReLU(threshold)
    rows = linear_pack(inner, W_enc.t(), b_enc, fixed, capacity=capacity)
    # Every entry is above 0.
    return unchecked(*rows.packed[:3], rows.shape, rows.packed.source, rows.counts.to(threshold_dtype(rows.dtype)))


def check_operands(
    operator: str, x: Tensor, W_enc: Tensor, b_enc: Tensor | None, b_dec: Tensor | None, activation: Parameters
) -> Tensor:
    """W_enc, in the dtype of autocast; raises where an operand does not fit, those of the activation among them."""
    threshold = activation.threshold
    optional = {"b_enc": b_enc, "b_dec": b_dec, "threshold": threshold, "scale": activation.scale}
    given = {name: tensor for name, tensor in optional.items() if tensor is not None}
    checks.floating(operator, x=x, W_enc=W_enc, **given)
    if x.dim() == 0:
        raise ValueError(f"{operator}: x must have shape [..., d_in], got a scalar.")
    if W_enc.dim() != 2:
        raise ValueError(f"{operator}: W_enc must have shape [d_in, d_sae], got {list(W_enc.shape)}.")
    if x.shape[-1] != W_enc.shape[0]:
        raise ValueError(
            f"{operator}: x must have shape [..., d_in] with d_in = {W_enc.shape[0]} like W_enc, got {list(x.shape)}."
        )
    checks.same_device(operator, "x", x.device, W_enc=W_enc, **given)
    d_in, d_sae = W_enc.shape
    for name, size, letters in (("b_enc", d_sae, "[d_sae]"), ("b_dec", d_in, "[d_in]"), ("scale", d_sae, "[d_sae]")):
        if name in given:
            checks.shape(operator, name, given[name], (size,), letters, "like W_enc")
    if threshold is not None and threshold.dim() != 0:
        checks.shape(operator, "threshold", threshold, (d_sae,), "[d_sae]", "like W_enc, or be a scalar")
    autocasts = autocast.enabled(x.device)
    if autocasts:
        (W_enc,) = autocast.cast(W_enc)  # type: ignore[assignment]
    # Autocast leaves float64 alone.
    if not autocasts or torch.float64 in (x.dtype, W_enc.dtype):
        checks.same_dtype(operator, "x", x, W_enc=W_enc)
    return W_enc


def check_capacity(operator: str, activation: Parameters, capacity: int | str | None, d_sae: int) -> int | None:
    """Slots per row by a threshold, None for as many as there are entries and for activations that keep a number."""
    if activation.k > d_sae:
        raise ValueError(f"{operator}: k must be at most d_sae = {d_sae}, got {activation.k}.")
    if activation.name == "groupmax" and d_sae % activation.k:
        near = max(k for k in range(1, activation.k) if d_sae % k == 0)
        raise ValueError(
            f"{operator}: k of gemm.GroupMax must divide d_sae = {d_sae} into groups of one size, got {activation.k}. "
            f"Take {near}, for example, or gemm.TopK."
        )
    if activation.name in RANKED:
        if capacity is not None:
            raise ValueError(
                f"{operator}: capacity belongs to the other activations, got {capacity!r} for one that keeps k entries "
                "a row. Leave it out."
            )
        return None
    return check_slots(operator, capacity, d_sae)


def _fake(call: SaeEncode) -> tuple[Tensor, ...]:
    weight, (m, n), capacity = call.weight, (call.x.shape[0], call.weight.shape[1]), call.capacity
    room: Any
    if call.activation in RANKED:
        room, keeps = m * call.k, False
    elif capacity is None:
        room, keeps = torch.library.get_ctx().new_dynamic_size(), False
    else:
        room, keeps = m * capacity, capacity < n
    source = weight.new_empty(m, row_stride(m, n, weight))[:, :n] if keeps else weight.new_empty(0, n)
    return *empty_slots(weight, m, room), source, weight.new_empty(m, dtype=threshold_dtype(weight.dtype))


@together
def encode_backward(call: SaeEncode, kept: Any, grads: Any, needs: Any) -> dict[str, Tensor | None]:
    x, weight, bias, b_dec, threshold, *_ = call
    (values, indices, spans, source), (grad_values, _, _, grad_source, grad_l0) = kept, grads
    room, need_threshold, bandwidth = values.shape[0], needs.threshold, call.bandwidth
    # Of no rows a source has none either.
    keep_source = source.shape[0] > 0
    if bandwidth == 0:
        threshold, need_threshold = None, False
    estimate = threshold if call.ste_to_input else None
    if not keep_source:
        grad_source = None
    if grad_values is None and grad_source is None and (grad_l0 is None or threshold is None):
        return {}
    if grad_values is None:
        grad_values = values.new_zeros(()).expand_as(values)
    if grad_l0 is None:
        grad_l0 = values.new_zeros(1, dtype=threshold_dtype(values.dtype)).expand(x.shape[0])
    # An element in the window below the threshold is stored with value 0, and reaches the threshold alone.
    grad_pre = torch.where(values != 0, grad_values, 0)
    if estimate is not None:
        row, held = slots_of(spans, room)
        limit = estimate[indices.clamp(min=0)]
        near = held & (indices >= 0) & (values - limit < bandwidth / 2) & (limit >= 0)
        slope = (limit * grad_values + (grad_l0[row] if grad_l0.shape[0] else 0)) / bandwidth
        grad_pre = (grad_pre + torch.where(near, slope, 0)).to(values.dtype)
        if keep_source and grad_source is None:
            grad_source = values.new_zeros(1, 1).expand_as(source)
    dense, mask, fits = None, None, spans
    if grad_source is not None and not needs.x and estimate is None:
        # Nothing but the product for W_enc reads it, and masks it there.
        dense, mask = grad_source, source
    elif grad_source is not None:
        dense = _bwd_source(SaeEncodeBwdSource(grad_source, source, spans, room, grad_l0, estimate, bandwidth))
    elif keep_source:
        fits = fitting(spans, room)
    found: dict[str, Tensor | None] = {}
    if needs.x:
        found["x"] = matmul_operator(Matmul(grad_pre, indices, fits, dense, weight.t(), None, x.dtype))
    if needs.weight or needs.bias or need_threshold or needs.b_dec:
        columns = transpose_keys(TransposeKeys(indices, spans, weight.shape[1]))
    if needs.weight:
        inner = (x if b_dec is None else x - b_dec).to(weight.dtype)
        grad_weight = gradients(inner, indices, columns, grad_pre, fits, dense, None, weight.dtype, mask)[0]
        # In the layout of the parameter, or autograd would copy it into that, at a fifth of the speed.
        by_latent = weight.stride(0) == 1 and weight.stride(1) == weight.shape[0]
        found["weight"] = grad_weight.t() if by_latent else dense_transpose(DenseTranspose(grad_weight))
    if needs.bias or need_threshold or (needs.b_dec and not needs.x):
        if grad_source is None:
            grad_source = values.new_zeros(1, 1).expand_as(source)
        given = (grad_values, grad_source, grad_l0, *columns, values, spans, source, threshold, bandwidth)
        sums, grad_threshold = sum_gradients_by_column(SaeEncodeBwdColumns(*given))
        if estimate is not None:
            # The estimate for z is that for the threshold with the sign changed.
            sums = sums - grad_threshold
        if bias is not None and needs.bias:
            found["bias"] = sums.to(bias.dtype)
        found["threshold"] = grad_threshold if need_threshold else None
    if b_dec is not None and needs.b_dec:
        if needs.x:
            found["b_dec"] = -sums_over_rows(found["x"]).to(b_dec.dtype)  # type: ignore[arg-type]
        else:
            # The same sum without the gradient of x: every row passes through the one W_enc.
            found["b_dec"] = -_through(sums, weight.t()).to(b_dec.dtype)
    return found


def _through(sums: Tensor, weight: Tensor) -> Tensor:
    """sums `[N]` @ weight `[N, D]`, in the dtype of sums."""
    large = weight.is_cuda and weight.dtype is torch.bfloat16 and weight.numel() > 1 << 20
    # Tracing compilers pass tensors of other types.
    if not large or type(weight) is not Tensor or torch.compiler.is_compiling():
        return dense_product(sums[None], weight, None, sums.dtype)[0]
    # Three pieces hold the digits of float32: to widen the weight takes five times as long.
    pieces, rest = list[Tensor](), sums
    for _ in range(3):
        pieces.append(rest.to(weight.dtype))
        rest = rest - pieces[-1]
    with autocast.disabled(weight.device):
        return torch.mm(torch.stack(pieces), weight, out_dtype=sums.dtype).sum(0)


def _fake_sums(call: SaeEncodeBwdColumns) -> tuple[Tensor, Tensor]:
    values, n, dtype = call.values, call.col_offsets.shape[0] - 1, threshold_dtype(call.values.dtype)
    return values.new_empty(n, dtype=dtype), values.new_empty(0 if call.threshold is None else n, dtype=dtype)


@register(
    SaeEncode,
    cpu=_cpu.encode,
    fake=_fake,
    backward=encode_backward,
    saved=("x", "weight", "bias", "b_dec", "threshold"),
    keep=lambda call, results: results[:4],
    once_differentiable="sae.encode",
    repeats=True,
)
def _sae_encode() -> Any:
    from gossamer.sae._triton.encode import encode

    return encode


@register(SaeEncodeBwdColumns, cpu=_cpu.bwd_columns, fake=_fake_sums, once_differentiable="sae.encode", repeats=True)
def sum_gradients_by_column() -> Any:
    from gossamer.sae._triton.encode_bwd import bwd_columns

    return bwd_columns


@register(
    SaeEncodeBwdSource,
    cpu=_cpu.bwd_source,
    fake=lambda call: call.source.new_empty(call.source.shape),
    once_differentiable="sae.encode",
    repeats=True,
)
def _bwd_source() -> Any:
    from gossamer.sae._triton.encode_bwd import bwd_source

    return bwd_source
