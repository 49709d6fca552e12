"""Registration of operators with PyTorch's dispatcher.

Every operator is one `torch.library` schema with an implementation per device, so that eager code, `torch.compile`,
CUDA graphs, autocast and `opcheck` all see the same operator. This file uses `define` and `impl` instead of
`custom_op`, because they take about half the host time a call, and host time bounds a small operator. Gradients have a
kernel of our own under the dispatch key of `torch.library.register_autograd`. PyTorch's kernel walks the schema in
every call and takes time with the square of the number of arguments: 100 us for 19 of them.
"""

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

import torch

from gossamer._core.ranges import NVIDIA_LOOKS, span, watched

NAMESPACE = "gossamer"

INTERPRET = os.environ.get("GOSSAMER_INTERPRET", "0") == "1"
"""Run the Triton kernels in Triton's interpreter on CPU tensors. A switch for tests, read once at import."""

if INTERPRET:
    # Triton reads this when a kernel is decorated, so it has to be set before any kernel module is imported.
    os.environ["TRITON_INTERPRET"] = "1"

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
# Of an operator, by device: the implementation where gradients are off, and the one where they are on.
_ways: dict[Any, tuple[dict[str, Callable[..., Any]], dict[str, Callable[..., Any]]]] = {}
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))
# Looked up once: every call asks these functions.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_tracing_state = torch._C._get_tracing_state
_profiler_enabled = torch.autograd._profiler_enabled
_any_requires_grad = torch._C._any_requires_grad
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_is_batched = torch._C._functorch.is_legacy_batchedtensor
_inference = torch.is_inference_mode_enabled


def _lazily(find: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """The function that `find` imports at the first call: a CPU-only install never imports Triton."""
    target: Callable[..., Any] | None = None

    def call(*args: Any) -> Any:
        nonlocal target
        if target is None:
            target = find()
        return target(*args)

    return call


def _in_range(run: Callable[..., Any], path: Callable[..., str]) -> Callable[..., Any]:
    """`run`, under a profiler inside a range; `path` makes the range's name from the arguments."""

    def call(*args: Any) -> Any:
        if not watched():
            return run(*args)
        with span(f"gossamer::{path(*args)}"):
            return run(*args)

    return call


def _namesake(cpu: Callable[..., Any]) -> Any:
    return getattr(importlib.import_module(cpu.__module__.replace("._torch.", "._triton.")), cpu.__name__)


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` without the caller's autocast on the CPU: the public function has cast its operands already."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if not torch.is_autocast_enabled("cpu"):
            return function(*args)
        with torch.autocast("cpu", enabled=False):
            return function(*args)

    return call


def _contiguous(run: Callable[..., Any], schema: Any, strided: tuple[str, ...]) -> Callable[..., Any]:
    """`run`, a launcher, with every tensor contiguous except the arguments in `strided` and the tensors it writes."""
    arguments = schema.arguments
    unknown = set(strided) - {argument.name for argument in arguments}
    assert not unknown, f"{schema.name} has no argument {', '.join(sorted(unknown))}"
    places = [
        place
        for place, argument in enumerate(arguments)
        if "Tensor" in str(argument.type) and argument.name not in strided and argument.alias_info is None
    ]
    assert not any("List" in str(arguments[place].type) for place in places), f"{schema.name} takes a list of tensors"
    # The dispatcher leaves out trailing arguments that equal their defaults.
    defaults = tuple(argument.default_value for argument in arguments)

    def call(*args: Any) -> Any:
        if len(args) < len(defaults):
            args += defaults[len(args) :]
        for place in places:
            tensor = args[place]
            if tensor is not None and not tensor.is_contiguous():
                args = (*args[:place], tensor.contiguous(), *args[place + 1 :])
        return run(*args)

    return call


def refuse_second(function: str, instead: str = "Use create_graph=False.") -> None:
    """Raises in a backward pass that is to be differentiated; `function` is the public name."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        _refuse(function, instead=instead)


def _refuse(function: str, *_: Any, instead: str = "Use create_graph=False.") -> None:
    raise NotImplementedError(f"{function}: second derivatives are not implemented. {instead}")


def save_inputs(ctx: Any, inputs: Any, output: Any) -> None:
    """`setup_context` of an operator whose arguments are tensors, all of which its backward reads."""
    ctx.save_for_backward(*inputs)


def _unreached(ctx: Any, *grads: Any) -> None:
    """The backward of an operator whose `_refuse` raises first."""


def register(
    schema: str,
    *,
    cpu: Callable[..., Any],
    gpu: Callable[[], Callable[..., Any]] | None = None,
    fake: Callable[..., Any],
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    once_differentiable: str | None = None,
    path: Callable[..., str] | None = None,
    strided: tuple[str, ...] = (),
) -> Any:
    """Registers `schema` ("name(Tensor x, ...) -> Tensor") and returns the operator's overload, ready to call.

    `cpu` is the PyTorch implementation, in a room's `_torch`. `gpu` imports the Triton launcher and returns it; without
    `gpu` the launcher is the function of the same name in the file of the same name in `_triton`. `fake` gives shapes
    and dtypes. `backward` and `setup_context` are as in `torch.library.register_autograd`, called by position. An
    operator that is a step of a backward pass names its public function in `once_differentiable`, and then refuses to
    be differentiated. `path` makes the name of the launcher's path from the operator's arguments. A profiler shows the
    name as a range, "room.function/path"; without a profiler nothing calls `path`. `strided` names the tensors that the
    launcher takes with any strides; all other tensors are made contiguous.
    """
    if once_differentiable is not None:
        setup_context, backward = functools.partial(_refuse, once_differentiable), _unreached
    name = schema.split("(", 1)[0]
    qualified = f"{NAMESPACE}::{name}"
    _library.define(schema)
    operator = getattr(getattr(torch.ops, NAMESPACE), name).default
    launches = _lazily(gpu or functools.partial(_namesake, cpu))
    # Calls under a profiler go through the dispatcher, so calls that go past it need not ask for a profiler.
    direct = _contiguous(launches, operator._schema, strided)
    launcher = direct if path is None else _contiguous(_in_range(launches, path), operator._schema, strided)
    for device, run in (("CPU", _without_autocast(launcher if INTERPRET else cpu)), ("CUDA", launcher)):
        _library.impl(name, run, device)
    shown = launcher if NVIDIA_LOOKS else direct
    by_device = {"cpu": _without_autocast(shown if INTERPRET else cpu), "cuda": shown}
    torch.library.register_fake(qualified, fake, lib=_library)
    if backward is None:
        _ways[operator] = by_device, {device: _direct(operator, run) for device, run in by_device.items()}
        return operator
    function = functools.partial(_function, name, setup_context, backward)
    _library.impl(name, _dispatched(operator, function), "Autograd", with_keyset=True)
    differentiable = {}
    for device, run in by_device.items():
        # Without transforms of torch.func, no call needs the work that `Function.apply` does for them.
        apply = super(torch.autograd.Function, function(run)).apply
        differentiable[device] = _direct(apply, run)
    _ways[operator] = by_device, differentiable
    return operator


def _function(name: str, setup_context: Any, backward: Callable[..., Any], run: Callable[..., Any]) -> Any:
    """The `autograd.Function` of `run` and its gradient."""

    def forward(ctx: Any, *args: Any) -> Any:
        out = run(*args)
        if setup_context is not None:
            setup_context(ctx, args, out)
        return out

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), methods)


def _dispatched(operator: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """The operator's kernel under the dispatcher's key for gradients."""
    # The dispatcher leaves out trailing arguments that equal their defaults.
    defaults = tuple(argument.default_value for argument in operator._schema.arguments)

    @functools.cache  # few: keys come from the kinds of a call's tensors, and from the active modes
    def ways(keys: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
        below = torch._C.DispatchKeySet.from_raw_repr(keys) & torch._C._after_autograd_keyset

        def run(*args: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return operator.redispatch(below, *args)

        return run, function(run).apply

    def call(keyset: Any, *args: Any) -> Any:
        args += defaults[len(args) :]
        run, apply = ways(keyset.raw_repr())
        return apply(*args) if torch.is_grad_enabled() and _any_requires_grad(*args) else run(*args)

    return call


def _direct(apply: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, and `apply` in its place where an argument requires a gradient."""

    def call(*args: Any) -> Any:
        return apply(*args) if _any_requires_grad(*args) else run(*args)

    return call


def listened() -> Any:
    """Whether a mode, a transform, a tracer or a profiler listens to PyTorch's dispatcher."""
    return _dispatch_modes() or _transforms() is not None or _tracing_state() is not None or _profiler_enabled()


def shortcut(operator: Any, device: torch.device) -> Callable[..., Any]:
    """The function to call for plain tensors of `device` where autocast is off.

    If no mode, transform, tracer or profiler needs PyTorch's dispatcher, the function is the operator's own
    implementation, with its gradient where gradients are on; else it is the operator. The dispatcher takes some 3 of
    the 20 us of a small operator, and more of an operator with a gradient.
    """
    watched = torch.compiler.is_compiling() or listened()
    # Inference mode records no gradients, also inside `torch.enable_grad`.
    recorded = torch.is_grad_enabled() and not _inference()
    return operator if watched else _ways[operator][recorded].get(device.type, operator)


def needs_gradient(*operands: Any) -> bool:
    """Whether a result of these operands has to be differentiable; None as an operand needs no gradient."""
    return torch.is_grad_enabled() and any(operand is not None and operand.requires_grad for operand in operands)


def undispatched(operator: Any, *tensors: torch.Tensor | None) -> Callable[..., Any]:
    """`shortcut` where the tensors are plain, else the operator itself."""
    if torch.compiler.is_compiling() or not _PLAIN.issuperset(map(type, tensors)):
        return operator
    differentiable, device = torch.is_grad_enabled(), None
    for tensor in tensors:
        if tensor is not None:
            # A tensor that has outlived a transform of torch.func looks plain, and the dispatcher unwraps it. A batch
            # of gradients looks plain too, and the dispatcher takes it apart.
            if _is_batched(tensor) or (differentiable and _is_wrapped(tensor)):
                return operator
            device = tensor.device
    assert device is not None
    return shortcut(operator, device)
