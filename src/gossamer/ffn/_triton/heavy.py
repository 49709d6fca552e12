"""Rows with too many entries to gather, through dense tiles: gate and up over them alone, and down.

Which rows these are only the device knows: `gather` lists them, or `entry_lists` where a block is trained. So there is
always a launch, with a grid that fills the GPU and no more, whose programs draw tiles of as many rows as there are, and
leave at once where there are none. Activations of RESERVED rows at a time stand in memory, `[R, N]`; the rows beyond
take turns with them. The gate is computed again, for the slots of such rows do not hold all of it.

Programs draw tiles by a ticket, step by step: a step's tiles wait until all tiles of the step before are done. Programs
that are at work have drawn these tiles, so that no program waits for one that has not begun.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from gossamer._core import launch, tuning
from gossamer.ffn._triton.entry_lists import hidden_of
from gossamer.rowsparse._triton.overflow import SUMMED, summed_apart

LISTED = tl.constexpr(4)
"""Words before the rows of a list of heavy ones: how many they are, how many entries a row has that is not, and of the
tiles of their products how many are drawn, and done."""
RESERVED, TRAINED = 8, 24
"""The part of a batch's rows whose activations are in memory at a time: one in so many, in whole tiles; and where a
block is trained."""
GROUP_M = tl.constexpr(8)
PARTIAL = tl.constexpr(SUMMED)


@triton.jit
def origin_of(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """(row tile, column tile): GROUP_M row tiles take turns with a column tile, so that both stay in the L2."""
    in_group = GROUP_M * tiles_n
    first = tile // in_group * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    return first + tile % in_group % height, tile % in_group // height


@triton.jit
def tile_dot(a, b, acc, DOT: tl.constexpr):
    """acc + a @ b in float32. DOT: the precision of float32 operands, or "upcast" in the interpreter."""
    if DOT == "upcast":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision=DOT)


@triton.jit
def along(acc, a_rows, b_columns, step_a, step_b, length, valid, inside, BLOCK_K: tl.constexpr, DOT: tl.constexpr):
    """acc and the product over an inner dimension of two tiles, [BLOCK, 1] and [1, BLOCK] pointers, whose elements are
    step_a and step_b apart: float32 [BLOCK, BLOCK]. Of float32 that may not be rounded, PARTIAL products at a time are
    summed on their own."""
    APART: tl.constexpr = DOT == "ieee" and a_rows.dtype.element_ty == tl.float32
    total = acc
    if APART:
        acc = tl.zeros_like(total)
    for first in range(0, length, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        at = k.to(tl.int64)
        a = tl.load(a_rows + at[None, :] * step_a, mask=valid[:, None] & (k < length)[None, :], other=0.0)
        b = tl.load(b_columns + at[:, None] * step_b, mask=(k < length)[:, None] & inside[None, :], other=0.0)
        acc = tile_dot(a, b, acc, DOT)
        if APART:
            acc, total = summed_apart(acc, total, (first + BLOCK_K) % PARTIAL == 0)
    return total + acc if APART else acc


@triton.jit
def projected(
    x_rows, w_ptr, bias_ptr, n, K, valid, inside, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, DOT: tl.constexpr
):  # fmt: skip
    """A tile of x @ w.T + bias, rounded."""
    acc, w_rows = tl.zeros([BLOCK, BLOCK], tl.float32), w_ptr + n.to(tl.int64)[None, :] * K
    acc = along(acc, x_rows, w_rows, 1, 1, K, valid, inside, BLOCK_K, DOT)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    return acc.to(x_rows.dtype.element_ty)


@triton.jit
def let_through(z, threshold_ptr, n, valid, inside):
    """Which pre-activations of a tile are active, decided as where entries are packed: after they were rounded."""
    bound = tl.zeros(n.shape, tl.float32)
    if threshold_ptr is not None:
        bound = tl.load(threshold_ptr + n, mask=inside, other=0.0).to(tl.float32)
        bound = tl.where(bound < 0, 0.0, bound)
    active = (z.to(tl.float32) <= bound[None, :]) == 0
    return active & valid[:, None] & inside[None, :]


@triton.jit
def wait_for(done_ptr, tiles):
    """Until so many tiles are done."""
    while tl.atomic_add(done_ptr, 0, sem="acquire") < tiles:
        pass
    tl.debug_barrier()


@triton.jit
def next_tile(words_ptr):
    """Says that a tile is done, and draws another."""
    tl.debug_barrier()
    tl.atomic_add(words_ptr + 1, 1, sem="release")
    return tl.atomic_add(words_ptr, 1, sem="relaxed")


@launch.kernel
def _ffn_heavy_kernel(
    heavy_ptr, words_ptr, x_ptr, gate_ptr, gate_bias_ptr, threshold_ptr, up_ptr, up_bias_ptr, down_ptr, down_bias_ptr,
    hidden_ptr, out_ptr, l1_ptr, fired_ptr, R, N, K, D,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, SQUARED: tl.constexpr, DOT: tl.constexpr, BEFORE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Programs share the listed rows, R at a time: their hidden activations, then their rows of the result. BEFORE:
    words of heavy_ptr before the rows; without words_ptr the third and fourth count tiles, drawn and done. l1_ptr and
    fired_ptr take the sums of rows and the entries of columns, where a block is trained."""
    if DEPENDENT:
        gdc_wait()
    if words_ptr is None:
        words_ptr = heavy_ptr + 2
    count = tl.load(heavy_ptr)
    number = 0
    if count > 0:
        number = tl.atomic_add(words_ptr, 1, sem="relaxed")
    begin = 0
    for base in range(0, count, R):
        held = tl.minimum(count - base, R)
        tiles_m, tiles_n, tiles_d = tl.cdiv(held, BLOCK), tl.cdiv(N, BLOCK), tl.cdiv(D, BLOCK)
        end = begin + tiles_m * tiles_n
        if number < end:
            wait_for(words_ptr + 1, begin)
        while number < end:
            tile_m, tile_n = origin_of(number - begin, tiles_m, tiles_n, GROUP_M)
            place = tile_m * BLOCK + tl.arange(0, BLOCK)
            valid = place < held
            row = tl.load(heavy_ptr + BEFORE + base + place, mask=valid, other=0).to(tl.int64)
            n = tile_n * BLOCK + tl.arange(0, BLOCK)
            inside = n < N
            x_rows = x_ptr + row[:, None] * K
            z = projected(x_rows, gate_ptr, gate_bias_ptr, n, K, valid, inside, BLOCK, BLOCK_K, DOT)
            active = let_through(z, threshold_ptr, n, valid, inside)
            up = None
            if up_ptr is not None:
                up = projected(x_rows, up_ptr, up_bias_ptr, n, K, valid, inside, BLOCK, BLOCK_K, DOT).to(tl.float32)
            # Zeros where nothing is active, whatever the other factor.
            hidden = tl.where(active, hidden_of(z, up, SQUARED), 0.0)
            if fired_ptr is not None:
                tl.atomic_add(fired_ptr + n, tl.sum(active.to(tl.int32), axis=0), mask=inside, sem="relaxed")
            to = hidden_ptr + place.to(tl.int64)[:, None] * N + n[None, :]
            tl.store(to, hidden, mask=valid[:, None] & inside[None, :])
            number = next_tile(words_ptr)
        begin, end = end, end + tiles_m * tiles_d
        if number < end:
            wait_for(words_ptr + 1, begin)
        while number < end:
            tile_m, tile_d = origin_of(number - begin, tiles_m, tiles_d, GROUP_M)
            place = tile_m * BLOCK + tl.arange(0, BLOCK)
            valid = place < held
            row = tl.load(heavy_ptr + BEFORE + base + place, mask=valid, other=0).to(tl.int64)
            d = tile_d * BLOCK + tl.arange(0, BLOCK)
            inside = d < D
            h_rows = hidden_ptr + place.to(tl.int64)[:, None] * N
            acc = tl.zeros([BLOCK, BLOCK], tl.float32)
            acc = along(acc, h_rows, down_ptr + d[None, :], 1, D, N, valid, inside, BLOCK_K, DOT)
            if down_bias_ptr is not None:
                acc += tl.load(down_bias_ptr + d, mask=inside, other=0.0).to(tl.float32)[None, :]
            tl.store(out_ptr + row[:, None] * D + d[None, :], acc, mask=valid[:, None] & inside[None, :])
            if l1_ptr is not None:
                if tile_d == 0:
                    l1 = tl.zeros([BLOCK], tl.float32)
                    for first in range(0, N, BLOCK_K):
                        k = first + tl.arange(0, BLOCK_K)
                        hidden = tl.load(h_rows + k[None, :], mask=valid[:, None] & (k < N)[None, :], other=0.0)
                        l1 += tl.sum(tl.abs(hidden.to(tl.float32)), axis=1)
                    tl.store(l1_ptr + row, l1, mask=valid)
            number = next_tile(words_ptr)
        begin = end


def tile_for(x: Tensor, squared: bool) -> tuple[dict[str, Any], dict[str, int]]:
    """(sizes, options of a launch)."""
    precision = tuning.dot_precision(x, 0)
    dot = "upcast" if precision["UPCAST"] else precision["PRECISION"]
    if x.element_size() == 2 and not launch.INTERPRET:
        block, inner, stages = 128, 64 if tuning.hopper(x.device) else 32, 3
    else:
        block, inner, stages = (32, 32, 2) if launch.INTERPRET else (64, 32, 2)
    meta = {"BLOCK": block, "BLOCK_K": inner, "SQUARED": squared, "DOT": dot}
    return meta, {"num_warps": 8, "num_stages": stages}


def reserved(m: int, part: int = TRAINED) -> int:
    """Rows whose activations are in memory at a time."""
    return min(m, 128 * launch.cdiv(m, 128 * part))


def start(listed: Tensor, limit: int) -> None:
    """An empty list in int32 [LISTED + M]: 0 rows are listed, the limit, 0 tiles are drawn, and 0 done."""
    listed[: LISTED.value].zero_()
    listed[1].fill_(limit)


def project(
    listed: Tensor,
    x: Tensor,
    weights: tuple[Tensor | None, ...],
    out: Tensor,
    squared: bool,
    trained: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Writes the rows of `out` that are listed. weights, contiguous: of the gate [N, K], bias, threshold; of up [N, K],
    bias; of down [N, D], bias. trained: l1 [M] and fired [N]; the list is then one of `entry_lists`."""
    (m, k), n, d = x.shape, weights[0].shape[0], out.shape[1]  # type: ignore[union-attr]
    rows, (meta, options) = reserved(m, TRAINED if trained else RESERVED), tile_for(x, squared)
    follows = trained is None and tuning.dependent_launch(x.device)
    words = None if trained is None else torch.zeros(2, dtype=torch.int32, device=x.device)
    meta |= {"BEFORE": LISTED.value if trained is None else 1, "DEPENDENT": follows}
    heads = (listed, words, x, *weights, x.new_empty(rows, n), out, *(trained or (None, None)))
    grid = (2 * tuning.programs(x.device), 1, 1)
    _ffn_heavy_kernel(grid, (*heads, rows, n, k, d), meta, launch_pdl=follows, **options)


EXAMPLES = {
    _ffn_heavy_kernel: {
        "gate_bias_ptr": "*bf16", "threshold_ptr": None, "up_bias_ptr": None, "down_bias_ptr": None,
        "words_ptr": "*i32", "BLOCK": 128, "BLOCK_K": 32, "SQUARED": False, "DOT": "ieee", "BEFORE": 1,
        "DEPENDENT": False, "num_warps": 8, "num_stages": 3,
    },
}  # fmt: skip
