"""The feed-forward block by its definition."""

import torch
from torch import Tensor
from torch.nn import functional as F


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = F.linear(x, weight)
    return out if bias is None else (out + bias).to(weight.dtype)


def dense(x: Tensor, gate: Tensor, up: Tensor | None, down: Tensor, activation: str, **more: Tensor | None) -> Tensor:
    """In the dtype of its operands."""
    z = linear(x, gate, more.get("gate_bias"))
    threshold = more.get("threshold")
    hidden = torch.relu(z) if threshold is None else torch.where(z <= threshold.clamp(min=0), 0, z)
    hidden = hidden.square() if activation == "relu2" else hidden
    if up is not None:
        hidden = hidden * linear(x, up, more.get("up_bias"))
    return linear(hidden, down, more.get("down_bias"))


def dense64(*operands: Tensor | str | None, **more: Tensor | None) -> Tensor:
    wide = [t.detach().double() if isinstance(t, Tensor) else t for t in operands]
    return dense(*wide, **{k: None if t is None else t.detach().double() for k, t in more.items()})  # type: ignore[arg-type]
