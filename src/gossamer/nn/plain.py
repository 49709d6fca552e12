"""Layers that are their weight and bias and nothing else, so that a fused product may read these and call none."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.modules.module import _has_any_global_hook

from gossamer._core import autocast, checks

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


def plain_inference(x: Tensor) -> bool:
    """Whether no gradient, autocast, torch.func transform or tracer sees the operations on x."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or autocast.enabled(x.device):
        return False
    watched = torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None
    return type(x) is Tensor and not watched
