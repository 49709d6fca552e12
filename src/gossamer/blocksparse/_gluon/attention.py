"""Block-sparse attention on Hopper, forward: one warpgroup a tile of BLOCK_M queries, several programs an SM.

A program walks the key blocks that the layout lists for its block row, BLOCK_N keys a step. Blocks of keys and values
are contiguous tiles, which the copy engine brings into a ring of STAGES each; queries stay in shared memory. A step
starts the product of the scores and behind it that of the step before's weights and values, and computes its softmax
while the latter is at work. The other programs on the SM fill the time in which one is idle: programs of a single
warpgroup need no warp that loads, and rows of unequal length even out. The base-2 softmax has the scale folded into its
exponent.

Steps are masked one by one: only those that reach past the last key, past a sequence's length or past the diagonal.
"""

from typing import Any

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
from gossamer.blocksparse.attention_lists import INV_LN2, Config, Tile, config_of, owner_of, row_of
from gossamer.blocksparse.attention_path import empty_like, problem_of
from gossamer.blocksparse.lists import Lists
from gossamer.blocksparse.records import BlocksparseAttention

thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.7, 3.6
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def cut_at(elements_ptr, entry):
    """Where a block's words begin; 0 of a whole block."""
    if elements_ptr is not None:
        return gl.load(elements_ptr + entry)
    else:
        return 0


@gluon.jit
def without(
    x, absent, elements_ptr, start, lines, columns, part, SPLIT: gl.constexpr, BEFORE: gl.constexpr
):  # fmt: skip
    """A tile with `absent` at the elements that its block leaves out, whose words begin at `start`. `lines` are counted
    in the block, behind BEFORE words; along a line it has SPLIT tiles, of which this is `part`."""
    if elements_ptr is not None:
        if start > 0:
            WORDS: gl.constexpr = x.shape[1] // 32
            at = elements_ptr + (start + BEFORE + part * WORDS) + lines * (SPLIT * WORDS)
            bits = gl.expand_dims(gl.load(at), 1) >> gl.expand_dims(columns & 31, 0)
            for word in gl.static_range(1, WORDS):
                own = gl.expand_dims(gl.load(at + word), 1) >> gl.expand_dims(columns & 31, 0)
                bits = gl.where(gl.expand_dims(columns >= 32 * word, 0), own, bits)
            x = gl.where((bits & 1) != 0, x, absent)
    return x


@gluon.jit
def masked(s, at, whole, last, keys, elements_ptr, start, lines, part, CONFIG: gl.constexpr):
    """Scores of keys from `at` on; keys past `last` of their row have none, nor have keys that their block leaves out.
    Up to `whole` none is past it."""
    SPLIT_K: gl.constexpr = CONFIG.block_k // s.shape[1]
    if at + s.shape[1] > whole:
        s = gl.where(gl.expand_dims(at + keys, 0) < gl.expand_dims(last, 1), s, float("-inf"))
    return without(s, float("-inf"), elements_ptr, start, lines % CONFIG.block_q, keys, part, SPLIT_K, 0)


@gluon.jit
def exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def ring_of(desc, STAGES: gl.constexpr):
    """Buffers for tiles, each with a barrier."""
    shape: gl.constexpr = [STAGES, 1, 1, desc.block_type.shape[2], desc.block_type.shape[3]]
    buffers = gl.allocate_shared_memory(desc.dtype, shape, desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    return buffers, ready


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
def owned(buffers, ready):
    """The one tile of a ring of one, as soon as it is there."""
    mbarrier.wait(ready.index(0), 0)
    return matrix(buffers, 0)


@gluon.jit
def emit(desc, buffer, tile, batch, head, row):
    """Stores a tile by way of shared memory that nobody reads any more."""
    ROWS: gl.constexpr = buffer.shape[2]
    D: gl.constexpr = buffer.shape[3]
    buffer.reshape([ROWS, D]).store(tile.to(desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [batch, head, row, 0], buffer)


@gluon.jit
def soften(s, m, total, scale):
    """(weights, factor for what was summed before, largest score, sum of weights): a step of the softmax, base 2."""
    most = gl.maximum(m, gl.max(s, 1) * scale)
    base = gl.where(most == float("-inf"), 0.0, most)
    weight = exp2(s * scale - gl.expand_dims(base, 1))
    factor = exp2(m - base)
    return weight, factor, most, total * factor + gl.sum(weight, 1)


@gluon.jit
def ends_of(first, lines, limit, shift, CAUSAL: gl.constexpr):
    """(where each line's keys end, up to where all lines of the tile meet every key). Below a diagonal, lines behind
    the keys of their sequence have none."""
    if CAUSAL:
        last = gl.where(lines + shift < limit, lines + (shift + 1), 0)
        whole = gl.where(first + (lines.shape[0] - 1) + shift < limit, first + (shift + 1), 0)
    else:
        last = gl.zeros_like(lines) + limit
        whole = limit
    return last, whole


@gluon.jit
def finish(o, m, total, lost, lse_ptr, lines, Tq):
    """The result of a tile; its log-sum-exps are stored."""
    total = gl.where(lost, float("nan"), total)
    inverse = gl.where(total > 0, 1.0 / total, gl.where(total == 0, 0.0, total))
    lse = gl.where(total == 0, float("-inf"), (m + gl.log2(total)) * LN2)
    gl.store(lse_ptr + lines, lse, mask=lines < Tq)
    return o * gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, o.type.layout)), 1)


@launch.Kernel
@gluon.jit(do_not_specialize=["capacity"])
def _attention_fwd_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, offsets_ptr, columns_ptr, elements_ptr, lengths_ptr,
    B, H, GROUP, Tq, Tk, capacity, scale, CONFIG: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = CONFIG.stages
    K_STAGES: gl.constexpr = CONFIG.key_stages
    BLOCK_M: gl.constexpr = CONFIG.block_m
    BLOCK_N: gl.constexpr = CONFIG.block_n
    SPLIT_K: gl.constexpr = CONFIG.block_k // BLOCK_N
    D: gl.constexpr = q_desc.block_type.shape[3]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16])
    values: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])
    weights: gl.constexpr = gl.DotOperandLayout(0, values, 2)
    q_buf, q_ready = ring_of(q_desc, 1)
    k_bufs, k_ready = ring_of(k_desc, K_STAGES)
    v_bufs, v_ready = ring_of(v_desc, STAGES)
    fence_async_shared()
    thread_barrier()
    tile, pair = owner_of(gl.program_id(0), Tq, CONFIG)
    batch, head, first = pair // H, pair % H, tile * BLOCK_M
    fetch(q_desc, q_buf, q_ready, 0, batch, head, first, True)
    sizes = (B, H, GROUP, Tq, Tk, capacity)
    begin, count, limit, shift, lost = row_of((offsets_ptr, columns_ptr), lengths_ptr, tile, pair, sizes, CONFIG)
    steps = count * SPLIT_K
    for i in gl.static_range(STAGES):
        start = tile_at(columns_ptr, begin, i, steps, SPLIT_K, BLOCK_N)
        if i < K_STAGES:
            fetch(k_desc, k_bufs, k_ready, i, batch, head // GROUP, start, i < steps)
        fetch(v_desc, v_bufs, v_ready, i, batch, head // GROUP, start, i < steps)

    lines = first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, scores))
    keys = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, scores))
    last, whole = ends_of(first, lines, limit, shift, CONFIG.causal)
    m = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, scores))
    total = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(1, scores))
    o, none = gl.zeros([BLOCK_M, D], gl.float32, values), gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores)
    q = owned(q_buf, q_ready)
    if steps > 0:
        at = tile_at(columns_ptr, begin, 0, steps, SPLIT_K, BLOCK_N)
        ahead = tile_at(columns_ptr, begin, K_STAGES, steps, SPLIT_K, BLOCK_N)
        behind = tile_at(columns_ptr, begin, STAGES, steps, SPLIT_K, BLOCK_N)
        start = cut_at(elements_ptr, begin)
        mbarrier.wait(k_ready.index(0), 0)
        s = warpgroup_mma(q, matrix(k_bufs, 0).permute((1, 0)), none, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        thread_barrier()
        fetch(k_desc, k_bufs, k_ready, 0, batch, head // GROUP, ahead, K_STAGES < steps)
        s = masked(s, at, whole, last, keys, elements_ptr, start, lines, 0, CONFIG)
        weight, _, m, total = soften(s, m, total, scale)
        p = gl.convert_layout(weight.to(q_desc.dtype), weights)
        for step in range(1, steps):
            slot, before = step % K_STAGES, (step - 1) % STAGES
            at = tile_at(columns_ptr, begin, step, steps, SPLIT_K, BLOCK_N)
            ahead = tile_at(columns_ptr, begin, step + K_STAGES, steps, SPLIT_K, BLOCK_N)
            start = cut_at(elements_ptr, begin + step // SPLIT_K)
            mbarrier.wait(k_ready.index(slot), step // K_STAGES & 1)
            s = warpgroup_mma(q, matrix(k_bufs, slot).permute((1, 0)), none, use_acc=False, is_async=True)
            mbarrier.wait(v_ready.index(before), (step - 1) // STAGES & 1)
            o = warpgroup_mma(p, matrix(v_bufs, before), o, is_async=True)
            s = warpgroup_mma_wait(1, deps=(s,))
            # Every warp has read these keys, and the values of the step before last.
            thread_barrier()
            fetch(k_desc, k_bufs, k_ready, slot, batch, head // GROUP, ahead, step + K_STAGES < steps)
            if step > 1:
                old = step - 2
                fetch(v_desc, v_bufs, v_ready, old % STAGES, batch, head // GROUP, behind, old + STAGES < steps)
                behind = tile_at(columns_ptr, begin, step - 1 + STAGES, steps, SPLIT_K, BLOCK_N)
            s = masked(s, at, whole, last, keys, elements_ptr, start, lines, step % SPLIT_K, CONFIG)
            weight, factor, m, total = soften(s, m, total, scale)
            o = warpgroup_mma_wait(0, deps=(o,))
            o = o * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, values)), 1)
            p = gl.convert_layout(weight.to(q_desc.dtype), weights)
        mbarrier.wait(v_ready.index((steps - 1) % STAGES), (steps - 1) // STAGES & 1)
        o = warpgroup_mma(p, matrix(v_bufs, (steps - 1) % STAGES), o, is_async=True)
        o = warpgroup_mma_wait(0, deps=(o,))
    o = finish(o, m, total, lost, lse_ptr + pair.to(gl.int64) * Tq, lines, Tq)
    # The queries have been read by all warps: the result takes their place.
    thread_barrier()
    emit(out_desc, q_buf.index(0), o, batch, head, first)
    tma.store_wait(0)


def descriptor(tensor: Tensor, rows: int) -> TensorDescriptor:
    """Tiles of `rows` rows of `[B, H, T, D]`, whole spans of 128 bytes wide: places outside read as 0."""
    block = [1, 1, rows, width(tensor.shape[3])]
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block, LAYOUT)


LAYOUT = gl.NVMMASharedLayout(128, 16, 4)


def width(d: int) -> int:
    """Columns of a tile for heads of d."""
    return 64 if d <= 64 else 128


def readable(x: Tensor) -> Tensor:
    """x `[B, H, T, D]`, or a copy where the copy engine could not read it: it wants rows on 16 bytes."""
    *strides, step = x.stride()
    united = x.data_ptr()
    for stride in strides:
        united |= 2 * stride
    return x if step == 1 and united % 16 == 0 and min(strides) > 0 else x.clone(memory_format=torch.contiguous_format)


def without_padding(x: Tensor, lengths: Tensor | None) -> Tensor:
    """k or v with zeros behind its lengths: tiles are read whole, and a padding row may hold NaN, which a weight of 0
    would keep."""
    if lengths is None:
        return readable(x)
    behind = torch.arange(x.shape[2], device=x.device) >= lengths[:, None]
    return readable(x.masked_fill(behind[:, None, :, None], 0))


def tile_of(d: int, block: tuple[int, int]) -> Tile:
    """As measured on one H200 (T 8,192, 16 heads, densities of 50, 25 and 10%): at D 64 the fastest of three tiles at
    blocks of 64 and of eight at blocks of 128. At D 128 one buffer of keys lets three programs share an SM, which takes
    0.94, 0.92 and 0.89 of the time that two of them take with two."""
    if d <= 64 and block[1] == 128:
        return Tile(64, 128, registers=168)
    return Tile(64, 64, key_stages=None if d <= 64 else 1)


def launch_attention_fwd(call: BlocksparseAttention, tile: Tile | None = None) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp), with the tile that was measured best unless another is given."""
    p, lengths, lists = problem_of(call), call.lengths, Lists(call.layout, call.form)
    config = config_of(p, tile or tile_of(p.d, p.block))
    q, k, v = readable(call.q), without_padding(call.k, lengths), without_padding(call.v, lengths)
    out, lse = empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
    sides = config.block_m, config.block_n, config.block_n, config.block_m
    tiles = [descriptor(x, side) for x, side in zip((q, k, v, out), sides)]
    args = (*tiles, lse, lists.row_offsets, lists.col_indices, lists.elements, lengths, p.b, p.h, p.group, p.tq, p.tk)
    args += (lists.form.capacity, p.scale * INV_LN2)
    grid = (p.rows * (p.block[0] // config.block_m) * p.b * p.h, 1, 1)
    _attention_fwd_kernel(grid, args, {"CONFIG": config}, **config.options)
    return out, lse


def example(tile: Tile, **rows: int) -> dict[str, Any]:
    """Of a kernel with descriptors of so many rows of heads of 64."""
    config = Config(128, 128, *tile[:5], tile.stages, 64, 64, 64, 64, True, True, True)
    descriptors = {name: [1, 1, count, 64] for name, count in rows.items()}
    return descriptors | {"CONFIG": config} | config.options


_TILE = tile_of(64, (128, 128))
_ROWS = {"q_desc": _TILE.block_m, "k_desc": _TILE.block_n, "v_desc": _TILE.block_n, "out_desc": _TILE.block_m}
EXAMPLES = {_attention_fwd_kernel: example(_TILE, **_ROWS)}
