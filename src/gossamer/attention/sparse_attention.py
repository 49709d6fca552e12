"""Attention over the keys of a selection."""

from collections.abc import Mapping
from typing import Any, Literal, cast, get_args, overload

import torch
from torch import Tensor

from gossamer._core import autocast, checks
from gossamer._core.calls import Checked, key_of
from gossamer._core.dropout import settled
from gossamer._core.operator import register
from gossamer._core.ops import needs_gradient
from gossamer.attention._torch import sparse_attention as _cpu
from gossamer.attention._torch import sparse_attention_bwd as _cpu_bwd
from gossamer.attention.indexer_scores import IndexerActivation, check_activation, check_inputs, scale_of
from gossamer.attention.records import SparseAttention, SparseAttentionBwd
from gossamer.attention.selection import Selection

IndexerInputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""q_idx, k_idx, w and bias, as `indexer_scores` takes them."""
Path = Literal["decode", "tiles", "lists"]
"""Ways to go about it on the GPU; see `choose_path`."""


@overload
def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, *, return_lse: Literal[True], **options: Any
) -> tuple[Tensor, Tensor]: ...
@overload
def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, *, return_lse: Literal[False] = False, **options: Any
) -> Tensor: ...
def sparse_attention(  # type: ignore[misc]
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    *,
    scale: float | None = None,
    causal: bool = False,
    lengths: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    return_lse: bool = False,
    page_table: Tensor | None = None,
    path: Path | None = None,
    indexer: IndexerInputs | None = None,
    indexer_activation: IndexerActivation = "sigmoid",
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q k^T * scale) v over the keys that each query takes.

    The last query stands beside the last key: query i beside key i + Tk - Tq, or with `lengths` beside key i +
    max(lengths[b] - Tq, min(Tk - Tq, 0)), so that in a padded batch, of as many queries as keys, query i stands beside
    key i. A query that takes no key gives zeros, and has no gradient: one in front of all keys, or, if causal, one
    behind the keys of its length. A value that is NaN
    or infinite reaches each query of a block of 128 in which one takes it.

    Args:
        q: `[B, H, Tq, D]`, float, any strides. D and Dv up to 256 are fast on a GPU.
        k, v: `[B, G, Tk, D]` and `[B, G, Tk, Dv]`, dtype and device of q. G divides H: heads h * H / G to (h + 1) *
            H / G - 1 of q share head h of k and v.
        selection: of Tq queries and Tk keys, its scopes S being 1, G or H.
        scale: above 0; None for D ** -0.5.
        causal: whether a query takes only those of its keys that do not stand behind it.
        lengths: int `[B]`, keys from lengths[b] on take part nowhere; None where all do.
        dropout: the probability, below 1, with which each probability is dropped; the others are divided by
            1 - dropout. The lse is that without it.
        seed: an int, or an int64 tensor of one element on the device of q, which alone decides, with batch, head, query
            and key, which probabilities are dropped: `testing.dropout_mask` gives them. None draws one from PyTorch's
            generator.
        return_lse: whether to return the logarithm of the softmax's denominator as well.
        page_table: int `[B, n]`, for at most 16 queries and without gradients: k and v are pools of pages
            `[P, page_size, G, D]` and `[P, page_size, G, Dv]`, n * page_size is at least Tk, and key j of a sequence is
            row j % page_size of page page_table[b, j // page_size]. Pages of keys that no query takes are not read. A
            page outside the pool raises on the CPU, and on the GPU, where looking would wait, queries that take its
            keys give NaN.
        indexer: q_idx `[B, Hi, T, Di]`, k_idx `[B, T, Di]`, w `[B, T, Hi]` and bias `[Hi]` of the scores that selected,
            for a gradient straight through the selection: that of the selected keys' logits, as if the scores, with a
            scale of Di ** -0.5, had been added to them. Nothing else changes. For a selection of one scope, T queries
            and T keys.
        indexer_activation: of these scores, as in `indexer_scores`.
        path: how the GPU goes about it, "decode", "tiles" or "lists"; None for the choice of `choose_path`.

    Returns:
        `[B, H, Tq, Dv]`, the dtype of q, in memory as `[B, Tq, H, Dv]`; with return_lse also the float32 `[B, H, Tq]`,
        -inf where a query takes no key. Differentiable in q, k and v once, deterministically.

    Raises:
        ValueError: shapes or devices do not fit, scale is not above 0, dropout is out of range, or there is no such
            path or activation, or "decode" or pages are asked for with more than 16 queries, "decode" with dropout, or
            another path than "decode" with pages, or page_size is no power of two.
        TypeError: dtypes differ, or selection is no `Selection`.
        NotImplementedError: a second derivative, a gradient or dropout with pages, or on the GPU more than 16 heads of
            the indexer.

    Source: Gated Sparse Attention (arXiv 2601.15305); queries that share a gather are FlashInfer's union of neighbours,
    and cutting the keys of few queries is FlashDecoding's (Dao et al. 2023).

    >>> q, k, v = (torch.ones(1, 2, 3, 8) for _ in range(3))
    >>> sparse_attention(q, k, v, Selection.from_mask(torch.eye(3, dtype=torch.bool)[None])).shape
    torch.Size([1, 2, 3, 8])
    """
    if indexer_activation != "sigmoid":
        check_activation(OPERATOR, "indexer_activation", indexer_activation)
    key = None
    if isinstance(q, Tensor) and isinstance(selection, Selection) and not autocast.enabled(q.device):
        operands = q, k, v, selection.words, lengths, page_table
        key = key_of(operands, (selection.num_queries, path, bool(dropout)), (scale, causal))
    settings = _checked.get(key)
    if settings is None:
        if page_table is None:
            check(OPERATOR, q, k, v, selection, lengths)
        else:
            _check_pages(q, k, v, selection, page_table, lengths)
        settings = scale_of(OPERATOR, scale, q.shape[-1]), _path(path, q, selection, page_table is not None, dropout)
        _checked.keep(key, settings)
    if page_table is not None and (needs_gradient(q, k, v) or indexer is not None or dropout):
        raise NotImplementedError(
            f"{OPERATOR}: gradients and dropout are not implemented with page_table. Give k and v in one piece, or use "
            "torch.no_grad() and no dropout."
        )
    columns = v.shape[-1]
    if not (columns and q.shape[-1]):
        # Without columns scores are 0, and their softmax is as it is.
        q, k, v = (torch.nn.functional.pad(x, (0, 0 if x.shape[-1] else 1)) for x in (q, k, v))
    drop = settled(OPERATOR, dropout, seed, q.device)
    if autocast.enabled(q.device):
        q, k, v = autocast.cast(q, k, v)  # type: ignore[assignment]
    scale, chosen = settings
    given = (q, k, v, selection.words, lengths, page_table, scale, causal, chosen, *drop)
    call = SparseAttention(*given, None, None, None, None, 1.0, indexer_activation)
    if indexer is not None:
        q_idx, k_idx, w, bias = _indexer_inputs(indexer, indexer_activation, q, selection)
        width = max(q_idx.shape[3], 1)
        call = call._replace(q_idx=q_idx, k_idx=k_idx, w=w, bias=bias, scale_idx=width**-0.5)
    out, lse = sparse_attention_operator(call)
    out = out if columns else out[..., :0]
    return (out, lse) if return_lse else out


OPERATOR = "attention.sparse_attention"
_checked: Checked[tuple[float, str]] = Checked()
"""The scale and the path of calls that were checked."""
FEW_QUERIES = 16
SHORT = 1024
"""Keys up to which a list costs more to make than it leaves out, if neighbours share few keys."""
PATHS: dict[Path, str] = {
    "decode": "up to 16 queries: it cuts the keys among programs",
    "tiles": "up to 1,024 keys: flash attention over all keys, in which a bit a score says which key takes part",
    "lists": "otherwise: it gathers the keys of each group of neighbouring queries by a list",
}
"""When the GPU goes each path, if the call names none."""


def choose_path(num_queries: int, num_keys: int) -> Path:
    """The path of a call, from sizes that the host knows; see `PATHS`."""
    if num_queries <= FEW_QUERIES:
        return "decode"
    return "tiles" if num_keys <= SHORT else "lists"


def _path(path: str | None, q: Tensor, selection: Selection, paged: bool, dropout: float) -> str:
    num_queries = q.shape[2]
    if paged and (path not in (None, "decode") or num_queries > FEW_QUERIES):
        raise ValueError(
            f"{OPERATOR}: with page_table, path must be decode and q have at most {FEW_QUERIES} queries, got {path!r} "
            f"and {num_queries}. Leave path None, or give k and v in one piece."
        )
    if dropout and path is None and num_queries <= FEW_QUERIES:
        return "tiles"
    if path is None:
        return choose_path(num_queries, selection.num_keys)
    if path not in get_args(Path) or (path == "decode" and (num_queries > FEW_QUERIES or dropout)):
        raise ValueError(
            f"{OPERATOR}: path must be one of {', '.join(get_args(Path))}, decode with at most {FEW_QUERIES} queries "
            f"and without dropout, got {path!r} with {num_queries}. None chooses."
        )
    return path


def check(operator: str, q: Tensor, k: Tensor, v: Tensor, selection: Selection, lengths: Tensor | None) -> None:
    """Shapes, dtypes and devices fit together."""
    checks.floating(operator, q=q, k=k, v=v)
    checks.whole(operator, lengths=lengths)
    checks.same_device(operator, "q", q.device, k=k, v=v, lengths=lengths)
    if not isinstance(selection, Selection):
        raise TypeError(
            f"{operator}: selection must be an attention.Selection, got {type(selection).__name__}. Build one with "
            "attention.select_topk or Selection.from_mask."
        )
    checks.same_device(operator, "q", q.device, selection=selection.words)
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(
            f"{operator}: q must have shape [B, H, Tq, D], k [B, G, Tk, D], and v [B, G, Tk, Dv], got {list(q.shape)}, "
            f"{list(k.shape)} and {list(v.shape)}."
        )
    (batch, heads, tq, d), groups = q.shape, k.shape[1]
    expected = (batch, groups, selection.num_keys)
    checks.shape(operator, "k", k, (*expected, d), "[B, G, Tk, D]", "like q and selection")
    checks.shape(operator, "v", v, (*expected, v.shape[3]), "[B, G, Tk, Dv]", "like k")
    if groups == 0 or heads % groups:
        raise ValueError(f"{operator}: k must have a number of heads that divides the H = {heads} of q, got {groups}.")
    if q.dtype != k.dtype or q.dtype != v.dtype:
        got = ", ".join(checks.name_of(x.dtype) for x in (q, k, v))
        raise TypeError(f"{operator}: q, k and v must have one dtype, got {got}. Convert with k.to(q.dtype).")
    if selection.num_queries != tq or selection.words.shape[0] != batch:
        raise ValueError(
            f"{operator}: selection must be of [B, Tq] = {[batch, tq]} like q, got "
            f"{[selection.words.shape[0], selection.num_queries]}."
        )
    scopes = selection.words.shape[1]
    if scopes not in (1, groups, heads):
        raise ValueError(
            f"{operator}: selection must have S = 1 scope, one for each of the G = {groups} heads of k, or one for "
            f"each of the H = {heads} of q, got {scopes}."
        )
    if lengths is not None:
        checks.shape(operator, "lengths", lengths, (batch,), "[B]", "like q")


def _check_pages(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, page_table: Tensor, lengths: Tensor | None
) -> None:
    """Pages fit q and the selection as `check` wants of one piece."""
    checks.floating(OPERATOR, q=q, k=k, v=v)
    checks.whole(OPERATOR, page_table=page_table)
    checks.same_device(OPERATOR, "q", q.device, page_table=page_table)
    if k.dim() != 4 or q.dim() != 4 or k.shape[1] < 1 or k.shape[1] & (k.shape[1] - 1):
        raise ValueError(
            f"{OPERATOR}: with page_table, k must have shape [P, page_size, G, D], page_size being a power of two, got "
            f"{list(k.shape)}."
        )
    checks.shape(OPERATOR, "v", v, (*k.shape[:3], v.shape[-1]), "[P, page_size, G, Dv]", "like k")
    pages = page_table.shape[1] if page_table.dim() == 2 else 0
    # A stand-in of the whole cache, without memory, for the rules that both share.
    tk = selection.num_keys if isinstance(selection, Selection) else 0
    k_like, v_like = (x.new_empty(()).expand(q.shape[0], k.shape[2], tk, x.shape[3]) for x in (k, v))
    check(OPERATOR, q, k_like, v_like, selection, lengths)
    if page_table.shape[:1] != q.shape[:1] or pages * k.shape[1] < tk:
        raise ValueError(
            f"{OPERATOR}: page_table must have shape [B, n] with B = {q.shape[0]} and room for the Tk = {tk} keys of "
            f"selection in pages of {k.shape[1]}, got {list(page_table.shape)}."
        )


MAX_INDEXER_HEADS = 16


def check_indexer(operator: str, indexer: IndexerInputs, activation: str, q: Tensor, selection: Selection) -> None:
    """Shapes and devices fit q and the selection."""
    q_idx, k_idx, w, bias = indexer
    checks.same_device(operator, "q", q.device, q_idx=q_idx)
    check_inputs(operator, q_idx, k_idx, w, bias, None, False, activation)
    (b, _, t, _), n = q.shape, q_idx.shape[1]
    checks.shape(operator, "q_idx", q_idx, (b, n, t, q_idx.shape[3]), "[B, Hi, T, Di]", "like q")
    checks.shape(operator, "k_idx", k_idx, (b, t, q_idx.shape[3]), "[B, T, Di]", "like q")
    if selection.words.shape[1] != 1 or selection.num_keys != t:
        raise ValueError(
            f"{operator}: with an indexer, selection must have one scope and as many keys as queries, {t}, got "
            f"{selection.words.shape[1]} and {selection.num_keys}."
        )
    if q.is_cuda and n > MAX_INDEXER_HEADS:
        raise NotImplementedError(
            f"{operator}: on the GPU q_idx may have at most {MAX_INDEXER_HEADS} heads, got {n}. Use fewer, wider heads."
        )


def _indexer_inputs(indexer: IndexerInputs, activation: str, q: Tensor, selection: Selection) -> IndexerInputs:
    """The indexer's inputs, checked, and in the dtype of q where autocast is on."""
    if not isinstance(indexer, tuple) or len(indexer) != 4:
        raise TypeError(f"{OPERATOR}: indexer must be (q_idx, k_idx, w, bias), got {type(indexer).__name__}.")
    check_indexer(OPERATOR, indexer, activation, q, selection)
    q_idx, k_idx, w, bias = indexer
    if autocast.enabled(q.device):
        q_idx, k_idx = autocast.cast(q_idx, k_idx)  # type: ignore[assignment]
    checks.same_dtype(OPERATOR, "q", q, q_idx=q_idx, k_idx=k_idx)
    return q_idx, k_idx, w, bias


def _fake(call: SparseAttention) -> tuple[Tensor, Tensor]:
    q, (b, h, tq, _), d = call.q, call.q.shape, call.v.shape[3]
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(b, tq, h, d).transpose(1, 2), q.new_empty((b, h, tq), dtype=wide)


def _path_of(call: SparseAttention) -> Path:
    return cast(Path, call.path)


def _backward(call: SparseAttention, kept: Any, grads: Any, needs: Any) -> Mapping[str, Tensor | None]:
    out, lse = kept
    grad, grad_lse = grads
    if grad is None:
        grad = torch.zeros_like(out)
    given = (grad, grad_lse, call.q, call.k, call.v, out, lse, call.words, call.lengths, call.scale, call.causal)
    indexed = needs.q_idx or needs.k_idx or needs.w or needs.bias
    indexer = (call.q_idx, call.k_idx, call.w, call.bias) if indexed else (None,) * 4
    options = (call.scale_idx, call.activation, needs.q or needs.k or needs.v)
    made = _sparse_attention_bwd(SparseAttentionBwd(*given, call.path, call.drop, call.seed, *indexer, *options))
    names = ("q", "k", "v", "q_idx", "k_idx", "w", "bias")
    return {name: grad for name, grad in zip(names, made) if getattr(needs, name)}


def _fake_bwd(call: SparseAttentionBwd) -> tuple[Tensor, ...]:
    attended = (call.q, call.k, call.v) if call.attended else (None,) * 3
    parts = (*attended, call.q_idx, call.k_idx, call.w, call.bias)
    return tuple(call.q.new_empty(0) if x is None else x.new_empty(x.shape) for x in parts)


@register(
    SparseAttention,
    cpu=_cpu.sparse_attention,
    fake=_fake,
    choose_path=_path_of,
    paths=PATHS,
    backward=_backward,
    saved=("q", "k", "v", "words", "lengths", "seed", "q_idx", "k_idx", "w", "bias"),
    keep=lambda call, results: results,
    once_differentiable=OPERATOR,
    repeats=True,
)
def sparse_attention_operator() -> Any:
    from gossamer.attention._triton.sparse_attention import sparse_attention

    return sparse_attention


@register(
    SparseAttentionBwd,
    cpu=_cpu_bwd.sparse_attention_bwd,
    fake=_fake_bwd,
    once_differentiable=OPERATOR,
    repeats=True,
)
def _sparse_attention_bwd() -> Any:
    from gossamer.attention._triton.sparse_attention_bwd import sparse_attention_bwd

    return sparse_attention_bwd
