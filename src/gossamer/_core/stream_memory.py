"""Device memory that the launches of one stream share, since they never overlap: it is allocated once and not cleared.

A buffer belongs to a stream, because no stream waits for another. A CUDA graph gets memory of its own, from its pool. A
recorder (see `replay`) asks for all of it anew in each repetition.
"""

import itertools
import sys
import threading
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

recorders: dict[int, Any] = {}
"""The `replay.Recorder` of each thread that has one."""


def recorder() -> Any:
    """That of this thread, or None."""
    return recorders.get(threading.get_ident()) if recorders else None


def shared_stream(device: torch.device) -> int | None:
    """The stream whose launches share memory; None where memory that is allocated now may not outlive the call, because
    it comes from the pool of a CUDA graph: during capture, and in the eager run with which Inductor warms up for its
    own graphs."""
    index: int | None = device.index
    if index is None:  # the CPU, of the interpreter
        return None
    if index != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            return shared_stream(device)
    if torch._C._cuda_isCurrentStreamCapturing():
        return None
    stream: int = torch._C._cuda_getCurrentRawStream(index)
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return stream
    try:
        manager = trees.get_manager(index, create_if_none_exists=False)
    except AssertionError:  # a thread that Inductor has never seen
        return stream
    return None if manager is not None and manager.stream == torch.cuda.current_stream() else stream


class Shared:
    """One buffer a stream, as large as the largest need so far: zeros when it is made, or with anything in it."""

    def __init__(self, dtype: torch.dtype, zeroed: bool = True) -> None:
        self._dtype, self._zeroed = dtype, zeroed
        self._buffers: dict[tuple[torch.device, int], Tensor] = {}

    def get(self, words: int, device: torch.device) -> Tensor:
        """A buffer of at least `words`, for the launches of a call."""
        recording = recorder()
        if recording is None:
            return self.of_stream(shared_stream(device), words, device)
        with _disable_current_modes():
            buffer = alone(self.of_stream(shared_stream(device), words, device))
        recording.keep(buffer, self.of_stream, words, device)
        return buffer

    def of_stream(self, stream: int | None, words: int, device: torch.device) -> Tensor:
        """The buffer for a `shared_stream`."""
        if stream is None:
            return self._new(words, device)
        buffer = self._buffers.get((device, stream))
        if buffer is None or buffer.numel() < words:
            # Twice as much as before, so that a growing batch does not allocate at every step.
            size = max(words, 4096, 0 if buffer is None else 2 * buffer.numel())
            buffer = self._buffers[device, stream] = self._new(size, device)
        return buffer

    def _new(self, words: int, device: torch.device) -> Tensor:
        return (torch.zeros if self._zeroed else torch.empty)(words, dtype=self._dtype, device=device)


class Epoch(int):
    """The epoch of a launch that is recorded: another one in each repetition."""


_count = itertools.count()


def next_epoch() -> int:
    """1, 2, ... 2^31 - 2, and again; one step of C code counts, so threads cannot collide. To mistake an epoch for its
    successor of the same number, a word would have to be left alone for 2^31 launches and be looked at in the very
    next."""
    return next(_count) % ((1 << 31) - 2) + 1


def flags(words: int, device: torch.device) -> tuple[Tensor, int]:
    """(int64 buffer of at least `words`, epoch of a launch): words through which its programs signal each other.

    A program signals by writing the epoch. A word that holds another epoch is not yet set, so nothing has to be cleared
    between calls. A graph freezes the epoch, and zeroes its buffer in each replay.
    """
    return _flags.get(words, device), next_epoch() if recorder() is None else Epoch(next_epoch())


class Counters(Shared):
    """Words that are 0 between launches, because every launch that writes them leaves them at 0. A later launch cannot
    clear them: a call may end between two launches, as `together` ends calls, or by an error.

    A launch of a graph gets words of its own that were zeroed ahead, by a call outside of graphs on any stream: a
    capture begins after the device has finished, as `torch.cuda.graph` sees to, and by `CUDAGraph.capture_begin` the
    caller has to.
    """

    _AHEAD, _WORDS = 128, 1024
    """Launches in graphs to have words for, and how many of them each gets."""

    def __init__(self) -> None:
        super().__init__(torch.int32)
        self._ahead: dict[torch.device, list[Tensor]] = {}
        self._blocks: list[Tensor] = []

    def of_stream(self, stream: int | None, words: int, device: torch.device) -> Tensor:
        ahead = self._ahead.setdefault(device, [])
        if stream is not None:
            if len(ahead) < self._AHEAD:
                block = torch.zeros(self._AHEAD, self._WORDS, dtype=torch.int32, device=device)
                ahead += block.unbind()
                # Kept for good: no callback tells when a graph is freed.
                self._blocks.append(block)
        # Not in the eager run with which Inductor warms up, for those words would be gone for good.
        elif ahead and words <= self._WORDS and torch._C._cuda_isCurrentStreamCapturing():
            with suppress(IndexError):  # another thread took the last
                return ahead.pop()
        return super().of_stream(stream, words, device)


class Zeros(Shared):
    """Words that no kernel writes. A graph takes those of any stream, under the condition of `Counters`."""

    def __init__(self) -> None:
        super().__init__(torch.int32)
        self._by_words: dict[tuple[torch.device, int, int | None], Tensor] = {}

    def of_stream(self, stream: int | None, words: int, device: torch.device) -> Tensor:
        found = self._by_words.get((device, words, stream))
        # Memory of a graph is zeroed whenever the graph is replayed. Zeros of a call before it spare that step.
        if found is not None and (stream is not None or torch._C._cuda_isCurrentStreamCapturing()):
            return found
        made = self._new(words, device)
        if stream is not None:
            self._by_words[device, words, stream] = made
            self._by_words.setdefault((device, words, None), made)
        return made


def alone(x: Tensor) -> Tensor:
    """The tensor with a storage of its own over the same memory, so that operands that are views of one tensor, or one
    tensor twice, can be told apart."""
    same: Tensor = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x.detach()))
    # DLPack gives dimensions of 1 a stride of its own.
    return same.as_strided(x.shape, x.stride())


_flags = Shared(torch.int64)
scratch = Shared(torch.float32, zeroed=False)
counters = Counters()
zeros = Zeros()
