"""The arguments of the room's operators: each operator is one record (`_core/operator.py`).

In all of them x is `[M, K]`, gate_weight and up_weight `[N, K]`, down_weight `[D, N]`, gate_bias, threshold and up_bias
`[N]` and down_bias `[D]`. A plain block has no up_weight, and its activation follows gate_weight.
"""

from typing import NamedTuple

from torch import Tensor

from gossamer._core.operator import Strided


class SparseFfn(NamedTuple):
    """squared: of the activation. counted: whether the entries of rows are wanted."""

    x: Strided
    gate_weight: Strided
    gate_bias: Tensor | None
    threshold: Tensor | None
    up_weight: Strided | None
    up_bias: Tensor | None
    down_weight: Strided
    down_bias: Tensor | None
    squared: bool
    counted: bool


class SparseTraining(NamedTuple):
    """Rows with more than `limit` entries, or more than `slots` among 256 columns, and rows that no longer fit into
    `room` entries, stand in no list: they go through dense tiles. So do neurons that many rows have, up to `hot`. K, N,
    D and M are at least 1, `room` and `hot` multiples of 16."""

    x: Tensor
    gate_weight: Tensor
    gate_bias: Tensor | None
    threshold: Tensor | None
    up_weight: Tensor | None
    up_bias: Tensor | None
    down_weight: Strided
    down_bias: Tensor | None
    squared: bool
    limit: int
    room: int
    slots: int
    hot: int


class Trained(NamedTuple):
    """out `[M, D]`; l1: the sum of |hidden activations| over M, float32; nnz: entries of each row beside those of hot
    neurons, int32 `[M]`; fired: entries of each neuron, `[N]`. Of the lists of entries: values, the gate before it is
    squared and the up projection, `[2 or 1, room]`; columns `[room]`; rows int32 `[2, aligned(M)]`: the offsets of
    rows, `[M + 1]`, and how many rows stand in no list, and which, `[1 + M]`. hot: how many neurons stand in columns,
    how many would if there were enough, and the former, int32 `[2 + hot]`; hot_values: the gate and the up projection
    at their entries, 0 elsewhere, `[2 or 1, M, hot]`."""

    out: Tensor
    l1: Tensor
    nnz: Tensor
    fired: Tensor
    values: Tensor
    columns: Tensor
    rows: Tensor
    hot: Tensor
    hot_values: Tensor


def aligned(m: int) -> int:
    """M + 1, or so many more that int32 words behind them begin on 16 bytes."""
    return (m + 4) // 4 * 4


class SparseTrainingBwd(NamedTuple):
    """The gradients of `Trained`'s out and l1, `[1]`; operands of `SparseTraining`, and its lists.

    The results are the gradients of x, W_gate, W_up (`[0]` in a plain block) and W_down, which lies as W_down does; and
    the sums `[2, N]` of the gradients of the gate's and of the up projection's pre-activations, float32."""

    grad: Tensor
    penalty: Tensor | None
    x: Tensor
    gate_weight: Tensor
    gate_bias: Tensor | None
    threshold: Tensor | None
    up_weight: Tensor | None
    up_bias: Tensor | None
    down_weight: Strided
    values: Tensor
    columns: Tensor
    rows: Tensor
    hot: Tensor
    hot_values: Tensor
    squared: bool
