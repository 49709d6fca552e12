"""op(A) @ op(B), each of A, B and the result dense or block-sparse, through pointers: every dtype, block and GPU.

A program owns a tile of the result: one block row of it by TILE_N columns. These are neighbours where the result is
dense, and the next present blocks of the row, gathered, where it is sparse, so that small blocks still fill a wide
product and a tile of A is read once for all of them. The steps along K follow the list of A's block row, which is that
of its columns where A is stored transposed; only two dense operands are walked from end to end. The launcher turns
a product with a dense left and a sparse right operand around: the transposed product has its list on the left.

Where both operands are sparse, the program first goes through A's list and keeps the entries that meet a present block
of B in any of the tile's columns, and these blocks, in a list of its own in global memory; for a tile of one block
this is exactly the pairs to be multiplied. Missing blocks of B in the other columns are read as zeros. These programs
are as many as the GPU holds a few times over and walk the tiles, so that the lists stay small. The operands of a step
are read by the list in the step before: a load that waits for another one would cost the compiler its buffers.

Tiles are ordered in bands of 1,024 rows by column: programs at work at one time share rows of A and columns of B.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer.blocksparse._triton.tensor import cell, fill_behind, from_dense, lost_blocks, place, to_dense
from gossamer.blocksparse._triton.transpose import turn
from gossamer.blocksparse.matmul_path import Plan, Turned, narrowed, plan_of, widest_for
from gossamer.blocksparse.records import BlocksparseFromDense, BlocksparseMatmul, BlocksparseToDense

WAVES = 16
"""Programs for each multiprocessor where programs keep lists."""


@triton.jit
def wide(number):
    """int64 of what the interpreter may hold as a plain number."""
    return tl.full([], 0, tl.int64) + number


@triton.jit
def in_list(order_ptr, index_ptr, entry, has, count):
    """(block, its column) of an entry of a list of rows, or of one of columns, which has an order."""
    block = entry
    if order_ptr is not None:
        block = tl.load(order_ptr + entry, mask=has, other=0)
    return block, tl.load(index_ptr + block, mask=has, other=0) % count


@triton.jit
def meetings(lists, b_positions_ptr, pairs_ptr, z, inner, cols, COLUMNS: tl.constexpr, TRANS: tl.constexpr):
    """Writes (block, its column, blocks of B or -1) of the entries of A that meet a block of B in any of the columns;
    how many."""
    order_ptr, index_ptr, begin, count, out_order_ptr, out_indices_ptr, first, end = lists
    SIZE: tl.constexpr = 2 + COLUMNS
    # Other warps may still read the list of the tile before.
    tl.debug_barrier()
    kept = 0
    for start in range(0, count, 128):
        entry = start + tl.arange(0, 128)
        has = entry < count
        block, k = in_list(order_ptr, index_ptr, begin + entry, has, inner)
        meets = tl.zeros([128], tl.int32)
        for c in tl.static_range(COLUMNS):
            found = block_of(
                b_positions_ptr, out_order_ptr, out_indices_ptr, z, k, first + c, end, inner, cols, has, TRANS
            )
            meets |= (found >= 0).to(tl.int32)
        rank = kept + tl.cumsum(meets, 0) - meets
        tl.store(pairs_ptr + SIZE * rank, block, mask=meets != 0)
        tl.store(pairs_ptr + SIZE * rank + 1, k, mask=meets != 0)
        for c in tl.static_range(COLUMNS):
            found = block_of(
                b_positions_ptr, out_order_ptr, out_indices_ptr, z, k, first + c, end, inner, cols, has, TRANS
            )
            tl.store(pairs_ptr + SIZE * rank + 2 + c, found, mask=meets != 0)
        kept += tl.sum(meets, 0)
    tl.debug_barrier()
    return kept


@triton.jit
def block_of(
    positions_ptr, order_ptr, index_ptr, z, k, entry, end, inner, cols, has, TRANS: tl.constexpr
):  # fmt: skip
    """The blocks of B in the rows k and in a column of the tile, or -1."""
    exists = entry < end
    column = entry
    if index_ptr is not None:
        _, column = in_list(order_ptr, index_ptr, entry, exists, cols)
    return tl.load(positions_ptr + place(z, k, column, inner, cols, TRANS), mask=has & exists, other=-1)


@triton.jit
def load_blocks(
    b_ptr, found, i, exists, j, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TRANS: tl.constexpr
):  # fmt: skip
    """A tile of stored blocks side by side, by their numbers; absent ones are zeros."""
    present = exists[:, None] & (found >= 0)[None, :]
    base = found.to(tl.int64)[None, :] * (HEIGHT * WIDTH)
    return tl.load(b_ptr + base + cell(i[:, None], j[None, :], HEIGHT, WIDTH, TRANS), mask=present, other=0.0)


@triton.jit
def find_step(lists, pairs_ptr, begin, at, count, column, inner, COLUMNS: tl.constexpr):
    """(block of A, its column of blocks, blocks of B) of an entry of a tile's list; `column` counts the tile's."""
    offsets_ptr, order_ptr, index_ptr = lists
    has = at < count
    if pairs_ptr is not None:
        record = pairs_ptr + (2 + COLUMNS) * at
        block = tl.load(record, mask=has, other=0)
        k = tl.load(record + 1, mask=has, other=0)
        return block, k, tl.load(record + 2 + column, mask=has & (column >= 0), other=-1)
    elif offsets_ptr is not None:
        block, k = in_list(order_ptr, index_ptr, begin + at, has, inner)
        return block, k, column
    else:
        return at, at, column


@triton.jit
def load_tile(ptr, i, j, exists, height, width, TRANS: tl.constexpr):
    """Elements (i, j) of a matrix, from its origin or that of a part on."""
    return tl.load(ptr + cell(i[:, None], j[None, :], height, width, TRANS), mask=exists, other=0.0)


@triton.jit
def find_tile(tile, rows, across, GROUP: tl.constexpr):
    """(matrix, block row, which tile of it): in bands of GROUP block rows, column by column."""
    at = tile % (rows * across)
    band = at // (GROUP * across)
    height = tl.minimum(rows - band * GROUP, GROUP)
    within = at % (GROUP * across)
    return tile // (rows * across), band * GROUP + within % height, within // height


@triton.jit
def columns_of(lists, row, first, cols, capacity, j):
    """(first column of a tile or first entry of the row's list, the end of either, blocks of the result, their columns)
    of the tile's j-th columns."""
    offsets_ptr, order_ptr, index_ptr = lists
    if offsets_ptr is not None:
        first += tl.load(offsets_ptr + row)
        end = tl.minimum(tl.load(offsets_ptr + row + 1), capacity)
        block, col = in_list(order_ptr, index_ptr, first + j, first + j < end, cols)
        return first, end, block, col
    else:
        return first, cols, first + j, first + j


@triton.jit
def entries_of(offsets_ptr, row, inner):
    """(first entry, number of entries) of A's block row; of a dense matrix, all columns of blocks."""
    if offsets_ptr is not None:
        begin = tl.load(offsets_ptr + row)
        return begin, tl.load(offsets_ptr + row + 1) - begin
    else:
        return 0, inner


@launch.kernel(specialize=("M",), do_not_specialize=["a_capacity", "b_capacity", "out_capacity"])
def _blocksparse_matmul_kernel(
    a_ptr, b_ptr, out_ptr, a_offsets_ptr, a_order_ptr, a_indices_ptr, b_offsets_ptr, b_positions_ptr, out_offsets_ptr,
    out_order_ptr, out_indices_ptr, pairs_ptr, Z, M, K, N, a_capacity, b_capacity, out_capacity,
    BLOCK: tl.constexpr, TRANS: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """BLOCK is the blocks along M, K and N; TRANS what of A, B and the result is stored transposed, and the blocks
    of A and B in themselves; TILE the columns and the step along K of a tile. A matrix is dense where its offsets are
    None."""
    BM: tl.constexpr = BLOCK[0]
    BK: tl.constexpr = BLOCK[1]
    BN: tl.constexpr = BLOCK[2]
    TILE_N: tl.constexpr = TILE[0]
    STEP: tl.constexpr = TILE[1]
    SUB: tl.constexpr = BK // STEP
    COLUMNS: tl.constexpr = TILE_N // BN
    GROUP: tl.constexpr = 1024 // BM
    rows, inner, cols = tl.cdiv(M, BM), tl.cdiv(K, BK), tl.cdiv(N, BN)
    lost = lost_blocks(a_offsets_ptr, Z * rows, a_capacity)
    lost |= lost_blocks(b_offsets_ptr, Z * (cols if TRANS[1] else inner), b_capacity)
    lost |= lost_blocks(out_offsets_ptr, Z * rows, out_capacity)
    across = tl.cdiv(cols, COLUMNS)
    i, j, step_k = tl.arange(0, BM), tl.arange(0, TILE_N), tl.arange(0, STEP)
    for tile in range(tl.program_id(0), Z * rows * across, tl.num_programs(0)):
        z, m, first = find_tile(tile, rows, across, GROUP)
        first *= COLUMNS
        out_lists = (out_offsets_ptr, out_order_ptr, out_indices_ptr)
        first, end, target, col = columns_of(out_lists, z * rows + m, first, cols, out_capacity, j // BN)
        held = first + j // BN < end
        n = col * BN + j % BN
        row = m * BM + i
        begin_a, count = entries_of(a_offsets_ptr, z * rows + m, inner)
        # A program without columns has nothing to do, and without all blocks nothing can be right.
        count = tl.where((first < end) & (lost == 0), count, 0)
        pairs = pairs_ptr
        if b_positions_ptr is not None:
            pairs += tl.program_id(0).to(tl.int64) * (2 + COLUMNS) * inner
            lists = (a_order_ptr, a_indices_ptr, begin_a, count, out_order_ptr, out_indices_ptr, first, end)
            count = meetings(lists, b_positions_ptr, pairs, z, inner, cols, COLUMNS, TRANS[1])
        a_lists = (a_offsets_ptr, a_order_ptr, a_indices_ptr)
        column = tl.where(held, j // BN, -1)
        block, k_block, found = find_step(a_lists, pairs, begin_a, 0, count, column, inner, COLUMNS)
        acc = tl.zeros([BM, TILE_N], tl.float32)
        for step in range(0, count * SUB):
            inside = step % SUB * STEP + step_k
            exists = k_block * BK + inside < K
            if a_offsets_ptr is not None:
                block_ptr = a_ptr + block.to(tl.int64) * (BM * BK)
                a = load_tile(block_ptr, i, inside, exists[None, :], BM, BK, TRANS[3])
            else:
                # From the tile's corner on, 32 bits are enough.
                corner = wide(z) * M * K + cell(wide(m) * BM, wide(k_block) * BK, M, K, TRANS[0])
                a = load_tile(a_ptr + corner, i, inside, (row < M)[:, None] & exists[None, :], M, K, TRANS[0])
            if b_positions_ptr is not None:
                b = load_blocks(b_ptr, found, inside, exists, j % BN, BK, BN, TRANS[4])
            else:
                corner = wide(z) * K * N + cell(wide(k_block) * BK, 0, K, N, TRANS[1])
                exists = exists[:, None] & (held & (n < N))[None, :]
                # Stored transposed, columns are far apart.
                b = load_tile(b_ptr + corner, inside, n.to(tl.int64 if TRANS[1] else tl.int32), exists, K, N, TRANS[1])
            block, k_block, found = find_step(a_lists, pairs, begin_a, (step + 1) // SUB, count, column, inner, COLUMNS)
            if UPCAST:
                a, b = a.to(tl.float32), b.to(tl.float32)
            acc += tl.dot(a, b, input_precision=PRECISION)
        real = (row < M)[:, None] & (n < N)[None, :]
        acc = tl.where(lost, float("nan"), acc)
        if out_offsets_ptr is not None:
            to = target.to(tl.int64)[None, :] * (BM * BN) + cell(i[:, None], (j % BN)[None, :], BM, BN, TRANS[2])
            acc = tl.where(real | lost, acc, 0.0)
            tl.store(out_ptr + to, acc.to(out_ptr.dtype.element_ty), mask=held[None, :])
        else:
            to = wide(z) * M * N + cell(row.to(tl.int64)[:, None], n.to(tl.int64)[None, :], M, N, TRANS[2])
            tl.store(out_ptr + to, acc.to(out_ptr.dtype.element_ty), mask=real)
    if out_offsets_ptr is not None:
        # Where blocks are lost a list of columns may miss some, so that the tiles alone would not reach every block.
        fill_behind(out_ptr, tl.load(out_offsets_ptr + Z * rows), out_capacity, lost, BM * BN, BM * BN)


@dataclass(frozen=True)
class Tile:
    """Columns and step along K of a tile, warps, and stages of loads ahead."""

    columns: int
    step: int
    warps: int
    stages: int


HOPPER = {
    (32, 2, 256): Tile(256, 32, 4, 3),
    (64, 2, 64): Tile(64, 64, 4, 3),
    (64, 2, 128): Tile(128, 64, 4, 3),
    (64, 2, 256): Tile(256, 32, 4, 4),
    (64, 4, 256): Tile(256, 32, 8, 5),
    (128, 2, 128): Tile(128, 64, 8, 4),
    (128, 2, 256): Tile(256, 64, 8, 3),
    (128, 4, 256): Tile(256, 32, 8, 4),
}
"""(blocks' rows, bytes of an element, columns) -> the fastest tile on one H200: n 4,096, four matrices, all three
block-sparse, 12 tiles for blocks of 64, 6 for blocks of 32, 4 for blocks of 128, and 7 in TF32. Two to four programs
share a multiprocessor and hide more of each other's waits than one more buffer would."""


def tile_of(bm: int, bk: int, bn: int, width: int, element_size: int, hopper: bool) -> Tile:
    """The tile for blocks along M, K and N, 0 where nothing cuts that dimension, no wider than `width` asks for;
    `hopper` says whether the GPU is one, and the product one of its tensor cores."""
    half = element_size == 2 and hopper
    widest = 256 if hopper and (bm, element_size, 256) in HOPPER else 128
    columns = max(bn, min(widest, launch.next_power_of_2(max(width, 16))))
    tile = HOPPER.get((bm, element_size, columns)) if hopper else None
    if tile is not None:
        return replace(tile, step=min(bk or tile.step, tile.step))
    step = min(bk or 64, 64 if half else 32)
    stages = 4
    while stages > 2 and stages * (bm + columns) * step * element_size > 100 * 1024:
        stages -= 1
    return Tile(columns, step, 8 if bm * columns >= 128 * 128 and bm >= 128 else 4, stages)


def turned(call: BlocksparseMatmul, plan: Plan) -> Turned:
    """The product of a plan, with operands that lie as its kernel reads them."""
    a, b, (of_a, of_b, of_out), sizes, block = call.a, call.b, call.lists(), call.sizes, call.block
    trans_a, trans_b = call.trans_a, call.trans_b
    if plan.turned:
        a, b, of_a, of_b, trans_a, trans_b = b, a.mT, of_b, of_a, not trans_b, False
        sizes, block = (sizes[0], *sizes[:0:-1]), block[::-1]
    a, trans_a = (a.contiguous(), trans_a) if of_a is not None else _stored(a)
    b, trans_b = (b.contiguous(), trans_b) if of_b is not None else _stored(b)
    order = trans_a, trans_b
    if plan.by_inner:
        # Elements along the inner dimension have to be neighbours for TF32 products of Hopper; otherwise the compiler
        # would turn each tile around, four bytes at a time.
        if trans_a:
            a = turn(a if of_a is not None else a.mT)
        if not trans_b:
            b = turn(b) if of_b is not None else turn(b).mT
        order, trans_a, trans_b = (False, True), trans_a and of_a is not None, trans_b or of_b is None
    return Turned(a, b, [of_a, of_b, of_out], sizes, block, (trans_a, trans_b, plan.turned, *order))


def matmul(call: BlocksparseMatmul) -> Tensor:
    z, m, _, n = call.sizes
    shape = (z, m, n) if call.out_layout is None else (call.out_form[7], call.block[0], call.block[2])
    if 0 in shape:
        return call.a.new_empty(shape)
    plan = plan_of(call)
    if plan.path == "dense":
        return through_dense(call)
    out = torch.empty(shape, dtype=call.a.dtype, device=call.a.device)
    product = turned(call, plan)
    if plan.walk is not None:
        from gossamer.blocksparse._gluon.matmul import launch_matmul

        launch_matmul(plan.walk, product, out)
    else:
        launch_blocks(product, out, plan.wide)
    return out


def launch_blocks(product: Turned, out: Tensor, wide: bool) -> None:
    """Fills the result, by tiles for Hopper's tensor cores where they are `wide`."""
    a, b, (of_a, of_b, of_out), (z, m, k, n), (bm, bk, bn), trans = product
    capacities = [0 if lists is None else lists.form.capacity for lists in product.lists]
    rows = z * launch.cdiv(m, bm)
    across = n if of_out is None else bn * launch.cdiv(capacities[2], max(rows, 1))
    width = narrowed(widest_for(of_b, across, bn), max(bn, 64), rows, across, a.device)
    tile = tile_of(bm, bk, bn, width, a.element_size(), wide)
    tiles = rows * launch.cdiv(n, tile.columns)
    b_offsets, b_positions, pairs = None, None, None
    if of_b is not None:
        inner = launch.cdiv(k, bk)
        tiles = min(tiles, WAVES * tuning.programs(a.device))
        pairs = launch.scratch.get(max(tiles, 1) * (2 + tile.columns // bn) * inner, a.device).view(torch.int32)
        b_offsets, b_positions = of_b.row_offsets, of_b.positions
    of_left, of_result = (
        (None, None, None) if lists is None else lists.by(flip)
        for lists, flip in ((of_a, trans[0]), (of_out, trans[2]))
    )
    args = (a, b, out, *of_left, b_offsets, b_positions, *of_result, pairs, z, m, k, n, *capacities)
    meta = {"BLOCK": (bm, bk or tile.step, bn or tile.columns), "TRANS": trans, "TILE": (tile.columns, tile.step)}
    meta |= tuning.dot_precision(a, k)
    _blocksparse_matmul_kernel((max(tiles, 1), 1, 1), args, meta, num_warps=tile.warps, num_stages=tile.stages)


def through_dense(call: BlocksparseMatmul) -> Tensor:
    """The product of dense copies, and its blocks where the result has some."""
    parts = (call.a, call.a_layout, call.a_form), (call.b, call.b_layout, call.b_form)
    x, y = (
        x if layout is None else to_dense(BlocksparseToDense(x.contiguous(), layout, form, 0.0))
        for x, layout, form in parts
    )
    out = torch.bmm(x.mT if call.trans_a else x, y.mT if call.trans_b else y)
    return out if call.out_layout is None else from_dense(BlocksparseFromDense(out, call.out_layout, call.out_form))


def _stored(x: Tensor) -> tuple[Tensor, bool]:
    """(contiguous `[Z, rows, columns]`, whether it is stored transposed)."""
    if not x.is_contiguous() and x.mT.is_contiguous():
        return x, True
    return x.contiguous(), False


# All three sparse: the longest chain of lists.
EXAMPLES = {
    _blocksparse_matmul_kernel: {
        "a_order_ptr": None, "out_order_ptr": None, "BLOCK": (64, 64, 64), "TRANS": (False,) * 5, "TILE": (128, 32),
        "PRECISION": "ieee", "UPCAST": False, "num_stages": 3,
    },
}  # fmt: skip
