"""A candidate for the decode of few rows, which `tune_decode.py slots` compares; the library does not use it.

With few rows the time is a chain of trips to the L2. In the decode in use an entry goes from scan to gather through a
list that is written, released by a flag, waited for, acquired, and then read. Here the slots of the list say for
themselves whether they are written: a slot is one 64-bit word, the launch's epoch beside the column, and goes out in
one piece. The gather waits on the very words that it needs; nothing is released or acquired, and values come from the
activations, which the scan has brought to the L2. With PREFETCH the scan also asks for the weight rows that it finds.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from gossamer._core import launch, tuning
from gossamer.rowsparse._triton import overflow, pack
from gossamer.rowsparse._triton.pack import count_bits, load_chunk, nonzero_bits


@triton.jit
def lowest_columns(low, start, BLOCK: tl.constexpr, VEC: tl.constexpr):
    """Columns of words that have one bit set."""
    first = start + tl.arange(0, BLOCK // VEC) * VEC
    return first + ((low & 0xAA) != 0) + 2 * ((low & 0xCC) != 0).to(tl.int32) + 4 * ((low & 0xF0) != 0).to(tl.int32)


@triton.jit
def wait_for(ptr, epoch):
    """The word at ptr, once it carries the epoch."""
    word = tl.load(ptr, volatile=True)
    while (word >> 32) != epoch:
        word = tl.load(ptr, volatile=True)
    return word


@triton.jit
def sum_before(counts_ptr, count, epoch, WIDTH: tl.constexpr):
    """Sum of the first `count` words' low halves, once they carry the epoch."""
    total = 0
    for first in range(0, count, WIDTH):
        at = first + tl.arange(0, WIDTH)
        words = tl.load(counts_ptr + at, mask=at < count, other=0, volatile=True)
        while tl.sum(((at < count) & ((words >> 32) != epoch)).to(tl.int32)) > 0:
            words = tl.load(counts_ptr + at, mask=at < count, other=0, volatile=True)
        total += tl.sum(words.to(tl.int32))
    return total


@triton.jit
def scan(
    x_ptr, slots_ptr, nnz_ptr, counts_ptr, w_ptr, stride_wn, epoch, chunk, chunks, N, capacity,
    BLOCK: tl.constexpr, VEC: tl.constexpr, WIDTH: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """One chunk of one row into the row's slots; all pointers but the weight's are the row's."""
    start = chunk * BLOCK
    bits = nonzero_bits(load_chunk(x_ptr, start, N, BLOCK, VEC), VEC)
    counts = count_bits(bits)
    count = tl.sum(counts, axis=0)
    tag = epoch.to(tl.int64) << 32
    tl.atomic_xchg(counts_ptr + chunk, tag | count, sem="relaxed")
    if PREFETCH > 0:  # noqa: SIM102
        if (count > 0) & (count <= 4):
            rest = bits
            while tl.max(rest, axis=0) > 0:
                low = rest & -rest
                address = w_ptr + lowest_columns(low, start, BLOCK, VEC).to(tl.int64) * stride_wn
                tl.inline_asm_elementwise(
                    "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $3; "
                    "mov.u32 $0, 0; }",
                    "=r,l,r,r", [address.to(tl.int64), low, tl.full([BLOCK // VEC], PREFETCH, tl.int32)],
                    dtype=tl.int32, is_pure=False, pack=1,
                )  # fmt: skip
                rest = rest & (rest - 1)
    if (count > 0) | (chunk == chunks - 1):
        base = sum_before(counts_ptr, chunk, epoch, WIDTH)
        if chunk == chunks - 1:
            tl.atomic_xchg(counts_ptr + chunks, tag | (base + count), sem="relaxed")
            tl.store(nnz_ptr, base + count)
        if base < capacity:
            slot = base + tl.cumsum(counts, axis=0) - counts
            rest = bits
            while tl.max(rest, axis=0) > 0:
                low = rest & -rest
                column = lowest_columns(low, start, BLOCK, VEC).to(tl.int64)
                tl.atomic_xchg(slots_ptr + slot, tag | column, mask=(low > 0) & (slot < capacity), sem="relaxed")
                slot += (low > 0).to(tl.int32)
                rest = rest & (rest - 1)


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


@triton.jit(do_not_specialize=["epoch"])
def _decode_slots_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, nnz_ptr, arrived_ptr, slots_ptr, counts_ptr, epoch,
    stride_xm, stride_wn, M, N, D, capacity, chunks, slices, tiles,
    BLOCK: tl.constexpr, VEC: tl.constexpr, WIDTH: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
    RUN: tl.constexpr, PREFETCH: tl.constexpr, LEADS: tl.constexpr, TRUNCATE: tl.constexpr,
):  # fmt: skip
    """Programs (row, chunk) that scan, then programs (row, slice) that gather. A row has chunks + 1 counts: the last is
    the row's."""
    if LEADS:
        gdc_launch_dependents()
    pid = tl.program_id(0)
    if arrived_ptr is not None:  # noqa: SIM102
        if pid == 0:
            overflow.clear_arrived(arrived_ptr, tiles)
    scanning = M * chunks
    if pid < scanning:
        row = (pid // chunks).to(tl.int64)
        scan(
            x_ptr + row * stride_xm, slots_ptr + row * capacity, nnz_ptr + row, counts_ptr + row * (chunks + 1),
            w_ptr, stride_wn, epoch, pid % chunks, chunks, N, capacity, BLOCK, VEC, WIDTH, PREFETCH,
        )  # fmt: skip
    else:
        row = ((pid - scanning) // slices).to(tl.int64)
        columns = ((pid - scanning) % slices) * BLOCK_D + tl.arange(0, BLOCK_D)
        inside = columns < D
        x_ptr += row * stride_xm
        slots_ptr += row * capacity
        count = wait_for(counts_ptr + row * (chunks + 1) + chunks, epoch).to(tl.int32)
        if TRUNCATE:
            count = tl.minimum(count, capacity)
        if count <= capacity:
            if RUN > 0:
                # Runs of their own: in float32 one running sum over a long row rounds worse than a dense product does.
                acc = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
                for begin in range(0, count, RUN):
                    end = tl.minimum(begin + RUN, count)
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


_decode_slots = launch.Kernel(_decode_slots_kernel)


def decode(
    acts: torch.Tensor, weight: torch.Tensor, capacity: int, truncate: bool = False, prefetch: bool = False,
    tile: dict[str, int] | None = None,
) -> torch.Tensor:  # fmt: skip
    """acts [M, N] @ weight [N, D], exact for every input unless `truncate`."""
    (m, n), d = acts.shape, weight.shape[1]
    meta = pack.fit_block(tile or tuning.decode_tile(m, n, d, weight.element_size())[0], n)
    chunks, slices = launch.cdiv(n, meta["BLOCK"]), launch.cdiv(d, meta["BLOCK_D"])
    out = torch.empty(m, d, dtype=weight.dtype, device=weight.device)
    nnz = torch.empty(m, dtype=torch.int32, device=acts.device)
    overflows = capacity < n and not truncate
    space = overflow.workspace(m, n, weight) if overflows else (None, None)
    words = torch.zeros(m * (capacity + chunks + 1), dtype=torch.int64, device=acts.device)
    run = 64 * meta["BLOCK_E"] if out.dtype is torch.float32 and capacity > 256 * meta["BLOCK_E"] else 0
    constants = {
        "BLOCK": meta["BLOCK"], "VEC": meta["VEC"], "WIDTH": min(launch.next_power_of_2(chunks), 128),
        "BLOCK_E": meta["BLOCK_E"], "BLOCK_D": meta["BLOCK_D"], "RUN": run,
        "PREFETCH": d * weight.element_size() if prefetch else 0,
        "LEADS": overflows and tuning.dependent_launch(weight.device), "TRUNCATE": truncate,
    }  # fmt: skip
    key = (m, n, d, capacity, acts.dtype, weight.dtype, truncate, prefetch, *constants.values())
    args = (acts, weight, None, out, nnz, space[1], words, words[m * capacity :], 1, acts.stride(0), weight.stride(0))
    args += (m, n, d, capacity, chunks, slices, 0 if space[1] is None else space[1].shape[0])
    _decode_slots(key, (m * (chunks + slices), 1, 1), args, constants, num_warps=1)
    if overflows:
        overflow.forward(acts, weight, None, out, nnz, capacity, space)
    return out


EXAMPLES = {
    _decode_slots_kernel: {
        "signature": {
            "x_ptr": "*fp32", "w_ptr": "*fp32", "bias_ptr": None, "out_ptr": "*fp32", "nnz_ptr": "*i32",
            "arrived_ptr": "*i32", "slots_ptr": "*i64", "counts_ptr": "*i64", "epoch": "i32", "stride_xm": "i32",
            "stride_wn": "i32", "M": "i32", "N": "i32", "D": "i32", "capacity": "i32", "chunks": "i32",
            "slices": "i32", "tiles": "i32",
        },
        "constexprs": {
            "BLOCK": 1024, "VEC": 4, "WIDTH": 64, "BLOCK_E": 32, "BLOCK_D": 32, "RUN": 0, "PREFETCH": 0,
            "LEADS": False, "TRUNCATE": False,
        },
        "num_warps": 1,
    },
}  # fmt: skip
