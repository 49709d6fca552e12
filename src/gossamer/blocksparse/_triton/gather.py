"""Elements taken through indices: bound by memory, and by how many sectors the indices touch.

A program owns some 2,048 indices: it reads them in whole sectors, finds for each the block that it points into, through
the table of positions (a few kilobytes that stay in the cache), and fetches the element. Its indices are rows of one
block of them, or, where they point along rows, LINES rows of blocks that follow each other, most of which are in one
row of blocks: these then share the sectors of a few rows, which the first cache holds, where 32 rows of one block would
ask the second one for a sector an element. The result is written where the indices lay.
"""

from typing import Any

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
    out_ptr, values_ptr, nnz_ptr, positions_ptr, index_ptr, index_nnz_ptr, rows_ptr, cols_ptr,
    D, INNER, D_INDEX, R_INDEX, R, C, M_INDEX, N_INDEX, BOUND, capacity, index_capacity,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, AXIS: tl.constexpr, STRICT: tl.constexpr,
):  # fmt: skip
    """Program (TILE[0] blocks of indices, TILE[1] of their rows). Without values, indices mark the cells of `out`, of
    zeros, that they point into."""
    GROUP: tl.constexpr = TILE[0]
    LINES: tl.constexpr = TILE[1]
    block = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    exists = block < index_capacity
    index_nnz = tl.load(index_nnz_ptr)
    overflowed = index_nnz > index_capacity
    if values_ptr is not None:
        overflowed |= tl.load(nnz_ptr) > capacity
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
    if values_ptr is not None:
        number = tl.load(positions_ptr + cell, mask=found, other=-1)
        x = tl.load(values_ptr + number.to(tl.int64) * (HEIGHT * WIDTH) + element, mask=number >= 0, other=0)
        tl.store(out_ptr + at, tl.where(wrong, lost(x), x), mask=exists[:, None, None])
    else:
        # Few cells are named by many: most find theirs marked, and leave it alone.
        to = out_ptr + tl.broadcast_to(cell, found.shape)
        new = found & (tl.load(to, mask=found, other=1) == 0)
        tl.store(to, tl.full(found.shape, 1, tl.uint8), mask=new)


LINES = 2
"""Rows of a program whose indices point along them."""


def gather(call: BlocksparseGather) -> Tensor:
    """Operator `blocksparse_gather`."""
    values, lists = call.values, Lists(call.layout, call.form)
    out = torch.empty(call.index.shape, dtype=values.dtype, device=values.device)
    _follow(call, lists.form, plain(out), plain(values), lists.nnz, lists.positions, values.shape[0], call.strict)
    return out


def reach(call: BlocksparseGatherReach) -> Tensor:
    """Operator `blocksparse_gather_reach`."""
    form = Form(*call.target)
    mask = torch.zeros(form.z, form.rows, form.cols, dtype=torch.uint8, device=call.index.device)
    _follow(call, form, mask, None, None, None, 0, False)
    return mask.view(torch.bool)


def _follow(call: BlocksparseGather | BlocksparseGatherReach, form: Form, out: Tensor, *source: Any) -> None:
    """Launches the kernel for indices into matrices of a form. `source` is values, nnz, positions and the capacity of
    their layout, and whether an index out of range is an error."""
    index, names, along = call.index, Lists(call.index_layout, call.index_form), Direction(*call.axis)
    (capacity, height, width), of_index = index.shape, names.form
    lines = LINES if along.axis == 2 else min(height, 2048 // width)
    group = max(1, 2048 // (lines * width))
    counts = max(of_index.rows, 1), max(form.rows, 1), max(form.cols, 1)
    sizes = along.d, along.inner, along.d_index, *counts, of_index.m, of_index.n, along.bound(form)
    lists = index, names.nnz, names.row_indices, names.col_indices
    *source, room, strict = source
    meta = {"HEIGHT": height, "WIDTH": width, "TILE": (group, lines), "AXIS": along.axis, "STRICT": strict}
    grid, warps = (launch.cdiv(capacity, group), height // lines, 1), max(1, group * lines * width // 512)
    _gather_kernel(grid, (out, *source, *lists, *sizes, room, capacity), meta, num_warps=warps)


EXAMPLES = {_gather_kernel: {"HEIGHT": 64, "WIDTH": 64, "TILE": (16, 2), "AXIS": 2, "STRICT": True}}
