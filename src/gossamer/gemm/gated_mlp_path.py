"""How `gemm.gated_mlp` goes back, chosen by what the host knows; forward it is `linear_glu` and a product."""

from typing import Literal

from torch import Tensor

from gossamer._core import launch, tuning
from gossamer._core.ops import INTERPRET
from gossamer.gemm.aligned import readable
from gossamer.gemm.linear_pack_path import TILE

Path = Literal["torch", "hopper", "product"]
LEAST = 3072
"""The inner dimension from which on a tile takes longer than one warp a warpgroup needs to gate it."""


def choose_path(grad: Tensor, down_weight: Tensor, gate: Tensor, up: Tensor) -> Path:
    """How the gradient `[M, D]` goes through down_weight `[D, N]` to gate and up `[M, N]`. Hopper's kernel is for
    operands that the copy engine can read and long products, whose tiles, which do not share D, keep half of the GPU at
    work."""
    if not (grad.is_cuda or INTERPRET):
        return "torch"
    (d, n), m = down_weight.shape, grad.shape[0]
    if INTERPRET or not tuning.hopper(grad.device) or gate.numel() == 0 or d < LEAST or n % 16:
        return "product"
    enough = 2 * launch.cdiv(m, 128) * launch.cdiv(n, TILE) >= tuning.programs(grad.device)
    return "hopper" if enough and all(map(readable, (grad, down_weight, gate, up))) else "product"


def path_of(grad: Tensor, down_weight: Tensor, gate: Tensor, up: Tensor, activation: str) -> str:
    """The path of a call of the operator, as a profiler shows it."""
    return f"gemm.gated_mlp_bwd/{choose_path(grad, down_weight, gate, up)}"
