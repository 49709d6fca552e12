"""Attention over selected keys, on the CPU: block of 64 queries by block, over the keys that any of them takes."""

from collections.abc import Iterator

import torch
from torch import Tensor

QUERIES = 64


def selected_blocks(
    q: Tensor, k: Tensor, words: Tensor, lengths: Tensor | None, causal: bool
) -> Iterator[tuple[int, slice, slice, slice, Tensor, Tensor]]:
    """(batch, queries, their heads, heads of keys, keys of the block, which query takes which key) of every block."""
    (batch, heads, tq, _), (_, groups, tk, _) = q.shape, k.shape
    scopes = words.shape[1]
    bits = torch.arange(QUERIES)
    for b in range(batch):
        end = tk if lengths is None else int(lengths[b])
        for s in range(scopes):
            first = s * heads // scopes
            those = slice(first, first + heads // scopes)
            theirs = slice(first * groups // heads, -(-those.stop * groups // heads))
            for m, row in enumerate(words[b, s]):
                queries = slice(m * QUERIES, min(m * QUERIES + QUERIES, tq))
                keys = row[:end].nonzero().squeeze(1)
                at = bits[: queries.stop - queries.start]
                keep = ((row[keys][None, :] >> at[:, None]) & 1).bool()
                if causal:
                    keep &= keys <= (queries.start + at + tk - tq)[:, None]
                yield b, queries, those, theirs, keys, keep


def _folded(x: Tensor, b: int, heads: slice, queries: slice, groups: int, working: torch.dtype) -> Tensor:
    """[heads, queries, D] of a batch, as [groups, heads of a group * queries, D]."""
    part = x[b, heads, queries].to(working)
    return part.reshape(groups, part[..., 0].numel() // groups, part.shape[-1])


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    words: Tensor,
    counts: Tensor,
    indices: Tensor,
    lengths: Tensor | None,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Operator `sparse_attention` -> (out [B, H, Tq, D], lse [B, H, Tq]); it reads the words alone."""
    batch, heads, tq, d = q.shape
    working = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(batch, tq, heads, d).transpose(1, 2)
    lse = torch.full((batch, heads, tq), -torch.inf, dtype=working)
    for b, queries, those, theirs, keys, keep in selected_blocks(q, k, words, lengths, causal):
        s, p = probabilities(q, k, b, queries, those, theirs, keys, keep, scale)
        o = p.flatten(1, 2) @ v[b, theirs][:, keys].to(working)
        out[b, those, queries] = o.view(*out[b, those, queries].shape).to(q.dtype)
        lse[b, those, queries] = s.logsumexp(-1).flatten(0, 1)
    return out, lse


def probabilities(
    q: Tensor,
    k: Tensor,
    b: int,
    queries: slice,
    those: slice,
    theirs: slice,
    keys: Tensor,
    keep: Tensor,
    scale: float,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(scores, probabilities) of a block, [groups, heads of a group, queries, keys]."""
    groups = theirs.stop - theirs.start
    each = (those.stop - those.start) // groups
    working = torch.promote_types(q.dtype, torch.float32)
    s = _folded(q, b, those, queries, groups, working) @ k[b, theirs][:, keys].to(working).transpose(1, 2)
    s = (s.view(groups, each, *keep.shape) * scale).masked_fill(~keep, -torch.inf)
    if lse is None:
        total = s.logsumexp(-1, keepdim=True)
    else:
        total = lse[b, those, queries].view(groups, each, keep.shape[0], 1)
    return s, torch.where(keep, (s - total).exp(), 0)


def sparse_attention_bwd(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    words: Tensor,
    counts: Tensor,
    indices: Tensor,
    lengths: Tensor | None,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Operator `sparse_attention_bwd` -> gradients of q, k and v."""
    working = torch.promote_types(q.dtype, torch.float32)
    dq = q.new_zeros(q.shape)
    dk, dv = (torch.zeros(x.shape, dtype=working) for x in (k, v))
    delta = (grad.to(working) * out.to(working)).sum(-1)
    if grad_lse is not None:
        delta -= grad_lse
    for b, queries, those, theirs, keys, keep in selected_blocks(q, k, words, lengths, causal):
        groups = theirs.stop - theirs.start
        _, p = probabilities(q, k, b, queries, those, theirs, keys, keep, scale, lse)
        do, qb = (_folded(x, b, those, queries, groups, working) for x in (grad, q))
        dp = (do @ v[b, theirs][:, keys].to(working).transpose(1, 2)).view_as(p)
        ds = p * (dp - delta[b, those, queries].view(*p.shape[:3], 1)) * scale
        p, ds = p.flatten(1, 2), ds.flatten(1, 2)
        dq[b, those, queries] = (ds @ k[b, theirs][:, keys].to(working)).view(*dq[b, those, queries].shape).to(q.dtype)
        dv[b, theirs].index_add_(1, keys, p.transpose(1, 2) @ do)
        dk[b, theirs].index_add_(1, keys, ds.transpose(1, 2) @ qb)
    return dq, dk.to(k.dtype), dv.to(v.dtype)
