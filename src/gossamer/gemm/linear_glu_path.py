"""How `gemm.linear_glu` goes about it, chosen by what the host knows."""

from typing import Literal

import torch
from torch import Tensor

from gossamer._core import tuning
from gossamer._core.ops import INTERPRET
from gossamer.gemm.records import LinearGlu

Path = Literal["row", "tiles", "hopper", "products"]
PATHS: dict[Path, str] = {
    "row": "a single row, K a multiple of 16, and no gradient: a program for each column reads its two rows of weights",
    "tiles": "up to 64 rows of 16 bits, and on Hopper up to 128 where tiles of 64 columns take from half a "
    "turn to one turn, K a multiple of 16, and no gradient: a program for each 32 or 64 columns",
    "hopper": "16 bits on Hopper, and a result that fills two thirds of the turns that its tiles of 128 by 128 take: "
    "one kernel that the copy engine feeds",
    "products": "all other calls: two products of the library, and a kernel that gates",
}
FEW = 64
"""Rows up to which the time goes into reading the weights."""
TILE = 128
"""Rows and columns of a tile of Hopper's kernel."""
WORK = 2e10
"""Multiplications of each product from which passes over its result count."""


def choose_path(call: LinearGlu) -> Path:
    """How x `[M, K]` goes through the weights `[N, K]`, by the rules of `PATHS`."""
    x, gate_weight, up_weight, *_, keep = call
    (m, k), n, alone = x.shape, gate_weight.shape[0] // (2 if up_weight is None else 1), not keep
    if up_weight is None:
        gate_weight, up_weight = gate_weight.chunk(2, 0)
    # Of other lengths Triton reads one number at a time, and cuBLAS does not.
    wide = INTERPRET or (k | gate_weight.stride(0) | up_weight.stride(0)) % 16 == 0
    alone = alone and wide
    if alone and m == 1 and gate_weight.stride(1) == up_weight.stride(1) == 1:
        return "row"
    by_rows = x.stride(1) == gate_weight.stride(1) == up_weight.stride(1) == 1
    aligned = by_rows and all(map(readable, (x, gate_weight, up_weight)))
    if alone and ((INTERPRET and by_rows and m <= FEW) or (aligned and works(m, n, x.device))):
        return "tiles"
    hopper = not INTERPRET and aligned and n % 8 == 0 and tuning.hopper(x.device) and fills(m, n, x.device)
    return "hopper" if hopper else "products"


def works(m: int, n: int, device: torch.device) -> bool:
    """Whether tiles that hold all rows and 32 columns each keep at least half of a GPU at work. From 65 rows on they
    have 64 columns, and Hopper's own kernel is faster where they take more than one turn."""
    programs = tuning.programs(device)
    if m <= FEW:
        return 2 * -(-n // 32) >= programs
    return m <= TILE and tuning.hopper(device) and programs <= 2 * -(-n // 64) <= 2 * programs


def fills(m: int, n: int, device: torch.device) -> bool:
    """Whether a result `[m, n]` leaves little of Hopper's kernel idle in the turns that its tiles take. The kernel then
    takes 0.83 to 1.03 of the time of the library's products and of gating them, and 0.95 to 1.3 of it otherwise."""
    programs = tuning.programs(device)
    turns = -(-(-(-m // TILE) * -(-n // TILE)) // programs)
    return 3 * m * n >= 2 * turns * programs * TILE * TILE


def gains(x: Tensor, gate_weight: Tensor, up_weight: Tensor | None) -> bool:
    """Whether an eager call without gradients for x `[..., K]` takes less time than PyTorch's own operators: where
    passes over the results of its products count. Smaller ones wait for the host, and save it nothing in a model."""
    n = gate_weight.shape[0] // (2 if up_weight is None else 1)
    return INTERPRET or (x.is_cuda and x.numel() * n >= WORK)


def readable(operand: Tensor) -> bool:
    """Whether the copy engine of Hopper can read an operand: 16 bits, rows contiguous and on 16 bytes."""
    stride, step = operand.stride()
    if operand.element_size() != 2 or operand.shape[1] == 0:
        return False
    return step == 1 and stride >= operand.shape[1] and (operand.data_ptr() | 2 * stride) % 16 == 0
