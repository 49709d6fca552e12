"""Pre-activations to sorted lists of entries: one pass that adds the bias, applies the activation and packs.

The ways through the rows are those of `rowsparse._triton.pack`: one program a row, or, with few rows, programs that
take chunks of a row and exchange their counts. What is new is the rule that keeps an entry, and what becomes of a row
that has more entries than slots: the program that finds it out overwrites the row of z by its activation, so that z
serves as the container's source without another buffer. There -0.0 stands for an entry of value 0, +0.0 for none.
"""

import threading

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer.rowsparse._triton import pack
from gossamer.rowsparse._triton.pack import DONE, clear_slots, count_bits, wait_and_sum
from gossamer.sae._triton import batchtopk, select, topk
from gossamer.sae._triton.select import (
    add_bias,
    chunk_columns,
    load_pre,
    lowest_column,
    rank_key,
    settle_ties,
    word_bits,
)


@triton.jit
def load_threshold(threshold_ptr, stride_t, columns, N):
    """Thresholds below 0 keep what 0 keeps, because values are at least 0."""
    if threshold_ptr is None:
        return 0.0
    else:
        threshold = tl.load(threshold_ptr + columns * stride_t, mask=columns < N, other=0.0)
        return tl.where(threshold < 0, 0.0, threshold)


@triton.jit
def _limits_kernel(threshold_ptr, out_ptr, stride_t, half, N, BLOCK: tl.constexpr):
    """Program (block of columns): the largest number of the output's 16-bit dtype up to threshold - half.

    A number of that dtype exceeds the one if and only if it exceeds the other, and half the bytes say so.
    """
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    limit = load_threshold(threshold_ptr, stride_t, columns, N) - half
    rounded = limit.to(out_ptr.dtype.element_ty)
    bits = rounded.to(tl.int16, bitcast=True).to(tl.int32)
    below = tl.where(bits > 0, bits - 1, tl.where(bits == 0, -0x7FFF, bits + 1))
    bits = tl.where(rounded.to(tl.float32) > limit, below, bits)
    tl.store(out_ptr + columns, bits.to(tl.int16).to(out_ptr.dtype.element_ty, bitcast=True), mask=columns < N)


@triton.jit
def append_active(
    bits, counts, z_ptr, bias_ptr, threshold_ptr, stride_t, values_ptr, indices_ptr, base, limit, start, N,
    BLOCK: tl.constexpr, VEC: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """As `pack.append_entries`, writing activations. With WINDOW returns how many exceed the threshold, by thread."""
    active = tl.zeros_like(bits)
    slot = base + tl.cumsum(counts, axis=0) - counts
    while tl.max(bits, axis=0) > 0:
        low = bits & -bits
        column = lowest_column(low, start, BLOCK, VEC)
        held = low > 0
        value = add_bias(tl.load(z_ptr + column, mask=held, other=0.0), bias_ptr, column, N)
        if WINDOW:
            below = value <= load_threshold(threshold_ptr, stride_t, column, N)
            active += (held & ~below).to(tl.int32)
            value = tl.where(below, 0.0, value)
        tl.store(values_ptr + slot, value, mask=held & (slot < limit))
        tl.store(indices_ptr + slot, column, mask=held & (slot < limit))
        slot += held.to(tl.int32)
        bits = bits & (bits - 1)
    return active


@triton.jit
def activate_row(
    z_ptr, bias_ptr, scale_ptr, threshold_ptr, stride_t, half, kth, need, N,
    BLOCK: tl.constexpr, VEC: tl.constexpr, SHIFT: tl.constexpr, RANKED: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Overwrites a row of z by its activation."""
    seen = 0
    for start in range(0, N, BLOCK):
        columns = chunk_columns(start, BLOCK, VEC)
        z = load_pre(z_ptr, columns, N)
        pre = add_bias(z, bias_ptr, columns, N)
        if RANKED:
            key = rank_key(z, bias_ptr, scale_ptr, columns, N, SHIFT)
            ties, seen = settle_ties(word_bits(key == kth, VEC), need, seen, VEC)
            tied = (ties[:, None] >> tl.arange(0, VEC)[None, :]) & 1
            out = tl.where((key > kth) | (tied != 0), pre, 0.0)
        else:
            threshold = load_threshold(threshold_ptr, stride_t, columns, N)
            out = tl.where(pre <= threshold, 0.0, pre)
            if WINDOW:
                # A literal -0.0 would become +0.0 on its way through the compiler.
                minus_zero = tl.full([], -0x80000000, tl.int32).to(tl.float32, bitcast=True)
                out = tl.where((pre <= threshold) & (pre > threshold - half), minus_zero, out)
        tl.store(z_ptr + columns, out, mask=columns < N)


@triton.jit
def _encode_row_kernel(
    z_ptr, bias_ptr, scale_ptr, threshold_ptr, limits_ptr, kth_ptr, need_ptr, reach_ptr, offsets_ptr, values_ptr,
    indices_ptr, nnz_ptr, l0_ptr, length, stride_t, half, N, capacity,
    BLOCK: tl.constexpr, VEC: tl.constexpr, SHIFT: tl.constexpr, RANKED: tl.constexpr, WINDOW: tl.constexpr,
    MAY_OVERFLOW: tl.constexpr,
):  # fmt: skip
    """Program (row). RANKED keeps by `kth` and `need` (see `select`); otherwise what exceeds the threshold, or with
    WINDOW what lies less than `half` below it as well. `limits_ptr` may stand in for both (see `_limits_kernel`): with
    many rows, thresholds in float32 would be most of what the rows read. With `reach_ptr` only rows are done where that
    exceeds `length`, and with `offsets_ptr` their entries are those of CSR, which has a place for each."""
    row = tl.program_id(0).to(tl.int64)
    if reach_ptr is not None:
        if tl.load(reach_ptr + row) <= length:
            return
    z_ptr += row * N
    begin = row * capacity
    if offsets_ptr is not None:
        begin = tl.load(offsets_ptr + row)
        capacity = (tl.load(offsets_ptr + row + 1) - begin).to(tl.int32)
    values_ptr += begin
    indices_ptr += begin
    kth = 0
    need = 0
    if RANKED:
        kth = tl.load(kth_ptr + row)
        need = tl.load(need_ptr + row)
    base = 0
    active = 0
    seen = 0
    z = load_pre(z_ptr, chunk_columns(0, BLOCK, VEC), N)
    for start in range(0, N, BLOCK):
        columns = chunk_columns(start, BLOCK, VEC)
        following = load_pre(z_ptr, columns + BLOCK, N)
        pre = add_bias(z, bias_ptr, columns, N)
        if RANKED:
            key = rank_key(z, bias_ptr, scale_ptr, columns, N, SHIFT)
            bits = word_bits(key >= kth, VEC)
        else:
            if limits_ptr is not None:
                limit = tl.load(limits_ptr + columns, mask=columns < N, other=float("inf")).to(tl.float32)
            else:
                limit = load_threshold(threshold_ptr, stride_t, columns, N)
                if WINDOW:
                    limit = limit - half
            bits = word_bits(~(pre <= limit) & (columns < N), VEC)
        counts = count_bits(bits)
        count = tl.sum(counts, axis=0)
        if count > 0:
            if RANKED:
                ties, seen = settle_ties(word_bits(key == kth, VEC), need, seen, VEC)
                bits = word_bits(key > kth, VEC) | ties
                counts = count_bits(bits)
                count = tl.sum(counts, axis=0)
            if base < capacity:
                found = append_active(
                    bits, counts, z_ptr, bias_ptr, threshold_ptr, stride_t, values_ptr, indices_ptr, base, capacity,
                    start, N, BLOCK, VEC, WINDOW,
                )  # fmt: skip
                if WINDOW:
                    active += tl.sum(found, axis=0)
            elif WINDOW:
                above = ~(pre <= load_threshold(threshold_ptr, stride_t, columns, N))
                active += tl.sum((above & (columns < N)).to(tl.int32))
        base += count
        z = following
    tl.store(l0_ptr + row, active if WINDOW else base)
    if offsets_ptr is None:
        tl.store(nnz_ptr + row, base)
        clear_slots(values_ptr, indices_ptr, base, capacity, 256, 256)
    if MAY_OVERFLOW:
        if base > capacity:
            # A warp may still read what another is about to overwrite.
            tl.debug_barrier()
            activate_row(
                z_ptr, bias_ptr, scale_ptr, threshold_ptr, stride_t, half, kth, need, N,
                BLOCK, VEC, SHIFT, RANKED, WINDOW,
            )  # fmt: skip


@triton.jit(do_not_specialize=["epoch"])
def _encode_split_kernel(
    z_ptr, bias_ptr, threshold_ptr, values_ptr, indices_ptr, nnz_ptr, l0_ptr, flags_ptr, epoch, stride_t, half, N,
    capacity, chunks,
    BLOCK: tl.constexpr, VEC: tl.constexpr, FLAGS: tl.constexpr, WINDOW: tl.constexpr, MAY_OVERFLOW: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk), chunks fastest: the exchange of counts is that of `pack.scan_chunk`.

    With WINDOW l0 starts as 0.
    """
    row = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    z_ptr += row * N
    values_ptr += row * capacity
    indices_ptr += row * capacity
    flags_ptr += row * chunks
    start = chunk * BLOCK
    columns = chunk_columns(start, BLOCK, VEC)
    pre = add_bias(load_pre(z_ptr, columns, N), bias_ptr, columns, N)
    threshold = load_threshold(threshold_ptr, stride_t, columns, N)
    if WINDOW:
        bits = word_bits(~(pre <= threshold - half) & (columns < N), VEC)
    else:
        bits = word_bits(~(pre <= threshold), VEC)
    counts = count_bits(bits)
    count = tl.sum(counts, axis=0)
    word = (epoch.to(tl.int64) << 32) | count
    tl.atomic_xchg(flags_ptr + chunk, word, sem="relaxed")
    if count > 0:
        base = wait_and_sum(flags_ptr, chunk, epoch.to(tl.int64) << 1, FLAGS)
        if base < capacity:
            append_active(
                bits, counts, z_ptr, bias_ptr, threshold_ptr, stride_t, values_ptr, indices_ptr, base, capacity,
                start, N, BLOCK, VEC, WINDOW,
            )  # fmt: skip
        if WINDOW:
            # Whole numbers: the sum does not depend on the order of arrival.
            tl.atomic_add(l0_ptr + row, tl.sum((~(pre <= threshold)).to(tl.float32)), sem="relaxed")
    # Every thread must have written its entries, and read z, before the one thread that signals says so.
    tl.debug_barrier()
    tl.atomic_xchg(flags_ptr + chunk, word | DONE, sem="release")
    if chunk == chunks - 1:
        total = wait_and_sum(flags_ptr, chunks, (epoch.to(tl.int64) << 1) + 1, FLAGS)
        tl.store(nnz_ptr + row, total)
        if not WINDOW:
            tl.store(l0_ptr + row, total)
        clear_slots(values_ptr, indices_ptr, total, capacity, 256, 256)
        if MAY_OVERFLOW:
            if total > capacity:
                # The others have read their part of z, for their flags say so: it may be overwritten.
                tl.debug_barrier()
                activate_row(
                    z_ptr, bias_ptr, None, threshold_ptr, stride_t, half, 0, 0, N, BLOCK, VEC, 0, False, WINDOW
                )


@triton.jit
def _encode_bwd_columns_kernel(
    keys_ptr, offsets_ptr, values_ptr, starts_ptr, grad_ptr, grad_l0_ptr, threshold_ptr, bias_out_ptr,
    threshold_out_ptr, stride_gm, stride_gs, stride_l, stride_t, half, capacity, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (column): sums over its entries, in order of row. `starts_ptr`: where rows of CSR begin."""
    column = tl.program_id(0)
    begin = tl.load(offsets_ptr + column)
    end = tl.load(offsets_ptr + column + 1)
    bias = tl.zeros([BLOCK], tl.float32)
    near = tl.zeros([BLOCK], tl.float32)
    threshold = 0.0
    if threshold_ptr is not None:
        threshold = tl.load(threshold_ptr + column * stride_t)
    for at in range(begin, end, BLOCK):
        entry = at + tl.arange(0, BLOCK)
        held = entry < end
        key = tl.load(keys_ptr + entry, mask=held, other=0)
        row = key >> 32
        slot = key & 0xFFFFFFFF
        if starts_ptr is not None:
            slot += tl.load(starts_ptr + row, mask=held, other=0)
        value = tl.load(values_ptr + row * capacity + slot, mask=held, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + row * stride_gm + slot * stride_gs, mask=held, other=0.0).to(tl.float32)
        bias += tl.where(value != 0, grad, 0.0)
        if threshold_ptr is not None:
            slope = threshold * grad + tl.load(grad_l0_ptr + row * stride_l, mask=held, other=0.0)
            near += tl.where(held & (value - threshold < half), slope, 0.0)
    tl.store(bias_out_ptr + column, tl.sum(bias, axis=0))
    if threshold_ptr is not None:
        tl.store(threshold_out_ptr + column, tl.where(threshold < 0, 0.0, -0.5 / half * tl.sum(near, axis=0)))


@triton.jit
def _encode_bwd_columns_overflow_kernel(
    source_ptr, nnz_ptr, any_ptr, grad_ptr, grad_l0_ptr, threshold_ptr, bias_out_ptr, threshold_out_ptr,
    stride_gm, stride_gn, stride_l, stride_t, half, M, N, capacity, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (block of columns): adds what the overflowed rows contribute."""
    if tl.load(any_ptr) != 0:
        columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = columns < N
        bias = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        near = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        threshold = tl.zeros([BLOCK_N], tl.float32)
        if threshold_ptr is not None:
            threshold = tl.load(threshold_ptr + columns * stride_t, mask=inside, other=0.0).to(tl.float32)
        for first in range(0, M, BLOCK_M):
            rows = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
            flagged = tl.load(nnz_ptr + rows, mask=rows < M, other=0) > capacity
            if tl.max(flagged.to(tl.int32), axis=0) > 0:
                mask = flagged[:, None] & inside[None, :]
                value = tl.load(source_ptr + rows[:, None] * N + columns[None, :], mask=mask, other=0.0).to(tl.float32)
                grad = tl.load(
                    grad_ptr + rows[:, None] * stride_gm + columns.to(tl.int64)[None, :] * stride_gn,
                    mask=mask,
                    other=0.0,
                ).to(tl.float32)
                bias += tl.where(value != 0, grad, 0.0)
                if threshold_ptr is not None:
                    stored = (value != 0) | (value.to(tl.int32, bitcast=True) < 0)
                    grad_l0 = tl.load(grad_l0_ptr + rows * stride_l, mask=flagged, other=0.0)
                    slope = threshold[None, :] * grad + grad_l0[:, None]
                    near += tl.where(mask & stored & (value - threshold[None, :] < half), slope, 0.0)
        bias_ptrs = bias_out_ptr + columns
        tl.store(bias_ptrs, tl.load(bias_ptrs, mask=inside, other=0.0) + tl.sum(bias, axis=0), mask=inside)
        if threshold_ptr is not None:
            threshold_ptrs = threshold_out_ptr + columns
            slope = tl.where(threshold < 0, 0.0, -0.5 / half * tl.sum(near, axis=0))
            tl.store(threshold_ptrs, tl.load(threshold_ptrs, mask=inside, other=0.0) + slope, mask=inside)


@triton.jit
def _encode_bwd_source_kernel(
    grad_ptr, source_ptr, nnz_ptr, grad_l0_ptr, threshold_ptr, out_ptr, stride_gm, stride_gn, stride_l, stride_t, half,
    N, capacity, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): the gradient of an overflowed row of pre-activations, with the straight-through estimate
    of a threshold that is given."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(nnz_ptr + row) > capacity:
        columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(source_ptr + row * N + columns, mask=columns < N, other=0.0)
        grad = tl.load(grad_ptr + row * stride_gm + columns * stride_gn, mask=columns < N, other=0.0)
        flow = tl.where(value != 0, grad, 0.0).to(tl.float32)
        if threshold_ptr is not None:
            value = value.to(tl.float32)
            threshold = tl.load(threshold_ptr + columns * stride_t, mask=columns < N, other=-1.0)
            stored = (value != 0) | (value.to(tl.int32, bitcast=True) < 0)
            slope = threshold * grad.to(tl.float32) + tl.load(grad_l0_ptr + row * stride_l)
            flow += tl.where(stored & (value - threshold < half) & (threshold >= 0), 0.5 / half * slope, 0.0)
        tl.store(out_ptr + row * N + columns, flow, mask=columns < N)


_limits = launch.Kernel(_limits_kernel)
_encode_row = launch.Kernel(_encode_row_kernel)
_encode_split = launch.Kernel(_encode_split_kernel)
_encode_bwd_columns = launch.Kernel(_encode_bwd_columns_kernel)
_encode_bwd_columns_overflow = launch.Kernel(_encode_bwd_columns_overflow_kernel)
_encode_bwd_source = launch.Kernel(_encode_bwd_source_kernel)


def encode(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    b_dec: Tensor | None,
    threshold: Tensor | None,
    activation: str,
    k: int,
    bandwidth: float,
    capacity: int | None,
    keep_source: bool,
    scale: Tensor | None = None,
    ste_to_input: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Operator `sae_encode` -> (values, indices, nnz, source or [0, N], l0).

    With few rows host time is most of it, so as in `decode` what follows from shapes is done once and kept as a plan.
    """
    x = (x if b_dec is None else x - b_dec).to(weight.dtype)
    if activation == "topk" and not keep_source and tuning.topk_packs(len(x), k, weight):
        bias, scale = (None if vector is None else vector.contiguous() for vector in (bias, scale))
        values, indices, nnz, l0 = topk.row_topk(x, weight, bias, scale, k)
        return values, indices, nnz, x.new_empty(0, weight.shape[1]), l0
    if bias is not None and bias.dtype is weight.dtype:
        # The product's own epilogue adds in float32 as well, and rounds once.
        z, bias = torch.addmm(bias, x, weight), None
    else:
        z = x @ weight
        bias = None if bias is None else bias.contiguous()
    return activate(z, bias, threshold, activation, k, bandwidth, capacity, keep_source, scale)


def activate(
    z: Tensor,
    bias: Tensor | None,
    threshold: Tensor | None,
    activation: str,
    k: int,
    bandwidth: float,
    capacity: int | None,
    keep_source: bool,
    scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What `encode` returns, from the pre-activations z [M, N] + bias [N]. Without a capacity it is CSR of BatchTopK's
    k * M entries, with offsets in place of nnz."""
    scale = None if scale is None else scale.contiguous()
    m, n = z.shape
    if activation == "topk" and not keep_source and z.numel():
        values, indices, nnz, l0 = select.row_topk(z, bias, k, scale)
        return values, indices, nnz, z.new_empty(0, n), l0
    csr = capacity is None
    slots = (m * k,) if capacity is None else (m, capacity)
    values, indices = z.new_empty(slots), torch.empty(slots, dtype=torch.int32, device=z.device)
    nnz = None if csr else torch.empty(m, dtype=torch.int32, device=z.device)
    offsets = torch.empty(m + 1, dtype=torch.int64, device=z.device) if csr else None
    counts = offsets if nnz is None else nnz
    source = z if keep_source else z.new_empty(0, n)
    ranked, window = activation in ("topk", "batchtopk"), bandwidth > 0
    split = not ranked and not tuning.one_program_a_row(m, n)
    l0 = (torch.zeros if split and window else torch.empty)(m, dtype=torch.float32, device=z.device)
    if m == 0 or n == 0:
        return values.zero_(), indices.fill_(-1), counts.zero_(), source, l0.zero_()
    if split:
        _encode_in_chunks(z, bias, threshold, (values, indices, nnz, l0), bandwidth, keep_source)
        return values, indices, counts, source, l0
    kth = need = reach = None
    length = 0
    tile, warps = tuning.encode_tile(m, z.element_size())
    if ranked:
        if activation == "topk":
            kth, need = select.row_kth(z, bias, k, scale)
        else:
            found = batchtopk.find(z, bias, k, scale, offsets)
            batchtopk.emit(z, bias, scale, found, (values, indices, nnz, l0), keep_source, offsets)
            kth, need, reach, length = found.kth, found.need, found.reach, found.length
        if m < 512:
            # Few rows, each in the hands of one program: more warps keep more of it in flight.
            tile, warps = {**tile, "BLOCK": 8 * tile["BLOCK"]}, 8
    stride_t = 0 if threshold is None else threshold.stride(0)
    limits = None
    if stride_t and z.element_size() == 2:
        limits = z.new_empty(n)
        args = (threshold, limits, stride_t, bandwidth / 2, n)
        _limits((n, z.dtype, stride_t, bandwidth), (launch.cdiv(n, 1024), 1, 1), args, {"BLOCK": 1024})
    meta = {**pack.fit_block(tile, n), "SHIFT": select.SHIFT[z.dtype], "RANKED": ranked}
    meta |= {"WINDOW": window, "MAY_OVERFLOW": keep_source}
    args = (z, bias, scale, threshold, limits, kth, need, reach, offsets, values, indices, nnz, l0)
    room = -1 if capacity is None else capacity
    args += (length, stride_t, bandwidth / 2, n, room)
    key = (m, n, room, z.dtype, bias is None or bias.dtype, threshold is None, stride_t, bandwidth, keep_source)
    _encode_row((*key, ranked, length, scale is None or scale.dtype), (m, 1, 1), args, meta, num_warps=warps)
    return values, indices, counts, source, l0


class _Plan:
    """The launch of one shape, bound to all but its pointers, and the flags that it has to itself on one stream."""

    __slots__ = ("epochs", "flags", "launch", "lock")

    def __init__(self, bound: launch.Bound, words: int, device: torch.device) -> None:
        self.flags = torch.zeros(words, dtype=torch.int64, device=device)
        self.epochs = launch.Epochs()
        self.launch, self.lock = bound, threading.Lock()


_plans: dict[tuple[object, ...], _Plan] = {}


def _encode_in_chunks(
    z: Tensor,
    bias: Tensor | None,
    threshold: Tensor | None,
    out: tuple[Tensor, Tensor, Tensor, Tensor],
    bandwidth: float,
    may_overflow: bool,
) -> None:
    """Fills values, indices, nnz and l0, the last of which is 0 where there is a bandwidth."""
    (m, n), capacity = z.shape, out[0].shape[1]
    stride_t = 0 if threshold is None else threshold.stride(0)
    key = (m, n, capacity, z.dtype, None if bias is None else bias.dtype, threshold is None, stride_t)
    key += (bandwidth, may_overflow)
    if not launch.INTERPRET:
        index = z.get_device()
        stream = torch._C._cuda_getCurrentRawStream(index)
        plan = _plans.get((*key, index, stream))
        pointers = [None if t is None else t.data_ptr() for t in (z, bias, threshold, *out)]
        # What is made here is aligned.
        if plan is not None and launch.ready(index, pointers[0] | (pointers[1] or 0) | (pointers[2] or 0)):
            # Two threads on one stream launch in the order of their epochs.
            with plan.lock:
                plan.launch(stream, *pointers, plan.flags.data_ptr(), plan.epochs.next())
            return
    tile, warps = tuning.encode_tile(m, z.element_size())
    chunks, meta = pack.split(tile, n)
    meta |= {"WINDOW": bandwidth > 0, "MAY_OVERFLOW": may_overflow}
    flags, epoch = launch.flags.get(m * chunks, z.device)
    args = (z, bias, threshold, *out, flags, epoch, stride_t, bandwidth / 2, n, capacity, chunks)
    bound = _encode_split(key, (m * chunks, 1, 1), args, meta, num_warps=warps, head=9)
    if bound is not None and launch.may_keep(z.device):
        launch.keep(_plans, (*key, index, stream), _Plan(bound, m * chunks, z.device))


def bwd_columns(
    grad_values: Tensor,
    grad_source: Tensor,
    grad_l0: Tensor,
    col_offsets: Tensor,
    keys: Tensor,
    columns: Tensor,
    values: Tensor,
    nnz: Tensor,
    source: Tensor,
    threshold: Tensor | None,
    bandwidth: float,
) -> tuple[Tensor, Tensor]:
    """Operator `sae_encode_bwd_columns` -> float32 (grad_bias [N], grad_threshold [N], or [0] without a threshold)."""
    n, is_csr = col_offsets.shape[0] - 1, values.dim() == 1
    capacity, starts = (0, nnz) if is_csr else (values.shape[1], None)
    bias_out = torch.zeros(n, dtype=torch.float32, device=values.device)
    threshold_out = torch.zeros(0 if threshold is None else n, dtype=torch.float32, device=values.device)
    if n == 0 or nnz.shape[0] == 0:
        return bias_out, threshold_out
    stride_t = 0 if threshold is None else threshold.stride(0)
    tail = (grad_l0.stride(0), stride_t, bandwidth / 2)
    dtypes = (grad_values.dtype, values.dtype, threshold is None)
    strides = (0, *grad_values.stride()) if is_csr else grad_values.stride()
    key = (n, capacity, strides, tail, dtypes, is_csr)
    args = (keys, col_offsets, values, starts, grad_values, grad_l0, threshold, bias_out, threshold_out)
    args += (*strides, *tail, capacity)
    _encode_bwd_columns(key, (n, 1, 1), args, {"BLOCK": 128}, num_warps=1)
    if source.shape[0]:
        m = source.shape[0]
        any_flagged = (nnz > capacity).any()
        key = (m, n, capacity, grad_source.stride(), tail, dtypes, grad_source.dtype)
        args = (source, nnz, any_flagged, grad_source, grad_l0, threshold, bias_out, threshold_out)
        args += (*grad_source.stride(), *tail, m, n, capacity)
        meta = {"BLOCK_M": 16, "BLOCK_N": 128}
        _encode_bwd_columns_overflow(key, (launch.cdiv(n, 128), 1, 1), args, meta, num_warps=4)
    return bias_out, threshold_out


def bwd_source(
    grad: Tensor,
    source: Tensor,
    nnz: Tensor,
    capacity: int,
    grad_l0: Tensor | None,
    threshold: Tensor | None,
    bandwidth: float,
) -> Tensor:
    """Operator `sae_encode_bwd_source` -> [M, N], written at overflowed rows alone."""
    m, n = source.shape
    out = torch.empty_like(source)
    if m and n:
        strides = (
            *grad.stride(),
            *(0 if t is None or threshold is None else t.stride(0) for t in (grad_l0, threshold)),
        )
        key = (m, n, capacity, grad.dtype, source.dtype, strides, threshold is None, bandwidth)
        args = (grad, source, nnz, None if threshold is None else grad_l0, threshold, out, *strides, bandwidth / 2)
        _encode_bwd_source(key, (m, launch.cdiv(n, 4096), 1), (*args, n, capacity), {"BLOCK": 4096}, num_warps=4)
    return out


_ENCODE = {
    "z_ptr": "*bf16", "bias_ptr": "*fp32", "scale_ptr": None, "threshold_ptr": "*fp32", "limits_ptr": None,
    "kth_ptr": None, "need_ptr": None, "values_ptr": "*bf16", "indices_ptr": "*i32", "nnz_ptr": "*i32",
    "l0_ptr": "*fp32", "stride_t": "i32", "half": "fp32", "N": "i32", "capacity": "i32",
}  # fmt: skip
_COLUMNS = {
    "grad_ptr": "*bf16", "grad_l0_ptr": "*fp32", "threshold_ptr": "*fp32", "bias_out_ptr": "*fp32",
    "threshold_out_ptr": "*fp32", "stride_gm": "i32", "stride_l": "i32", "stride_t": "i32", "half": "fp32",
    "capacity": "i32",
}  # fmt: skip

EXAMPLES = {
    _limits_kernel: {
        "signature": {"threshold_ptr": "*fp32", "out_ptr": "*bf16", "stride_t": "i32", "half": "fp32", "N": "i32"},
        "constexprs": {"BLOCK": 1024},
        "num_warps": 4,
    },
    _encode_row_kernel: {
        "signature": {**_ENCODE, "reach_ptr": "*i32", "offsets_ptr": None, "length": "i32"},
        "constexprs": {
            "BLOCK": 1024, "VEC": 8, "SHIFT": 16, "RANKED": False, "WINDOW": True, "MAY_OVERFLOW": True,
        },
        "num_warps": 1,
    },
    _encode_split_kernel: {
        "signature": {
            **{name: kind for name, kind in _ENCODE.items() if kind is not None},
            "z_ptr": "*fp32", "values_ptr": "*fp32", "flags_ptr": "*i64", "epoch": "i32", "chunks": "i32",
        },
        "constexprs": {"BLOCK": 512, "VEC": 4, "FLAGS": 128, "WINDOW": False, "MAY_OVERFLOW": True},
        "num_warps": 1,
    },
    _encode_bwd_columns_kernel: {
        "signature": {
            **_COLUMNS, "keys_ptr": "*i64", "offsets_ptr": "*i64", "values_ptr": "*bf16", "starts_ptr": None,
            "stride_gs": "i32",
        },
        "constexprs": {"BLOCK": 128},
        "num_warps": 1,
    },
    _encode_bwd_columns_overflow_kernel: {
        "signature": {
            **_COLUMNS, "source_ptr": "*bf16", "nnz_ptr": "*i32", "any_ptr": "*i1", "stride_gn": "i32", "M": "i32",
            "N": "i32",
        },
        "constexprs": {"BLOCK_M": 16, "BLOCK_N": 128},
        "num_warps": 4,
    },
    _encode_bwd_source_kernel: {
        "signature": {
            "grad_ptr": "*bf16", "source_ptr": "*bf16", "nnz_ptr": "*i32", "grad_l0_ptr": "*fp32",
            "threshold_ptr": "*fp32", "out_ptr": "*bf16", "stride_gm": "i32", "stride_gn": "i32", "stride_l": "i32",
            "stride_t": "i32", "half": "fp32", "N": "i32", "capacity": "i32",
        },
        "constexprs": {"BLOCK": 4096},
        "num_warps": 4,
    },
}  # fmt: skip
"""Example signatures for the ahead-of-time compile test."""
