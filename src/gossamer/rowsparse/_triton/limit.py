"""The numbers that are compared where thresholds of columns say which elements of a dense matrix are entries."""

import triton
import triton.language as tl


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
