"""The path of a scatter on a GPU, chosen by what the host knows."""

from __future__ import annotations

from typing import Literal

import torch

from gossamer._core import tuning
from gossamer._core.ops import INTERPRET
from gossamer.blocksparse.records import BlocksparseScatterReduce

Path = Literal["matrices", "shared", "transposed", "lines"]
PATHS: dict[Path, str] = {
    "matrices": "indices along a leading dimension: a program walks the matrices that follow each other",
    "shared": "floats on Hopper along rows of up to 16,384 columns, and a reduction: results of rows in shared memory",
    "transposed": "floats on Hopper along columns, with entries enough to pay: blocks are transposed for `shared`",
    "lines": "all other calls: a walk of rows or columns with results in global memory",
}
LONGEST = 16384
"""Columns of a row at most whose result stands in shared memory: three rows share a multiprocessor then."""
LEAST = 3 << 21
"""Entries from which on "transposed" is taken, whose further launches cost the host more. On an H100 eager calls lost
by it with 2^22 entries or fewer (four matrices of n 1,024: 203 us for 97 with half of the blocks missing), and won with
6.4 million (n 2,048, five of eight missing: 211 us for 379). CUDA graphs won with all."""


def choose_path(call: BlocksparseScatterReduce) -> Path:
    """One of `PATHS`."""
    capacity, src, device = call.form[7], None if call.src is None else call.src.dtype, call.index.device
    elements = capacity * call.index[0].numel() * (1 if call.given is None else 2)
    size = call.form[5], call.form[6]
    return path_for(call.axis[0], size, call.reduce, src, call.dtype, device, call.index.numel(), elements)


def path_for(
    axis: int,
    size: tuple[int, int],
    reduce: str,
    src: torch.dtype | None,
    out: torch.dtype,
    device: torch.device,
    entries: int,
    elements: int,
) -> Path:
    """The path of a scatter along an axis into matrices of a size; there is room for so many `entries` in the indices,
    and `elements` that are read and written as input and result.

    "matrices" walks matrices that follow each other, "lines" rows or columns, whose results it keeps in global memory.
    "shared" keeps the results of rows in shared memory; there entries of a row are not joined one after the other, so
    that it cannot tell which is the last. "transposed" transposes the blocks of the operands and of the result.
    """
    if axis == 0:
        return "matrices"
    floats = src is not None and src.is_floating_point and out.is_floating_point
    fits = 0 < size[axis - 1] <= LONGEST and reduce != "last"
    if src is None or not (floats and fits and not INTERPRET and tuning.hopper(device)):
        return "lines"
    if axis == 2:
        return "shared"
    return "transposed" if transposing_pays(size[0], entries, elements, src.itemsize, out.itemsize) else "lines"


def transposing_pays(rows: int, entries: int, elements: int, src: int, out: int) -> bool:
    """A model of times in picoseconds, from an H100 with blocks of 64 and n 1,024 to 8,192: a walk of columns takes
    longer for each entry the longer they are, one of rows and the moves between do not. 2.7 bytes are moved in one."""
    walk = entries * (30 + rows / 90)
    moved = entries * (8 + 4 + 2 * src) + elements * 2 * out
    return entries >= LEAST and entries * 5 + elements * 1.5 + moved / 2.7 < walk
