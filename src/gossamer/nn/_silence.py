"""An upper bound, known to the host without waiting for the device, of how long latents have been silent."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor


class Silence:
    """Counts how long each latent has been silent, and keeps an upper bound of the longest.

    The counts grow by 1 a step at most. So a maximum that arrives from the device some steps late, plus these steps, is
    a bound, and while the bound is small enough no latent can be dead. Any other change of the counts makes the host
    drop its bound: the tensor's version shows the change, or the counts are another tensor.
    """

    def __init__(self) -> None:
        self._bound: int | None = None
        self._counts: tuple[weakref.ref[Tensor], int] | None = None
        self._copy: tuple[Tensor, Any, int] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Silence:
        return Silence()

    def __reduce__(self) -> tuple[type[Silence], tuple[()]]:
        return Silence, ()

    def update_(self, steps: Tensor, fired: Tensor) -> None:
        """steps + 1 where `fired` is 0, else 0, in place."""
        blind = _is_recorded(steps)
        follows = not blind and self._is_about(steps)
        steps.add_(1).mul_(fired == 0)
        if torch.compiler.is_compiling():
            return
        self._bound = self._bound + 1 if follows and self._bound is not None else None
        self._copy = self._copy if follows else None
        # A fake or a meta tensor has no numbers to ask for.
        unknown = blind or type(steps) is not Tensor or steps.is_meta or steps.is_inference()
        self._counts = None if unknown else (weakref.ref(steps), steps._version)
        if unknown:
            return
        if steps.is_cuda:
            self._ask(steps)
        else:
            self._bound = int(steps.max())

    def below(self, steps: Tensor, limit: int) -> bool:
        """Whether all counts are known to be below `limit`."""
        return not _is_recorded(steps) and self._is_about(steps) and self._bound is not None and self._bound < limit

    def _is_about(self, steps: Tensor) -> bool:
        return self._counts is not None and self._counts[0]() is steps and self._counts[1] == steps._version

    def _ask(self, steps: Tensor) -> None:
        """Takes the maximum that has arrived, and starts the next copy; one copy at a time is on its way."""
        if self._copy is not None:
            value, event, age = self._copy
            if not event.query():
                self._copy = (value, event, age + 1)
                return
            late = int(value) + age + 1
            self._bound = late if self._bound is None else min(self._bound, late)
        else:
            value, event = torch.empty((), dtype=torch.int64, pin_memory=True), torch.cuda.Event()
        value.copy_(steps.max(), non_blocking=True)
        event.record()
        self._copy = (value, event, 0)


def _is_recorded(steps: Tensor) -> bool:
    """Whether the running code will run again without Python: in a compiled region, or in a graph, whose replays leave
    the version as it is."""
    return torch.compiler.is_compiling() or (steps.is_cuda and torch.cuda.is_current_stream_capturing())
