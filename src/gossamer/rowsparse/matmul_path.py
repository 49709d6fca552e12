"""The paths of products of rows: the times of gathering and of the dense product, by sizes that the host knows.

That is the slots that rows have. Where none can overflow, as with TopK or a CSR of the true size, they are taken to be
full; else a third of them. All times are fits to those of an H200 for 170 random shapes (`benchmarks sweep`).
"""

from functools import lru_cache
from typing import Literal

from torch import Tensor

from gossamer._core import operator, tuning
from gossamer.rowsparse.dense_product import dense_seconds

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

FILLED = 0.35
"""The part of its slots that a row which might overflow is taken to hold."""
GATHER, SAMPLED, UNPACK, PICK = 2.7e-6, 6.5e-6, 2.5e-6, 2e-6
"""Seconds that the launches of gathering, of gathering at a pattern, and those beside the dense product take alone."""
PROGRAM = 1e-9
"""Seconds that a program of a gather adds, however little it does."""
STEP = 1e-6
"""Seconds from one load of a program to the next that depends on it, where few programs run; half of it where many."""
MANY = 8192
"""Programs that fill a GPU twice: 473 rows of 4,255 float32 numbers with 4 entries each took an H200 80 us by tall and
narrow tiles, which were 63,000."""
LEAST = 64 << 20
"""Bytes that unpacked rows may always take."""


def gather_tile(m: int, d: int, element_size: int) -> dict[str, int]:
    """Sizes of the row gather: a warp reads 512 bytes of a row at once, four rows in flight.

    With few programs the tile is tall and narrow instead: more of them, and fewer steps that wait for memory. Rows of
    107 and 145 16-bit numbers, 748 and 1,121 at a time, take an H200 138 and 79 us so, and 433 and 122 otherwise.
    """
    if not _few(m, d, element_size):
        return {"BLOCK_E": 4, "BLOCK_D": 512 // element_size}
    return {"BLOCK_E": 32 if d * element_size <= 512 or (m <= 64 and d <= 3072) else 16, "BLOCK_D": 128 // element_size}


def _few(m: int, d: int, element_size: int) -> bool:
    """Whether programs of 512 bytes of a row each are too few for a GPU."""
    pieces = -(-d * element_size // 512)
    return (m < 512 or (m < 2048 and pieces == 1)) and m * pieces < MANY


def step_seconds(m: int, d: int, size: int) -> float:
    """The least time that one more entry in each of m rows adds to a gather: a part of a step."""
    return STEP * (1 if _few(m, d, size) else 0.5) / gather_tile(m, d, size)["BLOCK_E"]


def entry_seconds(m: int, d: int, size: int, index: int) -> float:
    """The time that one more entry in each of m rows adds to a gather of weight rows of d columns, on CUDA device
    `index`."""
    columns = gather_tile(m, d, size)["BLOCK_D"]
    rate = gather_rate(d, size, index) * (0.45 if _few(m, d, size) else 1)
    return max(m * -(-d // columns) * columns * size / rate, step_seconds(m, d, size))


def gather_rate(d: int, size: int, index: int) -> float:
    """Bytes/s of many gathered rows of d columns. A part of them comes out of the L1; 16-bit rows that do not all begin
    on 16 bytes are loaded one number at a time."""
    return tuning.rates(index).gather * (1.4 if size == 4 or d % 8 == 0 else 0.9)


def choose_path(values: Tensor, m: int, may_overflow: bool, weight: Tensor) -> Path:
    """How m rows in buffers of these values times a weight `[N, D]` go: "dense" unpacks them first."""
    if not weight.is_cuda:
        return "gather"
    held = _held(values, m, may_overflow)
    return _product(m, *weight.shape, held, values.element_size(), tuning.tf32(), weight.device.index)


def choose_sampled_path(x: Tensor, indices: Tensor, may_overflow: bool, weight: Tensor) -> Path:
    """How x `[M, D]` @ weight.T goes at the entries of a pattern: "dense" computes all of it, and picks."""
    if not x.is_cuda:
        return "gather"
    (m, d), n = x.shape, weight.shape[0]
    held, slots = _held(indices, m, may_overflow), _held(indices, m, False)
    return _sampled(m, n, d, held, slots, x.element_size(), tuning.tf32(), x.device.index)


def _held(slots: Tensor, m: int, may_overflow: bool) -> float:
    """Entries that a row is taken to hold."""
    each = slots.shape[0] / max(m, 1)
    return each * FILLED if may_overflow else each


@lru_cache(4096)
def _product(m: int, n: int, d: int, held: float, size: int, tf32: bool, index: int) -> Path:
    if m * n * d == 0:
        return "gather"
    copy = tuning.rates(index).copy
    # Zeros are written, and entries among them, which are read.
    unpack = UNPACK + m * n * size / (0.7 * copy) + m * held * (size + 4) / (0.5 * copy) + held / 1024 * STEP
    dense = unpack + dense_seconds(m, n, d, size, tf32, index)
    programs = m * -(-d // gather_tile(m, d, size)["BLOCK_D"])
    gather = GATHER + programs * PROGRAM + held * entry_seconds(m, d, size, index)
    return "dense" if dense < gather else "gather"


@lru_cache(4096)
def _sampled(m: int, n: int, d: int, held: float, slots: float, size: int, tf32: bool, index: int) -> Path:
    if m * n * d == 0:
        return "gather"
    r = tuning.rates(index)
    dense = PICK + dense_seconds(m, d, n, size, tf32, index) + m * slots * (4 + 2 * size) / (0.5 * r.copy)
    width = 256 if size == 2 else 64
    steps = -(-d // width)
    parts = max(1.0, min(held / 8, 64 * r.programs / m))
    rate = gather_rate(d, size, index) * (1 if size == 4 or d % 8 == 0 else 0.75)
    gather = SAMPLED + m * parts * PROGRAM / 2
    gather += max(m * held * steps * width * size / rate, held / 8 / parts * steps * STEP / 2)
    return "dense" if dense < gather else "gather"


def rows_at_once(m: int, n: int, size: int, *operands: Tensor) -> int:
    """How many of m dense rows of n columns exist at a time: as many bytes as the operands have in all, or `LEAST`."""
    limit = max(LEAST, sum(t.numel() * t.element_size() for t in operands))
    return m if m * n * size <= limit else max(128, limit // (n * size) // 128 * 128)
