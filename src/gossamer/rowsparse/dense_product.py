"""The plain product and its time, for callers that may choose it instead of gathering."""

import torch
from torch import Tensor

from gossamer._core import autocast, tuning

LAUNCH = 3e-6
"""Seconds that a launch takes, whatever there is to do."""


def dense_product(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """x `[M, N]` @ weight `[N, D]` + bias, differentiable."""
    if autocast.enabled(x.device):
        # The operands have been cast.
        with autocast.disabled(x.device):
            return dense_product(x, weight, bias, out_dtype)
    dtype = out_dtype or weight.dtype
    # Rounding the product to half first would lose the digits of a wider result.
    working = torch.promote_types(dtype, weight.dtype)
    x, weight = x.to(working), weight.to(working)
    if bias is not None and bias.dtype is working:
        return torch.addmm(bias, x, weight).to(dtype)
    out = x @ weight
    return (out if bias is None else out + bias).to(dtype)


def multiply_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """out `[M, D]` = x `[M, N]` @ weight `[N, D]` + bias, without a gradient: a launcher is repeated only where the
    library writes its product where it is told. With a bias of the dtype of x the sum is rounded once: near 0 it keeps
    its sign, by which ReLU passes gradients."""
    if bias is not None and bias.dtype is x.dtype:
        torch.addmm(bias, x, weight, out=out)
        return
    torch.mm(x, weight, out=out)
    if bias is not None:
        out += bias


def dense_seconds(m: int, n: int, d: int, size: int, tf32: bool, index: int, zeros: bool = False) -> float:
    """The time of x `[m, n]` @ weight `[n, d]` on CUDA device `index`, of elements of `size` bytes; with `zeros` x has
    hardly anything else, which draws less power, and a GPU at its limit is faster. On an H200 cuBLAS takes up to five
    times as long for 16-bit rows that do not all begin on 16 bytes."""
    r = tuning.rates(index)
    flops, moved = 2.0 * m * n * (-(-d // 64) * 64), float(m * n + n * d + m * d) * size
    rate = (1.2 if zeros else 0.9) * r.half if size == 2 else r.tf32 if tf32 else r.ieee
    return LAUNCH + max(flops / rate, moved / (0.6 * r.copy))
