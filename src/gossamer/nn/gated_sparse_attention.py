"""Gated sparse attention: an indexer selects the keys of each query; values and outputs are gated."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer import attention
from gossamer._core import autocast, checks
from gossamer._core.compiling import together
from gossamer._core.ops import needs_gradient
from gossamer._core.ranges import span
from gossamer.attention.sparse_attention import FEW_QUERIES
from gossamer.nn.attention_cache import AttentionCache
from gossamer.nn.plain import hooked, why_called


def _place(tensor: Tensor) -> tuple[torch.device, Any]:
    """Where what is made now belongs: another stream would not wait for it."""
    return tensor.device, torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


class RotaryEmbedding(nn.Module):
    """Angles of rotary position embeddings; `inv_freq` `[D / 2]` is a buffer."""

    inv_freq: Tensor
    # Here for modules that were pickled without them.
    _first: tuple[Tensor, tuple[Any, ...], tuple[Tensor, Tensor]] | None = None
    _kept: tuple[Any, Tensor] | None = None

    def __init__(self, head_dim: int, theta: float, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.head_dim, self.theta = head_dim, theta
        self.register_buffer("inv_freq", self._frequencies(device))

    def __getstate__(self) -> dict[str, Any]:
        """What is kept stays here: it belongs to a stream, and a copy makes its own."""
        return {**self.__dict__, "_first": None, "_kept": None}

    def _frequencies(self, device: torch.device | str | None) -> Tensor:
        return self.theta ** -(torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device) / self.head_dim)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) in float32, `[..., D]`, of integer positions `[...]`."""
        # A module that was cast to 16 bits has frequencies that are of no use at large positions.
        wide = self.inv_freq.dtype in (torch.float32, torch.float64)
        angles = positions[..., None].float() * (self.inv_freq if wide else self._wide(positions)).float()
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()

    def of_first(self, count: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) of positions 0 to count - 1, beside `like`. In inference they are kept from call to call, up to
        KEPT_ANGLES of them, for six launches are a tenth of a short call; they are not to be written to."""
        if count * self.head_dim > KEPT_ANGLES or not _plain_inference(like) or checks.capturing():
            return self(torch.arange(count, device=like.device))
        # A module that was moved or loaded has another buffer, or another version of it, but for writes to `.data`.
        of = self.inv_freq
        if of.is_inference():
            return self(torch.arange(count, device=like.device))
        key = (count, _place(like), of._version)
        # Read once, for another thread may keep others meanwhile.
        kept = self._first
        if kept is None or kept[0] is not of or kept[1] != key:
            kept = self._first = of, key, self(torch.arange(count, device=like.device))
        return kept[2]

    def _wide(self, positions: Tensor) -> Tensor:
        """The frequencies in float32, kept, for four small kernels make them."""
        # What a graph makes is there only when it is replayed.
        if torch.compiler.is_compiling() or type(positions) is not Tensor or checks.capturing():
            return self._frequencies(positions.device)
        key, kept = (self.head_dim, self.theta, *_place(positions)), self._kept
        if kept is None or type(kept[1]) is not Tensor or kept[0] != key:
            kept = self._kept = key, self._frequencies(positions.device)
        return kept[1]


class LightningIndexer(nn.Module):
    """Projections of x to the queries, keys, and weights of heads that score keys."""

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int, **options: Any) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim
        self.idx_q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False, **options)
        self.idx_k_proj = nn.Linear(hidden_size, head_dim, bias=False, **options)
        self.idx_w_proj = nn.Linear(hidden_size, num_heads, **options)
        self.idx_bias = nn.Parameter(torch.zeros(num_heads, **options))


class Gate(nn.Module):
    """sigmoid(gate_proj(x)), one half everywhere at first."""

    def __init__(self, hidden_size: int, width: int, **options: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, width, **options)
        nn.init.zeros_(self.gate_proj.weight)
        nn.init.zeros_(self.gate_proj.bias)


class GatedSparseAttention(nn.Module):
    """Causal self-attention in which each query takes the keys that an indexer scores highest.

    v is gated by a sigmoid of x before attention, and what attention returns by another after it. As long as a
    sequence is no longer than the fewest keys that a query takes, attention is dense, and the indexer is not asked.
    The indexer gets no gradient from here: selecting has none. Its own loss is `attention.indexer_loss`.

    Args:
        hidden_size: of x and of the result.
        num_heads, num_kv_heads: heads of queries, and of keys and values; None for as many.
        k_base: keys of each query.
        k_min, k_max: bounds of the keys of a query where they are `adaptive`.
        d_indexer, n_idx_heads: size and number of the indexer's heads.
        head_dim: None for hidden_size // num_heads.
        adaptive: None for k_base keys, or how their number follows from a query's scores: an `attention.AdaptiveK`, or
            the name of a rule that needs nothing but k_min, k_base and k_max.
        value_gate, output_gate: whether there is such a gate.
        rope_theta: base of the rotary embeddings.
        granularity: 1, or 4 to select units of four neighbouring keys, as in `attention.select_topk`.
        dtype, device: of the parameters.

    Raises:
        ValueError: a size below 1, heads that do not divide, an odd head_dim, k_min, k_base and k_max do not ascend, or
            no granularity. That k is a multiple of it is found out when it selects.
        TypeError: a size that is no int.

    Attributes:
        q_proj, k_proj, v_proj, o_proj: as in the published models, and so are indexer.idx_q_proj, indexer.idx_k_proj,
            indexer.idx_w_proj, indexer.idx_bias, value_gate.gate_proj, output_gate.gate_proj and rotary_emb.inv_freq.
        dense: True attends to every visible key, for a warm-up of the indexer.

    Source: Gated Sparse Attention (arXiv 2601.15305).

    >>> GatedSparseAttention(32, 4, k_base=8, k_min=4, k_max=16, d_indexer=16)(torch.randn(2, 20, 32)).shape
    torch.Size([2, 20, 32])
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        k_base: int = 2048,
        k_min: int = 256,
        k_max: int = 4096,
        d_indexer: int = 64,
        n_idx_heads: int = 4,
        head_dim: int | None = None,
        adaptive: attention.AdaptiveK | str | None = None,
        value_gate: bool = True,
        output_gate: bool = True,
        rope_theta: float = 10000.0,
        *,
        granularity: int = 1,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        sizes = {"hidden_size": hidden_size, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "k_min": k_min}
        sizes |= {"d_indexer": d_indexer, "n_idx_heads": n_idx_heads}
        for name, size in sizes.items():
            checks.positive(OPERATOR, name, size, "It is a size.")
        head_dim = hidden_size // num_heads if head_dim is None else head_dim
        if num_heads % num_kv_heads or head_dim < 2 or head_dim % 2:
            raise ValueError(
                f"{OPERATOR}: num_kv_heads must divide num_heads, and head_dim be even, got {num_kv_heads}, "
                f"{num_heads} and {head_dim}."
            )
        if not k_min <= k_base <= k_max:
            raise ValueError(f"{OPERATOR}: k_min, k_base and k_max must ascend, got {k_min}, {k_base} and {k_max}.")
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        if granularity not in (1, 4) or isinstance(granularity, bool):
            raise ValueError(f"{OPERATOR}: granularity must be 1 or 4, got {granularity!r}.")
        self.k_base, self.granularity = k_base, granularity
        if isinstance(adaptive, str):
            adaptive = attention.AdaptiveK(adaptive, k_min, k_base, k_max)
        self.adaptive = adaptive
        self.dense = False
        options = {"dtype": dtype, "device": device}
        width, kv_width = num_heads * head_dim, num_kv_heads * head_dim
        self.q_proj = nn.Linear(hidden_size, width, bias=False, dtype=dtype, device=device)
        self.k_proj = nn.Linear(hidden_size, kv_width, bias=False, dtype=dtype, device=device)
        self.v_proj = nn.Linear(hidden_size, kv_width, bias=False, dtype=dtype, device=device)
        self.o_proj = nn.Linear(width, hidden_size, bias=False, dtype=dtype, device=device)
        self.indexer = LightningIndexer(hidden_size, n_idx_heads, d_indexer, **options)
        self.value_gate = Gate(hidden_size, kv_width, **options) if value_gate else None
        self.output_gate = Gate(hidden_size, width, **options) if output_gate else None
        self.rotary_emb = RotaryEmbedding(head_dim, rope_theta, device)

    def forward(
        self,
        x: Tensor,
        position_ids: Tensor | None = None,
        selection: attention.Selection | None = None,
        *,
        cache: AttentionCache | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """x `[B, T, hidden_size]` -> `[B, T, hidden_size]`.

        position_ids int `[B, T]` or `[T]`, None for 0 to T - 1, or behind what is in the cache, turn the rotary
        embeddings; what is visible is a matter of order. A given selection, of another layer for instance, is used
        instead of the indexer's.

        lengths int `[B]` says how many of the T are tokens, where the rest pads x: what x holds there is of no effect,
        and without a cache the result is 0 there.

        With a cache, x are the next tokens of each sequence, which are added to it and see all that is in it. The
        result is that of one call over the whole sequences. No gradients pass.
        """
        if cache is not None and position_ids is None:
            position_ids = cache.positions(x.shape[1])
        if cache is None and lengths is not None:
            # Padding stands behind all tokens, so that none of them sees it.
            padding = _padding(x, lengths)
            return self.forward(x.masked_fill(padding, 0), position_ids, selection).masked_fill(padding, 0)
        if cache is None:
            scored = selection is None and not self.selects_all(x.shape[1])
            y, cos, sin, index = self._products(x, position_ids, indexer=scored)
            return self.finish(*self._turn_and_attend(y, cos, sin, index, selection))
        q, k, v, gate, index = self.project(x, position_ids)
        return self.finish(self._attend_with_cache(q, k, v, index, selection, cache, lengths), gate)

    @together
    def _turn_and_attend(
        self,
        y: Tensor,
        cos: Tensor,
        sin: Tensor,
        index: tuple[Tensor, Tensor, Tensor],
        selection: attention.Selection | None,
    ) -> tuple[Tensor, Tensor | None]:
        """What attention returns and the output's gate, of `_products`."""
        q, k, v, gate = self._turn(y, cos, sin)
        return self.attend(q, k, v, index, selection), gate

    def finish(self, out: Tensor, gate: Tensor | None) -> Tensor:
        """What attention returns, `[B, H, T, D]`, gated and projected: `[B, T, hidden_size]`."""
        out = out.transpose(1, 2).flatten(2)
        if gate is not None:
            with span("gsa/output_gate"):
                out = out * gate
        with span("gsa/o_proj"):
            return self.o_proj(out)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        index: tuple[Tensor, Tensor, Tensor],
        selection: attention.Selection | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Attention of what `project` returns, `[B, H, T, D]`: dense where each query takes every key that it sees.

        k, v and the indexer's keys may be more than the queries, which stand last, or with lengths int `[B]` end beside
        key lengths[b] - 1; where these are fewer than the queries, the first stands beside the first.
        """
        if selection is None and self.selects_all(k.shape[2]):
            grouped, mask = self.num_heads != self.num_kv_heads, None
            if lengths is not None or q.shape[2] != k.shape[2]:
                count = q.new_full((1,), k.shape[2], dtype=torch.int64) if lengths is None else lengths
                at = (count[:, None] - q.shape[2]).clamp(min=0) + torch.arange(q.shape[2], device=q.device)
                last = torch.minimum(at, count[:, None] - 1)[:, None, :, None]
                mask = torch.arange(k.shape[2], device=q.device) <= last
            with span("gsa/dense_attn"):
                return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=grouped)
        if selection is None:
            selection = self.select(*index, lengths=lengths)
        with span("gsa/sparse_attn"):
            return attention.sparse_attention(q, k, v, selection, lengths=lengths)

    def _attend_with_cache(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        index: tuple[Tensor, Tensor, Tensor],
        selection: attention.Selection | None,
        cache: AttentionCache,
        new: Tensor | None,
    ) -> Tensor:
        """Of tokens that come behind those of the cache, and of which new[b] are added to it."""
        if needs_gradient(q, k, v):
            raise NotImplementedError(
                f"{OPERATOR}: gradients with a cache are not implemented. Use torch.no_grad(), or no cache."
            )
        empty, tokens = cache.longest == 0, q.shape[2]
        # What pads x stands behind all tokens, so that none of them sees it.
        lengths = cache.lengths + tokens
        cache.append(k, v, index[1], new)
        if empty:
            return self.attend(q, k, v, index, selection)
        num_keys = cache.read_to if selection is None else selection.num_keys
        whole = selection is None and self.selects_all(num_keys)
        if not whole:
            index = (index[0], cache.index_keys(num_keys), index[2])
        if cache.page_table is None or tokens > FEW_QUERIES or whole:
            return self.attend(q, *cache.keys_and_values(num_keys), index, selection, lengths)
        if selection is None:
            selection = self.select(*index, lengths=lengths)
        table = cache.page_table
        with span("gsa/sparse_attn"):
            out = attention.sparse_decode(q, cache.k, cache.v, selection, page_table=table, lengths=lengths)
        assert isinstance(out, Tensor)
        return out

    def cache(
        self, batch: int, capacity: int, page_size: int | None = None, *, dtype: torch.dtype | None = None
    ) -> AttentionCache:
        """An empty cache for `batch` sequences of up to `capacity` tokens, in pages of page_size, a power of two, or in
        one piece; dtype None for that of the parameters."""
        checks.positive(OPERATOR, "capacity", capacity, "It is the number of tokens that a sequence can have.")
        heads, width, d = self.num_kv_heads, self.head_dim, self.indexer.head_dim
        new = functools.partial(self.k_proj.weight.new_zeros, dtype=dtype)
        if page_size is None:
            k, v = (new((batch, heads, capacity, width)) for _ in range(2))
            return AttentionCache(k, v, new((batch, capacity, d)))
        checks.positive(OPERATOR, "page_size", page_size, "It is the number of tokens of a page.")
        each = -(-capacity // page_size)
        table = torch.arange(batch * each, device=self.k_proj.weight.device).view(batch, each)
        k, v = (new((batch * each, page_size, heads, width)) for _ in range(2))
        return AttentionCache(k, v, new((batch * each, page_size, d)), table)

    def selects_all(self, num_keys: int) -> bool:
        """Whether each query of a sequence takes every key that it sees."""
        return self.dense or num_keys <= (self.k_base if self.adaptive is None else self.adaptive.k_min)

    def project(
        self, x: Tensor, position_ids: Tensor | None = None, indexer: bool = True
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, tuple[Tensor, Tensor, Tensor]]:
        """(q, k, v `[B, heads, T, D]`, q and k turned and v gated; the output's gate or None; what the indexer scores
        by: q `[B, n, T, d]`, k `[B, T, d]` and w `[B, T, n]`, empty without `indexer`)."""
        y, cos, sin, index = self._products(x, position_ids, indexer)
        return *self._turn(y, cos, sin), index

    def _products(
        self, x: Tensor, position_ids: Tensor | None, indexer: bool
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
        """What the layers make of x, side by side; cos and sin of the positions' angles; what the indexer scores by."""
        if why_called(q_proj=self.q_proj) is None:
            checks.module_input(OPERATOR, "x", x, self.q_proj.weight, "hidden_size", self.q_proj.in_features)
        layers = {"q_proj": self.q_proj, "k_proj": self.k_proj, "v_proj": self.v_proj}
        for name, gate in (("value_gate", self.value_gate), ("output_gate", self.output_gate)):
            if gate is not None:
                layers[name] = gate.gate_proj
        rotary = self.rotary_emb
        if position_ids is None and type(rotary) is RotaryEmbedding and not hooked(rotary):
            cos, sin = rotary.of_first(x.shape[1], x)
        else:
            cos, sin = rotary(torch.arange(x.shape[1], device=x.device) if position_ids is None else position_ids)
        with span("gsa/qkv_proj"):
            y = self.normalise(_products(x, layers))
        return y, cos, sin, self.index(x) if indexer else (x.new_empty(0),) * 3

    def _turn(self, y: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q, k and v `[B, heads, T, D]`, and the output's gate or None."""
        with span("gsa/value_gate, rotary_emb"):
            q, k, v, out_gate = attention.rotary_gates(
                y,
                cos,
                sin,
                self.num_heads,
                self.num_kv_heads,
                value_gate=self.value_gate is not None,
                output_gate=self.output_gate is not None,
            )
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), out_gate

    def normalise(self, y: Tensor) -> Tensor:
        """The products of `project`, queries first and then keys, which a subclass may normalise."""
        return y

    def index(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the indexer scores by: q `[B, n, T, d]`, k `[B, T, d]` and w `[B, T, n]`."""
        of = self.indexer
        layers = {"idx_q_proj": of.idx_q_proj, "idx_k_proj": of.idx_k_proj, "idx_w_proj": of.idx_w_proj}
        widths = [layer.out_features for layer in layers.values()]
        with span("gsa/indexer"):
            if _plain_inference(x):
                # Small ones, of which a part is copied where it is a part of one.
                q, k, w = (layer(x) for layer in layers.values())
            else:
                q, k, w = _products(x, layers).split(widths, -1)
        return q.unflatten(-1, (of.num_heads, of.head_dim)).transpose(1, 2), k, w

    @torch.no_grad()
    def select(self, q: Tensor, k: Tensor, w: Tensor, lengths: Tensor | None = None) -> attention.Selection:
        """The keys of each query, from what the indexer scores by; lengths as in `attention.select_topk`."""
        given: dict[str, Any] = {"k": self.k_base} if self.adaptive is None else {"adaptive": self.adaptive}
        given["granularity"] = self.granularity
        with span("gsa/topk_select"):
            return attention.select_topk(q, k, w, self.indexer.idx_bias, lengths=lengths, **given)

    def extra_repr(self) -> str:
        text = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, k_base={self.k_base}"
        return text if self.adaptive is None else f"{text}, adaptive={self.adaptive.rule!r}"


class GatedSparseAttentionReference(GatedSparseAttention):
    """`GatedSparseAttention` by plain PyTorch, with matrices of T by T: for checks, and for a small T.

    Parameters, and so its `state_dict`, are the same. The number of keys is `k_base` for each query.

    >>> GatedSparseAttentionReference(32, 4, k_base=8, k_min=4, k_max=16, d_indexer=16)(torch.randn(2, 20, 32)).shape
    torch.Size([2, 20, 32])
    """

    def forward(
        self,
        x: Tensor,
        position_ids: Tensor | None = None,
        selection: attention.Selection | None = None,
        *,
        cache: AttentionCache | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """As `GatedSparseAttention.forward`, without a cache."""
        if cache is not None:
            raise NotImplementedError(f"{OPERATOR}Reference: a cache is not implemented. Use {OPERATOR}.")
        if self.adaptive is not None:
            raise NotImplementedError(f"{OPERATOR}Reference: adaptive numbers of keys are not implemented. Use None.")
        if lengths is not None:
            padding = _padding(x, lengths)
            return self.forward(x.masked_fill(padding, 0), position_ids, selection).masked_fill(padding, 0)
        if self.granularity != 1:
            raise NotImplementedError(f"{OPERATOR}Reference: units of keys are not implemented. Use granularity=1.")
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
        seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        if selection is not None:
            taken = selection.to_mask() & seen
        elif self.dense or length <= self.k_base:
            taken = seen
        else:
            with span("gsa_ref/indexer"):
                scores = self.scores(*self.index(x))
            with span("gsa_ref/topk_select"):
                # Sorted stably: of equal scores the first ones win.
                best = scores.sort(dim=-1, descending=True, stable=True).indices[..., : self.k_base]
                taken = torch.zeros_like(seen).expand(x.shape[0], -1, -1).scatter(2, best, True)[:, None] & seen
        with span("gsa_ref/sparse_attn"):
            shared = self.num_heads // self.num_kv_heads
            k, v = (t.repeat_interleave(shared, 1) for t in (k, v))
            s = (q @ k.transpose(2, 3)) * self.head_dim**-0.5
            out = (s.masked_fill(~taken, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)
        if self.output_gate is not None:
            with span("gsa_ref/output_gate"):
                out = out * self.output_gate.gate_proj(x).sigmoid()
        with span("gsa_ref/o_proj"):
            return self.o_proj(out)

    @torch.no_grad()
    def scores(self, q: Tensor, k: Tensor, w: Tensor) -> Tensor:
        """What the indexer makes of each query and key, `[B, T, T]`, -inf where a key stands behind the query."""
        z = q @ k[:, None].transpose(2, 3) * self.indexer.head_dim**-0.5
        z = (z + self.indexer.idx_bias[:, None, None]).sigmoid() * w.sigmoid().transpose(1, 2)[..., None]
        seen = torch.ones(z.shape[2:], dtype=torch.bool, device=z.device).tril()
        return z.sum(1).masked_fill(~seen, -torch.inf)


OPERATOR = "nn.GatedSparseAttention"
FEW_TOKENS = 64
KEPT_ANGLES = 1 << 21
"""Cosines, and as many sines: 16 MiB in all."""


def _products(x: Tensor, layers: dict[str, nn.Linear]) -> Tensor:
    """What the layers make of x, side by side; by one product where they are plain and tokens are more than a few, for
    which putting weights side by side would cost more than the products."""
    if x.shape[:-1].numel() <= FEW_TOKENS or why_called(**layers) is not None:
        return torch.cat([layer(x) for layer in layers.values()], -1)
    width = sum(layer.out_features for layer in layers.values())
    biases: list[Tensor | None] = [layer.bias for layer in layers.values()]
    weights: list[Tensor] = [layer.weight for layer in layers.values()]
    if over := -width % 8:
        # The fast kernels of 16-bit products want rows of 16 bytes.
        weights.append(weights[0].new_zeros(over, weights[0].shape[1]))
        biases.append(None)
    bias = None
    if any(each is not None for each in biases):
        zeros = weights[0].new_zeros(width + over).split([len(weight) for weight in weights])
        bias = torch.cat([none if b is None else b for b, none in zip(biases, zeros)])
    out = F.linear(x, torch.cat(weights), bias)
    return out[..., :width] if over else out


def _padding(x: Tensor, lengths: Tensor) -> Tensor:
    """bool `[B, T, 1]`: what stands behind the first lengths[b] tokens of x."""
    checks.whole(OPERATOR, lengths=lengths)
    checks.shape(OPERATOR, "lengths", lengths, (x.shape[0],), "[B]", "like x")
    checks.same_device(OPERATOR, "x", x.device, lengths=lengths)
    return (torch.arange(x.shape[1], device=x.device) >= lengths[:, None])[..., None]


def _plain_inference(x: Tensor) -> bool:
    """Whether nothing differentiates, casts, maps or traces what is made of x."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or autocast.enabled(x.device):
        return False
    watched = torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None
    return type(x) is Tensor and not watched


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x `[B, T, heads, D]` in rotary embeddings, computed in float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    low, high = wide.chunk(2, -1)
    return (wide * cos + torch.cat([-high, low], -1) * sin).to(x.dtype)
