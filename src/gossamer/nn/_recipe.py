"""The recipe that brings `JumpReLUSAE` to its target: the start and the steering.

All numbers are in units of the input scale, in which an element of x has a variance of about 1. An untrained direction
then sees a variance of about 1 too, and one bandwidth fits any data.

All thresholds have a factor in common, which follows L0 from one call to the next and keeps it at its target whatever
the rate of the optimizer is. If training pulls thresholds elsewhere, the factor pulls at them for ever. So the weight
of the penalty rises with the factor and falls with it, until training by itself keeps L0 at the target.

The penalty begins heavy, at several times the cost of an entry that is not explained. It lifts the thresholds of
latents that fire much, while the factor lowers all thresholds: so silent latents come to fire. Lighter penalties left
half of the latents of small dictionaries dead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.nn.median import geometric_median

BANDWIDTH = 0.05
"""Wider windows recovered no more of any dictionary, and hold more latents than fire while encoders are short."""
START = 8.0
"""L0 at the start of training over the target, unless it would exceed a quarter of the latents."""
WEIGHT, WEIGHT_TO_INPUT = 2.0, 0.1
"""Of the penalty, where 1 is the share of an entry in the squared error of a row of which nothing is explained; and
where the penalty pulls at the encoder too, which a heavy one would silence."""
WEIGHT_BY_FACTOR, LIGHTEST, HEAVIEST = 4.0, 3e-4, 4.0
"""The power of the thresholds' factor that the weight is multiplied with, and its bounds."""
RATE = 0.05
"""By how much of its logarithmic error in L0 a call moves the logarithm of the factor."""
LEAST_THRESHOLD = 0.05

CALLS, FACTOR, L0 = range(3)
"""The numbers of a state: calls of loss; the logarithm of the thresholds' factor; and the L0 of the last call, which
the next call acts upon, below 0 before the first call."""


def fresh(dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    """`[3]`: the state of a module that has not seen its data."""
    return torch.tensor([-1.0, 0.0, -1.0], dtype=dtype, device=device)


class Sample(NamedTuple):
    """Measurements of a sample of x, in its own units.

    Args:
        centre: `[d_in]`.
        size: `[]`, root of the mean squared distance of its rows to the centre.
        gain: `[]`, the factor on the encoder with which the untrained latents explain the most.
        thresholds: `[d_sae]`, of each latent the pre-activation that the share of rows exceed.
    """

    centre: Tensor
    size: Tensor
    gain: Tensor
    thresholds: Tensor


@torch.no_grad()
def measured(x: Tensor, W_enc: Tensor, W_dec: Tensor, share: float, total: Callable[[Tensor], Tensor]) -> Sample:
    """x `[M, d_in]`, M at least 1; total: a sum over ranks that have a slice of the latents each."""
    centre = geometric_median(x)
    rows = x.to(centre.dtype) - centre
    rank = max(1, round(share * len(rows)))
    explained, thresholds = torch.zeros_like(rows), []
    # In parts: all pre-activations at once would be the largest tensor of a run.
    for up, down in zip(W_enc.split(4096, dim=1), W_dec.split(4096)):
        pre = rows @ up.to(rows.dtype)
        # Between two numbers, so that rounding does not decide about either.
        thresholds.append(pre.topk(min(rank + 1, len(rows)), dim=0).values[-2:].mean(0))
        explained += torch.where(pre > thresholds[-1], pre, 0) @ down.to(rows.dtype)
    explained = total(explained)
    gain = (rows * explained).sum() / explained.square().sum()
    gain = torch.where(gain.isfinite(), gain, 1).clamp(0.01, 1)
    return Sample(centre, rows.square().sum(1).mean().sqrt(), gain, torch.cat(thresholds))


def input_scale(size: Tensor, d_in: int) -> Tensor:
    """The power of 2 that brings rows of that size nearest to the root of d_in: with it nothing is rounded."""
    scale = (d_in**0.5 / size).log2().round().exp2()
    return torch.where(scale.isfinite(), scale, 1)


def wanted(calls: Tensor, target: float, start: float, warm_up: int) -> Tensor:
    """The L0 to reach at some call: from the start to the target in equal ratios."""
    left = (1 - calls / warm_up).clamp(min=0)
    return target * (start / target) ** left


def begun(state: Tensor) -> Tensor:
    """The state before the first call."""
    return torch.cat([state.new_zeros(2), state.new_full((1,), -1)])


def advanced(state: Tensor, target: float, start: float, warm_up: int) -> Tensor:
    """The state of the next call, from the L0 of the last one."""
    calls, factor, l0 = state.unbind()
    ratio = l0 / wanted(calls, target, start, warm_up)
    error = ratio.clamp(min=0.1).log().clamp(-1, 1).nan_to_num(0)
    return torch.stack([calls + 1, factor + RATE * torch.where(l0 < 0, 0, error), l0])


def weight(state: Tensor, d_in: int, target: float, warm_up: int, to_input: bool) -> Tensor:
    """`[]`: the weight of the penalty."""
    heavy = (WEIGHT_BY_FACTOR * state[FACTOR]).clamp(math.log(LIGHTEST), math.log(HEAVIEST)).exp()
    begin = WEIGHT_TO_INPUT if to_input else WEIGHT
    return begin * d_in / target * (state[CALLS] / warm_up).clamp(max=1) * heavy
