"""Values that a first run under gradient checkpointing used, kept for the run that computes it again.

A module whose state moves from call to call (counts, steering, densities) has to compute again with
the state of the first run, however many calls came between. `torch.utils.checkpoint(use_reentrant=False)` has one frame
for both runs, which its hooks hold. Values lie on that frame in the order of the calls, and are freed with it. Other
recomputations (a reentrant checkpoint, a checkpoint within one that runs again, an `autograd.Function`) have no such
frame: the first run is lost.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils import checkpoint

Value = TypeVar("Value")
_FRAME: Any = checkpoint._CheckpointFrame
_top_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks


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
    """make(), or in a recomputation the value of the first run.

    Args:
        owner: the asking module; each asks in the same order in both runs.
        make: gives the value of a first run, and of every call outside of a checkpoint.
        lost: gives the value of a recomputation whose first run was not seen.
        keep: from a value to a copy that may be kept, where it would change.
    """
    if torch.compiler.is_compiling():
        return make()
    again, hooks = recomputed(), _top_hooks(True)
    if hooks is None:
        return lost() if again else make()
    target = _free_variable(hooks[0], "target_frame_ref")
    if target is not None:
        memory: _Memory | None = getattr(target(), "_gossamer", None)
        return lost() if memory is None else memory.next(owner, lost)
    value, region = lost() if again else make(), _free_variable(hooks[0], "frame")
    if isinstance(region, _FRAME):
        if not hasattr(region, "_gossamer"):
            region._gossamer = _Memory()
        region._gossamer.add(owner, keep(value))
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


def _free_variable(function: Any, name: str) -> Any:
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if code is None or name not in code.co_freevars:
        return None
    return function.__closure__[code.co_freevars.index(name)].cell_contents
