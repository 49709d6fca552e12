"""Registration of operators with PyTorch's dispatcher.

Every operator is one `torch.library` schema with an implementation per device, so that eager code, `torch.compile`,
CUDA graphs, autocast and `opcheck` all meet the same thing. `define` and `impl` are used instead of `custom_op` because
they cost about half as much host time a call, which is what bounds a small operator.
"""

import functools
import importlib
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
_implementations: dict[Any, dict[str, Callable[..., Any]]] = {}
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))
# Looked up once: these are asked in every call.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_tracing_state = torch._C._get_tracing_state
_profiler_enabled = torch.autograd._profiler_enabled


def _lazily(path: str) -> Callable[..., Any]:
    """`"package.module:function"` as a callable that imports on first use: a CPU-only install never imports Triton."""
    target: Callable[..., Any] | None = None

    def call(*args: Any) -> Any:
        nonlocal target
        if target is None:
            module, name = path.split(":")
            target = getattr(importlib.import_module(module), name)
        return target(*args)

    return call


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """A CPU implementation's own products are no business of the caller's autocast: the public function has cast."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if not torch.is_autocast_enabled("cpu"):
            return function(*args)
        with torch.autocast("cpu", enabled=False):
            return function(*args)

    return call


def refuse_second(function: str) -> None:
    """Raises in a backward pass that is to be differentiated; `function` is the public name."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        _refuse(function)


def _refuse(function: str, *_: Any, **__: Any) -> None:
    raise NotImplementedError(f"{function}: second derivatives are not implemented. Use create_graph=False.")


def _unreached(ctx: Any, *grads: Any) -> None:
    """The backward of an operator whose `_refuse` raises first."""


def register(
    schema: str,
    *,
    cpu: Callable[..., Any],
    gpu: str,
    fake: Callable[..., Any],
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    once_differentiable: str | None = None,
) -> Any:
    """Registers `schema` ("name(Tensor x, ...) -> Tensor") and returns the operator's overload, ready to call.

    `cpu` is the PyTorch implementation; `gpu` names the Triton launcher as "module:function"; `fake` gives shapes
    and dtypes; `backward` and `setup_context` are as in `torch.library.register_autograd`. An operator that is a step
    of a backward pass names its public function in `once_differentiable`, and then refuses to be differentiated.
    """
    if once_differentiable is not None:
        setup_context, backward = functools.partial(_refuse, once_differentiable), _unreached
    name = schema.split("(", 1)[0]
    qualified = f"{NAMESPACE}::{name}"
    launcher = _lazily(gpu)
    _library.define(schema)
    by_device = {"cpu": _without_autocast(launcher if INTERPRET else cpu), "cuda": launcher}
    for device, implementation in by_device.items():
        _library.impl(name, implementation, device.upper())
    torch.library.register_fake(qualified, fake, lib=_library)
    if backward is not None:
        torch.library.register_autograd(qualified, backward, setup_context=setup_context, lib=_library)
    operator = getattr(getattr(torch.ops, NAMESPACE), name).default
    _implementations[operator] = by_device
    return operator


def shortcut(operator: Any, device: torch.device) -> Callable[..., Any]:
    """What to call for plain tensors of `device` where gradients and autocast are off.

    That is the operator's own implementation if nobody listens to PyTorch's dispatcher (a mode, a transform, a tracer,
    a profiler), else the operator. The dispatcher takes some 3 of the 20 us of a small operator.
    """
    watched = (
        torch.compiler.is_compiling()
        or _dispatch_modes()
        or _transforms() is not None
        or _tracing_state() is not None
        or _profiler_enabled()
    )
    return operator if watched else _implementations[operator].get(device.type, operator)


def needs_gradient(*operands: Any) -> bool:
    """Whether what is made of these is to be differentiable; None needs none."""
    return torch.is_grad_enabled() and any(operand is not None and operand.requires_grad for operand in operands)


def undispatched(operator: Any, *tensors: torch.Tensor | None) -> Callable[..., Any]:
    """`shortcut` where gradients are off, as in most backward passes; the operator itself where they are on."""
    if torch.is_grad_enabled() or not _PLAIN.issuperset(map(type, tensors)):
        return operator
    return shortcut(operator, next(t.device for t in tensors if t is not None))
