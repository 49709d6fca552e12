"""How `gemm.linear_glu` goes about it, chosen by what the host knows."""

from typing import Any, Literal

import torch
from torch import Tensor

from gossamer._core import tuning
from gossamer._core.ops import INTERPRET

Path = Literal["torch", "row", "tiles", "hopper", "products"]
FEW = 64
"""Rows up to which the time goes into reading the weights."""


def choose_path(x: Tensor, gate_weight: Tensor, up_weight: Tensor, alone: bool = True) -> Path:
    """How x `[M, K]` goes through the weights `[N, K]`; the table in docs/gemm.md has the same rules.

    With `alone` nothing but the result is written, neither gate and up nor their gradients.
    """
    (m, k), n = x.shape, gate_weight.shape[0]
    if not (x.is_cuda or INTERPRET):
        return "torch"
    if alone and m == 1 and gate_weight.stride(1) == up_weight.stride(1) == 1:
        return "row"
    by_rows = x.stride(1) == gate_weight.stride(1) == up_weight.stride(1) == 1
    aligned = by_rows and all(map(readable, (x, gate_weight, up_weight)))
    if alone and m <= FEW and ((INTERPRET and by_rows) or (aligned and 2 * -(-n // 32) >= tuning.programs(x.device))):
        # Tiles of 32 columns keep at least half of the GPU at work.
        return "tiles"
    if INTERPRET or not (aligned and n % 8 == 0 and tuning.hopper(x.device)):
        return "products"
    return "hopper" if pays(m, n, k, x.device) else "products"


def path_of(x: Tensor, gate_weight: Tensor, up_weight: Tensor | None, *rest: Any) -> str:
    """The path of a call of the operator, as a profiler shows it."""
    if up_weight is None:
        gate_weight, up_weight = gate_weight.chunk(2, 0)
    return f"gemm.linear_glu/{choose_path(x, gate_weight, up_weight, not rest[-1])}"


def readable(operand: Tensor) -> bool:
    """Whether the copy engine of Hopper can read an operand: 16 bits, rows contiguous and on 16 bytes."""
    stride, step = operand.stride()
    if operand.element_size() != 2 or operand.shape[1] == 0:
        return False
    return step == 1 and stride >= operand.shape[1] and (operand.data_ptr() | 2 * stride) % 16 == 0


def pays(m: int, n: int, k: int, device: torch.device) -> bool:
    """Whether Hopper's kernel is for a gated product [m, k] to [m, n].

    With up to 128 rows tiles of 128 columns have to keep half of the GPU at work, unless K is long enough for programs
    to share them.
    """
    tiles = -(-n // 128)
    return m > 128 or 2 * tiles > tuning.programs(device) or cuts_of(tiles, -(-k // 64), device) > 1


def cuts_of(tiles: int, steps: int, device: torch.device) -> int:
    """Into how many runs the product cuts the steps along K of few tiles."""
    cuts = max(1, min(4, tuning.programs(device) // max(tiles, 1), steps // 10))
    return cuts if steps - steps // cuts >= 40 else 1
