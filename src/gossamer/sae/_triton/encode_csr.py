"""Rows of pre-activations to CSR of what exceeds a threshold: counts, where lists begin, entries.

A program takes a share of a row, so that few rows fill the GPU as well. Its count is all that others have to know: one
program adds the counts up, the host waits for their sum, and every share is read again, but those that have nothing.
Nobody waits for another program, no slot is written that has no entry, and no row can overflow.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer.rowsparse._triton.pack import (
    chunk_columns,
    count_bits,
    even_length,
    is_even,
    scan_tile,
    word_bits,
)
from gossamer.sae._triton._entries import GROUPS, append_active, load_limit
from gossamer.sae._triton.encode_rows import limits_of
from gossamer.sae._triton.select import add_bias, load_pre

SHARES = 64
"""Programs for each multiprocessor: twice as many as run at once, of a warp each."""


@triton.jit
def kept_bits(
    z_ptr, bias_ptr, threshold_ptr, limits_ptr, stride_t, radius, start, N,
    BLOCK: tl.constexpr, VEC: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """A chunk's words: what exceeds the threshold, or with WINDOW what lies less than `radius` below it as well."""
    columns = chunk_columns(start, BLOCK, VEC)
    pre = add_bias(load_pre(z_ptr, columns, N), bias_ptr, columns, N)
    limit = load_limit(limits_ptr, threshold_ptr, stride_t, radius, columns, N, WINDOW)
    return word_bits(~(pre <= limit) & (columns < N), VEC)


@launch.kernel
def _encode_csr_count_kernel(
    z_ptr, bias_ptr, threshold_ptr, limits_ptr, starts_ptr, stride_t, radius, N, parts, span,
    BLOCK: tl.constexpr, VEC: tl.constexpr, WINDOW: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Program (row, share of `span` columns), shares fastest: how many entries it has."""
    row, N = (tl.program_id(0) // parts).to(tl.int64), even_length(N, VEC, EVEN)
    begin = tl.program_id(0) % parts * span
    z_ptr += row * N
    count = tl.zeros([], tl.int64)
    for start in range(begin, tl.minimum(begin + span, N), BLOCK):
        bits = kept_bits(
            z_ptr, bias_ptr, threshold_ptr, limits_ptr, stride_t, radius, start, N, BLOCK, VEC, WINDOW
        )  # fmt: skip
        count += tl.sum(count_bits(bits), axis=0)
    tl.store(starts_ptr + tl.program_id(0), count)


@launch.kernel
def _encode_csr_starts_kernel(starts_ptr, offsets_ptr, total, parts, BLOCK: tl.constexpr):
    """The one program: `total` counts become where each list begins, in place, with the end of the last behind them;
    of each row's first share also in `offsets_ptr`."""
    base = tl.zeros([], tl.int64)
    at = tl.arange(0, BLOCK)
    counts = tl.load(starts_ptr + at, mask=at < total, other=0)
    for first in range(0, total, BLOCK):
        at = first + tl.arange(0, BLOCK)
        following = tl.load(starts_ptr + at + BLOCK, mask=at + BLOCK < total, other=0)
        start = base + tl.cumsum(counts, axis=0) - counts
        tl.store(starts_ptr + at, start, mask=at < total)
        tl.store(offsets_ptr + at // parts, start, mask=(at < total) & (at % parts == 0))
        base += tl.sum(counts, axis=0)
        counts = following
    tl.store(starts_ptr + total, base)
    tl.store(offsets_ptr + total // parts, base)


@launch.kernel
def _encode_csr_fill_kernel(
    z_ptr, bias_ptr, threshold_ptr, limits_ptr, starts_ptr, values_ptr, indices_ptr, l0_ptr, stride_t, radius, N, parts,
    span, BLOCK: tl.constexpr, VEC: tl.constexpr, WINDOW: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Program (row, share), shares fastest: its entries, from where they begin. With WINDOW l0 starts as 0."""
    row, N = (tl.program_id(0) // parts).to(tl.int64), even_length(N, VEC, EVEN)
    begin = tl.program_id(0) % parts * span
    first = tl.load(starts_ptr + tl.program_id(0))
    count = (tl.load(starts_ptr + tl.program_id(0) + 1) - first).to(tl.int32)
    if not WINDOW:
        if begin == 0:
            tl.store(l0_ptr + row, tl.load(starts_ptr + tl.program_id(0) + parts) - first)
    if count > 0:
        z_ptr += row * N
        values_ptr += first
        indices_ptr += first
        base = 0
        active = tl.zeros([], tl.float32)
        for start in range(begin, tl.minimum(begin + span, N), BLOCK):
            bits = kept_bits(
                z_ptr, bias_ptr, threshold_ptr, limits_ptr, stride_t, radius, start, N, BLOCK, VEC, WINDOW
            )  # fmt: skip
            counts = count_bits(bits)
            found = append_active(
                bits, counts, z_ptr, bias_ptr, threshold_ptr, stride_t, values_ptr, indices_ptr, base, count, start, N,
                BLOCK, VEC, WINDOW,
            )  # fmt: skip
            if WINDOW:
                active += tl.sum(found, axis=0).to(tl.float32)
            base += tl.sum(counts, axis=0)
        if WINDOW:
            # Whole numbers: the sum does not depend on the order of arrival.
            tl.atomic_add(l0_ptr + row, active, sem="relaxed")


_plans = launch.Plans()


def encode_csr(
    z: Tensor, bias: Tensor | None, threshold: Tensor | None, bandwidth: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(values, indices, offsets, l0) of z [M, N] + bias. Waits for the device, once, which is why its kernels
    are not compiled together."""
    m, n = z.shape
    sizes = scan_tile(n, z.element_size(), GROUPS)
    chunks = launch.cdiv(n, sizes["BLOCK"])
    span = launch.cdiv(chunks, min(chunks, launch.cdiv(SHARES * tuning.programs(z.device), m))) * sizes["BLOCK"]
    parts, device = launch.cdiv(n, span), z.device
    starts = torch.empty(m * parts + 1, dtype=torch.int64, device=device)
    offsets = torch.empty(m + 1, dtype=torch.int64, device=device)
    l0 = (torch.zeros if bandwidth else torch.empty)(m, dtype=torch.float32, device=device)
    stride_t = 0 if threshold is None else threshold.stride(0)
    # Where rows are few their thresholds are not worth a launch.
    limits = limits_of(z, threshold, bandwidth) if m >= 512 else None
    read = (z, bias, threshold, limits)
    key, plan = None, None
    if limits is None and not launch.INTERPRET:
        index = z.get_device()
        stream = torch._C._cuda_getCurrentRawStream(index)
        key = (m, n, z.dtype, None if bias is None else bias.dtype, threshold is None, stride_t, bandwidth)
        key += (index, stream)
        pointers = [None if t is None else t.data_ptr() for t in read]
        plan = _plans.get(key, index, pointers[0] | (pointers[1] or 0) | (pointers[2] or 0))
    if plan is not None:
        count, add, fill = plan.launches
        count(stream, *pointers, starts.data_ptr())
        add(stream, starts.data_ptr(), offsets.data_ptr())
        values, indices = _buffers(z, starts)
        fill(stream, *pointers, *(t.data_ptr() for t in (starts, values, indices, l0)))
        return values, indices, offsets, l0
    meta = {**sizes, "WINDOW": bandwidth > 0, "EVEN": is_even(n, z.element_size())}
    grid, tail = (m * parts, 1, 1), (stride_t, bandwidth / 2, n, parts, span)
    count = _encode_csr_count_kernel(grid, (*read, starts, *tail), meta, num_warps=1, head=5)
    block = min(4096, max(32, launch.next_power_of_2(m * parts)))
    args = (starts, offsets, m * parts, parts)
    add = _encode_csr_starts_kernel((1, 1, 1), args, {"BLOCK": block}, num_warps=max(1, block // 256), head=2)
    values, indices = _buffers(z, starts)
    fill = _encode_csr_fill_kernel(grid, (*read, starts, values, indices, l0, *tail), meta, num_warps=1, head=8)
    if key is not None:
        _plans.keep(key, device, count, add, fill)
    return values, indices, offsets, l0


def _buffers(z: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Values and indices of as many entries as there are: the wait."""
    total = int(starts[-1])
    return z.new_empty(total), torch.empty(total, dtype=torch.int32, device=z.device)


EXAMPLES = {
    _encode_csr_count_kernel: {
        "limits_ptr": None, "starts_ptr": "*i64", "BLOCK": 1024, "VEC": 8, "WINDOW": True, "EVEN": False,
        "num_warps": 1,
    },
    _encode_csr_starts_kernel: {"starts_ptr": "*i64", "offsets_ptr": "*i64", "BLOCK": 4096, "num_warps": 16},
    _encode_csr_fill_kernel: {
        "limits_ptr": None, "starts_ptr": "*i64", "BLOCK": 1024, "VEC": 8, "WINDOW": True, "EVEN": False,
        "num_warps": 1,
    },
}  # fmt: skip
