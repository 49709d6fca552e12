"""Gradients of attention over selected keys, on the CPU: 128 queries at a time; and those of the indexer that selected,
straight through the selection."""

from collections.abc import Iterator

import torch
from torch import Tensor

from gossamer.attention._torch import indexer_loss
from gossamer.attention._torch.sparse_attention import Block, folded, probabilities, rows_of, selected_blocks, thinned
from gossamer.attention.records import SparseAttentionBwd


def logits_gradient(call: SparseAttentionBwd, block: Block, delta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of a block: (probabilities times the factors of dropout, gradients of the logits, both like `scores`; grad,
    folded)."""
    b, queries, those, theirs, _, keep = block
    p, grad, v = probabilities(call, block), call.grad, call.v
    do = folded(grad, b, those, queries, theirs.stop - theirs.start, keep)
    dp = thinned(call, block, (do @ rows_of(v, block).to(do.dtype).transpose(1, 2)).view_as(p))
    return thinned(call, block, p), p * (dp - delta[b, those, queries].view(*p.shape[:3], 1)), do


def row_statistics(call: SparseAttentionBwd) -> Tensor:
    """The term that a softmax's gradient subtracts, [B, H, Tq]; 0 for a query that takes no key."""
    grad, out, lse, grad_lse = call.grad, call.out, call.lse, call.grad_lse
    delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    if grad_lse is not None:
        delta -= grad_lse
    return delta.masked_fill_(lse == -torch.inf, 0)


def sparse_attention_bwd(call: SparseAttentionBwd) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Operator `sparse_attention_bwd` -> gradients of q, k, v, q_idx, k_idx, w and bias."""
    q, k, v, scale = call.q, call.k, call.v, call.scale
    working = torch.promote_types(q.dtype, torch.float32)
    dq = q.new_zeros(q.shape if call.attended else 0)
    dk, dv = (torch.zeros(x.shape if call.attended else 0, dtype=working) for x in (k, v))
    delta = row_statistics(call)

    def blocks() -> Iterator[indexer_loss.Block]:
        for block in selected_blocks(call):
            b, queries, those, theirs, keys, keep = block
            p, logits, do = logits_gradient(call, block, delta)
            if call.attended:
                qb = folded(q, b, those, queries, theirs.stop - theirs.start, keep)
                p, ds = p.flatten(1, 2), logits.flatten(1, 2) * scale
                part = dq[b, those, queries]
                part.copy_((ds @ rows_of(k, block).to(working)).view_as(part))
                dv[b, theirs].index_add_(1, keys, p.transpose(1, 2) @ do)
                dk[b, theirs].index_add_(1, keys, ds.transpose(1, 2) @ qb)

            def of_scores(_: Tensor, logits: Tensor = logits) -> Tensor:
                return logits.sum((0, 1))

            yield b, queries, keys, keep, of_scores

    indexer = tuple(x for x in (call.q_idx, call.k_idx, call.w, call.bias) if x is not None)
    if indexer:
        found = indexer_loss.gradients(call, indexer, blocks())
        dqi, dki, dw, db = (gradient.to(x.dtype) for gradient, x in zip(found, indexer))
    else:
        for _ in blocks():
            pass
        dqi, dki, dw, db = (q.new_empty(0) for _ in range(4))
    return dq, dk.to(k.dtype), dv.to(v.dtype), dqi, dki, dw, db
