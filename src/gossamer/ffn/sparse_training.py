"""A feed-forward block whose gate is sparse, with its gradients, as an operator."""

from typing import Any

import torch
from torch import Tensor

from gossamer._core.ops import register
from gossamer.ffn._torch import sparse_training as _cpu
from gossamer.rowsparse.formats import column_dtype, threshold_dtype

_WEIGHTS = (
    "Tensor x, Tensor gate_weight, Tensor? gate_bias, Tensor? threshold, Tensor? up_weight, Tensor? up_bias, "
    "Tensor down_weight"
)


def _fake(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    gate_weight, up_weight, down_weight, room = rest[0], rest[3], rest[5], rest[9]
    m, n = x.shape[0], gate_weight.shape[0]

    def ints(*shape: Any) -> Tensor:
        return x.new_empty(*shape, dtype=torch.int32)

    values = x.new_empty(room)
    columns = x.new_empty(room, dtype=column_dtype(n))
    l1 = x.new_empty((), dtype=torch.promote_types(x.dtype, torch.float32))
    up_values = x.new_empty(0 if up_weight is None else room)
    out = x.new_empty(m, down_weight.shape[0])
    return out, l1, ints(m), ints(n), values, columns, ints(m + 1), ints(m + 1), up_values


def _context(ctx: Any, inputs: Any, output: Any) -> None:
    x, gate_weight, gate_bias, threshold, up_weight, up_bias, down_weight, down_bias, ctx.squared = inputs[:9]
    _, _, nnz, fired, *kept = output
    ctx.mark_non_differentiable(nnz, fired, *kept)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, gate_weight, gate_bias, threshold, up_weight, up_bias, down_weight, *kept)
    ctx.dtypes = [None if bias is None else bias.dtype for bias in (gate_bias, up_bias, down_bias)]


def _backward(ctx: Any, grad: Tensor | None, penalty: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    """One launch sequence gives all gradients; they share what they read."""
    if grad is None and penalty is None:
        return (None,) * 12
    # Once: a checkpoint refuses to hand them out again.
    saved = ctx.saved_tensors
    x, up_weight, down_weight = saved[0], saved[4], saved[6]
    if grad is None:
        grad = x.new_zeros(x.shape[0], down_weight.shape[0])
    penalty = None if penalty is None else penalty.reshape(1)
    dx, gate, up, down, sums = sparse_training_bwd(grad, penalty, *saved, ctx.squared)
    gate_dtype, up_dtype, down_dtype = ctx.dtypes
    return (
        dx,
        gate,
        None if gate_dtype is None else sums[0].to(gate_dtype),
        None,
        None if up_weight is None else up,
        None if up_dtype is None else sums[1].to(up_dtype),
        down.t(),
        None if down_dtype is None else grad.sum(0, dtype=threshold_dtype(grad.dtype)).to(down_dtype),
        *(None,) * 4,
    )


def _fake_bwd(grad: Tensor, penalty: Tensor | None, x: Tensor, gate_weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    up_weight, down_weight, (n, k) = rest[2], rest[4], gate_weight.shape
    up = x.new_empty(0) if up_weight is None else x.new_empty(n, k)
    down = x.new_empty(n, down_weight.shape[0])
    sums = x.new_empty(2, n, dtype=threshold_dtype(x.dtype))
    return x.new_empty(x.shape), x.new_empty(n, k), up, down, sums


sparse_training = register(
    f"sparse_training({_WEIGHTS}, Tensor? down_bias, bool squared, SymInt limit, SymInt room, int slots) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    cpu=_cpu.sparse_training,
    strided=("down_weight",),
    fake=_fake,
    setup_context=_context,
    backward=_backward,
)
"""-> (out `[M, D]`; the sum of |hidden activations| over M, float32; entries of each row, int32 `[M]`, and of each
neuron, `[N]`; of the lists of entries: values before they are squared `[room]`, columns `[room]`, offsets of rows
int32 `[M + 1]`; how many rows stand in no list, and which, int32 `[1 + M]`; the up projection at the entries,
`[room]` or `[0]`). Rows with more than `limit` entries, or more than `slots` among 256 columns, and those that no
longer fit, stand in no list: they go through dense tiles. K, N, D and M are at least 1, `room` a multiple of 16."""

sparse_training_bwd = register(
    f"sparse_training_bwd(Tensor grad, Tensor? penalty, {_WEIGHTS}, Tensor values, Tensor columns, Tensor offsets, "
    "Tensor heavy, Tensor up_values, bool squared) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    cpu=_cpu.sparse_training_bwd,
    strided=("down_weight",),
    fake=_fake_bwd,
    once_differentiable="ffn.gated",
)
"""-> gradients of x, W_gate, W_up (`[0]` in a plain block) and W_down `[N, D]`; and the sums `[2, N]` of those of the
gate's and of the up projection's pre-activations, float32. `penalty`: the gradient of the second result, `[1]`, or
None."""
