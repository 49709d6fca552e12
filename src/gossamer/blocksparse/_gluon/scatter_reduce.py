"""Elements put along rows where indices say, on Hopper: a warp a row, whose result stands in shared memory.

A row's result in float32, `LENGTH` numbers, is the program's shared memory: sums there never leave the SM, where
results kept in global memory send a sector to the second cache for each entry. A program walks its row, 128 entries a
step of which a thread has four side by side, and the next three steps are on their way meanwhile. A thread's first
entries are added at once, then its second ones: 32 numbers, of which two may have one place. That is found out by a tag
that each writes to its place and reads again, and then one thread adds what all have, in a fixed order. Nothing is
atomic.

Reading and writing at addresses of a thread's own is not in Gluon of Triton 3.6: it is written in PTX, at the symbol by
which Triton names a kernel's shared memory. There is no other allocation, so its one begins there.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gossamer._core import launch, tuning
from gossamer.blocksparse._gluon.attention import thread_barrier
from gossamer.blocksparse.lists import Lists
from gossamer.blocksparse.records import BlocksparseScatterReduce

ENTRIES = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [1, 1], [1, 0]))
"""Of a step: a row a thread."""
STEP = gl.constexpr(128)
ROOM, RESIDENT = 227 << 10, 32
"""Bytes of shared memory, and programs, of an SM."""
OPERATIONS = {"sum": "add.f32", "prod": "mul.f32", "amax": "max.NaN.f32", "amin": "min.NaN.f32"}
NEUTRAL = {"sum": 0.0, "prod": 1.0, "amax": float("-inf"), "amin": float("inf")}
TAGS = 4096
"""Tags of a row at most. Of 32 places two have one in an eighth of the steps, which then look at the places themselves;
more tags would leave an SM room for fewer rows."""


@gluon.jit
def shared_base(lane):
    """Where shared memory begins, for each thread."""
    return gl.inline_asm_elementwise("mov.u32 $0, global_smem;", "=r,r", [lane], gl.int32, True, 1)


@gluon.jit
def clear(address):
    """Zeros for four numbers from an address on."""
    code: gl.constexpr = "{ .reg .b32 z; mov.b32 z, 0; st.shared.v4.b32 [$1], {z, z, z, z}; mov.b32 $0, 0; }"
    gl.inline_asm_elementwise(code, "=r,r", [address], gl.int32, False, 1)


@gluon.jit
def place(address, x):
    """Writes x; nothing at negative addresses."""
    code: gl.constexpr = "{ .reg .pred p; setp.ge.s32 p, $1, 0; @p st.shared.f32 [$1], $2; mov.b32 $0, 0; }"
    gl.inline_asm_elementwise(code, "=r,r,f", [address, x], gl.int32, False, 1)


@gluon.jit
def taken(address):
    """Four numbers side by side."""
    code: gl.constexpr = "bar.warp.sync 0xffffffff; ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];"
    return gl.inline_asm_elementwise(code, "=f,=f,=f,=f,r,r,r,r", [address], gl.float32, False, 4)


@gluon.jit
def others(address, tag_address):
    """0 for all threads where no two have one place: the last to write a tag is known to one of two alone."""
    code: gl.constexpr = """
        {
        .reg .pred p;
        .reg .b32 lane, tag;
        setp.ge.s32 p, $1, 0;
        mov.u32 lane, %laneid;
        mov.b32 tag, lane;
        @p st.shared.u8 [$2], lane;
        bar.warp.sync 0xffffffff;
        @p ld.shared.u8 tag, [$2];
        bar.warp.sync 0xffffffff;
        xor.b32 $0, tag, lane;
        }
        """
    return gl.inline_asm_elementwise(code, "=r,r,r", [address, tag_address], gl.int32, False, 1)


@gluon.constexpr_function
def _code(OP):
    """Joins x with what stands at the addresses. Threads that have one place each know the next one of them, and join
    what that has joined, then what the one behind that has: after five rounds at most the first of them has all."""
    return f"""
        {{
        .reg .pred more, any, own;
        .reg .b32 mask, rest, at;
        .reg .f32 total, v;
        setp.ge.s32 own, $1, 0;
        mov.f32 total, $2;
        setp.ne.u32 more, $3, 0;
        vote.sync.any.pred any, more, 0xffffffff;
        @!any bra ALONE;
        mov.u32 at, %laneid;
        or.b32 at, at, 0x80000000;
        @own mov.b32 at, $1;
        match.any.sync.b32 mask, at, 0xffffffff;
        mov.u32 rest, %lanemask_lt;
        and.b32 rest, rest, mask;
        setp.eq.and.u32 own, rest, 0, own;
        mov.u32 rest, %lanemask_gt;
        and.b32 rest, rest, mask;
        brev.b32 at, rest;
        clz.b32 at, at;
        setp.ne.u32 more, rest, 0;
        @!more mov.b32 at, -1;
        AGAIN:
        shfl.sync.idx.b32 v, total, at, 31, 0xffffffff;
        shfl.sync.idx.b32 rest, at, at, 31, 0xffffffff;
        @more {OP} total, total, v;
        @more mov.b32 at, rest;
        setp.ge.and.s32 more, at, 0, more;
        vote.sync.any.pred any, more, 0xffffffff;
        @any bra AGAIN;
        ALONE:
        @own ld.shared.f32 v, [$1];
        @own {OP} v, v, total;
        @own st.shared.f32 [$1], v;
        bar.warp.sync 0xffffffff;
        mov.b32 $0, 0;
        }}
        """


@gluon.jit
def join(address, x, shared, OP: gl.constexpr):
    code: gl.constexpr = _code(OP)
    gl.inline_asm_elementwise(code, "=r,r,f,r", [address, x, shared], gl.int32, False, 1)


@gluon.jit
def positions(others_ptr, begin, first, total, line, SPAN: gl.constexpr, AREA: gl.constexpr):
    """(place in a row, place in the values, which exist) of a step's entries, the blocks of a row laid end to end."""
    at = first + 4 * gl.arange(0, 32, layout=gl.SliceLayout(1, ENTRIES))
    exists = at < total
    block = begin + at // SPAN
    other = gl.load(others_ptr + block, mask=exists, other=0)
    j = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, ENTRIES)), 0)
    column = gl.expand_dims(other * SPAN + at % SPAN, 1) + j
    value = gl.expand_dims(block.to(gl.int64) * AREA + line * SPAN + at % SPAN, 1) + j
    return column, value, gl.expand_dims(exists, 1) & (j >= 0)


@gluon.jit
def entries(lists, begin, first, total, line, neutral, SPAN: gl.constexpr, AREA: gl.constexpr):
    """(indices, elements of src, columns) of a step, as they are in memory; behind the last there are none."""
    index_ptr, src_ptr, others_ptr = lists
    column, value, exists = positions(others_ptr, begin, first, total, line, SPAN, AREA)
    target = gl.load(index_ptr + value, mask=exists, other=-1, eviction_policy="evict_first")
    if src_ptr is not None:
        x = gl.load(src_ptr + value, mask=exists, other=0, eviction_policy="evict_first")
    else:
        x = gl.full([32, 4], neutral, gl.float32, ENTRIES)
    return target, x, column


@gluon.jit
def put(base, entry, limit, bound, SIZE: gl.constexpr, OP: gl.constexpr):
    """Joins a step's entries with the result; `OP` "reset" writes them."""
    target, x, column = entry
    found = (target >= 0) & (target < bound) & (column < limit)
    target = target.to(gl.int32)
    base = gl.expand_dims(base, 1)
    address = gl.where(found, base + 4 * target, -1)
    if OP == "reset":
        place(address, x)
    else:
        tags = base + 4 * SIZE[0] + (target & (SIZE[1] - 1))
        join(address, x.to(gl.float32), others(address, tags), OP)


@gluon.jit
def walk(
    base, lists, begin, total, line, limit, bound, neutral,
    SPAN: gl.constexpr, AREA: gl.constexpr, SIZE: gl.constexpr, OP: gl.constexpr,
):  # fmt: skip
    """All entries of a row. Steps that are on their way are in registers of their own: to hand them on would wait."""
    entry0 = entries(lists, begin, 0, total, line, neutral, SPAN, AREA)
    entry1 = entries(lists, begin, STEP, total, line, neutral, SPAN, AREA)
    entry2 = entries(lists, begin, 2 * STEP, total, line, neutral, SPAN, AREA)
    entry3 = entries(lists, begin, 3 * STEP, total, line, neutral, SPAN, AREA)
    for first in range(0, total, 4 * STEP):
        put(base, entry0, limit, bound, SIZE, OP)
        entry0 = entries(lists, begin, first + 4 * STEP, total, line, neutral, SPAN, AREA)
        put(base, entry1, limit, bound, SIZE, OP)
        entry1 = entries(lists, begin, first + 5 * STEP, total, line, neutral, SPAN, AREA)
        put(base, entry2, limit, bound, SIZE, OP)
        entry2 = entries(lists, begin, first + 6 * STEP, total, line, neutral, SPAN, AREA)
        put(base, entry3, limit, bound, SIZE, OP)
        entry3 = entries(lists, begin, first + 7 * STEP, total, line, neutral, SPAN, AREA)


@gluon.jit
def fill_behind(out_ptr, lane, total, capacity, overflowed, AREA: gl.constexpr):
    """Zeros behind the last block; NaN everywhere where a layout has more blocks than room."""
    blank = gl.where(overflowed, float("nan"), 0.0) + gl.zeros([32, 4], gl.float32, ENTRIES)
    first = gl.where(overflowed, 0, total).to(gl.int64) * (AREA // 128)
    for at in range(first + gl.program_id(0), capacity.to(gl.int64) * (AREA // 128), gl.num_programs(0)):
        gl.store(out_ptr + at * 128 + lane, blank.to(out_ptr.dtype.element_ty))


@launch.Kernel
@gluon.jit(do_not_specialize=["groups", "capacity", "index_capacity"])
def _scatter_rows_kernel(
    out_ptr, given_ptr, src_ptr, index_ptr, out_offsets_ptr, out_others_ptr, offsets_ptr, others_ptr,
    groups, COUNT, BOUND, M_INDEX, N_INDEX, capacity, index_capacity, neutral,
    BLOCK: gl.constexpr, SIZE: gl.constexpr, OP: gl.constexpr, RESET: gl.constexpr,
):  # fmt: skip
    """Program (every so many of the rows of all matrices, COUNT rows of blocks each). BLOCK is the blocks' height and
    width, SIZE (numbers kept of a row, tags). Offsets and others list the blocks of rows, of the result and of index:
    where each begins, and the column of each."""
    HEIGHT: gl.constexpr = BLOCK[0]
    SPAN: gl.constexpr = BLOCK[1]
    AREA: gl.constexpr = HEIGHT * SPAN
    LENGTH: gl.constexpr = SIZE[0]
    rows_index = (M_INDEX + HEIGHT - 1) // HEIGHT
    total = gl.load(out_offsets_ptr + groups // HEIGHT)
    overflowed = total > capacity
    overflowed |= gl.load(offsets_ptr + groups // HEIGHT // COUNT * rows_index) > index_capacity
    smem = gl.allocate_shared_memory(
        gl.float32, [(4 * LENGTH + SIZE[1]) // 512, 1, 128], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    # Memory that nobody uses is not allocated.
    smem.index(0).store(gl.zeros([1, 128], gl.float32, gl.BlockedLayout([1, 4], [1, 32], [1, 1], [1, 0])))
    thread = gl.arange(0, 32, layout=gl.SliceLayout(1, ENTRIES))
    base = shared_base(thread)
    lane = gl.expand_dims(4 * thread, 1) + gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, ENTRIES)), 0)
    for group in range(gl.program_id(0), gl.where(overflowed, 0, groups), gl.num_programs(0)):
        row = group // HEIGHT
        line = group % HEIGHT
        for first in range(0, LENGTH, STEP):
            clear(base + 4 * first + 16 * thread)
        thread_barrier()
        begin_out = gl.load(out_offsets_ptr + row)
        total_out = (gl.load(out_offsets_ptr + row + 1) - begin_out) * SPAN
        if given_ptr is not None:
            for first in range(0, total_out, STEP):
                column, value, exists = positions(out_others_ptr, begin_out, first, total_out, line, SPAN, AREA)
                x = gl.load(given_ptr + value, mask=exists, other=0).to(gl.float32)
                place(gl.where(exists, gl.expand_dims(base, 1) + 4 * column, -1), x)

        at_row = row // COUNT * rows_index + row % COUNT
        listed = (row % COUNT < rows_index) & (row % COUNT * HEIGHT + line < M_INDEX)
        begin = gl.load(offsets_ptr + at_row, mask=listed, other=0)
        total_in = (gl.load(offsets_ptr + at_row + 1, mask=listed, other=0) - begin) * SPAN
        lists = (index_ptr, src_ptr, others_ptr)
        if RESET:
            only = (index_ptr, None, others_ptr)
            walk(base, only, begin, total_in, line, N_INDEX, BOUND, neutral, SPAN, AREA, SIZE, "reset")
        walk(base, lists, begin, total_in, line, N_INDEX, BOUND, neutral, SPAN, AREA, SIZE, OP)

        thread_barrier()
        for first in range(0, total_out, STEP):
            column, value, exists = positions(out_others_ptr, begin_out, first, total_out, line, SPAN, AREA)
            x = taken(gl.expand_dims(base, 1) + 4 * column)
            gl.store(out_ptr + value, x.to(out_ptr.dtype.element_ty), mask=exists)
        thread_barrier()
    fill_behind(out_ptr, lane, total, capacity, overflowed, AREA)


def size_of(bound: int, width: int) -> tuple[int, int]:
    """(numbers kept of a row of so many columns in blocks of `width`, tags), in steps of an eighth: a kernel each."""
    least = max(launch.cdiv(bound, width) * width, STEP.value)
    unit = max(STEP.value, launch.next_power_of_2(least) // 16)
    return launch.cdiv(least, unit) * unit, min(TAGS, max(512, launch.next_power_of_2(least)))


def scatter_rows(call: BlocksparseScatterReduce, out: Tensor, reset: bool) -> None:
    """Puts elements along rows; with `reset` the elements of `given` take no part where there are entries."""
    lists, names = Lists(call.layout, call.form), Lists(call.index_layout, call.index_form)
    (index_capacity, height, width), form = call.index.shape, lists.form
    size = size_of(form.n, width)
    resident = min(RESIDENT, (ROOM + 1024) // (4 * size[0] + size[1] + 1024))
    groups = (lists.row_offsets.shape[0] - 1) * height
    programs = max(1, min(groups, resident * tuning.programs(out.device)))
    args = (
        out, call.given, call.src, call.index, lists.row_offsets, lists.col_indices, names.row_offsets,
        names.col_indices, groups, max(form.rows, 1), form.n, names.form.m, names.form.n, out.shape[0], index_capacity,
        NEUTRAL[call.reduce],
    )  # fmt: skip
    meta = {"BLOCK": (height, width), "SIZE": size, "OP": OPERATIONS[call.reduce], "RESET": reset}
    _scatter_rows_kernel((programs, 1, 1), args, meta, num_warps=1)


EXAMPLES = {
    _scatter_rows_kernel: {
        "given_ptr": None, "BLOCK": (64, 64), "SIZE": (8192, TAGS), "OP": OPERATIONS["sum"], "RESET": False,
        "num_warps": 1,
    },
}  # fmt: skip
