"""PyTorch's dispatcher, as far as `operator` needs it: the library, and the facts about a call that it asks for.

Operators use `define` and `impl` instead of `custom_op`, because they take about half the host time a call, and host
time bounds a small operator. Gradients have a kernel of our own under the dispatch key of
`torch.library.register_autograd`. PyTorch's kernel walks the schema in every call and takes time with the square of the
number of arguments: 100 us for 19 of them.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "gossamer"

INTERPRET = os.environ.get("GOSSAMER_INTERPRET", "0") == "1"
"""Run the Triton kernels in Triton's interpreter on CPU tensors. A switch for tests, read once at import."""

if INTERPRET:
    # Triton reads this when a kernel is decorated, so it has to be set before any kernel module is imported.
    os.environ["TRITON_INTERPRET"] = "1"

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))
# Looked up once: every call asks these functions.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_tracing_state = torch._C._get_tracing_state
profiler_enabled = torch.autograd._profiler_enabled
_any_requires_grad = torch._C._any_requires_grad
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_is_batched = torch._C._functorch.is_legacy_batchedtensor
_graph_task = torch._C._current_graph_task_id
_inference = torch.is_inference_mode_enabled


def refuse_second(function: str, instead: str = "Use create_graph=False.") -> None:
    """Raises in a backward pass that is to be differentiated; `function` is the public name."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        _refuse(function, instead=instead)


def _refuse(function: str, *_: Any, instead: str = "Use create_graph=False.") -> None:
    raise NotImplementedError(f"{function}: second derivatives are not implemented. {instead}")


def _dispatched(operator: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """The operator's kernel under the dispatcher's key for gradients."""

    @functools.cache  # few: keys come from the kinds of a call's tensors, and from the active modes
    def kernels(keys: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
        below = torch._C.DispatchKeySet.from_raw_repr(keys) & torch._C._after_autograd_keyset

        def run(*args: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return operator.redispatch(below, *args)

        return run, function(run).apply

    def call(keyset: Any, *args: Any) -> Any:
        run, apply = kernels(keyset.raw_repr())
        return apply(*args) if torch.is_grad_enabled() and _any_requires_grad(*args) else run(*args)

    return call


def listened() -> Any:
    """Whether a mode, a transform, a tracer or a profiler listens to PyTorch's dispatcher."""
    return _dispatch_modes() or _transforms() is not None or _tracing_state() is not None or profiler_enabled()


def needs_gradient(*operands: Any) -> bool:
    """Whether a result of these operands has to be differentiable; None as an operand needs no gradient."""
    return torch.is_grad_enabled() and any(operand is not None and operand.requires_grad for operand in operands)


def returned(tensor: torch.Tensor) -> torch.Tensor:
    """The result of an `autograd.Function`; in a compiled Function, a copy of it.

    PyTorch 2.11 compiles a Function without its gradient, and says nothing, where a call within the Function returned
    the very tensor that is the result, as `.to`, `.contiguous` and `all_reduce` do.
    """
    return tensor.clone() if torch.compiler.is_compiling() else tensor
