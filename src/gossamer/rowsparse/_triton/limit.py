"""Which elements of a dense matrix are entries, by thresholds of its columns.

Thresholds in float32 would be most of what many 16-bit rows read, so they are first rounded to the 16 bits of the
elements, the same way for every comparison.
"""

import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch


@triton.jit
def add_bias(z, bias_ptr, columns, inside):
    """z + bias in float32, rounded once to the dtype of z: the number that is compared is the number that is stored."""
    if bias_ptr is None:
        return z.to(tl.float32)
    else:
        bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        return (z.to(tl.float32) + bias).to(z.dtype).to(tl.float32)


@triton.jit
def load_threshold(threshold_ptr, stride_t, columns, inside):
    """A threshold below 0 keeps the elements that 0 keeps, because values are at least 0."""
    if threshold_ptr is None:
        return 0.0
    else:
        threshold = tl.load(threshold_ptr + columns * stride_t, mask=inside, other=0.0).to(tl.float32)
        return tl.where(threshold < 0, 0.0, threshold)


@triton.jit
def load_limit(limits_ptr, threshold_ptr, stride_t, radius, columns, inside, WINDOW: tl.constexpr):
    """The bound that elements have to exceed: the threshold, with WINDOW less `radius`, or a number in place of
    both."""
    if limits_ptr is not None:
        return tl.load(limits_ptr + columns, mask=inside, other=float("inf")).to(tl.float32)
    else:
        limit = load_threshold(threshold_ptr, stride_t, columns, inside)
        if WINDOW:
            limit = limit - radius
        return limit


@launch.kernel
def _limits_kernel(threshold_ptr, out_ptr, stride_t, radius, N, BLOCK: tl.constexpr):
    """Program (block of columns): the largest number of the output's 16-bit dtype up to threshold - radius.

    A number of that dtype exceeds the one if and only if it exceeds the other, and half the bytes say so.
    """
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    limit = load_threshold(threshold_ptr, stride_t, columns, columns < N) - radius
    rounded = limit.to(out_ptr.dtype.element_ty)
    bits = rounded.to(tl.int16, bitcast=True).to(tl.int32)
    below = tl.where(bits > 0, bits - 1, tl.where(bits == 0, -0x7FFF, bits + 1))
    bits = tl.where(rounded.to(tl.float32) > limit, below, bits)
    tl.store(out_ptr + columns, bits.to(tl.int16).to(out_ptr.dtype.element_ty, bitcast=True), mask=columns < N)


def limits_of(z: Tensor, threshold: Tensor | None, radius: float) -> Tensor | None:
    """Numbers in place of the thresholds of z's columns, where those take more bytes than z has."""
    if threshold is None or threshold.stride(0) == 0 or z.element_size() != 2:
        return None
    n = z.shape[1]
    limits = z.new_empty(n)
    args = (threshold, limits, threshold.stride(0), radius, n)
    _limits_kernel((launch.cdiv(n, 1024), 1, 1), args, {"BLOCK": 1024})
    return limits


EXAMPLES = {_limits_kernel: {"BLOCK": 1024}}
