"""The backward pass of a gated block up to its gate on Hopper: one product, and what becomes of gate and up.

The gradient of what gate and up made is grad @ down_weight. A program computes tiles of it as `linear_pack` does, of
128 rows by 256 columns, with a warp that loads and two warpgroups that multiply and hand their half of a tile over in
shared memory, rounded. A warp a warpgroup takes it from there: it reads gate and up, 8 rows at a time with 16 bytes a
lane, and writes their gradients in their places and what they gated. It has the time of a whole tile, so that six
passes over matrices of that size cost nothing beside the product, where that is long enough. A program's last tile has
no other beside it, and is gated by the warpgroups themselves.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gossamer._core import launch, tuning
from gossamer.gemm._gluon import linear_pack
from gossamer.gemm._gluon.linear_glu import activated, descriptor_of, origin_of, thread_barrier
from gossamer.gemm._gluon.linear_pack import BLOCK_N, GROUP_M, GROUPS, PIECE, ROWS, STAGES, TILE

UNPACK_BF16 = gl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;")
UNPACK_FP16 = gl.constexpr("{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }")


@gluon.jit
def halves_of(rows, layout: gl.constexpr):
    """The first and the second half of rows that a lane holds. No data moves."""
    COUNT: gl.constexpr = rows.shape[0]
    first, second = rows.reshape([2, COUNT // 2, rows.shape[1]]).permute((1, 2, 0)).split()
    first = gl.convert_layout(first, layout, assert_trivial=True)
    return first, gl.convert_layout(second, layout, assert_trivial=True)


@gluon.jit
def unpack(pairs, DTYPE: gl.constexpr):
    """Pairs of 16-bit numbers as (first, second) in float32."""
    ASM: gl.constexpr = UNPACK_BF16 if DTYPE == gl.bfloat16 else UNPACK_FP16
    return gl.inline_asm_elementwise(ASM, "=f,=f,r", [pairs], (gl.float32, gl.float32), True, 1)


@gluon.jit
def pack(first, second, DTYPE: gl.constexpr):
    ASM: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if DTYPE == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(ASM, "=r,f,f", [first, second], gl.int32, True, 1)


@gluon.jit
def gated(flow, gate, up, DTYPE: gl.constexpr, ACTIVATION: gl.constexpr):
    """Pairs of (gradient of gate, that of up, what they gated)."""
    flow_0, flow_1 = unpack(flow, DTYPE)
    gate_0, gate_1 = unpack(gate, DTYPE)
    up_0, up_1 = unpack(up, DTYPE)
    active_0, slope_0 = activated(gate_0, ACTIVATION)
    active_1, slope_1 = activated(gate_1, ACTIVATION)
    grad_gate = pack(flow_0 * up_0 * slope_0, flow_1 * up_1 * slope_1, DTYPE)
    grad_up = pack(flow_0 * active_0, flow_1 * active_1, DTYPE)
    return grad_gate, grad_up, pack(active_0 * up_0, active_1 * up_1, DTYPE)


@gluon.jit
def gate_tile(
    matrices, halves, tile, extent, GROUP: gl.constexpr, GROUP_M: gl.constexpr, ACTIVATION: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Gates what warpgroup GROUP has handed over. A row is spread over the lanes of a warp, 8 columns in each, in pairs
    of 16 bits: the compiler would give each number a register."""
    gate_ptr, up_ptr, hidden_ptr, M, N = matrices
    tiles_m, tiles_n, _ = extent
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    swizzle: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    LINES: gl.constexpr = PIECE * WARPS
    pieces = halves._reinterpret(gl.int32, [GROUPS * ROWS // LINES, LINES, BLOCK_N // 2], swizzle)
    columns = gl.expand_dims(gl.arange(0, BLOCK_N // 2, layout=gl.SliceLayout(0, layout)), 0)
    warp = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, layout)), 1)
    tile_m, tile_n = origin_of(tile, tiles_m, tiles_n, GROUP_M)
    row = (tile_m * GROUPS + GROUP) * ROWS
    column = tile_n * (BLOCK_N // 2) + columns
    # Within a tile 32 bits do for an offset.
    first = row.to(gl.int64) * (N // 2)
    for piece in range(ROWS // LINES):
        upper, lower = halves_of(pieces.index(GROUP * (ROWS // LINES) + piece).load(layout), layout)
        for half in gl.static_range(2):
            a, b = halves_of(lower if half else upper, layout)
            a0, a1 = halves_of(a, layout)
            b0, b1 = halves_of(b, layout)
            flows = (a0, a1, b0, b1)
            line = piece * LINES + half * (LINES // 2) + warp
            # All rows are asked for before the first is waited for.
            gates = ()
            ups = ()
            for i in gl.static_range(PIECE // 2):
                inside = (row + line + i * WARPS < M) & (column < N // 2)
                at = first + ((line + i * WARPS) * (N // 2) + column)
                gates = gates + (gl.load(gate_ptr + at, mask=inside, other=0),)
                ups = ups + (gl.load(up_ptr + at, mask=inside, other=0),)
            for i in gl.static_range(PIECE // 2):
                inside = (row + line + i * WARPS < M) & (column < N // 2)
                at = first + ((line + i * WARPS) * (N // 2) + column)
                grad_gate, grad_up, hidden = gated(flows[i], gates[i], ups[i], halves.dtype, ACTIVATION)
                gl.store(gate_ptr + at, grad_gate, mask=inside)
                gl.store(up_ptr + at, grad_up, mask=inside)
                gl.store(hidden_ptr + at, hidden, mask=inside)


@gluon.jit
def gate(matrices, handover, extent, GROUP: gl.constexpr, GROUP_M: gl.constexpr, ACTIVATION: gl.constexpr):
    """The warp that gates what warpgroup GROUP hands over, but for the last tile."""
    halves, full, free = handover
    tiles_m, tiles_n, _ = extent
    turn = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n - gl.num_programs(0), gl.num_programs(0)):
        mbarrier.wait(full.index(GROUP), turn & 1)
        gate_tile(matrices, halves, tile, extent, GROUP, GROUP_M, ACTIVATION, 1)
        # All lanes must have read before the one that arrives says so.
        thread_barrier()
        mbarrier.arrive(free.index(GROUP), count=1)
        turn += 1


@gluon.jit
def multiply(
    matrices, ring, handover, extent, GROUP: gl.constexpr, GROUP_M: gl.constexpr, ACTIVATION: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Warpgroup GROUP, which gates its half of the last tile itself: it has nothing left to multiply, and four warps
    take a quarter of the time."""
    linear_pack.consume(None, matrices[4], ring, handover, extent, GROUP, False, GROUP_M, STAGES)
    last, _ = linear_pack.last_of(extent)
    gate_tile(matrices, handover[0], last, extent, GROUP, GROUP_M, ACTIVATION, 4)


@launch.Kernel
@gluon.jit(do_not_specialize=["M", "tiles_m", "tiles_n", "steps"])
def _gated_mlp_bwd_kernel(
    grad_desc, down_desc, gate_ptr, up_ptr, hidden_ptr, M, N, tiles_m, tiles_n, steps,
    GROUP_M: gl.constexpr, STAGES: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    ring, handover = linear_pack.prepare(grad_desc, down_desc, STAGES)
    inputs = (grad_desc, down_desc)
    matrices = (gate_ptr, up_ptr, hidden_ptr, M, N)
    extent = (tiles_m, tiles_n, steps)
    # The three warps that do not multiply share a warpgroup, and so its registers: 120 a thread, for 192 of the others.
    gl.warp_specialize(
        [
            (multiply, (matrices, ring, handover, extent, 0, GROUP_M, ACTIVATION, STAGES)),
            (multiply, (matrices, ring, handover, extent, 1, GROUP_M, ACTIVATION, STAGES)),
            (linear_pack.produce, (inputs, ring, extent, False, GROUP_M, STAGES)),
            (gate, (matrices, handover, extent, 0, GROUP_M, ACTIVATION)),
            (gate, (matrices, handover, extent, 1, GROUP_M, ACTIVATION)),
        ],
        [4, 1, 1, 1],
        [192, 120, 120, 120],
    )


def launch_gated_mlp_bwd(
    grad: Tensor, down_weight: Tensor, gate: Tensor, up: Tensor, hidden: Tensor, activation: str
) -> None:
    """Fills hidden, and puts the gradients of gate and up in their places; all of them [M, N]."""
    (m, d), n = grad.shape, down_weight.shape[1]
    tiles_m, tiles_n, steps = launch.cdiv(m, 128), launch.cdiv(n, TILE), launch.cdiv(d, 64)
    strides = (grad.stride(0), down_weight.stride(0))
    inputs = (descriptor_of(grad, m, d, strides[0], 128, 64), descriptor_of(down_weight, d, n, strides[1], 64, TILE))
    meta = {"GROUP_M": linear_pack.GROUP_M, "STAGES": linear_pack.STAGES, "ACTIVATION": activation}
    matrices = (matrix.view(torch.int32) for matrix in (gate, up, hidden))
    args = (*inputs, *matrices, m, n, tiles_m, tiles_n, steps)
    grid = (min(tuning.programs(grad.device), tiles_m * tiles_n), 1, 1)
    _gated_mlp_bwd_kernel(grid, args, meta, num_warps=4, maxnreg=168)


EXAMPLES = {
    _gated_mlp_bwd_kernel: {
        "grad_desc": [128, 64], "down_desc": [64, 256], "gate_ptr": "*i32", "up_ptr": "*i32", "hidden_ptr": "*i32",
        "GROUP_M": GROUP_M, "STAGES": STAGES, "ACTIVATION": "silu", "maxnreg": 168,
    },
}  # fmt: skip
