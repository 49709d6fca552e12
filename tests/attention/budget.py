"""What a float32 sum may err by for the order of its terms alone, where plain PyTorch is exact by luck."""

import math

import torch
from torch import Tensor


def spread(x: Tensor, w: Tensor) -> Tensor:
    """(x^2 @ w^2)^0.5, by which the error of x @ w is measured."""
    return (x.detach().double().square() @ w.detach().double().square()).sqrt()


def no_luck(plain: Tensor, exact: Tensor, spread: Tensor, length: int) -> Tensor:
    """`plain`, as far off `exact` as it is, or as half of 4 log2(length) 2^-24 spread, if that is further.

    `testing.assert_close` allows twice that: the error budget of a sum of `length` terms.
    """
    floor = 2 * math.log2(max(length, 2)) * 2**-24 * spread
    return exact.detach() + torch.maximum((plain.detach().double() - exact.detach()).abs(), floor)
