"""The indexer's scores and their gradients, on the CPU: head by head, so that nothing of [heads, Tq, Tk] exists."""

import torch
from torch import Tensor

from gossamer.attention.records import IndexerScores, IndexerScoresBackward


def visible_keys(tq: int, tk: int, causal: bool, lengths: Tensor | None, batch: int, device: torch.device) -> Tensor:
    """int64 [B, Tq]: how many keys, from the first on, each query sees.

    The last query is aligned with the last key of its batch element, or the first with the first where that has fewer
    keys than there are queries.
    """
    length = torch.full((batch,), tk, device=device) if lengths is None else lengths.long().clamp(0, tk)
    length = length[:, None]
    if not causal:
        return length.expand(batch, tq)
    seen = torch.arange(1, tq + 1, device=device) + (length - tq).clamp(min=0)
    return torch.minimum(seen, length)


def working(dtype: torch.dtype) -> torch.dtype:
    """The dtype that is computed in."""
    return torch.promote_types(dtype, torch.float32)


def score_rows(q: Tensor, k: Tensor, gates: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """[R, Tk] from q [Hi, R, Di], k [Tk, Di] and gates [R, Hi], all of one dtype."""
    out = torch.zeros(q.shape[1], k.shape[0], dtype=q.dtype, device=q.device)
    for h in range(q.shape[0]):
        x = q[h] @ k.t() * scale
        active = (x if bias is None else x.add_(bias[h])).sigmoid_()
        out.addcmul_(gates[:, h, None], active)
    return out


def indexer_scores(call: IndexerScores) -> Tensor:
    """Operator `indexer_scores` -> [B, Tq, Tk]."""
    q, k, w, bias, lengths, scale, causal, out_dtype = call
    (b, _, tq, _), tk, dtype = q.shape, k.shape[1], working(q.dtype)
    visible = visible_keys(tq, tk, causal, lengths, b, q.device)
    hidden = torch.arange(tk, device=q.device) >= visible[:, :, None]
    out = q.new_empty((b, tq, tk), dtype=out_dtype)
    bias = None if bias is None else bias.to(dtype)
    for i in range(b):
        scores = score_rows(q[i].to(dtype), k[i].to(dtype), w[i].to(dtype).sigmoid(), bias, scale)
        out[i] = scores.masked_fill_(hidden[i], -torch.inf)
    return out


def indexer_scores_backward(call: IndexerScoresBackward) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Operator `indexer_scores_backward` -> gradients of q, k, w and bias (in the dtype that is computed in)."""
    grad, q, k, w, bias, lengths, scale, causal = call
    (b, heads, tq, _), tk, dtype = q.shape, k.shape[1], working(q.dtype)
    visible = visible_keys(tq, tk, causal, lengths, b, q.device)
    hidden = torch.arange(tk, device=q.device) >= visible[:, :, None]
    dq, dk, dw = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, w))
    dbias = torch.zeros(heads, dtype=dtype, device=q.device)
    for i in range(b):
        # A key that no query sees may hold NaN.
        end = int(visible[i].max()) if tq else 0
        keys, gates, unseen = k[i, :end].to(dtype), w[i].to(dtype).sigmoid(), hidden[i, :, :end]
        given = grad[i, :, :end].to(dtype).masked_fill(unseen, 0)
        for h in range(heads):
            queries = q[i, h].to(dtype)
            x = queries @ keys.t() * scale
            active = (x if bias is None else x.add_(bias[h].to(dtype))).sigmoid_()
            through = (given * active).masked_fill_(unseen, 0)
            gate = gates[:, h]
            dw[i, :, h] = through.sum(1) * gate * (1 - gate)
            dx = through.mul_(1 - active).mul_(gate[:, None]).masked_fill_(unseen, 0)
            dbias[h] += dx.sum()
            dq[i, h] = dx @ keys * scale
            dk[i, :end] += dx.t() @ queries * scale
    return dq.to(q.dtype), dk.to(k.dtype), dw.to(w.dtype), dbias
