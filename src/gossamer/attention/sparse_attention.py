"""Attention over the keys of a selection."""

import math
from typing import Any, Literal, get_args, overload

import torch
from torch import Tensor

from gossamer._core import autocast, checks
from gossamer._core.ops import register, undispatched
from gossamer.attention._torch import indexer_loss as _indexer
from gossamer.attention._torch import sparse_attention as _cpu
from gossamer.attention.selection import Selection

MAX_HEAD_DIM = 256
IndexerInputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""q_idx, k_idx, w and bias, as `indexer_scores` takes them."""
Path = Literal["decode", "tiles", "lists"]
"""Ways to go about it on the GPU; see `choose_path`."""


@overload
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    *,
    scale: float | None = None,
    causal: bool = True,
    lengths: Tensor | None = None,
    return_lse: Literal[False] = False,
    path: Path | None = None,
    indexer: IndexerInputs | None = None,
) -> Tensor: ...
@overload
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    *,
    scale: float | None = None,
    causal: bool = True,
    lengths: Tensor | None = None,
    return_lse: Literal[True],
    path: Path | None = None,
    indexer: IndexerInputs | None = None,
) -> tuple[Tensor, Tensor]: ...
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    *,
    scale: float | None = None,
    causal: bool = True,
    lengths: Tensor | None = None,
    return_lse: bool = False,
    path: Path | None = None,
    indexer: IndexerInputs | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q k^T * scale) v over the keys that each query takes.

    The last query stands beside the last key: query i beside key i + Tk - Tq, or with `lengths` beside key i +
    max(lengths[b] - Tq, min(Tk - Tq, 0)), so that in a padded batch, of as many queries as keys, query i stands beside
    key i. A query that takes no key, as one in front of all keys, gives zeros, and has no gradient. A value that is NaN
    or infinite reaches each query of a block of 128 that has one who takes it.

    Args:
        q: `[B, H, Tq, D]`, float, D at most 256; any strides.
        k, v: `[B, G, Tk, D]`, dtype and device of q. G divides H: heads h * H / G to (h + 1) * H / G - 1 of q share
            head h of k and v.
        selection: of Tq queries and Tk keys, its scopes S being 1, G or H.
        scale: above 0; None for D ** -0.5.
        causal: whether a query takes only those of its keys that do not stand behind it.
        lengths: int `[B]`, keys from lengths[b] on take part nowhere; None where all do.
        return_lse: whether to return the logarithm of the softmax's denominator as well.
        indexer: q_idx `[B, n, T, d]`, k_idx `[B, T, d]`, w `[B, T, n]` and bias `[n]` of the scores that selected, for
            a gradient straight through the selection: that of the selected keys' logits, as if the scores, with a scale
            of d ** -0.5, had been added to them. Nothing else changes. For a selection of one scope, T queries and T
            keys.
        path: how the GPU goes about it, "decode", "tiles" or "lists"; None for what `choose_path` chooses.

    Returns:
        `[B, H, Tq, D]`, the dtype of q, in memory as `[B, Tq, H, D]`; with return_lse also the float32 `[B, H, Tq]`,
        -inf where a query takes no key. Differentiable in q, k and v once, deterministically.

    Raises:
        ValueError: shapes or devices do not fit, D is above 256, scale is not above 0, or there is no such path, or
            "decode" is asked for with more than 16 queries.
        TypeError: dtypes differ, or selection is no `Selection`.
        NotImplementedError: a second derivative, or on the GPU more than 16 heads of the indexer.

    Source: Gated Sparse Attention (arXiv 2601.15305); queries that share a gather are FlashInfer's union of neighbours.

    >>> q, k, v = (torch.ones(1, 2, 3, 8) for _ in range(3))
    >>> sparse_attention(q, k, v, Selection.from_mask(torch.eye(3, dtype=torch.bool)[None])).shape
    torch.Size([1, 2, 3, 8])
    """
    check(OPERATOR, q, k, v, selection, lengths)
    scale = scale_of(OPERATOR, scale, q)
    if autocast.enabled(q.device):
        q, k, v = autocast.cast(q, k, v)  # type: ignore[assignment]
    chosen = _path(path, q, selection)
    given: tuple[Any, ...] = (None,) * 4
    scale_idx = 1.0
    if indexer is not None:
        given = _indexer_inputs(indexer, q, selection)
        scale_idx = max(given[0].shape[3], 1) ** -0.5
    tensors = (q, k, v, selection.words, lengths)
    call = undispatched(_sparse_attention, *tensors, *given)
    out, lse = call(*tensors, scale, causal, chosen, *given, scale_idx)
    return (out, lse) if return_lse else out


OPERATOR = "attention.sparse_attention"
FEW_QUERIES = 16


SHORT = 1024
"""Keys up to which a list costs more to make than it leaves out, if neighbours share few keys."""


def choose_path(num_queries: int, num_keys: int) -> Path:
    """How the GPU goes about it, by what the host knows.

    - "decode" cuts the keys of a few queries among programs.
    - "tiles" is flash attention over all keys, in which a bit a score says what takes part: where keys are few.
    - "lists" gathers the keys of each group of neighbouring queries by a list.
    """
    if num_queries <= FEW_QUERIES:
        return "decode"
    return "tiles" if num_keys <= SHORT else "lists"


def _path(path: str | None, q: Tensor, selection: Selection) -> str:
    num_queries = q.shape[2]
    if path is None:
        return choose_path(num_queries, selection.num_keys)
    if path not in get_args(Path) or (path == "decode" and num_queries > FEW_QUERIES):
        raise ValueError(
            f"{OPERATOR}: path must be one of {', '.join(get_args(Path))}, decode with at most {FEW_QUERIES} queries, "
            f"got {path!r} with {num_queries}. None chooses."
        )
    return path


def scale_of(operator: str, scale: float | None, q: Tensor, argument: str = "scale") -> float:
    """A factor above 0, D ** -0.5 by default."""
    if scale is None:
        return 1.0 / math.sqrt(max(q.shape[-1], 1))
    checks.number(operator, argument, scale, "For another sign negate q.")
    return float(scale)


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
    if q.dim() != 4 or k.dim() != 4 or q.shape[3] > MAX_HEAD_DIM:
        raise ValueError(
            f"{operator}: q must have shape [B, H, Tq, D], and k [B, G, Tk, D], with D at most {MAX_HEAD_DIM}, got "
            f"{list(q.shape)} and {list(k.shape)}."
        )
    (batch, heads, tq, d), groups = q.shape, k.shape[1]
    expected = (batch, groups, selection.num_keys, d)
    checks.shape(operator, "k", k, expected, "[B, G, Tk, D]", "like q and selection")
    checks.shape(operator, "v", v, expected, "[B, G, Tk, D]", "like k")
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


MAX_INDEXER_HEADS = 16


def check_indexer(operator: str, indexer: IndexerInputs, q: Tensor, selection: Selection) -> None:
    """Shapes and devices fit q and the selection."""
    q_idx, k_idx, w, bias = indexer
    checks.floating(operator, q_idx=q_idx, k_idx=k_idx, w=w, bias=bias)
    checks.same_device(operator, "q", q.device, q_idx=q_idx, k_idx=k_idx, w=w, bias=bias)
    (b, _, t, _), n, d = q.shape, q_idx.shape[1] if q_idx.dim() == 4 else 0, q_idx.shape[-1]
    checks.shape(operator, "q_idx", q_idx, (b, n, t, d), "[B, n, T, d]", "like q")
    checks.shape(operator, "k_idx", k_idx, (b, t, d), "[B, T, d]", "like q_idx")
    checks.shape(operator, "w", w, (b, t, n), "[B, T, n]", "like q_idx")
    checks.shape(operator, "bias", bias, (n,), "[n]", "like q_idx")
    if selection.words.shape[1] != 1 or selection.num_keys != t:
        raise ValueError(
            f"{operator}: with an indexer, selection must have one scope and as many keys as queries, {t}, got "
            f"{selection.words.shape[1]} and {selection.num_keys}."
        )
    if q.is_cuda and n > MAX_INDEXER_HEADS:
        raise NotImplementedError(
            f"{operator}: at most {MAX_INDEXER_HEADS} heads of the indexer run on the GPU, got {n}."
        )


def _indexer_inputs(indexer: IndexerInputs, q: Tensor, selection: Selection) -> IndexerInputs:
    """The indexer's inputs, checked, and in the dtype of q where autocast is on."""
    if not isinstance(indexer, tuple) or len(indexer) != 4:
        raise TypeError(f"{OPERATOR}: indexer must be (q_idx, k_idx, w, bias), got {type(indexer).__name__}.")
    check_indexer(OPERATOR, indexer, q, selection)
    q_idx, k_idx, w, bias = indexer
    if autocast.enabled(q.device):
        q_idx, k_idx = autocast.cast(q_idx, k_idx)  # type: ignore[assignment]
    if q_idx.dtype != q.dtype or k_idx.dtype != q.dtype:
        raise TypeError(
            f"{OPERATOR}: q_idx and k_idx must have the dtype of q, {checks.name_of(q.dtype)}, got "
            f"{checks.name_of(q_idx.dtype)} and {checks.name_of(k_idx.dtype)}. Convert with q_idx.to(q.dtype)."
        )
    return q_idx, k_idx, w, bias


def _fake(q: Tensor, k: Tensor, v: Tensor, words: Tensor, *_: Any) -> Any:
    b, h, tq, d = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(b, tq, h, d).transpose(1, 2), q.new_empty((b, h, tq), dtype=wide)


def _context(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.scale, ctx.causal, ctx.path = inputs[:8]
    ctx.scale_idx = inputs[12]
    ctx.save_for_backward(*tensors, *output, *inputs[8:12])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, words, lengths, out, lse, *indexer = ctx.saved_tensors
    if grad is None and grad_lse is None:
        return (None,) * 13
    if grad is None:
        grad = torch.zeros_like(out)
    needed = ctx.needs_input_grad
    grads: tuple[Any, ...] = (None,) * 3
    if any(needed[:3]):
        call = undispatched(_sparse_attention_bwd, grad, grad_lse, q, k, v)
        grads = call(grad, grad_lse, q, k, v, out, lse, words, lengths, ctx.scale, ctx.causal, ctx.path)
    scores: tuple[Any, ...] = (None,) * 4
    if any(needed[8:12]):
        call = undispatched(_straight_through, grad, grad_lse, q, k, v, *indexer)
        scores = call(grad, grad_lse, q, k, v, out, lse, *indexer, words, lengths, ctx.scale, ctx.scale_idx, ctx.causal)
    grads = tuple(g if need else None for g, need in zip((*grads, *scores), (*needed[:3], *needed[8:12])))
    return (*grads[:3], *(None,) * 5, *grads[3:], None)


def _fake_bwd(grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Any:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _launcher_bwd() -> Any:
    from gossamer.attention._triton.sparse_attention_bwd import sparse_attention_bwd

    return sparse_attention_bwd


def _fake_through(grad: Tensor, grad_lse: Tensor | None, *rest: Any) -> Any:
    return tuple(x.new_empty(x.shape) for x in rest[5:9])


_SELECTED = "Tensor words, Tensor? lengths, float scale, bool causal, str path"
_sparse_attention = register(
    f"sparse_attention(Tensor q, Tensor k, Tensor v, {_SELECTED}, Tensor? q_idx, Tensor? k_idx, Tensor? w, "
    "Tensor? bias, float scale_idx) -> (Tensor, Tensor)",
    cpu=_cpu.sparse_attention,
    # The indexer's inputs are for the gradient alone.
    strided=("q", "k", "v", "q_idx", "k_idx", "w", "bias"),
    fake=_fake,
    setup_context=_context,
    backward=_backward,
)
_sparse_attention_bwd = register(
    "sparse_attention_bwd(Tensor grad, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_SELECTED}) -> (Tensor, Tensor, Tensor)",
    cpu=_cpu.sparse_attention_bwd,
    strided=("grad", "q", "k", "v", "out"),
    gpu=_launcher_bwd,
    fake=_fake_bwd,
    once_differentiable=OPERATOR,
)
_straight_through = register(
    "straight_through(Tensor grad, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "Tensor q_idx, Tensor k_idx, Tensor w, Tensor bias, Tensor words, Tensor? lengths, float scale, float scale_idx, "
    "bool causal) -> (Tensor, Tensor, Tensor, Tensor)",
    cpu=_indexer.straight_through,
    strided=("grad", "q", "out"),
    fake=_fake_through,
    once_differentiable=OPERATOR,
)
