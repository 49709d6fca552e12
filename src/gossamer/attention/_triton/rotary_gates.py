"""Steps between an attention layer's one big projection and attention: rotary embeddings and gates.

A program takes BLOCK_T tokens of one section of the projection, which is a head of q, k or v, or of the output's gate;
both halves of a head at once, for rotary embeddings turn one into the other. Each number is read once and written once.
"""

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


@launch.kernel
def _rotary_gates_fwd_kernel(
    y_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr, gate_ptr, stride_y, tokens, angles, H, G,
    D: tl.constexpr, VALUE_GATE: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK_T tokens, section). y is [tokens, columns]: q, k, v, the values' gate, the output's gate."""
    HALF: tl.constexpr = D // 2
    kind, head = sections(tl.program_id(1), H, G)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.arange(0, triton.next_power_of_2(HALF))
    mask = (token < tokens)[:, None] & (column < HALF)[None, :]
    row = token.to(tl.int64)[:, None]
    start = tl.program_id(1) + tl.where(kind == 3, G if VALUE_GATE else 0, 0)
    y_ptr += row * stride_y + start * D + column[None, :]
    low = tl.load(y_ptr, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(y_ptr + HALF, mask=mask, other=0.0).to(tl.float32)
    if kind <= 1:
        at = (row % angles) * D + column[None, :]
        cos = tl.load(cos_ptr + at, mask=mask, other=0.0)
        sin = tl.load(sin_ptr + at, mask=mask, other=0.0)
        turned = low * cos - high * sin
        high = high * cos + low * sin
        low = turned
    elif kind == 3:
        low, high = tl.sigmoid(low), tl.sigmoid(high)
    elif VALUE_GATE:
        low *= tl.sigmoid(tl.load(y_ptr + G * D, mask=mask, other=0.0).to(tl.float32))
        high *= tl.sigmoid(tl.load(y_ptr + G * D + HALF, mask=mask, other=0.0).to(tl.float32))
    heads = tl.where((kind == 0) | (kind == 3), H, G)
    at = (row * heads + head) * D + column[None, :]
    if kind == 0:
        out_ptr = q_ptr + at
    elif kind == 1:
        out_ptr = k_ptr + at
    elif kind == 2:
        out_ptr = v_ptr + at
    else:
        out_ptr = gate_ptr + at
    tl.store(out_ptr, low.to(q_ptr.dtype.element_ty), mask=mask)
    tl.store(out_ptr + HALF, high.to(q_ptr.dtype.element_ty), mask=mask)


@launch.kernel
def _rotary_gates_bwd_kernel(
    y_ptr, cos_ptr, sin_ptr, dq_ptr, dk_ptr, dv_ptr, dgate_ptr, dy_ptr, stride_y, tokens, angles, H, G,
    D: tl.constexpr, VALUE_GATE: tl.constexpr, OUTPUT_GATE: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK_T tokens, section), as in the forward pass; a section of v has the gradient of its gate, too."""
    HALF: tl.constexpr = D // 2
    kind, head = sections(tl.program_id(1), H, G)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.arange(0, triton.next_power_of_2(HALF))
    mask = (token < tokens)[:, None] & (column < HALF)[None, :]
    row = token.to(tl.int64)[:, None]
    start = (tl.program_id(1) + tl.where(kind == 3, G if VALUE_GATE else 0, 0)) * D + column[None, :]
    columns = (H + (3 if VALUE_GATE else 2) * G + (H if OUTPUT_GATE else 0)) * D
    y_ptr += row * stride_y + start
    dy_ptr += row * columns + start
    heads = tl.where((kind == 0) | (kind == 3), H, G)
    at = (row * heads + head) * D + column[None, :]
    if kind == 0:
        grad_ptr = dq_ptr + at
    elif kind == 1:
        grad_ptr = dk_ptr + at
    elif kind == 2:
        grad_ptr = dv_ptr + at
    else:
        grad_ptr = dgate_ptr + at
    low = tl.load(grad_ptr, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(grad_ptr + HALF, mask=mask, other=0.0).to(tl.float32)
    dtype = dy_ptr.dtype.element_ty
    if kind <= 1:
        at = (row % angles) * D + column[None, :]
        cos = tl.load(cos_ptr + at, mask=mask, other=0.0)
        sin = tl.load(sin_ptr + at, mask=mask, other=0.0)
        turned = low * cos + high * sin
        high = high * cos - low * sin
        low = turned
    elif kind == 3:
        low *= slope(tl.load(y_ptr, mask=mask, other=0.0))
        high *= slope(tl.load(y_ptr + HALF, mask=mask, other=0.0))
    elif VALUE_GATE:
        gate_low = tl.load(y_ptr + G * D, mask=mask, other=0.0)
        gate_high = tl.load(y_ptr + G * D + HALF, mask=mask, other=0.0)
        of_low = low * tl.load(y_ptr, mask=mask, other=0.0).to(tl.float32) * slope(gate_low)
        of_high = high * tl.load(y_ptr + HALF, mask=mask, other=0.0).to(tl.float32) * slope(gate_high)
        tl.store(dy_ptr + G * D, of_low.to(dtype), mask=mask)
        tl.store(dy_ptr + G * D + HALF, of_high.to(dtype), mask=mask)
        low *= tl.sigmoid(gate_low.to(tl.float32))
        high *= tl.sigmoid(gate_high.to(tl.float32))
    tl.store(dy_ptr, low.to(dtype), mask=mask)
    tl.store(dy_ptr + HALF, high.to(dtype), mask=mask)


@triton.jit
def slope(x):
    """Of a sigmoid at x."""
    s = tl.sigmoid(x.to(tl.float32))
    return s * (1 - s)


BLOCK_T = 32


def rotary_gates(call: RotaryGates) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Operator `rotary_gates` -> (q, k, v, gate)."""
    y, cos, sin, heads, groups, value_gate, output_gate = call
    b, t, d = *y.shape[:2], cos.shape[-1]
    q, k, v = (y.new_empty(b, t, n, d) for n in (heads, groups, groups))
    gate = y.new_empty(b, t, heads * d if output_gate else 0)
    if q.numel():
        units = heads * (2 if output_gate else 1) + 2 * groups
        sizes = (y.shape[2], b * t, cos.numel() // d, heads, groups)
        meta = {"D": d, "VALUE_GATE": value_gate, "BLOCK_T": BLOCK_T}
        args = (y, cos, sin, q, k, v, gate, *sizes)
        grid = (launch.cdiv(b * t, BLOCK_T), units, 1)
        _rotary_gates_fwd_kernel(grid, args, meta, num_warps=4)
    return q, k, v, gate


def rotary_gates_bwd(call: RotaryGatesBwd) -> Tensor:
    """Operator `rotary_gates_bwd` -> the gradient of y."""
    dq, dk, dv, dgate, y, cos, sin, value_gate = call
    b, t, heads, d = dq.shape
    groups = dk.shape[2]
    dy = torch.empty_like(y)
    if y.numel():
        output_gate = dgate.shape[-1] > 0
        units = heads * (2 if output_gate else 1) + 2 * groups
        sizes = (y.shape[2], b * t, cos.numel() // d, heads, groups)
        meta = {"D": d, "VALUE_GATE": value_gate, "OUTPUT_GATE": output_gate, "BLOCK_T": BLOCK_T}
        args = (y, cos, sin, dq, dk, dv, dgate, dy, *sizes)
        grid = (launch.cdiv(b * t, BLOCK_T), units, 1)
        _rotary_gates_bwd_kernel(grid, args, meta, num_warps=4)
    return dy


EXAMPLES = {
    _rotary_gates_fwd_kernel: {"D": 128, "VALUE_GATE": True, "BLOCK_T": 32},
    _rotary_gates_bwd_kernel: {"D": 128, "VALUE_GATE": True, "OUTPUT_GATE": True, "BLOCK_T": 32},
}
