"""The gated indexer's scores, as a matrix."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from gossamer._core import autocast, checks
from gossamer._core.operator import register
from gossamer.attention._torch import indexer_scores as _cpu
from gossamer.attention.records import IndexerScores, IndexerScoresBackward

IndexerActivation = Literal["sigmoid", "relu"]
"""Of the products of the indexer's queries and keys; see `indexer_scores`."""


def indexer_scores(
    q_idx: Tensor,
    k_idx: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    lengths: Tensor | None = None,
    activation: IndexerActivation = "sigmoid",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Sum over the indexer's heads of sigmoid(w) * sigmoid(q_idx . k_idx * scale + bias), -inf where a key is not seen.

    For checks, losses and small sizes: `select_topk` goes from the same inputs to a selection without this matrix.

    Args:
        q_idx: `[B, Hi, Tq, Di]`, float, any strides.
        k_idx: `[B, Tk, Di]`, shared by the heads; the dtype and device of q_idx.
        w: `[B, Tq, Hi]`, float: the heads' weights, before their sigmoid where the activation is one.
        bias: `[Hi]`, float, added in float32, or None.
        scale: of the products; None for Di ** -0.5.
        causal: a query sees the keys up to its own. The last query is aligned with the last key, and with `lengths`
            with the last key of its batch element; where that has fewer keys than there are queries, the first is
            aligned with the first. At most as many queries as keys.
        lengths: int32 or int64 `[B]`, how many of the Tk keys each batch element has, or None for all.
        activation: `"sigmoid"`, or `"relu"` for the sum of w * relu(q_idx . k_idx * scale + bias), in which w may have
            either sign: without bias the lightning indexer of DeepSeek-V3.2.
        out_dtype: of the result; None for the dtype of q_idx.

    Returns:
        `[B, Tq, Tk]`, differentiable in q_idx, k_idx, w and bias. Sums are float32 (float64 for float64). On a GPU with
        16-bit inputs the sigmoids are its own approximation, off by 1e-5.

    Raises:
        ValueError: shapes or devices do not fit, or there is no such activation.
        TypeError: dtypes differ or are not floating.
        NotImplementedError: on the GPU, Di above 1,024 (512 for float32).

    Source: Gated Sparse Attention (arXiv 2601.15305), its gated indexer; DeepSeek-V3.2, section 2.1 (2512.02556).

    >>> one = torch.zeros(1, 1, 1, 1)
    >>> indexer_scores(one, one[0], one[0]).tolist()
    [[[0.25]]]
    """
    operator = "attention.indexer_scores"
    check_inputs(operator, q_idx, k_idx, w, bias, lengths, causal, activation)
    checks.float_dtype(operator, "out_dtype", out_dtype, "None gives the dtype of q_idx.")
    if autocast.enabled(q_idx.device):
        q_idx, k_idx = autocast.cast(q_idx, k_idx)  # type: ignore[assignment]
    checks.same_dtype(operator, "q_idx", q_idx, k_idx=k_idx)
    scale = scale_of(operator, scale, q_idx.shape[3])
    options = (scale, causal, activation, out_dtype or q_idx.dtype)
    return _indexer_scores(IndexerScores(q_idx, k_idx, w, bias, lengths, *options))


def check_inputs(
    operator: str, q_idx: Tensor, k_idx: Tensor, w: Tensor, bias: Tensor | None, lengths: Tensor | None, causal: bool,
    activation: str,
) -> None:  # fmt: skip
    """Raises where the indexer's inputs do not fit each other."""
    check_activation(operator, "activation", activation)
    optional = {} if bias is None else {"bias": bias}
    checks.floating(operator, q_idx=q_idx, k_idx=k_idx, w=w, **optional)
    if q_idx.dim() != 4:
        raise ValueError(f"{operator}: q_idx must have shape [B, Hi, Tq, Di], got {list(q_idx.shape)}.")
    b, heads, tq, d = q_idx.shape
    if k_idx.dim() != 3 or k_idx.shape[0] != b or k_idx.shape[2] != d:
        raise ValueError(
            f"{operator}: k_idx must have shape [B, Tk, Di] with B = {b} and Di = {d} like q_idx, "
            f"got {list(k_idx.shape)}."
        )
    checks.shape(operator, "w", w, (b, tq, heads), "[B, Tq, Hi]", "like q_idx")
    if bias is not None:
        checks.shape(operator, "bias", bias, (heads,), "[Hi]", "like q_idx")
    if lengths is not None:
        checks.whole(operator, lengths=lengths)
        checks.shape(operator, "lengths", lengths, (b,), "[B]", "like q_idx")
    checks.same_device(operator, "q_idx", q_idx.device, k_idx=k_idx, w=w, bias=bias, lengths=lengths)
    if causal and tq > k_idx.shape[1]:
        raise ValueError(
            f"{operator}: with causal=True there must be as many keys as queries or more, got Tq = {tq} and "
            f"Tk = {k_idx.shape[1]}. Use causal=False, or drop queries that come before the first key."
        )


def check_activation(operator: str, argument: str, activation: str) -> None:
    if activation not in get_args(IndexerActivation):
        known = ", ".join(map(repr, get_args(IndexerActivation)))
        raise ValueError(f"{operator}: {argument} must be one of {known}, got {activation!r}.")


def scale_of(operator: str, scale: float | None, width: int, argument: str = "scale") -> float:
    """A factor above 0 of products of so many numbers."""
    if scale is None:
        return max(width, 1) ** -0.5
    checks.number(operator, argument, scale, "None gives the width of a head to the power of -0.5.")
    return float(scale)


def _fake(call: IndexerScores) -> Tensor:
    q, k = call.q, call.k
    return q.new_empty((q.shape[0], q.shape[2], k.shape[1]), dtype=call.out_dtype)


def _fake_backward(call: IndexerScoresBackward) -> tuple[Tensor, ...]:
    q, k, w = call.q, call.k, call.w
    dq, dk, dw = (x.new_empty(x.shape) for x in (q, k, w))
    return dq, dk, dw, q.new_empty((q.shape[1],), dtype=torch.promote_types(q.dtype, torch.float32))


def _backward(call: IndexerScores, kept: Any, grads: Any, needs: Any) -> Mapping[str, Tensor | None]:
    made = _indexer_scores_backward(IndexerScoresBackward(grads[0], *call[:-1]))
    dbias = None if call.bias is None else made[3].to(call.bias.dtype)
    return {"q": made[0], "k": made[1], "w": made[2], "bias": dbias}


@register(
    IndexerScores,
    cpu=_cpu.indexer_scores,
    fake=_fake,
    backward=_backward,
    saved=("q", "k", "w", "bias", "lengths"),
    once_differentiable="attention.indexer_scores",
    repeats=True,
)
def _indexer_scores() -> Any:
    from gossamer.attention._triton.indexer_scores import indexer_scores

    return indexer_scores


@register(
    IndexerScoresBackward,
    cpu=_cpu.indexer_scores_backward,
    fake=_fake_backward,
    once_differentiable="attention.indexer_scores",
)
def _indexer_scores_backward() -> Any:
    from gossamer.attention._triton.indexer_scores import indexer_scores_backward

    return indexer_scores_backward
