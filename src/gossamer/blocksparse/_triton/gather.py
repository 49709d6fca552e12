"""Elements taken through indices: bound by memory, and by how many sectors the indices touch.

A program owns some 2,048 indices: it reads them in whole sectors, finds for each the block that it points into, through
the table of positions (a few kilobytes that stay in the cache), and fetches the element. Its indices are rows of one
block of them, or, where they point along rows, LINES rows of blocks that follow each other, most of which are in one
row of blocks: these then share the sectors of a few rows, which the first cache holds, where 32 rows of one block would
ask the second one for a sector an element. The result is written where the indices lay.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch
from gossamer.blocksparse._triton.tensor import lost, plain
from gossamer.blocksparse.lists import Form, Lists
from gossamer.blocksparse.records import BlocksparseGather, BlocksparseGatherReach, Direction


@triton.jit
def located(
    target, zr, c, i, j, D, INNER, D_INDEX, R_INDEX, R, C,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """(cell of the grid, element of the block) that indices point at; i and j are the indices' places in their block,
    which stands in row zr of the blocks of all matrices and in column c. `target` is a valid index, or 0."""
    z = zr // R_INDEX
    r = zr % R_INDEX
    if AXIS == 0:
        cell = (((z // (INNER * D_INDEX)) * D + target) * INNER + z % INNER) * (R * C) + r * C + c
        element = i * WIDTH + j
    elif AXIS == 1:
        cell = (z * R + target // HEIGHT) * C + c
        element = target % HEIGHT * WIDTH + j
    else:
        cell = (z * R + r) * C + target // WIDTH
        element = i * WIDTH + target % WIDTH
    return cell, element


@launch.kernel(do_not_specialize=["nnz_ptr", "index_nnz_ptr", "capacity", "index_capacity", "D", "INNER", "D_INDEX"])
def _gather_kernel(
    values_ptr, index_ptr, out_ptr, nnz_ptr, positions_ptr, index_nnz_ptr, rows_ptr, cols_ptr,
    D, INNER, D_INDEX, R_INDEX, R, C, M_INDEX, N_INDEX, BOUND, capacity, index_capacity,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, AXIS: tl.constexpr, STRICT: tl.constexpr,
):  # fmt: skip
    """Program (TILE[0] blocks of indices, TILE[1] of their rows)."""
    GROUP: tl.constexpr = TILE[0]
    LINES: tl.constexpr = TILE[1]
    block = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    exists = block < index_capacity
    index_nnz = tl.load(index_nnz_ptr)
    overflowed = (index_nnz > index_capacity) | (tl.load(nnz_ptr) > capacity)
    zr = tl.maximum(tl.load(rows_ptr + block, mask=exists, other=0), 0)[:, None, None]
    c = tl.maximum(tl.load(cols_ptr + block, mask=exists, other=0), 0)[:, None, None]
    i = (tl.program_id(1) * LINES + tl.arange(0, LINES))[None, :, None]
    j = tl.arange(0, WIDTH)[None, None, :]
    at = block.to(tl.int64)[:, None, None] * (HEIGHT * WIDTH) + (i * WIDTH + j)
    held = (zr % R_INDEX * HEIGHT + i < M_INDEX) & (c * WIDTH + j < N_INDEX) & (block < index_nnz)[:, None, None]
    target = tl.load(index_ptr + at, mask=held & exists[:, None, None], other=-1)
    found = (target >= 0) & (target < BOUND) & (overflowed == 0)
    wrong = overflowed
    if STRICT:
        wrong = (target < -1) | (target >= BOUND) | overflowed
    target = tl.where(found, target, 0).to(tl.int32)
    cell, element = located(target, zr, c, i, j, D, INNER, D_INDEX, R_INDEX, R, C, HEIGHT, WIDTH, AXIS)
    number = tl.load(positions_ptr + cell, mask=found, other=-1)
    x = tl.load(values_ptr + number.to(tl.int64) * (HEIGHT * WIDTH) + element, mask=number >= 0, other=0)
    x = tl.where(wrong, lost(x), x)
    tl.store(out_ptr + at, x, mask=exists[:, None, None])


@launch.kernel(do_not_specialize=["index_nnz_ptr", "D", "INNER", "D_INDEX"])
def _gather_reach_kernel(
    index_ptr, mask_ptr, index_nnz_ptr, rows_ptr, cols_ptr,
    D, INNER, D_INDEX, R_INDEX, R, C, M_INDEX, N_INDEX, BOUND,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """Program (block of indices, TILE of its rows). Marks the cells that indices point into; all write the same."""
    block = tl.program_id(0)
    zr = tl.maximum(tl.load(rows_ptr + block), 0)
    c = tl.maximum(tl.load(cols_ptr + block), 0)
    i = (tl.program_id(1) * TILE + tl.arange(0, TILE))[:, None]
    j = tl.arange(0, WIDTH)[None, :]
    held = (zr % R_INDEX * HEIGHT + i < M_INDEX) & (c * WIDTH + j < N_INDEX) & (block < tl.load(index_nnz_ptr))
    target = tl.load(index_ptr + block.to(tl.int64) * (HEIGHT * WIDTH) + i * WIDTH + j, mask=held, other=-1)
    found = (target >= 0) & (target < BOUND)
    target = tl.where(found, target, 0).to(tl.int32)
    cell, _ = located(target, zr, c, i, j, D, INNER, D_INDEX, R_INDEX, R, C, HEIGHT, WIDTH, AXIS)
    cell = tl.broadcast_to(cell, [TILE, WIDTH])
    # Few cells are named by many: most find theirs marked, and leave it alone.
    new = found & (tl.load(mask_ptr + cell, mask=found, other=1) == 0)
    tl.store(mask_ptr + cell, tl.full([TILE, WIDTH], 1, tl.uint8), mask=new)


LINES = 2
"""Rows of a program whose indices point along them."""


def gather(call: BlocksparseGather) -> Tensor:
    values, index, lists = call.values, call.index, Lists(call.layout, call.form)
    names, along = Lists(call.index_layout, call.index_form), Direction(*call.axis)
    capacity, height, width = index.shape
    out = torch.empty(index.shape, dtype=values.dtype, device=index.device)
    lines = LINES if along.axis == 2 else min(height, 2048 // width)
    group = max(1, 2048 // (lines * width))
    args = (
        plain(values), index, plain(out), lists.nnz, lists.positions, names.nnz, names.row_indices, names.col_indices,
        *sizes_of(along, names.form, lists.form), values.shape[0], capacity,
    )  # fmt: skip
    meta = {"HEIGHT": height, "WIDTH": width, "TILE": (group, lines), "AXIS": along.axis, "STRICT": call.strict}
    grid = (launch.cdiv(capacity, group), height // lines, 1)
    _gather_kernel(grid, args, meta, num_warps=max(1, group * lines * width // 512))
    return out


def sizes_of(along: Direction, names: Form, form: Form) -> tuple[int, ...]:
    """The sizes of the indices and of the matrices that they point into, as the kernels take them."""
    counts = max(names.rows, 1), max(form.rows, 1), max(form.cols, 1)
    return along.d, along.inner, along.d_index, *counts, names.m, names.n, along.bound(form)


def reach(call: BlocksparseGatherReach) -> Tensor:
    index, names, form = call.index, Lists(call.index_layout, call.index_form), Form(*call.target)
    capacity, height, width = index.shape
    tile, along = min(height, 2048 // width), Direction(*call.axis)
    mask = torch.zeros(form.z, form.rows, form.cols, dtype=torch.uint8, device=index.device)
    args = (index, mask, names.nnz, names.row_indices, names.col_indices, *sizes_of(along, names.form, form))
    meta = {"HEIGHT": height, "WIDTH": width, "TILE": tile, "AXIS": along.axis}
    _gather_reach_kernel((capacity, height // tile, 1), args, meta, num_warps=max(1, tile * width // 512))
    return mask.view(torch.bool)


EXAMPLES = {
    _gather_kernel: {"HEIGHT": 64, "WIDTH": 64, "TILE": (16, 2), "AXIS": 2, "STRICT": True},
    _gather_reach_kernel: {"HEIGHT": 64, "WIDTH": 64, "TILE": 32, "AXIS": 2},
}
