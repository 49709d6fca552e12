"""Attention over selected keys and its gradients, against dense float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.attention import Selection, sparse_attention
from gossamer.testing import assert_close


def dense(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None, causal: bool = True, lengths: Any = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) by dense PyTorch in the dtype of q; mask bool [B, S, Tq, Tk]."""
    (_, h, tq, d), (_, g, tk, _) = q.shape, k.shape
    mask = visible(mask, tq, tk, causal, lengths).repeat_interleave(h // mask.shape[1], 1)
    k, v = (x.repeat_interleave(h // g, 1) for x in (k, v))
    s = (q @ k.transpose(2, 3)) * (d**-0.5 if scale is None else scale)
    s = s.masked_fill(~mask, -math.inf)
    # A row without keys would be NaN: it is computed over all and cleared.
    some = mask.any(-1, keepdim=True)
    p = torch.where(some, s, 0).softmax(-1)
    out = torch.where(mask, p, 0) @ v
    return torch.where(some, out, 0), torch.where(some, s, 0).logsumexp(-1).where(some[..., 0], -math.inf)


def visible(mask: Tensor, tq: int, tk: int, causal: bool, lengths: Any) -> Tensor:
    keys = torch.arange(tk, device=mask.device)
    if causal:
        mask = mask & (keys <= torch.arange(tk - tq, tk, device=mask.device)[:, None])
    if lengths is not None:
        mask = mask & (keys < lengths[:, None, None, None])
    return mask


def inputs(
    b: int, h: int, g: int, tq: int, tk: int, d: int, dtype: torch.dtype, device: torch.device, generator: Any
) -> list[Tensor]:
    shapes = ((b, h, tq, d), (b, g, tk, d), (b, g, tk, d))
    return [torch.randn(s, device=device, generator=generator).to(dtype).requires_grad_() for s in shapes]


def random_mask(shape: tuple[int, ...], density: float, generator: torch.Generator) -> Tensor:
    return torch.rand(shape, device=generator.device, generator=generator) < density


def by_formula(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, grad: Tensor, grad_lse: Tensor | None, **options: Any
) -> tuple[Tensor, ...]:
    """Gradients by dense PyTorch in the dtype of q, as every attention without a matrix of probabilities has them:
    softmax's own sum is the product of the output and its gradient. Autograd, which sums the probabilities times their
    gradients, gets exact zeros where a query has one key."""
    (b, h, tq, d), (_, g, tk, _) = q.shape, k.shape
    out, lse = dense(q, k, v, mask, **options)
    scale = options.get("scale") or d**-0.5
    mask = visible(mask, tq, tk, options.get("causal", True), options.get("lengths"))
    mask = mask.repeat_interleave(h // mask.shape[1], 1)
    k, v = (x.repeat_interleave(h // g, 1) for x in (k, v))
    p = torch.where(mask, ((q @ k.transpose(2, 3)) * scale - lse[..., None]).exp(), 0)
    delta = (grad * out).sum(-1) - (0 if grad_lse is None else grad_lse)
    ds = p * (grad @ v.transpose(2, 3) - delta[..., None]) * scale
    dk, dv = (x.view(b, g, h // g, tk, d).sum(2) for x in (ds.transpose(2, 3) @ q, p.transpose(2, 3) @ grad))
    return ds @ k, dk, dv


def check(q: Tensor, k: Tensor, v: Tensor, selection: Selection, mask: Tensor, generator: Any, **options: Any) -> None:
    """Results, lse and gradients, also those that come through the lse."""
    leaves = (q, k, v)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    usual = [x.detach() for x in leaves]
    wanted, plain = dense(*exact, mask, **options), dense(*usual, mask, **options)
    got = sparse_attention(q, k, v, selection, return_lse=True, **options)
    assert got[0].dtype is q.dtype and got[1].dtype is torch.promote_types(q.dtype, torch.float32)
    assert_close(got[0], reference64=wanted[0], plain=plain[0], name="out")
    # Plain PyTorch rounds the scores to the inputs' dtype before it sums.
    assert_close(got[1].to(q.dtype), reference64=wanted[1], plain=plain[1], name="lse")
    towards = torch.randn(q.shape, device=q.device, generator=generator).to(q.dtype)
    some = wanted[1].isfinite()
    of_lse = torch.randn(some.shape, device=q.device, generator=generator).to(q.dtype) * some
    for through in (False, True):

        def grads(out: Tensor, lse: Tensor, leaves: Any, through: bool = through) -> tuple[Tensor, ...]:
            total = (out * towards.to(out.dtype)).sum()
            if through:
                total = total + torch.where(some, lse * of_lse.to(lse.dtype), 0).sum()
            return torch.autograd.grad(total, leaves, retain_graph=True)

        other = by_formula(*usual, mask, towards, of_lse if through else None, **options)
        for name, a, b, c in zip("qkv", grads(*got, leaves), grads(*wanted, exact), other):
            # Of few numbers the largest error of plain PyTorch is a matter of luck.
            assert_close(a, reference64=b, plain=c, factor=2 if a.numel() > 1000 else 4, name=f"gradient of {name}")


@pytest.mark.parametrize("scopes", ["one", "groups", "heads"])
@pytest.mark.parametrize(
    "b, h, g, tq, tk, d",
    [(1, 1, 1, 64, 64, 16), (2, 4, 2, 70, 70, 16), (1, 6, 2, 33, 200, 24), (1, 2, 2, 130, 90, 64), (1, 3, 1, 2, 77, 8)],
)
def test_against_dense(
    b: int, h: int, g: int, tq: int, tk: int, d: int, scopes: str, dtype: torch.dtype, device: torch.device,
    generator: torch.Generator,
) -> None:  # fmt: skip
    q, k, v = inputs(b, h, g, tq, tk, d, dtype, device, generator)
    mask = random_mask((b, {"one": 1, "groups": g, "heads": h}[scopes], tq, tk), 0.3, generator)
    check(q, k, v, Selection.from_mask(mask), mask, generator)
