"""Compilation ahead of the first real call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from gossamer._core.modes import evaluating
from gossamer.ffn import SparseBlock
from gossamer.ffn.block import METHODS
from gossamer.rowsparse import DensityTracker

_PATHS = tuple((path, counts) for path in METHODS[1:] for counts in (False, True))
"""The paths of a block, in a call that counts its entries and in one that does not."""


def warm_up(target: Callable[..., Any], *inputs: Any, **options: Any) -> None:
    """Compiles the kernels of all paths that `target(*inputs, **options)` may take, so that no later call waits.

    A block or an autoencoder chooses its path by earlier calls, and so meets other kernels when its mind changes. Each
    path is called here, side by side and then again in this thread, in inference and, where a parameter or an input
    needs a gradient, forward and backward too. The calls run on copies that share the parameters: gradients, statistics
    and trackers stay as they are. A function that is no method of a module is called as it is, in a thread and again in
    this one, so statistics of modules that it uses move. Compiled kernels stay in Triton's cache on disk for later
    processes.

    Args:
        target: a module, patched or of `nn`; a method of one, as `model.loss`; or a function.
        inputs, options: as for a call, of the shapes, dtypes, strides and device of later calls.

    Raises:
        TypeError: target cannot be called.
        Exception: the errors of the call.

    >>> model = gossamer.nn.TopKSAE(8, 32, k=4)
    >>> gossamer.warm_up(model.loss, torch.randn(5, 8))
    """
    if not callable(target):
        raise TypeError(
            f"gossamer.warm_up: target must be a module, a method of one or a function, got {type(target).__name__}."
        )
    if any(isinstance(part, Tensor) and part.grad_fn is not None for part in tree_leaves((inputs, options))):
        # The backward passes below must not go on through the caller's graph.
        inputs, options = tree_map_only(Tensor, _leaf, (inputs, options))
    module = getattr(target, "__self__", target)
    calls: list[Callable[..., Any]] = [target]
    if isinstance(module, nn.Module):
        count = max((len(paths) for paths, _ in _choices(module)), default=1)
        shared = {id(parameter): parameter for parameter in module.parameters()}
        if any(getattr(part, "is_fresh", False) for part in module.modules()):
            # The first loss of a `JumpReLUSAE` with a target sets its parameters.
            shared = {}
        made = [copy.deepcopy(module, dict(shared)) for _ in range(count)]
        for number, one in enumerate(made):
            for paths, choose in _choices(one):
                choose(paths[number % len(paths)])
        calls = [one if module is target else getattr(one, target.__name__) for one in made]
    modes = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in ("cpu", "cuda")]

    def call(one: Callable[..., Any]) -> None:
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(torch.autocast(*mode))
            _call(one, inputs, options)

    with ThreadPoolExecutor(len(calls), "gossamer-warm-up") as threads:
        list(threads.map(call, calls))
    # cuDNN's plans of attention, for instance, belong to a thread.
    for each in calls:
        call(each)


def _leaf(tensor: Tensor) -> Tensor:
    """The tensor apart from the graph that made it."""
    return tensor if tensor.grad_fn is None else tensor.detach().requires_grad_()


def _pin(block: SparseBlock, choice: tuple[str, bool]) -> None:
    path, counts = choice
    if counts:
        block.density.rows.pinned = path
    else:
        block.method = path


def _choices(module: nn.Module) -> Iterator[tuple[tuple[Any, ...], Callable[[Any], None]]]:
    """(the paths, a function that pins one) of each part that chooses its path by earlier calls."""
    for value in chain.from_iterable(vars(part).values() for part in module.modules()):
        if isinstance(value, SparseBlock):
            if value.method == "auto":
                yield _PATHS, partial(_pin, value)
        else:
            tracker = value if isinstance(value, DensityTracker) else getattr(value, "density", None)
            if isinstance(tracker, DensityTracker) and tracker.pinned is None:
                yield ("sparse", "dense"), partial(setattr, tracker, "pinned")


def _call(target: Callable[..., Any], inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
    module = getattr(target, "__self__", target)
    with torch.no_grad(), evaluating(module):
        target(*inputs, **options)
    operands = [*(module.parameters() if isinstance(module, nn.Module) else ()), *tree_leaves((inputs, options))]
    needed = [operand for operand in operands if isinstance(operand, Tensor) and operand.requires_grad]
    if needed:
        out = tree_leaves(target(*inputs, **options))
        sums = [part.float().sum() for part in out if isinstance(part, Tensor) and part.requires_grad]
        # `generate`, for one, has no gradient in any mode.
        if sums:
            torch.autograd.grad(sums, needed, allow_unused=True)
