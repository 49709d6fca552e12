"""act(x W + bias) packed tile by tile on Hopper: the pre-activations are never written.

A program computes tiles of 128 rows by 256 columns, one after another, with a warp that loads blocks of x and W, two
warpgroups that multiply, 64 rows each, and a warp a warpgroup that packs: of each row of each tile it writes up to
SLOTS entries with ~(z <= max(threshold, 0)), their columns within the tile, and how many there were. 256 columns are
the widest wgmma, which asks least of shared memory, and let 8 bits hold a column.

The warpgroups hand their half of a tile over in shared memory, rounded, and go on with the next tile at once: packing
takes far longer than storing a tile would, but it has the time of a whole tile, and so little of the SM that two warps
do it. That takes 64 KiB, so that the ring has three stages of 48 KiB. A program's last tile has no other beside it, and
is packed by the warpgroups themselves.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gossamer._core import launch, tuning
from gossamer.gemm._gluon.linear_glu import descriptor_of, origin_of, thread_barrier
from gossamer.gemm.linear_pack_path import TILE

BLOCK_N = gl.constexpr(256)
BLOCK_K = gl.constexpr(64)
ROWS = gl.constexpr(64)
"""Rows of a warpgroup."""
GROUPS = gl.constexpr(2)
PIECE = gl.constexpr(8)
"""Rows that a warp reads at a time: eight, over which the swizzle of the halves repeats."""

STAGES = 3
GROUP_M = 16


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def split_pairs(pairs, layout: gl.constexpr):
    """A piece as the four registers in which a lane holds 8 columns of a row, two in each."""
    even, odd = pairs.reshape([pairs.shape[0], 32, 2, 2]).split()
    first, third = even.split()
    second, fourth = odd.split()
    first = gl.convert_layout(first, layout, assert_trivial=True)
    second = gl.convert_layout(second, layout, assert_trivial=True)
    third = gl.convert_layout(third, layout, assert_trivial=True)
    fourth = gl.convert_layout(fourth, layout, assert_trivial=True)
    return first, second, third, fourth


_BITS = """{ .reg .pred p, q; .reg .b32 bits;
    setp.gtu.TYPE p|q, $1, $5; selp.b32 bits, 128, 0, p; @q or.b32 bits, bits, 64;
    setp.gtu.TYPE p|q, $2, $6; @p or.b32 bits, bits, 32; @q or.b32 bits, bits, 16;
    setp.gtu.TYPE p|q, $3, $7; @p or.b32 bits, bits, 8;  @q or.b32 bits, bits, 4;
    setp.gtu.TYPE p|q, $4, $8; @p or.b32 bits, bits, 2;  @q or.b32 bits, bits, 1;
    mov.b32 $0, bits; }"""
BITS_BF16 = gl.constexpr(_BITS.replace("TYPE", "bf16x2"))
BITS_FP16 = gl.constexpr(_BITS.replace("TYPE", "f16x2"))


@gluon.jit
def bits_above(pairs, bounds, DTYPE: gl.constexpr):
    """A bit for each of a lane's 8 columns, the highest for the first, where ~(z <= bound). The entries stay in pairs
    of 16 bits: the compiler would widen each to 32, and this is most of what a row without entries costs."""
    ASM: gl.constexpr = BITS_BF16 if DTYPE == gl.bfloat16 else BITS_FP16
    z0, z1, z2, z3 = pairs
    b0, b1, b2, b3 = bounds
    constraints: gl.constexpr = "=r,r,r,r,r,r,r,r,r"
    return gl.inline_asm_elementwise(ASM, constraints, [z0, z1, z2, z3, b0, b1, b2, b3], gl.int32, True, 1)


@gluon.jit
def pair_below(low, high, DTYPE: gl.constexpr):
    """Two float32 numbers rounded towards zero to the dtype of z: an entry lies above both or neither."""
    ASM: gl.constexpr = "cvt.rz.bf16x2.f32 $0, $2, $1;" if DTYPE == gl.bfloat16 else "cvt.rz.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(ASM, "=r,r,r", [low, high], gl.int32, True, 1)


@gluon.jit
def load_bound(threshold_ptr, column, N, DTYPE: gl.constexpr):
    """max(threshold, 0) of two columns."""
    low = gl.load(threshold_ptr + column, mask=column < N, other=0.0).to(gl.float32)
    high = gl.load(threshold_ptr + column + 1, mask=column + 1 < N, other=0.0).to(gl.float32)
    # Below 0 it acts as 0; NaN stays, and keeps everything.
    low = gl.where(low < 0, 0.0, low)
    high = gl.where(high < 0, 0.0, high)
    return pair_below(low, high, DTYPE)


@gluon.jit
def load_factors(factors_ptr, column, N):
    """The factors of a row's bound in two columns."""
    low = gl.load(factors_ptr + column, mask=column < N, other=0.0)
    return low, gl.load(factors_ptr + column + 1, mask=column + 1 < N, other=0.0)


@gluon.jit
def row_bounds(bound, factors, DTYPE: gl.constexpr):
    """The bounds of a piece's rows, a column of them, in a lane's 8 columns."""
    if factors is None:
        pair = pair_below(bound, bound, DTYPE)
        return pair, pair, pair, pair
    else:
        f0, f1, f2, f3 = factors
        return (
            pair_below(bound * f0[0], bound * f0[1], DTYPE),
            pair_below(bound * f1[0], bound * f1[1], DTYPE),
            pair_below(bound * f2[0], bound * f2[1], DTYPE),
            pair_below(bound * f3[0], bound * f3[1], DTYPE),
        )


@gluon.jit
def count_bits(bits):
    return gl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [bits], gl.int32, True, 1)


@gluon.jit
def produce(inputs, ring, extent, TRANSPOSED: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr):
    """The warp that loads."""
    x_desc, w_desc = inputs
    x_bufs, w_bufs, ready, empty = ring
    tiles_m, tiles_n, steps = extent
    count = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = origin_of(tile, tiles_m, tiles_n, GROUP_M)
        row = tile_m * (GROUPS * ROWS)
        column = tile_n * BLOCK_N
        for step in range(steps):
            stage = count % STAGES
            full = ready.index(stage)
            mbarrier.wait(empty.index(stage), (count // STAGES & 1) ^ 1)
            mbarrier.expect(full, (GROUPS * ROWS + BLOCK_N) * BLOCK_K * 2)
            tma.async_copy_global_to_shared(x_desc, [row, step * BLOCK_K], full, x_bufs.index(stage))
            at = [column, step * BLOCK_K] if TRANSPOSED else [step * BLOCK_K, column]
            tma.async_copy_global_to_shared(w_desc, at, full, w_bufs.index(stage))
            count += 1


@gluon.jit
def consume(
    bias_ptr, N, ring, handover, extent, GROUP: gl.constexpr, TRANSPOSED: gl.constexpr, GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Warpgroup GROUP: its ROWS rows of every tile, into its half of the handover."""
    x_bufs, w_bufs, ready, empty = ring
    halves, full, free = handover
    tiles_m, tiles_n, steps = extent
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    columns = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
    count = 0
    turn = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        acc = gl.zeros([ROWS, BLOCK_N], gl.float32, layout)
        for step in range(steps):
            stage = count % STAGES
            mbarrier.wait(ready.index(stage), count // STAGES & 1)
            x = x_bufs.index(stage).slice(GROUP * ROWS, ROWS)
            w = w_bufs.index(stage).permute((1, 0)) if TRANSPOSED else w_bufs.index(stage)
            acc = warpgroup_mma(x, w, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            # The step before has been read: its stage goes back to the warp that loads.
            mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1, pred=step > 0)
            count += 1
        if bias_ptr is not None:
            # Asked for while the last step is at work.
            _, tile_n = origin_of(tile, tiles_m, tiles_n, GROUP_M)
            column = tile_n * BLOCK_N + columns
            bias = gl.load(bias_ptr + column, mask=column < N, other=0.0)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1)
        if bias_ptr is not None:
            acc += gl.expand_dims(bias.to(gl.float32), 0)
        mbarrier.wait(free.index(GROUP), (turn & 1) ^ 1)
        halves.index(GROUP).store(acc.to(halves.dtype))
        # All threads must have written before the one that arrives says so.
        thread_barrier()
        mbarrier.arrive(full.index(GROUP), count=1)
        turn += 1


@gluon.jit
def pack_tile(
    target, handover, tile, turn, extent, GROUP: gl.constexpr, GROUP_M: gl.constexpr, SLOTS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Packs what warpgroup GROUP hands over. A row is spread over the lanes of a warp, 8 columns in each."""
    outputs, limits, M, N = target
    values_ptr, indices_ptr, counts_ptr = outputs
    threshold_ptr, bounds_ptr, factors_ptr = limits
    halves, full, _ = handover
    tiles_m, tiles_n, _ = extent
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    wide: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    swizzle: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    LINES: gl.constexpr = PIECE * WARPS
    pieces = halves._reinterpret(gl.int32, [GROUPS * ROWS // LINES, LINES, BLOCK_N // 2], swizzle)
    lane = gl.expand_dims(gl.arange(0, 32, layout=gl.SliceLayout(0, layout)), 0)
    lines = gl.expand_dims(gl.arange(0, LINES, layout=gl.SliceLayout(1, layout)), 1)
    tile_m, tile_n = origin_of(tile, tiles_m, tiles_n, GROUP_M)
    column = tile_n * BLOCK_N + lane * 8
    # Not by an infinite bound: where x has a NaN so has every column, even one that W has not.
    inside = 0xFF00 >> gl.minimum(gl.maximum(N - column, 0), 8) & 0xFF
    b0 = gl.zeros([1, 32], gl.int32, layout)
    b1, b2, b3 = b0, b0, b0
    if threshold_ptr is not None:
        b0 = load_bound(threshold_ptr, column, N, halves.dtype)
        b1 = load_bound(threshold_ptr, column + 2, N, halves.dtype)
        b2 = load_bound(threshold_ptr, column + 4, N, halves.dtype)
        b3 = load_bound(threshold_ptr, column + 6, N, halves.dtype)
    factors = None
    if factors_ptr is not None:
        f0 = load_factors(factors_ptr, column, N)
        f1 = load_factors(factors_ptr, column + 2, N)
        f2 = load_factors(factors_ptr, column + 4, N)
        f3 = load_factors(factors_ptr, column + 6, N)
        factors = (f0, f1, f2, f3)
    row = (tile_m * GROUPS + GROUP) * ROWS
    # Within a tile 32 bits do for an offset.
    first = row.to(gl.int64) * tiles_n + tile_n
    mbarrier.wait(full.index(GROUP), turn & 1)
    for piece in range(ROWS // LINES):
        pairs = split_pairs(pieces.index(GROUP * (ROWS // LINES) + piece).load(wide), layout)
        line = piece * LINES + lines
        if bounds_ptr is None:
            bits = bits_above(pairs, (b0, b1, b2, b3), halves.dtype) & inside
        else:
            bound = gl.load(bounds_ptr + row + line, mask=row + line < M, other=0.0)
            bits = bits_above(pairs, row_bounds(bound, factors, halves.dtype), halves.dtype) & inside
        held = count_bits(bits)
        upto = gl.associative_scan(held, 1, add)
        exists = row + line < M
        gl.store(counts_ptr + first + (line * tiles_n + lane * 0), upto.to(gl.int16), mask=exists & (lane == 31))
        rank = upto - held
        slot = line * (tiles_n * SLOTS) + rank
        bits = gl.where(exists & (rank < SLOTS), bits, 0)
        # A lane that holds an entry seldom holds a second one.
        while gl.max(gl.max(bits, 0), 0) > 0:
            at = gl.inline_asm_elementwise("clz.b32 $0, $1;", "=r,r", [bits], gl.int32, True, 1) - 24
            pair = gl.where(at < 4, gl.where(at < 2, pairs[0], pairs[1]), gl.where(at < 6, pairs[2], pairs[3]))
            value = (pair >> (at & 1) * 16).to(gl.int16).to(halves.dtype, bitcast=True)
            gl.store(values_ptr + first * SLOTS + slot, value, mask=bits > 0)
            gl.store(indices_ptr + first * SLOTS + slot, (lane * 8 + at).to(gl.uint8), mask=bits > 0)
            slot += 1
            bits = gl.where((slot & (SLOTS - 1)) > 0, bits & (0x7F >> at), 0)


@gluon.jit
def pack(target, handover, extent, GROUP: gl.constexpr, GROUP_M: gl.constexpr, SLOTS: gl.constexpr):
    """The warp that packs what warpgroup GROUP hands over, but for the last tile."""
    tiles_m, tiles_n, _ = extent
    turn = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n - gl.num_programs(0), gl.num_programs(0)):
        pack_tile(target, handover, tile, turn, extent, GROUP, GROUP_M, SLOTS, 1)
        # All lanes must have read before the one that arrives says so.
        thread_barrier()
        mbarrier.arrive(handover[2].index(GROUP), count=1)
        turn += 1


@gluon.jit
def last_of(extent):
    """(the last tile of a program, and how many came before it)."""
    ahead = (extent[0] * extent[1] - 1 - gl.program_id(0)) // gl.num_programs(0)
    return gl.program_id(0) + ahead * gl.num_programs(0), ahead


@gluon.jit
def multiply(
    bias_ptr, target, ring, handover, extent, GROUP: gl.constexpr, TRANSPOSED: gl.constexpr, GROUP_M: gl.constexpr,
    STAGES: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Warpgroup GROUP, which packs its half of the last tile itself: it has nothing left to multiply, and four warps
    take a quarter of the time."""
    consume(bias_ptr, target[3], ring, handover, extent, GROUP, TRANSPOSED, GROUP_M, STAGES)
    last, turn = last_of(extent)
    pack_tile(target, handover, last, turn, extent, GROUP, GROUP_M, SLOTS, 4)


@gluon.jit
def prepare(x_desc, w_desc, STAGES: gl.constexpr):
    """(the ring of stages, the place where warpgroups hand over their halves of a tile), with their barriers."""
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, GROUPS * ROWS, BLOCK_K], x_desc.layout)
    w_bufs = gl.allocate_shared_memory(x_desc.dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout)
    half_layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    halves = gl.allocate_shared_memory(x_desc.dtype, [GROUPS, ROWS, BLOCK_N], half_layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    for group in gl.static_range(GROUPS):
        mbarrier.init(full.index(group), count=1)
        mbarrier.init(free.index(group), count=1)
    return (x_bufs, w_bufs, ready, empty), (halves, full, free)


@gluon.jit
def follow(words_ptr, second):
    """Saves a launch before the kernel that follows, and lets it begin where programs have ended."""
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // dummy $0", "=r", [], gl.int32, False, 1)
    if gl.program_id(0) == 0:
        gl.store(words_ptr, 0)
        gl.store(words_ptr + 1, second)
        gl.store(words_ptr + 2, 0)
        gl.store(words_ptr + 3, 0)


@launch.Kernel
@gluon.jit(do_not_specialize=["M", "tiles_m", "tiles_n", "steps", "second"])
def _linear_pack_kernel(
    x_desc, w_desc, bias_ptr, threshold_ptr, bounds_ptr, factors_ptr, values_ptr, indices_ptr, counts_ptr,
    words_ptr, M, N, tiles_m, tiles_n, steps, second,
    TRANSPOSED: gl.constexpr, SLOTS: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """With TRANSPOSED W is [N, K], as in nn.Linear, otherwise [K, N]. An entry exceeds the threshold of its column, or
    the bound of its row, which a factor of its column may multiply.
    words_ptr: four words of the kernel that follows, which are to be 0, `second`, 0 and 0 when it begins."""
    if words_ptr is not None:
        follow(words_ptr, second)
    ring, handover = prepare(x_desc, w_desc, STAGES)
    inputs = (x_desc, w_desc)
    target = ((values_ptr, indices_ptr, counts_ptr), (threshold_ptr, bounds_ptr, factors_ptr), M, N)
    extent = (tiles_m, tiles_n, steps)
    # The three warps that do not multiply share a warpgroup, and so its registers: 88 a thread, for 208 of the others.
    gl.warp_specialize(
        [
            (multiply, (bias_ptr, target, ring, handover, extent, 0, TRANSPOSED, GROUP_M, STAGES, SLOTS)),
            (multiply, (bias_ptr, target, ring, handover, extent, 1, TRANSPOSED, GROUP_M, STAGES, SLOTS)),
            (produce, (inputs, ring, extent, TRANSPOSED, GROUP_M, STAGES)),
            (pack, (target, handover, extent, 0, GROUP_M, SLOTS)),
            (pack, (target, handover, extent, 1, GROUP_M, SLOTS)),
        ],
        [4, 1, 1, 1],
        [208, 88, 88, 88],
    )


def descriptors(x: Tensor, weight: Tensor) -> tuple[TensorDescriptor, TensorDescriptor]:
    """The descriptors by which the copy engine reads x and weight [N, K]."""
    (m, k), n = x.shape, weight.shape[0]
    of_x = descriptor_of(x, m, k, x.stride(0), 128, 64)
    if weight.stride(1) == 1:
        return of_x, descriptor_of(weight, n, k, weight.stride(0), TILE, 64)
    return of_x, descriptor_of(weight.t(), k, n, weight.stride(1), 64, TILE)


def launch_linear_pack(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    threshold: Tensor | None,
    out: tuple[Tensor, Tensor, Tensor],
    bounds: Tensor | None = None,
    factors: Tensor | None = None,
    words: tuple[Tensor | None, int] = (None, 0),
) -> None:
    """Fills out: values and indices [M, T, slots], counts [M, T]; slots without an entry are not written. The
    first four of `words`, int32, become 0, what is given beside them, 0 and 0."""
    (m, k), n, slots = x.shape, weight.shape[0], out[0].shape[2]
    transposed = weight.stride(1) == 1
    tiles_m, tiles_n, steps = launch.cdiv(m, 128), launch.cdiv(n, TILE), launch.cdiv(k, 64)
    inputs = descriptors(x, weight)
    first, second = words
    meta = {"TRANSPOSED": transposed, "SLOTS": slots, "GROUP_M": GROUP_M, "STAGES": STAGES}
    args = (*inputs, bias, threshold, bounds, factors, *out, first, m, n, tiles_m, tiles_n, steps, second)
    grid = (min(tuning.programs(x.device), tiles_m * tiles_n), 1, 1)
    _linear_pack_kernel(grid, args, meta, num_warps=4, maxnreg=168)


EXAMPLES = {
    _linear_pack_kernel: {
        "x_desc": [128, 64], "w_desc": [64, 256], "bias_ptr": "*bf16", "bounds_ptr": None, "factors_ptr": None,
        "indices_ptr": "*u8", "counts_ptr": "*i16", "words_ptr": "*i32", "TRANSPOSED": False, "SLOTS": 16,
        "GROUP_M": GROUP_M, "STAGES": STAGES, "maxnreg": 168,
    },
}  # fmt: skip
