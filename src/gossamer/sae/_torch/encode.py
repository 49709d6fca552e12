"""Encoding for sparse autoencoders on the CPU."""

import torch
from torch import Tensor

from gossamer.rowsparse._torch.pack import buffers_of, nonzero_positions, overflowed_rows, row_offsets_of
from gossamer.rowsparse.formats import threshold_dtype
from gossamer.sae.encode_path import RANKED
from gossamer.sae.records import SaeEncode, SaeEncodeBwdColumns, SaeEncodeBwdSource

# The integers of a dtype's bit patterns, and the pattern that stands for NaN.
_PATTERNS = {
    torch.float16: (torch.int16, 0x7E00),
    torch.bfloat16: (torch.int16, 0x7FC0),
    torch.float32: (torch.int32, 0x7FC00000),
    torch.float64: (torch.int64, 0x7FF8000000000000),
}


def pre_activations(x: Tensor, weight: Tensor, bias: Tensor | None, b_dec: Tensor | None) -> Tensor:
    """(x - b_dec) @ weight + bias, in the dtype of weight; a bias of another dtype is added in float32."""
    x = (x if b_dec is None else x - b_dec).to(weight.dtype)
    if bias is not None and bias.dtype is weight.dtype:
        return torch.addmm(bias, x, weight)
    pre = x @ weight
    return pre if bias is None else pre.add_(bias)


def encode(call: SaeEncode) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(values, indices, spans, source or [0, N], l0).

    Without a capacity the entries of a threshold lie side by side; TopK has k slots a row, BatchTopK k * M in all.
    """
    x, weight, bias, b_dec, threshold, activation, k, bandwidth, capacity, scale, *_ = call
    pre = pre_activations(x, weight, bias, b_dec)
    m, n = pre.shape
    ranks = activation in RANKED
    keep_source = not ranks and capacity is not None and capacity < n
    l0 = torch.zeros(m, dtype=threshold_dtype(weight.dtype))
    source = pre if keep_source else pre.new_empty(0, n)
    if m == 0 or n == 0:
        values = pre.new_zeros(m * (k if ranks else capacity or 0))
        spans = torch.zeros(2, m, dtype=torch.int64)
        return values, torch.full_like(values, -1, dtype=torch.int32), spans, source, l0
    if ranks:
        groups = 1 if activation == "batchtopk" else m
        # Clamped in place, or multiplied out of place: either way a number with key 0 is not kept.
        ranked = pre if scale is None else (pre * scale).to(pre.dtype)
        positions = _largest(ranked.abs() if activation == "abstopk" else ranked, k, groups)
        values = pre.view(-1)[positions]
    else:
        # A threshold below 0 keeps the elements that 0 keeps, because values are at least 0.
        limit = l0.new_zeros(1) if threshold is None else threshold.clamp(min=0)
        kept = ~(pre <= limit - bandwidth / 2)
        positions = nonzero_positions(kept)
        values = pre.view(-1)[positions]
        if bandwidth:
            values = torch.where(values <= limit.expand(n)[positions % n], 0, values)
    row_offsets = row_offsets_of(positions, m, n)
    counts = row_offsets.diff()
    if bandwidth:
        # An element in the window has no value.
        rows = torch.repeat_interleave(torch.arange(m), counts)
        l0 += torch.bincount(rows[values != 0], minlength=m)
    else:
        l0 += counts
    if activation == "batchtopk":
        values, indices, spans = buffers_of(row_offsets, positions % n, values, None)
        padding = m * k - len(positions)
        pad = torch.nn.functional.pad
        return pad(values, (0, padding)), pad(indices, (0, padding), value=-1), spans, source, l0
    if keep_source:
        flagged = counts > capacity  # type: ignore[operator]
        if bool(flagged.any()):
            held = flagged.repeat_interleave(counts)
            source[flagged] = 0
            # -0.0 stands for an entry of value 0, +0.0 for none.
            source.view(-1)[positions[held]] = torch.where(values[held] == 0, -0.0, values[held])
    slots = k if ranks else capacity
    return *buffers_of(row_offsets, positions % n, values, slots), source, l0


def order_keys_(x: Tensor) -> Tensor:
    """Integers in the order of x, whose numbers are at least 0 or NaN, the largest; in the memory of x.

    Positive floats are ordered like their bit patterns, and NaN comes with either sign and any payload.
    """
    integer, nan = _PATTERNS[x.dtype]
    return x.view(integer).bitwise_and_(torch.iinfo(integer).max).clamp_(max=nan)


def _largest(pre: Tensor, k: int, groups: int) -> Tensor:
    """Flat positions, ascending, of the positive elements (or NaN) among the k a row largest of each group of rows.

    Clamps pre at 0 in place.
    """
    keys = order_keys_(pre.clamp_(min=0)).view(groups, -1)
    total = k * (pre.shape[0] // groups)
    # A number that ReLU zeroes has key 0.
    kth = keys.topk(total, sorted=False).values.amin(1).clamp(min=1)
    candidates = nonzero_positions(keys >= kth[:, None])
    group = torch.div(candidates, keys.shape[1], rounding_mode="floor")
    above = keys.view(-1)[candidates] > kth[group]
    need = total - torch.bincount(group[above], minlength=groups)
    ties, tied = candidates[~above], group[~above]
    count = torch.bincount(tied, minlength=groups)
    rank = torch.arange(tied.shape[0]) - (count.cumsum(0) - count)[tied]
    if bool((count <= need).all()):
        return candidates
    return torch.cat([candidates[above], ties[rank < need[tied]]]).sort().values


def bwd_columns(call: SaeEncodeBwdColumns) -> tuple[Tensor, Tensor]:
    """(grad_bias [N], grad_threshold [N], or [0] without a threshold)."""
    grad_values, grad_source, grad_l0, col_offsets, keys, columns, values, spans, source, threshold, bandwidth = call
    n = col_offsets.shape[0] - 1
    dtype = threshold_dtype(values.dtype)
    held = int(col_offsets[-1])
    rows, slots = keys[:held] >> 32, keys[:held] & 0xFFFFFFFF
    columns = columns[:held].long()
    value, grad = values[slots], grad_values[slots].to(dtype)
    over = overflowed_rows(spans, values.shape[0]) if source.shape[0] else rows.new_empty(0)
    if over.numel():
        dense = source[over]
        row, column = ((dense != 0) | dense.signbit()).nonzero(as_tuple=True)
        rows, columns = torch.cat([rows, over[row]]), torch.cat([columns, column])
        value = torch.cat([value, dense[row, column]])
        grad = torch.cat([grad, grad_source[over[row], column].to(dtype)])
    grad_bias = torch.zeros(n, dtype=dtype).index_add_(0, columns, torch.where(value != 0, grad, 0))
    if threshold is None:
        return grad_bias, grad_bias.new_empty(0)
    limit = threshold[columns]
    slope = torch.where(value - limit < bandwidth / 2, limit * grad + grad_l0[rows], 0) * (-1 / bandwidth)
    grad_threshold = torch.zeros(n, dtype=dtype).index_add_(0, columns, slope)
    return grad_bias, torch.where(threshold < 0, 0, grad_threshold)


def bwd_source(call: SaeEncodeBwdSource) -> Tensor:
    """[M, N], written at overflowed rows alone; with a threshold its
    straight-through estimate is in it."""
    grad, source, spans, room, grad_l0, threshold, bandwidth = call
    out = torch.empty_like(source)
    over = overflowed_rows(spans, room)
    value, grad = source[over], grad[over]
    flow = torch.where(value != 0, grad, 0)
    if threshold is not None and grad_l0 is not None:
        near = ((value != 0) | value.signbit()) & (value - threshold < bandwidth / 2) & (threshold >= 0)
        flow = flow + torch.where(near, (threshold * grad + grad_l0[over, None]) / bandwidth, 0)
    out[over] = flow.to(out.dtype)
    return out
