"""The path of a block-sparse product on a GPU, chosen by what the host knows. Figures of measurements stand in
`docs/design/blocksparse.md`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gossamer._core import tuning
from gossamer.blocksparse.lists import Lists
from gossamer.blocksparse.records import BlocksparseMatmul

Path = Literal["dense", "hopper", "blocks"]
PATHS: dict[Path, str] = {
    "dense": "Hopper, and so many blocks of 16 or 32: dense copies and their product",
    "hopper": "16 bits or TF32 on Hopper, blocks of 64 or 128 that divide the matrices, more than a few tiles, and "
    "pairs of blocks that mostly meet: one kernel that the copy engine feeds",
    "blocks": "all other calls: tiles that walk lists of blocks, or of the pairs that meet",
}
SPEED = {16: 0.083, 32: 0.26}
"""How fast small blocks are multiplied, of the rate of dense products in `tuning.rates`. A tile has but 16 or 32 rows,
for two block rows rarely agree on their columns."""
LARGE = 2**40
"""Z M K N from which tiles of 64 rows wait for memory on Hopper's kernel as they do on the one for every GPU, which
skips as many blocks with less to wait for; four matrices of n 4,096 are fewer, of n 8,192 more."""
MARGIN, LAUNCHES = 0.9, 10e-6
"""Converting must save a tenth, and costs three or four kernels more, in seconds."""
LEAST = 0.25
"""A matrix of which less is stored is not made dense, for the memory that it would take."""
SMALL = 0.25
"""Tiles of 128 x 256, by multiprocessor, up to which the kernel for every GPU multiplies 16 bits: in narrower tiles,
which keep more multiprocessors at work."""
MOST = 0.95
"""Share of the blocks above which absent ones are multiplied."""
PAIRED = 0.5
"""Share of all products of blocks up to which looking for the pairs of two block-sparse operands is faster."""
LISTED = {64: 0.55, 128: 0.95}
"""How fast present blocks of a size are multiplied, of the speed with which all are."""
STRIPPED = {64: 0.51, 128: 0.95}
"""The same of strips of present blocks of the result, wave for wave of programs."""
PRESENT, FILLING = 1.7, 0.75
"""The time that the kernel for every GPU takes with blocks of the result of a dense right operand, of the time with
which Hopper's multiplies every block: for each share of the products, and for one wave of programs."""
BAND = {64: 64, 128: 32}
"""Rows of tiles in a band, 4,096 rows: the more of them share columns of B, the less often these are read again."""
LEAST_BAND = 16
ACROSS = 256
"""Columns of a tile."""


@dataclass(frozen=True)
class Walk:
    """How tiles go about a product on Hopper: rows of a tile; whether steps follow A's list; whether tiles are strips
    of present blocks of the result; and rows of tiles in a band."""

    tile_m: int
    listed: bool
    strips: bool
    band: int = LEAST_BAND


class Plan(NamedTuple):
    """The path of a product; whether it is computed transposed, so that its list is on the left; whether operands of
    TF32 are copied so that neighbours lie along K; whether Hopper's tiles are faster; and Hopper's walk."""

    path: Path
    turned: bool
    by_inner: bool
    wide: bool
    walk: Walk | None = None


class Turned(NamedTuple):
    """A product as kernels compute it: with a block-sparse matrix on the left if there is one.

    `trans` says of A, B and the result whether they are stored transposed, and of the blocks of A and B in themselves.
    """

    a: Tensor
    b: Tensor
    lists: list[Lists | None]
    sizes: tuple[int, ...]
    block: tuple[int, ...]
    trans: tuple[bool, bool, bool, bool, bool]


def choose_path(call: BlocksparseMatmul) -> Path:
    """One of `PATHS`."""
    return plan_of(call).path


def plan_of(call: BlocksparseMatmul) -> Plan:
    """How a GPU goes about a product."""
    a, of_all, sizes, block = call.a, call.lists(), call.sizes, call.block
    densities = [None if lists is None else lists.density for lists in of_all]
    of_a, of_b, of_out = densities
    turned = of_a is None and of_b is not None
    if dense_is_faster(sizes, block, densities, a.dtype, a.device):
        return Plan("dense", turned, False, False)
    if turned:
        of_a, of_b, sizes, block = of_b, of_a, (sizes[0], *sizes[:0:-1]), block[::-1]
    half, tf32 = a.element_size() == 2, tuning.dot_precision(a, sizes[2])["PRECISION"]
    # Small ones of float32 would wait for tiles that the compiler turns around.
    hopper = tuning.hopper(a.device) and not (half and is_small(sizes, a.device))
    by_inner, cores = hopper and tf32.startswith("tf32"), half or tf32 == "tf32"
    wide = cores and tuning.hopper(a.device)
    walk = None
    if hopper and cores and fits(call, block, sizes):
        walk = choose_walk(block, (of_a, of_b, of_out), sizes, a.element_size(), tuning.programs(a.device))
    return Plan("blocks" if walk is None else "hopper", turned, by_inner, wide, walk)


def fits(call: BlocksparseMatmul, block: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Whether Hopper's copy engine can move the matrices: in whole boxes of 64, from addresses of 16 bytes, not too
    many rows. Values beyond a matrix that blocks do not divide would be multiplied, too."""
    if 0 in sizes or any(b not in (0, 64, 128) or size % (b or 64) for b, size in zip(block, sizes[1:])):
        return False
    stored = [lists.form.capacity * max(call.block) for lists in call.lists() if lists is not None]
    return (call.a.data_ptr() | call.b.data_ptr()) % 16 == 0 and max(*stored, sizes[0] * max(sizes[1:])) < 2**31


def widest_of(share: float | None) -> int:
    """Columns of the widest tile that is of use, by the share of an operand's blocks."""
    return 256 if share is None or share > 0.6 else 128 if share > 0.25 else 64


def is_small(sizes: tuple[int, ...], device: torch.device) -> bool:
    """Whether a product of Z, M, K and N leaves most multiprocessors of Hopper idle."""
    z, m, _, n = sizes
    return z * -(-m // 128) * -(-n // 256) <= SMALL * tuning.programs(device)


def narrowed(width: int, least: int, rows: int, across: int, device: torch.device) -> int:
    """Columns of a tile, halved while tiles in so many rows of so many columns are fewer than multiprocessors."""
    while width >= 2 * least and rows * -(-across // width) < tuning.programs(device):
        width //= 2
    return width


def dense_is_faster(
    sizes: tuple[int, ...],
    block: tuple[int, ...],
    densities: list[float | None],
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether to make the operands dense, multiply these, and take the result's blocks: on the tensor cores of Hopper,
    of which alone there are figures.

    Args:
        sizes: Z, M, K and N of [Z, M, K] @ [Z, K, N].
        block: of blocks along M, K and N; 0 where only dense matrices have that dimension.
        densities: shares of the blocks that a, b and the result have room for; None for a dense one.
    """
    z, m, k, n = sizes
    bm, bk, bn = block if densities[0] is not None or densities[1] is None else block[::-1]
    speed = SPEED.get(min(bm or 128, bk or 128))
    half = dtype in (torch.float16, torch.bfloat16)
    least = min(1.0 if density is None else density for density in densities)
    if speed is None or least < LEAST or not tuning.hopper(device) or not (half or tuning.tf32()):
        return False
    rates = tuning.rates(device.index or 0)
    whole = 2.0 * math.prod(sizes) / (rates.half if half else rates.tf32)
    a, b, out = (1.0 if density is None else density for density in densities)
    met = b if None in densities[:2] else met_by(b, bn)
    # A dense one is neither read nor written again; a result is written, read and written.
    elements = [z * m * k * (1 + a), z * k * n * (1 + b), z * m * n * (1 + 2 * out)]
    moved = sum(0.0 if density is None else size for density, size in zip(densities, elements))
    converted = LAUNCHES + moved * dtype.itemsize / rates.copy
    return whole + converted < MARGIN * whole * a * met * out / speed


def met_by(share: float, block: int) -> float:
    """The share of a row of A that a tile multiplies, of whose columns some are in a layout with a share of the blocks:
    of blocks that any of them meets."""
    return 1 - (1 - share) ** max(1, widest_of(share) // block)


def choose_walk(
    block: tuple[int, ...],
    densities: tuple[float | None, float | None, float | None],
    sizes: tuple[int, ...],
    size: int,
    programs: int,
) -> Walk | None:
    """Every block, absent or not, in tiles of 128 x 256; or present ones alone, in tiles of a block row, which reach
    less of the GPU's speed, and may need another wave of programs where there are few tiles. None where the kernel of
    `_triton` is faster: for pairs of two block-sparse operands, for present blocks of 64 of large products in 16 bits,
    and for most blocks of the result of a dense right operand. `size` is the bytes of an element, `programs` the number
    that the GPU holds at once."""
    of_a, of_b, of_out = densities
    a, out = 1.0 if of_a is None else of_a, 1.0 if of_out is None else of_out
    present = a * out
    if of_b is not None and min(present, of_b) < MOST:
        met = of_b if of_a is None else met_by(of_b, block[2])
        # Where all blocks of B meet, present ones of A alone are as few.
        if present * met < PAIRED and met < MOST:
            return None
    every = Walk(128, False, False)
    if present > LISTED[block[0]]:
        return every
    z, m, _, n = sizes
    down, across = -(-m // block[0]), -(-n // ACROSS)
    all_waves = -(-z * -(-m // 128) * across // programs)
    share = a * block[0] / 128
    if of_out is None:
        waves = -(-z * down * across // programs) * share / LISTED[block[0]]
        if waves < all_waves and block[0] == 64 and size == 2 and math.prod(sizes) >= LARGE:
            return None
        return Walk(block[0], True, False, BAND[block[0]]) if waves < all_waves else every
    # Strips of blocks of 128 are faster in 16 bits, where there are many waves.
    if of_b is None and not (block[0] == 128 and size == 2 and all_waves >= 8):
        return None if PRESENT * present + FILLING / all_waves < 1 else every
    # A row of blocks ends within a strip, half a strip before its end in the mean.
    width = ACROSS // block[2]
    tiles = z * down * min(float(across), out * -(-n // block[2]) / width + 0.5 - 0.5 / width)
    waves = -(-tiles // programs) * share / STRIPPED[block[0]]
    return Walk(block[0], of_a is not None, True, BAND[block[0]]) if waves < all_waves else every


def widest_for(lists: Lists | None, across: int, bn: int) -> int:
    """How wide a tile may be of use, as far as the room of layouts tells: not wider than a row of the result, and less
    where blocks of B are absent, for a tile multiplies with the blocks that any of its columns meets."""
    widest = 256 if lists is None else min(widest_of(lists.density), 128 if bn == 128 else 256)
    return min(across, max(bn, widest))
