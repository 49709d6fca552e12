"""The path of `sae.encode`, chosen by sizes that the host knows."""

import math
from contextlib import AbstractContextManager
from typing import Any, Literal

from torch import Tensor

from gossamer._core import operator, tuning
from gossamer._core.ops import INTERPRET
from gossamer._core.ranges import span

Path = Literal["torch", "list", "bound", "topk", "batch"]
operator.PATHS["sae.encode"] = {
    "list": "ReLU or JumpReLU: a product, and one pass that lists entries",
    "bound": "TopK of many rows on Hopper: the product packs entries above a bound of each row, and the k largest are "
    "selected from them",
    "topk": "all other calls with TopK: a product, and a selection in each row",
    "batch": "BatchTopK: a product, and a selection among all rows",
}


def choose_path(activation: str, m: int, k: int, weight: Tensor) -> Path:
    """How x `[m, d_in]` is encoded with a weight `[d_in, d_sae]`; the table in docs/sae.md has the same rules.
    `activation` is "relu", "jumprelu", "topk" or "batchtopk", and k belongs to the last two."""
    if not (weight.is_cuda or INTERPRET):
        return "torch"
    if activation in ("relu", "jumprelu"):
        return "list"
    if activation == "batchtopk":
        return "batch"
    return "bound" if has_bound(m, k, weight) else "topk"


def row_stride(n: int, weight: Tensor) -> int:
    """Numbers from one row of pre-activations of n columns to the next: on a GPU a multiple of 16, because kernels
    would load the numbers of other rows one by one."""
    return -(-n // 16) * 16 if weight.is_cuda or INTERPRET else n


TOPK_TILE, TOPK_SLOTS = 256, 32
"""Columns of a tile, and slots for its entries, of a TopK encoder that packs tile by tile."""


def topk_run(d_in: int) -> int:
    """How many columns of a tile are a sample: more leave fewer entries to pack, for which a short product has no
    time, and take a larger part of a long one."""
    return 8 if d_in >= 2048 else 16


def topk_rank(k: int, run: int) -> int:
    """Which of a sample's largest numbers has fewer than k of the row's above it in one of some 100,000 rows."""
    expected = k * run / TOPK_TILE
    return math.ceil(expected + 4.6 * math.sqrt(expected) + 3)


def topk_list(k: int, run: int, factor: float = 3) -> int:
    """Room for `factor` times the entries that exceed that number on average. One of some 100,000 rows has more than
    three times as many."""
    return 1 << int(factor * topk_rank(k, run) * TOPK_TILE // run - 1).bit_length()


def has_bound(m: int, k: int, weight: Tensor) -> bool:
    """Whether TopK's product packs numbers above a bound from a sample: 16 bits on Hopper, pre-activations that take
    longer to write than the launches that follow, and on average few entries of a tile beside its slots."""
    if not (
        tuning.hopper(weight.device) and weight.element_size() == 2 and m >= 512 and m * weight.shape[1] >= 1 << 25
    ):
        return False
    run, tiles = topk_run(weight.shape[0]), weight.shape[1] // TOPK_TILE
    entries = topk_rank(k, run) * TOPK_TILE // run
    return topk_list(k, run) <= 4096 and 5 * entries <= TOPK_SLOTS * tiles


def named(path: str) -> AbstractContextManager[Any]:
    """A profiler's range that names the path."""
    return span(f"gossamer::sae.encode/{path}")
