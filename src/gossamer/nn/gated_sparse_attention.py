"""Gated sparse attention: an indexer selects the keys of each query; values and outputs are gated."""

from __future__ import annotations

import functools
import warnings
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer import attention
from gossamer._core import checks
from gossamer._core.compiling import together
from gossamer._core.ops import needs_gradient
from gossamer._core.ranges import span
from gossamer.attention.adaptive_k import numbers_of_keys, score_statistics
from gossamer.attention.indexer_scores import IndexerActivation, check_activation
from gossamer.attention.rotary_gates import rotary_gates
from gossamer.attention.selection import everything
from gossamer.attention.sparse_attention import FEW_QUERIES
from gossamer.nn.adaptive_rule import AdaptiveRule
from gossamer.nn.attention_cache import AttentionCache
from gossamer.nn.plain import hooked, plain_inference, products, why_called
from gossamer.nn.rotary_embedding import RotaryEmbedding, check_positions, size_of_heads


class LightningIndexer(nn.Module):
    """Projections of x to the queries, keys, and weights of heads that score keys."""

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int, **options: Any) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim
        self.idx_q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False, **options)
        self.idx_k_proj = nn.Linear(hidden_size, head_dim, bias=False, **options)
        self.idx_w_proj = nn.Linear(hidden_size, num_heads, **options)
        self.idx_bias = nn.Parameter(torch.zeros(num_heads, **options))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for published, name in _PUBLISHED.items():
            if (tensor := state_dict.pop(prefix + published, None)) is not None:
                state_dict[prefix + name] = tensor
        super()._load_from_state_dict(state_dict, prefix, *args)


_PUBLISHED = {
    "q_proj.weight": "idx_q_proj.weight", "k_proj.weight": "idx_k_proj.weight", "bias": "idx_bias",
    "weight_proj.weight": "idx_w_proj.weight", "weight_proj.bias": "idx_w_proj.bias",
}  # fmt: skip
"""Parameters of an indexer as the article's own code names them -> names here, which are those of GSA Triton."""


class Gate(nn.Module):
    """sigmoid(gate_proj(x)); a new gate is about sigmoid(0.5) everywhere, as published."""

    def __init__(self, hidden_size: int, width: int, **options: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, width, **options)
        nn.init.xavier_uniform_(self.gate_proj.weight, gain=0.1)
        nn.init.constant_(self.gate_proj.bias, 0.5)


class GatedSparseAttention(nn.Module):
    """Causal self-attention in which each query takes the keys that an indexer scores highest.

    A sigmoid of x gates v before attention, and another sigmoid gates attention's result. As long as a sequence is no
    longer than the fewest keys that a query takes, attention is dense, and the indexer does not run.
    Selecting has no gradient: the indexer learns by its own loss, `attention.indexer_loss`, or by a gradient straight
    through the selection.

    Args:
        hidden_size: of x and of the result.
        num_heads, num_kv_heads: heads of queries, and of keys and values; None for as many.
        k_base: keys of each query; k_max where that is less, with a warning.
        k_min, k_max: bounds of the keys of a query where they are `adaptive`; k_min is at most k_base, likewise.
        d_indexer, n_idx_heads: size and number of the indexer's heads.
        head_dim: None for hidden_size // num_heads.
        adaptive: None for k_base keys, or how their number follows from a query's scores: an `attention.AdaptiveK`, or
            the name of a rule. `"variance"` by name has to be calibrated: see `calibrate`. `"learned"` by name takes
            k_base keys until its network is trained: see `numbers_of_keys`.
        value_gate, output_gate: whether the layer has this gate.
        rope_theta: base of the rotary embeddings.
        granularity: 1, or 4 to select units of four neighbouring keys, as in `attention.select_topk`.
        indexer_gradient: "none", or "straight_through" for the gradient that `attention.sparse_attention` gives the
            indexer, and x through it, where it has selected.
        indexer_activation: `"sigmoid"`, or `"relu"` for the scores of DeepSeek-V3.2's lightning indexer, to which
            idx_bias adds biases; see `attention.indexer_scores`. An adaptive rule is for `"sigmoid"` alone.
        dtype, device: of the parameters; those of an adaptive rule are float32.

    Raises:
        ValueError: a size below 1, heads that do not divide, an odd head_dim, or an unknown option; in a call, k that
            is no multiple of granularity, or a rule "variance" that has not been calibrated.
        TypeError: a size that is no int, or adaptive is something else.
        NotImplementedError: an adaptive rule with the activation `"relu"`.

    Attributes:
        q_proj, k_proj, v_proj, o_proj: as in the published models, and so are indexer.idx_q_proj, indexer.idx_k_proj,
            indexer.idx_w_proj, indexer.idx_bias, value_gate.gate_proj, output_gate.gate_proj and rotary_emb.inv_freq.
            A state_dict loads strictly by these names, those of GSA Triton, and by those of the article's own code:
            indexer.q_proj, k_proj, weight_proj and bias, topk_selector.k_predictor, and no rotary_emb.inv_freq.
        dense: True attends to every visible key, for a warm-up of the indexer.
        adaptive: the `attention.AdaptiveK`, or None; may be set, and is copied then.
        adaptive_k: None, or the state of the rule: `adaptive_k.mean`, a buffer for "variance", and for "learned" the
            parameters `adaptive_k.mean` and `adaptive_k.predictor`. They are part of the state_dict, but one without
            them loads strictly, too, and leaves them as they are.

    Source: Gated Sparse Attention (arXiv 2601.15305).

    >>> GatedSparseAttention(32, 4, k_base=8, k_min=4, k_max=16, d_indexer=16)(torch.randn(2, 20, 32)).shape
    torch.Size([2, 20, 32])
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        k_max: int = 4096,
        d_indexer: int = 64,
        n_idx_heads: int = 4,
        k_base: int = 2048,
        k_min: int = 256,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        adaptive: attention.AdaptiveK | str | None = None,
        value_gate: bool = True,
        output_gate: bool = True,
        rope_theta: float = 10000.0,
        granularity: int = 1,
        indexer_gradient: Literal["none", "straight_through"] = "none",
        indexer_activation: IndexerActivation = "sigmoid",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        head_dim = size_of_heads(OPERATOR, hidden_size, num_heads, num_kv_heads, head_dim)
        sizes = {"k_min": k_min, "d_indexer": d_indexer, "n_idx_heads": n_idx_heads, "k_base": k_base, "k_max": k_max}
        for name, size in sizes.items():
            checks.positive(OPERATOR, name, size, "It is a size.")
        if not k_min <= k_base <= k_max:
            given, k_base = (k_min, k_base, k_max), min(k_base, k_max)
            k_min = min(k_min, k_base)
            warnings.warn(
                f"{OPERATOR}: k_min, k_base and k_max ascend, got {', '.join(map(str, given))}: a query takes k_base = "
                f"{k_base} keys, or at least k_min = {k_min}.",
                stacklevel=2,
            )
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        if granularity not in (1, 4) or isinstance(granularity, bool):
            raise ValueError(f"{OPERATOR}: granularity must be 1 or 4, got {granularity!r}.")
        if indexer_gradient not in ("none", "straight_through"):
            raise ValueError(
                f'{OPERATOR}: indexer_gradient must be "none" or "straight_through", got {indexer_gradient!r}.'
            )
        self.k_min, self.k_base, self.k_max, self.granularity = k_min, k_base, k_max, granularity
        self.indexer_gradient, self.indexer_activation = indexer_gradient, indexer_activation
        check_activation(OPERATOR, "indexer_activation", indexer_activation)
        self.set_adaptive(adaptive, device)
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

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if self.adaptive_k is not None:
            AdaptiveRule.rename_published(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property
    def adaptive(self) -> attention.AdaptiveK | None:
        """How the number of keys follows from a query's scores, or None."""
        return None if self.adaptive_k is None else self.adaptive_k.known()

    @adaptive.setter
    def adaptive(self, adaptive: attention.AdaptiveK | str | None) -> None:
        self.set_adaptive(adaptive, self.q_proj.weight.device)

    def set_adaptive(
        self, adaptive: attention.AdaptiveK | str | None, device: torch.device | str | None = None
    ) -> None:
        """Sets the rule, and puts its state on a device."""
        self.adaptive_k: AdaptiveRule | None = None
        if adaptive is not None and self.indexer_activation != "sigmoid":
            raise NotImplementedError(
                f'{OPERATOR}: adaptive with indexer_activation="relu" is not implemented, got {adaptive!r}. Give None.'
            )
        if isinstance(adaptive, str):
            self.adaptive_k = AdaptiveRule(adaptive, self.k_min, self.k_base, self.k_max, device)
        elif isinstance(adaptive, attention.AdaptiveK):
            self.adaptive_k = AdaptiveRule(adaptive, adaptive.k_min, adaptive.k_base, adaptive.k_max, device)
        elif adaptive is not None:
            raise TypeError(
                f"{OPERATOR}: adaptive must be an attention.AdaptiveK, the name of a rule or None, got "
                f"{type(adaptive).__name__}."
            )

    @torch.no_grad()
    def calibrate(self, x: Tensor, lengths: Tensor | None = None, *, share: float = 1.0) -> None:
        """Takes the usual variance of the rule "variance" from x `[B, T, hidden_size]`: the mean over the queries that
        see more than k_min keys, and so have a choice. Nothing else moves it, training neither.

        lengths int `[B]` are as in `forward`. share, above 0 and up to 1, is how far the stored variance moves to that
        of x, once there is one: less than 1 makes a running mean of several batches. It costs a scoring of x, in
        plain PyTorch, and waits for the device.
        """
        checks.number(f"{OPERATOR}.calibrate", "share", share, "1.0 forgets the stored variance.")
        statistics = self._statistics(x)
        real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        if lengths is not None:
            real = ~_padding(x, lengths)[..., 0]
        self.calibrate_by(statistics, real, share)

    def calibrate_by(self, statistics: Tensor, real: Tensor, share: float = 1.0) -> None:
        """As `calibrate`, by `attention.adaptive_k.score_statistics` of the queries that are real, bool `[B, T]`."""
        if self.adaptive_k is None or self.adaptive_k.rule != "variance":
            rule = None if self.adaptive_k is None else self.adaptive_k.rule
            raise ValueError(
                f'{OPERATOR}.calibrate: adaptive must be the rule "variance", the only one that has something to '
                f'calibrate, got {rule!r}. Set adaptive = "variance".'
            )
        checks.no_sync(f"{OPERATOR}.calibrate", "calibrating", "Calibrate before a graph is captured.")
        real = real & (torch.arange(real.shape[1], device=real.device) >= self.adaptive_k.k_min)
        if not bool(real.any()):
            raise ValueError(
                f"{OPERATOR}.calibrate: x must have a query that sees more than k_min = {self.adaptive_k.k_min} keys, "
                f"got sequences of up to {real.shape[1]} tokens. Give longer sequences."
            )
        self.adaptive_k.move(statistics[..., 1].where(real, 0).sum() / real.sum(), share)

    def numbers_of_keys(self, x: Tensor) -> Tensor:
        """How many keys the adaptive rule gives each query of x `[B, T, hidden_size]`: float32 `[B, T]`, not rounded.

        Differentiable in the parameters of the rule "learned", `adaptive_k.mean` and `adaptive_k.predictor`, and in
        nothing else, so that a loss between these numbers and those that are wanted trains its network. A query that
        sees fewer keys takes all of them.
        """
        adaptive = self.adaptive
        if adaptive is None:
            raise ValueError(
                f"{OPERATOR}.numbers_of_keys: adaptive must be a rule, got None, by which each query takes k_base = "
                f'{self.k_base} keys. Set adaptive to an attention.AdaptiveK, or to "learned".'
            )
        return numbers_of_keys(self._statistics(x), adaptive, self.granularity)

    @torch.no_grad()
    def _statistics(self, x: Tensor) -> Tensor:
        return score_statistics(*self.index(x), self.indexer.idx_bias, self.granularity)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        selection: attention.Selection | None = None,
        cache: AttentionCache | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """x `[B, T, hidden_size]` -> `[B, T, hidden_size]`.

        attention_mask `[B, T]` marks the rows of x that are tokens, anywhere in the sequence. attention_mask
        `[B or 1, 1, T, T]` marks the visible keys that a query may take; it makes matrices of T by T. A mask is bool
        or whole, where True and 1 take part, or is added to scores, where 0 takes part and any other number does not.

        position_ids int `[B, T]` or `[T]` turn the rotary embeddings; None counts from 0, or on from the cache's
        tokens. The order of tokens alone decides which keys are visible. A given selection, of another layer for
        instance, takes the place of the indexer's.

        lengths int `[B]` is the number of tokens of each sequence; the other rows of x are padding. The contents of
        padding have no effect, and without a cache the result is 0 there.

        With a cache, x are the next tokens of each sequence. The call adds them to the cache, and they see all of its
        tokens. The result equals one call over the whole sequences. No gradients pass.
        """
        check_positions(OPERATOR, position_ids, x)
        if attention_mask is not None and any(given is not None for given in (cache, lengths, selection)):
            raise ValueError(
                f"{OPERATOR}: attention_mask must be None with a cache, lengths or a selection. Use lengths, or "
                "Selection.from_mask."
            )
        if cache is not None:
            return self._with_cache(x, position_ids, selection, cache, lengths)
        if attention_mask is not None and attention_mask.dim() == 4:
            return self.run(x, position_ids, allowed=_taking_part(attention_mask, x, (1, x.shape[1], x.shape[1])))
        if attention_mask is not None:
            return self._packed(x, position_ids, _taking_part(attention_mask, x, x.shape[1:2]))
        if lengths is not None:
            # Padding stands behind all tokens, so that none of them sees it.
            padding = _padding(x, lengths)
            return self.run(x.masked_fill(padding, 0), position_ids, selection).masked_fill(padding, 0)
        return self.run(x, position_ids, selection)

    def _packed(self, x: Tensor, position_ids: Tensor | None, real: Tensor) -> Tensor:
        """The result for x of which some are tokens, bool `[B, T]`: these move to the front, in their order."""
        order = (~real).byte().argsort(dim=1, stable=True)
        positions = torch.arange(x.shape[1], device=x.device) if position_ids is None else position_ids
        moved = order[..., None].expand_as(x)
        padding = ~real[..., None]
        out = self.run(x.masked_fill(padding, 0).gather(1, moved), positions.expand_as(order).gather(1, order))
        return torch.zeros_like(out).scatter(1, moved, out).masked_fill(padding, 0)

    def run(
        self,
        x: Tensor,
        position_ids: Tensor | None = None,
        selection: attention.Selection | None = None,
        allowed: Tensor | None = None,
    ) -> Tensor:
        """As `forward`, of tokens alone; a query takes keys that are `allowed`, bool `[B, 1, T, T]`."""
        scored = selection is None and not self.selects_all(x.shape[1])
        y, cos, sin, index = self._products(x, position_ids, indexer=scored)
        if allowed is not None:
            selection = self._select_allowed(index, allowed)
        return self.finish(*self._turn_and_attend(y, cos, sin, index, selection))

    @torch.no_grad()
    def _select_allowed(self, index: tuple[Tensor, Tensor, Tensor], allowed: Tensor) -> attention.Selection:
        """The keys of each query among those that are allowed, by the matrix of scores where the indexer is asked."""
        allowed = allowed.tril()
        if not self.selects_all(allowed.shape[3]):
            if self.adaptive_k is not None or self.granularity != 1:
                raise NotImplementedError(
                    f"{OPERATOR}: attention_mask [B, 1, T, T] with adaptive or granularity is not implemented. Give "
                    "one of [B, T], or a selection."
                )
            inputs, activation = (*index, self.indexer.idx_bias), self.indexer_activation
            scores = attention.indexer_scores(*inputs, causal=True, activation=activation)[:, None]
            # Sorted stably: of equal scores the first ones win.
            best = scores.masked_fill(~allowed, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
            allowed = torch.zeros_like(allowed).scatter(3, best[..., : self.k_base], True) & allowed
        return attention.Selection.from_mask(allowed)

    @together
    def _turn_and_attend(
        self,
        y: Tensor,
        cos: Tensor,
        sin: Tensor,
        index: tuple[Tensor, Tensor, Tensor],
        selection: attention.Selection | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention's result and the output's gate, from `_products`."""
        q, k, v, gate = self._turn(y, cos, sin)
        return self.attend(q, k, v, index, selection), gate

    def finish(self, out: Tensor, gate: Tensor | None) -> Tensor:
        """Attention's result, `[B, H, T, D]`, gated and projected: `[B, T, hidden_size]`."""
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
        """Attention of the result of `project`, `[B, H, T, D]`: dense where each query takes every key that it sees.

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
        through = None
        if selection is None:
            selection = self.select(*index, lengths=lengths)
            scored_by = (*index, self.indexer.idx_bias)
            # Behind a cache there are more keys than queries, and no gradients.
            if self.indexer_gradient != "none" and q.shape[2] == k.shape[2] and needs_gradient(*scored_by):
                through = scored_by
        with span("gsa/sparse_attn"):
            scored: dict[str, Any] = {"indexer": through, "indexer_activation": self.indexer_activation}
            return attention.sparse_attention(q, k, v, selection, lengths=lengths, causal=True, **scored)

    def _with_cache(
        self,
        x: Tensor,
        position_ids: Tensor | None,
        selection: attention.Selection | None,
        cache: AttentionCache,
        new: Tensor | None,
    ) -> Tensor:
        """The result for tokens that come behind those of the cache, and of which new[b] are added to it."""
        if cache.lengths.shape[0] != x.shape[0]:
            raise ValueError(
                f"{OPERATOR}: cache must be of B = {x.shape[0]} sequences like x, got {cache.lengths.shape[0]}. Make "
                "one with module.cache(B, capacity)."
            )
        if new is not None:
            x = x.masked_fill(_padding(x, new), 0)
        q, k, v, gate, index = self.project(x, cache.positions(x.shape[1]) if position_ids is None else position_ids)
        return self.finish(self._attend_with_cache(q, k, v, index, selection, cache, new), gate)

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
        """Attention's result for the tensors of `project`."""
        if needs_gradient(q, k, v):
            raise NotImplementedError(
                f"{OPERATOR}: gradients with a cache are not implemented. Use torch.no_grad(), or no cache."
            )
        empty, tokens = cache.longest == 0, q.shape[2]
        # Padding of x stands behind all tokens, so that no token sees it.
        lengths = cache.lengths + tokens
        cache.append(k, v, index[1], new)
        if empty:
            return self.attend(q, k, v, index, selection)
        num_keys = cache.read_to if selection is None else selection.num_keys
        if selection is None and self.selects_all(num_keys):
            # A product of the library's would multiply memory behind the lengths, which may hold NaN.
            selection = everything(q.shape[0], tokens, num_keys, q.device)
        elif selection is None:
            selection = self.select(index[0], cache.index_keys(num_keys), index[2], lengths=lengths)
        if cache.page_table is None or tokens > FEW_QUERIES:
            return self.attend(q, *cache.keys_and_values(num_keys), index, selection, lengths)
        table = cache.page_table
        with span("gsa/sparse_attn"):
            return attention.sparse_attention(
                q, cache.k, cache.v, selection, page_table=table, lengths=lengths, causal=True
            )

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
        return self.dense or num_keys <= (self.k_base if self.adaptive_k is None else self.adaptive_k.k_min)

    def project(
        self, x: Tensor, position_ids: Tensor | None = None, indexer: bool = True
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, tuple[Tensor, Tensor, Tensor]]:
        """(q, k, v `[B, heads, T, D]`, q and k turned and v gated; the output's gate or None; the operands of the
        indexer: q `[B, Hi, T, Di]`, k `[B, T, Di]` and w `[B, T, Hi]`, empty without `indexer`)."""
        y, cos, sin, index = self._products(x, position_ids, indexer)
        return *self._turn(y, cos, sin), index

    def _products(
        self, x: Tensor, position_ids: Tensor | None, indexer: bool
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
        """The layers' results of x, side by side; cos and sin of the positions' angles; the operands of the indexer."""
        if why_called(q_proj=self.q_proj) is None:
            checks.module_input(OPERATOR, "x", x, self.q_proj.weight, "hidden_size", self.q_proj.in_features)
        rotary = self.rotary_emb
        if position_ids is None and type(rotary) is RotaryEmbedding and not hooked(rotary):
            cos, sin = rotary.of_first(x.shape[1], x)
        else:
            cos, sin = rotary(torch.arange(x.shape[1], device=x.device) if position_ids is None else position_ids)
        with span("gsa/qkv_proj"):
            y = self.normalise(products(x, self._projections()))
        return y, cos, sin, self.index(x) if indexer else (x.new_empty(0),) * 3

    def _projections(self) -> dict[str, nn.Linear]:
        """The layers whose results `rotary_gates` takes, in its order."""
        layers = {"q_proj": self.q_proj, "k_proj": self.k_proj, "v_proj": self.v_proj}
        gates = {"value_gate": self.value_gate, "output_gate": self.output_gate}
        return layers | {name: gate.gate_proj for name, gate in gates.items() if gate is not None}

    @torch.no_grad()
    def merge_projections(self) -> None:
        """Makes the weights of the projections and gates views of one tensor, so that inference multiplies by all of
        them at once, and copies none. Parameters keep their names, values and gradients. Moving or converting the
        module undoes it, so does `load_state_dict(assign=True)`, and a deepcopy has its own weights. Safetensors saves
        no tensors that share memory: save before.

        Raises:
            TypeError: a layer is no plain `nn.Linear`, or their dtypes differ.
        """
        layers = self._projections()
        if why := why_called(**layers):
            raise TypeError(f"{OPERATOR}.merge_projections: layers must be plain nn.Linear, but {why}.")
        weights = [layer.weight for layer in layers.values()]
        if len(dtypes := {checks.name_of(weight.dtype) for weight in weights}) > 1:
            raise TypeError(
                f"{OPERATOR}.merge_projections: layers must have one dtype, got {', '.join(sorted(dtypes))}. Convert "
                "the module with .to(dtype)."
            )
        for weight, part in zip(weights, torch.cat(weights).split([len(weight) for weight in weights])):
            weight.data = part

    def _turn(self, y: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q, k and v `[B, heads, T, D]`, and the output's gate or None."""
        with span("gsa/value_gate, rotary_emb"):
            q, k, v, out_gate = rotary_gates(
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
        """The indexer's inputs: q `[B, Hi, T, Di]`, k `[B, T, Di]` and w `[B, T, Hi]`."""
        of = self.indexer
        layers = {"idx_q_proj": of.idx_q_proj, "idx_k_proj": of.idx_k_proj, "idx_w_proj": of.idx_w_proj}
        widths = [layer.out_features for layer in layers.values()]
        with span("gsa/indexer"):
            if plain_inference(x):
                # Small ones, of which a part is copied where it is a part of one.
                q, k, w = (layer(x) for layer in layers.values())
            else:
                q, k, w = products(x, layers).split(widths, -1)
        return q.unflatten(-1, (of.num_heads, of.head_dim)).transpose(1, 2), k, w

    @torch.no_grad()
    def select(self, q: Tensor, k: Tensor, w: Tensor, lengths: Tensor | None = None) -> attention.Selection:
        """The keys of each query, from the indexer's inputs; lengths as in `attention.select_topk`."""
        if self.adaptive_k is not None and not self.adaptive_k.calibrated:
            raise ValueError(
                f'{OPERATOR}: adaptive="variance" has to know the usual variance of scores. Call calibrate(x), load a '
                "state_dict that has adaptive_k.mean, or give an attention.AdaptiveK with a mean."
            )
        given = (q, k, w, self.indexer.idx_bias, self.adaptive or self.k_base)
        options: dict[str, Any] = {"granularity": self.granularity, "activation": self.indexer_activation}
        with span("gsa/topk_select"):
            return attention.select_topk(*given, causal=True, lengths=lengths, **options)

    def extra_repr(self) -> str:
        text = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, k_base={self.k_base}"
        text += f", adaptive={self.adaptive_k.rule!r}" if self.adaptive_k is not None else ""
        return text + (', indexer_activation="relu"' if self.indexer_activation == "relu" else "")


OPERATOR = "nn.GatedSparseAttention"


def _padding(x: Tensor, lengths: Tensor) -> Tensor:
    """bool `[B, T, 1]`: the rows of x behind its first lengths[b] tokens."""
    checks.whole(OPERATOR, lengths=lengths)
    checks.shape(OPERATOR, "lengths", lengths, (x.shape[0],), "[B]", "like x")
    checks.same_device(OPERATOR, "x", x.device, lengths=lengths)
    return (torch.arange(x.shape[1], device=x.device) >= lengths[:, None])[..., None]


def _taking_part(mask: Tensor, x: Tensor, size: Any) -> Tensor:
    """bool `[B, *size]`, of a mask that is bool, whole, or added to scores."""
    checks.same_device(OPERATOR, "x", x.device, attention_mask=mask)
    shape = (x.shape[0], *size)
    if tuple(mask.shape) != shape and (len(size) == 1 or tuple(mask.shape) != (1, *size)):
        raise ValueError(
            f"{OPERATOR}: attention_mask must have shape [B, T] or [B or 1, 1, T, T], here {list(shape)} by x, got "
            f"{list(mask.shape)}. position_ids go by name."
        )
    return (mask == 0 if mask.is_floating_point() else mask != 0).expand(shape)
