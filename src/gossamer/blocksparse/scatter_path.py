"""How `blocksparse.scatter` and `scatter_reduce` go about it on a GPU, chosen by what the host knows."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Literal

import torch

from gossamer._core import tuning
from gossamer._core.ops import INTERPRET
from gossamer._core.ranges import span

Path = Literal["shared", "lines", "matrices"]
LONGEST = 16384
"""Columns of a row at most whose result stands in shared memory: three rows share a multiprocessor then."""


def choose_path(
    axis: int, columns: int, reduce: str, src: torch.dtype | None, out: torch.dtype, device: torch.device
) -> Path:
    """How the GPU goes about it.

    "matrices" walks matrices that follow each other (axis 0), "lines" rows or columns (2 or 1), whose results it keeps
    in global memory. "shared" does so for rows of floats on Hopper, and keeps them in shared memory; there entries of a
    row are not joined one after the other, so that it cannot tell which is the last.
    """
    if axis == 0:
        return "matrices"
    floats = src is not None and src.is_floating_point and out.is_floating_point
    fits = axis == 2 and 0 < columns <= LONGEST and reduce != "last"
    return "shared" if floats and fits and not INTERPRET and tuning.hopper(device) else "lines"


def named(path: str) -> AbstractContextManager[Any]:
    """A profiler's range that names the path."""
    return span(f"gossamer::blocksparse.scatter_reduce/{path}")
