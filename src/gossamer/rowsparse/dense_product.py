"""The plain product and its time, for callers that may choose it instead of gathering.

On an H200 cuBLAS multiplies 16-bit matrices whose rows begin off 16 bytes at a fifth of its rate, 110 to 190 TFLOP/s
instead of 600. Where a product is large, copies with zeros behind their rows cost less than that.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer._core import autocast, tuning

LOADED = {2: 0.9e12, 4: 1.7e12}
"""Bytes/s at which cuBLAS reads 16-bit matrices whose rows begin on 2 bytes, and on 4 or 8. That is how fast loads are
issued, not how fast memory is: 9 x 13,833 x 793 and 43 x 22,383 x 6,557 take an H100 and an H200 the same time, 28 and
340 us."""
START = 4e-6
"""Seconds that a launch or two take, whatever there is to do."""


def dense_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None, *, wide: bool = False
) -> Tensor:
    """x `[M, N]` @ weight `[N, D]` + bias, differentiable. x may have further columns, of zeros; `wide` allows the
    result to have further rows and columns."""
    if autocast.enabled(x.device):
        # The operands have been cast.
        with autocast.disabled(x.device):
            return dense_product(x, weight, bias, out_dtype, wide=wide)
    dtype = out_dtype or weight.dtype
    # Rounding the product to half first would lose the digits of a wider result.
    working = torch.promote_types(dtype, weight.dtype)
    added = bias if bias is not None and bias.dtype is working else None
    out = _multiply(x.to(working), weight.to(working), added, wide)
    return (out if bias is None or added is not None else out + bias).to(dtype)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, wide: bool) -> Tensor:
    m, (n, d) = x.shape[0], weight.shape
    if copies_pay(x, weight):
        out = padded_product(x, weight, bias)
        return out if wide else out[:m, :d].contiguous()
    x = x if x.shape[1] == n else x[:, :n]
    return x @ weight if bias is None else torch.addmm(bias, x, weight)


def copies_pay(x: Tensor, weight: Tensor) -> bool:
    """Whether `padded_product` is faster than the product of x and weight as they lie."""
    # A compiler sees to its own layouts.
    if torch.compiler.is_compiling() or not x.is_cuda or x.element_size() != 2 or (_fits(x) and _fits(weight)):
        return False
    return _cost(x.shape[0], *weight.shape, 2, False, x.device.index, True)[1]


def padded_product(x: Tensor, weight: Tensor, bias: Tensor | None = None, columns: int = 0) -> Tensor:
    """The product among further rows and columns, in which each matrix has its rows on 16 bytes; of at least `columns`
    columns."""
    rows = padded(x.shape[0], x) if _by_column(x) else x.shape[0]
    inner, columns = padded(x.shape[1], x), padded(max(weight.shape[1], columns), x)
    x, weight = _fitted(x, rows, inner), _fitted(weight, inner, columns)
    if bias is None:
        return x @ weight
    return torch.addmm(F.pad(bias, (0, columns - bias.shape[0])), x, weight)


def padded(columns: int, like: Tensor) -> int:
    """As many columns, or up to a few more, as fill 16 bytes."""
    each = 16 // like.element_size()
    return -(-columns // each) * each


def dense_seconds(m: int, n: int, d: int, size: int, tf32: bool, index: int) -> float:
    """The time of the product on CUDA device `index` with elements of `size` bytes, in rows that lie close together."""
    each = 16 // size
    return _cost(m, n, d, size, tf32, index, n % each != 0 or d % each != 0)[0]


@lru_cache(4096)
def _cost(m: int, n: int, d: int, size: int, tf32: bool, index: int, odd: bool) -> tuple[float, bool]:
    """(seconds, whether that is with copies). The shares are those of 216 products of random sizes on an H200."""
    r = tuning.rates(index)
    flops, moved = 2.0 * m * n * (-(-d // 64) * 64), float(m * n + n * d + m * d) * size
    rate = 0.9 * r.half if size == 2 else r.tf32 if tf32 else r.ieee
    plain = START + max(flops / rate, moved / (0.6 * r.copy))
    if size != 2 or not odd:
        return plain, False
    # By the bytes that rows begin on: 8, 4 or 2.
    even = n % 2 == d % 2 == 0
    share = 0.28 if n % 4 == d % 4 == 0 else 0.2 if even else 0.18
    slow = START + max(flops / (share * r.half), moved / odd_rate(m == 1, even, r.copy))
    # To read and to write, by some launches for each matrix.
    copied = plain + 3 * START + 2 * moved / (0.4 * r.copy)
    return min(copied, slow), copied < 0.85 * slow


def odd_rate(single: bool, even: bool, copy: float) -> float:
    """Bytes/s at which cuBLAS reads 16-bit matrices whose rows begin off 16 bytes, on a GPU that copies `copy` of them;
    `even`: on 4 bytes at least. A `single` row is a matrix times a vector, which waits for memory alone."""
    return 0.65 * copy if single else min(LOADED[4 if even else 2], 0.6 * copy)


def _fits(t: Tensor) -> bool:
    """Whether each row, or each column, is whole 16 bytes from one that begins on 16."""
    t = t.t() if _by_column(t) else t
    each = 16 // t.element_size()
    return t.stride(1) == 1 and t.stride(0) % each == 0 and t.shape[1] % each == 0 and t.storage_offset() % each == 0


def _by_column(t: Tensor) -> bool:
    return t.stride(0) == 1 and t.stride(1) != 1


def _fitted(t: Tensor, rows: int, columns: int) -> Tensor:
    if t.shape == (rows, columns) and _fits(t):
        return t
    if _by_column(t):
        return _fitted(t.t(), columns, rows).t()
    out = t.new_empty(rows, columns)
    out[: t.shape[0], : t.shape[1]] = t
    out[t.shape[0] :] = 0
    out[: t.shape[0], t.shape[1] :] = 0
    return out
