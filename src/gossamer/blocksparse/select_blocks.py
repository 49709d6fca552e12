"""Which blocks of keys are worth a block of queries' while."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer._core import autocast, checks
from gossamer.blocksparse.layout import BlockSize, Layout, check_block_size
from gossamer.blocksparse.patterns import Grid

_NAME = "blocksparse.select_blocks"


@torch.no_grad()
def select_blocks(
    q: Tensor,
    k: Tensor,
    block_size: BlockSize,
    *,
    top_k: int | None = None,
    threshold: float | None = None,
    sinks: int = 0,
    window: int | None = None,
    causal: bool = False,
    lengths: Tensor | None = None,
    scale: float | None = None,
    capacity: int | None = None,
) -> Layout:
    """The blocks of keys that score highest for each block of queries, by the means of their rows.

    A block of queries and one of keys score the product of their mean rows, in float32. Each row of blocks takes those
    that are always kept, and then the highest that it sees, as far as `top_k` and `threshold` allow; of equal scores
    the lowest index wins, and NaN counts as the highest. Nothing is asked of the device, so that masks may change with
    every layer and step, also in a CUDA graph. There is no gradient.

    Args:
        q: `[B, H, Tq, D]`, float, any strides.
        k: `[B, Hk, Tk, D]`, the device of q; Hk divides H.
        block_size: 16, 32, 64 or 128, or `(height, width)` for queries and keys.
        top_k: blocks of a row, of which those always kept take the first places.
        threshold: 0 to 1: a row takes its highest blocks until their shares of the softmax over what it sees reach
            this, at least one. With `top_k` too, until either is reached. One of both has to be given.
        sinks: how many first blocks of keys every row keeps.
        window: how many keys behind its own positions, and unless causal ahead of them, every row keeps, as in
            `sliding_window`: 0 for the blocks of its own positions alone, None for none. The last query is aligned with
            the last key, or with key lengths - 1, as in `attention`.
        causal: whether a row sees no block that lies behind its last query.
        lengths: int `[B]`: keys from there on are in no mean, and blocks of these alone in no row.
        scale: of the scores, for `threshold`; None takes D^-0.5.
        capacity: how many blocks to make room for. None makes room for as many as there can be, which with `top_k` is
            known beforehand.

    Returns:
        `Layout` of shape `(B, H, rows, cols)`, for `blocksparse.attention`.

    Raises:
        ValueError: shapes or devices do not fit, a number is out of range, or neither top_k nor threshold is given.
        TypeError: q or k is not floating, or a number is none.

    Source: Zhang et al. 2025, "VSA: Faster Video Diffusion with Trainable Sparse Attention" (top-k of pooled blocks);
    Jiang et al. 2024, "MInference 1.0", section 3 (block-sparse heads).

    >>> q, k = torch.randn(1, 2, 64, 8), torch.randn(1, 2, 64, 8)
    >>> select_blocks(q, k, 16, top_k=2, window=0, causal=True).nnz.item()
    14
    """
    height, width = check_block_size(_NAME, block_size)
    scale = _check(q, k, top_k, threshold, sinks, window, lengths, scale)
    (b, h, tq, _), (hk, tk) = q.shape, k.shape[1:3]
    limits = None if lengths is None else lengths.clamp(max=tk).view(b, 1)
    grid = Grid(_NAME, (tq, tk), (height, width), limits, q.device)
    rows, cols = grid.shape
    with autocast.disabled(q.device):
        keys = _means(k, width, lengths).repeat_interleave(h // hk if hk else 1, 1)
        scores = _means(q, height, None) @ keys.transpose(2, 3) * scale
    least, most = grid.apart()
    column = torch.arange(cols, device=q.device)
    seen = (most >= 0) | (not causal)
    kept = (column < sinks).expand_as(seen)
    if window is not None:
        kept = kept | (most >= (0 if causal else -window)) & (least <= window)
    if lengths is not None:
        seen = seen & (column * width < lengths.view(b, 1, 1, 1))
    seen, kept = seen.expand(b, 1, rows, cols), kept.expand(b, 1, rows, cols)
    order, taken = _ranked(scores, seen, kept, top_k, threshold)
    mask = torch.zeros_like(taken).scatter_(3, order, taken)
    if capacity is None:
        taking = cols
        if top_k is not None:
            reach = 0 if window is None else -(-(height + window * (1 if causal else 2) - 1) // width) + 1
            taking = min(cols, max(top_k, min(sinks, cols) + reach))
        capacity = max(b * h * rows * taking, 1)
    return Layout.from_mask(mask, (height, width), size=(tq, tk), capacity=capacity)


def _check(
    q: Tensor, k: Tensor, top_k: int | None, threshold: float | None, sinks: int, window: int | None,
    lengths: Tensor | None, scale: float | None,
) -> float:  # fmt: skip
    """The scale; raises where something does not fit."""
    checks.floating(_NAME, q=q, k=k)
    checks.whole(_NAME, lengths=lengths)
    checks.same_device(_NAME, "q", q.device, k=k, lengths=lengths)
    if q.dim() != 4 or k.dim() != 4 or (k.shape[0], k.shape[3]) != (q.shape[0], q.shape[3]):
        raise ValueError(
            f"{_NAME}: q and k must have shapes [B, H, Tq, D] and [B, Hk, Tk, D], got {list(q.shape)} and "
            f"{list(k.shape)}."
        )
    if k.shape[1] != q.shape[1] and (k.shape[1] == 0 or q.shape[1] % k.shape[1]):
        raise ValueError(f"{_NAME}: the heads of k must divide the {q.shape[1]} heads of q, got {k.shape[1]}.")
    if lengths is not None:
        checks.shape(_NAME, "lengths", lengths, (q.shape[0],), "[B]", "like q")
    if top_k is None and threshold is None:
        raise ValueError(f"{_NAME}: top_k or threshold must be given, got neither.")
    if top_k is not None:
        checks.positive(_NAME, "top_k", top_k, "It is the number of blocks of a row.")
    if threshold is not None:
        checks.number(_NAME, "threshold", threshold, "It is a share of the softmax.")
        if threshold > 1:
            raise ValueError(f"{_NAME}: threshold must be at most 1, got {threshold}. It is a share of the softmax.")
    for name, value, unit in (("sinks", sinks, "blocks"), ("window", 0 if window is None else window, "keys")):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{_NAME}: {name} must be an int of at least 0, got {value!r}. It is a number of {unit}.")
    if scale is None:
        return float(max(q.shape[3], 1)) ** -0.5
    return checks.finite(_NAME, "scale", scale, "None takes D^-0.5.")


def _means(x: Tensor, size: int, lengths: Tensor | None) -> Tensor:
    """Mean rows of the blocks of `[B, H, T, D]`, of rows that exist; 0 where a block has none."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    t = x.shape[2]
    if lengths is not None:
        x = x.masked_fill((torch.arange(t, device=x.device) >= lengths.view(-1, 1))[:, None, :, None], 0)
    padded = torch.nn.functional.pad(x, (0, 0, 0, -t % size)) if t % size else x
    sums = padded.unflatten(2, (-(-t // size), size)).sum(3, dtype=dtype)
    ends = torch.arange(0, t, size, device=x.device)
    limit = torch.full((1,), t, device=x.device) if lengths is None else lengths.clamp(max=t)
    counts = (limit.view(-1, 1, 1, 1) - ends.view(-1, 1)).clamp(1, size)
    return sums / counts


def _ranked(
    scores: Tensor, seen: Tensor, kept: Tensor, top_k: int | None, threshold: float | None
) -> tuple[Tensor, Tensor]:
    """(blocks of each row, first those kept and then by falling score; which of these it takes)."""
    visible = scores.masked_fill(~seen, -torch.inf)
    # Stable sorts, so that equal scores stay in order: NaN comes first among the others.
    order = visible.sort(dim=3, descending=True, stable=True).indices
    kept = (kept & seen).expand_as(scores).gather(3, order)
    first = kept.to(torch.uint8).sort(dim=3, descending=True, stable=True).indices
    order, kept = order.gather(3, first), kept.gather(3, first)
    taken = seen.expand_as(scores).gather(3, order)
    within = torch.ones_like(taken)
    if top_k is not None:
        within &= torch.arange(order.shape[3], device=order.device) < top_k
    if threshold is not None:
        shares = visible.softmax(3).gather(3, order)
        # The blocks before have not reached the threshold; NaN never does.
        within &= ~(shares.cumsum(3) - shares >= threshold)
    return order, taken & (within | kept)
