"""The one rule by which products of rows go dense: gathering and the dense product by their times on a GPU.

cuBLAS multiplies a hundred times faster than rows of a weight are gathered, so a few percent of the columns decide.
All times follow from the rates of `tuning`, which were measured once for each family of GPUs, and from LAUNCH and STEP.
"""

from functools import lru_cache
from typing import Literal

from torch import Tensor

from gossamer._core import operator, tuning
from gossamer.rowsparse.dense_product import LAUNCH, dense_seconds

Path = Literal["gather", "dense"]
operator.PATHS["rowsparse.matmul"] = {
    "dense": "rows whose slots promise so many entries that a dense product takes less time: entries are unpacked, and "
    "PyTorch multiplies",
    "gather": "all other calls: each row gathers the weight rows of its entries",
}
operator.PATHS["rowsparse.sampled_matmul"] = {
    "dense": "a pattern with so many entries that a dense product takes less time: PyTorch multiplies, and products "
    "are picked",
    "gather": "all other calls: each entry's two rows are multiplied",
}

FILLED = 0.45
"""The part of its slots that a row which might overflow is taken to hold. Slots of other rows are taken to be full."""
STEP = 1e-6
"""Seconds from one load of a program to the next that depends on it, where few programs run; half of it where many."""
MANY = 8192
"""Programs that fill a GPU twice."""
LEAST = 64 << 20
"""Bytes that unpacked rows may always take."""


def gather_tile(m: int, d: int, element_size: int) -> dict[str, int]:
    """Sizes of the row gather: a warp reads 512 bytes of a row at once, four rows in flight. With few programs the tile
    is tall and narrow instead: more of them, and fewer steps that wait for memory."""
    if not _few(m, d, element_size):
        return {"BLOCK_E": 4, "BLOCK_D": 512 // element_size}
    return {"BLOCK_E": 32 if d * element_size <= 512 or (m <= 64 and d <= 3072) else 16, "BLOCK_D": 128 // element_size}


def _few(m: int, d: int, element_size: int) -> bool:
    """Whether programs of 512 bytes of a row each are too few for a GPU."""
    pieces = -(-d * element_size // 512)
    return (m < 512 or (m < 2048 and pieces == 1)) and m * pieces < MANY


def dense_is_faster(
    m: int, n: int, d: int, nnz: float, weight: Tensor, *, packed: bool = True, ahead: float = 1.0, launches: int = 1,
    zeros: bool = True,
) -> bool:  # fmt: skip
    """Whether the dense product of rows `[m, n]` with nnz entries each and a weight `[n, d]` takes less time.

    More entries never turn a yes into a no. Rows that are `packed` have to be unpacked for the dense product; other
    rows have to be looked through for gathering. `ahead`: how many times as long gathering may be taken to last, for
    callers that do not know nnz. `launches`: of gathering, beside that which looks. `zeros`: as in `dense_seconds`. On
    a CPU only products that hardly take longer than a call are dense.
    """
    if not weight.is_cuda:
        return not packed and m * n * d <= 1 << 24
    if m * n * d == 0:
        return False
    look, dense, entry = _seconds(m, n, d, weight.element_size(), tuning.tf32(), weight.device.index, zeros)
    gather = launches * LAUNCH + nnz * entry
    return look + dense < ahead * gather if packed else dense < ahead * (look + gather)


def break_even(m: int, n: int, d: int, weight: Tensor, share: float = 0.4) -> int:
    """Entries of a row that take `share` of the time of a dense product, where each row has as many; on a CPU, entries
    up to which gathering is ahead."""
    if weight.device.type != "cuda":
        # Measured on x86, in nanoseconds: a dense product takes 0.0125 a multiplication and 0.22 a weight, an entry
        # takes 40 to find and 0.2 a column to gather.
        return min(n, max(32, int(n * d * max(0.0125, 0.22 / max(m, 1)) / (40 + 0.2 * d))))
    _, dense, entry = _seconds(m, n, d, weight.element_size(), tuning.tf32(), weight.device.index, False)
    return max(32, min(n, int(share * dense / entry)))


@lru_cache(4096)
def _seconds(m: int, n: int, d: int, size: int, tf32: bool, index: int, zeros: bool) -> tuple[float, float, float]:
    """(seconds to write or look through `[m, n]`, of the dense product, of one more entry in each row)."""
    r, tile, few = tuning.rates(index), gather_tile(m, d, size), _few(m, d, size)
    # A part of many gathered rows comes out of the L1.
    rate, step = r.gather * (0.63 if few else 1.4), STEP * (1 if few else 0.5) / tile["BLOCK_E"]
    entry = max(m * -(-d // tile["BLOCK_D"]) * tile["BLOCK_D"] * size / rate, step)
    return LAUNCH + m * n * size / (0.7 * r.copy), dense_seconds(m, n, d, size, tf32, index, zeros), entry


def choose_path(m: int, room: int, may_overflow: bool, weight: Tensor, zeros: bool = True) -> Path:
    """How m rows that share `room` slots are multiplied with a weight `[N, D]`, or are the pattern of a product with
    it: "dense" unpacks rows before their product, which are mostly `zeros`, and picks from the product of a pattern."""
    (n, d), nnz = weight.shape, room / max(m, 1) * (FILLED if may_overflow else 1)
    return "dense" if dense_is_faster(m, n, d, nnz, weight, zeros=zeros) else "gather"


def rows_at_once(m: int, n: int, size: int, *operands: Tensor) -> int:
    """How many of m dense rows of n columns exist at a time: as many bytes as the operands have in all, or `LEAST`."""
    limit = max(LEAST, sum(t.numel() * t.element_size() for t in operands))
    return m if m * n * size <= limit else max(128, limit // (n * size) // 128 * 128)
