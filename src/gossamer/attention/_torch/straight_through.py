"""What attention's gradient says about the scores that selected its keys, on the CPU, 128 queries at a time."""

import torch
from torch import Tensor

from gossamer.attention._torch.sparse_attention import probabilities, selected_blocks, sparse_attention


def straight_through(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Operator `straight_through` -> gradients of q_idx, k_idx, w and bias."""
    working = torch.promote_types(q.dtype, torch.float32)
    qi, ki, bi = (x.to(working) for x in (q_idx, k_idx, bias))
    weights = w.to(working).sigmoid().transpose(1, 2)
    dqi, dki, dw, db = (torch.zeros_like(x) for x in (qi, ki, weights, bi))
    delta = (grad.to(working) * out.to(working)).sum(-1)
    if grad_lse is not None:
        delta -= grad_lse
    for b, queries, those, theirs, keys, keep in selected_blocks(q, k, words, lengths, causal):
        p = probabilities(q, k, b, queries, those, theirs, keys, keep, scale, lse)
        do = grad[b, those, queries].to(working).reshape(*p.shape[:3], -1)
        dp = do @ v[b, theirs][:, None, keys].to(working).transpose(2, 3)
        g = (p * (dp - delta[b, those, queries].reshape(*p.shape[:3], 1))).sum((0, 1))
        u = (qi[b, :, queries] @ ki[b, keys].t() * scale_idx + bi[:, None, None]).sigmoid()
        weight = weights[b, :, queries, None]
        of_argument = g * weight * u * (1 - u)
        dw[b, :, queries] += (g * u).sum(-1) * (weight * (1 - weight))[..., 0]
        db += of_argument.sum((1, 2))
        dqi[b, :, queries] += of_argument @ ki[b, keys] * scale_idx
        dki[b].index_add_(0, keys, (of_argument.transpose(1, 2) @ qi[b, :, queries]).sum(0) * scale_idx)
    made = ((dqi, q_idx), (dki, k_idx), (dw.transpose(1, 2), w), (db, bias))
    dqi, dki, dw, db = (gradient.to(x.dtype) for gradient, x in made)
    return dqi, dki, dw, db


def sparse_attention_through(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    words: Tensor,
    counts: Tensor,
    indices: Tensor,
    lengths: Tensor | None,
    scale: float,
    causal: bool,
    path: str,
    q_idx: Tensor,
    k_idx: Tensor,
    w: Tensor,
    bias: Tensor,
    scale_idx: float,
) -> tuple[Tensor, Tensor]:
    """Operator `sparse_attention_through`: as `sparse_attention`; what it has more is for the way back."""
    return sparse_attention(q, k, v, words, counts, indices, lengths, scale, causal, path)
