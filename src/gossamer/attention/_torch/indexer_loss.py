"""How far an indexer's scores are from attention, on the CPU, 128 queries at a time."""

import torch
from torch import Tensor

from gossamer.attention._torch.sparse_attention import probabilities, selected_blocks


def indexer_loss(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    q_idx: Tensor,
    k_idx: Tensor,
    w: Tensor,
    bias: Tensor,
    words: Tensor,
    lengths: Tensor | None,
    scale: float,
    scale_idx: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Operator `indexer_loss` -> (loss, and its gradients of q_idx, k_idx, w and bias)."""
    working = torch.promote_types(q.dtype, torch.float32)
    qi, ki, bi = (x.to(working) for x in (q_idx, k_idx, bias))
    weights = w.to(working).sigmoid().transpose(1, 2)
    dqi, dki, dw, db = (torch.zeros_like(x) for x in (qi, ki, weights, bi))
    loss, found = torch.zeros((), dtype=working), 0
    for b, queries, those, theirs, keys, keep in selected_blocks(q, k, words, lengths, causal):
        if lengths is not None:
            keep = keep[: max(0, int(lengths[b]) - queries.start)]
            queries = slice(queries.start, queries.start + keep.shape[0])
        if keep.numel() == 0:
            continue
        some = keep.any(-1, keepdim=True)
        found += int(some.sum())
        p = probabilities(q, k, b, queries, those, theirs, keys, keep, scale, lse)
        wanted = p.flatten(0, 1).mean(0)
        z = qi[b, :, queries] @ ki[b, keys].t() * scale_idx + bi[:, None, None]
        u, weight = z.sigmoid(), weights[b, :, queries, None]
        scores = (u * weight).sum(0).masked_fill(~keep, -torch.inf)
        logarithm = torch.where(keep & some, scores - scores.logsumexp(-1, keepdim=True), 0)
        loss += torch.where(wanted == 0, 0, wanted * (wanted.log() - logarithm)).sum()
        g = torch.where(keep, logarithm.exp() - wanted, 0)
        of_argument = g * weight * u * (1 - u)
        dw[b, :, queries] = (g * u).sum(-1) * (weight * (1 - weight))[..., 0]
        db += of_argument.sum((1, 2))
        dqi[b, :, queries] = of_argument @ ki[b, keys] * scale_idx
        dki[b].index_add_(0, keys, (of_argument.transpose(1, 2) @ qi[b, :, queries]).sum(0) * scale_idx)
    each = 1 / max(found, 1)
    made = ((dqi, q_idx), (dki, k_idx), (dw.transpose(1, 2), w), (db, bias))
    dqi, dki, dw, db = ((gradient * each).to(x.dtype) for gradient, x in made)
    return loss * each, dqi, dki, dw, db
