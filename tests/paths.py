"""For tests of the choice of a path: tables of the docs, matrices that are nowhere, and what a profiler shows."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

DOCS = Path(__file__).parents[1] / "docs"


def calls_of(page: str, heading: str, cells: int) -> list[list[str]]:
    """Rows of the table with that many cells under a heading, without its head."""
    section = (DOCS / page).read_text().partition(f"{heading}\n")[2].partition("\n## ")[0]
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in section.splitlines() if "| `" in line]
    return [row for row in rows if len(row) == cells]


def number(cell: str) -> int:
    return int(cell.replace(",", ""))


def matrix(*shape: int, dtype: torch.dtype = torch.bfloat16, kind: str = "cuda") -> Any:
    """What is asked of a matrix that lies row by row, on a GPU that nobody has, or on the CPU."""
    strides = (shape[-1], 1)
    return SimpleNamespace(
        shape=shape,
        dtype=dtype,
        device=torch.device(kind, 99) if kind == "cuda" else torch.device(kind),
        is_cuda=kind == "cuda",
        dim=lambda: len(shape),
        element_size=lambda: dtype.itemsize,
        stride=lambda dim=None: strides if dim is None else strides[dim],
        data_ptr=lambda: 0,
        numel=lambda: shape[0] * shape[1],
        t=lambda: None,
    )


def matrix_on(device: str, *shape: int) -> Any:
    """On a device that the docs name, such as "CUDA, Hopper, float32"."""
    dtype = torch.float32 if "float32" in device else torch.bfloat16
    return matrix(*shape, dtype=dtype, kind=device.partition(",")[0].lower())


def ranges_of(prefix: str, call: Callable[[], Any]) -> set[str]:
    """The ranges with this prefix that a profiler shows, without it."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        call()
    return {event.key.removeprefix(prefix) for event in seen.key_averages() if event.key.startswith(prefix)}
