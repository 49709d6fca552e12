"""The first call of a function that launches several kernels: they are compiled side by side.

Triton compiles a kernel when it is first launched, one after another, and other threads could run for most of that
time: it is spent in LLVM, in `ptxas`, and in the C compiler that some versions build a launcher with. So `together`
ends a function at the first kernel that is not compiled, walks through it again with launches that compile in threads
and run nothing, and then calls it. Where all kernels are compiled, it is a call. This file does without Triton, so that
a module can ask for it on a machine that has none.
"""

import functools
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

T = TypeVar("T")

THREADS = 16
"""Kernels that are compiled at a time: the last of a function may take the longest, and begins with the others."""


class NotCompiled(Exception):
    """Ends a function of `together`."""


class _Walk(threading.local):
    """The launches of this thread: they raise `NotCompiled` rather than compile, or compile in a pool and run
    nothing."""

    raises = False
    pool: ThreadPoolExecutor | None = None

    def __init__(self) -> None:
        self.submitted: set[Hashable] = set()

    def submit(self, key: Hashable, function: Callable[..., object], *args: Any) -> None:
        """Calls a function in the pool, once for a key."""
        assert self.pool is not None
        if key not in self.submitted:
            self.submitted.add(key)
            self.pool.submit(function, *args)


walk = _Walk()
walking: set[int] = set()
"""Threads whose launches run nothing. A launch looks whether there are any, which costs less than to ask its own."""


def _watched() -> bool:
    """Whether hooks of saved tensors or a dispatch mode count operations."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None or torch._C._len_torch_dispatch_stack() > 0


def together(function: Callable[..., T]) -> Callable[..., T]:
    """`function`, whose kernels are compiled side by side where some are not yet.

    Until they are, it is begun up to three times. So it must change nothing that it is given, and must not look at
    results of kernels, on the host or as an index of PyTorch's own functions. Where somebody sees each step of it, as
    gradient checkpointing does, it is called once, and its kernels are compiled one after another.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> T:
        if torch.compiler.is_compiling() or walk.raises or walk.pool is not None or _watched():
            return function(*args, **kwargs)
        walk.raises = True
        try:
            return function(*args, **kwargs)
        except NotCompiled:
            pass
        finally:
            walk.raises = False
        _compile(function, *args, **kwargs)
        return function(*args, **kwargs)

    return call


def ahead(function: Callable[[Any], object], x: Any) -> bool:
    """Compiles the kernels that `function(x)` launches on a GPU side by side, and runs none. The calls that follow may
    change their arguments, as no function of `together` may. Returns False where it did not: without a GPU, in
    compiled code or a graph, or where somebody sees each step."""
    if not x.is_cuda or torch.compiler.is_compiling() or walk.raises or walk.pool is not None or _watched():
        return False
    if torch.cuda.is_current_stream_capturing():
        return False
    _compile(function, x)
    return True


def _compile(function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    """Calls a function whose launches run nothing and compile in threads, and waits for these."""
    me = threading.get_ident()
    with ThreadPoolExecutor(THREADS) as walk.pool:
        walking.add(me)
        try:
            function(*args, **kwargs)
        finally:
            walking.discard(me)
            walk.pool = None
            walk.submitted.clear()
