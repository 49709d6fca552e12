"""Rotary embeddings and gates between an attention layer's projection and attention, on the CPU."""

import torch
from torch import Tensor

from gossamer.attention.records import RotaryGates, RotaryGatesBwd


def _sections(y: Tensor, heads: int, groups: int, d: int, value_gate: bool, output_gate: bool) -> tuple[Tensor, ...]:
    widths = [heads * d, groups * d, groups * d, groups * d if value_gate else 0, heads * d if output_gate else 0]
    return y.split(widths, -1)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


def rotary_gates(call: RotaryGates) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Operator `rotary_gates` -> (q, k, v, gate)."""
    y, cos, sin, heads, groups, value_gate, output_gate = call
    working = torch.promote_types(y.dtype, torch.float32)
    d = cos.shape[-1]
    q, k, v, of_v, gate = _sections(y.to(working), heads, groups, d, value_gate, output_gate)
    cos, sin = cos[..., None, :].to(working), sin[..., None, :].to(working)
    v = v * of_v.sigmoid() if value_gate else v
    q, k, v = (x.unflatten(-1, (-1, d)) for x in (q, k, v))
    q, k = _turned(q, cos, sin), _turned(k, cos, sin)
    gate = gate.sigmoid() if output_gate else gate
    return q.to(y.dtype), k.to(y.dtype), v.to(y.dtype, copy=True), gate.to(y.dtype, copy=True)


def rotary_gates_bwd(call: RotaryGatesBwd) -> Tensor:
    """Operator `rotary_gates_bwd` -> the gradient of y."""
    dq, dk, dv, dgate, y, cos, sin, value_gate = call
    working = torch.promote_types(y.dtype, torch.float32)
    heads, d = dq.shape[2:]
    output_gate = dgate.shape[-1] > 0
    _, _, v, of_v, gate = _sections(y.to(working), heads, dk.shape[2], d, value_gate, output_gate)
    cos, sin = cos[..., None, :].to(working), sin[..., None, :].to(working)
    made = [_turned(x.to(working), cos, -sin).flatten(2) for x in (dq, dk)]
    dv = dv.flatten(2).to(working)
    if value_gate:
        s = of_v.sigmoid()
        made += [dv * s, dv * v * s * (1 - s)]
    else:
        made.append(dv)
    if output_gate:
        s = gate.sigmoid()
        made.append(dgate.to(working) * s * (1 - s))
    return torch.cat(made, -1).to(y.dtype)
