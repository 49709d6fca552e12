"""Gated sparse attention by plain PyTorch, for checks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gossamer import attention
from gossamer._core.ranges import span
from gossamer.nn.gated_sparse_attention import OPERATOR, GatedSparseAttention


class PlainGatedSparseAttention(GatedSparseAttention):
    """`GatedSparseAttention` by plain PyTorch, with matrices of T by T: for checks, and for a small T.

    Parameters, and so its `state_dict`, are the same. The number of keys is `k_base` for each query.
    """

    def _with_cache(self, *_: Any) -> Tensor:
        raise NotImplementedError(f"PlainGatedSparseAttention: a cache is not implemented. Use {OPERATOR}.")

    def run(
        self,
        x: Tensor,
        position_ids: Tensor | None = None,
        selection: attention.Selection | None = None,
        allowed: Tensor | None = None,
    ) -> Tensor:
        """As `GatedSparseAttention.run`."""
        if self.adaptive_k is not None:
            raise NotImplementedError("PlainGatedSparseAttention: adaptive=None is implemented alone.")
        if self.granularity != 1:
            raise NotImplementedError("PlainGatedSparseAttention: granularity=1 is implemented alone.")
        with span("gsa_ref/qkv_proj"):
            q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        length = x.shape[1]
        with span("gsa_ref/rotary_emb"):
            positions = torch.arange(length, device=x.device) if position_ids is None else position_ids
            q, k = (_turned(t, *(angle[..., None, :] for angle in self.rotary_emb(positions))) for t in (q, k))
        if self.value_gate is not None:
            with span("gsa_ref/value_gate"):
                v = v * self.value_gate.gate_proj(x).sigmoid().view_as(v)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        seen = torch.ones(x.shape[0], 1, length, length, dtype=torch.bool, device=x.device).tril()
        seen = seen if allowed is None else seen & allowed
        if selection is not None:
            taken = selection.to_mask() & seen
        elif self.dense or length <= self.k_base:
            taken = seen
        else:
            with span("gsa_ref/indexer"):
                scores = self.scores(*self.index(x))[:, None].masked_fill(~seen, -torch.inf)
            with span("gsa_ref/topk_select"):
                # Sorted stably: of equal scores the first ones win.
                best = scores.sort(dim=-1, descending=True, stable=True).indices[..., : self.k_base]
                taken = torch.zeros_like(seen).scatter(3, best, True) & seen
        with span("gsa_ref/sparse_attn"):
            shared = self.num_heads // self.num_kv_heads
            k, v = (t.repeat_interleave(shared, 1) for t in (k, v))
            s = (q @ k.transpose(2, 3)) * self.head_dim**-0.5
            # A query that takes no key has a result of 0.
            out = (s.masked_fill(~taken, -torch.inf).softmax(-1).where(taken, 0) @ v).transpose(1, 2).flatten(2)
        if self.output_gate is not None:
            with span("gsa_ref/output_gate"):
                out = out * self.output_gate.gate_proj(x).sigmoid()
        with span("gsa_ref/o_proj"):
            return self.o_proj(out)

    @torch.no_grad()
    def scores(self, q: Tensor, k: Tensor, w: Tensor) -> Tensor:
        """The indexer's scores of each query and key, `[B, T, T]`, -inf where a key stands behind the query."""
        z = q @ k[:, None].transpose(2, 3) * self.indexer.head_dim**-0.5
        z = (z + self.indexer.idx_bias[:, None, None]).sigmoid() * w.sigmoid().transpose(1, 2)[..., None]
        seen = torch.ones(z.shape[2:], dtype=torch.bool, device=z.device).tril()
        return z.sum(1).masked_fill(~seen, -torch.inf)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x `[B, T, heads, D]` in rotary embeddings, computed in float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    low, high = wide.chunk(2, -1)
    return (wide * cos + torch.cat([-high, low], -1) * sin).to(x.dtype)
