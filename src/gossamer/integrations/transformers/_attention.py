"""Self-attention of Hugging Face models in which each query takes the keys that an indexer selects.

`patch_attention` replaces each `self_attn` that it knows by a `GatedSparseAttention` over the same projections, and an
indexer of its own, which has to be trained: first beside dense attention, then beside the sparse one. The indexer's
keys travel in the model's own cache, as further heads of keys, so that code for that cache handles them too.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gossamer import attention
from gossamer._core import checks
from gossamer._core.ranges import span
from gossamer.attention.adaptive_k import score_statistics
from gossamer.integrations.transformers._mlp import Report, check_flags, check_model, nothing_changed
from gossamer.integrations.transformers._sharing import SharedSelections, groups_of, share_selections
from gossamer.nn import GatedSparseAttention
from gossamer.nn.adaptive_rule import AdaptiveRule
from gossamer.nn.gated_sparse_attention import LightningIndexer
from gossamer.nn.plain import hooked

_PATCH = "integrations.transformers.patch_attention"
_LOSS, _CALIBRATE = "integrations.transformers.indexer_loss", "integrations.transformers.calibrate"
_FAMILIES = ["Llama", "Mistral", "Mixtral", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "Gemma"]
_KNOWN = f"known are those of {', '.join(_FAMILIES[:-1])} and Gemma (1)"
_CLASSES = {f"{family}Attention" for family in _FAMILIES}
_WINDOW_IN_CONFIG = {"MistralAttention", "MixtralAttention"}
_BOUNDS = ("min", "base", "max")
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class AttentionReport(Report):
    """The changes of `patch_attention`.

    Args:
        replaced: name of a module -> its class.
        left: name of a module that looks like self-attention -> why it computes as before.
        parameters: how many parameters the new indexers and gates have.
        selections: how many layers select; the others use the selection of one of these.
    """

    parameters: int = 0
    selections: int = 0

    def __str__(self) -> str:
        counts = Counter(self.replaced.values())
        lines = [f"{kind}: {count} with selected keys" for kind, count in counts.items()]
        if self.selections != len(self.replaced):
            lines.append(f"{self.selections} selection{'s' * (self.selections != 1)}, shared")
        lines += [f"{self.parameters} new parameters"] if lines else []
        return "\n".join([*lines, *self.lines_of_left()]) or f"no self-attention found that can be replaced; {_KNOWN}"


def patch_attention(
    model: nn.Module,
    *,
    k_base: int = 2048,
    k_min: int = 256,
    k_max: int = 4096,
    d_indexer: int = 64,
    n_idx_heads: int = 4,
    adaptive: attention.AdaptiveK | str | None = None,
    gates: bool = False,
    share: int | Sequence[Sequence[int]] = 1,
    granularity: int = 1,
) -> AttentionReport:
    """Replaces a model's self-attention by `nn.GatedSparseAttention` with its weights; `unpatch` undoes it.

    Sequences of up to k_base tokens are attended to as before. Longer ones need a trained indexer. After
    `train_indexers(model)` it attends densely and gives `indexer_loss(model)` something to learn from; after
    `train_indexers(model, "sparse")` it goes on with the selected keys; `train_indexers(model, None)` ends that.
    Everything else works as it did: generation with a growing or a static cache, padding, gradient checkpointing.

    `save_pretrained` writes the indexers and gates as well, but `from_pretrained` leaves them out, and another
    `patch_attention` makes new ones. After both, `model.load_state_dict(load_file(file), strict=False)` of safetensors
    loads them.

    Args:
        model: a model of transformers, or a module that contains one. Llama, Mistral, Mixtral, Qwen2 and 3, dense or of
            experts, and Gemma 1 are known. Attention with a sliding window, dropout, hooks, adapters or quantised
            weights is left.
        k_base, k_min, k_max, d_indexer, n_idx_heads, adaptive: as in `nn.GatedSparseAttention`. Each layer that selects
            has a rule of its own; adaptive="variance" asks for `calibrate(model, ids)` once the indexers are trained.
        gates: whether to add gates to values and outputs. They begin at one half, and v_proj and o_proj at twice
            their weights, so that the model computes the same. Without gates the layers share their weights with the
            former ones.
        share: how many of the replaced layers in a row use the selection of the first of them, or which:
            `[[0, 1, 2], [3, 4]]` names two groups of layers, and every other layer selects for itself. Only the first
            layer of a group has an indexer, which learns from the attention of all of them.
        granularity: 1, or 4 to select units of four neighbouring keys, as in `attention.select_topk`.

    Returns:
        The layers that are replaced, and those that are left and why; `patch_attention` warns where none is replaced.
        `print` it. A model that is patched already is
        left as it is, with a warning, and its report is made again; `unpatch` it to change an option.

    Raises:
        TypeError: model is no module; gates is no bool.
        ValueError: sizes do not fit, or layers cannot share as `share` says.

    Source: Gated Sparse Attention (arXiv 2601.15305); the warm-up is DeepSeek-V3.2's (arXiv 2512.02556).

    >>> print(patch_attention(model))  # doctest: +SKIP
    LlamaAttention: 32 with selected keys
    21041280 new parameters
    """
    patched = _found(_PATCH, model)
    check_flags(_PATCH, gates=gates)
    if patched:
        nothing_changed(_PATCH, model, "patched already")
        return _report(patched, {})
    options = {"k_base": k_base, "k_min": k_min, "k_max": k_max, "d_indexer": d_indexer, "n_idx_heads": n_idx_heads}
    options["granularity"] = granularity
    found: dict[str, Any] = {}
    left: dict[str, str] = {}
    for name, module in model.named_modules():
        if not all(hasattr(module, projection) for projection in _PROJECTIONS):
            continue
        why = _why_not(module)
        if why is not None:
            left[name] = why
        else:
            found[name] = module
    groups = groups_of(_PATCH, model, {name: module.layer_idx for name, module in found.items()}, share)
    made = {
        name: SparseSelfAttention(module, adaptive=adaptive, gates=gates, group=groups.get(name, ()), **options)
        for name, module in found.items()
    }
    for name, new in made.items():
        model.set_submodule(name, new)
    share_selections(model, groups)
    report = _report(made, left)
    if not made:
        warnings.warn(f"{_PATCH}: {report}.", stacklevel=2)
    return report


def _report(made: dict[str, SparseSelfAttention], left: dict[str, str]) -> AttentionReport:
    parameters = sum(p.numel() for new in made.values() for p in new.added())
    replaced = {name: type(new.replaces).__name__ for name, new in made.items()}
    return AttentionReport(replaced, left, parameters=parameters, selections=sum(new.selects for new in made.values()))


def undo(model: nn.Module) -> bool:
    """Undoes `patch_attention`; whether there was anything to undo."""
    found = _found(_PATCH, model)
    share_selections(model, {})
    for name, module in found.items():
        weight = module.q_proj.weight
        model.set_submodule(name, module.replaces.to(weight.device, weight.dtype))
    return bool(found)


def train_indexers(model: nn.Module, stage: str | None = "dense") -> list[nn.Parameter]:
    """Lets the indexers of a patched model learn: beside dense attention, beside the selected keys, or not.

    Args:
        model: a model that `patch_attention` has patched.
        stage: "dense", "sparse" or None. The first two make each forward pass without a cache compute the indexers'
            losses, for `indexer_loss`; "dense" attends to every key.

    Returns:
        The indexers' parameters, for an optimizer.

    Raises:
        TypeError: model is no module.
        ValueError: nothing in it is patched, or another stage.

    >>> optimizer = torch.optim.AdamW(train_indexers(model))  # doctest: +SKIP
    """
    operator = "integrations.transformers.train_indexers"
    if stage not in ("dense", "sparse", None):
        raise ValueError(f'{operator}: stage must be "dense", "sparse" or None, got {stage!r}.')
    found = _patched(operator, model).values()
    for module in found:
        module.dense, module.learns, module.loss = stage == "dense", stage is not None, None
    return [parameter for module in found if module.selects for parameter in module.indexer.parameters()]


def indexer_loss(model: nn.Module) -> Tensor:
    """The mean of `attention.indexer_loss` over the layers of the last forward pass; no gradient goes to the rest.

    Args:
        model: a model that `patch_attention` has patched, and `train_indexers` has set to learn.

    Raises:
        TypeError: model is no module.
        ValueError: nothing in it is patched, or no forward pass has computed a loss.

    >>> indexer_loss(model).backward()  # doctest: +SKIP
    """
    losses = [module.loss for module in _patched(_LOSS, model).values() if module.loss is not None]
    if not losses:
        raise ValueError(
            f"{_LOSS}: model must have computed a loss in a forward pass, got {type(model).__name__} whose layers have "
            "none. Call train_indexers(model), and then the model without a cache (use_cache=False)."
        )
    return torch.stack([loss.to(losses[0].device) for loss in losses]).mean()


def calibrate(model: nn.Module, *args: Any, share: float = 1.0, **kwargs: Any) -> None:
    """Calls a patched model, and takes from the call each layer's usual variance of scores, for adaptive="variance".

    The call is without gradients and without a cache. Each layer selects with the variance that it has just found. The
    call costs a scoring in plain PyTorch, and waits for the device.

    Args:
        model: a model that `patch_attention(model, adaptive="variance")` has patched.
        args, kwargs: as the model takes them: ids, an attention mask.
        share: above 0 and up to 1, how far the variance of a layer moves to the one that it finds, as in
            `nn.GatedSparseAttention.calibrate`.

    Raises:
        TypeError: model is no module.
        ValueError: nothing in it is patched, or by another rule; share is out of range; no query sees more than k_min
            keys.

    >>> calibrate(model, ids)  # doctest: +SKIP
    """
    checks.number(_CALIBRATE, "share", share, "1.0 forgets the stored variance.")
    found = _patched(_CALIBRATE, model).values()
    rules = [module for module in found if module.adaptive_k is not None and module.adaptive_k.rule == "variance"]
    if not rules:
        raise ValueError(
            f'{_CALIBRATE}: model must be patched with adaptive="variance", the only rule that a call calibrates, got '
            f"{type(model).__name__} with another. Call unpatch(model), then patch_attention(model, "
            'adaptive="variance").'
        )
    for module in rules:
        module.calibrates = share
    try:
        with torch.no_grad():
            model(*args, use_cache=False, **kwargs)
    finally:
        for module in rules:
            module.calibrates = None


class _GivenAngles(nn.Module):
    """In place of a rotary embedding: cosines and sines come from the model."""

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        cos, sin = (angles[0] if angles.shape[0] == 1 else angles for angles in given)
        return cos.float(), sin.float()


class SparseSelfAttention(GatedSparseAttention):
    """`GatedSparseAttention` with the signature of transformers' attention modules, made of the one that it `replaces`.

    The first layer of a `group`, the numbers of layers that share a selection, `selects` by its indexer for all. One
    that `learns` keeps the indexer's `loss` of its last forward pass; one that `calibrates` moves the variance of its
    adaptive rule so far in each."""

    replaces: nn.Module

    def __init__(self, module: Any, *, gates: bool, group: tuple[int, ...] = (), **options: Any) -> None:
        weight = module.q_proj.weight
        heads, width = weight.shape[0] // module.head_dim, module.head_dim
        super().__init__(
            weight.shape[1], heads, num_kv_heads=module.k_proj.weight.shape[0] // width, head_dim=width,
            value_gate=gates, output_gate=gates, dtype=weight.dtype, device="meta", **options
        )  # fmt: skip
        self.rotary_emb = _GivenAngles()  # type: ignore[assignment]
        self.group, self.selects = group, not group or group[0] == module.layer_idx
        made = {"dtype": weight.dtype, "device": weight.device}
        sizes = options["n_idx_heads"], options["d_indexer"]
        self.indexer = LightningIndexer(weight.shape[1], *sizes, **made) if self.selects else None  # type: ignore[assignment]
        for gate in (self.value_gate, self.output_gate):
            if gate is not None:
                gate.to_empty(device=weight.device)
                nn.init.zeros_(gate.gate_proj.weight)
                nn.init.zeros_(gate.gate_proj.bias)
        for name in _PROJECTIONS:
            layer = getattr(module, name)
            if gates and name in ("v_proj", "o_proj"):
                layer = copy.deepcopy(layer)
                with torch.no_grad():
                    for parameter in layer.parameters() if name == "v_proj" else [layer.weight]:
                        parameter.mul_(2)
            setattr(self, name, layer)
        # Of queries and keys, head by head, as in Qwen3.
        self.q_norm, self.k_norm = getattr(module, "q_norm", None), getattr(module, "k_norm", None)
        # Made anew on its device.
        self.set_adaptive(options.get("adaptive"), weight.device)
        if not self.selects and self.adaptive_k is not None:
            # Its fewest keys decide which sequences are short. Nothing else is asked of it.
            self.adaptive_k = AdaptiveRule("entropy", *(getattr(self.adaptive_k, f"k_{x}") for x in _BOUNDS))
        self.layer_idx, self.config = module.layer_idx, module.config
        self.learns = False
        self.loss: Tensor | None = None
        self.calibrates: float | None = None
        # No submodule: its parameters are this module's.
        self.__dict__["replaces"] = module
        self.train(module.training)

    def normalise(self, y: Tensor) -> Tensor:
        """The norms of queries and keys, where the module had some."""
        if self.q_norm is None or self.k_norm is None:
            return y
        widths = [self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim]
        q, k, rest = y.split([*widths, y.shape[-1] - sum(widths)], -1)
        normed = (norm(x.unflatten(-1, (-1, self.head_dim))) for norm, x in ((self.q_norm, q), (self.k_norm, k)))
        return torch.cat([*(x.flatten(-2) for x in normed), rest], -1)

    def added(self) -> list[nn.Parameter]:
        """Parameters that the module before had not."""
        parts = (self.indexer, self.value_gate, self.output_gate, self.adaptive_k)
        return [parameter for part in parts if part is not None for parameter in part.parameters()]

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        shared_selections: SharedSelections | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """As transformers' modules; weights of attention are never in memory, and None.

        shared_selections are those of this forward pass, where layers share any.
        """
        x, cache = hidden_states, past_key_values
        given: Any = position_embeddings
        q, k, v, gate, _ = self.project(x, given, indexer=False)
        whole = cache is None and self.selects_all(x.shape[1])
        # The indexer's loss must not change the indexer's input.
        wanted = self.learns or not whole or self.calibrates is not None
        index = self.index(x.detach()) if self.selects and wanted else None
        lengths = None
        if cache is not None:
            # transformers before 5 tells a static cache where to write.
            place = kwargs.get("cache_position")
            options = () if place is None else ({"cache_position": place},)
            k, v, index, lengths = self._through(cache, k, v, index, options)
        of = None
        if attention_mask is not None:
            of = _Tokens(attention_mask.expand(x.shape[0], *attention_mask.shape[1:]), q.shape[2], lengths)
            lengths = of.lengths
            q, k, v = of.queries(q), of.keys(k), of.keys(v)
            if index is not None:
                index = of.queries(index[0]), of.keys(index[1]), of.queries(index[2])
        shared = shared_selections if self.group else None
        out = self._attend(q, k, v, index, lengths, shared, learns=self.learns and cache is None)
        if of is not None:
            out = of.back(out)
        return self.finish(out, gate), None

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        index: Any,
        lengths: Tensor | None,
        shared: SharedSelections | None,
        learns: bool,
    ) -> Tensor:
        selection: attention.Selection | None = None
        lse: Tensor | None = None
        whole = self.selects_all(k.shape[2])
        if self.calibrates is not None:
            real = torch.arange(q.shape[2], device=q.device).expand(q.shape[0], -1)
            real = real < (q.shape[2] if lengths is None else lengths[:, None])
            statistics = score_statistics(index[0], index[1], index[2], self.indexer.idx_bias, self.granularity)
            self.calibrate_by(statistics, real, self.calibrates)
        if self.selects:
            selection = None if whole else self.select(index[0], index[1], index[2], lengths)
            scored_by = (*index, self.indexer.idx_bias) if learns else ()
            if shared is not None:
                shared.put(self.group, selection, scored_by)
        else:
            selection, scored_by = SharedSelections.taken(shared, self, q.device)
        if selection is None:
            out = self.attend(q, k, v, index, None, lengths)
        else:
            with span("gsa/sparse_attn"):
                out, lse = attention.sparse_attention(q, k, v, selection, lengths=lengths, return_lse=True, causal=True)
            lse = lse.detach()
        if learns:
            given = (q.detach(), k.detach(), *scored_by)
            self.loss = attention.indexer_loss(*given, selection=selection, lse=lse, lengths=lengths, causal=True)
        return out

    def _through(
        self, cache: Any, k: Tensor, v: Tensor, index: Any, options: tuple[dict[str, Tensor], ...]
    ) -> tuple[Tensor, Tensor, Any, Tensor | None]:
        """All keys, values and index keys of a cache to which these are added, and how many there are, if not all."""
        b, heads, tokens, width = k.shape
        if index is not None:
            d = index[1].shape[2]
            more = -(-d // width)
            extra = nn.functional.pad(index[1], (0, more * width - d)).view(b, tokens, more, width).transpose(1, 2)
            # Values get as many heads as keys: some caches have one number for both.
            k, v = torch.cat([k, extra.to(k.dtype)], 1), torch.cat([v, v.new_zeros(extra.shape)], 1)
        keys, values = cache.update(k, v, self.layer_idx, *options)
        seen = cache.get_seq_length(self.layer_idx)
        lengths = None
        if isinstance(seen, Tensor) or seen != keys.shape[2]:
            lengths = torch.as_tensor(seen, device=k.device).expand(b)
        if index is not None:
            index = index[0], keys[:, heads:].transpose(1, 2).flatten(2)[..., :d], index[2]
        return keys[:, :heads], values[:, :heads], index, lengths


class _Tokens:
    """The tokens of padded sequences, moved to the front in their order, with their `lengths`: made of an attention
    mask, bool `[B, Tk]` or `[B, 1, Tq, Tk]`, or a float of that shape that is added to scores. The last query stands
    beside key lengths[b] - 1 of the given lengths, or beside the last one.

    A mask must let each token see the tokens up to its own. Another one raises on the CPU; on a GPU, where looking
    would make the host wait, and in a compiled model it gives NaN.
    """

    def __init__(self, mask: Tensor, num_queries: int, lengths: Tensor | None) -> None:
        mask = mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask != 0
        seen = mask if mask.dim() == 2 else mask[:, 0, -1]
        key = torch.arange(seen.shape[1], device=seen.device)
        last = key[-1:] + 1 if lengths is None else lengths
        at = (last[:, None] - num_queries + key[:num_queries]).expand(seen.shape[0], -1)
        real = seen.gather(1, at)
        self.lengths = seen.sum(1)
        self._keys = (~seen).byte().argsort(dim=1, stable=True)
        self._queries = (~real).byte().argsort(dim=1, stable=True)
        self._bad = torch.zeros_like(self.lengths, dtype=torch.bool)
        if mask.dim() == 4:
            given, wanted = mask[:, 0], seen[:, None] & (key <= at[..., None])
            # Padding may see nothing, or everything, where a row without keys has to be avoided.
            some = given.any(-1) & ~given.all(-1)
            self._bad = ((given != wanted).any(-1) & (real | some)).any(-1)
        if self._bad.device.type == "cpu" and not torch.compiler.is_compiling() and bool(self._bad.any()):
            raise ValueError(
                f"{_PATCH}: attention_mask must let each token see the tokens up to its own, as padding does; that of "
                "packed sequences or of a prefix does not. Call unpatch, or give the sequences as rows of a batch."
            )

    def keys(self, x: Tensor) -> Tensor:
        """`[B, ..., Tk, D]` with the tokens in front."""
        return _taken(x, self._keys)

    def queries(self, x: Tensor) -> Tensor:
        """`[B, ..., Tq, D]` likewise."""
        return _taken(x, self._queries)

    def back(self, x: Tensor) -> Tensor:
        """Results `[B, H, Tq, D]` where their queries were."""
        return _taken(x, self._queries.argsort(dim=1)).masked_fill(self._bad[:, None, None, None], torch.nan)


def _taken(x: Tensor, at: Tensor) -> Tensor:
    """x `[B, ..., T, D]` at other positions, by batch element: at `[B, T]`."""
    at = at.view(at.shape[0], *[1] * (x.dim() - 3), -1, 1)
    return x.gather(-2, at.expand(*x.shape[:-2], -1, x.shape[-1]))


def register_selection(name: str = "gossamer_selection") -> str:
    """Makes a given selection an implementation of attention for transformers' models: `model(ids, selection=...)`.

    After `model.set_attn_implementation(name)` each layer's own attention, with its projections, embeddings and cache,
    computes over the keys of the `attention.Selection` that the call is given: these, and nothing else, whether the
    model is causal or not. It says which keys are visible, so padding, windows, and for a causal model that no key
    stands behind its query, have to be part of it; attention masks are not made.

    Args:
        name: of the selection.

    Returns:
        The name.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        ValueError, NotImplementedError: when the model is called, without a selection, or with dropout.

    >>> model.set_attn_implementation(register_selection())  # doctest: +SKIP
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(name, _attend_to_selection)
    # The selection is the mask.
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, lambda *args, **kwargs: None)
    return name


def _attend_to_selection(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    selection: attention.Selection | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it: q, k and v `[B, H, T, D]` -> `[B, T, H, D]`, and no weights."""
    operator = "integrations.transformers.register_selection"
    if selection is None:
        raise ValueError(f"{operator}: the model must be called with selection=, an attention.Selection, got None.")
    if dropout or attention_mask is not None:
        what = "dropout of attention" if dropout else "an attention mask beside a selection"
        raise NotImplementedError(
            f"{operator}: {what} is not implemented. Use attention_dropout=0, and leave masked keys out of selection."
        )
    # The selection says which keys are visible: a query may take keys behind it, of a prefix or in an encoder.
    out: Any = attention.sparse_attention(query, key, value, selection, scale=scaling, causal=False)
    return out.transpose(1, 2), None


def _why_not(module: Any) -> str | None:
    """Why an attention module is left, or None."""
    kind = type(module)
    known = any(
        base.__module__.startswith("transformers.models.") and base.__name__ in _CLASSES
        and kind.forward is base.__dict__.get("forward")
        for base in kind.__mro__
    )  # fmt: skip
    if not known:
        return f"{kind.__name__} is no class that can be replaced; {_KNOWN}"
    if hooked(module):
        return "it has a hook, or a forward of its own"
    for name in _PROJECTIONS:
        layer = getattr(module, name)
        if type(layer) is not nn.Linear or not layer.weight.is_floating_point():
            return f"{name} is {type(layer).__module__}.{type(layer).__qualname__}, not a plain nn.Linear"
    window = getattr(module, "sliding_window", None)
    if _WINDOW_IN_CONFIG & {base.__name__ for base in kind.__mro__}:
        window = getattr(module.config, "sliding_window", None)
    if window is not None:
        return f"it has a sliding window of {window} tokens"
    if module.attention_dropout:
        return f"it drops out {module.attention_dropout:g} of its weights"
    if not module.is_causal or abs(module.scaling * module.head_dim**0.5 - 1) > 1e-6:
        return "it is not causal, or scales its scores by another factor than head_dim ** -0.5"
    return None


def _found(operator: str, model: Any) -> dict[str, SparseSelfAttention]:
    check_model(operator, model)
    return {name: module for name, module in model.named_modules() if isinstance(module, SparseSelfAttention)}


def _patched(operator: str, model: Any) -> dict[str, SparseSelfAttention]:
    found = _found(operator, model)
    if not found:
        raise ValueError(
            f"{operator}: model must hold attention of patch_attention, got {type(model).__name__} without one. Call "
            "integrations.transformers.patch_attention(model) first."
        )
    return found
