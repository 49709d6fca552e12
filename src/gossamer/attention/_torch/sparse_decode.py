"""Attention of a few new queries over selected keys of a long cache, on the CPU."""

import torch
from torch import Tensor

from gossamer.attention._torch.sparse_attention import position, sparse_attention

QUERIES = 64


def sparse_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    words: Tensor,
    lengths: Tensor | None,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Operator `sparse_decode` -> (out [B, H, Tq, D], lse [B, H, Tq]). Of the cache, only what is taken is read."""
    b, h, tq, d = q.shape
    out = q.new_empty(b, tq, h, d).transpose(1, 2)
    lse = q.new_empty((b, h, tq), dtype=torch.promote_types(q.dtype, torch.float32))
    for i in range(b):
        row, tk = words[i : i + 1].clone(), words.shape[3]
        end = tk if lengths is None else max(0, min(tk, int(lengths[i])))
        row[..., end:] = 0
        if causal:
            row &= _not_before(tq, tk, position(end, tq, tk))
        keys = (row != 0).any(2).any(1)[0].nonzero().squeeze(1)
        if table is None:
            some = [x[i : i + 1, :, keys] for x in (k, v)]
        else:
            page = table[i, keys // k.shape[1]].long()
            first, last = (int(page.min()), int(page.max())) if len(page) else (0, -1)
            if first < 0 or last >= k.shape[0]:
                raise ValueError(
                    f"attention.sparse_decode: page_table must name pages in [0, P) with P = {k.shape[0]} for keys "
                    f"that a query takes, got {first} to {last}."
                )
            some = [x[page, keys % k.shape[1]].transpose(0, 1)[None] for x in (k, v)]
        row = row[..., keys]
        one = sparse_attention(q[i : i + 1], some[0], some[1], row, None, scale, False, "decode")
        out[i], lse[i] = one[0][0], one[1][0]
    return out, lse


def _not_before(tq: int, tk: int, offset: int) -> Tensor:
    """int64 [blocks, Tk]: the bits of queries that do not stand before the key; query i stands at key i + offset."""
    first = torch.arange(0, tq, QUERIES)[:, None] + offset
    before = torch.arange(tk) - first
    return torch.where(before > 63, 0, torch.full((), -1) << before.clamp(0, 63))
