"""Feed-forward blocks, recognised by their forward: the names of their parts, and whether a block may be computed from
its weights alone.

A forward is run once per class on symbols instead of tensors. Its result shows the formula: down(act(gate(x)) * up(x))
or down(act(up(x))), with a dropout or multipliers in it or not. A forward that does anything else fails on symbols.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from gossamer.ffn.block import NAMES
from gossamer.gemm.linear_glu import ALIASES, GATES
from gossamer.nn.plain import any_hook, why_called


class Layout(NamedTuple):
    """The names of a block's parts. Where `up` is None a gated block's gate layer has both, the gate's half first or
    not, and a `plain` block has no gate: `gate` is the layer that the activation follows.

    Args:
        activation: the name of a module, or a function's name in `linear_glu`.
        dropout: between the activation and down; "" where there is none.
        gate_scale, down_scale: names of multipliers of the gate and of the result.
        inline: whether the block is part of a larger module.
    """

    gate: str
    up: str | None
    down: str
    activation: str
    dropout: str = ""
    plain: bool = False
    gate_first: bool = True
    gate_scale: str = ""
    down_scale: str = ""
    inline: bool = False


class _Symbol:
    """A text in the place of a tensor, of a part or number of a module (`is_part`), or of the module ("")."""

    def __init__(self, text: str, is_part: bool = False) -> None:
        self.text, self.is_part = text, is_part

    def __getattr__(self, name: str) -> _Symbol:
        # Of a layer's weight T5 asks whether it is a tensor.
        if name.startswith("__") or (self.text and not (self.is_part and name == "weight")):
            raise AttributeError(name)
        return _Symbol(name, is_part=True)

    def __call__(self, x: _Symbol) -> _Symbol:
        if not self.is_part or x.is_part:
            raise TypeError
        return _Symbol(f"{self.text}({x.text})")

    def __mul__(self, other: _Symbol) -> _Symbol:
        sides = [self, other]
        if not other.is_part:
            # The activation first: it has one part more.
            sides.sort(key=lambda side: -side.text.count("("))
        return _Symbol("*".join(side.text for side in sides))

    def chunk(self, chunks: int, dim: int = 0) -> list[_Symbol]:
        if (chunks, dim) != (2, -1):
            raise TypeError
        return [_Symbol(f"{self.text}[{half}]") for half in range(2)]

    def __bool__(self) -> bool:
        raise TypeError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> _Symbol:
        return _Symbol(_FUNCTIONS[func], is_part=True)(*args)


_FUNCTIONS: dict[Any, str] = {F.silu: "silu", F.relu: "relu", torch.relu: "relu", torch.sigmoid: "sigmoid"}
_NAMED = frozenset(_FUNCTIONS.values())
_FORMULA = re.compile(
    r"(?P<down>\w+)\((?P<dropout>\w+\()?(?P<activation>\w+)\((?P<gate>\w+)\(x\)(?P<half>\[[01]\])?"
    r"(\*(?P<gate_scale>\w+))?\)(\*(?P<up>\w+)\(x\)(?P<other>\[[01]\])?)?(?(dropout)\))\)(\*(?P<down_scale>\w+))?"
)
# Layers such as OPT's and BART's hold a block's parts beside attention.
_INLINE = re.compile(
    r"(\w+) = self\.(fc1\(\1\)\s+\1 = self\.activation_fn\(\1\)|activation_fn\(self\.fc1\(\1\)\))\s+"
    r"(\1 = nn\.functional\.dropout\(\1, p=self\.activation_dropout, training=self\.training\)\s+)?"
    r"\1 = self\.fc2\(\1\)"
)


@functools.cache
def layout_of(kind: type[nn.Module]) -> Layout | None:
    """The layout of a class's forward, or None."""
    try:
        if len(inspect.signature(kind.forward).parameters) != 2:
            source = inspect.getsource(kind.forward)
            inline = _INLINE.search(source) if len(re.findall(r"self\.fc[12]\b", source)) == 2 else None
            dropout = "activation_dropout" if inline is not None and inline[3] else ""
            return inline and Layout("fc1", None, "fc2", "activation_fn", dropout, plain=True, inline=True)
        found = _FORMULA.fullmatch(kind.forward(_Symbol(""), _Symbol("x")).text)
    except Exception:
        # A forward that is no such formula may raise any error on symbols. They hold no tensor, so no kernel runs here.
        return None
    if found is None:
        return None
    of = {name: part or "" for name, part in found.groupdict().items()}
    options: dict[str, Any] = {"gate_scale": of["gate_scale"], "down_scale": of["down_scale"], "plain": not of["up"]}
    known: tuple[str, str, str] = of["down"], of["activation"], of["dropout"].rstrip("(")
    if of["half"] or of["other"]:
        both = of["gate"] == of["up"] and of["half"] and of["other"] and of["half"] != of["other"]
        return Layout(of["gate"], None, *known, gate_first=of["half"] == "[0]", **options) if both else None
    return Layout(of["gate"], of["up"] or None, *known, **options)


# Where activations are defined -> names of their classes -> their names in linear_glu, or a function that tells. The
# name alone would not do: a SiLU from elsewhere may compute something else.
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
        "ReLUSquaredActivation": "relu2",
    },
}


def looks_gated(module: nn.Module) -> bool:
    """Whether a module has parts with the names of a gated block's."""
    names = {name for name, _ in module.named_children()} | module._parameters.keys()
    return any(parts <= names for parts in _GATED)


_GATED = (
    {"gate_proj", "up_proj", "down_proj"},
    {"gate_up_proj", "down_proj"},
    {"wi_0", "wi_1", "wo"},
    {"w1", "w2", "w3"},
)


def why_not_fused(module: nn.Module, layout: Layout) -> str | None:
    """Why an MLP cannot be computed by `linear_glu` now, or None where it can."""
    names = (layout.gate,) if layout.up is None else (layout.gate, layout.up)
    why = why_called(**{name: module._modules.get(name) for name in names})
    if why is not None:
        return why
    if activation_of(module, layout) is None:
        kind = type(module._modules.get(layout.activation))
        return f"its activation is {kind.__module__}.{kind.__qualname__}, which linear_glu does not have"
    if any_hook(module._modules.get(layout.activation)):
        return f"{layout.activation} has a hook"
    dropout: Any = getattr(module, layout.dropout, None) if layout.dropout else 0.0
    return None if type(dropout) in (nn.Dropout, float, int) else f"{layout.dropout} is not a plain nn.Dropout"


def why_not_sparse(module: nn.Module, layout: Layout) -> str | None:
    """Why a block cannot be computed sparse now, or None where it can, unless it drops out."""
    why = why_not_fused(module, layout) or why_called(**{layout.down: module._modules.get(layout.down)})
    if why is not None:
        return why
    name = activation_of(module, layout)
    if name not in NAMES:
        return f"its activation is {name}, which leaves few entries 0"
    if layout.gate_scale or layout.down_scale:
        return f"it multiplies with {layout.gate_scale or layout.down_scale}"
    gate, down = getattr(module, layout.gate), getattr(module, layout.down)
    if gate.weight.dtype != down.weight.dtype:
        # Some T5 models keep this layer in float32.
        return f"{layout.gate} is {gate.weight.dtype} and {layout.down} is {down.weight.dtype}"
    return f"{layout.dropout} has a hook" if any_hook(module._modules.get(layout.dropout)) else None


def drops_out(module: nn.Module, layout: Layout) -> bool:
    """Whether entries are dropped between the activation and the down projection."""
    dropout: Any = getattr(module, layout.dropout) if layout.dropout else 0.0
    if isinstance(dropout, nn.Dropout):
        return dropout.training and dropout.p > 0
    return module.training and dropout > 0


def activation_of(module: nn.Module, layout: Layout) -> str | None:
    """linear_glu's name of a block's activation, or None where it has none."""
    if layout.activation in _NAMED:
        return layout.activation
    activation: Any = module._modules.get(layout.activation)
    kind = type(activation)
    found = _ACTIVATIONS.get(kind.__module__, {}).get(kind.__qualname__)
    name = found(activation) if callable(found) else found
    return name if ALIASES.get(name or "", name) in GATES else None
