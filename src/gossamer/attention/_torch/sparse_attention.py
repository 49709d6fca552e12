"""Attention over selected keys, on the CPU: 128 queries at a time, over the keys that any of them takes."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gossamer._core import dropout
from gossamer.attention.records import QUERIES, IndexerLoss, SparseAttention, SparseAttentionBwd

PARTS = 2
Block = tuple[int, slice, slice, slice, Tensor, Tensor]


def position(length: int, num_queries: int, num_keys: int) -> int:
    """The key beside which query 0 stands, below 0 where that is in front of all keys. The last query stands beside the
    last of `length` keys; that these are fewer than num_keys moves no query in front of the first key."""
    return max(length - num_queries, min(num_keys - num_queries, 0))


Call = SparseAttention | SparseAttentionBwd | IndexerLoss


def selected_blocks(call: Call) -> Iterator[Block]:
    """(batch, queries, their heads, heads of keys, keys of the block, which query takes which key) of every block."""
    words, lengths, causal = call.words, call.lengths, call.causal
    (batch, heads, tq, _), (_, scopes, _, tk) = call.q.shape, words.shape
    paged = isinstance(call, SparseAttention) and call.table is not None
    groups = call.k.shape[2 if paged else 1]
    bits = torch.arange(QUERIES)[:, None]
    for b in range(batch):
        end = tk if lengths is None else max(0, min(tk, int(lengths[b])))
        offset = position(end, tq, tk)
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
                    stands = (queries.start + at + offset)[:, None]
                    keep &= (keys <= stands) & (stands < end)
                    # A key that no query takes may hold NaN.
                    some = keep.any(0)
                    keys, keep = keys[some], keep[:, some]
                yield b, queries, those, theirs, keys, keep


def folded(x: Tensor, b: int, heads: slice, queries: slice, groups: int, keep: Tensor) -> Tensor:
    """[heads, queries, D] of a batch, as [groups, heads of a group * queries, D]; a query that takes no key, which may
    hold NaN, is 0."""
    part = x[b, heads, queries].to(torch.promote_types(x.dtype, torch.float32))
    part = part.masked_fill(~keep.any(1, keepdim=True), 0)
    return part.reshape(groups, part[..., 0].numel() // groups, part.shape[-1])


def sparse_attention(call: SparseAttention) -> tuple[Tensor, Tensor]:
    """Operator `sparse_attention` -> (out [B, H, Tq, D], lse [B, H, Tq]), in one way for all paths."""
    q, k, v, table = call.q, call.k, call.v, call.table
    (batch, heads, tq, _), d = q.shape, v.shape[3]
    working = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(batch, tq, heads, d).transpose(1, 2)
    lse = torch.full((batch, heads, tq), -torch.inf, dtype=working)
    for block in selected_blocks(call):
        b, queries, those, _, keys, _ = block
        if not len(keys):
            continue
        s = scores(q, k, block, call.scale, table)
        most = s.amax(-1, keepdim=True)
        # A row without keys: anything finite will do.
        most.masked_fill_(most == -torch.inf, 0)
        p = s.sub_(most).exp_()
        total = p.sum(-1, keepdim=True)
        p = thinned(call, block, p)
        o = (p.flatten(1, 2) @ rows_of(v, block, table).to(working)).view(*p.shape[:3], d)
        out[b, those, queries] = (o / total.masked_fill(total == 0, 1)).flatten(0, 1).to(q.dtype)
        lse[b, those, queries] = (most + total.log()).flatten(0, 1)[..., 0]
    return out, lse


def rows_of(x: Tensor, block: Block, table: Tensor | None = None) -> Tensor:
    """The rows `[groups, keys, D]` of k or v, or of a pool of pages, that belong to a block."""
    b, _, _, theirs, keys, _ = block
    if table is None:
        return x[b, theirs][:, keys]
    page = table[b, keys // x.shape[1]].long()
    first, last = (int(page.min()), int(page.max())) if len(page) else (0, -1)
    if first < 0 or last >= x.shape[0]:
        raise ValueError(
            f"attention.sparse_attention: page_table must name pages in [0, P) with P = {x.shape[0]} for keys that a "
            f"query takes, got {first} to {last}."
        )
    return x[page, keys % x.shape[1], theirs].transpose(0, 1)


def scores(q: Tensor, k: Tensor, block: Block, scale: float, table: Tensor | None = None) -> Tensor:
    """Scores of a block, [groups, heads of a group, queries, keys], -inf where a query does not take a key."""
    b, queries, those, theirs, _, keep = block
    groups = theirs.stop - theirs.start
    rows = folded(q, b, those, queries, groups, keep)
    s = rows @ rows_of(k, block, table).to(rows.dtype).transpose(1, 2)
    return s.view(groups, (those.stop - those.start) // groups, *keep.shape).mul_(scale).masked_fill_(~keep, -torch.inf)


def probabilities(call: Any, block: Block) -> Tensor:
    """Probabilities of a block, laid out like `scores`, from the logarithm of the softmax's denominator."""
    b, queries, those, *_ = block
    lse, s = call.lse, scores(call.q, call.k, block, call.scale)
    total = lse[b, those, queries].view(*s.shape[:3], 1)
    return s.sub_(total.masked_fill(total == -torch.inf, 0)).exp_()


def thinned(call: Any, block: Block, p: Tensor) -> Tensor:
    """A block's probabilities, laid out like `scores`, or their gradients, times the factors of dropout."""
    if call.seed is None:
        return p
    b, queries, those, _, keys, _ = block
    pair = b * call.q.shape[1] + torch.arange(those.start, those.stop)[:, None, None]
    query = torch.arange(queries.start, queries.stop)[:, None]
    return p * dropout.weights(call.seed, pair, query, keys, call.drop, p.dtype).view_as(p)
