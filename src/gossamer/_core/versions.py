"""PyTorch's counts of changes in place, made true for fused optimizers, which write parameters without counting."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_post_hook


def version_of(tensor: Tensor) -> int:
    """How often a tensor, which is no inference tensor, has been changed in place; from now on steps count, too."""
    _count_fused_steps()
    return tensor._version


@functools.cache
def _count_fused_steps() -> None:
    # Once for the process, and not before anything follows a count.
    register_optimizer_step_post_hook(_count)


def _count(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for group in optimizer.param_groups:
        # PyTorch never takes None for True; other optimizers, which have no such entry, count by themselves.
        if group.get("fused"):
            increment_version([parameter for parameter in group["params"] if parameter.grad is not None])
