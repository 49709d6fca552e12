"""Elements put where indices say, in a fixed order and without atomics.

Along a dimension no line of a matrix meets another: what stands in row i goes to row i (dim -1), what stands in column
j to column j (dim -2). A program therefore owns LINES rows or columns of one matrix and walks their entries from the
first to the last block, STEP entries of each line a step. Entries of one step that have the same place are joined in
registers, by comparing each with each (STEP comparisons an entry, which are cheap beside the memory they wait for), the
last of them adds the result to what is there, and a barrier ends the step: each step's sums are in place before the
next reads them, nothing depends on timing, and a place is read and written once a step, whatever repeats.

Along a leading dimension a line is the elements at one place in matrices that follow each other: a program owns a tile
of one cell of the grid and walks the matrices; nothing repeats within a step.

16-bit sums and products are kept in a float32 buffer. The result is begun by `_scatter_start_kernel` and rounded by
`_scatter_finish_kernel`; "reset" puts the reduction's neutral number where there are entries, so that the pass that
follows leaves out what was there before.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch
from gossamer.blocksparse._triton.gather import located
from gossamer.blocksparse._triton.tensor import lost, plain


@dataclass(frozen=True)
class Tile:
    """Lines of a program, entries of each a step, and warps."""

    lines: int
    step: int
    warps: int


# A row's entries lie side by side, so that few rows will do, and one warp, which has no others to wait for. Of columns
# it takes 16 for whole sectors. Eight rows by eight entries would compare half as much, and ended in an illegal memory
# access on an H200 with Triton 3.6.
TILES = {1: Tile(16, 16, 4), 2: Tile(4, 16, 1)}
"""By axis."""
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
    """Over the first of three dimensions, which a thread holds in registers; NaN stays."""
    if REDUCE == "prod":
        return tl.reduce(x, 0, _product)
    elif REDUCE == "amax":
        return tl.reduce(x, 0, _greater)
    elif REDUCE == "amin":
        return tl.reduce(x, 0, _less)
    else:
        return tl.sum(x, 0).to(x.dtype)


@triton.jit(do_not_specialize=["nnz_ptr", "index_nnz_ptr", "capacity", "index_capacity"])
def _scatter_reduce_kernel(
    out_ptr, src_ptr, index_ptr, nnz_ptr, positions_ptr, index_nnz_ptr, offsets_ptr, order_ptr, others_ptr,
    R, C, M_INDEX, N_INDEX, BOUND, capacity, index_capacity,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, LINES: tl.constexpr, STEP: tl.constexpr, AXIS: tl.constexpr,
    MODE: tl.constexpr, REDUCE: tl.constexpr,
):  # fmt: skip
    """Program (row or column of blocks of all matrices, LINES of it). `others` are the rows or columns of the blocks
    that `order` lists, blocks in their own order if it is None."""
    line_block = tl.program_id(0)
    begin = tl.load(offsets_ptr + line_block)
    end = tl.load(offsets_ptr + line_block + 1)
    if (tl.load(nnz_ptr) > capacity) | (tl.load(index_nnz_ptr) > index_capacity):
        end = begin
    dtype = out_ptr.dtype.element_ty
    line = tl.program_id(1) * LINES + tl.arange(0, LINES)
    step = tl.arange(0, STEP)
    R_INDEX = tl.cdiv(M_INDEX, HEIGHT)
    behind = step[:, None, None] > step[None, None, :]
    for entry in range(begin, end):
        if AXIS == 2:
            block = entry
            zr, c = line_block, tl.load(others_ptr + block)
        else:
            block = tl.load(order_ptr + entry)
            zr, c = tl.load(others_ptr + block), line_block % tl.cdiv(N_INDEX, WIDTH)
        base = block.to(tl.int64) * (HEIGHT * WIDTH)  # type: ignore[attr-defined]
        for first in range(0, WIDTH if AXIS == 2 else HEIGHT, STEP):
            if AXIS == 2:
                i, j = line[:, None], (first + step)[None, :]
            else:
                i, j = (first + step)[None, :], line[:, None]
            held = (zr % R_INDEX * HEIGHT + i < M_INDEX) & (c * WIDTH + j < N_INDEX)
            target = tl.load(index_ptr + base + i * WIDTH + j, mask=held, other=-1)
            found = (target >= 0) & (target < BOUND)
            target = tl.where(found, target, 0).to(tl.int32)
            cell, element = located(target, zr, c, i, j, 1, 1, 1, R_INDEX, R, C, HEIGHT, WIDTH, AXIS)
            number = tl.load(positions_ptr + cell, mask=found, other=-1)
            found = number >= 0
            to = out_ptr + number.to(tl.int64) * (HEIGHT * WIDTH) + element
            if MODE == "reset":
                tl.store(to, tl.full([LINES, STEP], neutral(dtype, REDUCE), dtype), mask=found)
            else:
                if MODE == "count":
                    x = tl.full([LINES, STEP], 1, dtype)
                else:
                    x = tl.load(src_ptr + base + i * WIDTH + j, mask=found, other=0).to(dtype)
                # What has no place differs from all others.
                place = tl.where(found, target, -1 - step[None, :])
                same = tl.trans(place)[:, :, None] == place[None, :, :]
                last = found & (tl.sum((same & behind).to(tl.int32), 0) == 0)
                if MODE != "last":
                    each = tl.zeros([STEP, LINES, STEP], dtype) + tl.trans(x)[:, :, None]
                    nothing = tl.full([STEP, LINES, STEP], neutral(dtype, REDUCE), dtype)
                    x = reduced(tl.where(same, each, nothing), REDUCE)
                    x = joined(tl.load(to, mask=last, other=0), x, REDUCE)
                tl.store(to, x, mask=last)
                # Another thread may hold this line's next entry.
                tl.debug_barrier()


@triton.jit(do_not_specialize=["nnz_ptr", "index_nnz_ptr", "capacity", "index_capacity", "D", "INNER", "D_INDEX"])
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


@triton.jit(do_not_specialize=["nnz_ptr", "index_nnz_ptr", "capacity", "index_capacity"])
def _scatter_start_kernel(
    out_ptr, given_ptr, nnz_ptr, index_nnz_ptr, capacity, index_capacity, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Program (ELEMENTS). What is given, or zeros if None; NaN where a layout overflowed."""
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    dtype = out_ptr.dtype.element_ty
    if (tl.load(nnz_ptr) > capacity) | (tl.load(index_nnz_ptr) > index_capacity):
        tl.store(out_ptr + at, lost(tl.zeros([ELEMENTS], dtype)))
    elif given_ptr is None:
        tl.store(out_ptr + at, tl.zeros([ELEMENTS], dtype))
    else:
        tl.store(out_ptr + at, tl.load(given_ptr + at).to(dtype))


@triton.jit
def _scatter_finish_kernel(wide_ptr, out_ptr, ELEMENTS: tl.constexpr):
    """Program (ELEMENTS)."""
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    tl.store(out_ptr + at, tl.load(wide_ptr + at).to(out_ptr.dtype.element_ty))


_scatter_reduce = launch.Kernel(_scatter_reduce_kernel)
_scatter_lead = launch.Kernel(_scatter_lead_kernel)
_scatter_start = launch.Kernel(_scatter_start_kernel)
_scatter_finish = launch.Kernel(_scatter_finish_kernel)


def scatter_reduce(
    given: Tensor | None,
    src: Tensor | None,
    nnz: Tensor,
    row_indices: Tensor,
    col_indices: Tensor,
    positions: Tensor,
    index: Tensor,
    index_nnz: Tensor,
    index_rows: Tensor,
    index_cols: Tensor,
    index_row_offsets: Tensor,
    index_col_offsets: Tensor,
    index_order: Tensor,
    index_positions: Tensor,
    sizes: list[int],
    reduce: str,
    include_self: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Operator `blocksparse_scatter_reduce`."""
    capacity, index_capacity = col_indices.shape[0], index.shape[0]
    index, given, src = (None if t is None else t.contiguous() for t in (index, given, src))
    assert index is not None
    out = torch.empty(capacity, *index.shape[1:], dtype=dtype, device=index.device)
    if out.numel() == 0:
        return out
    wide = out
    if dtype in (torch.float16, torch.bfloat16) and reduce in ("sum", "prod"):
        wide = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    before, to = None if given is None else plain(given), plain(wide)
    tile = min(ELEMENTS, index.shape[1] * index.shape[2])
    grid, meta, warps = (out.numel() // tile, 1, 1), {"ELEMENTS": tile}, tile // 256
    args = (to, before, nnz, index_nnz, capacity, index_capacity)
    _scatter_start(grid, args, meta, num_warps=warps)
    parts = (to, nnz, positions, index_nnz)
    if sizes[0] == 0:
        walk = functools.partial(_lead, index, parts, index_positions, sizes, capacity)
    elif sizes[0] == 1:
        walk = functools.partial(_lines, index, parts, (index_col_offsets, index_order, index_rows), sizes, capacity)
    else:
        walk = functools.partial(_lines, index, parts, (index_row_offsets, None, index_cols), sizes, capacity)
    # Zeros are neutral to a sum already.
    if not include_self and reduce != "last" and not (reduce == "sum" and given is None):
        walk(None, "reset", reduce)
    walk(None if src is None else plain(src), "count" if src is None else reduce, reduce)
    if wide is not out:
        _scatter_finish(grid, (wide, out), meta, num_warps=warps)
    return out


def _lines(
    index: Tensor,
    parts: tuple[Tensor, ...],
    lists: tuple[Tensor, Tensor | None, Tensor],
    sizes: list[int],
    capacity: int,
    src: Tensor | None,
    mode: str,
    reduce: str,
) -> None:
    """Walks rows or columns; `lists` are the offsets of the blocks of each, these blocks, and their other place."""
    axis, _, _, _, m_index, n_index, m, n = sizes
    out, nnz, positions, index_nnz = parts
    index_capacity, height, width = index.shape
    grid = _grid(m, n, height, width)
    bound = m if axis == 1 else n
    tile = TILES[axis]
    meta = {
        "HEIGHT": height, "WIDTH": width, "LINES": tile.lines, "STEP": tile.step, "AXIS": axis, "MODE": mode,
        "REDUCE": reduce,
    }  # fmt: skip
    args = (
        out, src, index, nnz, positions, index_nnz, *lists, *grid, m_index, n_index, bound, capacity, index_capacity
    )  # fmt: skip
    programs = (lists[0].shape[0] - 1, (height if axis == 2 else width) // tile.lines, 1)
    if programs[0]:
        _scatter_reduce(programs, args, meta, num_warps=tile.warps)


def _lead(
    index: Tensor,
    parts: tuple[Tensor, ...],
    index_positions: Tensor,
    sizes: list[int],
    capacity: int,
    src: Tensor | None,
    mode: str,
    reduce: str,
) -> None:
    """Walks matrices."""
    _, inner, d_index, d, m_index, n_index, m, n = sizes
    out, nnz, positions, index_nnz = parts
    index_capacity, height, width = index.shape
    grid = (*_grid(m_index, n_index, height, width), *_grid(m, n, height, width))
    tile = min(height, ELEMENTS // width)
    meta = {"HEIGHT": height, "WIDTH": width, "TILE": tile, "MODE": mode, "REDUCE": reduce}
    args = (
        out, src, index, nnz, positions, index_nnz, index_positions, d, inner, d_index, *grid, m_index, n_index,
        capacity, index_capacity,
    )  # fmt: skip
    if programs := index_positions.shape[0] // max(d_index, 1):
        _scatter_lead((programs, height // tile, 1), args, meta, num_warps=max(1, tile * width // 256))


def _grid(m: int, n: int, height: int, width: int) -> tuple[int, int]:
    return max(launch.cdiv(m, height), 1), max(launch.cdiv(n, width), 1)


_LAYOUTS = {"nnz_ptr": "*i32", "positions_ptr": "*i32", "index_nnz_ptr": "*i32"}
_SIZES = dict.fromkeys(("R", "C", "M_INDEX", "N_INDEX", "capacity", "index_capacity"), "i32")
_BLOCK = {"HEIGHT": 64, "WIDTH": 64}
EXAMPLES = {
    _scatter_reduce_kernel: {
        "signature": {
            "out_ptr": "*fp32", "src_ptr": "*bf16", "index_ptr": "*i64", **_LAYOUTS, "offsets_ptr": "*i32",
            "order_ptr": None, "others_ptr": "*i32", **_SIZES, "BOUND": "i32",
        },
        "constexprs": {**_BLOCK, "LINES": 4, "STEP": 16, "AXIS": 2, "MODE": "sum", "REDUCE": "sum"},
        "num_warps": 1,
    },
    _scatter_lead_kernel: {
        "signature": {
            "out_ptr": "*fp32", "src_ptr": "*bf16", "index_ptr": "*i64", **_LAYOUTS, "index_positions_ptr": "*i32",
            **dict.fromkeys(("D", "INNER", "D_INDEX", "R_INDEX", "C_INDEX"), "i32"), **_SIZES,
        },
        "constexprs": {**_BLOCK, "TILE": 16, "MODE": "sum", "REDUCE": "sum"},
        "num_warps": 4,
    },
    _scatter_start_kernel: {
        "signature": {
            "given_ptr": "*bf16", "out_ptr": "*fp32", "nnz_ptr": "*i32", "index_nnz_ptr": "*i32", "capacity": "i32",
            "index_capacity": "i32",
        },
        "constexprs": {"ELEMENTS": 1024},
        "num_warps": 4,
    },
    _scatter_finish_kernel: {
        "signature": {"wide_ptr": "*fp32", "out_ptr": "*bf16"},
        "constexprs": {"ELEMENTS": 1024},
        "num_warps": 4,
    },
}  # fmt: skip
"""Example signatures for the ahead-of-time compile test."""
