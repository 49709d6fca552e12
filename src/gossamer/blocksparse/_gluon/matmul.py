"""op(A) @ op(B) on Hopper, each of A, B and the result dense or block-sparse: one program an SM, a warp that loads and
two warpgroups that multiply.

Everything moves in boxes of 64 x 64 elements, which the copy engine swizzles as wgmma reads them. A stored block is one
box (block 64) or four (block 128) of the values seen as a matrix [capacity * height, width]; a dense operand is the
same grid without a table. Of float32, which wgmma multiplies as TF32, a box of an operand is 64 x 32, and K must be its
inner dimension: the caller copies what is stored the other way. So a tile's operands are gathered box by box into one
shared tile, and a single wgmma serves four boxes of columns, wherever they were stored and whichever way they lie. A
box of A whose block is absent is asked for at a negative row: the copy engine writes zeros without reading anything.
With those of B, twice or four times as many, it falls behind: they come out of one box of zeros in memory, which took
662 us for 1,030 (H200, n 4,096, three quarters of both operands present). It must not be asked to store at a negative
row, which is an illegal instruction: absent blocks of the result are left out.

A tile is 128 x 256 or 64 x 256 elements of the result. Its columns are neighbours (a grid), or the next present blocks
of a block row (strips, of which there are as many as a row could have: those behind the row's last block are passed
over); its steps along K are all of them, or those of the present blocks of A's row (`LIST`), so that absent blocks of A
cost nothing. 128 rows ask the L2 for 11 bytes per 1,000 operations, 64 for 19, which is what bounds them; but two block
rows rarely agree on their columns. The warpgroups share the rows of a tile of 128 and the columns of a tile of 64. The
ring of stages runs on across tiles: while one warpgroup stores, the other may multiply and the next tile's boxes
arrive.
"""

import torch
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
from gossamer.blocksparse.matmul_path import ACROSS, Turned, Walk

BOX = gl.constexpr(64)
LINE = gl.constexpr(128)
"""Bytes of a box's rows as wgmma reads them, the widest swizzle."""
COLUMNS = gl.constexpr(ACROSS // BOX.value)
"""Boxes across a tile."""
ZEROS = 32 * BOX.value * LINE.value // 4
"""Words of the boxes of zeros, one for a few programs: a single one is in so few slices of the L2 that these may hold
all programs up."""


@gluon.jit
def find_tile(tile, outputs, sizes, BLOCK: gl.constexpr, TILE: gl.constexpr):
    """(matrix, first row, first column or first listed block, end of the row's list, whether there is a tile)."""
    offsets_ptr, _, _, _, capacity = outputs
    Z, M, N, _K = sizes
    TILE_M: gl.constexpr = TILE[0]
    GROUP: gl.constexpr = TILE[1]
    STRIPS: gl.constexpr = TILE[2]
    tiles_m, tiles_n = gl.cdiv(M, TILE_M), gl.cdiv(N, BOX * COLUMNS)
    group, inside = tile // (GROUP * tiles_n), tile % (GROUP * tiles_n)
    height = gl.minimum(Z * tiles_m - group * GROUP, GROUP)
    row, across = group * GROUP + inside % height, inside // height
    z, m = row // tiles_m, row % tiles_m * TILE_M
    if STRIPS:
        first = gl.load(offsets_ptr + row) + across * (BOX * COLUMNS // BLOCK[2])
        end = gl.minimum(gl.load(offsets_ptr + row + 1), capacity)
        return z, m, first, end, first < end
    else:
        return z, m, across * (BOX * COLUMNS), 0, True


@gluon.jit
def find_column(box: gl.constexpr, first, end, outputs, sizes, BLOCK: gl.constexpr, TILE: gl.constexpr):
    """(column of a tile's box, the block that it is stored in or -1); the latter for strips only."""
    _, order_ptr, index_ptr, _, _ = outputs
    _, _M, N, _ = sizes
    if TILE[2]:
        entry = first + box * BOX // BLOCK[2]
        held = entry < end
        block = entry
        if order_ptr is not None:
            block = gl.load(order_ptr + entry, mask=held, other=-1)
        column = gl.load(index_ptr + block, mask=held, other=0) % gl.cdiv(N, BLOCK[2])
        return gl.where(held, column * BLOCK[2] + box * BOX % BLOCK[2], -BLOCK[2]), gl.where(held, block, -1)
    else:
        return first + box * BOX, -1


@gluon.jit
def find_block(positions_ptr, z, row, column, rows, columns, TRANS: gl.constexpr):
    """Number of block (row, column) of an operand, -1 where it is absent; TRANS: the layout is of the transposed."""
    if TRANS:
        at = (z * columns + column) * rows + row
    else:
        at = (z * rows + row) * columns + column
    inside = (row < rows) & (column < columns) & (column >= 0)
    return gl.load(positions_ptr + at, mask=inside, other=-1)


@gluon.jit
def place(block, SPARSE: gl.constexpr, TRANS: gl.constexpr, z, rows, i, j, HEIGHT: gl.constexpr, WIDTH: gl.constexpr):
    """Where the box at (i, j) of an operand starts in memory. `rows` are those of a stored dense matrix; HEIGHT and
    WIDTH of a block are along i and j."""
    if TRANS:
        if SPARSE:
            return block * WIDTH + j % WIDTH, i % HEIGHT
        else:
            return z * rows + j, i
    else:
        if SPARSE:
            return block * HEIGHT + i % HEIGHT, j % WIDTH
        else:
            return z * rows + i, j


@gluon.jit
def steps_of(z, m, exists, lists, sizes, BLOCK: gl.constexpr, LIST: gl.constexpr):
    """(first entry of A's row, its steps along K), none of a tile that does not exist."""
    if LIST:
        row = z * gl.cdiv(sizes[1], BLOCK[0]) + m // BLOCK[0]
        begin = gl.minimum(gl.load(lists[0] + row), lists[4])
        end = gl.minimum(gl.load(lists[0] + row + 1), lists[4])
        return begin, gl.where(exists, (end - begin) * (BLOCK[1] // BLOCK[3]), 0)
    else:
        return 0, gl.where(exists, gl.cdiv(sizes[3], BLOCK[3]), 0)


@gluon.jit
def find_step(step, steps, begin, lists, sizes, BLOCK: gl.constexpr, LIST: gl.constexpr):
    """(block of A or -1, first k) of a step; steps behind the last are harmless."""
    if LIST:
        _, order_ptr, index_ptr, _, _ = lists
        block = begin + step // (BLOCK[1] // BLOCK[3])
        if order_ptr is not None:
            block = gl.load(order_ptr + block, mask=step < steps, other=0)
        k = gl.load(index_ptr + block, mask=step < steps, other=0) % gl.cdiv(sizes[3], BLOCK[1])
        return block, k * BLOCK[1] + step % (BLOCK[1] // BLOCK[3]) * BLOCK[3]
    else:
        return -1, step * BLOCK[3]


@gluon.jit
def find_a(block, row, z, k, lists, sizes, BLOCK: gl.constexpr, TRANS: gl.constexpr, LIST: gl.constexpr):
    """The block of A at (row, k), where `block` is what A's list says."""
    if lists[3] is not None and not LIST:
        rows, columns = gl.cdiv(sizes[1], BLOCK[0]), gl.cdiv(sizes[3], BLOCK[1])
        return find_block(lists[3], z, row // BLOCK[0], k // BLOCK[1], rows, columns, TRANS[0])
    else:
        return block


@gluon.jit
def find_b(n, z, k, positions_ptr, sizes, BLOCK: gl.constexpr, TRANS: gl.constexpr):
    """The block of B at (k, n)."""
    if positions_ptr is not None:
        rows, columns = gl.cdiv(sizes[3], BLOCK[1]), gl.cdiv(sizes[2], BLOCK[2])
        return find_block(positions_ptr, z, k // BLOCK[1], n // BLOCK[2], rows, columns, TRANS[1])
    else:
        return -1


@gluon.jit
def load_a(desc, block, row, k, z, rows, ready, buffer, SPARSE: gl.constexpr, BLOCK: gl.constexpr, TRANS: gl.constexpr):
    y, x = place(block, SPARSE, TRANS[3], z, rows, row, k, BLOCK[0], BLOCK[1])
    tma.async_copy_global_to_shared(desc, [y, x], ready, buffer)


@gluon.jit
def load_b(
    descs, block, n, k, z, rows, ready, bufs, stage, box: gl.constexpr, SPARSE: gl.constexpr, BLOCK: gl.constexpr,
    TRANS: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    desc, zeros, blank = descs
    y, x = place(block, SPARSE, TRANS[4], z, rows, k, n, BLOCK[1], BLOCK[2])
    part = bufs.index(stage * PARTS + box // (COLUMNS // PARTS)).slice(box % (COLUMNS // PARTS) * BOX, BOX)
    if SPARSE:
        tma.async_copy_global_to_shared(desc, [y, x], ready, part, pred=block >= 0)
        tma.async_copy_global_to_shared(zeros, [blank, 0], ready, part, pred=block < 0)
    else:
        tma.async_copy_global_to_shared(desc, [y, x], ready, part)


@gluon.jit
def produce(
    inputs, ring, extent, BLOCK: gl.constexpr, TRANS: gl.constexpr, TILE: gl.constexpr, LIST: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that loads."""
    a_desc, b_desc, zeros_desc, lists, b_positions_ptr = inputs
    blank = 0
    if zeros_desc is not None:
        blank = gl.program_id(0) % (zeros_desc.shape[0] // BOX) * BOX
    b_descs = (b_desc, zeros_desc, blank)
    outputs, sizes, tiles = extent
    a_bufs, b_bufs, ready, empty = ring
    _Z, M, N, K = sizes
    A_SPARSE: gl.constexpr = lists[3] is not None
    B_SPARSE: gl.constexpr = b_positions_ptr is not None
    TILE_M: gl.constexpr = TILE[0]
    PARTS: gl.constexpr = 128 // TILE_M
    a_rows = gl.where(a_desc.shape[0] == (K if TRANS[3] else M), 0, K if TRANS[3] else M)
    b_rows = gl.where(b_desc.shape[0] == (N if TRANS[4] else K), 0, N if TRANS[4] else K)
    count = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        z, m, first, end, exists = find_tile(tile, outputs, sizes, BLOCK, TILE)
        n0, _ = find_column(0, first, end, outputs, sizes, BLOCK, TILE)
        n1, _ = find_column(1, first, end, outputs, sizes, BLOCK, TILE)
        n2, _ = find_column(2, first, end, outputs, sizes, BLOCK, TILE)
        n3, _ = find_column(3, first, end, outputs, sizes, BLOCK, TILE)
        begin, steps = steps_of(z, m, exists, lists, sizes, BLOCK, LIST)
        # Tables are read a step ahead of the copies that need them, and lists two.
        a_block, k = find_step(0, steps, begin, lists, sizes, BLOCK, LIST)
        a_next, k_next = find_step(1, steps, begin, lists, sizes, BLOCK, LIST)
        a0 = find_a(a_block, m, z, k, lists, sizes, BLOCK, TRANS, LIST)
        a1 = a0
        if TILE_M == 128:
            a1 = find_a(a_block, m + BOX, z, k, lists, sizes, BLOCK, TRANS, LIST)
        b0 = find_b(n0, z, k, b_positions_ptr, sizes, BLOCK, TRANS)
        b1 = find_b(n1, z, k, b_positions_ptr, sizes, BLOCK, TRANS)
        b2 = find_b(n2, z, k, b_positions_ptr, sizes, BLOCK, TRANS)
        b3 = find_b(n3, z, k, b_positions_ptr, sizes, BLOCK, TRANS)
        for step in range(steps):
            a_after, k_after = find_step(step + 2, steps, begin, lists, sizes, BLOCK, LIST)
            a0_next = find_a(a_next, m, z, k_next, lists, sizes, BLOCK, TRANS, LIST)
            a1_next = a0_next
            if TILE_M == 128:
                a1_next = find_a(a_next, m + BOX, z, k_next, lists, sizes, BLOCK, TRANS, LIST)
            b0_next = find_b(n0, z, k_next, b_positions_ptr, sizes, BLOCK, TRANS)
            b1_next = find_b(n1, z, k_next, b_positions_ptr, sizes, BLOCK, TRANS)
            b2_next = find_b(n2, z, k_next, b_positions_ptr, sizes, BLOCK, TRANS)
            b3_next = find_b(n3, z, k_next, b_positions_ptr, sizes, BLOCK, TRANS)
            stage = count % STAGES
            full = ready.index(stage)
            mbarrier.wait(empty.index(stage), (count // STAGES & 1) ^ 1)
            mbarrier.expect(full, (TILE_M + BOX * COLUMNS) * LINE)
            a_buf = a_bufs.index(stage)
            load_a(a_desc, a0, m, k, z, a_rows, full, a_buf.slice(0, BOX), A_SPARSE, BLOCK, TRANS)
            if TILE_M == 128:
                load_a(a_desc, a1, m + BOX, k, z, a_rows, full, a_buf.slice(BOX, BOX), A_SPARSE, BLOCK, TRANS)
            load_b(b_descs, b0, n0, k, z, b_rows, full, b_bufs, stage, 0, B_SPARSE, BLOCK, TRANS, PARTS)
            load_b(b_descs, b1, n1, k, z, b_rows, full, b_bufs, stage, 1, B_SPARSE, BLOCK, TRANS, PARTS)
            load_b(b_descs, b2, n2, k, z, b_rows, full, b_bufs, stage, 2, B_SPARSE, BLOCK, TRANS, PARTS)
            load_b(b_descs, b3, n3, k, z, b_rows, full, b_bufs, stage, 3, B_SPARSE, BLOCK, TRANS, PARTS)
            count += 1
            a0, a1, b0, b1, b2, b3 = a0_next, a1_next, b0_next, b1_next, b2_next, b3_next
            k, a_next, k_next = k_next, a_after, k_after


@gluon.jit
def halves(acc, layout: gl.constexpr):
    """Left and right half of an accumulator, whose columns j and j + N / 2 lie in one thread: no data moves."""
    N: gl.constexpr = acc.shape[1] // 2
    left, right = acc.reshape([BOX, 2, N]).permute((0, 2, 1)).split()
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def emit(
    acc, box: gl.constexpr, out_desc, buffer, where, outputs, sizes, BLOCK: gl.constexpr, TRANS: gl.constexpr,
    TILE: gl.constexpr,
):  # fmt: skip
    """Stores one box of a tile, once what was there before has left."""
    z, m, first, end, out_rows = where
    n, block = find_column(box, first, end, outputs, sizes, BLOCK, TILE)
    SPARSE: gl.constexpr = outputs[3] is not None
    if SPARSE:
        if not TILE[2]:
            rows, columns = gl.cdiv(sizes[1], BLOCK[0]), gl.cdiv(sizes[2], BLOCK[2])
            block = find_block(outputs[3], z, m // BLOCK[0], n // BLOCK[2], rows, columns, TRANS[2])
    y, x = place(block, SPARSE, TRANS[2], z, out_rows, m, n, BLOCK[0], BLOCK[2])
    if SPARSE:
        stored = block >= 0
    else:
        # A row of tiles may reach into the next matrix.
        stored = (m < sizes[1]) & (n < sizes[2])
    # The copy engine reads boxes that start at negative rows, but must not be asked to write one.
    if stored:
        tma.store_wait(0)
        if TRANS[2]:
            buffer.permute((1, 0)).store(acc.to(out_desc.dtype))
        else:
            buffer.store(acc.to(out_desc.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [y, x], buffer)


@gluon.jit
def fill_rest(
    PART: gl.constexpr, out_desc, poison, buffer, outputs, sizes, BLOCK: gl.constexpr, TRANS: gl.constexpr
):  # fmt: skip
    """Zeros behind the last block of the result, or NaN everywhere: where blocks are lost a list may miss some, so that
    the tiles alone would not reach every block."""
    offsets_ptr, _, _, _, capacity = outputs
    HEIGHT: gl.constexpr = BLOCK[2] if TRANS[2] else BLOCK[0]
    WIDTH: gl.constexpr = BLOCK[0] if TRANS[2] else BLOCK[2]
    DOWN: gl.constexpr = HEIGHT // BOX
    EACH: gl.constexpr = DOWN * (WIDTH // BOX)
    total = gl.where(poison == 0, gl.load(offsets_ptr + sizes[0] * gl.cdiv(sizes[1], BLOCK[0])), 0)
    first = total + (2 * gl.program_id(0) + PART)
    if first < capacity:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        buffer.store((gl.zeros([BOX, BOX], gl.float32, layout) + poison).to(out_desc.dtype))
        fence_async_shared()
        for block in range(first, capacity, 2 * gl.num_programs(0)):
            for box in gl.static_range(EACH):
                y = block * HEIGHT + box % DOWN * BOX
                tma.async_copy_shared_to_global(out_desc, [y, box // DOWN * BOX], buffer)
        tma.store_wait(0)


@gluon.jit
def overflow(offsets_ptr, rows, capacity):
    """NaN where a layout has more blocks than room, 0 elsewhere."""
    value = 0.0
    if offsets_ptr is not None:
        value = gl.where(gl.load(offsets_ptr + rows) > capacity, float("nan"), 0.0)
    return value


@gluon.jit
def consume(
    results, ring, extent, PART: gl.constexpr, BLOCK: gl.constexpr, TRANS: gl.constexpr, TILE: gl.constexpr,
    LIST: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Warpgroup PART of two: its 64 rows of a tile of 128, or its half of the columns of a tile of 64."""
    out_desc, poison, lists, buffers = results
    outputs, sizes, tiles = extent
    a_bufs, b_bufs, ready, empty = ring
    _Z, M, N, _K = sizes
    TILE_M: gl.constexpr = TILE[0]
    PARTS: gl.constexpr = 128 // TILE_M
    WIDTH: gl.constexpr = BOX * COLUMNS // PARTS
    DEEP: gl.constexpr = BLOCK[3] // 4
    whole: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, DEEP])
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    buffer = buffers.index(PART)
    out_rows = gl.where(TRANS[2], N, M)
    count = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        z, m, first, end, exists = find_tile(tile, outputs, sizes, BLOCK, TILE)
        _, steps = steps_of(z, m, exists, lists, sizes, BLOCK, LIST)
        acc = gl.zeros([BOX, WIDTH], gl.float32, whole) + poison
        for step in range(steps):
            stage = count % STAGES
            mbarrier.wait(ready.index(stage), count // STAGES & 1)
            a = a_bufs.index(stage).slice(PART * BOX if TILE_M == 128 else 0, BOX)
            b = b_bufs.index(stage * PARTS + (0 if PARTS == 1 else PART))
            if TRANS[3]:
                a = a.permute((1, 0))
            if TRANS[4]:
                b = b.permute((1, 0))
            else:
                b = b._reinterpret(b.dtype, [BOX, WIDTH], swizzled)
            acc = warpgroup_mma(a, b, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            # The step before has been read: its stage goes back to the warp that loads.
            mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1, pred=step > 0)
            count += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1, pred=steps > 0)

        pair: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, DEEP])
        single: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, DEEP])
        where = (z, m + (PART * BOX if TILE_M == 128 else 0), first, end, out_rows)
        if TILE_M == 128:
            left, right = halves(acc, pair)
            box0, box1 = halves(left, single)
            box2, box3 = halves(right, single)
            emit(box0, 0, out_desc, buffer, where, outputs, sizes, BLOCK, TRANS, TILE)
            emit(box1, 1, out_desc, buffer, where, outputs, sizes, BLOCK, TRANS, TILE)
            emit(box2, 2, out_desc, buffer, where, outputs, sizes, BLOCK, TRANS, TILE)
            emit(box3, 3, out_desc, buffer, where, outputs, sizes, BLOCK, TRANS, TILE)
        else:
            left, right = halves(acc, single)
            emit(left, 2 * PART, out_desc, buffer, where, outputs, sizes, BLOCK, TRANS, TILE)
            emit(right, 2 * PART + 1, out_desc, buffer, where, outputs, sizes, BLOCK, TRANS, TILE)
    tma.store_wait(0)
    if outputs[3] is not None:
        fill_rest(PART, out_desc, poison, buffer, outputs, sizes, BLOCK, TRANS)


@launch.Kernel
@gluon.jit(do_not_specialize=["Z", "M", "N", "K"])
def _blocksparse_matmul_kernel(
    a_desc, b_desc, out_desc, zeros_desc, a_offsets_ptr, a_order_ptr, a_indices_ptr, a_positions_ptr, b_offsets_ptr,
    b_positions_ptr, out_offsets_ptr, out_order_ptr, out_indices_ptr, out_positions_ptr, Z, M, N, K,
    BLOCK: gl.constexpr, TRANS: gl.constexpr, TILE: gl.constexpr, LIST: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """BLOCK is the sizes of blocks along M, K and N, and of a box along K; TRANS whether the layouts of A and B and
    the result as a whole are of the transposed, and whether A and B are in memory; TILE a tile's rows, how many
    rows of tiles are a band, and whether tiles are strips."""
    TILE_M: gl.constexpr = TILE[0]
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES, TILE_M, BLOCK[3]], a_desc.layout)
    PARTS: gl.constexpr = 128 // TILE_M
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES * PARTS, BOX * COLUMNS // PARTS, BLOCK[3]], b_desc.layout)
    buffers = gl.allocate_shared_memory(out_desc.dtype, [2, BOX, BOX], out_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    blocks_m, blocks_k, blocks_n = gl.cdiv(M, BLOCK[0]), gl.cdiv(K, BLOCK[1]), gl.cdiv(N, BLOCK[2])
    a_capacity = a_desc.shape[0] // (BLOCK[1] if TRANS[3] else BLOCK[0])
    b_capacity = b_desc.shape[0] // (BLOCK[2] if TRANS[4] else BLOCK[1])
    out_capacity = out_desc.shape[0] // (BLOCK[2] if TRANS[2] else BLOCK[0])
    poison = overflow(a_offsets_ptr, Z * blocks_m, a_capacity)
    poison += overflow(b_offsets_ptr, Z * (blocks_n if TRANS[1] else blocks_k), b_capacity)
    poison += overflow(out_offsets_ptr, Z * blocks_m, out_capacity)
    sizes = (Z, M, N, K)
    lists = (a_offsets_ptr, a_order_ptr, a_indices_ptr, a_positions_ptr, a_capacity)
    ring = (a_bufs, b_bufs, ready, empty)
    outputs = (out_offsets_ptr, out_order_ptr, out_indices_ptr, out_positions_ptr, out_capacity)
    tiles = Z * gl.cdiv(M, TILE_M) * gl.cdiv(N, BOX * COLUMNS)
    inputs = (a_desc, b_desc, zeros_desc, lists, b_positions_ptr)
    results = (out_desc, poison, lists, buffers)
    extent = (outputs, sizes, tiles)
    gl.warp_specialize(
        [
            (consume, (results, ring, extent, 0, BLOCK, TRANS, TILE, LIST, STAGES)),
            (consume, (results, ring, extent, 1, BLOCK, TRANS, TILE, LIST, STAGES)),
            (produce, (inputs, ring, extent, BLOCK, TRANS, TILE, LIST, STAGES)),
        ],
        [4, 1],
        [232, 40],
    )


_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


def launch_matmul(walk: Walk, product: Turned, out: Tensor) -> None:
    """Fills the result; behind the last block of a block-sparse one stand zeros."""
    (of_a, of_b, of_out), (z, m, k, n), block, trans = product.lists, product.sizes, product.block, product.trans
    # Dense operands as they are stored.
    a, b = (
        x.mT if lists is None and flip else x
        for x, lists, flip in zip((product.a, product.b), product.lists, trans[3:])
    )
    deep = LINE.value // a.element_size()
    boxed = block[0] or walk.tile_m, block[1] or BOX.value, block[2] or BOX.value, deep
    of_rows, of_result = (
        (None,) * 4 if lists is None else (*lists.by(flip), lists.positions)
        for lists, flip in ((of_a, trans[0]), (of_out, trans[2]))
    )
    most = z * launch.cdiv(m, walk.tile_m) * launch.cdiv(n, ACROSS)
    of_columns = (None, None) if of_b is None else (of_b.row_offsets, of_b.positions)
    descriptors = [_descriptor(tensor, width) for tensor, width in ((a, deep), (b, deep), (out, BOX.value))]
    zeros = launch.zeros.get(ZEROS, a.device).view(a.dtype).view(-1, deep)
    # Steps over all blocks, in tiles of 128 rows, ask half as often, and are faster with a single box.
    descriptors.append(None if of_b is None else _descriptor(zeros if walk.listed else zeros[: BOX.value], deep))
    tile = walk.tile_m, walk.band, walk.strips
    meta = {"BLOCK": boxed, "TRANS": trans, "TILE": tile, "LIST": walk.listed, "STAGES": 4}
    grid = (max(1, min(tuning.programs(a.device), most)), 1, 1)
    args = (*descriptors, *of_rows, *of_columns, *of_result, z, m, n, k)
    _blocksparse_matmul_kernel(grid, args, meta, num_warps=4, maxnreg=168)


def _descriptor(tensor: Tensor, width: int) -> TensorDescriptor:
    """Boxes of 64 x width of a contiguous `[*, rows, columns]` as a matrix, of which `fits` knows that they can be."""
    columns, block = tensor.shape[-1], [BOX.value, width]
    layout = gl.NVMMASharedLayout.get_default_for(block, _DTYPES[tensor.dtype])
    return TensorDescriptor(tensor, [tensor.numel() // columns, columns], [columns, 1], block, layout)


EXAMPLES = {
    _blocksparse_matmul_kernel: {
        "a_desc": [64, 64], "b_desc": [64, 64], "out_desc": [64, 64], "zeros_desc": [64, 64], "a_order_ptr": None,
        "out_order_ptr": None, "BLOCK": (64, 64, 64, 64), "TRANS": (False,) * 5, "TILE": (64, 64, True), "LIST": True,
        "STAGES": 4, "maxnreg": 168,
    },
}  # fmt: skip
