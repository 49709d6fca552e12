"""How `gemm.linear_pack` goes about it, chosen by what the host knows."""

from typing import Literal

from torch import Tensor

from gossamer._core import launch, tuning
from gossamer._core.ops import INTERPRET
from gossamer.gemm.linear_glu_path import readable
from gossamer.gemm.records import LinearPack
from gossamer.rowsparse.dense_product import dense_seconds

Path = Literal["hopper", "blocks"]
PATHS: dict[Path, str] = {
    "hopper": "more than 32 rows of 16 bits on Hopper, tiles of 256, and a model of both that says so: the product "
    "packs its own result",
    "blocks": "all other calls: products of the library, block by block of rows, each packed from the L2",
}
TILE = 256
"""Columns of a tile that Hopper's kernel packs."""


def choose_path(call: LinearPack) -> Path:
    """How x `[M, K]` goes through a weight `[N, K]` into tiles, by the rules of `PATHS`."""
    x, weight, tile, slots = call.x, call.weight, call.tile, call.slots
    return "hopper" if not library_is_faster(x, weight) and packs(x, weight, tile, slots) else "blocks"


def packs(x: Tensor, weight: Tensor, tile: int, slots: int) -> bool:
    """Whether Hopper's kernel can write the tiles, and read x by rows and weight by rows or columns."""
    if INTERPRET or not tuning.hopper(x.device) or tile != TILE or slots & (slots - 1):
        return False
    return readable(x) and readable(weight if weight.stride(1) == 1 else weight.t())


FEW = 32
"""Rows up to which a tile of 128 is not worth its while."""
START, STEP, PACK = 9e-6, 0.75e-6, 5e-6
"""Seconds that Hopper's kernel takes: with the sum of its counts, whatever there is to do; for 64 of K of a tile a
program; and at least for a tile, to pack it. A fit to seven random shapes on an H200 (`python -m benchmarks sweep`)."""


def library_is_faster(x: Tensor, weight: Tensor) -> bool:
    """Whether cuBLAS multiplies and another kernel packs, where Hopper's could do both: of few rows most of its tiles
    is empty, and it does not share K among programs."""
    m, (n, k) = x.shape[0], weight.shape
    if INTERPRET or x.element_size() != 2 or not tuning.hopper(x.device) or m <= FEW:
        return True
    if n % 8:
        # cuBLAS would write such rows one number at a time.
        return False
    waves = launch.cdiv(launch.cdiv(m, 128) * launch.cdiv(n, 256), tuning.programs(x.device))
    fused = START + waves * max(PACK, STEP * launch.cdiv(k, 64))
    moved = 2 * m * n * x.element_size() / (0.5 * tuning.rates(x.device.index).copy)
    return dense_seconds(m, k, n, x.element_size(), False, x.device.index) + 4e-6 + moved < fused
