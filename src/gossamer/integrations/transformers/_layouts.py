"""Which classes of transformers have a feed-forward block that is known, what its parts are called, and whether a
block may be computed from its weights alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from gossamer.ffn.block import NAMES
from gossamer.gemm.linear_glu import ALIASES, GATES
from gossamer.nn.plain import hooked, why_called


class Layout(NamedTuple):
    """What the parts of a block are called; in a gated one without `up` the gate's layer has both. A `plain` block has
    no gate: `gate` is the layer that the activation follows. `inline` blocks are part of a larger module."""

    gate: str
    up: str | None
    down: str
    activation: str
    dropout: str | None = None
    plain: bool = False
    inline: bool = False


LLAMA = Layout("gate_proj", "up_proj", "down_proj", "act_fn")
PHI3 = Layout("gate_up_proj", None, "down_proj", "activation_fn")
T5_GATED = Layout("wi_0", "wi_1", "wo", "act", "dropout")
T5 = Layout("wi", None, "wo", "act", "dropout", plain=True)
NEMOTRON = Layout("up_proj", None, "down_proj", "act_fn", plain=True)
NANOCHAT = Layout("fc1", None, "fc2", "activation_fn", plain=True)
OPT = Layout("fc1", None, "fc2", "activation_fn", plain=True, inline=True)
_CLASSES = {
    "LlamaMLP": LLAMA,
    "MistralMLP": LLAMA,
    "Qwen2MLP": LLAMA,
    "Qwen3MLP": LLAMA,
    "GemmaMLP": LLAMA,
    "Gemma2MLP": LLAMA,
    "Gemma3MLP": LLAMA,
    "Phi3MLP": PHI3,
    "T5DenseGatedActDense": T5_GATED,
    "MT5DenseGatedActDense": T5_GATED,
    "UMT5DenseGatedActDense": T5_GATED,
    "T5DenseActDense": T5,
    "MT5DenseActDense": T5,
    "UMT5DenseActDense": T5,
    "ArceeMLP": NEMOTRON,
    "NemotronMLP": NEMOTRON,
    "Jais2MLP": NEMOTRON,
    "NanoChatMLP": NANOCHAT,
    "OPTDecoderLayer": OPT,
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
        "ReLUSquaredActivation": "relu2",
    },
}


def layout_of(kind: type[nn.Module]) -> Layout | None:
    """The layout of a class of transformers, or of a subclass that leaves its forward alone."""
    for base in kind.__mro__:
        if base.__module__.startswith("transformers.models.") and base.__name__ in _CLASSES:
            return _CLASSES[base.__name__] if kind.forward is base.__dict__.get("forward") else None
    return None


def looks_gated(module: nn.Module) -> bool:
    """Whether a module has parts with the names of a gated block's."""
    names = {name for name, _ in module.named_children()} | module._parameters.keys()
    return any({part for part in layout[:3] if part} <= names for layout in (LLAMA, PHI3, T5_GATED))


def why_not_fused(module: nn.Module, layout: Layout) -> str | None:
    """Why an MLP cannot be computed by `linear_glu` now, or None where it can."""
    names = (layout.gate,) if layout.up is None else (layout.gate, layout.up)
    why = why_called(**{name: module._modules.get(name) for name in names})
    if why is not None:
        return why
    activation = module._modules.get(layout.activation)
    if activation is None or activation_of(activation) is None:
        kind = type(activation)
        return f"its activation is {kind.__module__}.{kind.__qualname__}, which linear_glu does not have"
    return f"{layout.activation} has a hook" if hooked(activation) else None


def why_not_sparse(module: nn.Module, layout: Layout) -> str | None:
    """Why a block cannot be computed sparse now, or None where it can, unless it drops out."""
    why = why_not_fused(module, layout) or why_called(**{layout.down: module._modules.get(layout.down)})
    if why is not None:
        return why
    name = activation_of(module._modules[layout.activation])
    if name not in NAMES:
        return f"its activation is {name}, which leaves few entries 0"
    gate, down = getattr(module, layout.gate), getattr(module, layout.down)
    if gate.weight.dtype != down.weight.dtype:
        # Some T5 models keep this layer in float32.
        return f"{layout.gate} is {gate.weight.dtype} and {layout.down} is {down.weight.dtype}"
    dropout = None if layout.dropout is None else module._modules.get(layout.dropout)
    if layout.dropout is not None and (type(dropout) is not nn.Dropout or hooked(dropout)):
        return f"{layout.dropout} has a hook or is not a plain nn.Dropout"
    return None


def drops_out(module: nn.Module, layout: Layout) -> bool:
    """Whether entries are dropped between the activation and the down projection."""
    dropout = None if layout.dropout is None else module._modules[layout.dropout]
    return isinstance(dropout, nn.Dropout) and dropout.training and dropout.p > 0


def activation_of(activation: Any) -> str | None:
    """linear_glu's name of an activation's module, or None where it has none."""
    kind = type(activation)
    found = _ACTIVATIONS.get(kind.__module__, {}).get(kind.__qualname__)
    name = found(activation) if callable(found) else found
    return name if ALIASES.get(name or "", name) in GATES else None
