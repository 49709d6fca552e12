"""Gated MLPs of Hugging Face models with gate and up in one product, in place and undone as easily.

`patch` gives each MLP that it knows to compute down(act(gate(x)) * up(x)) with plain layers a subclass of its class,
with the same name and another forward; parameters and state dict stay what they are. Whether the layers are still plain
is looked at in every call, for hooks and adapters may come later: then the MLP computes as its class does.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from gossamer import gemm
from gossamer.gemm.linear_glu import ALIASES, GATES
from gossamer.nn._plain import hooked, why_called

_PATCH, _UNPATCH = "integrations.transformers.patch", "integrations.transformers.unpatch"


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
# Where activations are defined -> names of their classes -> what linear_glu calls them, or what tells. The name alone
# would not do: a SiLU from elsewhere may compute something else.
_ACTIVATIONS: dict[str, dict[str, str | Callable[[Any], str]]] = {
    "torch.nn.modules.activation": {
        "SiLU": "silu",
        "GELU": lambda module: "gelu_tanh" if module.approximate == "tanh" else "gelu",
        "ReLU": "relu",
        "Sigmoid": "sigmoid",
    },
    "transformers.activations": {
        "SiLUActivation": "silu",
        "GELUActivation": "gelu",
        "GELUTanh": "gelu_tanh",
        "PytorchGELUTanh": "gelu_tanh",
        "NewGELUActivation": "gelu_tanh",
        "LinearActivation": "identity",
    },
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
            part of it or on all modules, or another activation is left, and so is one that gets such a thing later.
        recompute: as in `gemm.linear_glu`: whether training computes gate and up again instead of keeping them.

    Returns:
        What is replaced, and what is left and why. `print` it.

    Raises:
        TypeError: model is no module.
        ValueError: something in it is patched already.

    Source: Tantaru 2025, "Towards Better Kernels for Gated MLP".

    >>> print(patch(model))  # doctest: +SKIP
    LlamaMLP: 32 with gate and up in one product
    """
    _check(_PATCH, model)
    if any(isinstance(module, _Fused) for module in model.modules()):
        raise ValueError(f"{_PATCH}: model is patched already. Call unpatch first.")
    report = Report()
    for name, module in model.named_modules():
        kind: Any = type(module)
        layout = _layout_of(kind)
        if layout is None:
            if _looks_gated(module):
                report.left[name] = f"{kind.__name__} is no class that is known here"
            continue
        why = _why_not(module, layout)
        if "forward" in module.__dict__:
            why = "its forward has been replaced on this instance"
        elif kind.__new__ is not object.__new__:
            why = f"{kind.__name__} has a __new__ of its own, as classes that fully_shard makes: patch before it"
        if why is not None:
            report.left[name] = why
            continue
        module.__class__ = _fused(kind, recompute)
        report.replaced[name] = kind.__name__
    return report


def unpatch(model: nn.Module) -> None:
    """Undoes `patch`; does nothing where nothing is patched, as after a `patch` that found nothing.

    Args:
        model: what was patched.

    Raises:
        TypeError: model is no module.
        ValueError: something has replaced the forward or the class of what is patched since, and has to be removed
            first. Nothing is changed then.

    >>> unpatch(model)  # doctest: +SKIP
    """
    _check(_UNPATCH, model)
    found = {name: module for name, module in model.named_modules() if isinstance(module, _Fused)}
    later = {name or "model": what for name, module in found.items() if (what := _put_on(module)) is not None}
    if later:
        raise ValueError(
            f"{_UNPATCH}: what patch has replaced must be as patch left it, but since then "
            f"{'; '.join(f'{name} got {what}' for name, what in later.items())}. Remove that first (a hook of "
            "accelerate with accelerate.hooks.remove_hook_from_module); where it cannot be, as fully_shard, load the "
            "state dict into a new model."
        )
    for module in found.values():
        module.__dict__.pop("forward", None)
        module.__class__ = module._gossamer[0]


class _Fused(nn.Module):
    """What the class of a patched MLP inherits from, beside the class that it had."""

    _gossamer: ClassVar[tuple[Any, bool]]
    """The class that it had, and recompute."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        if "_gossamer" not in type(self).__dict__:
            return super().__reduce_ex__(protocol)
        # The class is found under no name, for its own is that of the class that it had.
        return _rebuild, self._gossamer, self.__getstate__()


@functools.cache
def _fused(kind: type[nn.Module], recompute: bool) -> type[nn.Module]:
    """A class of MLPs with another forward, and the same name."""
    layout = _layout_of(kind)
    assert layout is not None
    argument = list(inspect.signature(kind.forward).parameters)[1]

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        given = (*args, *kwargs.values())
        # A call that the class refuses is left to it, too.
        if len(given) != 1 or (kwargs and argument not in kwargs) or _why_not(self, layout) is not None:
            return kind.forward(self, *args, **kwargs)
        return _compute(self, given[0], layout, recompute)

    same = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (_Fused, kind), {**same, "_gossamer": (kind, recompute), "forward": forward})


def _rebuild(kind: Any, recompute: bool) -> nn.Module:
    """A patched MLP from a pickle, still without its state."""
    # Where a pickle is read, another version of the class may have a forward that is not known here.
    made = kind if _layout_of(kind) is None else _fused(kind, recompute)
    return made.__new__(made)


def _put_on(module: _Fused) -> str | None:
    """What came onto a patched MLP after `patch` and would keep it from being undone."""
    if "_gossamer" not in type(module).__dict__:
        return f"the class {type(module).__name__}"
    forward = module.__dict__.get("forward")
    # accelerate, when its hook is removed, leaves on the instance what it found: the forward of the class.
    if forward is None or getattr(forward, "__func__", None) is type(module).forward:
        return None
    return "another forward"


def _check(operator: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{operator}: model must be a torch.nn.Module, got {type(model).__name__}.")


def _layout_of(kind: type[nn.Module]) -> _Layout | None:
    """The layout of a class of MLPs of transformers, or of a subclass that leaves its forward alone."""
    for base in kind.__mro__:
        if base.__module__.startswith("transformers.models.") and base.__name__ in _CLASSES:
            return _CLASSES[base.__name__] if kind.forward is base.__dict__.get("forward") else None
    return None


def _looks_gated(module: nn.Module) -> bool:
    names = {name for name, _ in module.named_children()} | module._parameters.keys()
    return any({part for part in layout[:3] if part} <= names for layout in (_LLAMA, _PHI3, _T5))


def _why_not(module: nn.Module, layout: _Layout) -> str | None:
    """Why an MLP cannot be computed by `linear_glu` now, or None where it can."""
    names = (layout.gate,) if layout.up is None else (layout.gate, layout.up)
    why = why_called(**{name: module._modules.get(name) for name in names})
    if why is not None:
        return why
    activation = module._modules.get(layout.activation)
    if activation is None or _name_of(activation) is None:
        kind = type(activation)
        return f"its activation is {kind.__module__}.{kind.__qualname__}, which linear_glu does not have"
    return f"{layout.activation} has a hook" if hooked(activation) else None


def _name_of(activation: nn.Module) -> str | None:
    kind = type(activation)
    found = _ACTIVATIONS.get(kind.__module__, {}).get(kind.__qualname__)
    name = found(activation) if callable(found) else found
    return name if ALIASES.get(name or "", name) in GATES else None


def _compute(self: Any, x: Tensor, layout: _Layout, recompute: bool) -> Tensor:
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
    if layout is not _T5 and why_called(**{layout.down: down}) is None:
        return gemm.gated_mlp(x, *weights, down.weight, down_bias=down.bias, **options)
    hidden = gemm.linear_glu(x, *weights, **options)
    if layout is _T5:
        # T5 drops out here, and may keep this layer alone in float32.
        hidden = self.dropout(hidden)
        if isinstance(down.weight, Tensor) and down.weight.dtype not in (hidden.dtype, torch.int8):
            hidden = hidden.to(down.weight.dtype)
    return down(hidden)
