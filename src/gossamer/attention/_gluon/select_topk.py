"""Scores of the indexer as keys, on Hopper: as `_triton/select_topk._index_keys_kernel` computes them, bit by bit.

That kernel is bound by one `tanh` a head and key, yet took 1.8 times as long: behind every product it waits for the
tensor cores, four times a tile. Here a head's product is at work while the tanh of the head before it are taken, and
the first of the next tile's while a tile is stored. Products are written in turns to two sets of registers, which is
why there must be an even number of heads. The copy engine brings the tiles of keys into a ring.

Of long rows only keys that reach a bound are wanted (`_triton/candidates.py`). A thread lists those that it holds, from
registers: some six instructions a key, most of which go beside the tanh. At 131,072 keys that took 16.1 ms, sample
included, where to store every key took 13.1 (H100).
"""

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gossamer._core import launch, tuning
from gossamer.attention import levels

thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.7, 3.6
LEVELS, CLOSED = gl.constexpr(levels.LEVELS), gl.constexpr(levels.CLOSED)
ZERO, TINY = gl.constexpr(levels.ZERO), gl.constexpr(levels.TINY)
FIRST_BITS, STEP_BITS = gl.constexpr(levels.FIRST_BITS), gl.constexpr(levels.STEP_BITS)
WHOLE = gl.constexpr(0x4B000000)
"""The bits of 2^23 as a float32, whose low ones a key is."""
KEPT = gl.constexpr(0x4B000000 + 31744)
LAST = gl.constexpr((1 << 17) - 1 - (1 << 31))
GROWTH = gl.constexpr(levels.GROWTH)
ROWS = 64
COLUMNS = 64
STAGES = 3
SHARE, ROUNDS = 3, 4
"""Programs that a multiprocessor holds, of 158 registers a thread and 64 KiB, and how many take turns in each place."""
LAYOUTS = {rank: gl.NVMMASharedLayout(128, 16, rank) for rank in (3, 4)}


@gluon.jit
def activated(x, RELU: gl.constexpr):
    """tanh(x), or relu(x), where the larger of NaN and 0 is NaN."""
    CODE: gl.constexpr = "max.NaN.f32 $0, $1, 0f00000000;" if RELU else "tanh.approx.f32 $0, $1;"
    return gl.inline_asm_elementwise(CODE, "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def gates_of(w_ptr, rows, h, Tq, HEADS: gl.constexpr, RELU: gl.constexpr):
    """sigmoid of a head's weights at queries of one batch element, or with RELU the weights; 0 past the last query."""
    w = gl.load(w_ptr + rows.to(gl.int64) * HEADS + h, mask=rows < Tq, other=0.0 if RELU else float("-inf"))
    return w.to(gl.float32) if RELU else 1.0 / (1.0 + gl.exp(-w.to(gl.float32)))


@gluon.jit
def factors(w_ptr, bias_ptr, rows, Tq, HEADS: gl.constexpr, RELU: gl.constexpr):
    """(the least score of a key, each head's weight, each head's bias), so that tanh takes the place of sigmoid: as
    sigmoid(x) = (1 + tanh(x / 2)) / 2, the constant terms are added once. With RELU weights are divided by the sum of
    their magnitudes alone, and there is no least score."""
    PART: gl.constexpr = 1.0 if RELU else 0.5
    total = gl.zeros_like(rows).to(gl.float32)
    for h in gl.static_range(HEADS):
        total += gl.abs(gates_of(w_ptr, rows, h, Tq, HEADS, RELU))
    # A query all of whose gates are closed scores 0 everywhere.
    norm = gl.where(total < CLOSED, 0.0, (1.0 if RELU else LEVELS) / total) * PART
    weights = ()
    biases = ()
    for h in gl.static_range(HEADS):
        weights = weights + (gl.expand_dims(gates_of(w_ptr, rows, h, Tq, HEADS, RELU) * norm, 1),)
        if bias_ptr is None:
            biases = biases + (0.0,)
        else:
            biases = biases + (gl.load(bias_ptr + h).to(gl.float32) * PART,)
    return gl.expand_dims(gl.zeros_like(total) if RELU else 1.0 + norm * total, 1), weights, biases


@gluon.jit
def key_of(score, RELU: gl.constexpr):
    """A score as `_triton/select_topk.py` stores it, in the low bits of a float32."""
    if RELU:
        bits = score.to(gl.int32, bitcast=True)
        steps = (gl.abs(score) + TINY).to(gl.int32, bitcast=True) - FIRST_BITS
        steps = gl.minimum(steps >> STEP_BITS, ZERO - 1)
        return WHOLE + gl.where(score == score, ZERO + gl.where(bits < 0, -steps, steps), 31743)
    else:
        # The GPU's smaller of NaN and a number is the number. Adding 2^23 rounds to an integer, in the low bits.
        return (gl.minimum(score, 31743.0) + 8388608.0).to(gl.int32, bitcast=True)


@gluon.jit
def barriers(COUNT: gl.constexpr):
    """So many, each for one arrival, ready for all warps."""
    found = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(found.index(i), count=1)
    fence_async_shared()
    thread_barrier()
    return found


@gluon.jit
def fetch(k_desc, ring, ready, step, batch, at, pred, STAGES: gl.constexpr):
    """Asks for the tile of keys of a step."""
    bar = ready.index(step % STAGES)
    mbarrier.expect(bar, k_desc.block_type.nbytes, pred=pred)
    tma.async_copy_global_to_shared(k_desc, [batch, at, 0], bar, ring.index(step % STAGES), pred=pred)


@gluon.jit
def product(queries, ring, h, slot, none):
    """Begins the product of a head's queries and a tile of keys."""
    ROWS: gl.constexpr = queries.shape[3]
    D: gl.constexpr = queries.shape[4]
    COLUMNS: gl.constexpr = ring.shape[2]
    q = queries.index(h).reshape([ROWS, D])
    k = ring.index(slot).reshape([COLUMNS, D])
    return warpgroup_mma(q, k.permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def units(keys, UNIT: gl.constexpr):
    """How many units of UNIT keys hold any of the first ones."""
    return keys if UNIT == 1 else (keys + UNIT - 1) // UNIT


@gluon.jit
def queries_of(lengths_ptr, row, padded, Tq, Tk, ahead):
    """Of a block that begins at a row: the batch element, the first query, its keys, and how many more keys than its
    number a query sees."""
    batch = row // padded
    length = Tk
    if lengths_ptr is not None:
        length = gl.minimum(gl.maximum(gl.load(lengths_ptr + batch).to(gl.int32), 0), Tk)
    return batch, row % padded, length, gl.maximum(length - Tq, 0) + ahead


@gluon.jit
def edge(whole, column, visible, window, sinks):
    """A tile's keys, of which always-kept ones are above all, and 0 behind the visible ones."""
    kept = (column < sinks) | (column >= visible - window)
    return gl.where(column < visible, gl.where(kept, KEPT, whole), 0)


@gluon.jit
def append(at, high, key, low, entry):
    """Writes each thread's entry to the address (at, high) where its key is at least `low`; returns the next `at`."""
    code: gl.constexpr = """{ .reg .pred some; .reg .b64 to;
        mov.b64 to, {$1, $2}; setp.ge.s32 some, $3, $4; @some st.global.b32 [to], $5;
        mov.b32 $0, $1; @some add.s32 $0, $1, 4; }"""
    return gl.inline_asm_elementwise(code, "=&r,r,r,r,r,r", [at, high, key, low, entry], gl.int32, False, 1)


@gluon.jit
def by_thread(x):
    """A tile of 64 columns as 16 tensors [rows, 4], of the columns that a thread holds: piece 8 e + j has at place q
    column 8 j + 2 q + e."""
    ROWS: gl.constexpr = x.shape[0]
    one, other = gl.split(x.reshape([ROWS, 8, 4, 2]))
    found = ()
    for half in gl.static_range(2):
        part = (one, other)[half]
        low, high = gl.split(part.reshape([ROWS, 2, 4, 4]).permute((0, 2, 3, 1)))
        for quarter in gl.static_range(2):
            four = (low, high)[quarter]
            a, b = gl.split(four.reshape([ROWS, 2, 2, 4]).permute((0, 2, 3, 1)))
            for eighth in gl.static_range(2):
                two = (a, b)[eighth]
                first, second = gl.split(two.permute((0, 2, 1)))
                found = found + (first, second)
    return found


@gluon.jit
def thread_lists(lists_ptr, bound_ptr, row, first, part, parts, slots, ROWS: gl.constexpr, layout: gl.constexpr):
    """Of the threads' lists: the number, the address in two halves, the lowest key that is listed, and what an entry of
    a tile's first column ends with. A list lies within an aligned power of two of bytes: its addresses have their upper
    halves in common."""
    rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    place = gl.arange(0, 4, layout=gl.SliceLayout(0, layout))
    zeros = gl.zeros([ROWS, 4], gl.int32, layout)
    number = (gl.expand_dims(rows, 1) * parts + part) * 4 + gl.expand_dims(place, 0)
    address = (lists_ptr + number.to(gl.int64) * slots).to(gl.int64)
    bound = gl.expand_dims(gl.load(bound_ptr + first + rows), 1) + (zeros + WHOLE)
    return (
        number,
        address.to(gl.int32),
        (address >> 32).to(gl.int32),
        bound,
        zeros + (LAST - 2 * gl.expand_dims(place, 0)),
    )


@gluon.jit
def list_tile(lists, at, whole, begin, bound, slots):
    """Appends entries of a tile of scores that begins at column `at`: keys of 15 bits, above 17 that fall as columns
    rise. A list that they may not fit takes no more."""
    _, start, high, _, behind = lists
    bound = gl.where(begin - start > 4 * (slots - GROWTH), 0x7FFFFFFF, bound)
    found = by_thread(whole)
    for i in gl.static_range(GROWTH):
        entry = (found[i] << 17) + (behind - (at + 8 * (i % 8) + i // 8))
        begin = append(begin, high, found[i], bound, entry)
    return begin, bound


@launch.Kernel
@gluon.jit
def _index_keys_kernel(
    q_desc, k_desc, w_ptr, bias_ptr, lengths_ptr, keys_ptr, bound_ptr, counts_ptr, flags_ptr, first, Tq, padded, Tk,
    stride, ahead, window, sinks, scale, HEADS: gl.constexpr, STAGES: gl.constexpr, UNIT: gl.constexpr,
    RELU: gl.constexpr,
):  # fmt: skip
    """Program (part of the keys, block of rows of the slab), the longest rows first; of blocks that are marked, where
    there are marks. `k_desc` has one of UNIT keys. With `bound_ptr`, `keys_ptr` are lists, with always-kept keys."""
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[2]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[1]
    D: gl.constexpr = k_desc.block_type.shape[2]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    queries = gl.allocate_shared_memory(q_desc.dtype, [HEADS, 1, 1, BLOCK_M, D], q_desc.layout)
    ring = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, BLOCK_N, D], k_desc.layout)
    ready = barriers(STAGES + 1)
    block = gl.num_programs(1) - 1 - gl.program_id(1)
    batch, begin, length, offset = queries_of(lengths_ptr, first + block * BLOCK_M, padded, Tq, Tk, ahead)
    # The block's last query sees all keys that any of its queries sees; its first sees the fewest.
    end = units(gl.minimum(gl.minimum(begin + BLOCK_M, Tq) - 1 + offset, length), UNIT)
    least = units(gl.minimum(begin + offset, length), UNIT)
    part, parts = gl.program_id(0), gl.num_programs(0)
    steps = gl.maximum((end + BLOCK_N - 1) // BLOCK_N - part + parts - 1, 0) // parts
    if flags_ptr is not None:
        steps = gl.where(gl.load(flags_ptr + first // BLOCK_M + block) != 0, steps, 0)
    if bound_ptr is not None:
        slots = stride // (4 * parts)
        piece: gl.constexpr = by_thread(gl.zeros([BLOCK_M, BLOCK_N], gl.int32, scores))[0].type.layout
        lists = thread_lists(keys_ptr, bound_ptr, block * BLOCK_M, first, part, parts, slots, BLOCK_M, piece)
        address, bound = lists[1], lists[3]
    if steps > 0:
        bar = ready.index(STAGES)
        mbarrier.expect(bar, HEADS * q_desc.block_type.nbytes)
        for h in gl.static_range(HEADS):
            tma.async_copy_global_to_shared(q_desc, [batch, h, begin, 0], bar, queries.index(h))
        # One tile more than there are: the product that is begun last is of no use, and reads something all the same.
        for i in gl.static_range(STAGES):
            fetch(k_desc, ring, ready, i, batch, (part + i * parts) * BLOCK_N, i <= steps, STAGES)
        rows = begin + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, scores))
        visible = gl.where(rows < Tq, units(gl.minimum(rows + offset, length), UNIT), 0)
        lowest, weights, biases = factors(w_ptr + batch.to(gl.int64) * Tq * HEADS, bias_ptr, rows, Tq, HEADS, RELU)
        scale *= 1.0 if RELU else 0.5
        none = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores)
        column = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, scores))
        if bound_ptr is None:
            line = (block * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, stored))).to(gl.int64) * stride
            out = keys_ptr + gl.expand_dims(line, 1)
            out += gl.expand_dims(gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, stored)), 0)
        mbarrier.wait(bar, 0)
        mbarrier.wait(ready.index(0), 0)
        x = product(queries, ring, 0, 0, none)
        for step in range(0, steps):
            at = (part + step * parts) * BLOCK_N
            score = none + lowest
            for h in gl.static_range(HEADS):
                found, score = warpgroup_mma_wait(0, deps=(x, score))
                if h + 1 < HEADS:
                    x = product(queries, ring, h + 1, step % STAGES, none)
                else:
                    mbarrier.wait(ready.index((step + 1) % STAGES), (step + 1) // STAGES & 1)
                    x = product(queries, ring, 0, (step + 1) % STAGES, none)
                score = score + weights[h] * activated(found * scale + biases[h], RELU)
            whole = key_of(score, RELU)
            if bound_ptr is None:
                key = whole.to(gl.int16)
                if at + BLOCK_N > least:
                    key = gl.where(gl.expand_dims(at + column, 0) < gl.expand_dims(visible, 1), key, 0).to(gl.int16)
                gl.store(out + at, gl.convert_layout(key, stored))
            else:
                if (at + BLOCK_N > least - window) | (at < sinks):
                    whole = edge(whole, gl.expand_dims(at + column, 0), gl.expand_dims(visible, 1), window, sinks)
                address, bound = list_tile(lists, at, whole, address, bound, slots)
            # Every warp has read these keys.
            thread_barrier()
            fetch(
                k_desc, ring, ready, step, batch, at + STAGES * parts * BLOCK_N, step + STAGES <= steps, STAGES
            )  # fmt: skip
        x = warpgroup_mma_wait(0, deps=(x,))
    if bound_ptr is not None:
        count = (address - lists[1]) // 4
        gl.store(counts_ptr + lists[0], gl.where(count > slots - GROWTH, slots, count))


def readable(q: Tensor, k: Tensor) -> bool:
    """Whether q `[B, Hi, Tq, Di]` and k `[B, Tk, Di]` suit the kernel: an even number of heads of 64 or 128,
    in 16 bits, whose tiles leave room for three programs, and whose rows begin at 16 bytes, for the copy engine."""
    heads, d = q.shape[1], q.shape[3]
    if q.element_size() != 2 or d not in (64, 128) or heads % 2 or not 0 < heads * d <= 512:
        return False
    strides = (*q.stride()[:3], *k.stride()[:2])
    united = q.data_ptr() | k.data_ptr()
    for stride in strides:
        united |= 2 * stride
    return united % 16 == 0 and min(strides) > 0 and q.stride(3) == k.stride(2) == 1


def descriptors(q: Tensor, k: Tensor) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Descriptors by which the copy engine reads a head's queries and the keys; rows outside read as 0."""
    return _descriptor(q, ROWS), _descriptor(k, COLUMNS)


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    block = [*[1] * (x.dim() - 2), rows, x.shape[-1]]
    found = TensorDescriptor(x, list(x.shape), list(x.stride()), block, LAYOUTS[x.dim()])
    # A launch's key of the descriptor: to look into a layout takes longer than all other parts of the key.
    vars(found)["kind"] = x.dtype, *block
    return found


class Sparing(NamedTuple):
    """Work that a launch spares: rows in blocks without a mark, all but one key of a unit, keys below a bound. Other
    keys are listed, in `parts`, and counted; keys of window and sinks reach any bound."""

    flags: Tensor | None = None
    unit: int = 1
    bound: Tensor | None = None
    counts: Tensor | None = None
    parts: int = 0
    kept: tuple[int, int] = (0, 0)


def launch_index_keys(
    tiles: tuple[TensorDescriptor, TensorDescriptor],
    given: tuple[Tensor | None, ...],
    rows: int,
    sizes: tuple[int, ...],
    scale: float,
    activation: str,
    sparing: Sparing,
) -> None:
    """Fills the keys of a slab of so many rows, or their lists; `given` are w, bias, lengths and keys or lists, `sizes`
    first, Tq, padded, Tk, stride and ahead."""
    q = tiles[0].base
    blocks = rows // ROWS
    # No more than fill the last round: a program beyond it would run alone, while all others wait.
    most = ROUNDS * SHARE * tuning.programs(q.device) // blocks
    parts = sparing.parts or max(1, min(launch.cdiv(sizes[4], COLUMNS), most))
    meta = {"HEADS": q.shape[1], "STAGES": STAGES, "UNIT": sparing.unit, "RELU": activation == "relu"}
    args = (*tiles, *given, sparing.bound, sparing.counts, sparing.flags, *sizes, *sparing.kept, scale)
    _index_keys_kernel((parts, blocks, 1), args, meta, num_warps=4)


EXAMPLES = {
    _index_keys_kernel: {
        "q_desc": [1, 1, ROWS, 64], "k_desc": [1, COLUMNS, 64], "lengths_ptr": None, "keys_ptr": "*i32",
        "flags_ptr": None, "HEADS": 4, "STAGES": STAGES, "UNIT": 1, "RELU": False,
    },
}  # fmt: skip
