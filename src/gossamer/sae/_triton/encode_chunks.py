"""Few rows of pre-activations to sorted lists of what exceeds a threshold: programs that take chunks of a row.

They exchange their counts as `rowsparse._triton.pack` has it, and the last of a row, which knows its count, clears the
slots that are left. Of a row that overflows each program overwrites its chunk as soon as it knows, and the last those
before, which did not. Host time is most of such a call, so the launch is kept as a plan.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch
from gossamer.rowsparse._triton import pack
from gossamer.rowsparse._triton.limit import add_bias, load_threshold
from gossamer.rowsparse._triton.pack import (
    COUNT,
    publish,
    wait_and_sum,
)
from gossamer.sae._triton._entries import GROUPS, activate_row, append_active
from gossamer.sae._triton.select import load_pre


@triton.jit
def chunks_within(flags_ptr, chunks, capacity, FLAGS: tl.constexpr):
    """How many of a row's chunks, of which all have said how much they hold, fill no more than its slots."""
    found = 0
    total = 0
    for first in range(0, chunks, FLAGS):
        chunk = first + tl.arange(0, FLAGS)
        held = (tl.load(flags_ptr + chunk, mask=chunk < chunks, other=0, volatile=True) & COUNT).to(tl.int32)
        found += tl.sum(((chunk < chunks) & (total + tl.cumsum(held, axis=0) <= capacity)).to(tl.int32), axis=0)
        total += tl.sum(held, axis=0)
    return found


@launch.kernel(do_not_specialize=["epoch"])
def _encode_split_kernel(
    z_ptr, bias_ptr, threshold_ptr, values_ptr, indices_ptr, nnz_ptr, l0_ptr, flags_ptr, epoch, stride_t, radius, N,
    capacity, chunks,
    BLOCK: tl.constexpr, VEC: tl.constexpr, FLAGS: tl.constexpr, WINDOW: tl.constexpr, MAY_OVERFLOW: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk), chunks fastest: the exchange of counts is that of `pack.scan_chunk`.

    With WINDOW l0 starts as 0.
    """
    row, N = (tl.program_id(0) // chunks).to(tl.int64), pack.even_length(N, VEC, EVEN)
    chunk = tl.program_id(0) % chunks
    z_ptr += row * N
    values_ptr += row * capacity
    indices_ptr += row * capacity
    flags_ptr += row * chunks
    start = chunk * BLOCK
    columns = pack.chunk_columns(start, BLOCK, VEC)
    pre = add_bias(load_pre(z_ptr, columns, N), bias_ptr, columns, columns < N)
    threshold = load_threshold(threshold_ptr, stride_t, columns, columns < N)
    if WINDOW:
        bits = pack.word_bits(~(pre <= threshold - radius) & (columns < N), VEC)
    else:
        bits = pack.word_bits(~(pre <= threshold), VEC)
    counts = pack.count_bits(bits)
    count = tl.sum(counts, axis=0)
    publish(flags_ptr + chunk, epoch, count)
    if (count > 0) | MAY_OVERFLOW:
        base = wait_and_sum(flags_ptr, chunk, epoch.to(tl.int64) << 1, FLAGS)
        if base < capacity:
            append_active(
                bits, counts, z_ptr, bias_ptr, threshold_ptr, stride_t, values_ptr, indices_ptr, base, capacity,
                start, N, BLOCK, VEC, WINDOW,
            )  # fmt: skip
        if WINDOW:
            # Whole numbers: the sum does not depend on the order of arrival.
            tl.atomic_add(l0_ptr + row, tl.sum((~(pre <= threshold)).to(tl.float32)), sem="relaxed")
        if MAY_OVERFLOW:
            if base + count > capacity:
                # A lane may still read what another is about to overwrite.
                tl.debug_barrier()
                end = tl.minimum(start + BLOCK, N)
                activate_row(z_ptr, bias_ptr, threshold_ptr, stride_t, radius, start, end, BLOCK, VEC, WINDOW)
    # Every thread must have written its entries, and read z, before the one thread that signals says so.
    tl.debug_barrier()
    tl.atomic_xchg(flags_ptr + chunk, (epoch.to(tl.int64) << 32) | count | pack.DONE, sem="release")
    if chunk == chunks - 1:
        total = pack.wait_and_sum(flags_ptr, chunks, (epoch.to(tl.int64) << 1) + 1, FLAGS)
        tl.store(nnz_ptr + row, total)
        if not WINDOW:
            tl.store(l0_ptr + row, total)
        pack.clear_slots(values_ptr, indices_ptr, total, capacity, 256, 256)
        if MAY_OVERFLOW:
            if total > capacity:
                # The others have read their part of z, for their flags say so: it may be overwritten.
                before = tl.minimum(chunks_within(flags_ptr, chunks, capacity, FLAGS) * BLOCK, N)
                tl.debug_barrier()
                activate_row(z_ptr, bias_ptr, threshold_ptr, stride_t, radius, 0, before, BLOCK, VEC, WINDOW)


_plans = launch.Plans()


def encode_chunks(
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
    if not launch.INTERPRET:
        index = z.get_device()
        stream = torch._C._cuda_getCurrentRawStream(index)
        key = (m, n, capacity, z.dtype, None if bias is None else bias.dtype, threshold is None, stride_t)
        key += (bandwidth, may_overflow, index, stream)
        pointers = [None if t is None else t.data_ptr() for t in (z, bias, threshold, *out)]
        # What is made here is aligned.
        plan = _plans.get(key, index, pointers[0] | (pointers[1] or 0) | (pointers[2] or 0))
        if plan is not None:
            with plan.lock:
                plan.launches[0](stream, *pointers, plan.flags, plan.epochs.next())
            return
    chunks, meta = pack.split(n, pack.scan_tile(n, z.element_size(), GROUPS))
    meta |= {"WINDOW": bandwidth > 0, "MAY_OVERFLOW": may_overflow, "EVEN": pack.is_even(n, z.element_size())}
    flags, epoch = launch.flags.get(m * chunks, z.device)
    args = (z, bias, threshold, *out, flags, epoch, stride_t, bandwidth / 2, n, capacity, chunks)
    bound = _encode_split_kernel((m * chunks, 1, 1), args, meta, num_warps=1, head=9)
    if not launch.INTERPRET:
        _plans.keep(key, z.device, bound, words=m * chunks)


EXAMPLES = {
    _encode_split_kernel: {
        "z_ptr": "*fp32", "values_ptr": "*fp32", "BLOCK": 512, "VEC": 4, "FLAGS": 128, "WINDOW": False,
        "MAY_OVERFLOW": True, "EVEN": False, "num_warps": 1,
    },
}  # fmt: skip
