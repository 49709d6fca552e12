"""Dense to blocks and back: bound by memory, each element is read once and written once.

A program owns GROUP blocks: stored ones that follow each other where blocks are taken from a dense matrix, neighbours
in a row of the grid, stored or not, where they are put into one. These are one block of 64, and as many small ones as
have 2,048 elements: a warp for each block of 16 would wait for memory most of its time. A block's elements lie side by
side in memory and so do a row's in the matrix, so that both sides move whole sectors. Where a layout has more blocks
than room nothing but NaN is written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch
from gossamer.blocksparse.lists import Lists
from gossamer.blocksparse.records import BlocksparseFromDense, BlocksparseToDense


@triton.jit
def lost(x):
    """The stand-in for values that are not there for want of room: NaN, or the lowest of integers."""
    if x.dtype.is_floating():
        return tl.full(x.shape, float("nan"), x.dtype)
    elif x.dtype.is_int_signed():
        return tl.full(x.shape, -(1 << (x.dtype.primitive_bitwidth - 1)), x.dtype)
    else:
        return tl.zeros(x.shape, x.dtype)


@triton.jit
def fill_behind(out_ptr, total, capacity, overflowed, AREA: tl.constexpr, PIECE: tl.constexpr):
    """Zeros behind the last block, PIECE elements at a time; where a layout has more blocks than room nothing is right,
    and nothing is kept."""
    blank = tl.zeros([PIECE], out_ptr.dtype.element_ty)
    if overflowed:
        blank = lost(blank)
    first = tl.where(overflowed, 0, total).to(tl.int64) * (AREA // PIECE)
    for at in range(first + tl.program_id(0), capacity.to(tl.int64) * (AREA // PIECE), tl.num_programs(0)):
        tl.store(out_ptr + at * PIECE + tl.arange(0, PIECE), blank)


@triton.jit
def place(z, r, c, rows, cols, TRANS: tl.constexpr):
    """Where the number of block (r, c) of op(B) stands."""
    if TRANS:
        return (z * cols + c) * rows + r
    else:
        return (z * rows + r) * cols + c


@triton.jit
def cell(i, j, height, width, TRANS: tl.constexpr):
    """Element (i, j) of a height x width matrix, which may be stored transposed."""
    if TRANS:
        return j * height + i
    else:
        return i * width + j


@triton.jit
def lost_blocks(offsets_ptr, last, capacity):
    """Whether a layout has more blocks than room."""
    lost = False
    if offsets_ptr is not None:
        lost = tl.load(offsets_ptr + last) > capacity
    return lost


@launch.kernel(do_not_specialize=["nnz_ptr", "capacity"])
def _from_dense_kernel(
    x_ptr, out_ptr, nnz_ptr, row_indices_ptr, col_indices_ptr, R, M, N, capacity,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Program (GROUP stored blocks), those behind the last included, which become zeros."""
    block = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    nnz = tl.load(nnz_ptr)
    row = tl.load(row_indices_ptr + block, mask=block < capacity, other=0)
    column = tl.load(col_indices_ptr + block, mask=block < capacity, other=0)
    down, across = tl.arange(0, HEIGHT)[None, :, None], tl.arange(0, WIDTH)[None, None, :]
    i = (row % R * HEIGHT)[:, None, None] + down
    j = (column * WIDTH)[:, None, None] + across
    held = (i < M) & (j < N) & (block < nnz)[:, None, None]
    x = tl.load(x_ptr + (row // R).to(tl.int64)[:, None, None] * M * N + i.to(tl.int64) * N + j, mask=held, other=0)
    if nnz > capacity:
        x = lost(x)
    to = block.to(tl.int64)[:, None, None] * (HEIGHT * WIDTH) + (down * WIDTH + across)
    tl.store(out_ptr + to, x, mask=(block < capacity)[:, None, None])


@launch.kernel(do_not_specialize=["nnz_ptr", "capacity"])
def _to_dense_kernel(
    values_ptr, out_ptr, nnz_ptr, positions_ptr, R, C, M, N, capacity, fill,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Program (GROUP blocks of a row of the grid)."""
    groups = tl.cdiv(C, GROUP)
    line = tl.program_id(0) // groups
    column = tl.program_id(0) % groups * GROUP + tl.arange(0, GROUP)
    block = tl.load(positions_ptr + line * C + column, mask=column < C, other=-1)[None, :, None]
    overflowed = tl.load(nnz_ptr) > capacity
    down, across = tl.arange(0, HEIGHT)[:, None, None], tl.arange(0, WIDTH)[None, None, :]
    inside = down * WIDTH + across
    present = (inside >= 0) & (block >= 0) & (block < capacity)
    x = tl.load(values_ptr + block.to(tl.int64) * (HEIGHT * WIDTH) + inside, mask=present, other=0)
    x = tl.where(present, x, tl.full(x.shape, fill, tl.float32).to(x.dtype))
    if overflowed:
        x = lost(x)
    i = line % R * HEIGHT + down
    j = column[None, :, None] * WIDTH + across
    to = (line // R).to(tl.int64) * M * N + i.to(tl.int64) * N + j
    tl.store(out_ptr + to, x, mask=(i < M) & (j < N))


def from_dense(call: BlocksparseFromDense) -> Tensor:
    x, lists = call.x, Lists(call.layout, call.form)
    _, rows, _, height, width, m, n, capacity, *_ = lists.form
    out = torch.empty(capacity, height, width, dtype=x.dtype, device=x.device)
    args = (plain(x), plain(out), lists.nnz, lists.row_indices, lists.col_indices, max(rows, 1), m, n, capacity)
    meta, group = _tile(height, width)
    _from_dense_kernel((launch.cdiv(capacity, group), 1, 1), args, meta, num_warps=_warps(group * height * width))
    return out


def to_dense(call: BlocksparseToDense) -> Tensor:
    values, lists = call.values, Lists(call.layout, call.form)
    z, rows, cols, height, width, m, n, capacity, *_ = lists.form
    out = torch.empty(z, m, n, dtype=values.dtype, device=values.device)
    if out.numel():
        args = (plain(values), plain(out), lists.nnz, lists.positions, rows, cols, m, n, capacity, float(call.fill))
        meta, group = _tile(height, width)
        programs = z * rows * launch.cdiv(cols, group)
        _to_dense_kernel((programs, 1, 1), args, meta, num_warps=_warps(group * height * width))
    return out


def plain(x: Tensor) -> Tensor:
    """Bool as the bytes that it is."""
    return x.view(torch.uint8) if x.dtype is torch.bool else x


def _tile(height: int, width: int) -> tuple[dict[str, int], int]:
    """(meta, blocks of a program)."""
    group = max(1, 2048 // (height * width))
    return {"HEIGHT": height, "WIDTH": width, "GROUP": group}, group


def _warps(elements: int) -> int:
    """Some 32 elements a thread, four 16-byte accesses of 16-bit numbers."""
    return max(1, min(8, elements // 1024))


EXAMPLES = {
    _from_dense_kernel: {"HEIGHT": 16, "WIDTH": 16, "GROUP": 8, "num_warps": 2},
    _to_dense_kernel: {"HEIGHT": 16, "WIDTH": 16, "GROUP": 8, "num_warps": 2},
}
