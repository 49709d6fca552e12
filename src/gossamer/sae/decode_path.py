"""The path of dense latents through `sae.decode`, chosen by sizes that the host knows."""

from contextlib import AbstractContextManager
from typing import Any, Literal

from torch import Tensor

from gossamer._core import operator
from gossamer._core.ops import INTERPRET
from gossamer._core.ranges import span
from gossamer.rowsparse.matmul_path import break_even, dense_is_faster
from gossamer.sae.records import SaeDecode

Path = Literal["torch", "dense", "lists", "one_launch"]
Listed = Literal["lists", "one_launch"]
PATHS: dict[Listed, str] = {
    "one_launch": "few rows, and no gradient: one launch lists entries and multiplies them",
    "lists": "all other calls: entries are listed, and go through `rowsparse.matmul`",
}
operator.PATHS["sae.decode"] = {
    "dense": "a plain product that takes less than twice the time to look through the latents and to gather a few: "
    "PyTorch's product",
}
FEW = 45
"""Entries that a row of dense latents is taken to have, whose number the host does not know."""

SHARE, MOST = 1.5, 4096
"""Slots of a row of dense latents, by the time of a dense product, and at most: dense tiles of rows that overflow take
twice the time of one, so that more entries than take as long are gathered as well."""


def choose_path(m: int, n: int, d: int, weight: Tensor, free: bool = True, keep: bool = False) -> Path:
    """How latents `[m, n]` go through a weight `[n, d]`; the table in docs/sae.md has the same rules.

    Args:
        free: whether the plain product may be taken: neither slots nor another dtype are asked for.
        keep: whether the lists of entries have to be kept for a backward pass.
    """
    # A gain of less than 2 is not worth the loss, up to tenfold, where rows have many entries.
    launches = 1 if one_launch(m, n) else 3
    if free and dense_is_faster(m, n, d, FEW, weight, packed=False, ahead=2, launches=launches):
        return "dense"
    if not (weight.is_cuda or INTERPRET):
        return "torch"
    return "one_launch" if not keep and one_launch(m, n) else "lists"


def slots_of(m: int, n: int, d: int, weight: Tensor, keep: bool) -> int:
    """Slots of a row of latents `[m, n]`, whose entries a weight `[n, d]` gathers. A backward pass takes 20 bytes for a
    slot that it keeps (`keep`): a 32nd of the columns, or slots that are few in all, need little beside the latents."""
    slots = min(MOST, break_even(m, n, d, weight, SHARE))
    return min(slots, max(32, n // 32, (1 << 20) // max(m, 1))) if keep and weight.is_cuda else slots


def named(path: str) -> AbstractContextManager[Any]:
    """A profiler's range that names the path."""
    return span(f"gossamer::sae.decode/{path}")


def path_of(call: SaeDecode) -> Listed:
    """The path of a call of the operator, to which no plain product is left."""
    return "one_launch" if one_launch(*call.acts.shape) else "lists"


def one_launch(m: int, n: int) -> bool:
    """Whether scan and gather share a launch: few rows, where a launch costs as much as the work."""
    return m < 512 and n > 2048
