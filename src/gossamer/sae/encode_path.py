"""The path of `sae.encode`, chosen by sizes that the host knows."""

import math
from contextlib import AbstractContextManager
from typing import Any, Literal

from torch import Tensor

from gossamer._core import operator, tuning
from gossamer._core.ops import INTERPRET
from gossamer._core.ranges import span
from gossamer.gemm.linear_pack_path import SLOTS, TILE

RANKED = ("topk", "abstopk", "batchtopk", "groupmax")
"""Activations that keep a number of entries."""
Path = Literal["torch", "tiles", "list", "bound", "topk", "batch", "groups"]
operator.PATHS["sae.encode"] = {
    "tiles": "ReLU or JumpReLU without gradients on Hopper, 16 bits, from 512 rows and 2^25 pre-activations on, and a "
    "capacity of at most a sixteenth of the columns: `gemm.linear_pack`",
    "list": "all other calls with ReLU or JumpReLU: a product, and one pass that lists entries",
    "bound": "TopK of many rows on Hopper: the product packs entries above a bound of each row, and the k largest are "
    "selected from them",
    "topk": "all other calls with TopK, and AbsTopK: a product, and a selection in each row",
    "batch": "BatchTopK: a product, and a selection among all rows",
    "groups": "GroupMax: a product in blocks of rows, and the largest of each group, by plain PyTorch",
}

FILLED = 1 << 15
"""Pre-activations from which on their rows are filled up to whole 16 numbers, which takes a few launches."""


def choose_path(activation: str, m: int, k: int, weight: Tensor, capacity: int | None = None) -> Path:
    """How x `[m, d_in]` is encoded with a weight `[d_in, d_sae]`; the table in docs/sae.md has the same rules.

    Args:
        activation: "relu", "jumprelu", "topk", "abstopk", "batchtopk" or "groupmax".
        k: of the last four.
        capacity: slots per row by a threshold, of a call without gradients; None for other calls.
    """
    by_threshold = activation in ("relu", "jumprelu")
    # With more slots than that a tile's own would be the ones that overflow.
    fits = by_threshold and capacity is not None and TILE * capacity <= SLOTS * weight.shape[1]
    if fits and packs_in_product(m, weight):
        return "tiles"
    if not (weight.is_cuda or INTERPRET):
        return "torch"
    if by_threshold:
        return "list"
    if activation == "batchtopk":
        return "batch"
    if activation == "groupmax":
        return "groups"
    return "bound" if activation == "topk" and has_bound(m, k, weight) else "topk"


def packs_in_product(m: int, weight: Tensor) -> bool:
    """Whether the product packs its own result, tile by tile: 16 bits on Hopper, and pre-activations, m by the columns
    of weight, that take longer to write than the launches that follow."""
    # The device comes first: on others a dynamic m is none of a compiled graph's business.
    return tuning.hopper(weight.device) and weight.element_size() == 2 and m >= 512 and m * weight.shape[1] >= 1 << 25


def row_stride(m: int, n: int, weight: Tensor) -> int:
    """Numbers from one row of pre-activations `[m, n]` to the next: on a GPU a multiple of 16 if they are many, because
    kernels would load the numbers of other rows one by one."""
    return -(-n // 16) * 16 if (weight.is_cuda or INTERPRET) and m * n >= FILLED else n


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
    """Whether TopK's product packs numbers above a bound from a sample: where that pays for a product, and a tile has
    few entries, on average, beside its slots."""
    if not packs_in_product(m, weight):
        return False
    run, tiles = topk_run(weight.shape[0]), weight.shape[1] // TOPK_TILE
    entries = topk_rank(k, run) * TOPK_TILE // run
    return topk_list(k, run) <= 4096 and 5 * entries <= TOPK_SLOTS * tiles


def named(path: str) -> AbstractContextManager[Any]:
    """A profiler's range that names the path."""
    return span(f"gossamer::sae.encode/{path}")
