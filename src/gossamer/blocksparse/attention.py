"""Block-sparse flash attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer._core import autocast, checks
from gossamer._core.calls import Checked, Key, key_of
from gossamer._core.dropout import settled
from gossamer._core.operator import register
from gossamer.blocksparse._torch import attention as _cpu
from gossamer.blocksparse.attention_path import PATHS, choose_path, empty_like
from gossamer.blocksparse.layout import Layout
from gossamer.blocksparse.rearrange import adapt
from gossamer.blocksparse.records import BlocksparseAttention, BlocksparseAttentionBwd
from gossamer.blocksparse.relative import Relative, prepare
from gossamer.blocksparse.tensor import BlockSparseTensor, from_dense

_NAME = "blocksparse.attention"
_MAX_HEAD = 256


def attention(
    q: Tensor | BlockSparseTensor,
    k: Tensor | BlockSparseTensor,
    v: Tensor | BlockSparseTensor,
    layout: Layout,
    *,
    mask: Tensor | BlockSparseTensor | None = None,
    bias: Tensor | BlockSparseTensor | None = None,
    relative: Relative | Sequence[Relative] | None = None,
    causal: bool = False,
    lengths: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q k^T * scale + bias) v over the blocks of keys that a layout lists for each block of queries.

    Scores of absent blocks are never computed, nor is a matrix of scores kept; the backward pass computes them again.
    It adds nothing in an order that could vary, so that gradients are the same bits in each run. The last query is
    aligned with the last key: query i is at the position length - Tq + i, where length is Tk or lengths[b]. If a
    sequence is shorter than that, its first query stands beside the first key, or Tq - Tk in front of it where Tq is
    larger; if causal, queries at negative positions meet no key, nor do queries behind the keys of their sequence. A
    query that meets no key gives zeros, a log-sum-exp of -inf, and gradients of zero, also where its result's gradient
    is NaN, or its row, unless a bias or `relative` is given.

    Args:
        q: `[B, H, Tq, D]`, float, any strides, D up to 256. It, k and v may each be a `BlockSparseTensor`, whose absent
            blocks are zeros; it is made dense first, for its size is small beside that of the scores.
        k: `[B, Hk, Tk, D]`, the dtype and device of q; Hk divides H, and H / Hk neighbouring heads of q share a head.
        v: `[B, Hk, Tk, Dv]`, like k but of any width, up to 256.
        layout: of `[..., rows, cols]` blocks of Tq x Tk elements, with leading dimensions that broadcast to `[B, H]`.
            Patterns such as `sliding_window` say which elements of a block take part, and no others do.
            A layout with fewer matrices is shared, not copied. Its `capacity` may be larger than its count; one that
            overflowed gives NaN.
        mask: bool, True takes part: dense, broadcasting to `[B, H, Tq, Tk]`, or a `BlockSparseTensor` of this layout or
            another of its shape, whose absent blocks and elements are False, and in a bias 0.
            Where one of mask and bias is dense and the other holds blocks, the layout's blocks of the dense one are
            taken.
        bias: added to the scores, float, differentiable, in the same two forms; on the GPU it is read in its dtype.
        relative: one or several `Relative`, tables by relative positions: the products of a query with them are added
            to its scores, before these are scaled. Differentiable in the tables. R numbers a query and term are kept.
        causal: whether a query meets no key behind its own position.
        lengths: int `[B]`: keys from there on take no part.
        scale: of the scores; None takes D^-0.5.
        dropout: the probability, below 1, with which each weight is dropped; the others are divided by 1 - dropout.
        seed: an int, or an int64 tensor of one element on the device of q, which alone decides, with batch, head, query
            and key, which weights are dropped: `testing.dropout_mask` gives them. None draws one from PyTorch's
            generator.
        return_lse: whether to return the log-sum-exp of each query's scores too, float32 `[B, H, Tq]` (float64 for
            float64), differentiable.

    Returns:
        `[B, H, Tq, Dv]` in the dtype of q, in memory as `[B, Tq, H, Dv]`, or a pair with the log-sum-exp.

    Raises:
        ValueError: shapes, devices or layouts do not fit, or dropout is out of range.
        TypeError: dtypes differ, or something is no tensor or layout.
        NotImplementedError: D or Dv above 256 on the GPU.

    Source: Dao 2023, "FlashAttention-2"; Schön and Tompits, blksprs (attention by blocks, on compressed operands, with
    relative information).

    >>> layout = Layout.from_mask(torch.ones(2, 2).bool(), 16)
    >>> attention(*torch.ones(3, 1, 1, 32, 8), layout).shape
    torch.Size([1, 1, 32, 8])
    """
    q, k, v = (x.to_dense() if isinstance(x, BlockSparseTensor) else x for x in (q, k, v))
    key = _key(q, k, v, layout, (mask, bias, relative, lengths), causal, scale)
    settings, added = _checked.get(key), (None, None, None, None)
    if settings is None:
        _check(q, k, v, layout, lengths)
        q, k, v = autocast.cast(q, k, v)  # type: ignore[assignment]
        if not q.dtype == k.dtype == v.dtype:
            raise TypeError(
                f"{_NAME}: q, k and v must have one dtype, got {', '.join(checks.name_of(x.dtype) for x in (q, k, v))}."
                " Convert with .to(q.dtype)."
            )
        given = None if lengths is None else lengths.to(torch.int32)
        added = _extra(q, k, layout, mask, bias), *prepare(_NAME, q, k, relative, given if causal else None), given  # type: ignore[assignment]
        usual = max(q.shape[-1], 1) ** -0.5
        scale = usual if scale is None else checks.finite(_NAME, "scale", scale, "None takes D^-0.5.")
        settings = steps_of(layout, q.shape[0], q.shape[1]), causal, scale
        _checked.keep(key, settings)
    settings = *settings, *settled(_NAME, dropout, seed, q.device)
    out, lse = _attention(BlocksparseAttention(q, k, v, *added, layout.buffer, layout.form, *settings))
    return (out, lse) if return_lse else out


_checked: Checked[tuple[Any, ...]] = Checked()
"""The operator's settings."""


def _key(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, others: tuple[Any, ...], causal: bool, scale: float | None
) -> Key | None:
    """The facts that the checks of a call without the others depend on; None where it has to be checked."""
    if any(other is not None for other in others) or not isinstance(layout, Layout) or not isinstance(q, Tensor):
        return None
    if autocast.enabled(q.device):
        wanted = torch.get_autocast_dtype(q.device.type)
        if not all(isinstance(x, Tensor) and x.dtype is wanted for x in (q, k, v)):
            return None
    options = layout.lead, layout.form, layout.device
    return key_of((q, k, v), options, (causal, scale))


def _check(q: Tensor, k: Tensor, v: Tensor, layout: Layout, lengths: Tensor | None) -> None:
    checks.floating(_NAME, q=q, k=k, v=v)
    if not isinstance(layout, Layout):
        raise TypeError(
            f"{_NAME}: layout must be a Layout of blocksparse, got {type(layout).__name__}. Use Layout.from_mask."
        )
    checks.whole(_NAME, lengths=lengths)
    checks.same_device(_NAME, "q", q.device, k=k, v=v, layout=layout.buffer, lengths=lengths)
    if q.dim() != 4 or k.dim() != 4:
        raise ValueError(
            f"{_NAME}: q and k must have shape [B, H, T, D], got {list(q.shape)} and {list(k.shape)}. "
            "Add dimensions of 1 with unsqueeze."
        )
    (b, h, tq, d), (bk, hk, tk, dk), dv = q.shape, k.shape, v.shape[-1] if v.dim() else 0
    checks.shape(_NAME, "v", v, (bk, hk, tk, dv), "[B, Hk, Tk, Dv]", "like k")
    if (bk, dk) != (b, d):
        raise ValueError(
            f"{_NAME}: k must have shape [B, Hk, Tk, D] with B = {b} and D = {d} like q, got {list(k.shape)}."
        )
    if hk != h and (hk == 0 or h % hk):
        raise ValueError(f"{_NAME}: the heads of k must divide the {h} heads of q, got {hk}.")
    if q.is_cuda and max(d, dv) > _MAX_HEAD:
        raise NotImplementedError(
            f"{_NAME}: on the GPU q must have D, and v Dv, of at most {_MAX_HEAD}, got {d} and {dv}."
        )
    if layout.size != (tq, tk):
        raise ValueError(
            f"{_NAME}: layout must be of {tq} x {tk} elements like q and k, got {layout.size[0]} x {layout.size[1]}. "
            f"Make it with size=({tq}, {tk})."
        )

    if lengths is not None:
        checks.shape(_NAME, "lengths", lengths, (b,), "[B]", "like q")


def steps_of(layout: Layout, b: int, h: int) -> tuple[int, int]:
    """The steps of a batch and a head among the matrices of a layout whose leading dimensions broadcast to `[B, H]`."""
    batches, heads = checks.broadcast(_NAME, "layout's leading dimensions", layout.lead, (b, h), "[B, H] = ")
    return (heads if batches > 1 else 0), int(heads > 1)


def _extra(q: Tensor, k: Tensor, layout: Layout, given_mask: Any, given_bias: Any) -> Tensor | None:
    """The bias, or the mask of scores that take part: `[1 or B, 1 or H, Tq, Tk]`, or the layout's blocks."""
    mask, bias = (_shaped(q, k, layout, name, x) for name, x in (("mask", given_mask), ("bias", given_bias)))
    if mask is not None and mask.dtype is not torch.bool:
        raise TypeError(
            f"{_NAME}: mask must be bool, True takes part, got {checks.name_of(mask.dtype)}. Give numbers as bias."
        )
    if bias is not None:
        checks.floating(_NAME, bias=bias)
    if mask is None or bias is None:
        return bias if mask is None else mask
    if mask.dim() > bias.dim():
        mask = _blocks(layout, "mask", mask.to(bias.dtype)) != 0
    elif mask.dim() < bias.dim():
        bias = _blocks(layout, "bias", bias)
    return torch.where(mask, bias, -torch.inf)


def _blocks(layout: Layout, name: str, x: Tensor) -> Tensor:
    """The layout's blocks of a dense `[1 or B, 1 or H, Tq, Tk]`, beside something that holds blocks already."""
    lead = (1,) * (2 - len(layout.lead)) + layout.lead
    hint = "Expand layout, or give both mask and bias dense."
    checks.broadcast(_NAME, f"beside blocks {name}'s leading dimensions", x.shape[:2], lead, "those of layout, ", hint)
    return from_dense(x.expand(*lead, -1, -1).reshape(layout.dense_shape), layout).values


def _shaped(q: Tensor, k: Tensor, layout: Layout, name: str, x: Any) -> Tensor | None:
    """A dense tensor in four dimensions, the values of a block-sparse one."""
    if x is None:
        return None
    if isinstance(x, BlockSparseTensor):
        if x.layout.dense_shape != layout.dense_shape:
            raise ValueError(
                f"{_NAME}: {name} must be of {list(layout.dense_shape)} elements like layout, got {list(x.shape)}. "
                f"Bring both to the same matrices with blocksparse.repeat, or give {name} dense."
            )
        if x.layout.is_same(layout):
            return x.values
        if x.layout.elements is not None:
            # Elements that x's own layout leaves out are absent too.
            x = BlockSparseTensor(
                x.values.masked_fill(~from_dense(x.layout.element_mask(), x.layout).values, 0), x.layout
            )
        return adapt(x, layout).values
    checks.tensors(_NAME, **{name: x})
    checks.same_device(_NAME, "q", q.device, **{name: x})
    full, hint = (*q.shape[:3], k.shape[2]), "Give blocks as a BlockSparseTensor of the layout."
    wide = checks.broadcast(_NAME, name, x.shape, full, "[B, H, Tq, Tk] = ", hint)
    return x.reshape(wide).expand(*wide[:2], *full[2:])


def _fake(call: BlocksparseAttention) -> tuple[Tensor, Tensor]:
    lse = call.q.new_empty(call.q.shape[:-1], dtype=torch.promote_types(call.q.dtype, torch.float32))
    return empty_like(call.q, call.v.shape[-1]), lse


def _fake_bwd(call: BlocksparseAttentionBwd) -> tuple[Tensor, ...]:
    grads = [empty_like(x) for x in (call.q, call.k, call.v)]
    for x, wanted in ((call.bias, call.with_bias), (call.relative, call.with_relative)):
        grads.append(x.new_empty(x.shape) if x is not None and wanted else call.q.new_empty(0))
    return tuple(grads)


def _backward(call: BlocksparseAttention, kept: Any, grads: Any, needs: Any) -> dict[str, Tensor]:
    (out, lse), (grad, grad_lse) = kept, grads
    grad = torch.zeros_like(out) if grad is None else grad
    made = _attention_bwd(BlocksparseAttentionBwd(grad, grad_lse, out, lse, *call, needs.bias, needs.relative))
    wanted = {"bias": needs.bias, "relative": needs.relative}
    names = ("q", "k", "v", "bias", "relative")
    return {name: grad for name, grad in zip(names, made) if wanted.get(name, True)}


@register(
    BlocksparseAttention,
    cpu=_cpu.attention,
    fake=_fake,
    choose_path=choose_path,
    paths=PATHS,
    backward=_backward,
    saved=("q", "k", "v", "bias", "relative", "places", "lengths", "layout", "seed"),
    keep=lambda call, results: results,
    once_differentiable=_NAME,
    repeats=True,
)
def _attention() -> Any:
    from gossamer.blocksparse._triton.attention import attention

    return attention


@register(
    BlocksparseAttentionBwd,
    cpu=_cpu.attention_bwd,
    fake=_fake_bwd,
    choose_path=choose_path,
    paths=PATHS,
    once_differentiable=_NAME,
    repeats=True,
)
def _attention_bwd() -> Any:
    from gossamer.blocksparse._triton.attention_backward import attention_bwd

    return attention_bwd
