"""Dense activations times decoder, reading only the decoder rows that fire.

With few rows of activations the time goes into launches and trips to the L2, so everything happens in one launch: the
first M * chunks programs each scan one chunk of a row into the row's list, and the programs after them each gather one
slice of the output from a list. A gathering program waits for its row's scanning programs, which started before it and
wait for nobody behind them. The list's slots say for themselves that they are written: a slot is one 64-bit word, the
launch's epoch beside the column, and arrives in one piece, so that nothing has to be released or acquired. Values are
read from the activations again, which the scan has just brought to the L2. Rows with more than `capacity` entries are
left to the dense tiles of `overflow`. With many rows scan and gather are launches of their own, because each of them
fills the GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from gossamer._core import launch, tuning
from gossamer.rowsparse._triton import overflow, pack
from gossamer.rowsparse._triton.dense_transpose import rows_contiguous
from gossamer.rowsparse._triton.list_entries import list_slots, publish
from gossamer.rowsparse._triton.matmul import matmul
from gossamer.rowsparse.matmul_path import gather_tile
from gossamer.rowsparse.records import Matmul
from gossamer.sae.decode_path import one_launch
from gossamer.sae.records import SaeDecode, SaeDecodeLists

LOOK = tl.constexpr(64)
"""Counts that a program reads at a time."""


@triton.jit
def wait_for(ptr, epoch):
    """The lower half of the word at ptr, once its upper half is the epoch."""
    word = tl.load(ptr, volatile=True)
    while (word >> 32) != epoch:
        word = tl.load(ptr, volatile=True)
    return word.to(tl.int32)


@triton.jit
def sum_before(counts_ptr, chunk, epoch):
    """The entries of a row's chunks before `chunk`. A row has so few chunks that a program waits for each, and the look
    of `list_entries` for a sum that another program has made would take as long as the scan."""
    total = 0
    for first in range(0, chunk, LOOK):
        at = first + tl.arange(0, LOOK)
        words = tl.load(counts_ptr + at, mask=at < chunk, other=0, volatile=True)
        while tl.sum(((at < chunk) & ((words >> 32) != epoch)).to(tl.int32), axis=0) > 0:
            words = tl.load(counts_ptr + at, mask=at < chunk, other=0, volatile=True)
        total += tl.sum(words.to(tl.int32), axis=0)
    return total


@triton.jit
def scan(
    x_ptr, slots_ptr, counts_ptr, spans_ptr, epoch, chunk, chunks, M, N, capacity,
    BLOCK: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """One chunk of one row into the row's slots; all pointers are the row's. Its last count is that of the row."""
    start = chunk * BLOCK
    bits = pack.word_bits(pack.load_chunk(x_ptr, start, N, BLOCK, VEC) != 0, VEC)
    counts = pack.count_bits(bits)
    count = tl.sum(counts, axis=0)
    tag = epoch.to(tl.int64) << 32
    publish(counts_ptr + chunk, epoch, count.to(tl.int64))
    if (count > 0) | (chunk == chunks - 1):
        base = sum_before(counts_ptr, chunk, epoch)
        if chunk == chunks - 1:
            publish(counts_ptr + chunks, epoch, (base + count).to(tl.int64))
            tl.store(spans_ptr, tl.zeros([], tl.int64))
            tl.store(spans_ptr + M, (base + count).to(tl.int64))
        if base < capacity:
            slot = base + tl.cumsum(counts, axis=0) - counts
            while tl.max(bits, axis=0) > 0:
                column, held, bits = pack.pop_lowest(bits, start, BLOCK, VEC)
                tl.atomic_xchg(
                    slots_ptr + slot, tag | column.to(tl.int64), mask=held & (slot < capacity), sem="relaxed"
                )
                slot += held.to(tl.int32)


@triton.jit
def gather_slots(
    x_ptr, slots_ptr, epoch, begin, end, w_ptr, stride_wn, columns, inside,
    BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Sums of x * weight row over the slots begin to end, a lane of BLOCK_E each: float32 [BLOCK_E, BLOCK_D]."""
    acc = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
    slot = begin + tl.arange(0, BLOCK_E)
    word = tl.load(slots_ptr + slot, mask=slot < end, other=0, volatile=True)
    for _ in range(begin, end, BLOCK_E):
        held = slot < end
        while tl.sum((held & ((word >> 32) != epoch)).to(tl.int32), axis=0) > 0:
            word = tl.load(slots_ptr + slot, mask=held, other=0, volatile=True)
        index = word & 0xFFFFFFFF
        w = tl.load(
            w_ptr + index[:, None] * stride_wn + columns[None, :], mask=held[:, None] & inside[None, :], other=0.0
        ).to(tl.float32)
        value = tl.load(x_ptr + index, mask=held, other=0.0).to(tl.float32)
        slot += BLOCK_E
        word = tl.load(slots_ptr + slot, mask=slot < end, other=0, volatile=True)
        acc += value[:, None] * w
    return acc


@launch.kernel(do_not_specialize=["epoch"])
def _decode_fwd_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, spans_ptr, words_ptr, epoch, stride_xm, stride_wn, M, N, D, capacity, chunks,
    BLOCK: tl.constexpr, VEC: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, PARTIAL: tl.constexpr,
    LAUNCH_DEPENDENTS: tl.constexpr,
):  # fmt: skip
    """Programs (row, chunk) that scan, then programs (row, slice) that gather. A row has `capacity` words of slots and
    chunks + 1 of counts. Its span is its count in buffers of `capacity` slots, from slot 0 on, which `overflow` reads.
    """
    if LAUNCH_DEPENDENTS:
        gdc_launch_dependents()
    pid = tl.program_id(0)
    scanning, slices = M * chunks, tl.cdiv(D, BLOCK_D)
    row = (pid // chunks if pid < scanning else (pid - scanning) // slices).to(tl.int64)
    slots_ptr = words_ptr + row * (capacity + chunks + 1)
    counts_ptr = slots_ptr + capacity
    x_ptr += row * stride_xm
    if pid < scanning:
        scan(
            x_ptr, slots_ptr, counts_ptr, spans_ptr + row, epoch, pid % chunks, chunks, M, N, capacity, BLOCK, VEC,
        )  # fmt: skip
    else:
        columns = ((pid - scanning) % slices) * BLOCK_D + tl.arange(0, BLOCK_D)
        inside = columns < D
        count = wait_for(counts_ptr + chunks, epoch)
        if count <= capacity:
            if PARTIAL > 0:
                # Runs of their own: in float32 one running sum over a long row rounds worse than a dense product does.
                acc = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
                for begin in range(0, count, PARTIAL):
                    end = tl.minimum(begin + PARTIAL, count)
                    acc += gather_slots(
                        x_ptr, slots_ptr, epoch, begin, end, w_ptr, stride_wn, columns, inside, BLOCK_E, BLOCK_D
                    )
            else:
                acc = gather_slots(
                    x_ptr, slots_ptr, epoch, 0, count, w_ptr, stride_wn, columns, inside, BLOCK_E, BLOCK_D
                )
            out = tl.sum(acc, axis=0)
            if bias_ptr is not None:
                out += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
            tl.store(out_ptr + row * D + columns, out, mask=inside)


def _one_launch(acts: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, capacity: int) -> None:
    """Fills out."""
    (m, n), d = acts.shape, weight.shape[1]
    size = weight.element_size()
    meta = pack.scan_tile(n, size, groups=256 if n <= 65536 else 512)
    chunks = launch.cdiv(n, meta["BLOCK"])
    meta |= gather_tile(m, d, size)
    meta["PARTIAL"] = 64 * meta["BLOCK_E"] if out.dtype is torch.float32 and capacity > 256 * meta["BLOCK_E"] else 0
    overflows = capacity < n
    meta["LAUNCH_DEPENDENTS"] = overflows and tuning.dependent_launch(weight.device)
    slices = launch.cdiv(d, meta["BLOCK_D"])
    words = m * (capacity + chunks + 1)
    spans = torch.empty(2, m, dtype=torch.int64, device=acts.device)
    args = (acts, weight, bias, out, spans, *launch.flags(words, acts.device))
    args += (acts.stride(0), weight.stride(0), m, n, d, capacity, chunks)
    _decode_fwd_kernel((m * (chunks + slices), 1, 1), args, meta, num_warps=1)
    if overflows:
        overflow.forward(overflow.Overflow(acts, spans, capacity), weight, bias, out)


def decode_lists(call: SaeDecodeLists) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out [M, D], values, indices, spans), the lists as `pack_rows` gives them."""
    acts, weight, bias, capacity, out_dtype = call
    values, indices, spans = list_slots(acts, capacity)
    return matmul(Matmul(values, indices, spans, acts, weight, bias, out_dtype)), values, indices, spans


def decode(call: SaeDecode) -> Tensor:
    """The output alone."""
    acts, weight, bias, capacity, out_dtype = call
    m, n = acts.shape
    if not one_launch(m, n) or acts.numel() == 0 or weight.shape[1] == 0:
        return decode_lists(SaeDecodeLists(*call))[0]
    x, w = rows_contiguous(acts), rows_contiguous(weight)
    out = torch.empty(m, w.shape[1], dtype=out_dtype or w.dtype, device=w.device)
    _one_launch(x, w, bias, out, capacity)
    return out


EXAMPLES = {
    _decode_fwd_kernel: {
        "x_ptr": "*fp32", "w_ptr": "*fp32", "bias_ptr": None, "out_ptr": "*fp32", "BLOCK": 1024, "VEC": 4,
        "BLOCK_E": 32, "BLOCK_D": 32, "PARTIAL": 0, "LAUNCH_DEPENDENTS": False, "num_warps": 1,
    },
}  # fmt: skip
