"""How `blocksparse.matmul` goes about it on a GPU, chosen by what the host knows."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

from gossamer._core import tuning

Path = Literal["blocks", "dense"]
SPEED = {16: 0.083, 32: 0.26}
"""How fast small blocks are multiplied, of the rate of dense products in `tuning.rates`: on one H200, n 4,096, four
matrices, bfloat16, 75% of both operands' blocks and half of the result's, 54 and 169 TFLOP/s; in TF32 not measured, and
taken to be the same shares. A tile has but 16 or 32 rows, for two block rows rarely agree on their columns."""
ABSENT, PRESENT = 0.5, 0.31
"""What one matrix with blocks of 64 costs beside two dense ones: to multiply all blocks, the dense product's time and
this share of it more for what is absent; to multiply present ones alone, their share of that time at this rate. One
H100, n 8,192, four matrices, bfloat16, in dense products: of half the blocks all take 1.16 to 1.32, present ones 1.57,
and made dense it is 1.06; of a quarter present ones take 0.88."""
LARGE = 2**40
"""Z M K N from which such a matrix may be made dense: what was measured is twice as many, smaller ones were not."""
MARGIN = 0.9
LAUNCHES = 10e-6
"""Converting must save a tenth, and costs three or four kernels more, in seconds."""
SMALL = 0.25
"""Tiles of 128 x 256, by multiprocessor, up to which a product of 16 bits is one launch of the kernel for every GPU:
the one for Hopper has another before and behind it."""
LEAST = 0.25
"""A matrix of which less is stored is not made dense, for the memory that it would take."""


def share_of(parts: tuple[Any, ...]) -> float | None:
    """Share of the blocks that a layout, taken apart, has room for; None of a dense matrix."""
    return None if parts[0] is None else min(1.0, parts[1].shape[0] / max(parts[5].shape[0], 1))


def widest_of(share: float | None) -> int:
    """Columns of the widest tile that is of use, by the share of an operand's blocks."""
    return 256 if share is None or share > 0.6 else 128 if share > 0.25 else 64


def is_small(sizes: tuple[int, int, int, int], device: torch.device) -> bool:
    """Whether a product of Z, M, K and N leaves most multiprocessors of Hopper idle."""
    z, m, _, n = sizes
    return z * -(-m // 128) * -(-n // 256) <= SMALL * tuning.programs(device)


def narrowed(width: int, least: int, rows: int, across: int, device: torch.device) -> int:
    """Columns of a tile, halved while tiles in so many rows of so many columns are fewer than multiprocessors."""
    while width >= 2 * least and rows * -(-across // width) < tuning.programs(device):
        width //= 2
    return width


def choose_path(
    sizes: tuple[int, int, int, int],
    block: tuple[int, int, int],
    densities: tuple[float | None, float | None, float | None],
    dtype: torch.dtype,
    device: torch.device,
) -> Path:
    """How the GPU goes about it.

    "blocks" multiplies blocks as they are stored. "dense" makes the operands dense, multiplies these, and takes the
    result's blocks: where blocks of 16 or 32 are so many that this is faster, and where one operand of a large product
    has some half of its blocks of 64 and all else is dense; on the tensor cores of Hopper, of which alone there are
    figures.

    Args:
        sizes: Z, M, K and N of [Z, M, K] @ [Z, K, N].
        block: of blocks along M, K and N; 0 where only dense matrices have that dimension.
        densities: shares of the blocks that a, b and the result have room for; None for a dense one.
    """
    z, m, k, n = sizes
    bm, bk, bn = block if densities[0] is not None or densities[1] is None else (block[2], block[1], block[0])
    speed = SPEED.get(min(bm or 128, bk or 128))
    half = dtype in (torch.float16, torch.bfloat16)
    alone = bm == bk == 64 and densities[2] is None and None in densities[:2] and half and math.prod(sizes) >= LARGE
    least = min(1.0 if density is None else density for density in densities)
    if not (speed or alone) or least < LEAST or not tuning.hopper(device) or not (half or tuning.tf32()):
        return "blocks"
    rates = tuning.rates(device.index or 0)
    whole = 2.0 * math.prod(sizes) / (rates.half if half else rates.tf32)
    a, b, out = (1.0 if density is None else density for density in densities)
    met = b
    if densities[0] is not None and densities[1] is not None:
        met = met_by(b, bn)
    share = a * met * out
    taken = share / speed if speed else min(1 + ABSENT * (1 - share), share / PRESENT)
    # A dense one is neither read nor written again; a result is written, read and written.
    elements = [z * m * k * (1 + a), z * k * n * (1 + b), z * m * n * (1 + 2 * out)]
    moved = sum(0.0 if density is None else size for density, size in zip(densities, elements))
    converted = LAUNCHES + moved * dtype.itemsize / rates.copy
    return "dense" if whole + converted < MARGIN * whole * taken else "blocks"


def met_by(share: float, block: int) -> float:
    """What a tile multiplies of a row of A, of whose columns some are in a layout with a share of the blocks: what any
    of them meets."""
    return 1 - (1 - share) ** max(1, widest_of(share) // block)
