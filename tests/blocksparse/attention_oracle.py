"""Attention by a dense matrix of scores, and random problems for it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from gossamer.blocksparse import BlockSparseTensor, Layout, Relative, attention
from gossamer.testing import assert_close


def dense(
    q: Tensor, k: Tensor, v: Tensor, present: Tensor, bias: Tensor | None, scale: float,
    terms: Sequence[Relative] = (),
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Attention over the scores that `present` names, and its log-sum-exp; rows without any give zeros and -inf. Last
    the products, of which scores are made."""
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    # Plain PyTorch takes the softmax of 16-bit scores in float32.
    products = _products(q, k, terms)
    s = (products * scale).to(torch.promote_types(q.dtype, torch.float32))
    s = s if bias is None else s + bias
    s = s.masked_fill(~present, -math.inf)
    # In this form rows without keys have gradients, of zero.
    most = s.detach().amax(-1, keepdim=True).clamp(min=-1e30)
    total = torch.exp(s - most).sum(-1, keepdim=True)
    lse = most + total.clamp(min=1e-30).log()
    # Without a matrix of weights a backward pass has them from scores and log-sum-exps, in base 2. Their difference
    # rounds more than a softmax that subtracts its maximum, and weights are rounded for the products: here as there.
    p = torch.exp2(s / math.log(2) - lse / math.log(2))
    return p.to(v.dtype) @ v, lse.masked_fill(total == 0, -math.inf).squeeze(-1), products


def _products(q: Tensor, k: Tensor, terms: Sequence[Any]) -> Tensor:
    """Every query times every key, and times what the terms have for their distance."""
    s = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(2, 3)
    for term in terms:
        apart = term.key_positions[..., None, :] - term.query_positions[..., None]
        row = apart.clamp(-term.clip, term.clip) + term.clip
        row = row.view(-1, 1, *row.shape[-2:]).expand(*s.shape[:2], -1, -1)
        s = s + (q @ term.table.transpose(1, 2)).gather(3, row)
    return s


def elements(layout: Layout, b: int, h: int) -> Tensor:
    """Bool `[B, H, Tq, Tk]`: the scores of elements that take part."""
    return layout.element_mask().expand(b, h, *layout.size)


def problem(
    device: torch.device, dtype: torch.dtype, lead: tuple[int, ...], block: tuple[int, int], size: tuple[int, int],
    heads: tuple[int, int], d: int, density: float = 0.5, capacity: int | None = None, dv: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Layout]:  # fmt: skip
    """q, k, v of width `dv` (None: d), a gradient, and a random layout whose first row is empty; B is 2."""
    g = torch.Generator(device).manual_seed(0)
    rows, cols = -(-size[0] // block[0]), -(-size[1] // block[1])
    mask = torch.rand(*lead, rows, cols, device=device, generator=g) < density
    mask[..., 0, :] = density == 1
    layout = Layout.from_mask(mask, block, size=size, capacity=capacity)
    of_q, of_k, wide = (heads[0], size[0]), (heads[1], size[1]), d if dv is None else dv
    shapes = ((*of_q, d), (*of_k, d), (*of_k, wide), (*of_q, wide))
    q, k, v, grad = (torch.randn(2, *shape, device=device, generator=g).to(dtype) for shape in shapes)
    return q, k, v, grad, layout


def check(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, layout: Layout, *, mask: Tensor | None = None,
    bias: Tensor | None = None, dense_bias: Any = None, causal: bool = False, lengths: Tensor | None = None,
    scale: float | None = None, terms: Sequence[Relative] = (),
) -> None:  # fmt: skip
    """Result, log-sum-exp and every gradient, against float64 and beside plain PyTorch."""
    (b, h, tq, d), tk = q.shape, k.shape[2]
    present = elements(layout, b, h)
    i, j = torch.arange(tq, device=q.device)[:, None], torch.arange(tk, device=q.device)
    if causal:
        shift = torch.full((b,), tk - tq, device=q.device)
        if lengths is not None:
            # The last query stands beside the last key of its sequence, or the first beside the first.
            shift = (lengths.clamp(max=tk) - tq).clamp(min=min(tk - tq, 0))
        present = present & (j <= i + shift[:, None, None, None])
        if lengths is not None:  # a query behind the keys of its sequence meets none
            present = present & (i + shift[:, None, None, None] < lengths[:, None, None, None])
    if lengths is not None:
        present = present & (j < lengths[:, None, None, None])
    if mask is not None:
        present = present & mask
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, *(term.table for term in terms))]
    leaves += [] if bias is None else [bias]

    def with_tables(tables: Sequence[Tensor]) -> list[Relative]:
        return [replace(term, table=table) for term, table in zip(terms, tables)]

    def stand_ins(tables: Sequence[Tensor]) -> list[Any]:
        # On a GPU `Relative` refuses float64, which the reference is in.
        return [SimpleNamespace(**vars(term) | {"table": table}, clip=term.clip) for term, table in zip(terms, tables)]

    # `dense_bias` spreads the values of a layout's blocks.
    given = bias if bias is None or dense_bias is None else BlockSparseTensor(bias, layout)
    out, lse = attention(
        *leaves[:3], layout, mask=mask, bias=given, relative=with_tables(leaves[3:]), causal=causal,
        lengths=lengths, scale=scale, return_lse=True,
    )  # fmt: skip
    met = present.any(-1)
    towards = torch.linspace(-1, 1, lse.numel(), device=q.device, dtype=lse.dtype).view_as(lse)
    ours = torch.autograd.grad([out, lse.masked_fill(~met, 0)], leaves, [grad, towards])
    results = []
    sizes: list[Any] = []
    for dtype in (torch.float64, q.dtype):
        others = [x.detach().to(dtype).requires_grad_() for x in leaves]
        added = None if bias is None else (others[-1] if dense_bias is None else dense_bias(others[-1]))
        factor = d**-0.5 if scale is None else scale
        expected, sums, products = dense(*others[:3], present, added, factor, stand_ins(others[3:]))
        sums = torch.where(met, sums, 0)
        *grads, apart = torch.autograd.grad([expected, sums], [*others, products], [grad.to(dtype), towards.to(dtype)])
        results.append((expected, sums.to(lse.dtype), *grads))
        sizes = sizes or _sizes(others, apart, stand_ins)
    assert bool((lse.isneginf() == ~met).all())
    # In 16 bits both ways round the same weights, and that is all that shows. In float32 the largest of some thousand
    # rounding errors of sums of some dozen terms is a matter of luck: it doubles between orders of summation.
    factor = 4.0 if q.dtype is torch.float32 else 2.0
    names = ("out", "lse", "q", "k", "v", *("table" for _ in terms), "bias")
    unknown = (None, None)
    sizes = [unknown, unknown, *sizes[:2], unknown, *sizes[2:], unknown]
    actual = (out, torch.where(met, lse, 0), *ours)
    for name, a, (length, magnitude), want, plain in zip(names, actual, sizes, *results):
        budget: dict[str, Any] = {"factor": factor, "length": length, "magnitude": magnitude}
        assert_close(a, reference64=want.double(), plain=plain, name=name, **budget)


def _sizes(leaves: Sequence[Tensor], grad: Tensor, stand_ins: Callable[..., list[Any]]) -> list[Any]:
    """Of the gradients of q, k and the tables, given the one of their products: how many products an element adds up,
    and the root of the sum of their squares."""
    q, k, _, *tables = [x.detach().square().requires_grad_() for x in leaves]
    summed = [q, k, *tables[: len(stand_ins(tables))]]
    found = torch.autograd.grad(_products(q, k, stand_ins(tables)), summed, grad.square())
    return [(grad.numel() * q.shape[-1] // x.numel(), root.sqrt()) for x, root in zip(summed, found)]


def terms_for(device: torch.device, dtype: torch.dtype, tq: int, tk: int, d: int, heads: int) -> list[Relative]:
    """Places in a sequence, and another term whose positions repeat, differ between batches and do not ascend."""
    g = torch.Generator(device).manual_seed(2)
    pitch_q, pitch_k = (torch.randint(-9, 9, (2, t), device=device, generator=g) for t in (tq, tk))
    tables = torch.randn(heads, 9, d, device=device, generator=g), torch.randn(1, 25, d, device=device, generator=g)
    order = torch.arange(tk, device=device)
    return [
        Relative(tables[0].to(dtype), order[tk - tq :] if tk >= tq else torch.arange(tq, device=device), order),
        Relative(tables[1].to(dtype), pitch_q, pitch_k.int()),
    ]
