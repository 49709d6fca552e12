"""A feed-forward block whose gate is sparse, with its gradients: equations 3 and 4 of "Sparser, Faster, Lighter
Transformer Language Models" on lists of the active entries.

Forward: the gate is packed as it is computed, its tiles are brought together row by row, and every row gathers the
weights of its entries. Backward: the lists are turned around once; the gradient of W_down and those of the hidden
activations come from one launch over neurons, those of W_gate and W_up from another, and that of x from one over rows.
"""

from torch import Tensor

from gossamer._core import launch
from gossamer.ffn._triton import train_columns, train_rows
from gossamer.ffn._triton.entry_lists import RowLists, column_lists, row_lists
from gossamer.ffn._triton.train_heavy import heavy_backward, heavy_forward
from gossamer.gemm._triton.linear_pack import launch_linear_pack
from gossamer.rowsparse.formats import empty_twell

TILE, SLOTS = 256, 16


def lists_of(
    x: Tensor, gate: tuple[Tensor, Tensor | None, Tensor | None], limit: int, room: int, slots: int = SLOTS
) -> RowLists:
    """The gate's active entries. gate: weight [N, K], bias, threshold."""
    m, n = x.shape[0], gate[0].shape[0]
    packed = empty_twell(x, m, n, TILE, slots)
    launch_linear_pack(x, *gate, TILE, packed)
    return row_lists(packed, TILE, n, limit, launch.cdiv(room, 16) * 16)


def forward(
    x: Tensor,
    gate: tuple[Tensor, Tensor | None, Tensor | None],
    up: tuple[Tensor, Tensor | None] | None,
    down: tuple[Tensor, Tensor | None],
    squared: bool,
    limit: int,
    room: int,
    slots: int = SLOTS,
) -> tuple[Tensor, RowLists, Tensor | None, Tensor]:
    lists = lists_of(x, gate, limit, room, slots)
    out, up_values, l1 = train_rows.forward(lists, x, up, down, squared)
    heavy_forward(lists, x, gate, up, down, out, l1, squared)
    return out, lists, up_values, l1


def backward(
    grad: Tensor,
    penalty: Tensor | None,
    x: Tensor,
    gate: tuple[Tensor, Tensor | None, Tensor | None],
    up: tuple[Tensor, Tensor | None] | None,
    down_rows: Tensor,
    lists: tuple[Tensor, Tensor, Tensor, Tensor],
    up_values: Tensor | None,
    squared: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Gradients of x, W_gate, W_up and W_down [N, D]; lists: values, columns, offsets and heavy rows of the gate's entries."""
    values, columns, offsets, heavy = lists
    gate_weight, (up_weight, up_bias) = gate[0], up or (None, None)
    turned = column_lists(values, up_values, columns, offsets, gate_weight.shape[0], squared)
    grad_down, dots = train_columns.down_gradients(turned, grad, down_rows)
    by_row, by_column = train_columns.hidden_gradients(turned, dots, values, up_values, penalty, squared)
    del dots
    grad_gate, grad_up = train_columns.gate_gradients(turned, by_column, x, gate_weight)
    second = None if up_weight is None else by_row[1]
    dx = train_rows.input_gradient(columns, offsets, by_row[0], second, gate_weight, up_weight)
    weights, grads = (*gate, up_weight, up_bias, down_rows), (grad_gate, grad_up, grad_down)
    heavy_backward(heavy, x, weights, grad, penalty, dx, grads, None, squared)
    return dx, grad_gate, grad_up, grad_down
