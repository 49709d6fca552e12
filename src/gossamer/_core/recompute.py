"""What a first run under gradient checkpointing used, kept for the run that computes it again.

A module whose state moves from call to call (what it counts, steers by or knows of densities) has to compute again with
the state of the first run, however many calls came between. The two runs share one object, which PyTorch makes for
them: the context of an `autograd.Function` whose forward calls the module (a reentrant checkpoint), or the frame of a
checkpoint that is not reentrant. Values lie on it in the order of the calls, and are freed when it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils import checkpoint

Value = TypeVar("Value")
_FRAME: Any = checkpoint._CheckpointFrame
_NAMES = frozenset(("forward", "backward"))
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def recomputed() -> bool:
    """Whether this runs inside of a backward pass, where a forward pass can only be one that runs again."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def remembered(
    owner: object,
    make: Callable[[], Value],
    *,
    lost: Callable[[], Value],
    keep: Callable[[Value], Value] = lambda value: value,
) -> Value:
    """make(), or in a recomputation what it was in the first run.

    Args:
        owner: who asks; each asks in the same order in both runs.
        make: what a first run uses, and every call outside of a checkpoint.
        lost: what a recomputation does whose first run was not seen.
        keep: from a value to what may be kept of it, where it would change.
    """
    if torch.compiler.is_compiling():
        return make()
    computed_again = recomputed()
    first, regions = _around(computed_again)
    if computed_again:
        memory: _Memory | None = getattr(first, "_gossamer", None)
        value = lost() if memory is None else memory.next(owner, lost)
    else:
        value = make()
    if regions:
        kept = keep(value)
        for region in regions:
            if not hasattr(region, "_gossamer"):
                region._gossamer = _Memory()
            region._gossamer.add(owner, kept)
    return value


class _Memory:
    """Values by owner, in the order in which they came."""

    def __init__(self) -> None:
        self._values: dict[object, list[Any]] = {}
        self._read: dict[object, int] = {}
        self._task = -1

    def add(self, owner: object, value: Any) -> None:
        self._values.setdefault(owner, []).append(value)

    def next(self, owner: object, lost: Callable[[], Value]) -> Value:
        # A graph that is kept may be computed again by each backward pass, from the beginning.
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task, self._read = task, {}
        values, position = self._values.get(owner, ()), self._read.get(owner, 0)
        if position >= len(values):
            return lost()
        self._read[owner] = position + 1
        found: Value = values[position]
        return found


def _around(computed_again: bool) -> tuple[Any, list[Any]]:
    """(what the first run of this recomputation may have left something on, or None; what a later one will look at)"""
    first: Any = None
    regions: list[Any] = []
    hooks = _top_hooks(True)
    if hooks is not None:
        region = _free_variable(hooks[0], "frame")
        if isinstance(region, _FRAME):
            regions.append(region)
    if computed_again or not torch.is_grad_enabled():
        first = _walk(sys._getframe(2), regions)
    return first, regions


def _walk(frame: FrameType | None, regions: list[Any]) -> Any:
    """Goes outwards to the innermost recomputation; adds the contexts of functions whose forward is on the way."""
    found = None
    while frame is not None and found is None:
        code = frame.f_code
        # Names first: all else makes tuples and dictionaries, frame by frame.
        if code.co_name == "unpack_hook":
            # Of PyTorch 2.11 it has a ctx as well, of what saves the inputs.
            region = frame.f_locals.get("frame")
            found = region if isinstance(region, _FRAME) else None
        elif code.co_name in _NAMES:
            context = frame.f_locals.get("ctx")
            if isinstance(context, BackwardCFunction) and code.co_name == "forward":
                regions.append(context)
            elif isinstance(context, BackwardCFunction):
                found = context
        frame = frame.f_back
    return found


def _free_variable(function: Any, name: str) -> Any:
    code = getattr(function, "__code__", None)
    if code is None or name not in code.co_freevars:
        return None
    return function.__closure__[code.co_freevars.index(name)].cell_contents
