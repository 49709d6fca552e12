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


def gates_of(w: Tensor, activation: str) -> Tensor:
    """The factors of the heads."""
    return w if activation == "relu" else w.sigmoid()


def activated_(x: Tensor, activation: str) -> Tensor:
    return x.relu_() if activation == "relu" else x.sigmoid_()


def derivative(active: Tensor, activation: str) -> Tensor:
    """The derivative of the activation, by its value."""
    return (~(active <= 0)).to(active.dtype) if activation == "relu" else active * (1 - active)


def score_rows(q: Tensor, k: Tensor, gates: Tensor, bias: Tensor | None, scale: float, activation: str) -> Tensor:
    """[R, Tk] from q [Hi, R, Di], k [Tk, Di] and gates [R, Hi], all of one dtype."""
    out = torch.zeros(q.shape[1], k.shape[0], dtype=q.dtype, device=q.device)
    for h in range(q.shape[0]):
        x = q[h] @ k.t() * scale
        active = activated_(x if bias is None else x.add_(bias[h]), activation)
        out.addcmul_(gates[:, h, None], active)
    return out


def indexer_scores(call: IndexerScores) -> Tensor:
    """Operator `indexer_scores` -> [B, Tq, Tk]."""
    q, k, w, bias, lengths, scale, causal, activation, out_dtype = call
    (b, _, tq, _), tk, dtype = q.shape, k.shape[1], working(q.dtype)
    visible = visible_keys(tq, tk, causal, lengths, b, q.device)
    hidden = torch.arange(tk, device=q.device) >= visible[:, :, None]
    out = q.new_empty((b, tq, tk), dtype=out_dtype)
    bias = None if bias is None else bias.to(dtype)
    for i in range(b):
        gates = gates_of(w[i].to(dtype), activation)
        scores = score_rows(q[i].to(dtype), k[i].to(dtype), gates, bias, scale, activation)
        out[i] = scores.masked_fill_(hidden[i], -torch.inf)
    return out


def indexer_scores_backward(call: IndexerScoresBackward) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Operator `indexer_scores_backward` -> gradients of q, k, w and bias (in the dtype that is computed in)."""
    grad, q, k, w, bias, lengths, scale, causal, activation = call
    (b, heads, tq, _), tk, dtype = q.shape, k.shape[1], working(q.dtype)
    visible = visible_keys(tq, tk, causal, lengths, b, q.device)
    hidden = torch.arange(tk, device=q.device) >= visible[:, :, None]
    dq, dk, dw = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, w))
    dbias = torch.zeros(heads, dtype=dtype, device=q.device)
    for i in range(b):
        # A key that no query sees may hold NaN.
        end = int(visible[i].max()) if tq else 0
        keys, gates, unseen = k[i, :end].to(dtype), gates_of(w[i].to(dtype), activation), hidden[i, :, :end]
        given = grad[i, :, :end].to(dtype).masked_fill(unseen, 0)
        for h in range(heads):
            queries = q[i, h].to(dtype)
            x = queries @ keys.t() * scale
            active = activated_(x if bias is None else x.add_(bias[h].to(dtype)), activation)
            gate = gates[:, h]
            dgate = (given * active).masked_fill_(unseen, 0).sum(1)
            dw[i, :, h] = dgate if activation == "relu" else dgate * gate * (1 - gate)
            dx = derivative(active, activation).mul_(given).mul_(gate[:, None]).masked_fill_(unseen, 0)
            dbias[h] += dx.sum()
            dq[i, h] = dx @ keys * scale
            dk[i, :end] += dx.t() @ queries * scale
    return dq.to(q.dtype), dk.to(k.dtype), dw.to(w.dtype), dbias
