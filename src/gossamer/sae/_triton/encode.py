"""The encoder on the GPU: a product, and the listing of its pre-activations.

`encode_path.choose_path` names the path. "bound" never writes the pre-activations (`topk`), "groups" writes those of a
block of rows at a time (`sae.group_max`); the others start from them: "topk" lists candidates and takes the largest
(`select`), "batch" does so for all rows together (`batchtopk`), and "list" lists the elements that exceed a threshold.
There a row that has more entries than slots is overwritten by its activation afterwards, so that the pre-activations
serve as the container's source: -0.0 stands for an entry of value 0, +0.0 for none.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch
from gossamer.rowsparse._triton.list_entries import Limit, add_bias, list_all, list_slots, load_threshold
from gossamer.rowsparse._triton.pack import chunk_columns, row_span, scan_tile
from gossamer.rowsparse.formats import empty_slots
from gossamer.sae._triton import batchtopk, select, topk
from gossamer.sae._triton.select import load_pre
from gossamer.sae.encode_path import choose_path, named, row_stride
from gossamer.sae.group_max import group_max
from gossamer.sae.records import SaeEncode

GROUPS = 128
"""Words of a chunk: half as many as of `pack`, for thresholds take registers."""


@triton.jit
def activated(z, bias_ptr, threshold_ptr, stride_t, radius, columns, N, WINDOW: tl.constexpr):
    """Elements that exceed the threshold, and a mark for those in the window."""
    pre = add_bias(z, bias_ptr, columns, columns < N)
    threshold = load_threshold(threshold_ptr, stride_t, columns, columns < N)
    out = tl.where(pre <= threshold, 0.0, pre)
    if WINDOW:
        # A literal -0.0 would become +0.0 on its way through the compiler.
        minus_zero = tl.full([], -0x80000000, tl.int32).to(tl.float32, bitcast=True)
        out = tl.where((pre <= threshold) & (pre > threshold - radius), minus_zero, out)
    return out


@launch.kernel
def _activate_rows_kernel(
    z_ptr, bias_ptr, threshold_ptr, spans_ptr, stride_t, radius, M, N, room, shares, span,
    BLOCK: tl.constexpr, VEC: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Program (row, share of `span` columns): overwrites rows of z that overflowed by their activation."""
    row = (tl.program_id(0) // shares).to(tl.int64)
    if row_span(spans_ptr, row, M, room)[2]:
        begin = tl.program_id(0) % shares * span
        end = tl.minimum(begin + span, N)
        z_ptr += row * N
        z = load_pre(z_ptr, chunk_columns(begin, BLOCK, VEC), end)
        for start in range(begin, end, BLOCK):
            columns = chunk_columns(start, BLOCK, VEC)
            # Ahead of the store, behind which the compiler would leave it.
            following = load_pre(z_ptr, columns + BLOCK, end)
            out = activated(z, bias_ptr, threshold_ptr, stride_t, radius, columns, end, WINDOW)
            tl.store(z_ptr + columns, out, mask=columns < end)
            z = following


def encode(call: SaeEncode) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(values, indices, spans, source or [0, N], l0)."""
    x, weight, bias, b_dec, threshold, activation, k, bandwidth, capacity, scale, *_ = call
    x = (x if b_dec is None else x - b_dec).to(weight.dtype)
    m, n = x.shape[0], weight.shape[1]
    path = choose_path(activation, m, k, weight)
    none = x.new_empty(0, n)
    with named(path):
        if path == "bound":
            values, indices, spans, l0 = topk.row_topk(x, weight, bias, scale, k)
            return values, indices, spans, none, l0
        if path == "groups":
            return group_max(call)
        absolute = activation == "abstopk"
        z, bias = _pre_activations(x, weight, bias, 0.0 if absolute else float("-inf"))
        if z.shape[1] > n:
            # Columns that no rule keeps: the kernels do not tell them from others. The scale is not 0, which times -inf
            # is NaN, the largest of all; a NaN among thresholds that stands for all columns would keep these, too.
            bias, scale, threshold = (
                None if vector is None else _padded(vector, z.shape[1], value)
                for vector, value in ((bias, 0.0), (scale, 1.0), (threshold, 0.0))
            )
        if path == "list":
            values, indices, spans, l0 = _by_threshold(z, Limit(bias, threshold, bandwidth / 2), capacity, n)
        elif not z.numel():
            values, indices, spans = empty_slots(z, m, m * k)
            values, indices, spans = values.zero_(), indices.fill_(-1), spans.zero_()
            l0 = z.new_zeros(m, dtype=torch.float32)
        elif path == "topk":
            values, indices, spans, l0 = select.row_topk(z, bias, k, scale, absolute)
        else:
            values, indices, spans, l0 = batchtopk.batch_topk(z, bias, k, scale)
        keeps = path == "list" and capacity is not None and capacity < n
        return values, indices, spans, z[:, :n] if keeps else none, l0


def _pre_activations(x: Tensor, weight: Tensor, bias: Tensor | None, more: float) -> tuple[Tensor, Tensor | None]:
    """(x @ weight and columns of `more` up to `row_stride`, the bias that is still to be added)."""
    n = weight.shape[1]
    z = x.new_empty(x.shape[0], row_stride(x.shape[0], n, weight))
    # cuBLAS leaves the further columns alone.
    product = z[:, :n]
    if z.shape[1] != n:
        z[:, n:].fill_(more)
    # The product's own epilogue adds in float32 as well, and rounds once.
    if bias is not None and bias.dtype is weight.dtype:
        torch.addmm(bias, x, weight, out=product)
        return z, None
    torch.mm(x, weight, out=product)
    return z, bias


def _padded(vector: Tensor, size: int, value: float) -> Tensor:
    """The vector, and numbers behind it, by steps that a launcher may be repeated with."""
    out = vector.new_empty(size)
    out[: len(vector)].copy_(vector)
    out[len(vector) :].fill_(value)
    return out


def _by_threshold(z: Tensor, limit: Limit, capacity: int | None, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(values, indices, spans, l0) of the pre-activations z `[M, n or more]`; rows that overflow are activated."""
    m = z.shape[0]
    l0 = (torch.zeros if limit.radius or not z.numel() else torch.empty)(m, dtype=torch.float32, device=z.device)
    if capacity is None:
        return *list_all(z, limit, l0), l0
    values, indices, spans = list_slots(z, capacity, limit, l0)
    if capacity < n and z.numel():
        _activate_overflowed(z, limit, spans, m * capacity)
    return values, indices, spans, l0


def _activate_overflowed(z: Tensor, limit: Limit, spans: Tensor, room: int) -> None:
    (m, n), threshold = z.shape, limit.threshold
    sizes = scan_tile(n, z.element_size(), GROUPS)
    # Few rows are shared by programs; where no row overflowed they only look.
    blocks = launch.cdiv(n, sizes["BLOCK"])
    span = launch.cdiv(blocks, max(1, min(blocks, 1024 // m))) * sizes["BLOCK"]
    shares = launch.cdiv(n, span)
    meta = {**sizes, "WINDOW": limit.radius > 0}
    stride_t = 0 if threshold is None else threshold.stride(0)
    args = (z, limit.bias, threshold, spans, stride_t, limit.radius, m, n, room, shares, span)
    _activate_rows_kernel((m * shares, 1, 1), args, meta, num_warps=1)


EXAMPLES = {_activate_rows_kernel: {"BLOCK": 1024, "VEC": 8, "WINDOW": True, "num_warps": 1}}
