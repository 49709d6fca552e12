"""The transposed copy of a weight that a module keeps."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from gossamer._core import checks
from gossamer._core.versions import version_of
from gossamer.rowsparse.dense_transpose import dense_transpose


class Transposed:
    """weight.t() with contiguous rows, made when it is first asked for, and again when the weight has changed.

    A change is what PyTorch counts: operations in place, other memory, another tensor; and the steps of its fused
    optimizers, which are counted here. What is written through `weight.data` or `weight.numpy()`, or by another
    library's kernel, is not counted: `torch.autograd.graph.increment_version(weight)` does it by hand. Nothing is kept
    of a weight without a count (an inference tensor), under `torch.compile`, and in a CUDA graph, which could not
    notice a change: then the answer is None. A weight that is stored column by column is its own transpose, and nothing
    is copied.

    Attributes:
        nbytes: how much memory the copy takes.

    >>> Transposed()(torch.ones(2, 3)).shape
    torch.Size([3, 2])
    """

    def __init__(self) -> None:
        self._of: weakref.ref[Tensor] | None = None
        self._version: tuple[int, int] | None = None
        self._copy: Tensor | None = None
        self._made: tuple[int, torch.cuda.Event] | None = None

    def __call__(self, weight: Tensor) -> Tensor | None:
        if weight.stride(0) == 1:
            turned = weight.t()
            if turned.is_contiguous():
                self._copy = None
                return turned
        if torch.compiler.is_compiling() or weight.is_inference() or checks.capturing():
            return None
        if not self._follows(weight):
            self._copy = None
            if _transient(weight):
                return None
            with torch.no_grad():
                self._copy = dense_transpose(weight)
            self._of, self._version = weakref.ref(weight), (weight.data_ptr(), version_of(weight))
            self._made = None
            if weight.is_cuda:
                stream = torch.cuda.current_stream(weight.device)
                self._made = stream.cuda_stream, stream.record_event()
        return self._ready()

    def held(self, weight: Tensor) -> Tensor | None:
        """The copy if one has been made and the weight has not changed since; none is made, or renewed."""
        # Asked first: what is compiled shall not be compiled anew when a copy comes or goes.
        if torch.compiler.is_compiling() or self._copy is None or weight.is_inference() or checks.capturing():
            return None
        return self._ready() if self._follows(weight) else None

    def _ready(self) -> Tensor | None:
        """The copy, for the current stream: another may have made it, and may still be about to."""
        copy, made = self._copy, self._made
        if copy is None or made is None:
            return copy
        index = copy.get_device()
        if torch._C._cuda_getCurrentRawStream(index) != made[0]:
            here = torch.cuda.current_stream(index)
            here.wait_event(made[1])
            # Its memory is not given to others before this stream has read it.
            copy.record_stream(here)
        return copy

    def _follows(self, weight: Tensor) -> bool:
        if self._copy is None or self._of is None or self._of() is not weight:
            return False
        return self._version == (weight.data_ptr(), version_of(weight))

    @property
    def nbytes(self) -> int:
        return 0 if self._copy is None else self._copy.nbytes

    def __deepcopy__(self, memo: dict[int, Any]) -> Transposed:
        return Transposed()

    def __reduce__(self) -> tuple[Any, ...]:
        return Transposed, ()


def _transient(weight: Tensor) -> bool:
    if not weight.is_cuda:
        return False
    from gossamer._core.launch import in_graph_pool

    return in_graph_pool(weight.device)
