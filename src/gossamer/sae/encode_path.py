"""The path of `sae.encode`, chosen by sizes that the host knows."""

import math
from contextlib import AbstractContextManager
from typing import Any, Literal

from torch import Tensor

from gossamer._core import operator, tuning
from gossamer._core.ops import INTERPRET
from gossamer._core.ranges import span
from gossamer.rowsparse.dense_product import padded
from gossamer.rowsparse.density import Density

Path = Literal["torch", "tiles", "list", "bound", "topk", "batch"]
operator.PATHS["sae.encode"] = {
    "tiles": "ReLU or JumpReLU without gradients on Hopper, 16 bits, from 512 rows and 2^25 pre-activations on, and "
    "few full rows: `gemm.linear_pack`",
    "list": "all other calls with ReLU or JumpReLU: a product, and one pass that lists entries",
    "bound": "TopK of many rows on Hopper: the product packs entries above a bound of each row, and the k largest are "
    "selected from them",
    "topk": "all other calls with TopK: a product, and a selection in each row",
    "batch": "BatchTopK: a product, and a selection among all rows",
}

TILE_SLOTS = 16
"""Entries that a row may have in a tile of 256 columns where the product packs its own result ("tiles")."""
FULL = 1 / 16
"""The share of rows with more entries than slots from which on "tiles" costs more than it saves. It takes 0.87 to 1.03
of the time of "list", and 1.7 times that where all rows have more (docs/gemm.md); the line between them is at 1/16."""


def choose_path(
    activation: str,
    m: int,
    k: int,
    capacity: int | None,
    weight: Tensor,
    differentiable: bool = True,
    known: Density | None = None,
) -> Path:
    """How x `[m, d_in]` is encoded with a weight `[d_in, d_sae]`; the table in docs/sae.md has the same rules.

    Args:
        activation: "relu", "jumprelu", "topk" or "batchtopk".
        k: of the last two.
        capacity: slots per row by a threshold, or None for as many as there are entries.
        differentiable: whether the tensors that a backward pass reads have to be kept.
        known: how full rows were in earlier calls, or None.
    """
    by_threshold = activation in ("relu", "jumprelu")
    if by_threshold and not differentiable and packs_in_product(m, weight):
        # With more slots than that a tile's own would be the ones that overflow.
        fits = capacity is not None and TILE_SLOTS * capacity <= weight.shape[1]
        if fits and (known is None or known.over <= FULL * known.rows):
            return "tiles"
    if not (weight.is_cuda or INTERPRET):
        return "torch"
    if by_threshold:
        return "list"
    if activation == "batchtopk":
        return "batch"
    return "bound" if has_bound(m, k, weight) else "topk"


def packs_in_product(m: int, weight: Tensor) -> bool:
    """Whether the product packs its own result, tile by tile: where the pre-activations, m by the columns of weight,
    fill the memory, and the product takes longer than the launches that follow."""
    # The device comes first: on others a dynamic m is none of a compiled graph's business.
    return tuning.hopper(weight.device) and weight.element_size() == 2 and m >= 512 and m * weight.shape[1] >= 1 << 25


LEAST, FEWEST = 512, 1 << 23
"""Rows and pre-activations from which on 16-bit weights of odd columns are copied: at 524 to 4,197 rows an H200 then
encodes in 0.39 to 0.87 of the time, at 336 in 1.1; the copies are twelve launches, which short products do not pay."""


RANKED = 1 << 15
"""Pre-activations from which on those that are ranked lie in rows of whole 16 numbers, of which kernels load several at
a time: they are read three times and more, and another launch or two are no matter. A twentieth of 1,087 rows of 52,567
took an H200 twice as long as dense PyTorch, a number at a time."""

LISTED = 1 << 18
"""The same for those that are listed by a threshold, once or twice, in rows that do not all begin on 16 bytes: beside
dense PyTorch an H100 took 40 us more for 7 rows of 48,841."""


def row_stride(m: int, n: int, weight: Tensor, activation: str) -> int:
    """Numbers from one row of pre-activations `[m, n]` to the next: on a GPU more than n where kernels would load one
    number at a time otherwise."""
    if not (weight.is_cuda or INTERPRET):
        return n
    if activation in ("topk", "batchtopk"):
        wide = m * n >= RANKED
    else:
        wide = m * n >= LISTED and n * weight.element_size() % 16 != 0
    if wide:
        return -(-n // 16) * 16
    return padded(n, weight) if copies_weight(m, n, weight) else n


def copies_weight(m: int, n: int, weight: Tensor) -> bool:
    """Whether the product is one with further columns of a copy of the weight: where cuBLAS would multiply 16-bit rows
    that do not begin on 16 bytes at a fifth of its rate, and long enough."""
    return weight.element_size() == 2 and n % 8 != 0 and m >= LEAST and m * n >= FEWEST


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
    """Whether TopK's product packs numbers above a bound from a sample: where that pays for a product, and
    a tile has few entries, on average, beside its slots."""
    if not packs_in_product(m, weight):
        return False
    run, tiles = topk_run(weight.shape[0]), weight.shape[1] // TOPK_TILE
    entries = topk_rank(k, run) * TOPK_TILE // run
    return topk_list(k, run) <= 4096 and 5 * entries <= TOPK_SLOTS * tiles


def named(path: str) -> AbstractContextManager[Any]:
    """A profiler's range that names the path."""
    return span(f"gossamer::sae.encode/{path}")
