"""A feed-forward block whose gate is sparse, with its gradients, as an operator."""

from typing import Any

import torch
from torch import Tensor

from gossamer._core.operator import register
from gossamer.ffn._torch import sparse_training as _cpu
from gossamer.ffn.records import SparseTraining, SparseTrainingBwd, Trained, aligned
from gossamer.rowsparse.formats import column_dtype, sums_over_rows, threshold_dtype


def _fake(call: SparseTraining) -> Trained:
    x, m, n, room = call.x, call.x.shape[0], call.gate_weight.shape[0], call.room
    gates = 1 if call.up_weight is None else 2

    def ints(*shape: Any) -> Tensor:
        return x.new_empty(*shape, dtype=torch.int32)

    return Trained(
        out=x.new_empty(m, call.down_weight.shape[0]),
        l1=x.new_empty((), dtype=torch.promote_types(x.dtype, torch.float32)),
        nnz=ints(m),
        fired=ints(n),
        values=x.new_empty(gates, room),
        columns=x.new_empty(room, dtype=column_dtype(n)),
        rows=ints(2, aligned(m)),
        hot=ints(2 + call.hot),
        hot_values=x.new_empty(gates, m, call.hot),
    )


def _backward(call: SparseTraining, kept: Any, grads: Any, needs: Any) -> dict[str, Tensor | None]:
    """One launch sequence gives all gradients; they share what they read."""
    grad, penalty, *_ = grads
    gate_bias, up_bias, down_bias = call.gate_bias, call.up_bias, call.down_bias
    if grad is None:
        grad = call.x.new_zeros(call.x.shape[0], call.down_weight.shape[0])
    penalty = None if penalty is None else penalty.reshape(1)
    values, columns, rows, hot, hot_values = kept
    lists = (values, columns, rows, hot, hot_values)
    dx, gate, up, down, sums = sparse_training_bwd(SparseTrainingBwd(grad, penalty, *call[:7], *lists, call.squared))
    return {
        "x": dx,
        "gate_weight": gate,
        "gate_bias": None if gate_bias is None else sums[0].to(gate_bias.dtype),
        "up_weight": None if call.up_weight is None else up,
        "up_bias": None if up_bias is None else sums[1].to(up_bias.dtype),
        "down_weight": down,
        "down_bias": sums_over_rows(grad).to(down_bias.dtype) if down_bias is not None and needs.down_bias else None,
    }


def _fake_bwd(call: SparseTrainingBwd) -> tuple[Tensor, ...]:
    x, (n, k) = call.x, call.gate_weight.shape
    up = x.new_empty(0) if call.up_weight is None else x.new_empty(n, k)
    d = call.down_weight.shape[0]
    down = x.new_empty(n, d).t() if call.down_weight.t().is_contiguous() else x.new_empty(d, n)
    return x.new_empty(x.shape), x.new_empty(n, k), up, down, x.new_empty(2, n, dtype=threshold_dtype(x.dtype))


@register(
    SparseTraining,
    cpu=_cpu.sparse_training,
    fake=_fake,
    backward=_backward,
    saved=SparseTraining._fields[:8],
    keep=lambda call, results: results[4:],
    differentiable=2,
    once_differentiable="ffn.gated",
)
def sparse_training() -> Any:
    from gossamer.ffn._triton.sparse_training import sparse_training

    return sparse_training


@register(SparseTrainingBwd, cpu=_cpu.sparse_training_bwd, fake=_fake_bwd, once_differentiable="ffn.gated")
def sparse_training_bwd() -> Any:
    from gossamer.ffn._triton.sparse_training import sparse_training_bwd

    return sparse_training_bwd
