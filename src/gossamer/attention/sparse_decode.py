"""Attention of a few new queries over selected keys of a long cache."""

from torch import Tensor

from gossamer._core import autocast, checks
from gossamer._core.ops import needs_gradient
from gossamer.attention.indexer_scores import scale_of
from gossamer.attention.records import SparseAttention
from gossamer.attention.selection import Selection
from gossamer.attention.sparse_attention import FEW_QUERIES, check, sparse_attention_operator


def sparse_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    *,
    page_table: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    lengths: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`sparse_attention` of a few new queries over a cache that is one piece, or pages; without gradients.

    Args:
        q: `[B, H, Tq, D]`, float, Tq at most 16 and D at most 256.
        k, v: `[B, G, Tk, D]`, or with page_table `[P, page_size, G, D]`, a pool of pages; dtype and device of q.
        selection: of Tq queries and Tk keys, its scopes S being 1, G or H.
        page_table: int `[B, n]` with n * page_size at least Tk: key j of a sequence is row j % page_size of page
            page_table[b, j // page_size]. Pages of keys that no query takes are not read. A page outside the pool
            raises on the CPU, and on the GPU, where looking would wait, queries that take its keys give NaN.
        scale, causal, lengths, return_lse: as in `sparse_attention`.

    Returns:
        As `sparse_attention`.

    Raises:
        ValueError: shapes or devices do not fit, Tq is above 16, or page_size is no power of two.
        TypeError: dtypes differ, or selection is no `Selection`.
        NotImplementedError: a gradient is wanted.

    Source: Gated Sparse Attention (arXiv 2601.15305); cutting the keys is FlashDecoding's (Dao et al. 2023).

    >>> q, cache = torch.ones(1, 2, 1, 8), torch.ones(1, 2, 40, 8)
    >>> sparse_decode(q, cache, cache, Selection.from_indices(torch.tensor([[[3, 39]]]), 40)).shape
    torch.Size([1, 2, 1, 8])
    """
    if page_table is None:
        check(OPERATOR, q, k, v, selection, lengths)
    else:
        _check_pages(q, k, v, selection, page_table, lengths)
    if q.shape[2] > FEW_QUERIES:
        raise ValueError(
            f"{OPERATOR}: q must have at most {FEW_QUERIES} queries, got {q.shape[2]}. Use attention.sparse_attention."
        )
    if needs_gradient(q, k, v):
        raise NotImplementedError(
            f"{OPERATOR}: gradients are not implemented. Use attention.sparse_attention, or torch.no_grad()."
        )
    scale = scale_of(OPERATOR, scale, q.shape[-1])
    if autocast.enabled(q.device):
        q, k, v = autocast.cast(q, k, v)  # type: ignore[assignment]
    given = (q, k, v, selection.words, lengths, page_table, scale, causal, "decode")
    out, lse = sparse_attention_operator(SparseAttention(*given, None, None, None, None, 1.0))
    return (out, lse) if return_lse else out


OPERATOR = "attention.sparse_decode"


def _check_pages(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, page_table: Tensor, lengths: Tensor | None
) -> None:
    """Pages hold what `check` expects of one piece."""
    checks.floating(OPERATOR, q=q, k=k, v=v)
    checks.whole(OPERATOR, page_table=page_table)
    checks.same_device(OPERATOR, "q", q.device, page_table=page_table)
    if not isinstance(selection, Selection):
        raise TypeError(f"{OPERATOR}: selection must be an attention.Selection, got {type(selection).__name__}.")
    if k.dim() != 4 or q.dim() != 4 or k.shape[1] < 1 or k.shape[1] & (k.shape[1] - 1):
        raise ValueError(
            f"{OPERATOR}: k must have shape [P, page_size, G, D], page_size being a power of two, got {list(k.shape)}."
        )
    checks.shape(OPERATOR, "v", v, tuple(k.shape), "[P, page_size, G, D]", "like k")
    pages = page_table.shape[1] if page_table.dim() == 2 else 0
    if page_table.shape[:1] != q.shape[:1] or pages * k.shape[1] < selection.num_keys:
        raise ValueError(
            f"{OPERATOR}: page_table must have shape [B, n] with B = {q.shape[0]} and room for the Tk = "
            f"{selection.num_keys} keys of selection in pages of {k.shape[1]}, got {list(page_table.shape)}."
        )
    # A stand-in of the whole cache, without memory, for the rules that both share.
    shape = (q.shape[0], k.shape[2], selection.num_keys, k.shape[3])
    check(OPERATOR, q, k.new_empty(()).expand(shape), v.new_empty(()).expand(shape), selection, lengths)
