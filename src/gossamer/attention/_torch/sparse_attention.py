"""Attention over selected keys, on the CPU: 128 queries at a time, over the keys that any of them takes."""

from collections.abc import Iterator

import torch
from torch import Tensor

QUERIES, PARTS = 64, 2


def selected_blocks(
    q: Tensor, k: Tensor, words: Tensor, lengths: Tensor | None, causal: bool
) -> Iterator[tuple[int, slice, slice, slice, Tensor, Tensor]]:
    """(batch, queries, their heads, heads of keys, keys of the block, which query takes which key) of every block."""
    (batch, heads, tq, _), (_, groups, tk, _) = q.shape, k.shape
    scopes = words.shape[1]
    bits = torch.arange(QUERIES)[:, None]
    for b in range(batch):
        end = tk if lengths is None else max(0, min(tk, int(lengths[b])))
        offset = tk - tq if lengths is None else max(end - tq, 0)
        for s in range(scopes):
            first = s * heads // scopes
            those = slice(first, first + heads // scopes)
            theirs = slice(first * groups // heads, -(-those.stop * groups // heads))
            for m in range(0, words.shape[2], PARTS):
                rows = words[b, s, m : m + PARTS, :end]
                queries = slice(m * QUERIES, min((m + PARTS) * QUERIES, tq))
                keys = rows.any(0).nonzero().squeeze(1)
                at = torch.arange(queries.stop - queries.start)
                keep = ((rows[:, None, keys] >> bits) & 1).flatten(0, 1)[: len(at)].bool()
                if causal:
                    keep &= keys <= (queries.start + at + offset)[:, None]
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
    path: str,
) -> tuple[Tensor, Tensor]:
    """Operator `sparse_attention` -> (out [B, H, Tq, D], lse [B, H, Tq]); it reads the words alone, and has one way."""
    batch, heads, tq, d = q.shape
    working = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(batch, tq, heads, d).transpose(1, 2)
    lse = torch.full((batch, heads, tq), -torch.inf, dtype=working)
    for b, queries, those, theirs, keys, keep in selected_blocks(q, k, words, lengths, causal):
        if not len(keys):
            continue
        s = scores(q, k, b, queries, those, theirs, keys, keep, scale)
        most = s.amax(-1, keepdim=True)
        # A row without keys: anything finite will do.
        most.masked_fill_(most == -torch.inf, 0)
        p = s.sub_(most).exp_()
        total = p.sum(-1, keepdim=True)
        o = (p.flatten(1, 2) @ v[b, theirs][:, keys].to(working)).view(*p.shape[:3], d)
        out[b, those, queries] = (o / total.masked_fill(total == 0, 1)).flatten(0, 1).to(q.dtype)
        lse[b, those, queries] = (most + total.log()).flatten(0, 1)[..., 0]
    return out, lse


def scores(
    q: Tensor, k: Tensor, b: int, queries: slice, those: slice, theirs: slice, keys: Tensor, keep: Tensor, scale: float
) -> Tensor:
    """Scores of a block, [groups, heads of a group, queries, keys], -inf where a query does not take a key."""
    groups = theirs.stop - theirs.start
    working = torch.promote_types(q.dtype, torch.float32)
    s = _folded(q, b, those, queries, groups, working) @ k[b, theirs][:, keys].to(working).transpose(1, 2)
    return s.view(groups, (those.stop - those.start) // groups, *keep.shape).mul_(scale).masked_fill_(~keep, -torch.inf)


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
    lse: Tensor,
) -> Tensor:
    """Probabilities of a block, laid out like `scores`, from the logarithm of the softmax's denominator."""
    s = scores(q, k, b, queries, those, theirs, keys, keep, scale)
    total = lse[b, those, queries].view(*s.shape[:3], 1)
    return s.sub_(total.masked_fill(total == -torch.inf, 0)).exp_()


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
    path: str,
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
        p = probabilities(q, k, b, queries, those, theirs, keys, keep, scale, lse)
        do, qb = (_folded(x, b, those, queries, groups, working) for x in (grad, q))
        dp = (do @ v[b, theirs][:, keys].to(working).transpose(1, 2)).view_as(p)
        ds = p * (dp - delta[b, those, queries].view(*p.shape[:3], 1)) * scale
        p, ds = p.flatten(1, 2), ds.flatten(1, 2)
        dq[b, those, queries] = (ds @ k[b, theirs][:, keys].to(working)).view(*dq[b, those, queries].shape).to(q.dtype)
        dv[b, theirs].index_add_(1, keys, p.transpose(1, 2) @ do)
        dk[b, theirs].index_add_(1, keys, ds.transpose(1, 2) @ qb)
    return dq, dk.to(k.dtype), dv.to(v.dtype)
