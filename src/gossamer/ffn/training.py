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
from gossamer.ffn.costs import PATHS, hot_bound
from gossamer.ffn.records import SparseTraining, Trained
from gossamer.ffn.sparse_training import sparse_training
from gossamer.rowsparse import Density
from gossamer.rowsparse.dense_product import dense_seconds
from gossamer.rowsparse.formats import linear

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
RATE = 1.7
"""At how many times the rate of a single row gather that goes: STAGES rows of a program are on their way at once."""
PRODUCT = 0.72
"""Of what a product by itself takes, its part in a block of many rows: with what is moved 4.6 ms for nine (H200,
16,384 x 2,048 x 5,632)."""
MOVED = 9
"""Times that dense products and what is between them move a hidden activation."""
FEW = 3
"""How many times as long a column takes where there are few, for hot neurons: tiles of products are not full, and the
lists of the next most frequent neurons are long."""
LISTS, LISTS_OF_ROW = 8e-5, 2.2e-8
"""Seconds that lists take whatever they hold, in all and for each row: to make them, and to begin a program."""
HEAVY = 8
"""A row with more than one in HEAVY of all columns goes through dense tiles: these take 0.8 us for it and 300 us for
the first one, lists 3.2 ns for an entry."""
TILES = 4
"""How many times as long a heavy row takes as one of dense products, in the tiles of both passes."""
SLOTS = 64
"""Entries of a row that 256 columns have room for, at least: it takes no time that is not used, and memory for a while.
"""
HOT, STEP = 320, 64
"""Hot neurons at most, and in what steps there are columns for them: dense products take as long for any number."""
WORTH = 8
"""Hot neurons from which on these have columns: the first STEP columns take as long as 7 entries of each row in lists.
By chance the rows that are counted have a neuron or two more often than all rows have."""
COUNTED = 1024
"""Rows of a block that computes all of which the neurons are counted, about: of 256 rows of a random pattern with 60
entries, 45 neurons of 5,632 had so many by chance that they would have been hot."""
MOST = 1 << 30
"""Entries in lists at most: 32 bits hold their places."""


class Sizes(NamedTuple):
    """The arguments of the operator beside tensors."""

    limit: int
    room: int
    slots: int
    hot: int


def sizes_for(m: int, n: int, known: Density | None, hot: int = 0) -> Sizes:
    """For M rows of N columns by what is known of their entries, or for what is not known yet. Powers of two, so that
    few shapes are met."""
    each = n / 96 if known is None else 1.25 * known.light / max(known.rows, 1)
    each = min(n, max(16, 1 << (int(each) - 1).bit_length()))
    in_tile = each * min(1.0, 256 / n)
    slots = min(256, max(SLOTS, 1 << int(2.5 * in_tile).bit_length()))
    return Sizes(heavy_limit(n), min(MOST, -(-m * each // 16) * 16), slots, hot)


def heavy_limit(n: int) -> int:
    """Entries from which on a row of N columns counts as heavy."""
    return max(64, n // HEAVY)


def columns_for(hot: float | None, n: int) -> int:
    """How many hot neurons have a column: as many as there were, `hot`, or none. None: that is not known."""
    most = min(HOT, max(16, n // 8 // 16 * 16))
    if hot is None:
        return most
    return 0 if hot < WORTH else min(most, -(-int(hot) // STEP) * STEP)


def pays(known: Density | None, hot: Density | None, block: Block, sizes: tuple[int, int, int, int]) -> bool:
    """Whether lists take less time than dense products, forward and backward, by what is known of a block's entries and
    of its hot neurons."""
    if known is None or not block.x.is_cuda:
        return False
    x, columns = block.x, columns_for(None if hot is None else hot.mean, sizes[2])
    light, heavy = known.light / max(known.rows, 1), known.over / max(known.rows, 1)
    gated = block.up_weight is not None
    return lists_are_faster(light, columns, sizes, gated, x.element_size(), x.get_device(), heavy)


def lists_are_faster(
    mean: float, columns: int, sizes: tuple[int, int, int, int], gated: bool, size: int, index: int, heavy: float = 0.0
) -> bool:
    """With so many entries a row on average beside those of hot neurons and of heavy rows, so many columns for the
    former, and a share `heavy` of the rows; sizes: M, K, N, D."""
    (m, k, n, d), rates = sizes, tuning.rates(index)
    gate, down = (PRODUCT * dense_seconds(m, *of, size, tuning.tf32(), index) for of in ((k, n), (n, d)))
    moved = MOVED * m * size / rates.copy
    products = 3 * down + 3 * gate * (2 if gated else 1) + moved * n
    # Of W_up twice, of x and of W_gate; of W_down and of the output's gradient.
    gathered = mean * m * size * ((4 if gated else 2) * k + 2 * d) / (RATE * rates.gather)
    hot = FEW * products * columns / n
    return gate + LISTS + m * LISTS_OF_ROW + gathered + hot + TILES * heavy * products < products


def differentiable(
    operator: str,
    block: Block,
    sizes: tuple[int, int, int, int],
    method: str,
    density: BlockTracker | None,
    dense: Callable[[Block], Tensor],
    with_activity: bool = False,
) -> tuple[Tensor, Activity | None]:
    """The block's result with gradients; sizes: M, K, N, D; `dense`: the path that computes everything."""
    m, _, n, _ = sizes
    tracker = density if method == "auto" else None
    known = activity = None
    found: tuple[Tensor, Tensor] | None = None
    if tracker is not None:
        of_hot = tracker.hot.known(training=True)
        computed = "dense" if block.up_weight is None or block.threshold is not None else "fused"
        method = tracker.rows.path(
            lambda known: "gather" if pays(known, of_hot, block, sizes) else computed, training=True
        )
        known = tracker.rows.basis(training=True)
    hot = columns_for(None, n)
    if density is not None:
        density.last_path = method
        hot = int(density.hot.path(lambda of: str(columns_for(None if of is None else of.mean, n)), training=True))
    sparse = method == "gather" and 0 not in sizes
    with span(f"gossamer::{operator}/training/{'lists' if sparse else 'dense'}"):
        if sparse:
            out, activity, found = on_lists(block, sizes_for(m, n, known, hot), with_activity)
        elif with_activity:
            out, activity = with_all(block)
        else:
            out = dense(block)
    if found is None and tracker is not None and tracker.due_in_training():
        found = sampled_gate(block)
    if found is not None and density is not None:
        nnz, used = found
        density.hot.record(used, training=True)
        if tracker is not None:
            tracker.rows.record(nnz, training=True, limit=heavy_limit(n))
    return out, activity


def on_lists(block: Block, sizes: Sizes, with_activity: bool) -> tuple[Tensor, Activity | None, tuple[Tensor, Tensor]]:
    """By lists of the active entries: the block's result, its activity or None, and (the entries of each row beside
    those of hot neurons; `[1]`, how many neurons are hot)."""
    if not (block.x.is_cuda or INTERPRET):
        # The CPU computes dense products, and keeps lists alone.
        sizes = sizes._replace(hot=0)
    call = SparseTraining(*block[:8], block.activation == "relu2", *sizes)
    found = Trained(*sparse_training(call))
    activity = None
    if with_activity:
        fired = found.fired.long()
        activity = Activity(found.l1, fired.sum() / found.nnz.shape[0], fired, found.rows[1, 0].long())
    return found.out, activity, (found.nnz, found.hot[1:2])


def with_all(block: Block) -> tuple[Tensor, Activity]:
    """By dense products: the block's result and its activity."""
    from gossamer.ffn.block import activated

    gate = activated(block)
    hidden = gate if block.up_weight is None else gate * linear(block.x, block.up_weight, block.up_bias)
    return linear(hidden, block.down_weight, block.down_bias), Activity.of(gate, hidden)


@torch.no_grad()
def sampled_gate(block: Block) -> tuple[Tensor, Tensor]:
    """The same of some rows, where all is computed: the entries of each beside those of neurons that would be hot, and
    how many these are."""
    from gossamer.ffn.block import activated

    # Odd, as `costs.sample_step`.
    step = max(9, block.x.shape[0] // COUNTED | 1)
    active = activated(block._replace(x=block.x.detach()[::step])) != 0
    light = active & (active.sum(1, keepdim=True) <= heavy_limit(active.shape[1]))
    hot = hot_neurons(light.sum(0), active.shape[0], block.x.element_size())
    return (active & ~hot).sum(1), hot.sum()[None]


def hot_neurons(fired: Tensor, rows: int, size: int) -> Tensor:
    """Which neurons, `[..., N]`, have columns of dense products if they had so many entries in so many rows."""
    least, columns = hot_bound(rows, size, fired.device), columns_for(None, fired.shape[-1])
    # Of neurons that are as frequent as the last with a column the first have columns, as on lists.
    order = fired.argsort(dim=-1, descending=True, stable=True)[..., :columns]
    return torch.zeros_like(fired, dtype=torch.bool).scatter_(-1, order, True) & (fired > least)


def light_and_hot(fired: Tensor, rows: int, size: int) -> tuple[Tensor, Tensor]:
    """(entries of a row, on average, beside those of hot neurons; how many neurons are hot), each `[...]` of `fired` as
    above."""
    hot = hot_neurons(fired, rows, size)
    return torch.where(hot, 0, fired).sum(-1) / rows, hot.sum(-1)
