"""Named ranges around steps, for profilers: PyTorch's where it runs, else NVTX for NVIDIA's.

A range is for what a module or launcher does in several steps; an operator's own name shows without one.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import TracebackType
from typing import Any

import torch

_NOTHING = nullcontext()


class _Range:
    __slots__ = ("_name", "_record")

    def __init__(self, name: str) -> None:
        self._name = name
        self._record: Any = None

    def __enter__(self) -> None:
        # PyTorch's profiler hands its ranges to NVTX itself under torch.autograd.profiler.emit_nvtx.
        if torch.autograd._profiler_enabled():
            self._record = torch.profiler.record_function(self._name)
            self._record.__enter__()
        else:
            torch.cuda.nvtx.range_push(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._record is not None:
            self._record.__exit__(kind, error, trace)
        else:
            torch.cuda.nvtx.range_pop()


def span(name: str) -> Any:
    """A context whose time profilers show under `name`; nothing in a compiled graph, and where nobody could look."""
    if torch.compiler.is_compiling() or not (torch.autograd._profiler_enabled() or torch.cuda.is_initialized()):
        return _NOTHING
    return _Range(name)
