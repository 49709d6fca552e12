"""Named ranges around steps, for profilers: PyTorch's where it runs, else NVTX for NVIDIA's.

A range is for several steps of a module or launcher; an operator's own name shows without one.
"""

import os
from contextlib import nullcontext
from typing import Any

import torch

_NOTHING = nullcontext()
NVIDIA_LOOKS = any(name.startswith(("NVTX_INJECTION", "NSYS_", "NV_NSIGHT_")) for name in os.environ)
"""Whether a tool that reads NVTX has started the program: Nsight Systems and Compute set such variables before, and
without them NVTX does nothing. A range that nobody sees still takes some microseconds of the host."""


class _Nvtx:
    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        torch.cuda.nvtx.range_push(self._name)

    def __exit__(self, *_: object) -> None:
        torch.cuda.nvtx.range_pop()


def watched() -> bool:
    """Whether somebody could look at a range."""
    return NVIDIA_LOOKS or torch.autograd._profiler_enabled()


def span(name: str) -> Any:
    """A context whose time profilers show under `name`; nothing in a compiled graph, and where nobody could look."""
    if torch.compiler.is_compiling():
        return _NOTHING
    if torch.autograd._profiler_enabled():
        # PyTorch's profiler hands its ranges to NVTX itself under torch.autograd.profiler.emit_nvtx.
        return torch.profiler.record_function(name)
    return _Nvtx(name) if NVIDIA_LOOKS and torch.cuda.is_initialized() else _NOTHING
