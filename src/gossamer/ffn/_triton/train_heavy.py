"""Rows with too many entries to gather, in the forward and the backward pass of a block that is trained: dense tiles.

Which rows these are only the device knows; `entry_lists` lists them. One launch a pass draws tiles of as many rows as
there are, and leaves at once where there are none. Activations of RESERVED rows at a time stand in memory, `[R, N]`;
the rows beyond take turns with them. Nothing is kept between the passes: a row's pre-activations are computed again.

Programs draw tiles by a ticket, step by step: a step's tiles wait until all of the step before are done. Those were
drawn earlier, by programs that are at work, so that none waits for one that has not begun.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer.ffn._triton.entry_lists import RowLists
from gossamer.ffn._triton.heavy import origin_of

RESERVED = 8
"""The part of a batch's rows whose activations are in memory at a time: one in so many."""
GROUP_M = tl.constexpr(8)


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
    step_a and step_b apart: float32 [BLOCK, BLOCK]."""
    for first in range(0, length, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        at = k.to(tl.int64)
        a = tl.load(a_rows + at[None, :] * step_a, mask=valid[:, None] & (k < length)[None, :], other=0.0)
        b = tl.load(b_columns + at[:, None] * step_b, mask=(k < length)[:, None] & inside[None, :], other=0.0)
        acc = tile_dot(a, b, acc, DOT)
    return acc


@triton.jit
def gate_tile(x_rows, gate_ptr, bias_ptr, threshold_ptr, n, K, valid, inside, BLOCK: tl.constexpr,
              BLOCK_K: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """(pre-activations, rounded as they are where entries are packed; which are active) of a tile."""
    acc, w_rows = tl.zeros([BLOCK, BLOCK], tl.float32), gate_ptr + n.to(tl.int64)[None, :] * K
    acc = along(acc, x_rows, w_rows, 1, 1, K, valid, inside, BLOCK_K, DOT)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    z = acc.to(x_rows.dtype.element_ty)
    bound = tl.zeros([BLOCK], tl.float32)
    if threshold_ptr is not None:
        bound = tl.load(threshold_ptr + n, mask=inside, other=0.0).to(tl.float32)
        bound = tl.where(bound < 0, 0.0, bound)
    active = (z.to(tl.float32) <= bound[None, :]) == 0
    return z, active & valid[:, None] & inside[None, :]


@triton.jit
def up_tile(x_rows, up_ptr, bias_ptr, n, K, valid, inside, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
            DOT: tl.constexpr):  # fmt: skip
    """The up projection, rounded."""
    acc, w_rows = tl.zeros([BLOCK, BLOCK], tl.float32), up_ptr + n.to(tl.int64)[None, :] * K
    acc = along(acc, x_rows, w_rows, 1, 1, K, valid, inside, BLOCK_K, DOT)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    return acc.to(x_rows.dtype.element_ty)


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
def _ffn_train_heavy_fwd_kernel(
    heavy_ptr, words_ptr, x_ptr, gate_ptr, gate_bias_ptr, threshold_ptr, up_ptr, up_bias_ptr, down_ptr, down_bias_ptr,
    hidden_ptr, out_ptr, l1_ptr, fired_ptr, R, N, K, D,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, SQUARED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Programs share the listed rows, R at a time: their hidden activations, then their rows of the result."""
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
            row = tl.load(heavy_ptr + 1 + base + place, mask=valid, other=0).to(tl.int64)
            n = tile_n * BLOCK + tl.arange(0, BLOCK)
            inside = n < N
            x_rows = x_ptr + row[:, None] * K
            z, active = gate_tile(
                x_rows, gate_ptr, gate_bias_ptr, threshold_ptr, n, K, valid, inside, BLOCK, BLOCK_K, DOT
            )  # fmt: skip
            hidden = tl.where(active, z.to(tl.float32), 0.0)
            if SQUARED:
                hidden *= hidden
            if up_ptr is not None:
                up = up_tile(x_rows, up_ptr, up_bias_ptr, n, K, valid, inside, BLOCK, BLOCK_K, DOT)
                # Zeros where nothing is active, whatever the other factor.
                hidden = tl.where(active, hidden.to(z.dtype).to(tl.float32) * up.to(tl.float32), 0.0)
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
            row = tl.load(heavy_ptr + 1 + base + place, mask=valid, other=0).to(tl.int64)
            d = tile_d * BLOCK + tl.arange(0, BLOCK)
            inside = d < D
            h_rows = hidden_ptr + place.to(tl.int64)[:, None] * N
            acc = tl.zeros([BLOCK, BLOCK], tl.float32)
            acc = along(acc, h_rows, down_ptr + d[None, :], 1, D, N, valid, inside, BLOCK_K, DOT)
            if down_bias_ptr is not None:
                acc += tl.load(down_bias_ptr + d, mask=inside, other=0.0).to(tl.float32)[None, :]
            tl.store(out_ptr + row[:, None] * D + d[None, :], acc, mask=valid[:, None] & inside[None, :])
            if tile_d == 0:
                l1 = tl.zeros([BLOCK], tl.float32)
                for first in range(0, N, BLOCK_K):
                    k = first + tl.arange(0, BLOCK_K)
                    hidden = tl.load(h_rows + k[None, :], mask=valid[:, None] & (k < N)[None, :], other=0.0)
                    l1 += tl.sum(tl.abs(hidden.to(tl.float32)), axis=1)
                tl.store(l1_ptr + row, l1, mask=valid)
            number = next_tile(words_ptr)
        begin = end


@triton.jit
def hidden_grad_tile(
    heavy_ptr, x_ptr, weights, grad_ptr, penalty_ptr, kept_ptr, tile_m, tile_n, base, held, R, N, K, D,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, SQUARED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """A tile of the listed rows' hidden activations, and of the gradients through the gate and the up projection, into
    kept_ptr, [3, R, N]."""
    gate_ptr, gate_bias_ptr, threshold_ptr, up_ptr, up_bias_ptr, down_ptr = weights
    place = tile_m * BLOCK + tl.arange(0, BLOCK)
    valid = place < held
    row = tl.load(heavy_ptr + 1 + base + place, mask=valid, other=0).to(tl.int64)
    n = tile_n * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    x_rows = x_ptr + row[:, None] * K
    z, active = gate_tile(x_rows, gate_ptr, gate_bias_ptr, threshold_ptr, n, K, valid, inside, BLOCK, BLOCK_K, DOT)
    to = kept_ptr + place.to(tl.int64)[:, None] * N + n[None, :]
    mask = valid[:, None] & inside[None, :]
    size = tl.cast(R, tl.int64) * N
    grad, w_rows = tl.zeros([BLOCK, BLOCK], tl.float32), down_ptr + n.to(tl.int64)[None, :] * D
    grad = along(grad, grad_ptr + row[:, None] * D, w_rows, 1, 1, D, valid, inside, BLOCK_K, DOT)
    gate = tl.where(active, z.to(tl.float32), 0.0)
    hidden = gate * gate if SQUARED else gate
    slope = 2 * gate if SQUARED else tl.zeros([BLOCK, BLOCK], tl.float32) + 1
    if up_ptr is not None:
        up = up_tile(x_rows, up_ptr, up_bias_ptr, n, K, valid, inside, BLOCK, BLOCK_K, DOT).to(tl.float32)
        if penalty_ptr is not None:
            grad += tl.load(penalty_ptr) * tl.where(up > 0, 1.0, tl.where(up < 0, -1.0, 0.0))
        tl.store(to + 2 * size, tl.where(active, grad * hidden, 0.0), mask=mask)
        hidden = tl.where(active, hidden.to(z.dtype).to(tl.float32) * up, 0.0)
        slope *= up
    elif penalty_ptr is not None:
        grad += tl.load(penalty_ptr)
    tl.store(to, hidden, mask=mask)
    tl.store(to + size, tl.where(active, grad * slope, 0.0), mask=mask)


@triton.jit
def add_weight_tile(
    heavy_ptr, kept_ptr, rows_ptr, out_ptr, tile_n, tile_k, base, held, N, K,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Adds to a tile of a weight's gradient, [N, K], kept.T @ rows over the listed rows."""
    n = tile_n * BLOCK + tl.arange(0, BLOCK)
    k = tile_k * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for first in range(0, held, BLOCK_K):
        place = first + tl.arange(0, BLOCK_K)
        valid = place < held
        row = tl.load(heavy_ptr + 1 + base + place, mask=valid, other=0).to(tl.int64)
        at = kept_ptr + place.to(tl.int64)[None, :] * N + n[:, None]
        a = tl.load(at, mask=valid[None, :] & (n < N)[:, None], other=0.0)
        b = tl.load(rows_ptr + row[:, None] * K + k[None, :], mask=valid[:, None] & (k < K)[None, :], other=0.0)
        acc = tile_dot(a, b, acc, DOT)
    to = out_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    mask = (n < N)[:, None] & (k < K)[None, :]
    tl.store(to, tl.load(to, mask=mask, other=0.0).to(tl.float32) + acc, mask=mask)


@triton.jit
def add_sums(kept_ptr, sums_ptr, tile_n, held, N, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """Adds the sums of columns of kept, over the listed rows."""
    n = tile_n * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, held, BLOCK_K):
        place = first + tl.arange(0, BLOCK_K)
        at = kept_ptr + place.to(tl.int64)[:, None] * N + n[None, :]
        kept = tl.load(at, mask=(place < held)[:, None] & (n < N)[None, :], other=0.0)
        total += tl.sum(kept.to(tl.float32), axis=0)
    tl.store(sums_ptr + n, tl.load(sums_ptr + n, mask=n < N, other=0.0) + total, mask=n < N)


@launch.kernel
def _ffn_train_heavy_bwd_kernel(
    heavy_ptr, words_ptr, x_ptr, weights, grad_ptr, penalty_ptr, kept_ptr, dx_ptr, grads, sums_ptr, R, N, K, D,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, SQUARED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Programs share the listed rows, R at a time: what `hidden_grad_tile` makes of them, then their rows of the
    gradient of x and what they add to the gradients of weights. weights: gate, its bias and threshold, up and its bias,
    down [N, D]; grads: of gate, up and down. sums_ptr: [2, N], sums of the gradients of the hidden activations."""
    count = tl.load(heavy_ptr)
    number = 0
    if count > 0:
        number = tl.atomic_add(words_ptr, 1, sem="relaxed")
    begin = 0
    tiles_n, tiles_k, tiles_d = tl.cdiv(N, BLOCK), tl.cdiv(K, BLOCK), tl.cdiv(D, BLOCK)
    gate_ptr, up_ptr = weights[0], weights[3]
    size = tl.cast(R, tl.int64) * N
    for base in range(0, count, R):
        held = tl.minimum(count - base, R)
        tiles_m = tl.cdiv(held, BLOCK)
        end = begin + tiles_m * tiles_n
        if number < end:
            wait_for(words_ptr + 1, begin)
        while number < end:
            tile_m, tile_n = origin_of(number - begin, tiles_m, tiles_n, GROUP_M)
            hidden_grad_tile(
                heavy_ptr, x_ptr, weights, grad_ptr, penalty_ptr, kept_ptr, tile_m, tile_n, base, held, R, N, K, D,
                BLOCK, BLOCK_K, SQUARED, DOT,
            )  # fmt: skip
            number = next_tile(words_ptr)
        begin = end
        down_end = begin + tiles_n * tiles_d
        gate_end = down_end + tiles_n * tiles_k
        up_end = gate_end
        if up_ptr is not None:
            up_end += tiles_n * tiles_k
        sums_end = up_end + tiles_n
        end = sums_end + tiles_m * tiles_k
        if number < end:
            wait_for(words_ptr + 1, begin)
        while number < end:
            if number < down_end:
                tile_n, tile_k = origin_of(number - begin, tiles_n, tiles_d, GROUP_M)
                add_weight_tile(
                    heavy_ptr, kept_ptr, grad_ptr, grads[2], tile_n, tile_k, base, held, N, D, BLOCK, BLOCK_K, DOT
                )  # fmt: skip
            elif number < gate_end:
                tile_n, tile_k = origin_of(number - down_end, tiles_n, tiles_k, GROUP_M)
                add_weight_tile(
                    heavy_ptr, kept_ptr + size, x_ptr, grads[0], tile_n, tile_k, base, held, N, K, BLOCK, BLOCK_K, DOT
                )  # fmt: skip
            elif number < up_end:
                if up_ptr is not None:
                    tile_n, tile_k = origin_of(number - gate_end, tiles_n, tiles_k, GROUP_M)
                    add_weight_tile(
                        heavy_ptr, kept_ptr + 2 * size, x_ptr, grads[1], tile_n, tile_k, base, held, N, K, BLOCK,
                        BLOCK_K, DOT,
                    )  # fmt: skip
            elif number < sums_end:
                tile_n = number - up_end
                add_sums(kept_ptr + size, sums_ptr, tile_n, held, N, BLOCK, BLOCK_K)
                if up_ptr is not None:
                    add_sums(kept_ptr + 2 * size, sums_ptr + N, tile_n, held, N, BLOCK, BLOCK_K)
            else:
                tile_m, tile_k = origin_of(number - sums_end, tiles_m, tiles_k, GROUP_M)
                place = tile_m * BLOCK + tl.arange(0, BLOCK)
                valid = place < held
                row = tl.load(heavy_ptr + 1 + base + place, mask=valid, other=0).to(tl.int64)
                k = tile_k * BLOCK + tl.arange(0, BLOCK)
                rows = kept_ptr + size + place.to(tl.int64)[:, None] * N
                acc = tl.zeros([BLOCK, BLOCK], tl.float32)
                acc = along(acc, rows, gate_ptr + k[None, :], 1, K, N, valid, k < K, BLOCK_K, DOT)
                if up_ptr is not None:
                    acc = along(acc, rows + size, up_ptr + k[None, :], 1, K, N, valid, k < K, BLOCK_K, DOT)
                tl.store(dx_ptr + row[:, None] * K + k[None, :], acc, mask=valid[:, None] & (k < K)[None, :])
            number = next_tile(words_ptr)
        begin = end


def _tile(x: Tensor, squared: bool) -> tuple[dict[str, Any], dict[str, int]]:
    """(sizes, options of a launch)."""
    precision = tuning.dot_precision(x, 0)
    dot = "upcast" if precision["UPCAST"] else precision["PRECISION"]
    if x.element_size() == 2 and not launch.INTERPRET:
        block, inner, stages = 128, 64 if tuning.hopper(x.device) else 32, 3
    else:
        block, inner, stages = (32, 32, 2) if launch.INTERPRET else (64, 32, 2)
    meta = {"BLOCK": block, "BLOCK_K": inner, "SQUARED": squared, "DOT": dot}
    return meta, {"num_warps": 8, "num_stages": stages}


def reserved(m: int) -> int:
    """Rows whose activations are in memory at a time."""
    return max(min(m, 128), launch.cdiv(m, RESERVED))


def forward(
    lists: RowLists,
    x: Tensor,
    weights: tuple[Tensor | None, ...],
    down_bias: Tensor | None,
    out: Tensor,
    l1: Tensor,
    squared: bool,
) -> None:
    """Writes the listed rows of out `[M, D]` and l1 `[M]`, and adds their entries to `lists.fired`."""
    (m, k), n, d = x.shape, lists.fired.shape[0], out.shape[1]
    rows = reserved(m)
    hidden, words = x.new_empty(rows, n), torch.zeros(2, dtype=torch.int32, device=x.device)
    meta, options = _tile(x, squared)
    args = (lists.heavy, words, x, *weights, down_bias, hidden, out, l1, lists.fired, rows, n, k, d)
    _ffn_train_heavy_fwd_kernel((tuning.programs(x.device), 1, 1), args, meta, **options)


def backward(
    heavy: Tensor,
    x: Tensor,
    weights: tuple[Tensor | None, ...],
    grad: Tensor,
    penalty: Tensor | None,
    dx: Tensor,
    grads: tuple[Tensor, Tensor | None, Tensor],
    sums: Tensor,
    squared: bool,
) -> None:
    """Writes the listed rows of dx and adds to the gradients of weights, as the kernel says."""
    (m, k), (n, d) = x.shape, grads[2].shape
    rows = reserved(m)
    kept = x.new_empty(2 if grads[1] is None else 3, rows, n)
    words = torch.zeros(2, dtype=torch.int32, device=x.device)
    meta, options = _tile(x, squared)
    args = (heavy, words, x, tuple(weights), grad, penalty, kept, dx, grads, sums, rows, n, k, d)
    _ffn_train_heavy_bwd_kernel((tuning.programs(x.device), 1, 1), args, meta, **options)


_DENSE = {"BLOCK": 128, "BLOCK_K": 32, "SQUARED": False, "DOT": "ieee", "num_warps": 8, "num_stages": 3}
EXAMPLES = {
    _ffn_train_heavy_fwd_kernel: {
        "gate_bias_ptr": None, "threshold_ptr": None, "up_bias_ptr": None, "down_bias_ptr": None, "words_ptr": "*i32",
        **_DENSE,
    },
    _ffn_train_heavy_bwd_kernel: {
        "words_ptr": "*i32", "weights": ("*bf16", None, None, "*bf16", None, "*bf16"),
        "grads": ("*bf16", "*bf16", "*bf16"), **_DENSE,
    },
}  # fmt: skip
