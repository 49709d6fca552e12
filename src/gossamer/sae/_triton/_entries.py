"""Entries of a row of pre-activations, for every way through the rows.

A chunk of a row is words of VEC neighbouring columns, a word a thread, whose bits say what is kept. What becomes of a
row that has more entries than slots: the program that finds it out overwrites the row of z by its activation, so that z
serves as the container's source without another buffer. There -0.0 stands for an entry of value 0, +0.0 for none.
"""

import triton
import triton.language as tl

from gossamer.rowsparse._triton.limit import add_bias, load_threshold
from gossamer.rowsparse._triton.pack import chunk_columns, pop_lowest
from gossamer.sae._triton.select import load_pre


@triton.jit
def append_active(
    bits, counts, z_ptr, bias_ptr, threshold_ptr, stride_t, values_ptr, indices_ptr, base, limit, start, N,
    BLOCK: tl.constexpr, VEC: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """As `pack.append_entries`, writing activations. With WINDOW returns how many exceed the threshold, by thread."""
    active = tl.zeros_like(bits)
    slot = base + tl.cumsum(counts, axis=0) - counts
    while tl.max(bits, axis=0) > 0:
        column, held, bits = pop_lowest(bits, start, BLOCK, VEC)
        value = add_bias(tl.load(z_ptr + column, mask=held, other=0.0), bias_ptr, column, column < N)
        if WINDOW:
            below = value <= load_threshold(threshold_ptr, stride_t, column, column < N)
            active += (held & ~below).to(tl.int32)
            value = tl.where(below, 0.0, value)
        tl.store(values_ptr + slot, value, mask=held & (slot < limit))
        tl.store(indices_ptr + slot, column, mask=held & (slot < limit))
        slot += held.to(tl.int32)
    return active


@triton.jit
def activated(z, bias_ptr, threshold_ptr, stride_t, radius, columns, N, WINDOW: tl.constexpr):
    """What exceeds the threshold, and a mark for what lies in the window."""
    pre = add_bias(z, bias_ptr, columns, columns < N)
    threshold = load_threshold(threshold_ptr, stride_t, columns, columns < N)
    out = tl.where(pre <= threshold, 0.0, pre)
    if WINDOW:
        # A literal -0.0 would become +0.0 on its way through the compiler.
        minus_zero = tl.full([], -0x80000000, tl.int32).to(tl.float32, bitcast=True)
        out = tl.where((pre <= threshold) & (pre > threshold - radius), minus_zero, out)
    return out


@triton.jit
def activate_row(
    z_ptr, bias_ptr, threshold_ptr, stride_t, radius, begin, end, BLOCK: tl.constexpr, VEC: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Overwrites a row of z, from column `begin` on and before `end`, by what it activates to."""
    z = load_pre(z_ptr, chunk_columns(begin, BLOCK, VEC), end)
    for start in range(begin, end, BLOCK):
        columns = chunk_columns(start, BLOCK, VEC)
        # Ahead of the store, behind which the compiler would leave it.
        following = load_pre(z_ptr, columns + BLOCK, end)
        out = activated(z, bias_ptr, threshold_ptr, stride_t, radius, columns, end, WINDOW)
        tl.store(z_ptr + columns, out, mask=columns < end)
        z = following


GROUPS = 128
"""Groups of the scan of pre-activations: half as many as of `pack`, for thresholds take registers."""
