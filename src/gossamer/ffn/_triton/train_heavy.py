"""Rows with too many entries to gather, in the backward pass of a block that is trained: dense tiles.

One launch draws tiles of as many rows as there are, as `heavy` does in the forward pass, and leaves at once where there
are none. Nothing is kept between the passes: a row's pre-activations are computed again.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer.ffn._triton.entry_lists import through
from gossamer.ffn._triton.heavy import (
    GROUP_M,
    along,
    let_through,
    next_tile,
    origin_of,
    projected,
    reserved,
    tile_dot,
    tile_for,
    wait_for,
)


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
    z = projected(x_rows, gate_ptr, gate_bias_ptr, n, K, valid, inside, BLOCK, BLOCK_K, DOT)
    active = let_through(z, threshold_ptr, n, valid, inside)
    to = kept_ptr + place.to(tl.int64)[:, None] * N + n[None, :]
    mask = valid[:, None] & inside[None, :]
    size = tl.cast(R, tl.int64) * N
    grad, w_rows = tl.zeros([BLOCK, BLOCK], tl.float32), down_ptr + n.to(tl.int64)[None, :] * D
    grad = along(grad, grad_ptr + row[:, None] * D, w_rows, 1, 1, D, valid, inside, BLOCK_K, DOT)
    up = None
    if up_ptr is not None:
        up = projected(x_rows, up_ptr, up_bias_ptr, n, K, valid, inside, BLOCK, BLOCK_K, DOT).to(tl.float32)
    hidden, through_gate, through_up = through(grad, z, active, up, penalty_ptr, SQUARED)
    tl.store(to, hidden, mask=mask)
    tl.store(to + size, through_gate, mask=mask)
    if up_ptr is not None:
        tl.store(to + 2 * size, through_up, mask=mask)


@triton.jit
def add_weight_tile(
    heavy_ptr, kept_ptr, rows_ptr, out_ptr, sums_ptr, tile_n, tile_k, base, held, N, K,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Adds to a tile of a weight's gradient, [N, K], kept.T @ rows over the listed rows, and to sums_ptr, if any, the
    sums of columns of kept."""
    n = tile_n * BLOCK + tl.arange(0, BLOCK)
    k = tile_k * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, held, BLOCK_K):
        place = first + tl.arange(0, BLOCK_K)
        valid = place < held
        row = tl.load(heavy_ptr + 1 + base + place, mask=valid, other=0).to(tl.int64)
        at = kept_ptr + place.to(tl.int64)[None, :] * N + n[:, None]
        a = tl.load(at, mask=valid[None, :] & (n < N)[:, None], other=0.0)
        b = tl.load(rows_ptr + row[:, None] * K + k[None, :], mask=valid[:, None] & (k < K)[None, :], other=0.0)
        acc = tile_dot(a, b, acc, DOT)
        total += tl.sum(a.to(tl.float32), axis=1)
    to = out_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    mask = (n < N)[:, None] & (k < K)[None, :]
    tl.store(to, tl.load(to, mask=mask, other=0.0).to(tl.float32) + acc, mask=mask)
    if sums_ptr is not None:
        if tile_k == 0:
            tl.store(sums_ptr + n, tl.load(sums_ptr + n, mask=n < N, other=0.0) + total, mask=n < N)


@launch.kernel
def _ffn_train_heavy_bwd_kernel(
    heavy_ptr, words_ptr, x_ptr, weights, grad_ptr, penalty_ptr, kept_ptr, dx_ptr, grads, sums_ptr, R, N, K, D,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, SQUARED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Programs share the listed rows, R at a time: `hidden_grad_tile` of them, then their rows of the
    gradient of x and their parts of the gradients of weights. weights: gate, its bias and threshold, up and its bias,
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
        weights_end = begin + tiles_n * (tiles_d + (tiles_k if up_ptr is None else 2 * tiles_k))
        end = weights_end + tiles_m * tiles_k
        if number < end:
            wait_for(words_ptr + 1, begin)
        while number < end:
            if number < begin + tiles_n * tiles_d:
                tile_n, tile_k = origin_of(number - begin, tiles_n, tiles_d, GROUP_M)
                add_weight_tile(
                    heavy_ptr, kept_ptr, grad_ptr, grads[2], None, tile_n, tile_k, base, held, N, D, BLOCK, BLOCK_K, DOT
                )  # fmt: skip
            elif number < weights_end:
                for i in tl.static_range(1 if up_ptr is None else 2):
                    first = begin + tiles_n * (tiles_d + i * tiles_k)
                    if (number >= first) & (number < first + tiles_n * tiles_k):
                        tile_n, tile_k = origin_of(number - first, tiles_n, tiles_k, GROUP_M)
                        add_weight_tile(
                            heavy_ptr, kept_ptr + (i + 1) * size, x_ptr, grads[i], sums_ptr + i * N, tile_n, tile_k,
                            base, held, N, K, BLOCK, BLOCK_K, DOT,
                        )  # fmt: skip
            else:
                tile_m, tile_k = origin_of(number - weights_end, tiles_m, tiles_k, GROUP_M)
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
    meta, options = tile_for(x, squared)
    args = (heavy, words, x, tuple(weights), grad, penalty, kept, dx, grads, sums, rows, n, k, d)
    _ffn_train_heavy_bwd_kernel((tuning.programs(x.device), 1, 1), args, meta, **options)


EXAMPLES = {
    _ffn_train_heavy_bwd_kernel: {
        "words_ptr": "*i32", "weights": ("*bf16", None, None, "*bf16", None, "*bf16"),
        "grads": ("*bf16", "*bf16", "*bf16"), "BLOCK": 128, "BLOCK_K": 32, "SQUARED": False, "DOT": "ieee",
        "num_warps": 8, "num_stages": 3,
    },
}  # fmt: skip
