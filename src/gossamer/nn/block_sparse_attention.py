"""Attention over blocks of keys that a layout names, or that are selected from the input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature

import torch
from torch import Tensor, nn

from gossamer import blocksparse
from gossamer._core import checks
from gossamer.attention.rotary_gates import rotary_gates
from gossamer.blocksparse import Layout, Relative
from gossamer.nn.plain import why_called
from gossamer.nn.rotary_embedding import RotaryEmbedding, check_positions, size_of_heads

OPERATOR = "nn.BlockSparseAttention"

Positions = Sequence[Tensor | tuple[Tensor, Tensor]]


class BlockSparseAttention(nn.Module):
    """Multi-head attention in which each block of queries meets the blocks of keys that a layout lists.

    It takes the place of a dense attention layer: the same projections, no matrix of scores, and a cost that follows
    the blocks present. `load_state_dict` reads Llama-like attention; `from_multihead` copies `nn.MultiheadAttention`.

    Args:
        hidden_size: of x and of the result.
        num_heads, num_kv_heads: heads of queries, and of keys and values; None for as many.
        head_dim: None for hidden_size // num_heads.
        layout: a `blocksparse.Layout` whose leading dimensions broadcast to `[B, num_heads]`, or a function that makes
            one from the projected q `[B, num_heads, Tq, head_dim]` and k `[B, num_kv_heads, Tk, head_dim]`, called as
            `layout(q, k, causal=..., lengths=...)`, such as
            `functools.partial(blocksparse.select_blocks, block_size=64, top_k=16, window=1)`. None where each call
            brings its own.
        causal: whether a query meets no key behind its own position.
        bias: whether the projections have one.
        rope_theta: base of the rotary embeddings of q and k; None for none.
        relative_clips: for each term of relative positions from where on they are all the same: 64 makes a table of 129
            rows a head.
        dtype, device: of the parameters.

    Raises:
        ValueError: a size below 1, heads that do not divide, or an odd head_dim with rotary embeddings.
        TypeError: a size that is no int, or layout is neither a layout nor callable.

    Attributes:
        q_proj, k_proj, v_proj, o_proj: `nn.Linear`, as in Hugging Face's models.
        relative_tables: one parameter `[num_heads, 2 * clip + 1, head_dim]` a term, zeros at first.
        layout, causal: as given; may be assigned.

    Source: Schön and Tompits, blksprs, section 4.2 (a transformer with block-sparse attention).

    >>> from gossamer import blocksparse
    >>> layout = blocksparse.Layout.from_mask(torch.eye(2).bool(), 16)
    >>> BlockSparseAttention(32, 4, layout=layout)(torch.randn(2, 32, 32)).shape
    torch.Size([2, 32, 32])
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        layout: Layout | Callable[..., Layout] | None = None,
        causal: bool = False,
        bias: bool = False,
        rope_theta: float | None = None,
        relative_clips: Sequence[int] = (),
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        rotary = rope_theta is not None
        head_dim = size_of_heads(OPERATOR, hidden_size, num_heads, num_kv_heads, head_dim, rotary)
        if not (layout is None or isinstance(layout, Layout) or callable(layout)):
            raise TypeError(
                f"{OPERATOR}: layout must be a blocksparse.Layout, a function that makes one, or None, got "
                f"{type(layout).__name__}."
            )
        for clip in relative_clips:
            checks.positive(OPERATOR, "relative_clips", clip, "A term of clip c has 2c + 1 relative positions.")
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.layout, self.causal = layout, causal
        width, kv_width = num_heads * head_dim, num_kv_heads * head_dim
        self.q_proj = nn.Linear(hidden_size, width, bias=bias, dtype=dtype, device=device)
        self.k_proj = nn.Linear(hidden_size, kv_width, bias=bias, dtype=dtype, device=device)
        self.v_proj = nn.Linear(hidden_size, kv_width, bias=bias, dtype=dtype, device=device)
        self.o_proj = nn.Linear(width, hidden_size, bias=bias, dtype=dtype, device=device)
        self.rotary_emb = None if rope_theta is None else RotaryEmbedding(head_dim, rope_theta, device)
        tables = (torch.zeros(num_heads, 2 * clip + 1, head_dim, dtype=dtype, device=device) for clip in relative_clips)
        self.relative_tables = nn.ParameterList(nn.Parameter(table) for table in tables)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BlockSparseAttention:
        super()._apply(fn, recurse)
        device = self.q_proj.weight.device
        if isinstance(self.layout, Layout) and device.type != "meta" and device != self.layout.device:
            self.layout = self.layout.to(device)
        return self

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        layout: Layout | None = None,
        lengths: Tensor | None = None,
        position_ids: Tensor | None = None,
        relative_positions: Positions | None = None,
    ) -> Tensor:
        """x `[B, Tq, hidden_size]` -> `[B, Tq, hidden_size]`.

        Keys and values come from context `[B, Tk, hidden_size]`, or from x. A layout given here is used instead of the
        module's. lengths, int `[B]`, says how many keys of a sequence take part. position_ids, int `[Tq]` or
        `[B, Tq]`, None for 0 to Tq - 1, turn the rotary embeddings. relative_positions holds for each term the integer
        positions of queries and keys, `[T]` or `[B, T]`, a pair of these where they differ; None takes the order for
        every term, the last query beside the last key.
        """
        q, k, v = self.project(x, context, position_ids)
        if layout is None:
            layout = self._layout(q, k, lengths)
        terms = self._terms(q.shape[2], k.shape[2], relative_positions, x.device)
        given = {"causal": self.causal, "lengths": lengths}
        out = blocksparse.attention(q, k, v, layout, relative=terms, **given)  # type: ignore[arg-type]
        assert isinstance(out, Tensor)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def project(
        self, x: Tensor, context: Tensor | None = None, position_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v `[B, heads, T, head_dim]`, q and k turned where there are rotary embeddings."""
        source = x if context is None else context
        hidden_size = self.q_proj.in_features
        for name, given in (("x", x), ("context", source)):
            if given.dim() != 3 or given.shape[2] != hidden_size:
                raise ValueError(
                    f"{OPERATOR}: {name} must have shape [B, T, hidden_size] with hidden_size = {hidden_size}, got "
                    f"{list(given.shape)}."
                )
            if why_called(q_proj=self.q_proj) is None:
                checks.module_input(OPERATOR, name, given, self.q_proj.weight, "hidden_size", hidden_size)
        q, k, v = self.q_proj(x), self.k_proj(source), self.v_proj(source)
        if self.rotary_emb is None:
            q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))
        else:
            if context is not None:
                raise ValueError(
                    f"{OPERATOR}: context must be None with rotary embeddings: x and it share no positions."
                )
            if position_ids is None:
                position_ids = torch.arange(x.shape[1], device=x.device)
            check_positions(OPERATOR, position_ids, x)
            cos, sin = self.rotary_emb(position_ids)
            heads = self.num_heads, self.num_kv_heads
            plain = {"value_gate": False, "output_gate": False}
            q, k, v, _ = rotary_gates(torch.cat([q, k, v], -1), cos, sin, *heads, **plain)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _layout(self, q: Tensor, k: Tensor, lengths: Tensor | None) -> Layout:
        if self.layout is None:
            raise ValueError(
                f"{OPERATOR}: layout must be given, to the module or to this call. Layout.from_mask makes one."
            )
        if isinstance(self.layout, Layout):
            return self.layout
        given = {"causal": self.causal, "lengths": lengths}
        try:
            return self.layout(q, k, **given)
        except TypeError as error:
            try:
                signature(self.layout).bind(q, k, **given)
            except TypeError:
                raise TypeError(
                    f"{OPERATOR}: layout must take q, k, causal=... and lengths=..., got a function that does "
                    f"not: {error}. A function of q and k alone is lambda q, k, **_: ..."
                ) from None
            raise

    def _terms(self, tq: int, tk: int, positions: Positions | None, device: torch.device) -> list[Relative]:
        tables = list(self.relative_tables)
        if positions is None and not tables:
            return []
        if positions is None:
            keys = torch.arange(tk, device=device)
            positions = [(torch.arange(tk - tq, tk, device=device), keys)] * len(tables)
        if len(positions) != len(tables):
            raise ValueError(
                f"{OPERATOR}: relative_positions must hold positions for {len(tables)} terms like relative_clips, got "
                f"{len(positions)}."
            )
        pairs = (pair if isinstance(pair, tuple) else (pair, pair) for pair in positions)
        return [Relative(table, *pair) for table, pair in zip(tables, pairs)]

    @classmethod
    def from_multihead(
        cls, module: nn.MultiheadAttention, layout: Layout | Callable[..., Layout] | None = None, causal: bool = False
    ) -> BlockSparseAttention:
        """The same attention with copies of the parameters of an `nn.MultiheadAttention`, as self-attention or over a
        context.

        Raises:
            ValueError: the module has a part that this one does not have: dropout, keys or values of another size, a
                bias or zeros among its keys, or batches in its second dimension.
        """
        refused = {
            "dropout": module.dropout != 0,
            "kdim or vdim": not module._qkv_same_embed_dim,
            "add_bias_kv": module.bias_k is not None,
            "add_zero_attn": module.add_zero_attn,
            "batch_first=False": not module.batch_first,
        }
        if any(refused.values()):
            names = ", ".join(name for name, given in refused.items() if given)
            raise ValueError(f"{OPERATOR}: module must be a plain nn.MultiheadAttention, got one with {names}.")
        weight, bias, out = module.in_proj_weight, module.in_proj_bias, module.out_proj
        made = cls(module.embed_dim, module.num_heads, layout=layout, causal=causal, bias=bias is not None)
        made.to(device=weight.device, dtype=weight.dtype)
        with torch.no_grad():
            for projection, part in zip((made.q_proj, made.k_proj, made.v_proj), weight.chunk(3)):
                projection.weight.copy_(part)
            made.o_proj.weight.copy_(out.weight)
            if bias is not None:
                for projection, part in zip((made.q_proj, made.k_proj, made.v_proj), bias.chunk(3)):
                    projection.bias.copy_(part)
                made.o_proj.bias.copy_(out.bias)
        return made.train(module.training)

    def extra_repr(self) -> str:
        kind = self.layout if isinstance(self.layout, Layout) else type(self.layout).__name__
        return f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, causal={self.causal}, layout={kind}"
