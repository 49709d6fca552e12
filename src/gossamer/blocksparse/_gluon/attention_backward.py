"""Block-sparse attention on Hopper, backward: two kernels of one warpgroup a tile, several programs an SM.

`_attention_dq_kernel` owns BLOCK queries and walks the key blocks that their block row lists; `_attention_dkdv_kernel`
owns BLOCK keys and walks the block rows that list their block, head by head of the group that shares the keys. Each
recomputes the weights from the log-sum-exp, holds its sums in registers and writes them once, so that nothing is added
in an order that could vary. That takes seven products where one kernel with atomics takes five.

The weights and their gradients go from accumulators into the next products as register operands: the kernel over keys
computes the transposed scores for that. Statistics, `[B, H, 2, padded]`, are the log-sum-exp in base 2, +inf where a
row has no keys or does not exist, and the row sums of grad * out.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gossamer._core import launch
from gossamer.blocksparse._gluon.attention import (
    LN2,
    cut_at,
    descriptor,
    emit,
    ends_of,
    example,
    exp2,
    fetch,
    matrix,
    owned,
    readable,
    ring_of,
    thread_barrier,
    tile_at,
    without,
    without_padding,
)
from gossamer.blocksparse.attention_lists import INV_LN2, Tile, column_of, config_of, owner_of, reached, row_of
from gossamer.blocksparse.attention_path import empty_like, problem_of
from gossamer.blocksparse.lists import Lists
from gossamer.blocksparse.records import BlocksparseAttentionBwd


@launch.Kernel
@gluon.jit(do_not_specialize=["capacity"])
def _attention_dq_kernel(
    q_desc, grad_desc, k_desc, v_desc, dq_desc, stats_ptr, offsets_ptr, columns_ptr, elements_ptr, lengths_ptr,
    B, H, GROUP, Tq, Tk, capacity, padded, scale, CONFIG: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = CONFIG.stages
    BLOCK: gl.constexpr = CONFIG.block_m
    SPLIT_K: gl.constexpr = CONFIG.block_k // BLOCK
    D: gl.constexpr = q_desc.block_type.shape[3]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, sums, 2)

    q_bufs, q_ready = ring_of(q_desc, 1)
    g_bufs, g_ready = ring_of(grad_desc, 1)
    k_bufs, k_ready = ring_of(k_desc, STAGES + 1)
    v_bufs, v_ready = ring_of(v_desc, STAGES)
    fence_async_shared()
    thread_barrier()

    tile, pair = owner_of(gl.program_id(0), Tq, CONFIG)
    batch, head, first = pair // H, pair % H, tile * BLOCK
    sizes = (B, H, GROUP, Tq, Tk, capacity)
    begin, count, limit, shift, lost = row_of((offsets_ptr, columns_ptr), lengths_ptr, tile, pair, sizes, CONFIG)
    steps = count * SPLIT_K
    fetch(q_desc, q_bufs, q_ready, 0, batch, head, first, True)
    fetch(grad_desc, g_bufs, g_ready, 0, batch, head, first, True)
    for i in gl.static_range(STAGES + 1):
        start = tile_at(columns_ptr, begin, i, steps, SPLIT_K, BLOCK)
        fetch(k_desc, k_bufs, k_ready, i, batch, head // GROUP, start, i < steps)
        if i < STAGES:
            fetch(v_desc, v_bufs, v_ready, i, batch, head // GROUP, start, i < steps)

    lines = first + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, scores))
    keys = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, scores))
    last, whole = ends_of(first, lines, limit, shift, CONFIG.causal)
    inner = lines % CONFIG.block_q
    stats_ptr += pair.to(gl.int64) * (2 * padded)
    # The last tiles of a block may lie beyond all statistics.
    known = lines < padded
    lse = gl.expand_dims(gl.load(stats_ptr + lines, mask=known, other=float("inf")), 1)
    delta = gl.expand_dims(gl.load(stats_ptr + padded + lines, mask=known, other=0.0), 1)
    dq = gl.zeros([BLOCK, D], gl.float32, sums)
    none = gl.zeros([BLOCK, BLOCK], gl.float32, scores)
    ds = gl.zeros([BLOCK, BLOCK], q_desc.dtype, operand)
    q, grad = owned(q_bufs, q_ready), owned(g_bufs, g_ready)
    for step in range(steps):
        k_slot = step % (STAGES + 1)
        v_slot = step % STAGES
        before = (step + STAGES) % (STAGES + 1)
        at = tile_at(columns_ptr, begin, step, steps, SPLIT_K, BLOCK)
        ahead_k = tile_at(columns_ptr, begin, step + STAGES - 1, steps, SPLIT_K, BLOCK)
        ahead_v = tile_at(columns_ptr, begin, step + STAGES, steps, SPLIT_K, BLOCK)
        start = cut_at(elements_ptr, begin + step // SPLIT_K)
        mbarrier.wait(k_ready.index(k_slot), step // (STAGES + 1) & 1)
        s = warpgroup_mma(q, matrix(k_bufs, k_slot).permute((1, 0)), none, use_acc=False, is_async=True)
        mbarrier.wait(v_ready.index(v_slot), step // STAGES & 1)
        dp = warpgroup_mma(grad, matrix(v_bufs, v_slot).permute((1, 0)), none, use_acc=False, is_async=True)
        # In the first step this is zero times numbers that may be NaN: the second starts afresh.
        dq = warpgroup_mma(ds, matrix(k_bufs, before), dq, use_acc=step > 1, is_async=True)
        s, dp = warpgroup_mma_wait(1, deps=(s, dp))
        # Every warp has read these values, and the keys of the step before last.
        thread_barrier()
        fetch(v_desc, v_bufs, v_ready, v_slot, batch, head // GROUP, ahead_v, step + STAGES < steps)
        free = (step + STAGES - 1) % (STAGES + 1)
        later = (step > 1) & (step + STAGES - 1 < steps)
        fetch(k_desc, k_bufs, k_ready, free, batch, head // GROUP, ahead_k, later)
        p = exp2(s * scale - lse)
        if at + BLOCK > whole:
            p = gl.where(gl.expand_dims(at + keys, 0) < gl.expand_dims(last, 1), p, 0.0)
            dp = gl.where(gl.expand_dims(at + keys, 0) < gl.expand_dims(last, 1), dp, 0.0)
        p = without(p, 0.0, elements_ptr, start, inner, keys, step % SPLIT_K, SPLIT_K, 0)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        ds = gl.convert_layout((p * (dp - delta)).to(q_desc.dtype), operand)
    if steps > 0:
        dq = warpgroup_mma(ds, matrix(k_bufs, (steps - 1) % (STAGES + 1)), dq, use_acc=steps > 1, is_async=True)
        dq = warpgroup_mma_wait(0, deps=(dq,))
    thread_barrier()
    emit(dq_desc, q_bufs.index(0), gl.where(lost, float("nan"), dq * (scale * LN2)), batch, head, first)
    tma.store_wait(0)


@gluon.jit
def masked_columns(p, at, inner, keys, end, limit, shift, elements_ptr, cut, step, CONFIG: gl.constexpr):
    """Weights of keys up to `end` by lines from `at` on; those of pairs that do not meet are 0, as are those that their
    block leaves out. The words of keys stand behind those of its lines."""
    BLOCK_K: gl.constexpr = CONFIG.block_k
    BEFORE: gl.constexpr = CONFIG.block_q * (BLOCK_K // 32)
    SPLIT_Q: gl.constexpr = CONFIG.block_q // p.shape[1]
    rows = gl.expand_dims(keys, 1)
    if CONFIG.causal:
        if gl.minimum(at + (shift + 1), limit) < end:
            p = gl.where(rows < gl.minimum(gl.expand_dims(at + inner, 0) + (shift + 1), limit), p, 0.0)
    elif limit < end:
        p = gl.where(rows < limit, p, 0.0)
    return without(p, 0.0, elements_ptr, cut, keys % BLOCK_K, inner, step % SPLIT_Q, SPLIT_Q, BEFORE)


@gluon.jit
def fetch_with(desc, buffers, stats_desc, stats, ready, slot, batch, head, H, row, pred):
    """`fetch`, with the statistics of the rows."""
    bar = ready.index(slot)
    mbarrier.expect(bar, desc.block_type.nbytes + stats_desc.block_type.nbytes, pred=pred)
    tma.async_copy_global_to_shared(desc, [batch, head, row, 0], bar, buffers.index(slot), pred=pred)
    tma.async_copy_global_to_shared(stats_desc, [2 * (batch * H + head), row], bar, stats.index(slot), pred=pred)


@launch.Kernel
@gluon.jit(do_not_specialize=["capacity"])
def _attention_dkdv_kernel(
    q_desc, grad_desc, k_desc, v_desc, dk_desc, dv_desc, stats_desc, offsets_ptr, order_ptr, rows_ptr, elements_ptr,
    lengths_ptr, B, H, GROUP, Tq, Tk, capacity, scale, CONFIG: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = CONFIG.stages
    BLOCK: gl.constexpr = CONFIG.block_n
    SPLIT_Q: gl.constexpr = CONFIG.block_q // BLOCK
    D: gl.constexpr = q_desc.block_type.shape[3]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, sums, 2)

    k_bufs, k_ready = ring_of(k_desc, 1)
    v_bufs, v_ready = ring_of(v_desc, 1)
    q_bufs, q_ready = ring_of(q_desc, STAGES)
    g_bufs, g_ready = ring_of(grad_desc, STAGES)
    stats = gl.allocate_shared_memory(gl.float32, [STAGES, 2, BLOCK], stats_desc.layout)
    fence_async_shared()
    thread_barrier()

    tiles = gl.cdiv(Tk, CONFIG.block_k) * (CONFIG.block_k // BLOCK)
    program = gl.program_id(0)
    batch, key_head = program // tiles // (H // GROUP), program // tiles % (H // GROUP)
    first = program % tiles * BLOCK
    sizes = (B, H, GROUP, Tq, Tk, capacity)
    limit, shift = reached(lengths_ptr, batch, Tq, Tk)
    fetch(k_desc, k_bufs, k_ready, 0, batch, key_head, first, True)
    fetch(v_desc, v_bufs, v_ready, 0, batch, key_head, first, True)

    keys = first + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, scores))
    inner = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, scores))
    dk = gl.zeros([BLOCK, D], gl.float32, sums)
    dv = gl.zeros([BLOCK, D], gl.float32, sums)
    none = gl.zeros([BLOCK, BLOCK], gl.float32, scores)
    k, v = owned(k_bufs, k_ready), owned(v_bufs, v_ready)
    count = 0
    for member in range(GROUP):
        head = key_head * GROUP + member
        lists = (offsets_ptr, order_ptr, rows_ptr)
        begin, blocks, base, lost = column_of(lists, first, limit, shift, batch, head, sizes, CONFIG)
        steps = blocks * SPLIT_Q
        for i in gl.static_range(STAGES):
            start = row_at(order_ptr, rows_ptr, begin, i, steps, base, SPLIT_Q, BLOCK)
            place = (count + i) % STAGES
            fetch_with(q_desc, q_bufs, stats_desc, stats, q_ready, place, batch, head, H, start, i < steps)
            fetch(grad_desc, g_bufs, g_ready, place, batch, head, start, i < steps)
        dk = warpgroup_mma_init(dk)
        dv = warpgroup_mma_init(dv)
        for step in range(steps):
            slot = count % STAGES
            at = row_at(order_ptr, rows_ptr, begin, step, steps, base, SPLIT_Q, BLOCK)
            ahead = row_at(order_ptr, rows_ptr, begin, step - 1 + STAGES, steps, base, SPLIT_Q, BLOCK)
            cut = cut_at(elements_ptr, gl.load(order_ptr + begin + step // SPLIT_Q))
            mbarrier.wait(q_ready.index(slot), count // STAGES & 1)
            s = warpgroup_mma(k, matrix(q_bufs, slot).permute((1, 0)), none, use_acc=False, is_async=True)
            mbarrier.wait(g_ready.index(slot), count // STAGES & 1)
            dp = warpgroup_mma(v, matrix(g_bufs, slot).permute((1, 0)), none, use_acc=False, is_async=True)
            s, dk, dv = warpgroup_mma_wait(1, deps=(s, dk, dv))
            # Every warp has read the queries of the step before, and what belongs to them.
            thread_barrier()
            free = (count + STAGES - 1) % STAGES
            later = (step > 0) & (step - 1 + STAGES < steps)
            fetch_with(q_desc, q_bufs, stats_desc, stats, q_ready, free, batch, head, H, ahead, later)
            fetch(grad_desc, g_bufs, g_ready, free, batch, head, ahead, later)
            lse = stats.index(slot).slice(0, 1).load(scores)
            p = exp2(s * scale - lse)
            p = masked_columns(p, at, inner, keys, first + BLOCK, limit, shift, elements_ptr, cut, step, CONFIG)
            dv = warpgroup_mma(gl.convert_layout(p.to(q_desc.dtype), operand), matrix(g_bufs, slot), dv, is_async=True)
            dp = warpgroup_mma_wait(1, deps=(dp,))
            delta = stats.index(slot).slice(1, 1).load(scores)
            ds = gl.convert_layout((p * (dp - delta)).to(q_desc.dtype), operand)
            dk = warpgroup_mma(ds, matrix(q_bufs, slot), dk, is_async=True)
            count += 1
        dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
        dk = gl.where(lost, float("nan"), dk)
        dv = gl.where(lost, float("nan"), dv)
        thread_barrier()
    emit(dk_desc, k_bufs.index(0), dk * (scale * LN2), batch, key_head, first)
    emit(dv_desc, v_bufs.index(0), dv, batch, key_head, first)
    tma.store_wait(0)


@gluon.jit
def row_at(order_ptr, rows_ptr, begin, step, steps, base, SPLIT: gl.constexpr, TILE: gl.constexpr):
    """First query of the tile of `step` in a column's list; `base` is the layout's first block row."""
    entry = gl.load(order_ptr + begin + step // SPLIT, mask=step < steps, other=0)
    block = gl.load(rows_ptr + entry, mask=step < steps, other=0) - base
    return (block * SPLIT + step % SPLIT) * TILE


SIDE = 64
TILE = Tile(SIDE, SIDE)
"""Of both kernels, which have as many queries as keys in a step: as measured on one H200 at D 64 (T 8,192, 16 heads,
densities of 50, 25 and 10%, blocks of 64 and 128), the fastest of four depths of the rings and bounds of registers;
taken over for D 128, where nothing was measured."""


def launch_attention_bwd(
    call: BlocksparseAttentionBwd, grad: Tensor, stats: Tensor, of_dq: Tile = TILE, of_dkdv: Tile = TILE
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; `grad` has contiguous rows."""
    p, lists, lengths = problem_of(call), Lists(call.layout, call.form), call.lengths
    q, grad = readable(call.q), readable(grad)
    k, v = without_padding(call.k, lengths), without_padding(call.v, lengths)
    dq, dk, dv = (empty_like(x) for x in (q, k, v))
    inputs = [descriptor(t, SIDE) for t in (q, grad, k, v)]
    dq_desc, dk_desc, dv_desc = (descriptor(t, SIDE) for t in (dq, dk, dv))
    padded, sizes = stats.shape[-1], (p.b, p.h, p.group, p.tq, p.tk, lists.form.capacity)
    stats_desc = TensorDescriptor(stats, [2 * p.b * p.h, padded], [padded, 1], [2, SIDE], STATS)
    masks, scale = (lists.elements, lengths), p.scale * INV_LN2
    offsets, *listed = lists.col_offsets, lists.transpose_order, lists.row_indices
    split, config = p.block[1] // SIDE, config_of(p, of_dkdv)
    args = (*inputs, dk_desc, dv_desc, stats_desc, offsets, *listed, *masks, *sizes, scale)
    grid = (p.columns * split * p.b * p.key_heads, 1, 1)
    _attention_dkdv_kernel(grid, args, {"CONFIG": config}, **config.options)
    offsets, split, config = lists.row_offsets, p.block[0] // SIDE, config_of(p, of_dq)
    args = (*inputs, dq_desc, stats, offsets, lists.col_indices, *masks, *sizes, padded, scale)
    grid = (p.rows * split * p.b * p.h, 1, 1)
    _attention_dq_kernel(grid, args, {"CONFIG": config}, **config.options)
    return dq, dk, dv


STATS = gl.NVMMASharedLayout(0, 32, 2)
_ROWS = dict.fromkeys(("q_desc", "grad_desc", "k_desc", "v_desc"), SIDE)
EXAMPLES = {
    _attention_dq_kernel: example(TILE, **_ROWS, dq_desc=SIDE),
    _attention_dkdv_kernel: example(TILE, **_ROWS, dk_desc=SIDE, dv_desc=SIDE)
    | {"stats_desc": f"tensordesc<fp32[2, {SIDE}],{STATS!r}>"},
}
