"""The path of dense latents through `sae.decode`, chosen by sizes that the host knows."""

from contextlib import AbstractContextManager
from typing import Any, Literal

from torch import Tensor

from gossamer._core import operator, tuning
from gossamer._core.ops import INTERPRET
from gossamer._core.ranges import span
from gossamer.rowsparse.dense_product import START, dense_seconds
from gossamer.rowsparse.matmul_path import entry_seconds, step_seconds
from gossamer.sae.records import SaeDecode

Path = Literal["torch", "dense", "lists", "one_launch"]
Listed = Literal["lists", "one_launch"]
PATHS: dict[Listed, str] = {
    "one_launch": "few rows, and no gradient: one launch lists entries and multiplies them",
    "lists": "all other calls: entries are listed, and go through `rowsparse.matmul`",
}
operator.PATHS["sae.decode"] = {
    "dense": "a plain product that takes hardly longer than a launch, or less than twice the time to look through the "
    "latents: PyTorch's product",
}


def choose_path(m: int, n: int, d: int, weight: Tensor, free: bool = True, keep: bool = False) -> Path:
    """How latents `[m, n]` go through a weight `[n, d]`; the table in docs/sae.md has the same rules.

    Args:
        free: whether the plain product may be taken: neither slots nor another dtype are asked for.
        keep: whether the lists of entries have to be kept for a backward pass.
    """
    if free and dense_is_faster(m, n, d, weight):
        return "dense"
    if not (weight.is_cuda or INTERPRET):
        return "torch"
    return "one_launch" if not keep and one_launch(m, n) else "lists"


def named(path: str) -> AbstractContextManager[Any]:
    """A profiler's range that names the path."""
    return span(f"gossamer::sae.decode/{path}")


def path_of(call: SaeDecode) -> Listed:
    """The path of a call of the operator, to which no plain product is left."""
    return "one_launch" if one_launch(*call.acts.shape) else "lists"


def break_even(m: int, n: int, d: int, weight: Tensor) -> int:
    """Entries per row up to which gathering beats the dense product; rows beyond go through dense tiles.

    Half of the modelled break-even, so that a batch in which only some rows are dense stays ahead of dense as well.
    """
    if weight.device.type != "cuda":
        # Measured on x86, in nanoseconds: a dense product takes 0.0125 a multiplication and 0.22 a weight, an entry
        # takes 40 to find and 0.2 a column to gather.
        return min(n, max(32, int(n * d * max(0.0125, 0.22 / max(m, 1)) / (40 + 0.2 * d))))
    r, size = tuning.rates(weight.device.index), weight.element_size()
    flops = r.half if size == 2 else r.tf32 if tuning.tf32() else r.ieee
    dense = max(2.0 * m * n * d / flops, n * d * size / r.copy)
    per_entry = max(m * d * size / r.gather, step_seconds(m, d, size))
    return max(32, min(n, int(0.5 * dense / per_entry)))


def dense_is_faster(m: int, n: int, d: int, weight: Tensor) -> bool:
    """Whether the plain product is taken, whatever the density is: where it takes hardly longer than a launch, or less
    than twice the time to look through the latents and to gather a few.

    Two launches of ours take some 20 us of the host, a plain product 10. A single row is a GEMV at memory speed, a few
    rows in float32 are not. The gain is less than a factor of 2 there, and ten can be lost; of a few
    columns in float32 see `SHORT`.
    """
    if weight.device.type != "cuda":
        return m * n * d <= 1 << 24
    size, index = weight.element_size(), weight.device.index
    megabytes = 64 if m == 1 else 16 if size == 4 and not tuning.tf32() else 24
    if n * d * size <= megabytes << 20 and m <= 64:
        return True
    starts = 1 if one_launch(m, n) else 2
    scan = starts * START + m * n * size / (0.75 * tuning.rates(index).copy) + 45 * entry_seconds(m, d, size, index)
    return dense_seconds(m, n, d, size, tuning.tf32(), index) < (SHORT if size == 4 and d <= 256 else 2) * scan


SHORT = 3.5
"""How many times as long the plain product of few float32 columns may take: dense tiles take up to four times that, at
1,022 rows of 23,780 latents by 69 columns 560 us on an H200 for 132."""


def one_launch(m: int, n: int) -> bool:
    """Whether scan and gather share a launch: few rows, where a launch costs as much as the work."""
    return m < 512 and n > 2048
