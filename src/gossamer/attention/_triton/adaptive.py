"""How many keys each query takes, from the spread of its own scores.

A program owns a row of the slab and walks it twice, in chunks of fixed size: the sum, then the moments about the mean
and the largest. Nothing but the row and constants enters, so that the result depends on neither batch nor slab.
"""

import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch
from gossamer.attention._triton._indexer import in_units, load_gates, valid_keys, visible_keys
from gossamer.attention.levels import LEVELS, RULES
from gossamer.attention.records import SelectTopk


@triton.jit
def predicted_part(mean, spread, largest, predictor_ptr, offset_ptr, HIDDEN: tl.constexpr):
    """sigmoid of a small network's output; `predictor_ptr` [hidden, 5] has its weights, biases and output weights."""
    unit = tl.arange(0, HIDDEN) * 5
    x = tl.load(predictor_ptr + unit) * mean + tl.load(predictor_ptr + unit + 1) * spread
    x += tl.load(predictor_ptr + unit + 2) * largest + tl.load(predictor_ptr + unit + 3)
    x = tl.sum(tl.maximum(x, 0.0) * tl.load(predictor_ptr + unit + 4), axis=0) + tl.load(offset_ptr)
    return 1.0 / (1.0 + tl.exp(-x))


@launch.kernel
def _adaptive_k_kernel(
    keys_ptr, w_ptr, lengths_ptr, mean_ptr, predictor_ptr, k_ptr, first, Tq, padded, Tk, stride, ahead, k_min, k_base,
    k_max, temperature, STEPS: tl.constexpr, HEADS: tl.constexpr, RULE: tl.constexpr, HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Program (row of the slab)."""
    row = tl.program_id(0)
    batch = ((first + row) // padded).to(tl.int64)
    t = (first + row) % padded
    visible = visible_keys(t, valid_keys(lengths_ptr, batch, Tk), Tq, ahead)
    visible, _ = in_units(visible, 0, UNIT)
    gates = tl.zeros([1], tl.float32)
    for h in range(HEADS):
        gates += load_gates(w_ptr + batch * Tq * HEADS, t + tl.zeros([1], tl.int32), h, Tq, HEADS, "sigmoid")
    step = tl.sum(gates, axis=0) / STEPS
    keys_ptr += row.to(tl.int64) * stride
    sums = tl.zeros([BLOCK], tl.int32)
    tops = tl.zeros([BLOCK], tl.int32)
    for start in range(0, visible, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        level = tl.load(keys_ptr + columns, mask=columns < visible, other=1).to(tl.int32) - 1
        sums += level
        tops = tl.maximum(tops, level)
    n = tl.maximum(visible, 1).to(tl.float32)
    mean = tl.sum(sums.to(tl.int64), axis=0).to(tl.float32) / n
    top = tl.max(tops, axis=0)
    squares = tl.zeros([BLOCK], tl.float32)
    parts = tl.zeros([BLOCK], tl.float32)
    products = tl.zeros([BLOCK], tl.float32)
    for start in range(0, visible, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < visible
        level = tl.load(keys_ptr + columns, mask=inside, other=1).to(tl.int32) - 1
        if RULE == 1:
            below = (level - top).to(tl.float32) * step
            part = tl.where(inside, tl.exp(below), 0.0)
            parts += part
            products += part * below
        else:
            off = tl.where(inside, (level.to(tl.float32) - mean) * step, 0.0)
            squares += off * off
    if RULE == 1:
        partition = tl.sum(parts, axis=0)
        entropy = tl.log(partition) - tl.sum(products, axis=0) / partition
        k = k_base * (0.5 + temperature * entropy / tl.log(n + 1.0))
    else:
        variance = tl.sum(squares, axis=0) / tl.maximum(n - 1.0, 1.0)
        if RULE == 0:
            k = k_base * (0.5 + 1.0 / (1.0 + temperature * variance / tl.load(mean_ptr).to(tl.float32)))
        else:
            part = predicted_part(
                mean * step, tl.sqrt(variance), top.to(tl.float32) * step, predictor_ptr, mean_ptr, HIDDEN
            )
            k = k_min + part * (k_max - k_min)
    # Not a number takes the fewest.
    k = tl.where(k >= k_min, tl.minimum(k, k_max), k_min)
    tl.store(k_ptr + row, k.to(tl.int32))


def rows_k(call: SelectTopk, keys: Tensor, k: Tensor, sizes: tuple[int, ...]) -> None:
    """Fills k, int32 [rows of the slab], in columns; `sizes` are first, Tq, padded, Tk, stride and ahead."""
    predictor = call.predictor
    meta = {"STEPS": LEVELS, "HEADS": call.w.shape[2], "RULE": RULES.index(call.rule)}
    meta |= {"HIDDEN": 1 if predictor is None else predictor.shape[0], "BLOCK": 2048, "UNIT": call.granularity}
    args = (keys, call.w, call.lengths, call.mean, predictor, k, *sizes, *call.bounds, call.temperature)
    _adaptive_k_kernel((k.shape[0], 1, 1), args, meta, num_warps=8)


EXAMPLES = {
    _adaptive_k_kernel: {
        "keys_ptr": "*i16", "k_ptr": "*i32", "STEPS": 31741, "HEADS": 4, "RULE": 2, "HIDDEN": 32, "BLOCK": 2048,
        "UNIT": 1, "num_warps": 8,
    },
}  # fmt: skip
