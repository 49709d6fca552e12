"""How far an indexer's scores are from attention, and gradients of an indexer, on the CPU: 128 queries at a time."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from gossamer.attention._torch.indexer_scores import activated_, derivative, gates_of
from gossamer.attention._torch.sparse_attention import probabilities, selected_blocks
from gossamer.attention.records import IndexerLoss, SparseAttentionBwd

Block = tuple[int, slice, Tensor, Tensor, Callable[[Tensor], Tensor]]
"""(batch, queries, keys, which query takes which key, the scores' gradient by the scores [queries, keys])."""


def indexer_loss(call: IndexerLoss) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Operator `indexer_loss` -> (loss, and its gradients of q_idx, k_idx, w and bias)."""
    q, lengths = call.q, call.lengths
    loss, found = torch.zeros((), dtype=torch.promote_types(q.dtype, torch.float32)), 0

    def blocks() -> Iterable[Block]:
        nonlocal loss, found
        for b, queries, those, theirs, keys, keep in selected_blocks(call):
            if lengths is not None:
                keep = keep[: max(0, int(lengths[b]) - queries.start)]
                queries = slice(queries.start, queries.start + keep.shape[0])
            if keep.numel() == 0:
                continue
            some = keep.any(-1, keepdim=True)
            found += int(some.sum())
            wanted = probabilities(call, (b, queries, those, theirs, keys, keep)).flatten(0, 1).mean(0)

            def slope(scores: Tensor, wanted: Tensor = wanted, keep: Tensor = keep, some: Tensor = some) -> Tensor:
                nonlocal loss
                scores = scores.masked_fill(~keep, -torch.inf)
                logarithm = torch.where(keep & some, scores - scores.logsumexp(-1, keepdim=True), 0)
                loss += torch.where(wanted == 0, 0, wanted * (wanted.log() - logarithm)).sum()
                return torch.where(keep, logarithm.exp() - wanted, 0)

            yield b, queries, keys, keep, slope

    indexer = (call.q_idx, call.k_idx, call.w, call.bias)
    grads = gradients(call, indexer, blocks())
    each = 1 / max(found, 1)
    dqi, dki, dw, db = ((gradient * each).to(x.dtype) for gradient, x in zip(grads, indexer))
    return loss * each, dqi, dki, dw, db


def gradients(
    call: IndexerLoss | SparseAttentionBwd, indexer: tuple[Tensor, ...], blocks: Iterable[Block]
) -> tuple[Tensor, ...]:
    """Gradients of an indexer's q_idx, k_idx, w and bias, in the dtype that is computed in."""
    scale, activation = call.scale_idx, call.activation
    working = torch.promote_types(indexer[0].dtype, torch.float32)
    qi, ki, w, bias = (x.to(working) for x in indexer)
    weights = gates_of(w, activation)
    dqi, dki, dw, db = (torch.zeros(x.shape, dtype=working) for x in (qi, ki, w, bias))
    for b, queries, keys, keep, slope in blocks:
        # A query that takes no key may hold NaN.
        idle = ~keep.any(1)
        rows, weight = qi[b, :, queries].masked_fill(idle[:, None], 0), weights[b, queries].t().masked_fill(idle, 0)
        u = activated_(rows @ ki[b, keys].t() * scale + bias[:, None, None], activation)
        g = slope((u * weight[..., None]).sum(0))
        of_argument = g * weight[..., None] * derivative(u, activation)
        inner = 1 if activation == "relu" else weight * (1 - weight)
        dw[b, queries] += ((g * u).sum(-1) * inner).t()
        db += of_argument.sum((1, 2))
        dqi[b, :, queries] += of_argument @ ki[b, keys] * scale
        dki[b].index_add_(0, keys, (of_argument.transpose(1, 2) @ rows).sum(0) * scale)
    return dqi, dki, dw, db
