"""A feed-forward block whose gate is sparse, with its gradients: equations 3 and 4 of "Sparser, Faster, Lighter
Transformer Language Models" on lists of the active entries.

Forward: the gate is packed as it is computed, its tiles are brought together row by row, and every row gathers the
weights of its entries. Backward: the lists are turned around once; the gradient of W_down and those of the hidden
activations come from one launch over neurons, those of W_gate and W_up from another, and that of x from one over rows.
Rows with too many entries go through dense tiles, in one launch of each pass. Neurons that many rows have stand in no
list: they are columns of dense products.
"""

import torch
from torch import Tensor

from gossamer._core.compiling import together, walk
from gossamer.ffn._triton import heavy, train_columns, train_heavy, train_hot, train_rows
from gossamer.ffn._triton.entry_lists import Hot, RowLists, Weights, column_lists, row_lists
from gossamer.ffn._triton.train_columns import hidden_gradients, weight_gradients
from gossamer.ffn.records import SparseTraining, SparseTrainingBwd, Trained
from gossamer.gemm._triton.linear_pack import launch_linear_pack
from gossamer.rowsparse._triton.dense_transpose import launch_dense_transpose
from gossamer.rowsparse.formats import empty_twell

TILE = 256
"""Columns of a tile, as Hopper's kernel packs them."""


def turned(weight: Tensor) -> Tensor:
    """weight.t(), contiguous."""
    rows, columns = weight.shape
    if weight.stride(1) != 1 or rows == 1:
        return weight.t().contiguous()
    out = weight.new_empty(columns, rows)
    launch_dense_transpose(weight, out, False)
    return out


def lists_of(x: Tensor, weights: Weights, limit: int, room: int, slots: int, capacity: int) -> tuple[RowLists, Hot]:
    """The gate's active entries."""
    m, n = x.shape[0], weights.gate.shape[0]
    packed = empty_twell(x, m, n, TILE, slots)
    launch_linear_pack(x, weights.gate, weights.gate_bias, weights.threshold, TILE, packed)
    hot = train_hot.choose(packed, TILE, n, limit, weights.up is not None, capacity)
    return row_lists(packed, hot, TILE, n, limit, room), hot


@together
def sparse_training(call: SparseTraining) -> Trained:
    """By lists of the gate's active entries, and dense tiles for rows and neurons that stand in none."""
    x, squared = call.x, call.squared
    weights = Weights(*call[1:6], turned(call.down_weight))
    lists, hot = lists_of(x, weights, call.limit, call.room, call.slots, call.hot)
    out, l1 = train_rows.forward(lists, x, weights, call.down_bias, squared)
    heavy.project(lists.rows[1], x, (*weights, call.down_bias), out, squared, (l1, lists.fired))
    train_hot.forward(hot, x, weights, out, l1, squared)
    mean = l1.mean()
    kept = (lists.values, lists.columns, lists.rows, hot.listed, hot.values)
    if walk.pool is not None:
        # One kernel of the backward pass takes as long to compile as all others do beside it.
        sparse_training_bwd(SparseTrainingBwd(out, mean, *call[:7], *kept, squared))
    return Trained(out, mean, lists.nnz, lists.fired, *kept)


@together
def sparse_training_bwd(call: SparseTrainingBwd) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(gradients of x, W_gate, W_up and W_down, sums [2, N])"""
    grad, penalty, x, *_, values, columns, rows, listed, hot_values, squared = call
    offsets = rows[0, : x.shape[0] + 1]
    weights = Weights(*call[3:8], turned(call.down_weight))
    n = weights.gate.shape[0]
    # Without a penalty the kernels are those with one: half as many are compiled.
    share = x.new_zeros(1, dtype=torch.float32) if penalty is None else (penalty / x.shape[0]).float()
    up = None if call.up_weight is None else values[1]
    by_neuron = column_lists(values[0], up, columns, offsets, n, squared)
    grad_down, _, dots = weight_gradients(
        by_neuron, (by_neuron.hidden, None), grad, weights.down, product=True, tile=train_columns.DOWN
    )
    assert dots is not None
    by_row, by_column = hidden_gradients(by_neuron, dots, values[0], up, share, squared)
    del dots
    sums = torch.empty(2, n, dtype=torch.float32, device=x.device)
    dx = torch.empty_like(x)
    pair = by_column[0], None if weights.up is None else by_column[1]
    grad_gate, grad_up, _ = weight_gradients(by_neuron, pair, x, weights.gate, sums=sums)
    second = None if weights.up is None else (by_row[1], weights.up)
    train_rows.multiply_rows(columns, offsets, (by_row[0], weights.gate), second, None, dx)
    del by_neuron, by_column, by_row, pair, second
    grads = (grad_down, grad_gate, grad_up)
    train_hot.backward(listed, hot_values, x, weights, grad, share, dx, grads, sums, squared)
    train_heavy.backward(rows[1], x, weights, grad, share, dx, (grad_gate, grad_up, grad_down), sums, squared)
    del weights
    # A gradient that lies otherwise than its weight would be copied, element by element, when it is accumulated.
    grad_down = grad_down.t() if call.down_weight.t().is_contiguous() else turned(grad_down)
    return dx, grad_gate, x.new_empty(0) if grad_up is None else grad_up, grad_down, sums
