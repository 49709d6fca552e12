"""The gated indexer's scores, as a matrix."""

from typing import Any

import torch
from torch import Tensor

from gossamer._core import autocast, checks
from gossamer._core.ops import refuse_second, register, undispatched
from gossamer.attention._torch import indexer_scores as _cpu


def indexer_scores(
    q_idx: Tensor,
    k_idx: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = True,
    lengths: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Sum over the indexer's heads of sigmoid(w) * sigmoid(q_idx . k_idx * scale + bias), -inf where a key is not seen.

    For checks, losses and small sizes: `select_topk` goes from the same inputs to a selection without this matrix.

    Args:
        q_idx: `[B, Hi, Tq, Di]`, float, any strides.
        k_idx: `[B, Tk, Di]`, shared by the heads; the dtype and device of q_idx.
        w: `[B, Tq, Hi]`, float: the heads' weights before their sigmoid.
        bias: `[Hi]`, float, added in float32, or None.
        scale: of the products; None for Di ** -0.5.
        causal: a query sees the keys up to its own. The last query is aligned with the last key, and with `lengths`
            with the last key of its batch element; where that has fewer keys than there are queries, the first is
            aligned with the first. At most as many queries as keys.
        lengths: int32 or int64 `[B]`, how many of the Tk keys each batch element has, or None for all.
        out_dtype: of the result; None for the dtype of q_idx.

    Returns:
        `[B, Tq, Tk]`, differentiable in q_idx, k_idx, w and bias. Sums are float32 (float64 for float64). On a GPU with
        16-bit inputs the sigmoids are its own approximation, off by 1e-5.

    Raises:
        ValueError: shapes or devices do not fit.
        TypeError: dtypes differ or are not floating.
        NotImplementedError: on the GPU, Di above 1,024 (512 for float32).

    Source: Gated Sparse Attention (arXiv 2601.15305), its gated indexer.

    >>> one = torch.zeros(1, 1, 1, 1)
    >>> indexer_scores(one, one[0], one[0]).tolist()
    [[[0.25]]]
    """
    operator = "attention.indexer_scores"
    check_inputs(operator, q_idx, k_idx, w, bias, lengths, causal)
    checks.float_dtype(operator, "out_dtype", out_dtype, "None gives the dtype of q_idx.")
    if autocast.enabled(q_idx.device):
        q_idx, k_idx = autocast.cast(q_idx, k_idx)  # type: ignore[assignment]
    checks.same_dtype(operator, "q_idx", q_idx, k_idx=k_idx)
    call = undispatched(_indexer_scores, q_idx, k_idx, w, bias)
    scale = scale_of(operator, scale, q_idx.shape[3])
    return call(q_idx, k_idx, w, bias, lengths, scale, causal, out_dtype or q_idx.dtype)


def check_inputs(
    operator: str, q_idx: Tensor, k_idx: Tensor, w: Tensor, bias: Tensor | None, lengths: Tensor | None, causal: bool
) -> None:
    """Raises where the indexer's inputs do not fit each other."""
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


def scale_of(operator: str, scale: float | None, d: int) -> float:
    """The scale that is meant."""
    if scale is None:
        return max(d, 1) ** -0.5
    checks.number(operator, "scale", scale, "None gives Di ** -0.5.")
    return float(scale)


def _fake(q: Tensor, k: Tensor, *rest: Any) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[2], k.shape[1]), dtype=rest[-1])


def _fake_backward(grad: Tensor, q: Tensor, k: Tensor, w: Tensor, *_: Any) -> tuple[Tensor, ...]:
    dq, dk, dw = (x.new_empty(x.shape) for x in (q, k, w))
    return dq, dk, dw, q.new_empty((q.shape[1],), dtype=torch.promote_types(q.dtype, torch.float32))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, w, bias, lengths, ctx.scale, ctx.causal, _ = inputs
    ctx.save_for_backward(q, k, w, bias, lengths)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    refuse_second("attention.indexer_scores")
    q, k, w, bias, lengths = ctx.saved_tensors
    # The forward pass has chosen the dtype, whatever a backward pass runs under.
    with autocast.disabled(grad.device):
        call = undispatched(_indexer_scores_backward, grad, q, k, w)
        dq, dk, dw, dbias = call(grad, q, k, w, bias, lengths, ctx.scale, ctx.causal)
    dbias = None if bias is None else dbias.to(bias.dtype)
    return dq, dk, dw, dbias, None, None, None, None


_INPUTS = "Tensor q, Tensor k, Tensor w, Tensor? bias, Tensor? lengths, float scale, bool causal"

_indexer_scores_backward = register(
    f"indexer_scores_backward(Tensor grad, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)",
    cpu=_cpu.indexer_scores_backward,
    fake=_fake_backward,
    once_differentiable="attention.indexer_scores",
)
_indexer_scores = register(
    f"indexer_scores({_INPUTS}, ScalarType out_dtype) -> Tensor",
    cpu=_cpu.indexer_scores,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
)
