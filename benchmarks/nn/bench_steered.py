"""A training step of `nn.JumpReLUSAE` with its L0 steered to a target, beside one with its thresholds set by hand.

Both hold the same entries: those that fire, and those in a window below their thresholds. Its width is in units
of x. How many these are depends on how far apart pre-activations are: about 1 once latents have learnt something, and
0.3 in the first steps, when the encoder is short. Beside them dense PyTorch, as in bench_sae.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine import Case, Provider
from benchmarks.nn.bench_sae import (
    gradients,
    jumprelu_loss,
    largest_error,
    load_parameters,
    random_parameters,
    reference,
)
from gossamer import nn

WARM_UP = 300


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """The shapes of bench_sae."""
    if quick or device.type == "cpu":
        shape, target, dtype = (64, 256, 4096), 16, torch.float32
    else:
        shape, target, dtype = (4096, 2304, 65536), 64, torch.bfloat16
    for spread in (1.0, 0.3):
        yield steered(*shape, target, spread, dtype)


def steered(B: int, D: int, F: int, target: int, spread: float, dtype: torch.dtype) -> Case:
    """The step after the warm-up; `spread` is the deviation of pre-activations in units of x."""
    usual = nn.JumpReLUSAE(1, 2, target_l0=1).bandwidth
    # The penalty's weight after the warm-up, while the thresholds' common factor is 1.
    penalty = {"bandwidth": usual, "l0_coefficient": 2 * D / target}

    def make(device: torch.device, generator: torch.Generator) -> list[tuple[Tensor, ...]]:
        made = random_parameters(B, D, F, dtype, device, generator, spread)
        # Biases widen the normal distribution of pre-activations by a hundredth.
        start = spread * 1.01**0.5 * NormalDist().inv_cdf(1 - target / F)
        made.append(torch.full((F,), math.log(start), device=device))
        return [tuple(tensor.requires_grad_(at > 0) for at, tensor in enumerate(made))]

    def by_hand(x: Tensor, *parameters: Tensor) -> tuple[Any, ...]:
        model = nn.JumpReLUSAE(D, F, **penalty, dtype=dtype, device=x.device)
        return model, x, load_parameters(model, *parameters), None

    def by_target(x: Tensor, *parameters: Tensor) -> tuple[Any, ...]:
        model = nn.JumpReLUSAE(D, F, target_l0=target, warm_up=WARM_UP, dtype=dtype, device=x.device)
        own = load_parameters(model, *parameters)
        model.go_on()
        return model, x, own, model.steering.clone()

    def step(model: Any, x: Tensor, parameters: list[Tensor], start: Tensor | None) -> tuple[Tensor, ...]:
        if start is not None:
            # Each call is the first after the warm-up: steering that the parameters do not follow would run away.
            model.steering.copy_(start)
        return torch.autograd.grad(model.loss(x).loss, parameters)

    loss = partial(jumprelu_loss, **penalty)
    normal = NormalDist(0, spread * 1.01**0.5)
    threshold = normal.inv_cdf(1 - target / F)
    held = round(F * (1 - normal.cdf(threshold - usual / 2)))
    return Case(
        room="nn",
        name="train_jumprelu_steered",
        parameters={"B": B, "D": D, "F": F, "L0": target, "held": held, "spread": f"{spread:g}"},
        dtype=dtype,
        make=make,
        providers=(
            Provider("JumpReLU, target_l0 (steered)", step, ours=True, prepare=by_target, capturable=True),
            Provider("thresholds set by hand", step, ours=True, prepare=by_hand, capturable=True),
            Provider("dense", gradients(loss), capturable=True),
        ),
        reference=partial(reference, loss),
        bytes=(4 * D * F + 4 * B * D) * dtype.itemsize,
        flops=2 * B * D * (F + 4 * held),
        grad=True,
        error=largest_error,
        budget=0.3 if dtype == torch.bfloat16 else 1e-3,
    )
