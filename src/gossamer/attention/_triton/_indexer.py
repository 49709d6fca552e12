"""Functions that the kernels of the indexer share: its activation and gates, and the keys that a query sees."""

import triton
import triton.language as tl


@triton.jit
def approximate_tanh(x):
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """relu(x) or sigmoid(x); "tanh" is a sigmoid by the GPU's own tanh, half the work, with an error of 1e-5."""
    if ACTIVATION == "relu":
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "tanh":
        return 0.5 * approximate_tanh(0.5 * x) + 0.5
    else:
        return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def derivative(active, ACTIVATION: tl.constexpr):
    """The derivative of `activated` where its value is `active`."""
    if ACTIVATION == "relu":
        return tl.where(active <= 0, 0.0, 1.0)
    else:
        return active * (1.0 - active)


@triton.jit
def valid_keys(lengths_ptr, batch, Tk):
    """How many keys a batch element has."""
    if lengths_ptr is None:
        return Tk
    else:
        return tl.minimum(tl.maximum(tl.load(lengths_ptr + batch).to(tl.int32), 0), Tk)


@triton.jit
def visible_keys(rows, length, Tq, ahead):
    """How many keys, from the first on, queries see: the last query is aligned with the last key, or the first with
    the first where there are fewer keys than queries. `ahead` is 1, or more than Tk where queries see all keys."""
    seen = tl.minimum(rows + tl.maximum(length - Tq, 0) + ahead, length)
    return tl.where(rows < Tq, seen, 0)


@triton.jit
def in_units(visible, window, UNIT: tl.constexpr):
    """(how many units of UNIT keys hold any visible one, how many of the last of these are always kept); `window` is
    in keys, and 1 - UNIT where there is none."""
    if UNIT == 1:
        return visible, window
    else:
        units = (visible + UNIT - 1) // UNIT
        return units, units - tl.maximum(visible - window, 0) // UNIT


@triton.jit
def load_gates(w_ptr, rows, h, Tq, HEADS: tl.constexpr, ACTIVATION: tl.constexpr):
    """A head's weights at queries of one batch element, of which a sigmoid is taken unless it is "relu" that activates;
    0 past the last query."""
    at = w_ptr + rows.to(tl.int64) * HEADS + h
    if ACTIVATION == "relu":
        return tl.load(at, mask=rows < Tq, other=0.0).to(tl.float32)
    else:
        return 1.0 / (1.0 + tl.exp(-tl.load(at, mask=rows < Tq, other=float("-inf")).to(tl.float32)))


@triton.jit
def load_bias(bias_ptr, h):
    """A head's bias in float32."""
    if bias_ptr is None:
        return 0.0
    else:
        return tl.load(bias_ptr + h).to(tl.float32)


@triton.jit
def load_tile(x_ptr, rows, stride, limit, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """[rows, BLOCK_D] of a matrix with contiguous rows of D; 0 past its end."""
    columns = tl.arange(0, BLOCK_D)
    at = rows.to(tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(x_ptr + at, mask=(rows < limit)[:, None] & (columns < D)[None, :], other=0.0)
