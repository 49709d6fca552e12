"""op(A) @ op(B) where results are small, each of A, B and the result dense or block-sparse: one short chain of loads.

A small product takes the time of the loads that wait for each other. So a program owns a tile of the result, reads
which block it is, and then of each step along K which blocks of A and of B it meets: there are no lists, and nobody
searches for pairs. Absent blocks are zeros, which are multiplied. Tiles are parts of blocks, for small ones are many.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer.blocksparse._triton.tensor import cell, lost_blocks, place


@triton.jit
def blocks_of(positions_ptr, z, line, k, rows, inner, K, DEPTH: tl.constexpr, TRANS: tl.constexpr):
    """The blocks of a line of blocks at the elements k of the inner dimension, -1 where there is none; of a dense
    matrix 0. A block may end behind K."""
    if positions_ptr is not None:
        at = k // DEPTH
        block = tl.load(positions_ptr + place(z, line, at, rows, inner, TRANS), mask=at * DEPTH < K, other=-1)
        SAME: tl.constexpr = DEPTH if DEPTH < k.shape[0] else k.shape[0]
        # Neighbours of one block are loaded together.
        return tl.max_constancy(block, SAME)
    else:
        return tl.where(k < K, 0, -1)


@triton.jit
def operand(
    ptr, positions_ptr, block, z, line, i, j, exists, M, K, SIDE: tl.constexpr, DEPTH: tl.constexpr,
    TRANS: tl.constexpr,
):  # fmt: skip
    """Elements (i, j) of a matrix M x K, i those of the line-th SIDE of its rows."""
    if positions_ptr is not None:
        base = tl.broadcast_to(block[None, :], exists.shape).to(tl.int64) * (SIDE * DEPTH)
        return tl.load(ptr + base + cell(i, j % DEPTH, SIDE, DEPTH, TRANS), mask=exists, other=0.0)
    else:
        at = z.to(tl.int64) * M * K + cell((line * SIDE + i).to(tl.int64), j.to(tl.int64), M, K, TRANS)
        return tl.load(ptr + at, mask=exists, other=0.0)


@launch.kernel(do_not_specialize=["a_capacity", "b_capacity", "out_capacity"])
def _blocksparse_matmul_small_kernel(
    a_ptr, b_ptr, out_ptr, a_offsets_ptr, a_positions_ptr, b_offsets_ptr, b_positions_ptr, out_offsets_ptr,
    out_rows_ptr, out_index_ptr, Z, M, K, N, a_capacity, b_capacity, out_capacity,
    BLOCK: tl.constexpr, TRANS: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Program (tile). BLOCK is the blocks along M, K and N, TRANS whether A and B are stored transposed, TILE the rows
    and columns of a tile and its step along K. A matrix is dense where its offsets are None."""
    BM: tl.constexpr = BLOCK[0]
    BK: tl.constexpr = BLOCK[1]
    BN: tl.constexpr = BLOCK[2]
    TILE_M: tl.constexpr = TILE[0]
    TILE_N: tl.constexpr = TILE[1]
    STEP: tl.constexpr = TILE[2]
    DOWN: tl.constexpr = BM // TILE_M
    ACROSS: tl.constexpr = BN // TILE_N
    rows, inner, cols = tl.cdiv(M, BM), tl.cdiv(K, BK), tl.cdiv(N, BN)
    lost = lost_blocks(a_offsets_ptr, Z * (inner if TRANS[0] else rows), a_capacity)
    lost |= lost_blocks(b_offsets_ptr, Z * (cols if TRANS[1] else inner), b_capacity)
    lost |= lost_blocks(out_offsets_ptr, Z * rows, out_capacity)
    entry = tl.program_id(0) // (DOWN * ACROSS)
    part = tl.program_id(0) % (DOWN * ACROSS)
    present = True
    if out_offsets_ptr is not None:
        line = tl.load(out_rows_ptr + entry)
        col = tl.load(out_index_ptr + entry)
        # Behind the last block there is no row.
        present = line >= 0
        line, col = tl.where(present, line, 0), tl.where(present, col, 0)
    else:
        line, col = entry // cols, entry % cols
    z, m = line // rows, line % rows
    i = part // ACROSS * TILE_M + tl.arange(0, TILE_M)[:, None]
    j = part % ACROSS * TILE_N + tl.arange(0, TILE_N)[None, :]
    acc = tl.zeros([TILE_M, TILE_N], tl.float32)
    for start in range(0, tl.where(present & (lost == 0), K, 0), STEP):
        k = start + tl.arange(0, STEP)
        a_block = blocks_of(a_positions_ptr, z, m, k, rows, inner, K, BK, TRANS[0])
        # Of B the transposed matrix, whose rows are B's columns.
        b_block = blocks_of(b_positions_ptr, z, col, k, cols, inner, K, BK, not TRANS[1])
        # What meets nothing is not read: it need not be finite.
        meets = ((a_block >= 0) & (b_block >= 0) & (k < K))[None, :]
        inside = meets & (m * BM + i < M)
        a = operand(a_ptr, a_positions_ptr, a_block, z, m, i, k[None, :], inside, M, K, BM, BK, TRANS[0])
        inside = meets & (col * BN + tl.trans(j) < N)
        b = operand(
            b_ptr, b_positions_ptr, b_block, z, col, tl.trans(j), k[None, :], inside, N, K, BN, BK, not TRANS[1]
        )  # fmt: skip
        if UPCAST:
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc += tl.dot(a, tl.trans(b), input_precision=PRECISION)
    real = (m * BM + i < M) & (col * BN + j < N)
    acc = tl.where(lost, float("nan"), acc)
    if out_offsets_ptr is not None:
        acc = tl.where(real | lost, acc, 0.0)
        to = entry.to(tl.int64) * (BM * BN) + (i * BN + j)
        tl.store(out_ptr + to, acc.to(out_ptr.dtype.element_ty))
    else:
        to = z.to(tl.int64) * M * N + ((m * BM + i).to(tl.int64) * N + (col * BN + j))
        tl.store(out_ptr + to, acc.to(out_ptr.dtype.element_ty), mask=real)


def tile_of(bm: int, bn: int, k: int, size: int, tiles: int, programs: int) -> tuple[int, int, int]:
    """Rows, columns and step of a tile of blocks, of which there are so many tiles of 64 x 64."""
    side = 64 if tiles >= programs else 32
    step = max(16, min(launch.next_power_of_2(k), 256 // size))
    return min(bm, side), min(bn, side), step


def launch_matmul_small(
    a: Tensor, b: Tensor, out: Tensor, parts: tuple[tuple[Any, ...], ...], sizes: tuple[int, int, int, int],
    block: tuple[int, int, int], trans: tuple[bool, bool], tile: tuple[int, int, int] | None = None, warps: int = 4,
) -> None:  # fmt: skip
    """Fills out. a and b are contiguous as they are stored, `parts` the layouts of a, b and out, 0 a block of none."""
    of_a, of_b, of_out = parts
    z, m, k, n = sizes
    bm, bk, bn = (size or 64 for size in block)
    programs = tuning.programs(a.device)
    capacities = [0 if of[0] is None else of[1].shape[0] for of in parts]
    blocks = z * launch.cdiv(m, bm) * launch.cdiv(n, bn) if of_out[0] is None else capacities[2]
    if tile is None:
        tile = tile_of(bm, bn, k, a.element_size(), blocks * launch.cdiv(bm, 64) * launch.cdiv(bn, 64), programs)
    lists = of_a[0], of_a[5], of_b[0], of_b[5], of_out[0]
    into = (None, None) if of_out[0] is None else (of_out[2], of_out[1])
    meta = {"BLOCK": (bm, bk, bn), "TRANS": trans, "TILE": tile, **tuning.dot_precision(a, k)}
    grid = (blocks * (bm // tile[0]) * (bn // tile[1]), 1, 1)
    args = (a, b, out, *lists, *into, z, m, k, n, *capacities)
    _blocksparse_matmul_small_kernel(grid, args, meta, num_warps=warps, num_stages=3)


_SIZES = dict.fromkeys(("Z", "M", "K", "N", "a_capacity", "b_capacity", "out_capacity"), "i32")
_POINTERS = dict.fromkeys(("a_offsets_ptr", "a_positions_ptr", "b_offsets_ptr", "b_positions_ptr"), "*i32")
_OUT = dict.fromkeys(("out_offsets_ptr", "out_rows_ptr", "out_index_ptr"), "*i32")
EXAMPLES = {
    _blocksparse_matmul_small_kernel: {
        "signature": {"a_ptr": "*bf16", "b_ptr": "*bf16", "out_ptr": "*bf16", **_POINTERS, **_OUT, **_SIZES},
        "constexprs": {
            "BLOCK": (64, 64, 64), "TRANS": (False, False), "TILE": (32, 32, 128), "PRECISION": "ieee",
            "UPCAST": False,
        },
        "num_warps": 4,
        "num_stages": 3,
    },
}  # fmt: skip
