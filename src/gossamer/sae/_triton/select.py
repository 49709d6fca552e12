"""The k largest pre-activations of each row, exactly and without a host sync.

Positive floats are ordered like their bit patterns, so the search runs on integer keys; a number that ReLU zeroes has
key 0 and is never selected, NaN has the largest. Almost nothing of a long row is near its k-th largest element, and one
pass finds the candidates: columns fall into GROUPS groups, and at least k elements reach the k-th largest group
maximum, the *bound*. A second pass lists the keys above the bound, at most GROUPS-th part of the row for each of k - 1
groups, and the answer is the bound or in the list. Tie counts are exact as well: `need` of the elements that equal the
k-th largest are selected, those of lowest index.

A row is one program's work: it keeps the maxima in registers and halves the range of keys by counting, and it walks
the row again while the row is still in the L2. The list names the columns as well, and is all that is left to read.
For the largest of a batch see `batchtopk`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer.rowsparse._triton.list_entries import add_bias
from gossamer.rowsparse._triton.pack import chunk_columns, clear_slots, count_bits, pop_lowest, scan_tile, word_bits
from gossamer.rowsparse.formats import empty_slots

NAN_KEY = tl.constexpr(0x7FFFFFFF)
SHIFT = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""Low bits of a float32 that are zero in every number of the dtype."""


@triton.jit
def load_pre(z_ptr, columns, N):
    """Elements of one row; -inf past its end, which no rule keeps."""
    return tl.load(z_ptr + columns, mask=columns < N, other=float("-inf"))


@triton.jit
def order_key(pre, SHIFT: tl.constexpr):
    """int32 that orders positive numbers as they are, 0 for a number that ReLU zeroes, the largest for NaN."""
    bits = pre.to(tl.int32, bitcast=True) >> SHIFT
    return tl.where(pre > 0, bits, tl.where(pre == pre, 0, NAN_KEY >> SHIFT))


@triton.jit
def ranked(z, bias_ptr, scale_ptr, columns, N, ABS: tl.constexpr = False):
    """z + bias, or that times scale, which is rounded once more, as a product of two tensors is. With ABS its distance
    from 0, and 0 past the end."""
    pre = add_bias(z, bias_ptr, columns, columns < N)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + columns, mask=columns < N, other=1.0).to(tl.float32)
        pre = (pre * scale).to(z.dtype).to(tl.float32)
    if ABS:
        pre = tl.where(columns < N, tl.abs(pre), 0.0)
    return pre


@triton.jit
def rank_key(z, bias_ptr, scale_ptr, columns, N, SHIFT: tl.constexpr, ABS: tl.constexpr = False):
    """The key of a ranked number."""
    return order_key(ranked(z, bias_ptr, scale_ptr, columns, N, ABS), SHIFT)


@triton.jit
def settle_ties(equal, need, seen, VEC: tl.constexpr):
    """(bits, ties seen so far): of the words' bits that stand for a key equal to the k-th largest, the row's first
    `need`."""
    counts = count_bits(equal)
    room = need - seen - (tl.cumsum(counts, axis=0) - counts)
    rest = equal
    for i in tl.static_range(VEC):
        rest = tl.where(room > i, rest & (rest - 1), rest)
    return equal & ~rest, seen + tl.sum(counts, axis=0)


@triton.jit
def list_largest(
    z_ptr, bias_ptr, scale_ptr, floor, wanted, list_ptr, columns_ptr, N, limit,
    BLOCK: tl.constexpr, VEC: tl.constexpr, SHIFT: tl.constexpr, KEYS: tl.constexpr, ABS: tl.constexpr = False,
):  # fmt: skip
    """Walks a row, and lists the elements with keys above `floor` and the first `wanted` that equal it: their keys, or
    without KEYS their numbers, and their columns, in slots below `limit`. Returns how many there are."""
    count = 0
    seen = 0
    z = load_pre(z_ptr, chunk_columns(0, BLOCK, VEC), N)
    for start in range(0, N, BLOCK):
        columns = chunk_columns(start, BLOCK, VEC)
        following = load_pre(z_ptr, columns + BLOCK, N)
        key = rank_key(z, bias_ptr, scale_ptr, columns, N, SHIFT, ABS)
        found = tl.max(word_bits(key >= floor, VEC), axis=0)
        if found > 0:
            ties, seen = settle_ties(word_bits(key == floor, VEC), wanted, seen, VEC)
            bits = word_bits(key > floor, VEC) | ties
            counts = count_bits(bits)
            slot = count + tl.cumsum(counts, axis=0) - counts
            count += tl.sum(counts, axis=0)
            while tl.max(bits, axis=0) > 0:
                column, held, bits = pop_lowest(bits, start, BLOCK, VEC)
                mask = held & (slot < limit)
                number = tl.load(z_ptr + column, mask=mask, other=0.0)
                if KEYS:
                    tl.store(list_ptr + slot, rank_key(number, bias_ptr, scale_ptr, column, N, SHIFT, ABS), mask=mask)
                else:
                    tl.store(list_ptr + slot, add_bias(number, bias_ptr, column, column < N), mask=mask)
                tl.store(columns_ptr + slot, column, mask=mask)
                slot += held.to(tl.int32)
        z = following
    return count


@triton.jit
def count_above(keys, list_ptr, count, key, LIST: tl.constexpr):
    """How many keys exceed `key`: of those in registers, and of a list from its slot LIST on."""
    total = tl.sum((keys > key).to(tl.int32))
    for first in range(LIST, count, LIST):
        slots = first + tl.arange(0, LIST)
        total += tl.sum((tl.load(list_ptr + slots, mask=slots < count, other=0) > key).to(tl.int32))
    return total


@triton.jit
def kth_largest(keys, list_ptr, count, k, bound, LIST: tl.constexpr):
    """The smallest key from `bound` on that fewer than k keys exceed: the k-th largest, unless it is below `bound`."""
    low = tl.zeros([], tl.int32) + bound
    high = tl.max(keys)
    if count > LIST:
        high = tl.full([], NAN_KEY, tl.int32)
    while low < high:
        middle = low + (high - low) // 2
        if count_above(keys, list_ptr, count, middle, LIST) >= k:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit
def group_maxima(
    z_ptr, bias_ptr, scale_ptr, N, BLOCK: tl.constexpr, VEC: tl.constexpr, SHIFT: tl.constexpr,
    ABS: tl.constexpr = False,
):  # fmt: skip
    """The largest key among the columns that are equal modulo BLOCK, as [BLOCK / VEC, VEC]."""
    columns = chunk_columns(0, BLOCK, VEC)
    z = load_pre(z_ptr, columns, N)
    largest = tl.zeros([BLOCK // VEC, VEC], tl.int32)
    for start in range(0, N, BLOCK):
        columns = chunk_columns(start, BLOCK, VEC)
        following = load_pre(z_ptr, columns + BLOCK, N)
        largest = tl.maximum(largest, rank_key(z, bias_ptr, scale_ptr, columns, N, SHIFT, ABS))
        z = following
    return largest


@triton.jit
def emit_largest(
    z_ptr, bias_ptr, scale_ptr, list_ptr, columns_ptr, own_ptr, count, kth, need, values_ptr, indices_ptr, N, capacity,
    LIST: tl.constexpr, SHIFT: tl.constexpr, ABS: tl.constexpr = False,
):  # fmt: skip
    """Writes the elements with listed keys above kth, and the first `need` that equal it, as entries, up to `capacity`;
    how many there are. With a scale their own keys are listed at `own_ptr`, or they are read from z again, as with ABS,
    whose keys have no sign."""
    slots = tl.arange(0, LIST)
    held = 0
    seen = 0
    for first in range(0, count, LIST):
        key = tl.load(list_ptr + first + slots, mask=first + slots < count, other=0)
        column = tl.load(columns_ptr + first + slots, mask=first + slots < count, other=0)
        tie = (key == kth).to(tl.int32)
        keep = ((key > kth) | ((tie != 0) & (seen + tl.cumsum(tie, axis=0) <= need))).to(tl.int32)
        slot = held + tl.cumsum(keep, axis=0) - keep
        room = (keep != 0) & (slot < capacity)
        if ABS:
            value = add_bias(tl.load(z_ptr + column, mask=room, other=0.0), bias_ptr, column, column < N)
        elif scale_ptr is None:
            value = (key << SHIFT).to(tl.float32, bitcast=True)
        elif own_ptr is not None:
            own = tl.load(own_ptr + first + slots, mask=room, other=0)
            value = (own << SHIFT).to(tl.float32, bitcast=True)
        else:
            value = add_bias(tl.load(z_ptr + column, mask=room, other=0.0), bias_ptr, column, column < N)
        tl.store(values_ptr + slot, value, mask=room)
        tl.store(indices_ptr + slot, column, mask=room)
        held += tl.sum(keep, axis=0)
        seen += tl.sum(tie, axis=0)
    return held


@triton.jit
def settle_row(
    row, z_ptr, bias_ptr, scale_ptr, list_ptr, values_ptr, indices_ptr, N, k, length,
    BLOCK: tl.constexpr, VEC: tl.constexpr, LIST: tl.constexpr, SHIFT: tl.constexpr, ABS: tl.constexpr,
):  # fmt: skip
    """`_row_topk_kernel` for one row -> how many entries it has."""
    z_row = z_ptr + row * N
    largest = group_maxima(z_row, bias_ptr, scale_ptr, N, BLOCK, VEC, SHIFT, ABS)
    bound = kth_largest(largest, list_ptr, 0, k, 0, LIST)
    # Of the elements that equal the bound no more than the first k can be wanted.
    floor = tl.maximum(bound, 1)
    count = list_largest(
        z_row, bias_ptr, scale_ptr, floor, k, list_ptr, list_ptr + length, N, length, BLOCK, VEC, SHIFT, True, ABS
    )
    # The list is read by other threads than those that wrote it.
    tl.debug_barrier()
    slots = tl.arange(0, LIST)
    keys = tl.load(list_ptr + slots, mask=slots < count, other=0)
    kth = tl.maximum(kth_largest(keys, list_ptr, count, k, bound, LIST), 1)
    need = k - count_above(keys, list_ptr, count, kth, LIST)
    held = emit_largest(
        z_row, bias_ptr, scale_ptr, list_ptr, list_ptr + length, None, count, kth, need, values_ptr + row * k,
        indices_ptr + row * k, N, k, LIST, SHIFT, ABS,
    )  # fmt: skip
    clear_slots(values_ptr + row * k, indices_ptr + row * k, held, k, 256, 256)
    tl.debug_barrier()
    return held


@launch.kernel
def _row_topk_kernel(
    z_ptr, bias_ptr, scale_ptr, some_ptr, list_ptr, values_ptr, indices_ptr, spans_ptr, l0_ptr, M, N, k, length,
    stride_s, first, BLOCK: tl.constexpr, VEC: tl.constexpr, LIST: tl.constexpr, SHIFT: tl.constexpr,
    ABS: tl.constexpr,
):  # fmt: skip
    """Program p takes rows p, p + programs, ...: rows in flight, and their lists, fit the L2. It writes the rows'
    entries, k slots a row, of which the first is that of row `first` of all.

    A list is `length` keys, and then as many columns. With `some_ptr` only rows where that is not 0 are done.
    """
    list_ptr += tl.program_id(0).to(tl.int64) * 2 * length
    row = tl.program_id(0).to(tl.int64)
    while row < M:
        wanted = True
        if some_ptr is not None:
            wanted = tl.load(some_ptr + row) != 0
        if wanted:
            held = settle_row(
                row, z_ptr, bias_ptr, scale_ptr, list_ptr, values_ptr, indices_ptr, N, k, length, BLOCK, VEC, LIST,
                SHIFT, ABS,
            )  # fmt: skip
            tl.store(spans_ptr + row, (row + first) * k)
            tl.store(spans_ptr + stride_s + row, held.to(tl.int64))
            tl.store(l0_ptr + row, held)
        row += tl.num_programs(0)


def _tile(z: Tensor, block: int, warps: int) -> launch.Tile:
    """Reduced for short rows."""
    sizes = scan_tile(z.shape[1], z.element_size(), block * z.element_size() // 16)
    return launch.Tile({**sizes, "SHIFT": SHIFT[z.dtype]}, max(1, warps * sizes["BLOCK"] // block))


def row_topk(
    z: Tensor, bias: Tensor | None, k: int, scale: Tensor | None = None, absolute: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(values [M * k], indices [M * k], spans [2, M], l0 [M] in float32) of each row's k largest elements above 0, or
    with `absolute` the k farthest from 0.

    z is contiguous [M, N] with M, N, k > 0; bias [N] is added to it, and the ranks are those of that times scale [N].
    """
    m = z.shape[0]
    out = (*empty_slots(z, m, m * k), torch.empty(m, dtype=torch.float32, device=z.device))
    largest_of_rows(z, bias, scale, k, out, absolute=absolute)
    return out


def largest_of_rows(
    z: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    k: int,
    results: tuple[Tensor, ...],
    some: Tensor | None = None,
    first: int = 0,
    absolute: bool = False,
) -> None:
    """Fills values, indices, spans and l0 of the rows of z, those from row `first` of all on."""
    m, n = z.shape
    programs = 4 * tuning.programs(z.device)
    if m <= programs // 2:
        # Rows that do not fill the GPU get more threads each.
        tile = _tile(z, 8192, 32)
    elif k <= 512:
        tile = _tile(z, 2048, 4)
    else:
        # More entries want a tighter bound, and that more groups.
        tile = _tile(z, 4096, 8)
        programs //= 2
    programs = min(m, programs)
    # Fewer than k groups exceed the bound. With fewer than k groups there is none, and everything may be listed.
    block = tile.sizes["BLOCK"]
    length = n if k > block else min(n, (k - 1) * launch.cdiv(n, block) + k)
    meta = {**tile.sizes, "LIST": max(256, min(launch.next_power_of_2(2 * k), 4096)), "ABS": absolute}
    lists = torch.empty(programs, 2, length, dtype=torch.int32, device=z.device)
    args = (z, bias, scale, some, lists, *results, m, n, k, length, results[2].stride(0), first)
    _row_topk_kernel((programs, 1, 1), args, meta, **tile.options)


EXAMPLES = {_row_topk_kernel: {"some_ptr": "*i64", "BLOCK": 2048, "VEC": 8, "LIST": 256, "SHIFT": 16, "ABS": False}}
