"""Steps between an attention layer's one big projection and attention: rotary embeddings and gates.

A program takes BLOCK_T tokens of one section of the projection, which is a head of q, k or v, or of the output's gate;
both halves of a head at once, for rotary embeddings turn one into the other. Each number is read once and written once.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch
from gossamer.attention.records import RotaryGates, RotaryGatesBwd


@triton.jit
def sections(unit, H, G):
    """(0 to 3 for q, k, v and gate; head of that section)."""
    kind = (unit >= H).to(tl.int32) + (unit >= H + G).to(tl.int32) + (unit >= H + 2 * G).to(tl.int32)
    first = tl.where(kind == 0, 0, tl.where(kind == 1, H, tl.where(kind == 2, H + G, H + 2 * G)))
    return kind, unit - first


@triton.jit
def slope(x):
    """Of a sigmoid at x."""
    s = tl.sigmoid(x.to(tl.float32))
    return s * (1 - s)


@launch.kernel
def _rotary_gates_kernel(
    y_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr, gate_ptr, dy_ptr, stride_y, tokens, angles, H, G,
    D: tl.constexpr, VALUE_GATE: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK_T tokens, section). y is [tokens, columns]: q, k, v, the values' gate, the output's gate. With
    `dy_ptr` the other four are gradients, and that of y is written; a section of v has that of its gate, too."""
    HALF: tl.constexpr = D // 2
    kind, head = sections(tl.program_id(1), H, G)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.arange(0, triton.next_power_of_2(HALF))
    mask = (token < tokens)[:, None] & (column < HALF)[None, :]
    row = token.to(tl.int64)[:, None]
    start = tl.program_id(1) + tl.where(kind == 3, G if VALUE_GATE else 0, 0)
    at = row * stride_y + start * D + column[None, :]
    y_ptr += at
    heads = tl.where((kind == 0) | (kind == 3), H, G)
    of_head = (row * heads + head) * D + column[None, :]
    if kind == 0:
        head_ptr = q_ptr + of_head
    elif kind == 1:
        head_ptr = k_ptr + of_head
    elif kind == 2:
        head_ptr = v_ptr + of_head
    else:
        head_ptr = gate_ptr + of_head
    if dy_ptr is None:
        from_ptr, to_ptr = y_ptr, head_ptr
    else:
        from_ptr, to_ptr = head_ptr, dy_ptr + at
    low = tl.load(from_ptr, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(from_ptr + HALF, mask=mask, other=0.0).to(tl.float32)
    dtype = y_ptr.dtype.element_ty
    if kind <= 1:
        angle = (row % angles) * D + column[None, :]
        cos = tl.load(cos_ptr + angle, mask=mask, other=0.0)
        sin = tl.load(sin_ptr + angle, mask=mask, other=0.0)
        if dy_ptr is not None:
            sin = -sin
        turned = low * cos - high * sin
        high = high * cos + low * sin
        low = turned
    elif kind == 3:
        if dy_ptr is None:
            low, high = tl.sigmoid(low), tl.sigmoid(high)
        else:
            low *= slope(tl.load(y_ptr, mask=mask, other=0.0))
            high *= slope(tl.load(y_ptr + HALF, mask=mask, other=0.0))
    elif VALUE_GATE:
        gate_low = tl.load(y_ptr + G * D, mask=mask, other=0.0)
        gate_high = tl.load(y_ptr + G * D + HALF, mask=mask, other=0.0)
        if dy_ptr is not None:
            of_low = low * tl.load(y_ptr, mask=mask, other=0.0).to(tl.float32) * slope(gate_low)
            of_high = high * tl.load(y_ptr + HALF, mask=mask, other=0.0).to(tl.float32) * slope(gate_high)
            tl.store(to_ptr + G * D, of_low.to(dtype), mask=mask)
            tl.store(to_ptr + G * D + HALF, of_high.to(dtype), mask=mask)
        low *= tl.sigmoid(gate_low.to(tl.float32))
        high *= tl.sigmoid(gate_high.to(tl.float32))
    tl.store(to_ptr, low.to(dtype), mask=mask)
    tl.store(to_ptr + HALF, high.to(dtype), mask=mask)


BLOCK_T = 32


def rotary_gates(call: RotaryGates) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Operator `rotary_gates` -> (q, k, v, gate)."""
    y, cos, sin, heads, groups, value_gate, output_gate = call
    b, t, d = *y.shape[:2], cos.shape[-1]
    q, k, v = (y.new_empty(b, t, n, d) for n in (heads, groups, groups))
    gate = y.new_empty(b, t, heads * d if output_gate else 0)
    _launch(y, cos, sin, (q, k, v, gate), None, value_gate)
    return q, k, v, gate


def rotary_gates_bwd(call: RotaryGatesBwd) -> Tensor:
    """Operator `rotary_gates_bwd` -> the gradient of y."""
    *parts, y, cos, sin, value_gate = call
    dy = torch.empty_like(y)
    _launch(y, cos, sin, parts, dy, value_gate)
    return dy


def _launch(y: Tensor, cos: Tensor, sin: Tensor, parts: Sequence[Tensor], dy: Tensor | None, value_gate: bool) -> None:
    """Fills the parts, q, k, v and gate, or from gradients of these that of y."""
    if y.numel() == 0:
        return
    heads, groups, d = parts[0].shape[2], parts[1].shape[2], cos.shape[-1]
    tokens, columns = y.shape[0] * y.shape[1], y.shape[2]
    # The values' gates have no programs of their own.
    programs = columns // d - (groups if value_gate else 0)
    args = (y, cos, sin, *parts, dy, columns, tokens, cos.numel() // d, heads, groups)
    meta = {"D": d, "VALUE_GATE": value_gate, "BLOCK_T": BLOCK_T}
    _rotary_gates_kernel((launch.cdiv(tokens, BLOCK_T), programs, 1), args, meta, num_warps=4)


EXAMPLES = {
    _rotary_gates_kernel: {"D": 128, "VALUE_GATE": True, "BLOCK_T": 32},
}
