"""Scores of the indexer as keys, on Hopper: as `_triton/select_topk._index_keys_kernel` computes them, bit by bit.

That kernel is bound by one `tanh` a head and key, yet took 1.8 times as long: behind every product it waits for the
tensor cores, four times a tile. Here a head's product is at work while the tanh of the head before it are taken, and
the first of the next tile's while a tile is stored. Products are written in turns to two sets of registers, which is
why there must be an even number of heads. The copy engine brings the tiles of keys into a ring.
"""

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
from gossamer.attention import levels

thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.7, 3.6
LEVELS = gl.constexpr(levels.LEVELS)
ROWS = 64
COLUMNS = 64
STAGES = 3
SHARE, ROUNDS = 3, 4
"""Programs that a multiprocessor holds, of 158 registers a thread and 64 KiB, and how many take turns in each place."""
LAYOUTS = {rank: gl.NVMMASharedLayout(128, 16, rank) for rank in (3, 4)}


@gluon.jit
def tanh(x):
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def gates_of(w_ptr, rows, h, Tq, HEADS: gl.constexpr):
    """sigmoid of a head's weights at queries of one batch element; 0 past the last query."""
    w = gl.load(w_ptr + rows.to(gl.int64) * HEADS + h, mask=rows < Tq, other=float("-inf"))
    return 1.0 / (1.0 + gl.exp(-w.to(gl.float32)))


@gluon.jit
def factors(w_ptr, bias_ptr, rows, Tq, HEADS: gl.constexpr):
    """(what a key scores at least, each head's weight, each head's bias), so that tanh takes the place of sigmoid: as
    sigmoid(x) = (1 + tanh(x / 2)) / 2, what is constant is added once."""
    total = gl.zeros_like(rows).to(gl.float32)
    for h in gl.static_range(HEADS):
        total += gates_of(w_ptr, rows, h, Tq, HEADS)
    # A query all of whose gates are closed scores 0 everywhere.
    norm = gl.where(total == 0, 0.0, LEVELS / total) * 0.5
    weights = ()
    biases = ()
    for h in gl.static_range(HEADS):
        weights = weights + (gl.expand_dims(gates_of(w_ptr, rows, h, Tq, HEADS) * norm, 1),)
        if bias_ptr is None:
            biases = biases + (0.0,)
        else:
            biases = biases + (gl.load(bias_ptr + h).to(gl.float32) * 0.5,)
    return gl.expand_dims(1.0 + norm * total, 1), weights, biases


@gluon.jit
def fetch(k_desc, ring, ready, step, batch, at, pred, STAGES: gl.constexpr):
    """Asks for the tile of keys of a step."""
    bar = ready.index(step % STAGES)
    mbarrier.expect(bar, k_desc.block_type.nbytes, pred=pred)
    tma.async_copy_global_to_shared(k_desc, [batch, at, 0], bar, ring.index(step % STAGES), pred=pred)


@gluon.jit
def product(queries, ring, h, slot, none):
    """Begins the product of a head's queries and a tile of keys."""
    ROWS: gl.constexpr = queries.shape[3]
    D: gl.constexpr = queries.shape[4]
    COLUMNS: gl.constexpr = ring.shape[2]
    q = queries.index(h).reshape([ROWS, D])
    k = ring.index(slot).reshape([COLUMNS, D])
    return warpgroup_mma(q, k.permute((1, 0)), none, use_acc=False, is_async=True)


@launch.Kernel
@gluon.jit
def _index_keys_kernel(
    q_desc, k_desc, w_ptr, bias_ptr, lengths_ptr, keys_ptr, first, Tq, padded, Tk, stride, ahead, scale,
    HEADS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Program (part of the keys, block of rows of the slab), the longest rows first."""
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[2]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[1]
    D: gl.constexpr = k_desc.block_type.shape[2]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    queries = gl.allocate_shared_memory(q_desc.dtype, [HEADS, 1, 1, BLOCK_M, D], q_desc.layout)
    ring = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, BLOCK_N, D], k_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES + 1):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    thread_barrier()
    block = gl.num_programs(1) - 1 - gl.program_id(1)
    batch = (first + block * BLOCK_M) // padded
    begin = (first + block * BLOCK_M) % padded
    length = Tk
    if lengths_ptr is not None:
        length = gl.minimum(gl.maximum(gl.load(lengths_ptr + batch).to(gl.int32), 0), Tk)
    # What the block's last query sees is what any of them sees; its first, the least.
    offset = gl.maximum(length - Tq, 0) + ahead
    end = gl.minimum(gl.minimum(begin + BLOCK_M, Tq) - 1 + offset, length)
    least = gl.minimum(begin + offset, length)
    part, parts = gl.program_id(0), gl.num_programs(0)
    steps = gl.maximum((end + BLOCK_N - 1) // BLOCK_N - part + parts - 1, 0) // parts
    if steps > 0:
        bar = ready.index(STAGES)
        mbarrier.expect(bar, HEADS * q_desc.block_type.nbytes)
        for h in gl.static_range(HEADS):
            tma.async_copy_global_to_shared(q_desc, [batch, h, begin, 0], bar, queries.index(h))
        # One tile more than there are: the product that is begun last is of no use, and reads something all the same.
        for i in gl.static_range(STAGES):
            fetch(k_desc, ring, ready, i, batch, (part + i * parts) * BLOCK_N, i <= steps, STAGES)
        rows = begin + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, scores))
        visible = gl.where(rows < Tq, gl.minimum(rows + offset, length), 0)
        lowest, weights, biases = factors(w_ptr + batch.to(gl.int64) * Tq * HEADS, bias_ptr, rows, Tq, HEADS)
        scale *= 0.5
        none = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores)
        column = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, scores))
        line = (block * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, stored))).to(gl.int64) * stride
        out = keys_ptr + gl.expand_dims(line, 1)
        out += gl.expand_dims(gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, stored)), 0)
        mbarrier.wait(bar, 0)
        mbarrier.wait(ready.index(0), 0)
        x = product(queries, ring, 0, 0, none)
        for step in range(0, steps):
            at = (part + step * parts) * BLOCK_N
            score = none + lowest
            for h in gl.static_range(HEADS):
                found, score = warpgroup_mma_wait(0, deps=(x, score))
                if h + 1 < HEADS:
                    x = product(queries, ring, h + 1, step % STAGES, none)
                else:
                    mbarrier.wait(ready.index((step + 1) % STAGES), (step + 1) // STAGES & 1)
                    x = product(queries, ring, 0, (step + 1) % STAGES, none)
                score = score + weights[h] * tanh(found * scale + biases[h])
            # The GPU's smaller of NaN and a number is the number.
            score = gl.minimum(score, 31743.0)
            # Adding 2^23 rounds to an integer, in the low bits.
            key = (score + 8388608.0).to(gl.int32, bitcast=True).to(gl.int16)
            if at + BLOCK_N > least:
                key = gl.where(gl.expand_dims(at + column, 0) < gl.expand_dims(visible, 1), key, 0).to(gl.int16)
            gl.store(out + at, gl.convert_layout(key, stored))
            # Every warp has read these keys.
            thread_barrier()
            fetch(
                k_desc, ring, ready, step, batch, at + STAGES * parts * BLOCK_N, step + STAGES <= steps, STAGES
            )  # fmt: skip
        x = warpgroup_mma_wait(0, deps=(x,))


def readable(q: Tensor, k: Tensor) -> bool:
    """Whether q `[B, Hi, Tq, Di]` and k `[B, Tk, Di]` are what the kernel takes: an even number of heads of 64 or 128,
    in 16 bits, whose tiles leave room for three programs, and whose rows begin at 16 bytes, for the copy engine."""
    heads, d = q.shape[1], q.shape[3]
    if q.element_size() != 2 or d not in (64, 128) or heads % 2 or not 0 < heads * d <= 512:
        return False
    strides = (*q.stride()[:3], *k.stride()[:2])
    united = q.data_ptr() | k.data_ptr()
    for stride in strides:
        united |= 2 * stride
    return united % 16 == 0 and min(strides) > 0 and q.stride(3) == k.stride(2) == 1


def descriptors(q: Tensor, k: Tensor) -> tuple[TensorDescriptor, TensorDescriptor]:
    """What the copy engine reads a head's queries and the keys by: what lies outside reads as 0."""
    return _descriptor(q, ROWS), _descriptor(k, COLUMNS)


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    block = [*[1] * (x.dim() - 2), rows, x.shape[-1]]
    found = TensorDescriptor(x, list(x.shape), list(x.stride()), block, LAYOUTS[x.dim()])
    # What a launch knows it by: to look into a layout takes longer than all else that it asks.
    vars(found)["kind"] = x.dtype, *block
    return found


def launch_index_keys(
    tiles: tuple[TensorDescriptor, TensorDescriptor],
    given: tuple[Tensor | None, ...],
    rows: int,
    sizes: tuple[int, ...],
    scale: float,
) -> None:
    """Fills the keys of a slab of so many rows; `given` are w, bias, lengths and keys, `sizes` first, Tq, padded, Tk,
    stride and ahead."""
    q = tiles[0].base
    blocks = rows // ROWS
    # No more than fill the last round: a program beyond it would run alone, while all others wait.
    parts = max(1, min(launch.cdiv(sizes[4], COLUMNS), ROUNDS * SHARE * tuning.programs(q.device) // blocks))
    meta = {"HEADS": q.shape[1], "STAGES": STAGES}
    _index_keys_kernel((parts, blocks, 1), (*tiles, *given, *sizes, scale), meta, num_warps=4)


EXAMPLES = {
    _index_keys_kernel: {
        "signature": {
            "q_desc": f"tensordesc<bf16[1, 1, {ROWS}, 64],{LAYOUTS[4]!r}>",
            "k_desc": f"tensordesc<bf16[1, {COLUMNS}, 64],{LAYOUTS[3]!r}>",
            "w_ptr": "*bf16", "bias_ptr": "*fp32", "lengths_ptr": None, "keys_ptr": "*i16",
            **dict.fromkeys(("first", "Tq", "padded", "Tk", "stride", "ahead"), "i32"), "scale": "fp32",
        },
        "constexprs": {"HEADS": 4, "STAGES": STAGES},
        "num_warps": 4,
    },
}  # fmt: skip
