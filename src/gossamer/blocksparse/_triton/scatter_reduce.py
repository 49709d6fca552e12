"""Elements put where indices say, in a fixed order and without atomics.

Along rows no line of a matrix meets another: the elements of row i go to row i. A program takes LINES rows at a time
and keeps their results by place in memory of its own, in float32 for 16-bit sums and products: programs are as few as
leave these in the first cache, where the next step finds the last one's sums. It walks the entries of its rows from the
first to the last block, STEP entries of each a step; those of the next steps are on their way, as only the places wait
for each other. Entries of one step that have the same place are joined in registers, by comparing each with each, and
added to the result there; all of them write the one result. A barrier before the writes, for all must have read, and
one behind them: nothing depends on timing. In the end the result's present blocks are rounded and written, and were set
before: an element that goes elsewhere is lost. With `RESET` a first walk puts the reduction's neutral number where
there are entries, so that the earlier numbers there are left out.

Rows of floats on Hopper have `_gluon.scatter_reduce`: here each entry's result crosses the second cache again, and few
rows fit the first one. Columns are rows of transposed blocks, whose indices are narrowed on the way, to half of the
bytes.

Along a leading dimension a line is the elements at one place in matrices that follow each other: a program owns a tile
of one cell of the grid and walks the matrices; nothing repeats within a step. There 16-bit sums and products are kept
in a float32 buffer.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer.blocksparse._triton.gather import located
from gossamer.blocksparse._triton.tensor import fill_behind, plain
from gossamer.blocksparse._triton.transpose import turn_blocks
from gossamer.blocksparse.indexed import choose_path
from gossamer.blocksparse.lists import Lists
from gossamer.blocksparse.lists import lost as lost_value
from gossamer.blocksparse.records import BlocksparseScatterReduce, Direction

STEP, ROOM = 32, 192 << 10
"""Entries of a program, which is a warp, a step; bytes that a multiprocessor's programs keep."""
ELEMENTS = 1024
"""Elements of a tile of whole blocks, where lines are not walked."""


@triton.jit
def joined(a, b, REDUCE: tl.constexpr):
    """Two numbers as one; NaN stays."""
    if REDUCE == "prod":
        return a * b
    elif REDUCE == "amax":
        return tl.where((a > b) | (a != a), a, b)
    elif REDUCE == "amin":
        return tl.where((a < b) | (a != a), a, b)
    elif REDUCE == "sum":
        return a + b
    else:
        return b


@triton.jit
def neutral(dtype: tl.constexpr, REDUCE: tl.constexpr):
    """The number that a reduction does not see."""
    if REDUCE == "prod":
        return 1
    elif REDUCE == "sum":
        return 0
    elif dtype.is_floating():
        return float("-inf") if REDUCE == "amax" else float("inf")
    elif dtype.is_int_signed():
        least = -(1 << (dtype.primitive_bitwidth - 1))
        return least if REDUCE == "amax" else -1 - least
    else:
        return 0 if REDUCE == "amax" else (1 << dtype.primitive_bitwidth) - 1


@triton.jit
def _product(a, b):
    return a * b


@triton.jit
def _greater(a, b):
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def _less(a, b):
    return tl.where((a < b) | (a != a), a, b)


@triton.jit
def reduced(x, REDUCE: tl.constexpr):
    """Over the second of three dimensions, which a thread holds in registers; NaN stays."""
    if REDUCE == "prod":
        return tl.reduce(x, 1, _product)
    elif REDUCE == "amax":
        return tl.reduce(x, 1, _greater)
    elif REDUCE == "amin":
        return tl.reduce(x, 1, _less)
    else:
        return tl.sum(x, 1).to(x.dtype)


@triton.jit
def entries(lists, begin, step, steps, at, STEPS: tl.constexpr, STRIDE: tl.constexpr, AREA: tl.constexpr):
    """(indices, elements of src, the block's other place) of one step, as they are in memory; `at` is where the first
    step of a block has its entries. Behind the last step there are none."""
    index_ptr, src_ptr, others_ptr = lists
    exists = step < steps
    block = begin + step // STEPS
    other = tl.load(others_ptr + block, mask=exists, other=0)
    at += block.to(tl.int64) * AREA + step % STEPS * STRIDE
    target = tl.load(index_ptr + at, mask=exists, other=-1, eviction_policy="evict_first")
    if src_ptr is not None:
        x = tl.load(src_ptr + at, mask=exists, other=0, eviction_policy="evict_first")
    else:
        x = tl.full(at.shape, 1, tl.int32)
    return target, x, other


@triton.jit
def places(others_ptr, begin, end, first, line, SPAN: tl.constexpr, ACROSS: tl.constexpr, CHUNK: tl.constexpr):
    """(places in what a program keeps, places in the result, which of them are) of CHUNK elements of its rows, from
    the first on: the blocks of the result's list laid end to end, SPAN elements of each."""
    at = first + tl.arange(0, CHUNK)
    exists = begin + at // SPAN < end
    block = begin + at // SPAN
    other = tl.load(others_ptr + block, mask=exists, other=0)
    # Neighbours within a block, whose sizes are multiples of 16.
    target = tl.max_contiguous(tl.multiple_of(other * SPAN + at % SPAN, 16), 16)
    own = tl.arange(0, line.shape[0])[:, None]
    place = (block.to(tl.int64) * (SPAN * ACROSS))[None, :] + (line[:, None] * SPAN + (at % SPAN)[None, :])
    return target[None, :] * line.shape[0] + own, place, exists[None, :] & (own >= 0)


@triton.jit
def put(
    frame, target, x, other, step,
    SPAN: tl.constexpr, STEPS: tl.constexpr, REDUCE: tl.constexpr, RESET: tl.constexpr,
):  # fmt: skip
    """Joins a step's elements `[LINES, STEP]` with what is there; equal targets are in one line."""
    kept_ptr, held, limit, bound = frame
    LINES: tl.constexpr = target.shape[0]
    STEP: tl.constexpr = target.shape[1]
    dtype = kept_ptr.dtype.element_ty
    ahead = tl.arange(0, STEP)
    inside = other * SPAN + step % STEPS * (SPAN // STEPS) + ahead < limit
    found = held & inside[None, :] & (target >= 0) & (target < bound)
    target = tl.where(found, target, -1).to(tl.int32)
    to = kept_ptr + target * LINES + tl.arange(0, LINES)[:, None]
    same = target[:, :, None] == target[:, None, :]
    if RESET:
        tl.store(to, tl.full([LINES, STEP], neutral(dtype, REDUCE), dtype), mask=found)
    elif REDUCE == "last":
        behind = same & (ahead[:, None] > ahead[None, :])[None, :, :]
        tl.store(to, x.to(dtype), mask=found & (tl.sum(behind.to(tl.int32), 1) == 0))
    else:
        before = tl.load(to, mask=found, other=0)
        nothing = tl.full(same.shape, neutral(dtype, REDUCE), dtype)
        each = tl.broadcast_to(x.to(dtype)[:, :, None], same.shape)
        x = joined(before, reduced(tl.where(same, each, nothing), REDUCE), REDUCE)
        # Equal targets write the same: all must have read.
        tl.debug_barrier()
        tl.store(to, x, mask=found)
    # Another thread may hold this line's next entry.
    tl.debug_barrier()


@launch.kernel(do_not_specialize=["groups", "capacity", "index_capacity"])
def _scatter_reduce_kernel(
    out_ptr, given_ptr, src_ptr, index_ptr, kept_ptr, out_offsets_ptr, out_others_ptr, offsets_ptr, others_ptr, groups,
    COUNT, BOUND, M_INDEX, N_INDEX, capacity, index_capacity,
    BLOCK: tl.constexpr, TILE: tl.constexpr, REDUCE: tl.constexpr, RESET: tl.constexpr,
):  # fmt: skip
    """Program (every so many of the groups of LINES rows of all matrices, COUNT rows of blocks each). BLOCK is the
    blocks' height and width, TILE (LINES, STEP, elements of a row where a result is begun and written). Offsets and
    others list the blocks of rows, of the result and of index: where each begins, and the column of each."""
    HEIGHT: tl.constexpr = BLOCK[0]
    SPAN: tl.constexpr = BLOCK[1]
    LINES: tl.constexpr = TILE[0]
    STEP: tl.constexpr = TILE[1]
    CHUNK: tl.constexpr = TILE[2]
    AREA: tl.constexpr = HEIGHT * SPAN
    PARTS: tl.constexpr = HEIGHT // LINES
    dtype = kept_ptr.dtype.element_ty
    count_index = tl.cdiv(M_INDEX, HEIGHT)
    total = tl.load(out_offsets_ptr + groups // PARTS)
    overflowed = total > capacity
    overflowed |= tl.load(offsets_ptr + groups // PARTS // COUNT * count_index) > index_capacity
    last_group = tl.where(overflowed, 0, groups)
    own, ahead = tl.arange(0, LINES), tl.arange(0, STEP)
    kept_ptr += tl.program_id(0).to(tl.int64) * (LINES * SPAN) * tl.cdiv(BOUND, SPAN)
    lists = (index_ptr, src_ptr, others_ptr)
    for group in range(tl.program_id(0), last_group, tl.num_programs(0)):
        row = group // PARTS
        line = group % PARTS * LINES + own
        begin_out, end_out = tl.load(out_offsets_ptr + row), tl.load(out_offsets_ptr + row + 1)
        for first in range(0, (end_out - begin_out) * SPAN, CHUNK):
            to, place, exists = places(out_others_ptr, begin_out, end_out, first, line, SPAN, HEIGHT, CHUNK)
            x = tl.full(place.shape, 0, dtype)
            if given_ptr is not None:
                x = tl.load(given_ptr + place, mask=exists, other=0).to(dtype)
            tl.store(kept_ptr + to, x, mask=exists)
        tl.debug_barrier()

        at_row, listed = row // COUNT * count_index + row % COUNT, row % COUNT < count_index
        begin = tl.load(offsets_ptr + at_row, mask=listed, other=0)
        steps = (tl.load(offsets_ptr + at_row + 1, mask=listed, other=0) - begin) * (SPAN // STEP)
        at = line[:, None] * SPAN + ahead[None, :]
        held = (row % COUNT * HEIGHT + line < M_INDEX)[:, None]
        frame = (kept_ptr, held, N_INDEX, BOUND)
        for walk in tl.static_range(2 if RESET else 1):
            # Four steps are on their way, in registers of their own: to hand them on would wait for them.
            target0, x0, other0 = entries(lists, begin, 0, steps, at, SPAN // STEP, STEP, AREA)
            target1, x1, other1 = entries(lists, begin, 1, steps, at, SPAN // STEP, STEP, AREA)
            target2, x2, other2 = entries(lists, begin, 2, steps, at, SPAN // STEP, STEP, AREA)
            target3, x3, other3 = entries(lists, begin, 3, steps, at, SPAN // STEP, STEP, AREA)
            for step in range(0, steps, 4):
                put(frame, target0, x0, other0, step, SPAN, SPAN // STEP, REDUCE, RESET and walk == 0)
                target0, x0, other0 = entries(lists, begin, step + 4, steps, at, SPAN // STEP, STEP, AREA)
                put(frame, target1, x1, other1, step + 1, SPAN, SPAN // STEP, REDUCE, RESET and walk == 0)
                target1, x1, other1 = entries(lists, begin, step + 5, steps, at, SPAN // STEP, STEP, AREA)
                put(frame, target2, x2, other2, step + 2, SPAN, SPAN // STEP, REDUCE, RESET and walk == 0)
                target2, x2, other2 = entries(lists, begin, step + 6, steps, at, SPAN // STEP, STEP, AREA)
                put(frame, target3, x3, other3, step + 3, SPAN, SPAN // STEP, REDUCE, RESET and walk == 0)
                target3, x3, other3 = entries(lists, begin, step + 7, steps, at, SPAN // STEP, STEP, AREA)
            tl.debug_barrier()

        for first in range(0, (end_out - begin_out) * SPAN, CHUNK):
            to, place, exists = places(out_others_ptr, begin_out, end_out, first, line, SPAN, HEIGHT, CHUNK)
            x = tl.load(kept_ptr + to, mask=exists, other=0)
            tl.store(out_ptr + place, x.to(out_ptr.dtype.element_ty), mask=exists)
        tl.debug_barrier()
    fill_behind(out_ptr, total, capacity, overflowed, AREA, 256)


@launch.kernel(do_not_specialize=["nnz_ptr", "index_nnz_ptr", "capacity", "index_capacity", "D", "INNER", "D_INDEX"])
def _scatter_lead_kernel(
    out_ptr, src_ptr, index_ptr, nnz_ptr, positions_ptr, index_nnz_ptr, index_positions_ptr,
    D, INNER, D_INDEX, R_INDEX, C_INDEX, R, C, M_INDEX, N_INDEX, capacity, index_capacity,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, MODE: tl.constexpr, REDUCE: tl.constexpr,
):  # fmt: skip
    """Program (cell of the grid of the matrices that follow each other, TILE of its rows)."""
    cells = R_INDEX * C_INDEX
    z = tl.program_id(0) // cells
    r = tl.program_id(0) % cells // C_INDEX
    c = tl.program_id(0) % C_INDEX
    dtype = out_ptr.dtype.element_ty
    steps = D_INDEX
    if (tl.load(nnz_ptr) > capacity) | (tl.load(index_nnz_ptr) > index_capacity):
        steps = 0
    i = (tl.program_id(1) * TILE + tl.arange(0, TILE))[:, None]
    j = tl.arange(0, WIDTH)[None, :]
    inside = (r * HEIGHT + i < M_INDEX) & (c * WIDTH + j < N_INDEX)
    for step in range(0, steps):
        z_index = (z // INNER * D_INDEX + step) * INNER + z % INNER
        block = tl.load(index_positions_ptr + z_index * cells + r * C_INDEX + c)
        at = block.to(tl.int64) * (HEIGHT * WIDTH) + i * WIDTH + j
        target = tl.load(index_ptr + at, mask=inside & (block >= 0), other=-1)
        found = (target >= 0) & (target < D)
        target = tl.where(found, target, 0).to(tl.int32)
        zr = z_index * R_INDEX + r
        cell, element = located(target, zr, c, i, j, D, INNER, D_INDEX, R_INDEX, R, C, HEIGHT, WIDTH, 0)
        number = tl.load(positions_ptr + cell, mask=found, other=-1)
        found = number >= 0
        to = out_ptr + number.to(tl.int64) * (HEIGHT * WIDTH) + element
        if MODE == "reset":
            tl.store(to, tl.full([TILE, WIDTH], neutral(dtype, REDUCE), dtype), mask=found)
        else:
            if MODE == "count":
                x = tl.full([TILE, WIDTH], 1, dtype)
            else:
                x = tl.load(src_ptr + at, mask=found, other=0).to(dtype)
            if MODE != "last":
                x = joined(tl.load(to, mask=found, other=0), x, REDUCE)
            tl.store(to, x, mask=found)
            tl.debug_barrier()


def _begun(call: BlocksparseScatterReduce) -> tuple[torch.dtype, Tensor | None, Tensor | None, bool]:
    """(the dtype to add up in, given and src as kernels read them, whether a first walk resets what was there)."""
    given, src = call.given, call.src
    half = call.dtype in (torch.float16, torch.bfloat16) and call.reduce in ("sum", "prod")
    wide = torch.float32 if half else torch.uint8 if call.dtype is torch.bool else call.dtype
    # Zeros are neutral to a sum already.
    reset = not call.include_self and call.reduce != "last" and not (call.reduce == "sum" and given is None)
    given, src = (None if t is None else plain(t) for t in (given, src))
    return wide, given, src, reset


def _both(call: BlocksparseScatterReduce) -> tuple[Lists, Lists]:
    """The lists of the result and of the indices."""
    return Lists(call.layout, call.form), Lists(call.index_layout, call.index_form)


def _empty(call: BlocksparseScatterReduce) -> Tensor:
    return torch.empty(call.form[7], *call.index.shape[1:], dtype=call.dtype, device=call.index.device)


def scatter_transposed(call: BlocksparseScatterReduce) -> Tensor:
    """Columns as rows of transposed matrices."""
    (lists, names), (given, src) = _both(call), (call.given, call.src)
    index = turn_blocks(call.index, names, torch.int32)
    given = None if given is None else turn_blocks(given, lists, given.dtype)
    src = None if src is None else turn_blocks(src, names, src.dtype)
    turned: dict[str, Any] = {"form": lists.form.mT, "index_form": names.form.mT, "axis": (2, *call.axis[1:])}
    rows = call._replace(given=given, src=src, index=index, **turned)
    put = (scatter_shared if choose_path(rows) == "shared" else scatter_lines)(rows)
    del rows, index, given, src  # their memory serves the result
    # Behind the last block there are zeros already, or NaN where the indices lost blocks.
    return turn_blocks(put, lists.mT, put.dtype, rest=True)


def scatter_shared(call: BlocksparseScatterReduce) -> Tensor:
    """Rows whose results stand in shared memory, on Hopper."""
    from gossamer.blocksparse._gluon.scatter_reduce import scatter_rows

    out = _empty(call)
    scatter_rows(call, out, _begun(call)[3])
    return out


def scatter_lines(call: BlocksparseScatterReduce) -> Tensor:
    """Walks rows."""
    (wide, given, src, reset), index, out = _begun(call), call.index, _empty(call)
    (lists, names), (m_index, n_index), (m, n) = _both(call), call.index_form[5:7], call.form[5:7]
    index_capacity, height, width = index.shape
    step = min(STEP, width)
    lines = STEP // step
    groups = (lists.row_offsets.shape[0] - 1) * (height // lines)
    length = max(launch.cdiv(n, width), 1) * width * lines
    # At least one for each multiprocessor, at most as many as run at once.
    most = max(1, min(32, ROOM // (length * wide.itemsize)))
    programs = max(1, min(groups, most * tuning.programs(out.device)))
    kept = torch.empty(programs * length, dtype=wide, device=out.device)
    args = (
        plain(out), given, src, index, kept, lists.row_offsets, lists.col_indices, names.row_offsets, names.col_indices,
        groups, max(launch.cdiv(m, height), 1), n, m_index, n_index, out.shape[0], index_capacity,
    )  # fmt: skip
    meta = {"BLOCK": (height, width), "TILE": (lines, step, 1024 // lines), "REDUCE": call.reduce, "RESET": reset}
    _scatter_reduce_kernel((programs, 1, 1), args, meta, num_warps=1)
    return out


def scatter_matrices(call: BlocksparseScatterReduce) -> Tensor:
    """Walks matrices."""
    (wide, given, src, reset), (lists, names), along = _begun(call), _both(call), Direction(*call.axis)
    (index_capacity, height, width), capacity = call.index.shape, lists.form.capacity
    begun = torch.zeros((), dtype=wide, device=call.index.device) if given is None else given.to(wide)
    overflowed = (lists.nnz > capacity) | (names.nnz > index_capacity)
    kept = torch.where(overflowed, lost_value(call.dtype), begun).expand(capacity, height, width).contiguous()
    rows = min(height, ELEMENTS // width)
    grid = [max(count, 1) for form in (names.form, lists.form) for count in (form.rows, form.cols)]
    programs = names.form.z * names.form.rows * names.form.cols // max(along.d_index, 1)
    modes = (*(["reset"] if reset else []), "count" if src is None else call.reduce)
    for mode in modes if programs else ():
        meta = {"HEIGHT": height, "WIDTH": width, "TILE": rows, "MODE": mode, "REDUCE": call.reduce}
        args = (
            kept, None if mode == "reset" else src, call.index, lists.nnz, lists.positions, names.nnz, names.positions,
            along.d, along.inner, along.d_index, *grid, *names.form[5:7], capacity, index_capacity,
        )  # fmt: skip
        warps = max(1, rows * width // 256)
        _scatter_lead_kernel((programs, height // rows, 1), args, meta, num_warps=warps)
    return kept.view(torch.bool) if call.dtype is torch.bool else kept.to(call.dtype)


EXAMPLES = {
    _scatter_reduce_kernel: {
        "given_ptr": None, "kept_ptr": "*fp32", "BLOCK": (64, 64), "TILE": (1, 32, 1024), "REDUCE": "sum",
        "RESET": False, "num_warps": 1,
    },
    _scatter_lead_kernel: {"out_ptr": "*fp32", "HEIGHT": 64, "WIDTH": 64, "TILE": 16, "MODE": "sum", "REDUCE": "sum"},
}  # fmt: skip
