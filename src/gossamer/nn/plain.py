"""Layers that are their weight and bias and nothing else, so that one product may read these and call none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, is_grad_enabled, nn
from torch._subclasses import FakeTensor
from torch.compiler import is_dynamo_compiling
from torch.nn.modules import module as _nn
from torch.nn.modules.module import _has_any_global_hook

from gossamer._core import autocast, checks

Found = TypeVar("Found")
KEPT = "_gossamer_parts"
"""The name in a module's dictionary of the answer that `of_parts` keeps."""
_MOST = 256
_GLOBAL_HOOKS = [_nn._global_forward_hooks, _nn._global_forward_pre_hooks]
_GLOBAL_HOOKS += [_nn._global_backward_hooks, _nn._global_backward_pre_hooks]
# torch.export traces with parameters that are FakeTensors; those of a subclass stay of that subclass.
_PLAIN = (Tensor, nn.Parameter, FakeTensor)


def why_called(**layers: nn.Module | None) -> str | None:
    """Why layers, by their names, have to be called and not only read, or None where reading them does the same."""
    if _has_any_global_hook():
        return "a hook listens to all modules"
    for name, layer in layers.items():
        if type(layer) is not nn.Linear:
            # Adapters and quantisers like to call theirs Linear, too.
            kind = type(layer)
            return f"{name} is {kind.__module__}.{kind.__qualname__}, not a plain nn.Linear"
        if hooked(layer):
            return f"{name} has a hook"
        for tensor in weight_and_bias(layer):
            if tensor is not None and (type(tensor) not in _PLAIN or tensor.dtype not in checks.FLOATS):
                return f"{name} has parameters of type {type(tensor).__name__}, {checks.name_of(tensor.dtype)}"
    return None


def of_parts(module: nn.Module, names: tuple[str, ...], find: Callable[[], Found]) -> Found:
    """The result of `find`, which may depend on types, dtypes and hooks of the module's parts with these names, and on
    no value. The module keeps the one result until one of these changes; copies and pickles find anew."""
    if torch.compiler.is_compiling():
        return find()
    kept: _Kept[Found] | None = module.__dict__.get(KEPT)
    if kept is not None and kept.parameters(module) is not None:
        return kept.found
    kept = _Kept(module, names, find())
    # A hook may go without a trace.
    module.__dict__[KEPT] = None if kept.parameters(module) is None else kept
    return kept.found


def forget_parts(module: nn.Module) -> None:
    module.__dict__.pop(KEPT, None)


class _Kept(Generic[Found]):
    """A result, and all that it may depend on: the types of a module's parts, the types and dtypes of their parameters,
    and the argument of a GELU. Nothing that is replaced is kept alive."""

    __slots__ = ("_dense", "_parts", "found")

    def __init__(self, module: nn.Module, names: tuple[str, ...], found: Found) -> None:
        self.found, self._parts = found, []
        self._dense: set[int] = set()
        for name in names:
            part = module._modules.get(name)
            own = {"_parameters": {}} if part is None else part.__dict__
            stored = sorted(own["_parameters"].items(), key=lambda item: item[0] != "weight")
            tensors = [(key, type(x), None if x is None else x.dtype) for key, x in stored]
            self._parts.append((name, type(part), tensors, own.get("approximate")))

    def parameters(self, module: nn.Module) -> list[Tensor | None] | None:
        """Parameters of the parts, one part after the other, each with its weight first; None where one has changed,
        or a hook listens. It takes 2 us: every call of a module asks."""
        if any(_GLOBAL_HOOKS):
            return None
        found: list[Tensor | None] = []
        modules, keep = module._modules, found.append
        for name, kind, tensors, approximate in self._parts:
            part = modules.get(name)
            if type(part) is not kind:
                return None
            if part is None:
                continue
            own = part.__dict__
            if own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own or "weight" in own:
                return None
            if own["_backward_hooks"] or own["_backward_pre_hooks"] or own.get("approximate") != approximate:
                return None
            stored = own["_parameters"]
            if len(stored) != len(tensors):
                return None
            for key, of_type, dtype in tensors:
                tensor = stored.get(key)
                if type(tensor) is not of_type or (tensor is not None and tensor.dtype is not dtype):
                    return None
                keep(tensor)
        return found

    def settle(self, x: Tensor) -> None:
        """Keeps that eager calls with so many elements of x are left to the module's class."""
        if len(self._dense) < _MOST:
            self._dense.add(x.numel())

    def settled(self, x: Any) -> str | None:
        """Returns "dense" for a call that is left to the class: without gradients, neither compiled nor captured; else
        None. The parts may have changed since: an owner that moves calls `forget_parts`."""
        if type(x) is not Tensor or is_grad_enabled() or is_dynamo_compiling() or x.numel() not in self._dense:
            return None
        return None if x.is_cuda and torch._C._cuda_isCurrentStreamCapturing() else "dense"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def weight_and_bias(layer: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """A layer's parameters. Attributes of a module that are parameters are slow to get; replicas of DataParallel have
    them as tensors."""
    stored = layer._parameters
    if "weight" in stored and "bias" in stored:
        return stored["weight"], stored["bias"]  # type: ignore[return-value]
    return layer.weight, layer.bias


def hooked(module: nn.Module) -> bool:
    """Whether a module has hooks or a forward of its own, as accelerate gives one."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def any_hook(*parts: Any) -> bool:
    """Whether a hook listens to one of these modules, or to all modules. Parts that are no modules have none."""
    return bool(_has_any_global_hook()) or any(hooked(part) for part in parts if isinstance(part, nn.Module))


def plain_inference(x: Tensor) -> bool:
    """Whether no gradient, autocast, torch.func transform or tracer sees the operations on x."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or autocast.enabled(x.device):
        return False
    watched = torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None
    return type(x) is Tensor and not watched


FEW_TOKENS = 64


def _merged(weights: list[Tensor]) -> Tensor | None:
    """The weights as one tensor, if they lie behind each other in one piece of memory."""
    first, at = weights[0], weights[0].storage_offset()
    for weight in weights:
        same = weight.untyped_storage()._cdata == first.untyped_storage()._cdata and weight.is_contiguous()
        if not same or weight.storage_offset() != at or weight.dtype is not first.dtype:
            return None
        at += weight.numel()
    return first.as_strided((sum(map(len, weights)), first.shape[1]), first.stride())


def products(x: Tensor, layers: dict[str, nn.Linear]) -> Tensor:
    """The layers' results of x, side by side; by one product where they are plain and their weights are merged, or
    tokens are more than a few, for which putting weights side by side would cost more than the products."""
    plain = why_called(**layers) is None
    merged = _merged([layer.weight for layer in layers.values()]) if plain and plain_inference(x) else None
    if not plain or (merged is None and x.shape[:-1].numel() <= FEW_TOKENS):
        return torch.cat([layer(x) for layer in layers.values()], -1)
    width = sum(layer.out_features for layer in layers.values())
    biases: list[Tensor | None] = [layer.bias for layer in layers.values()]
    weights: list[Tensor] = [layer.weight for layer in layers.values()]
    if merged is None and (over := -width % 8):
        # The fast kernels of 16-bit products want rows of 16 bytes.
        weights.append(weights[0].new_zeros(over, weights[0].shape[1]))
        biases.append(None)
    bias = None
    if any(each is not None for each in biases):
        zeros = weights[0].new_zeros(max(map(len, weights)))
        bias = torch.cat([zeros[: len(weight)] if b is None else b for b, weight in zip(biases, weights)])
    out = nn.functional.linear(x, torch.cat(weights) if merged is None else merged, bias)
    return out if out.shape[-1] == width else out[..., :width]
