"""Gated MLPs of Hugging Face models with gate and up in one product, in place and undone as easily.

`patch` binds a forward to each MLP that it knows to compute down(act(gate(x)) * up(x)) with plain layers; parameters,
state dict and classes stay what they are. Whether the layers are still plain is looked at in every call, for hooks and
adapters may come later: then the MLP computes as its class does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gossamer import gemm
from gossamer._core import checks
from gossamer.gemm.linear_glu import ALIASES, GATES

_OPERATOR = "integrations.transformers.patch"


class _Layout(NamedTuple):
    """What the parts of an MLP are called; without `up` the gate's layer has both."""

    gate: str
    up: str | None
    down: str
    activation: str


_LLAMA = _Layout("gate_proj", "up_proj", "down_proj", "act_fn")
_PHI3 = _Layout("gate_up_proj", None, "down_proj", "activation_fn")
_T5 = _Layout("wi_0", "wi_1", "wo", "act")
_CLASSES = {
    "LlamaMLP": _LLAMA,
    "MistralMLP": _LLAMA,
    "Qwen2MLP": _LLAMA,
    "Qwen3MLP": _LLAMA,
    "GemmaMLP": _LLAMA,
    "Gemma2MLP": _LLAMA,
    "Gemma3MLP": _LLAMA,
    "Phi3MLP": _PHI3,
    "T5DenseGatedActDense": _T5,
    "MT5DenseGatedActDense": _T5,
    "UMT5DenseGatedActDense": _T5,
}
# Classes of activation modules -> what linear_glu calls them, or what tells.
_ACTIVATIONS: dict[str, str | Callable[[Any], str]] = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELU": lambda module: "gelu_tanh" if module.approximate == "tanh" else "gelu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "ReLU": "relu",
    "Sigmoid": "sigmoid",
    "LinearActivation": "identity",
}


@dataclass(frozen=True)
class Report:
    """What `patch` did.

    Args:
        replaced: name of a module -> what it was.
        left: name of a module that looks like a gated MLP -> why it computes as before.
    """

    replaced: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        counts = Counter(self.replaced.values())
        lines = [f"{kind}: {count} with gate and up in one product" for kind, count in counts.items()]
        return "\n".join([*lines, *(f"{name}: left as it is, {why}" for name, why in self.left.items())]) or (
            "no gated MLP found"
        )


def patch(model: nn.Module, *, recompute: bool = False) -> Report:
    """Computes gate and up of a model's gated MLPs in one product; `unpatch` undoes it.

    Args:
        model: a model of transformers, or a module that contains one. Llama, Mistral, Qwen2, Qwen3, Gemma 1 to 3, Phi3
            and the gated T5 models are known. An MLP with an adapter, quantised or distributed parameters, a hook on a
            part of it, or another activation is left, and so is one that gets such a thing later.
        recompute: as in `gemm.linear_glu`: whether training computes gate and up again instead of keeping them.

    Returns:
        What is replaced, and what is left and why. `print` it.

    Raises:
        TypeError: model is no module.
        ValueError: something in it is patched already.

    Source: the seed on fused gated MLPs.

    >>> print(patch(model))  # doctest: +SKIP
    LlamaMLP: 32 with gate and up in one product
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{_OPERATOR}: model must be a torch.nn.Module, got {type(model).__name__}.")
    if any(True for _ in _patched(model)):
        raise ValueError(f"{_OPERATOR}: model is patched already. Call unpatch first.")
    report = Report()
    for name, module in model.named_modules():
        layout = _layout_of(module)
        if layout is None:
            if _looks_gated(module):
                report.left[name] = f"{type(module).__name__} is no class that is known here"
            continue
        why = _why_not(module, layout)
        if "forward" in module.__dict__:
            why = "its forward has been replaced on this instance"
        if why is not None:
            report.left[name] = why
            continue
        module.__dict__["_gossamer"] = (layout, recompute)
        module.__dict__["forward"] = MethodType(_forward, module)
        report.replaced[name] = type(module).__name__
    return report


def unpatch(model: nn.Module) -> None:
    """Undoes `patch`.

    Args:
        model: what was patched.

    Raises:
        ValueError: nothing in it is patched.

    >>> unpatch(model)  # doctest: +SKIP
    """
    found = list(_patched(model))
    if not found:
        raise ValueError("integrations.transformers.unpatch: model is not patched.")
    for module in found:
        del module.__dict__["forward"], module.__dict__["_gossamer"]


def _patched(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if getattr(module.__dict__.get("forward"), "__func__", None) is _forward:
            yield module


def _layout_of(module: nn.Module) -> _Layout | None:
    """The layout of an MLP of transformers, or of a subclass that leaves its forward alone."""
    for kind in type(module).__mro__:
        if kind.__module__.startswith("transformers.models.") and kind.__name__ in _CLASSES:
            return _CLASSES[kind.__name__] if type(module).forward is kind.__dict__.get("forward") else None
    return None


def _looks_gated(module: nn.Module) -> bool:
    names = {name for name, _ in module.named_children()} | module._parameters.keys()
    return any({part for part in layout[:3] if part} <= names for layout in (_LLAMA, _PHI3, _T5))


def _why_not(module: nn.Module, layout: _Layout) -> str | None:
    """Why an MLP cannot be computed by `linear_glu` now, or None where it can."""
    for name in (layout.gate, layout.up):
        why = None if name is None else _not_plain(module._modules.get(name), name)
        if why is not None:
            return why
    activation = module._modules.get(layout.activation)
    if activation is None or _name_of(activation) is None:
        return f"its activation is {type(activation).__name__}, which linear_glu does not have"
    return f"{layout.activation} has a hook" if _hooked(activation) else None


def _not_plain(layer: nn.Module | None, name: str) -> str | None:
    """Why the weight of a layer is not all there is to it, or None where it is."""
    if type(layer) is not nn.Linear:
        return f"{name} is a {type(layer).__name__}, not a plain nn.Linear"
    if _hooked(layer) or "forward" in layer.__dict__:
        return f"{name} has a hook"
    for tensor in (layer.weight, layer.bias):
        if tensor is not None and (type(tensor) not in _PLAIN or tensor.dtype not in checks.FLOATS):
            return f"{name} has parameters of type {type(tensor).__name__}, {checks.name_of(tensor.dtype)}"
    return None


_PLAIN = (Tensor, nn.Parameter)


def _hooked(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


def _name_of(activation: nn.Module) -> str | None:
    found = _ACTIVATIONS.get(type(activation).__name__)
    name = found(activation) if callable(found) else found
    return name if ALIASES.get(name or "", name) in GATES else None


def _forward(self: Any, x: Tensor) -> Tensor:
    layout, recompute = self._gossamer
    if _why_not(self, layout) is not None:
        return type(self).forward(self, x)
    gate, up = getattr(self, layout.gate), None if layout.up is None else getattr(self, layout.up)
    biases = (gate.bias, None if up is None else up.bias)
    if up is None and gate.bias is not None:
        biases = tuple(gate.bias.chunk(2))
    options = {
        "activation": _name_of(getattr(self, layout.activation)) or "",
        "gate_bias": biases[0],
        "up_bias": biases[1],
        "recompute": recompute,
    }
    weights = (gate.weight, None if up is None else up.weight)
    down = getattr(self, layout.down)
    if layout is not _T5 and _not_plain(down, layout.down) is None:
        return gemm.gated_mlp(x, *weights, down.weight, down_bias=down.bias, **options)
    hidden = gemm.linear_glu(x, *weights, **options)
    if layout is _T5:
        # T5 drops out here, and may keep this layer alone in float32.
        hidden = self.dropout(hidden)
        if isinstance(down.weight, Tensor) and down.weight.dtype not in (hidden.dtype, torch.int8):
            hidden = hidden.to(down.weight.dtype)
    return down(hidden)
