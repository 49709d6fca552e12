"""How `gemm.linear_glu` goes about it, chosen by what the host knows."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer._core.ops import INTERPRET
from gossamer.gemm.aligned import copies, readable
from gossamer.rowsparse.dense_product import dense_seconds

Path = Literal["torch", "row", "tiles", "hopper", "products"]


@dataclass(frozen=True)
class Separate:
    """From which rows and K on two products of cuBLAS are faster than one of ours, where Hopper's kernel cannot read
    the operands; bytes of gate and up at one time."""

    rows: int = 17
    depth: int = 400
    bytes: int = 1 << 28


SEPARATE = Separate()
START, STEP = 3e-6, 1.8e-6
"""Seconds of a launch, and of a step along K of one tile of few rows."""


def choose_path(x: Tensor, gate_weight: Tensor, up_weight: Tensor, alone: bool = True) -> Path:
    """How x `[M, K]` goes through the weights `[N, K]`; the table in docs/gemm.md has the same rules.

    With `alone` nothing but the result is written, neither gate and up nor their gradients.
    """
    (m, k), n = x.shape, gate_weight.shape[0]
    if not (x.is_cuda or INTERPRET):
        return "torch"
    if alone and m == 1 and gate_weight.stride(1) == up_weight.stride(1) == 1:
        return "row"
    if INTERPRET:
        return "tiles"
    if x.dtype is torch.float32:
        return "products"
    if tuning.hopper(x.device):
        fast = pays(m, n, k, x.device)
        copied = fast and copies(m, n)
        fits = n % 8 == 0 and all(readable(operand, copied) for operand in (x, gate_weight, up_weight))
        if fast and fits:
            return "hopper"
        if not fits and m >= SEPARATE.rows and k >= SEPARATE.depth:
            return "products"
    return "products" if m <= 16 and few_tiles(m, n, k, tile_of(m, x.device), x) else "tiles"


def path_of(x: Tensor, gate_weight: Tensor, up_weight: Tensor | None, *rest: Any) -> str:
    """The path of a call of the operator, as a profiler shows it."""
    if up_weight is None:
        gate_weight, up_weight = gate_weight.chunk(2, 0)
    return f"gemm.linear_glu/{choose_path(x, gate_weight, up_weight, not rest[-1])}"


def pays(m: int, n: int, k: int, device: torch.device) -> bool:
    """Whether Hopper's kernel is for a gated product [m, k] to [m, n].

    With few rows many small programs read the weights faster. With up to 128, too, where tiles of 128 columns would
    keep less than half of the GPU at work, unless K is long enough for programs to share them.
    """
    if m <= 16:
        return False
    tiles = -(-n // 128)
    return m > 128 or 2 * tiles > tuning.programs(device) or cuts_of(tiles, -(-k // 64), device) > 1


def cuts_of(tiles: int, steps: int, device: torch.device) -> int:
    """Into how many runs the product cuts the steps along K of few tiles."""
    cuts = max(1, min(4, tuning.programs(device) // max(tiles, 1), steps // 10))
    return cuts if steps - steps // cuts >= 40 else 1


def tile_of(m: int, device: torch.device) -> launch.Tile:
    """Tile of the product through pointers; two accumulators of BLOCK_M x BLOCK_N."""
    if m <= 16:
        return launch.Tile(
            {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 256 if tuning.hopper(device) else 128, "GROUP_M": 8}, 4, 3
        )
    block_m = 32 if m <= 32 else 64 if m <= 64 else 128
    stages = 4 if m <= 128 and tuning.hopper(device) else 3
    sizes = {"BLOCK_M": block_m, "BLOCK_N": 64, "BLOCK_K": 64, "GROUP_M": 8}
    return launch.Tile(sizes, 8 if block_m == 128 else 4, stages)


def few_tiles(m: int, n: int, k: int, tile: launch.Tile, x: Tensor) -> bool:
    """Whether tiles of few rows, which do not share K, leave half of the GPU idle for longer than two products of
    cuBLAS take."""
    if 2 * launch.cdiv(n, tile.sizes["BLOCK_N"]) > tuning.programs(x.device):
        return False
    ours = START + STEP * launch.cdiv(k, tile.sizes["BLOCK_K"])
    return 2 * dense_seconds(m, k, n, x.element_size(), False, x.device.index) + START < ours
