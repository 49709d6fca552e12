"""A feed-forward block under gradients: dense, or on lists of its active entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from gossamer._core import operator, tuning
from gossamer._core.ops import INTERPRET
from gossamer._core.ranges import span
from gossamer.ffn.activity import Activity
from gossamer.ffn.costs import PATHS, sample_step
from gossamer.ffn.records import SparseTraining, Trained
from gossamer.ffn.sparse_training import sparse_training
from gossamer.rowsparse import Density
from gossamer.rowsparse._torch.linear_source import linear
from gossamer.rowsparse.dense_product import dense_seconds

if TYPE_CHECKING:
    from gossamer.ffn.block import Block
    from gossamer.ffn.tracker import BlockTracker

operator.PATHS["ffn.gated, ffn.plain"] = {
    **{str(path): condition for path, condition in PATHS.items()},
    "training/lists": "gradients, and a density that is known and at which lists take less time than dense products: "
    "both passes on lists of entries",
    "training/dense": "gradients otherwise: `gemm.gated_mlp`, or plain PyTorch for a block without a gate or with a "
    "threshold",
}
RATE = 1.5
"""At how many times the rate of a single row gather that goes: STAGES rows of a program are on their way at once."""
PRODUCT = 0.78
"""Of what a product by itself takes, its part in a block of many rows: 4.55 ms for nine (H200, 16,384 x 2,048 x 5,632).
"""
LISTS, LISTS_OF_ROW = 4e-5, 7e-9
"""Seconds that making lists takes, whatever there is to do and for each row."""
HEAVY = 22
"""Columns for one entry of a row, from which on dense tiles take it: 0.8 us a row, 3.2 ns an entry."""
MOST = 1 << 30
"""Entries in lists at most: 32 bits hold their places."""


class Sizes(NamedTuple):
    """The arguments of the operator beside tensors."""

    limit: int
    room: int
    slots: int
    hot: int


HOT = 256
"""Neurons, at most, that are columns of dense products."""


def sizes_for(m: int, n: int, mean: float | None) -> Sizes:
    """For rows of N columns with so many entries on average, or for what is not known yet. Powers of two, so that few
    shapes are met."""
    each = n / 96 if mean is None else 1.25 * mean
    each = min(n, max(16, 1 << (int(each) - 1).bit_length()))
    in_tile = each * min(1.0, 256 / n)
    slots = min(256, max(16, 1 << int(2.5 * in_tile).bit_length()))
    hot = min(HOT, -(-n // 16) * 16)
    return Sizes(max(64, n // HEAVY), min(MOST, -(-m * each // 16) * 16), slots, hot)


def pays(known: Density | None, block: Block, sizes: tuple[int, int, int, int]) -> bool:
    """Whether lists take less time than dense products, forward and backward, by what is known of a block's entries."""
    if known is None or not block.x.is_cuda:
        return False
    return lists_are_faster(
        known.mean, sizes, block.up_weight is not None, block.x.element_size(), block.x.get_device()
    )


def lists_are_faster(mean: float, sizes: tuple[int, int, int, int], gated: bool, size: int, index: int) -> bool:
    """With so many entries a row on average; sizes: M, K, N, D."""
    m, k, n, d = sizes
    gate, down = (PRODUCT * dense_seconds(m, *of, size, tuning.tf32(), index) for of in ((k, n), (n, d)))
    dense = 3 * down + 3 * gate * (2 if gated else 1)
    # Of W_up twice, of x and of W_gate; of W_down and of the output's gradient.
    gathered = mean * m * size * ((4 if gated else 2) * k + 2 * d)
    return gate + LISTS + m * LISTS_OF_ROW + gathered / (RATE * tuning.rates(index).gather) < dense


def differentiable(
    operator: str,
    block: Block,
    sizes: tuple[int, int, int, int],
    method: str,
    density: BlockTracker | None,
    dense: Callable[[Block], Tensor],
    with_activity: bool = False,
) -> tuple[Tensor, Activity | None]:
    """The block's result with gradients; sizes: M, K, N, D; `dense`: the way that computes everything."""
    m, _, n, _ = sizes
    tracker = density if method == "auto" else None
    known = activity = nnz = None
    if tracker is not None:
        all_computed = "dense" if block.up_weight is None or block.threshold is not None else "fused"
        method = tracker.rows.path(lambda known: "gather" if pays(known, block, sizes) else all_computed, training=True)
        known = tracker.rows.basis(training=True)
    if density is not None:
        density.last_path = method
    sparse = method == "gather" and 0 not in sizes
    with span(f"gossamer::{operator}/training/{'lists' if sparse else 'dense'}"):
        if sparse:
            mean = None if known is None else known.light / max(known.rows, 1)
            out, activity, nnz = on_lists(block, sizes_for(m, n, mean))
        elif with_activity:
            out, activity = with_all(block)
        else:
            out = dense(block)
    if tracker is not None:
        if nnz is None and tracker.due_in_training():
            nnz = sampled_gate(block)
        if nnz is not None:
            tracker.rows.record(nnz, training=True, limit=sizes_for(m, n, None).limit)
    return out, activity


def on_lists(block: Block, sizes: Sizes) -> tuple[Tensor, Activity, Tensor]:
    """By lists of the active entries: the block's result, its activity, and the entries of each row."""
    if not (block.x.is_cuda or INTERPRET):
        # The CPU computes dense products, and keeps lists alone.
        sizes = sizes._replace(hot=0)
    call = SparseTraining(*block[:8], block.activation == "relu2", *sizes)
    found = Trained(*sparse_training(call))
    fired = found.fired.long()
    activity = Activity(found.l1, fired.sum() / found.nnz.shape[0], fired, found.heavy[0].long())
    return found.out, activity, found.nnz


def with_all(block: Block) -> tuple[Tensor, Activity]:
    """By dense products: the block's result and its activity."""
    from gossamer.ffn.block import activated

    gate = activated(block)
    hidden = gate if block.up_weight is None else gate * linear(block.x, block.up_weight, block.up_bias)
    return linear(hidden, block.down_weight, block.down_bias), Activity.of(gate, hidden)


@torch.no_grad()
def sampled_gate(block: Block) -> Tensor:
    """How many entries some rows have."""
    from gossamer.ffn.block import activated

    step = max(16, sample_step(block.x.shape[0]))
    return (activated(block._replace(x=block.x.detach()[::step])) != 0).sum(1)
