"""How `gemm.linear_pack` goes about it, chosen by what the host knows."""

from typing import Literal

from torch import Tensor

from gossamer._core import launch, tuning
from gossamer._core.ops import INTERPRET
from gossamer.gemm.linear_glu_path import readable
from gossamer.gemm.records import LinearPack

Path = Literal["hopper", "blocks"]
PATHS: dict[Path, str] = {
    "hopper": "more than 64 rows of 16 bits on Hopper, and a result that fills nine tenths of the turns that its tiles "
    "take: the product packs its own result",
    "blocks": "all other calls: products of the library, block by block of rows, whose entries are listed from the L2",
}
ROWS, TILE, SLOTS = 128, 256, 16
"""Rows and columns of a tile of Hopper's kernel, and the slots that a row of `linear_pack` has in it."""


def choose_path(call: LinearPack) -> Path:
    """How x `[M, K]` goes through a weight `[N, K]` into tiles, by the rules of `PATHS`."""
    x, weight = call.x, call.weight
    return "hopper" if not library_is_faster(x, weight) and packs(x, weight, TILE, SLOTS) else "blocks"


def packs(x: Tensor, weight: Tensor, tile: int, slots: int) -> bool:
    """Whether Hopper's kernel can write the tiles, and read x by rows and weight by rows or columns."""
    if INTERPRET or not tuning.hopper(x.device) or tile != TILE or slots & (slots - 1):
        return False
    return readable(x) and readable(weight if weight.stride(1) == 1 else weight.t())


def library_is_faster(x: Tensor, weight: Tensor) -> bool:
    """Whether cuBLAS multiplies and another kernel lists, where Hopper's could do both: it gains a tenth where all
    programs are at work, but of few rows most of a tile is empty, and it does not share K among programs in its last
    turn. Where N is no multiple of 8, cuBLAS would write rows one number at a time."""
    m, n = x.shape[0], weight.shape[0]
    if INTERPRET or x.element_size() != 2 or not tuning.hopper(x.device) or m <= 64:
        return True
    turns = launch.cdiv(launch.cdiv(m, ROWS) * launch.cdiv(n, TILE), tuning.programs(x.device))
    return n % 8 == 0 and m * n < 0.9 * turns * tuning.programs(x.device) * ROWS * TILE
