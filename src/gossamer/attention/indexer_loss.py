"""How far an indexer's scores are from attention."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gossamer._core import autocast, checks
from gossamer._core.operator import register
from gossamer.attention._torch import indexer_loss as _cpu
from gossamer.attention.indexer_scores import IndexerActivation, scale_of
from gossamer.attention.records import IndexerLoss
from gossamer.attention.selection import Selection, everything
from gossamer.attention.sparse_attention import check, check_indexer, sparse_attention


def indexer_loss(
    q: Tensor,
    k: Tensor,
    q_idx: Tensor,
    k_idx: Tensor,
    w: Tensor,
    bias: Tensor,
    *,
    selection: Selection | None = None,
    lse: Tensor | None = None,
    scale: float | None = None,
    scale_idx: float | None = None,
    causal: bool = False,
    lengths: Tensor | None = None,
    activation: IndexerActivation = "sigmoid",
) -> Tensor:
    """The loss of an indexer that learns from attention: the Kullback-Leibler divergence of its distribution over keys.

    For each query, attention's probabilities, averaged over heads, are the target, and the softmax of the scores
    of `indexer_scores`, with scale_idx and the activation, is the prediction; both over the same keys: those that the
    query takes, or all that it sees, for a warm-up. Nothing of the size T * T is in memory but the bits of a selection,
    T * T / 8 bytes.

    Args:
        q: `[B, H, T, D]`, float, D at most 256. No gradient goes to q and k.
        k: `[B, G, T, D]`, dtype and device of q; G divides H.
        q_idx: `[B, Hi, T, Di]`, dtype of q.
        k_idx: `[B, T, Di]`, dtype of q.
        w: `[B, T, Hi]`, before its sigmoid where the activation is one.
        bias: `[Hi]`.
        selection: of T queries and T keys, with one scope; None for all visible keys.
        lse: float32 `[B, H, T]`, of attention over these very keys, as `sparse_attention` returns it; None computes it.
        scale: of attention; above 0; None for D ** -0.5.
        scale_idx: of the indexer; above 0; None for Di ** -0.5.
        causal, lengths: as in `sparse_attention`; queries from lengths[b] on are left out, too.
        activation: of the indexer, as in `indexer_scores`.

    Returns:
        float32 (float64 for float64), the mean over all queries that take a key. Differentiable in q_idx, k_idx, w and
        bias once, deterministically; the gradients are computed together with the loss.

    Raises:
        ValueError: shapes or devices do not fit, or there is no such activation.
        TypeError: dtypes differ.
        NotImplementedError: a second derivative, or on the GPU more than 16 heads of the indexer.

    Source: DeepSeek-V3.2, section 2.1 (2512.02556), with the scores of Gated Sparse Attention (arXiv 2601.15305).

    >>> q, q_idx, w = torch.ones(1, 2, 3, 8), torch.ones(1, 4, 3, 8), torch.zeros(1, 3, 4)
    >>> abs(indexer_loss(q, q, q_idx, q_idx[:, 0], w, torch.zeros(4)).item()) < 1e-6
    True
    """
    checks.floating(OPERATOR, q=q, k=k, q_idx=q_idx, k_idx=k_idx, w=w, bias=bias)
    if q.dim() != 4 or q_idx.dim() != 4:
        raise ValueError(
            f"{OPERATOR}: q must have shape [B, H, T, D] and q_idx [B, Hi, T, Di], got {list(q.shape)} and "
            f"{list(q_idx.shape)}."
        )
    if selection is None:
        selection = everything(q.shape[0], q.shape[2], q.shape[2], q.device)
    check(OPERATOR, q, k, k, selection, lengths)
    check_indexer(OPERATOR, (q_idx, k_idx, w, bias), activation, q, selection)
    scale = scale_of(OPERATOR, scale, q.shape[-1])
    scale_idx = scale_of(OPERATOR, scale_idx, q_idx.shape[-1], "scale_idx")
    q, k = q.detach(), k.detach()
    if autocast.enabled(q.device):
        q, k, q_idx, k_idx = autocast.cast(q, k, q_idx, k_idx)  # type: ignore[assignment]
    checks.same_dtype(OPERATOR, "q", q, q_idx=q_idx, k_idx=k_idx)
    if lse is None:
        with torch.no_grad():
            _, lse = sparse_attention(q, k, k, selection, scale=scale, causal=causal, lengths=lengths, return_lse=True)
    else:
        checks.shape(OPERATOR, "lse", lse, tuple(q.shape[:3]), "[B, H, T]", "like q")
    given = (q, k, lse.detach(), q_idx, k_idx, w, bias, selection.words, lengths)
    return _indexer_loss(IndexerLoss(*given, scale, scale_idx, causal, activation))[0]


OPERATOR = "attention.indexer_loss"


def _fake(call: IndexerLoss) -> tuple[Tensor, ...]:
    wide = torch.promote_types(call.q.dtype, torch.float32)
    indexer = (call.q_idx, call.k_idx, call.w, call.bias)
    return call.q.new_empty((), dtype=wide), *(x.new_empty(x.shape) for x in indexer)


def _backward(call: IndexerLoss, kept: Any, grads: Any, needs: Any) -> Mapping[str, Tensor]:
    made = ((grads[0] * gradient).to(gradient.dtype) for gradient in kept)
    return dict(zip(("q_idx", "k_idx", "w", "bias"), made))


@register(
    IndexerLoss,
    cpu=_cpu.indexer_loss,
    fake=_fake,
    backward=_backward,
    keep=lambda call, results: results[1:],
    differentiable=1,
    once_differentiable=OPERATOR,
)
def _indexer_loss() -> Any:
    from gossamer.attention._triton.indexer_loss import indexer_loss

    return indexer_loss
