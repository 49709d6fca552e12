"""Block-sparse attention on Hopper, forward: one warpgroup a tile of BLOCK_M queries, several programs an SM.

A program walks the key blocks that the layout lists for its block row, BLOCK_N keys a step. Blocks of keys and values
are contiguous tiles, which the copy engine brings into a ring of STAGES each; queries stay in shared memory. A step
starts the product of the scores and behind it that of the step before's weights and values, and computes its softmax
while the latter is at work. What one program leaves idle the others on the SM fill: programs of a single warpgroup need
no warp that loads, and rows of unequal length even out. The base-2 softmax has the scale folded into its exponent.

Steps are masked one by one: only those that reach past the last key, past a sequence's length or past the diagonal.
"""

from dataclasses import dataclass

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

from gossamer._core import launch

_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.7, 3.6
INV_LN2 = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def tile_at(blocks_ptr, begin, step, steps, SPLIT: gl.constexpr, TILE: gl.constexpr):
    """First row of the tile of `step`: listed blocks of SPLIT tiles of TILE rows."""
    block = gl.load(blocks_ptr + begin + step // SPLIT, mask=step < steps, other=0)
    return (block * SPLIT + step % SPLIT) * TILE


@gluon.jit
def fetch(desc, buffers, ready, slot, batch, head, row, pred):
    """Asks for a tile of rows of one head."""
    bar = ready.index(slot)
    mbarrier.expect(bar, desc.block_type.nbytes, pred=pred)
    tma.async_copy_global_to_shared(desc, [batch, head, row, 0], bar, buffers.index(slot), pred=pred)


@gluon.jit
def matrix(buffers, slot):
    """A tile of the ring as a matrix."""
    ROWS: gl.constexpr = buffers.shape[3]
    D: gl.constexpr = buffers.shape[4]
    return buffers.index(slot).reshape([ROWS, D])


@gluon.jit
def masked(s, at, whole, last, keys):
    """Scores of keys from `at` on; those past `last` of their row are none. Up to `whole` none is."""
    if at + s.shape[1] > whole:
        s = gl.where(gl.expand_dims(at + keys, 0) < gl.expand_dims(last, 1), s, float("-inf"))
    return s


@gluon.jit
def soften(s, m, l, scale):
    """(weights, factor for what was summed before, largest score, sum of weights): a step of the softmax, base 2."""
    most = gl.maximum(m, gl.max(s, 1) * scale)
    base = gl.where(most == float("-inf"), 0.0, most)
    weight = exp2(s * scale - gl.expand_dims(base, 1))
    factor = exp2(m - base)
    return weight, factor, most, l * factor + gl.sum(weight, 1)


@gluon.jit
def _attention_fwd_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, offsets_ptr, columns_ptr, lengths_ptr,
    stride_zb, stride_zh, H, GROUP, rows, Tq, Tk, scale,
    SPLIT_Q: gl.constexpr, SPLIT_K: gl.constexpr, CAUSAL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[2]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    D: gl.constexpr = q_desc.block_type.shape[3]
    WARPS: gl.constexpr = gl.num_warps()
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 16])
    values: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    weights: gl.constexpr = gl.DotOperandLayout(0, values, 2)

    q_buf = gl.allocate_shared_memory(q_desc.dtype, [1, 1, 1, BLOCK_M, D], q_desc.layout)
    k_bufs = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, BLOCK_N, D], k_desc.layout)
    v_bufs = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, BLOCK_N, D], v_desc.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready.index(0), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
    fence_async_shared()
    _barrier()

    tile = gl.program_id(0) % (rows * SPLIT_Q)
    pair = gl.program_id(0) // (rows * SPLIT_Q)
    batch = pair // H
    head = pair % H
    first = tile * BLOCK_M
    row = (batch * stride_zb + head * stride_zh) * rows + tile // SPLIT_Q
    begin = gl.load(offsets_ptr + row)
    steps = (gl.load(offsets_ptr + row + 1) - begin) * SPLIT_K
    limit = Tk
    if lengths_ptr is not None:
        limit = gl.minimum(gl.load(lengths_ptr + batch), Tk)

    fetch(q_desc, q_buf, q_ready, 0, batch, head, first, True)
    for i in gl.static_range(STAGES):
        start = tile_at(columns_ptr, begin, i, steps, SPLIT_K, BLOCK_N)
        fetch(k_desc, k_bufs, k_ready, i, batch, head // GROUP, start, i < steps)
        fetch(v_desc, v_bufs, v_ready, i, batch, head // GROUP, start, i < steps)

    lines = first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, scores))
    keys = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, scores))
    last = gl.minimum(lines + (Tk - Tq + 1), limit) if CAUSAL else gl.zeros_like(lines) + limit
    whole = gl.minimum(first + (Tk - Tq + 1), limit) if CAUSAL else limit
    m = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, scores))
    l = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(1, scores))
    o = gl.zeros([BLOCK_M, D], gl.float32, values)
    none = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores)
    q = matrix(q_buf, 0)
    mbarrier.wait(q_ready.index(0), 0)
    if steps > 0:
        at = tile_at(columns_ptr, begin, 0, steps, SPLIT_K, BLOCK_N)
        ahead = tile_at(columns_ptr, begin, STAGES, steps, SPLIT_K, BLOCK_N)
        mbarrier.wait(k_ready.index(0), 0)
        s = warpgroup_mma(q, matrix(k_bufs, 0).permute((1, 0)), none, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        _barrier()
        fetch(k_desc, k_bufs, k_ready, 0, batch, head // GROUP, ahead, STAGES < steps)
        s = masked(s, at, whole, last, keys)
        weight, _, m, l = soften(s, m, l, scale)
        p = gl.convert_layout(weight.to(q_desc.dtype), weights)
        behind = ahead
        for step in range(1, steps):
            slot = step % STAGES
            before = (step - 1) % STAGES
            at = tile_at(columns_ptr, begin, step, steps, SPLIT_K, BLOCK_N)
            ahead = tile_at(columns_ptr, begin, step + STAGES, steps, SPLIT_K, BLOCK_N)
            mbarrier.wait(k_ready.index(slot), step // STAGES & 1)
            s = warpgroup_mma(q, matrix(k_bufs, slot).permute((1, 0)), none, use_acc=False, is_async=True)
            mbarrier.wait(v_ready.index(before), (step - 1) // STAGES & 1)
            o = warpgroup_mma(p, matrix(v_bufs, before), o, is_async=True)
            s = warpgroup_mma_wait(1, deps=(s,))
            # Every warp has read these keys, and the values of the step before last.
            _barrier()
            fetch(k_desc, k_bufs, k_ready, slot, batch, head // GROUP, ahead, step + STAGES < steps)
            if step > 1:
                second = (step - 2) % STAGES
                fetch(v_desc, v_bufs, v_ready, second, batch, head // GROUP, behind, step - 2 + STAGES < steps)
                behind = tile_at(columns_ptr, begin, step - 1 + STAGES, steps, SPLIT_K, BLOCK_N)
            s = masked(s, at, whole, last, keys)
            weight, factor, m, l = soften(s, m, l, scale)
            o = warpgroup_mma_wait(0, deps=(o,))
            o = o * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, values)), 1)
            p = gl.convert_layout(weight.to(q_desc.dtype), weights)
        before = (steps - 1) % STAGES
        mbarrier.wait(v_ready.index(before), (steps - 1) // STAGES & 1)
        o = warpgroup_mma(p, matrix(v_bufs, before), o, is_async=True)
        o = warpgroup_mma_wait(0, deps=(o,))
    inverse = gl.where(l > 0, 1.0 / l, gl.where(l == 0, 0.0, l))
    o = o * gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, values)), 1)
    lse = gl.where(l == 0, float("-inf"), (m + gl.log2(l)) * LN2)
    gl.store(lse_ptr + pair.to(gl.int64) * Tq + lines, lse, mask=lines < Tq)
    # The queries have been read by all warps: the result takes their place.
    _barrier()
    q.store(o.to(q_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [batch, head, first, 0], q_buf.index(0))
    tma.store_wait(0)


_attention_fwd = launch.Kernel(_attention_fwd_kernel)


def descriptor(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Tiles of `rows` rows of `[B, H, T, D]`, of which `columns` columns: what lies outside reads as 0."""
    block = [1, 1, rows, columns]
    layout = gl.NVMMASharedLayout(128, 16, 4)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block, layout)


def width(d: int) -> int:
    """Columns of a tile for heads of d: whole spans of 128 bytes."""
    return 64 if d <= 64 else 128


@dataclass(frozen=True)
class Tile:
    """Queries and keys of a step, depth of the rings, warps, and registers a thread (None: as many as it takes)."""

    block_m: int
    block_n: int
    stages: int
    warps: int
    registers: int | None = None


def launch_attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, columns: Tensor, lengths: Tensor | None, z: tuple[int, int],
    block: tuple[int, int], causal: bool, scale: float, tile: Tile,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of q `[B, H, Tq, D]` and k, v `[B, H / GROUP, Tk, D]`; `z` is what batch and head step in the lists."""
    (b, h, tq, d), (_, hk, tk, _) = q.shape, k.shape
    rows = launch.cdiv(tq, block[0])
    split = block[0] // tile.block_m, block[1] // tile.block_n
    out, lse = q.new_empty(q.shape), q.new_empty((b, h, tq), dtype=torch.float32)
    w = width(d)
    ends = descriptor(q, tile.block_m, w), descriptor(out, tile.block_m, w)
    k_desc, v_desc = descriptor(k, tile.block_n, w), descriptor(v, tile.block_n, w)
    sizes = (*z, h, h // hk, rows, tq, tk)
    meta = {"SPLIT_Q": split[0], "SPLIT_K": split[1], "CAUSAL": causal, "STAGES": tile.stages}
    key = (sizes, d, q.stride(), k.stride(), v.stride(), q.dtype, lengths is None, block, causal, scale, tile)
    args = (ends[0], k_desc, v_desc, ends[1], lse, offsets, columns, lengths, *sizes, scale * 1.4426950408889634)
    grid = (rows * split[0] * b * h, 1, 1)
    _attention_fwd(key, grid, args, meta, num_warps=tile.warps, maxnreg=tile.registers)
    return out, lse
