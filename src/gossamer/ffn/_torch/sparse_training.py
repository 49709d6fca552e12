"""A feed-forward block whose gate is sparse, with its gradients, on the CPU: dense products of blocks of rows, of which
the active entries alone are kept."""

from collections.abc import Iterator

import torch
from torch import Tensor

from gossamer.ffn.records import SparseTraining, SparseTrainingBwd, Trained, aligned
from gossamer.rowsparse._torch.linear_source import activate_
from gossamer.rowsparse.formats import column_dtype, linear

_BLOCK = 1 << 24
"""Pre-activations in memory at one time."""


Call = SparseTraining | SparseTrainingBwd


def _gate(call: Call, rows: slice | Tensor) -> Tensor:
    """The entries of some rows that the activation lets through, not squared yet."""
    z = linear(call.x[rows], call.gate_weight, call.gate_bias)
    return torch.relu_(z) if call.threshold is None else activate_(z, call.threshold)


def _up(call: Call, rows: slice | Tensor) -> Tensor | None:
    return None if call.up_weight is None else linear(call.x[rows], call.up_weight, call.up_bias)


def _blocks(call: Call) -> Iterator[slice]:
    m, n = call.x.shape[0], call.gate_weight.shape[0]
    step = max(64, _BLOCK // max(n, 1))
    for start in range(0, m, step):
        yield slice(start, min(start + step, m))


def sparse_training(call: SparseTraining) -> Trained:
    """On the CPU a tile has slots for all, and no neuron is hot."""
    x, room = call.x, call.room
    (m, _), n = x.shape, call.gate_weight.shape[0]
    out, wide = x.new_empty(m, call.down_weight.shape[0]), torch.promote_types(x.dtype, torch.float32)
    values = x.new_zeros(1 if call.up_weight is None else 2, room)
    columns = torch.zeros(room, dtype=column_dtype(n))
    nnz, lists = torch.empty(m, dtype=torch.int32), torch.zeros(2, aligned(m), dtype=torch.int32)
    offsets, heavy, fired = *lists, torch.zeros(n, dtype=torch.int32)
    l1 = torch.zeros((), dtype=wide)
    end, full = 0, False
    for block in _blocks(call):
        gate, up = _gate(call, block), _up(call, block)
        active = gate != 0
        counts = active.sum(1)
        nnz[block] = counts
        fired += active.sum(0, dtype=torch.int32)
        hidden = gate.square() if call.squared else gate
        # A factor that is not finite must not reach entries that are 0.
        hidden = hidden if up is None else torch.where(active, hidden * up, 0)
        l1 += hidden.to(wide).abs().sum()
        out[block] = linear(hidden, call.down_weight, call.down_bias)
        kept = torch.where(counts > call.limit, 0, counts)
        kept = torch.where(kept.cumsum(0) + end > room if not full else kept > 0, 0, kept)
        full = full or bool(((kept == 0) & (counts > 0) & (counts <= call.limit)).any())
        offsets[block.start + 1 : block.stop + 1] = kept.cumsum(0) + end
        left = ((kept == 0) & (counts > 0)).nonzero().squeeze(1)
        heavy[1 + int(heavy[0]) : 1 + int(heavy[0]) + left.numel()] = left + block.start
        heavy[0] += left.numel()
        rows, found = (active & (kept > 0)[:, None]).nonzero(as_tuple=True)
        part = slice(end, end + found.numel())
        values[0, part], columns[part] = gate[rows, found], found.to(columns.dtype)
        if up is not None:
            values[1, part] = up[rows, found]
        end = part.stop
    hot = torch.zeros(2 + call.hot, dtype=torch.int32), x.new_zeros(1 if call.up_weight is None else 2, m, call.hot)
    return Trained(out, (l1 / max(m, 1)).to(wide), nnz, fired, values, columns, lists, *hot)


def sparse_training_bwd(call: SparseTrainingBwd) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(gradients of x, W_gate, W_up and W_down, sums [2, N])"""
    grad, penalty, x, gate_weight, _, _, up_weight, _, down_weight, values, columns, (offsets, heavy), *_ = call
    (m, k), (d, n) = x.shape, down_weight.shape
    wide = torch.promote_types(x.dtype, torch.float32)
    dx = torch.zeros_like(x, memory_format=torch.contiguous_format)
    gates = 1 if up_weight is None else 2
    sums = torch.zeros(2, n, dtype=wide)
    weights = [torch.zeros(n, k, dtype=wide) for _ in range(gates)]
    down = torch.zeros(n, d, dtype=wide)
    listed = heavy[1 : 1 + int(heavy[0])].long()
    places = columns.long() & 0xFFFF if columns.dtype is torch.int16 else columns.long()
    for block in _blocks(call):
        counts = offsets[block.start + 1 : block.stop + 1] - offsets[block]
        part = slice(int(offsets[block.start]), int(offsets[block.stop]))
        rows = torch.repeat_interleave(torch.arange(counts.shape[0]), counts)
        at = rows, places[part]
        gate = x.new_zeros(counts.shape[0], n)
        gate[at] = values[0, part]
        up = None if up_weight is None else torch.zeros_like(gate)
        if up is not None:
            up[at] = values[1, part]
        some = listed[(listed >= block.start) & (listed < block.stop)]
        if some.numel():
            gate[some - block.start] = _gate(call, some)
            rest = _up(call, some)
            if up is not None and rest is not None:
                up[some - block.start] = rest
        active = gate != 0
        through = (grad[block] @ down_weight).to(wide)
        slope = 2 * gate.to(wide) if call.squared else torch.ones_like(gate, dtype=wide)
        hidden = gate.square() if call.squared else gate
        if penalty is not None:
            share = penalty.to(wide) / m
            through = through + (share if up is None else share * up.to(wide).sign())
        grads = [torch.where(active, through * (slope if up is None else slope * up), 0).to(x.dtype)]
        if up is not None:
            grads.append(torch.where(active, through * hidden, 0).to(x.dtype))
            hidden = torch.where(active, hidden * up, 0)
        down += (hidden.t() @ grad[block]).to(wide)
        dx[block] = sum(part @ weight for part, weight in zip(grads, (gate_weight, up_weight)))  # type: ignore[misc, operator]
        for i, part_grad in enumerate(grads):
            weights[i] += (part_grad.t() @ x[block]).to(wide)
            sums[i] += part_grad.sum(0, dtype=wide)
    found = [weight.to(x.dtype) for weight in weights]
    by_neurons = down.to(x.dtype).t()
    grad_down = by_neurons if down_weight.t().is_contiguous() else by_neurons.contiguous()
    return dx, found[0], found[1] if gates > 1 else x.new_empty(0), grad_down, sums
