"""Rows with too many entries to gather, through dense tiles: gate and up as one product over them alone, and down.

Which rows these are only the device knows: `gather` lists them. So there is always a launch, with a grid that fills the
GPU and no more, whose programs draw tiles of as many rows as the list has; where it is empty they leave at once. The
rows of x are gathered by the list, 128 to a tile, the rows between the two products stand in the list's order, and the
result's rows go where the list says. The gate is computed again, for the slots of such rows do not hold all of it.
A program that draws a tile of the second product waits for the first: its tiles were all drawn before, by programs that
are at work, so that none waits for one that has not begun.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from gossamer._core import launch, tuning
from gossamer.ffn._triton._packed import LISTED
from gossamer.ffn._triton.replay import Launched
from gossamer.rowsparse._triton.overflow import SUMMED, dot, summed_apart


@triton.jit
def origin_of(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """(row tile, column tile): GROUP_M row tiles take turns with a column tile, so that both stay in the L2."""
    in_group = GROUP_M * tiles_n
    first = tile // in_group * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    return first + tile % in_group % height, tile % in_group // height


@triton.jit
def product(
    a_rows, b_rows, stride_b, length, inside, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr, PARTIAL: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Rows of a, [BLOCK_M, 1] pointers, times rows of b, [1, BLOCK_N], whose elements are `stride_b` apart: float32
    [BLOCK_M, BLOCK_N]. PARTIAL products at a time are summed on their own, or 0 for all."""
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    k = tl.arange(0, BLOCK_K)
    b_ptrs = b_rows + k.to(tl.int64)[:, None] * stride_b
    step = tl.full([], BLOCK_K, tl.int64) * stride_b
    for first in range(0, length, BLOCK_K):
        if EVEN:
            a = tl.load(a_rows + (first + k)[None, :])
            b = tl.load(b_ptrs, mask=inside[None, :], other=0.0)
        else:
            a = tl.load(a_rows + (first + k)[None, :], mask=(k < length - first)[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=(k < length - first)[:, None] & inside[None, :], other=0.0)
        b_ptrs += step
        acc = dot(a, b, acc, PRECISION, UPCAST)
        if PARTIAL > 0:
            acc, total = summed_apart(acc, total, (first + BLOCK_K) % PARTIAL == 0)
    return total + acc if PARTIAL > 0 else acc


@triton.jit
def hidden_tile(
    heavy_ptr, x_ptr, gate_ptr, gate_bias_ptr, threshold_ptr, up_ptr, up_bias_ptr, hidden_ptr, tile_m, tile_n, count,
    N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    PARTIAL: tl.constexpr, SQUARED: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """A tile of what lies between the block's products at the listed rows, the gated activations."""
    at = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.load(heavy_ptr + LISTED + at, mask=at < count, other=0)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < N
    x_rows = x_ptr + row.to(tl.int64)[:, None] * K
    gate_rows = gate_ptr + n.to(tl.int64)[None, :] * K
    acc = product(x_rows, gate_rows, 1, K, inside, BLOCK_M, BLOCK_N, BLOCK_K, EVEN, PARTIAL, PRECISION, UPCAST)
    if gate_bias_ptr is not None:
        acc += tl.load(gate_bias_ptr + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    # An entry is kept or not as it is where entries are packed: after it was rounded.
    z = acc.to(hidden_ptr.dtype.element_ty).to(tl.float32)
    bound = tl.zeros([BLOCK_N], tl.float32)
    if threshold_ptr is not None:
        bound = tl.load(threshold_ptr + n, mask=inside, other=0.0).to(tl.float32)
        bound = tl.where(bound < 0, 0.0, bound)
    z = tl.where(z <= bound[None, :], 0.0, z)
    if SQUARED:
        z *= z
    if up_ptr is not None:
        up_rows = up_ptr + n.to(tl.int64)[None, :] * K
        up = product(x_rows, up_rows, 1, K, inside, BLOCK_M, BLOCK_N, BLOCK_K, EVEN, PARTIAL, PRECISION, UPCAST)
        if up_bias_ptr is not None:
            up += tl.load(up_bias_ptr + n, mask=inside, other=0.0).to(tl.float32)[None, :]
        z *= up
    tl.store(hidden_ptr + at.to(tl.int64)[:, None] * N + n[None, :], z, mask=(at < count)[:, None] & inside[None, :])


@launch.kernel
def _ffn_heavy_kernel(
    heavy_ptr, x_ptr, gate_ptr, gate_bias_ptr, threshold_ptr, up_ptr, up_bias_ptr, hidden_ptr, down_ptr,
    down_bias_ptr, out_ptr, N, K, D,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, EVEN: tl.constexpr,
    PARTIAL: tl.constexpr, SQUARED: tl.constexpr, DEPENDENT: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Programs draw tiles of the listed rows by a ticket: those of `hidden`, then those of hidden @ down, down [N, D],
    which go into the rows of the result."""
    if DEPENDENT:
        gdc_wait()
    count = tl.load(heavy_ptr)
    if count > 0:
        tiles_m, tiles_n, tiles_d = tl.cdiv(count, BLOCK_M), tl.cdiv(N, BLOCK_N), tl.cdiv(D, BLOCK_N)
        first = tiles_m * tiles_n
        number = tl.atomic_add(heavy_ptr + 2, 1, sem="relaxed")
        while number < first:
            tile_m, tile_n = origin_of(number, tiles_m, tiles_n, GROUP_M)
            hidden_tile(
                heavy_ptr, x_ptr, gate_ptr, gate_bias_ptr, threshold_ptr, up_ptr, up_bias_ptr, hidden_ptr, tile_m,
                tile_n, count, N, K, BLOCK_M, BLOCK_N, BLOCK_K, EVEN, PARTIAL, SQUARED, PRECISION, UPCAST,
            )  # fmt: skip
            tl.debug_barrier()
            tl.atomic_add(heavy_ptr + 3, 1, sem="release")
            number = tl.atomic_add(heavy_ptr + 2, 1, sem="relaxed")
        while tl.atomic_add(heavy_ptr + 3, 0, sem="acquire") < first:
            pass
        tl.debug_barrier()
        while number < first + tiles_m * tiles_d:
            tile_m, tile_d = origin_of(number - first, tiles_m, tiles_d, GROUP_M)
            at = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
            d = tile_d * BLOCK_N + tl.arange(0, BLOCK_N)
            inside = d < D
            h_rows = hidden_ptr + tl.where(at < count, at, 0).to(tl.int64)[:, None] * N
            w_columns = down_ptr + d[None, :]
            acc = product(h_rows, w_columns, D, N, inside, BLOCK_M, BLOCK_N, BLOCK_K, EVEN, PARTIAL, PRECISION, UPCAST)
            if down_bias_ptr is not None:
                acc += tl.load(down_bias_ptr + d, mask=inside, other=0.0).to(tl.float32)[None, :]
            row = tl.load(heavy_ptr + LISTED + at, mask=at < count, other=0)
            to = out_ptr + row.to(tl.int64)[:, None] * D + d[None, :]
            tl.store(to, acc, mask=(at < count)[:, None] & inside[None, :])
            number = tl.atomic_add(heavy_ptr + 2, 1, sem="relaxed")


def tile_for(m: int, n: int, k: int, weight: Tensor) -> tuple[dict[str, object], int, int]:
    """(tile, warps, stages) of products along k and along n."""
    half = weight.element_size() == 2
    wide = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64 if tuning.hopper(weight.device) else 32}
    tile = wide if half and m > 64 else {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}
    even = k % tile["BLOCK_K"] == 0 and n % tile["BLOCK_K"] == 0
    meta: dict[str, object] = {**tile, "GROUP_M": 8, "EVEN": even, "PARTIAL": 0 if half or tuning.tf32() else SUMMED}
    # Of 8 warps in float32 too, so that two sums fit the registers.
    return meta, 4 if half and tile is not wide else 8, 3


def start(listed: Tensor, limit: int) -> None:
    """An empty list in int32 [LISTED + M]: 0 rows are listed, the limit, 0 tiles are drawn, and 0 done."""
    listed[: LISTED.value].zero_()
    listed[1].fill_(limit)


def project(
    listed: Tensor,
    x: Tensor,
    gate: tuple[Tensor, Tensor | None, Tensor | None],
    up: tuple[Tensor, Tensor | None] | None,
    down: tuple[Tensor, Tensor | None],
    out: Tensor,
    squared: bool,
) -> Launched:
    """Writes the rows of `out` that are listed. gate: weight [N, K], bias, threshold; up: weight [N, K], bias; down:
    weight [N, D], bias; all contiguous."""
    (m, k), n, d = x.shape, gate[0].shape[0], out.shape[1]
    meta, warps, stages = tile_for(m, n, k, gate[0])
    follows = tuning.dependent_launch(x.device)
    meta |= {"SQUARED": squared, "DEPENDENT": follows, **tuning.dot_precision(x, max(k, n))}
    heads = (listed, x, *gate, *(up or (None, None)), x.new_empty(m, n), *down, out)
    grid, options = (2 * tuning.programs(x.device), 1, 1), {"num_warps": warps, "num_stages": stages}
    bound = _ffn_heavy_kernel(grid, (*heads, n, k, d), meta, launch_pdl=follows, head=len(heads), **options)
    return Launched(bound, heads)


EXAMPLES = {
    _ffn_heavy_kernel: {
        "gate_bias_ptr": "*bf16", "up_bias_ptr": "*bf16", "down_bias_ptr": "*bf16", "BLOCK_M": 128, "BLOCK_N": 128,
        "BLOCK_K": 32, "GROUP_M": 8, "EVEN": True, "PARTIAL": 0, "SQUARED": True, "DEPENDENT": False,
        "PRECISION": "ieee", "UPCAST": False, "num_warps": 8, "num_stages": 3,
    },
}  # fmt: skip
