"""Dense latents on the CPU."""

import numpy as np
import torch
from torch import Tensor

from gossamer.rowsparse._torch.pack import INTEGER
from gossamer.rowsparse.formats import sums_over_rows, threshold_dtype
from gossamer.sae._torch.encode import encode, pre_activations
from gossamer.sae.ranked import ranked
from gossamer.sae.records import SaeEncodeDense, SaeEncodeDenseBwd


def keep_(x: Tensor, flags: Tensor) -> Tensor:
    """x, 0 where a flag is not set, NaN or not: a product of integers, for `masked_fill_` and `where` take twenty times
    as long where flags look random."""
    x.view(INTEGER[x.element_size()]).mul_(flags)
    return x


def set_sign_(x: Tensor, flags: Tensor) -> Tensor:
    """x, -0.0 where a flag is set and x is 0."""
    bits = x.view(INTEGER[x.element_size()])
    bits.add_(flags, alpha=torch.iinfo(bits.dtype).min)
    return x


def count(flags: Tensor, dim: int) -> Tensor:
    """int64, of a matrix of booleans; `torch.sum` converts each of them first."""
    return torch.from_numpy(np.count_nonzero(flags.numpy(), axis=dim))


def encode_dense(call: SaeEncodeDense) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(acts, l0, fired, nnz)."""
    x, weight, bias, b_dec, threshold, activation, k, bandwidth, scale, *_ = call
    wide = threshold_dtype(weight.dtype)
    near = None
    if activation in ("topk", "batchtopk"):
        acts = ranked(x, weight, bias, b_dec, activation, k, scale, encode)
        silent = acts == 0
    else:
        # In place: memory that is new to the process costs more than the computation in it.
        acts = pre_activations(x, weight, bias, b_dec)
        limit = acts.new_zeros(1, dtype=wide) if threshold is None else threshold.clamp(min=0)
        silent = acts <= limit
        if bandwidth:
            near = (acts > limit - bandwidth / 2).logical_and_(silent)
        keep_(acts, ~silent)
        if near is not None:
            set_sign_(acts, near)
    m, n = acts.shape
    l0 = n - count(silent, 1)
    nnz = l0 if near is None else l0 + count(near, 1)
    return acts, l0.to(wide), m - count(silent, 0), nnz.int()


def encode_dense_bwd_(call: SaeEncodeDenseBwd) -> tuple[Tensor, Tensor]:
    """Grad becomes that of the pre-activations -> (its sums, gradient of the
    threshold)."""
    grad, acts, grad_l0, threshold, bandwidth, ste_to_input = call
    fires = acts != 0
    slope = None
    if threshold is not None:
        near = (acts.signbit() | fires).logical_and_(acts - threshold < bandwidth / 2).logical_and_(threshold >= 0)
        slope = keep_((threshold * grad).add_(grad_l0[:, None]), near).div_(bandwidth)
    sums = sums_over_rows(keep_(grad, fires))
    if slope is None:
        return sums, sums.new_empty(0)
    grad_threshold = -slope.sum(0)
    if ste_to_input:
        grad.add_(slope)
        sums = sums - grad_threshold
    return sums, grad_threshold
