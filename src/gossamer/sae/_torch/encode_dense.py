"""Dense latents on the CPU."""

from torch import Tensor

from gossamer.rowsparse._torch.pack import count, keep_, set_sign_
from gossamer.rowsparse.formats import threshold_dtype
from gossamer.sae._torch.encode import encode, pre_activations
from gossamer.sae.ranked import ranked
from gossamer.sae.records import SaeEncodeDense, SaeEncodeDenseBwd


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
    wide = threshold_dtype(acts.dtype)
    fires = acts != 0
    slope = None
    if threshold is not None:
        near = (acts.signbit() | fires).logical_and_(acts - threshold < bandwidth / 2).logical_and_(threshold >= 0)
        slope = keep_((threshold * grad).add_(grad_l0[:, None]), near).div_(bandwidth)
    sums = keep_(grad, fires).sum(0, dtype=wide)
    if slope is None:
        return sums, sums.new_empty(0)
    grad_threshold = -slope.sum(0)
    if ste_to_input:
        grad.add_(slope)
        sums = sums - grad_threshold
    return sums, grad_threshold
