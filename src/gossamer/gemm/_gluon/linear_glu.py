"""The gated product on Hopper: one program an SM, a warp that loads and two warpgroups that multiply.

A tile is 128 rows by 128 columns of the result. The 128 weight rows of the gate and the same of up are loaded into the
two halves of one shared tile, from two tensors, so that a single 64 x 256 x 16 wgmma, the widest there is and the one
that asks least of shared memory, serves both; columns j and j + 128 of the accumulator then lie in one thread, and
gating is arithmetic on registers. The ring of stages runs on across tiles, and the warpgroups share nothing else:
while one gates and stores, the other may multiply.

There is room for four stages of 48 KiB, but three are faster with many rows: programs that run ahead by less stay
together, ask for the same rows of x and of the weights at the same time, and so ask the L2 for less, which at the power
limit of the GPU is time. For the same reason tiles that a program computes alone come before those that it shares.

Tiles that do not fill a wave of programs are shared (stream-K, Osama et al. 2023): their steps along K, laid end to
end, are cut into equal runs, one a program. A run is walked from its last tile to its first, so that the head of a
tile, which a later program waits for, is done first. A program that does not reach the end of a tile leaves its float32
sums in its slot of the workspace and raises its flag; the program that does adds them, in order of programs. No program
waits for a later one, so that programs need not all be at work at once. `abreast` programs walk side by side, in tiles
that share weight rows: or these would come from device memory for each of them.
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

from gossamer._core import launch, tuning
from gossamer.gemm.linear_glu_path import TILE
from gossamer.gemm.records import LinearGlu

BLOCK_N = gl.constexpr(128)
BLOCK_K = gl.constexpr(64)
ROWS = gl.constexpr(64)
"""Rows of a warpgroup."""
GROUPS = gl.constexpr(2)
BLOCK_M = gl.constexpr(128)

GROUP_M = 16
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.7, 3.6


@gluon.jit
def sigmoid(z):
    """In four instructions, to about 1e-6: the compiler's exp and quotient guard against denormals and overflows that
    do not matter here, and a thread has 64 of them."""
    return gl.inline_asm_elementwise(
        """{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t;
             add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }""",
        "=f,f",
        [z],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def activated(z, ACTIVATION: gl.constexpr):
    """(activation, its slope), as in `_triton.linear_glu`."""
    if ACTIVATION == "silu":
        s = sigmoid(z)
        return z * s, s * (1 + z * (1 - s))
    elif ACTIVATION == "gelu":
        below = 0.5 * (1 + gl.erf(z * 0.7071067811865476))
        return z * below, below + z * 0.3989422804014327 * gl.exp(-0.5 * z * z)
    elif ACTIVATION == "gelu_tanh":
        s = sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
        return z * s, s * (1 + z * (1 - s) * 1.5957691216057308 * (1 + 0.134145 * z * z))
    elif ACTIVATION == "relu":
        return gl.where(z <= 0, 0.0, z), gl.where(z <= 0, 0.0, 1.0)
    elif ACTIVATION == "relu2":
        z = gl.where(z <= 0, 0.0, z)
        return z * z, 2 * z
    elif ACTIVATION == "sigmoid":
        s = sigmoid(z)
        return s, s * (1 - s)
    else:
        return z, gl.full(z.shape, 1.0, gl.float32, layout=z.type.layout)


@gluon.jit
def run_begin(position, steps, positions):
    """First of a position's steps: equal runs, the longer ones first."""
    return position * (steps // positions) + gl.minimum(position, steps % positions)


@gluon.jit
def count_pieces(program, programs, tiles, whole, steps, abreast):
    """(tiles that a program computes alone, these and the tiles that its run touches)."""
    shared = (tiles - whole) // abreast * steps
    begin = run_begin(program // abreast, shared, programs // abreast)
    end = run_begin(program // abreast + 1, shared, programs // abreast)
    touched = gl.where(end > begin, (end - 1) // steps - begin // steps + 1, 0)
    alone = gl.where(whole > program, (whole - program + programs - 1) // programs, 0)
    return alone, alone + touched


@gluon.jit
def find_piece(piece, alone, program, programs, tiles, whole, steps, abreast):
    """(tile, first step, end step): tiles computed alone, then those of the run from the last to the first."""
    shared = (tiles - whole) // abreast * steps
    begin = run_begin(program // abreast, shared, programs // abreast)
    end = run_begin(program // abreast + 1, shared, programs // abreast)
    group = (end - 1) // steps - (piece - alone)
    in_run = piece >= alone
    tile = gl.where(in_run, whole + group * abreast + program % abreast, program + piece * programs)
    first = gl.where(in_run, gl.maximum(begin - group * steps, 0), 0)
    last = gl.where(in_run, gl.minimum(end - group * steps, steps), steps)
    return tile, first, last


@gluon.jit
def origin_of(tile, tiles_m, tiles_n, GROUP_M: gl.constexpr):
    """Row and column of a tile, in tiles; GROUP_M rows of tiles are passed at a time, so that the L2 gives the weights
    again."""
    group = tile // (GROUP_M * tiles_n)
    height = gl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    inside = tile - group * GROUP_M * tiles_n
    return group * GROUP_M + inside % height, inside // height


@gluon.jit
def produce(inputs, ring, extent, GROUP_M: gl.constexpr, STAGES: gl.constexpr):
    """The warp that loads."""
    x_desc, gate_desc, up_desc = inputs
    x_bufs, w_bufs, ready, empty = ring
    tiles_m, tiles_n, whole, steps, abreast = extent
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    tiles = tiles_m * tiles_n
    alone, pieces = count_pieces(program, programs, tiles, whole, steps, abreast)
    count = 0
    for piece in range(pieces):
        tile, first, last = find_piece(piece, alone, program, programs, tiles, whole, steps, abreast)
        tile_m, tile_n = origin_of(tile, tiles_m, tiles_n, GROUP_M)
        row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        for step in range(first, last):
            stage = count % STAGES
            full = ready.index(stage)
            weights = w_bufs.index(stage)
            mbarrier.wait(empty.index(stage), (count // STAGES & 1) ^ 1)
            mbarrier.expect(full, (BLOCK_M + 2 * BLOCK_N) * BLOCK_K * 2)
            tma.async_copy_global_to_shared(x_desc, [row, step * BLOCK_K], full, x_bufs.index(stage))
            tma.async_copy_global_to_shared(gate_desc, [column, step * BLOCK_K], full, weights.slice(0, BLOCK_N))
            tma.async_copy_global_to_shared(up_desc, [column, step * BLOCK_K], full, weights.slice(BLOCK_N, BLOCK_N))
            count += 1


@gluon.jit
def to_slot(sums):
    """Relabels half an accumulator so that a thread's registers are a float4 of each 2 KiB in turn, next to its
    neighbours': 16-byte accesses side by side. No data moves."""
    sums = sums.reshape([4, 2, 8, BLOCK_N // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([ROWS * BLOCK_N])
    return gl.convert_layout(sums, gl.BlockedLayout([4], [32], [4], [0]), assert_trivial=True)


@gluon.jit
def from_slot(sums, layout: gl.constexpr):
    sums = sums.reshape([BLOCK_N // 8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5)).reshape([ROWS, BLOCK_N])
    return gl.convert_layout(sums, layout, assert_trivial=True)


@gluon.jit
def add_bias(z, bias_ptr, column, N, layout: gl.constexpr):
    if bias_ptr is not None:
        columns = column + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
        bias = gl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(gl.float32)
        z += gl.expand_dims(bias, 0)
    return z


@gluon.jit
def load_grad(grad_ptr, stride_dm, stride_dn, row, column, M, N, layout: gl.constexpr):
    rows = gl.expand_dims(row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout)), 1)
    columns = gl.expand_dims(column + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout)), 0)
    at = rows.to(gl.int64) * stride_dm + columns.to(gl.int64) * stride_dn
    return gl.load(grad_ptr + at, mask=(rows < M) & (columns < N), other=0.0).to(gl.float32)


@gluon.jit
def wait_for(flag_ptr):
    """Returns once another program has raised the flag, which is then down again."""
    while gl.atomic_cas(flag_ptr, 1, 0, sem="acquire", scope="gpu") != 1:
        pass


@gluon.jit
def emit(desc, buffer, tile, row, column):
    """Stores a tile by way of shared memory, once what was there before has left."""
    tma.store_wait(0)
    buffer.store(tile.to(desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [row, column], buffer)


@gluon.jit
def consume(
    outputs, grads, ring, partials, extent, GROUP: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Warpgroup GROUP: its ROWS rows of every tile."""
    out_desc, first_desc, second_desc, buffers, gate_bias_ptr, up_bias_ptr = outputs
    grad_ptr, stride_dm, stride_dn, M, N = grads
    x_bufs, w_bufs, ready, empty = ring
    partial_ptr, flags_ptr = partials
    tiles_m, tiles_n, whole, steps, abreast = extent
    both: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * BLOCK_N, 16])
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    HALF: gl.constexpr = ROWS * BLOCK_N
    offsets = gl.arange(0, HALF, layout=gl.BlockedLayout([4], [32], [4], [0]))
    buffer = buffers.index(GROUP)
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    tiles = tiles_m * tiles_n
    shared = (tiles - whole) // abreast * steps
    alone, pieces = count_pieces(program, programs, tiles, whole, steps, abreast)
    count = 0
    for piece in range(pieces):
        tile, first, last = find_piece(piece, alone, program, programs, tiles, whole, steps, abreast)
        acc = gl.zeros([ROWS, 2 * BLOCK_N], gl.float32, both)
        for step in range(first, last):
            stage = count % STAGES
            mbarrier.wait(ready.index(stage), count // STAGES & 1)
            x = x_bufs.index(stage).slice(GROUP * ROWS, ROWS)
            acc = warpgroup_mma(x, w_bufs.index(stage).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            # The step before has been read: its stage goes back to the warp that loads.
            mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1, pred=step > first)
            count += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1)

        gate, up = acc.reshape([ROWS, 2, BLOCK_N]).permute((0, 2, 1)).split()
        gate = gl.convert_layout(gate, half, assert_trivial=True)
        up = gl.convert_layout(up, half, assert_trivial=True)
        if partial_ptr is not None:
            if last < steps:
                slot = partial_ptr + (program * GROUPS + GROUP).to(gl.int64) * (2 * HALF)
                gl.store(slot + offsets, to_slot(gate))
                gl.store(slot + HALF + offsets, to_slot(up))
                # All threads must have written before the one that signals says so.
                thread_barrier()
                gl.atomic_xchg(flags_ptr + program * GROUPS + GROUP, 1, sem="release", scope="gpu")
            elif first > 0:
                other = program
                while run_begin(other // abreast, shared, programs // abreast) > (tile - whole) // abreast * steps:
                    other -= abreast
                    wait_for(flags_ptr + other * GROUPS + GROUP)
                    slot = partial_ptr + (other * GROUPS + GROUP).to(gl.int64) * (2 * HALF)
                    gate += from_slot(gl.load(slot + offsets, cache_modifier=".cg"), half)
                    up += from_slot(gl.load(slot + HALF + offsets, cache_modifier=".cg"), half)
        if last == steps:
            tile_m, tile_n = origin_of(tile, tiles_m, tiles_n, GROUP_M)
            row, column = tile_m * BLOCK_M + GROUP * ROWS, tile_n * BLOCK_N
            gate = add_bias(gate, gate_bias_ptr, column, N, half)
            up = add_bias(up, up_bias_ptr, column, N, half)
            active, slope = activated(gate, ACTIVATION)
            if grad_ptr is not None:
                grad = load_grad(grad_ptr, stride_dm, stride_dn, row, column, M, N, half)
                emit(first_desc, buffer, grad * up * slope, row, column)
                emit(second_desc, buffer, grad * active, row, column)
            else:
                if out_desc is not None:
                    emit(out_desc, buffer, active * up, row, column)
                if first_desc is not None:
                    emit(first_desc, buffer, gate, row, column)
                    emit(second_desc, buffer, up, row, column)
    tma.store_wait(0)


@launch.Kernel
@gluon.jit(do_not_specialize=["M", "N", "tiles_m", "whole", "steps", "abreast"])
def _linear_glu_kernel(
    x_desc, gate_desc, up_desc, out_desc, first_desc, second_desc, gate_bias_ptr, up_bias_ptr, grad_ptr, partial_ptr,
    flags_ptr, stride_dm, stride_dn, M, N, tiles_m, whole, steps, abreast,
    GROUP_M: gl.constexpr, STAGES: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """`first_desc` and `second_desc` take gate and up, or with `grad_ptr` their gradients, or are None."""
    tiles_n = gl.cdiv(N, BLOCK_N)
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    w_bufs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, 2 * BLOCK_N, BLOCK_K], gate_desc.layout)
    out_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    buffers = gl.allocate_shared_memory(x_desc.dtype, [GROUPS, ROWS, BLOCK_N], out_layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    inputs = (x_desc, gate_desc, up_desc)
    outputs = (out_desc, first_desc, second_desc, buffers, gate_bias_ptr, up_bias_ptr)
    grads = (grad_ptr, stride_dm, stride_dn, M, N)
    ring = (x_bufs, w_bufs, ready, empty)
    partials = (partial_ptr, flags_ptr)
    extent = (tiles_m, tiles_n, whole, steps, abreast)
    # The warp that loads leaves its registers to the warpgroups: 240 a thread out of 168 in the launch.
    gl.warp_specialize(
        [
            (consume, (outputs, grads, ring, partials, extent, 0, GROUP_M, STAGES, ACTIVATION)),
            (consume, (outputs, grads, ring, partials, extent, 1, GROUP_M, STAGES, ACTIVATION)),
            (produce, (inputs, ring, extent, GROUP_M, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )


def schedule(tiles_m: int, tiles_n: int, steps: int, device: torch.device) -> tuple[int, int, int]:
    """(programs, tiles that one program computes alone, programs abreast) of the product's tiles.

    The tiles of the last turn are shared along K, with those of the turn before it, which costs as much as some 10
    steps: a partial sum out and in again, and one more start.
    """
    units, tiles = tuning.programs(device), tiles_m * tiles_n
    if tiles <= units or -tiles % units / units * steps < 10:
        return min(units, tiles), tiles, 1
    whole = (tiles // units - 1) * units
    shared = tiles - whole
    abreast = next(a for a in (4, 3, 2, 1) if tiles_m % a == 0 and units % a == 0 and shared % a == 0)
    return units, whole, abreast


def launch_linear_glu(
    call: LinearGlu, grad: Tensor | None, out: Tensor | None, gates: tuple[Tensor, Tensor] | None
) -> None:
    """Fills out and gates, which are gate and up, or with grad their gradients. The call has two weights."""
    x, gate_weight, up_weight, gate_bias, up_bias, activation, _ = call
    assert up_weight is not None
    (m, k), n = x.shape, gate_weight.shape[0]
    tiles_m, tiles_n, steps = launch.cdiv(m, TILE), launch.cdiv(n, TILE), launch.cdiv(k, 64)
    programs, whole, abreast = schedule(tiles_m, tiles_n, steps, x.device)
    shared = whole < tiles_m * tiles_n
    flags = launch.counters.get(2 * programs, x.device) if shared else None
    partial = launch.scratch.get(programs * TILE * 2 * TILE, x.device) if shared else None
    grad_strides = (0, 0) if grad is None else grad.stride()
    strides = (x.stride(0), gate_weight.stride(0), up_weight.stride(0))
    inputs = (
        descriptor_of(x, m, k, strides[0], TILE, 64),
        descriptor_of(gate_weight, n, k, strides[1], 128, 64),
        descriptor_of(up_weight, n, k, strides[2], 128, 64),
    )
    written = None if out is None else descriptor_of(out, m, n, n, 64, 128)
    first, second = (None if t is None else descriptor_of(t, m, n, t.stride(0), 64, 128) for t in gates or (None, None))
    args = (*inputs, written, first, second, gate_bias, up_bias, grad, partial, flags, *grad_strides, m, n)
    meta = {"GROUP_M": GROUP_M, "STAGES": 4 if m <= 2048 else 3, "ACTIVATION": activation}
    sizes = (tiles_m, whole, steps, abreast)
    _linear_glu_kernel((programs, 1, 1), (*args, *sizes), meta, num_warps=4, maxnreg=168)


_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
_made: dict[tuple[int, int, torch.dtype], dict[str, Any]] = {}


def descriptor_of(
    tensor: Tensor, rows: int, columns: int, stride: int, block_rows: int, block_columns: int
) -> TensorDescriptor:
    """As `TensorDescriptor` makes it the first time; `fits` has made the checks that it makes each time."""
    shape, strides = [rows, columns], [stride, 1]
    key = (block_rows, block_columns, tensor.dtype)
    fields = _made.get(key)
    if fields is None:
        block = [block_rows, block_columns]
        layout = gl.NVMMASharedLayout.get_default_for(block, _DTYPES[tensor.dtype])
        descriptor = TensorDescriptor(tensor, shape, strides, block, layout)
        _made[key] = {**vars(descriptor), "base": None}
        return descriptor
    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__.update(fields, base=tensor, shape=shape, strides=strides)
    return descriptor


EXAMPLES = {
    _linear_glu_kernel: {
        "x_desc": [128, 64], "gate_desc": [128, 64], "up_desc": [128, 64], "out_desc": [64, 128], "first_desc": None,
        "second_desc": None, "gate_bias_ptr": None, "up_bias_ptr": None, "grad_ptr": None, "GROUP_M": GROUP_M,
        "STAGES": 4, "ACTIVATION": "silu", "maxnreg": 168,
    },
}  # fmt: skip
