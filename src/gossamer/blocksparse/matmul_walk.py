"""How `blocksparse.matmul` walks the blocks on Hopper, chosen by what the host knows."""

from dataclasses import dataclass
from typing import Any

from gossamer.blocksparse.matmul_path import met_by, share_of

MOST = 0.95
"""Share of the blocks above which absent ones are multiplied."""
PAIRED = {64: 0.5, 128: 0.5}
"""Shares of all products of blocks up to which looking for the pairs of two block-sparse operands is faster: one H200,
four matrices, bfloat16. At n 4,096, of blocks of 64 pairs take 728 and 317 us at densities of 0.75 and 0.5 of all three
matrices, and every block 774; of blocks of 128 503, 226 and 112 at 0.75, 0.5 and 0.25, and present ones of A alone 521,
264 and 99. At n 8,192, of blocks of 64 at 0.75 pairs take 7.6 ms and every block 6.2; of blocks of 128 pairs 5.1 and
present ones of A 4.2; of blocks of 64, three quarters of both operands' and a quarter of the result's, pairs 2.6 and
present ones of A 2.3."""
LISTED = {64: 0.55, 128: 0.95}
"""How fast present blocks of a size are multiplied, of the speed with which all are: H100, n 1,024 to 8,192, bfloat16,
one operand block-sparse. With half of its blocks of 64, present ones take 0.80 to 0.89 of the time of all; with three
quarters, 0.97 to 1.27."""
STRIPPED = {64: 0.51, 128: 0.95}
"""The same of strips of present blocks of the result, wave for wave of programs. With blocks of 64 it is 0.44 to 0.53
(H100, four matrices, bfloat16, n 1,024 to 8,192). With this one strips are taken where they were faster: of half and a
quarter of the result at n 2,048 (102 us for 105, 69 for 104), not at n 1,024 (26 and 18 us for 17)."""
MAKING = 5
"""Steps of a tile of 128 rows which the list of strips costs, a launch of its own."""
BAND = {64: 64, 128: 32}
"""Block rows in a band, 4,096 rows: the more of them share columns of B, the less often these are read again. H100, n
8,192, four matrices, bfloat16: blocks of 64 take 5.52 ms, in bands of 32 5.57 and of 16 5.70 (strips, half of the
result); 4.57, 4.87 and 5.14 (a quarter of an operand, all else dense); of 128 2.61, in bands of 16 3.01, of 8 3.10.
Strips of blocks of 128 were not measured."""
LEAST_BAND = 16
ACROSS, DEEP = 256, 128
"""Columns of a tile, and bytes of a step along K."""
Parts = tuple[Any, ...]
"""A layout's (row offsets, column indices, row indices, column offsets, order of columns, positions), or six None."""


@dataclass(frozen=True)
class Walk:
    """How tiles go about it: rows of a tile; whether steps follow A's list; whether tiles are strips of present blocks
    of the result; rows of tiles in a band; and the depth of the ring."""

    tile_m: int
    listed: bool
    strips: bool
    band: int = LEAST_BAND
    stages: int = 4


def choose_walk(
    block: tuple[int, int, int],
    of_a: Parts,
    of_b: Parts,
    of_out: Parts,
    sizes: tuple[int, int, int, int],
    size: int,
    programs: int,
) -> Walk | None:
    """Every block, absent or not, in tiles of 128 x 256; or present ones alone, in tiles of a block row, which reach
    less of the GPU's speed, and may need another wave of programs where there are few tiles. None where a kernel that
    looks for the pairs of two block-sparse operands is faster, that of `_triton`. Sizes are Z, M, K and N, `size` the
    bytes of an element, programs what the GPU holds at once."""
    present = density(of_a) * density(of_out)
    if of_b[0] is not None and min(present, density(of_b)) < MOST:
        met = met_by(density(of_b), block[2]) if of_a[0] is not None else density(of_b)
        # Where all blocks of B meet, present ones of A alone are as few.
        if present * met < PAIRED[block[0]] and met < MOST:
            return None
    every = Walk(128, False, False)
    if present > LISTED[block[0]]:
        return every
    z, m, k, n = sizes
    down, across = -(-m // block[0]), -(-n // ACROSS)
    all_waves = -(-z * -(-m // 128) * across // programs)
    share = density(of_a) * block[0] / 128
    if of_out[0] is None:
        waves = -(-z * down * across // programs) * share / LISTED[block[0]]
        return Walk(block[0], True, False, BAND[block[0]]) if waves < all_waves else every
    # A row of blocks ends within a strip, half a strip before its end in the mean.
    width = ACROSS // block[2]
    tiles = z * down * min(float(across), density(of_out) * -(-n // block[2]) / width + 0.5 - 0.5 / width)
    waves = -(-tiles // programs) * share / STRIPPED[block[0]] + MAKING * DEEP / (k * size)
    return Walk(block[0], of_a[0] is not None, True, band_of(block[0], down)) if waves < all_waves else every


def band_of(block: int, rows: int) -> int:
    """Block rows in a band of strips: a power of 2, and none beyond a matrix, for the next has other columns of B."""
    band = BAND[block]
    while band > max(rows, LEAST_BAND):
        band //= 2
    return band


def density(parts: Parts) -> float:
    """Share of the blocks that there is room for, 1 for a dense matrix."""
    share = share_of(parts)
    return 1.0 if share is None else share


def rows_of(parts: Parts, by_columns: bool) -> Parts:
    """(offsets, order, index, positions) of a layout's rows, or of its columns."""
    row_offsets, col_indices, row_indices, col_offsets, transpose_order, positions = parts
    if by_columns:
        return col_offsets, transpose_order, row_indices, positions
    return row_offsets, None, col_indices, positions
