"""Gradients of `blocksparse.attention`: of masks and biases in either form, and what holds for all of them."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.blocksparse import Layout, Relative, attention, documents, from_dense
from tests.blocksparse.attention_oracle import check, problem, terms_for


@pytest.mark.parametrize(
    "shape",
    [(2, 2, 40, 50), (2, 1, 1, 50), *(pytest.param(s, marks=pytest.mark.full) for s in ((1, 40, 50), (40, 50)))],
)
def test_dense_mask_and_bias(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    given = problem(device, dtype, (2,), (16, 16), (40, 50), (2, 2), 16)
    g = torch.Generator(device).manual_seed(1)
    mask = torch.rand(shape, device=device, generator=g) < 0.7
    bias = torch.randn(shape, device=device, generator=g).to(dtype).requires_grad_()
    check(*given, mask=mask)
    check(*given, bias=bias, mask=None if shape[0] == 40 else mask, causal=True)


@pytest.mark.parametrize("lead", [(), (2,), (2, 1), (2, 2)], ids=str)
def test_bias_of_blocks(lead: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    q, k, v, grad, layout = problem(device, dtype, lead, (16, 32), (40, 50), (2, 2), 16)
    g = torch.Generator(device).manual_seed(1)
    bias = torch.randn(layout.capacity, 16, 32, device=device, generator=g).to(dtype).requires_grad_()

    def spread(values: Tensor) -> Tensor:
        numbers = layout.positions.long().view(layout.shape)
        tiles = torch.where((numbers >= 0)[..., None, None], values[numbers.clamp(min=0)], 0)
        return tiles.transpose(-3, -2).flatten(-4, -3).flatten(-2)[..., :40, :50]

    check(q, k, v, grad, layout, bias=bias, dense_bias=spread)


def test_mask_and_bias_in_two_forms(dtype: torch.dtype, device: torch.device) -> None:
    """What is dense gives its blocks where the other holds blocks."""
    *given, layout = problem(device, dtype, (2, 1), (16, 32), (40, 50), (2, 2), 16)
    g = torch.Generator(device).manual_seed(1)
    mask = torch.rand(1, 1, 40, 50, device=device, generator=g) < 0.7
    bias = torch.randn(2, 1, 40, 50, device=device, generator=g).to(dtype)
    mask_blocks = from_dense(mask.float().expand(2, 1, -1, -1), layout) > 0
    bias_blocks = from_dense(bias, layout)
    wanted = attention(*given[:3], layout, mask=mask, bias=bias)
    assert torch.equal(attention(*given[:3], layout, mask=mask, bias=bias_blocks), wanted)
    leaf = bias.clone().requires_grad_()
    out = attention(*given[:3], layout, mask=mask_blocks, bias=leaf)
    assert torch.equal(out, wanted)
    (ours,) = torch.autograd.grad(out, leaf, given[3])
    other = bias.clone().requires_grad_()
    (theirs,) = torch.autograd.grad(attention(*given[:3], layout, mask=mask, bias=other), other, given[3])
    torch.testing.assert_close(ours, theirs)
    with pytest.raises(ValueError, match=r"bias.s leading dimensions must broadcast to those of layout"):
        attention(*given[:3], layout, mask=mask_blocks, bias=bias.repeat(1, 2, 1, 1))


WHYS = ["length", "mask", "bias", "bias of blocks", "documents", "position", "shift", "shift by length", "tall blocks"]
WIDE = [pytest.param(why, 128, marks=pytest.mark.native) for why in ("length", *WHYS[-5:])]


@pytest.mark.parametrize("why, d", [*((why, 64) for why in WHYS), *WIDE, ("relative", 16)])
def test_a_query_without_keys_may_be_nan(why: str, d: int, dtype: torch.dtype, device: torch.device) -> None:
    """A query that meets no key behind a length, by a mask, a bias of -inf, the elements of its blocks, in front of the
    first key, or of the blocks of its row: NaN in the gradients of its results reaches no gradient, nor does NaN in its
    row, unless a bias or a table is combined with it."""
    tk = {"position": 96, "shift": 160, "shift by length": 192}.get(why, 128)
    block = (128 if why == "tall blocks" else 64, 64)
    q, k, v, grad, layout = problem(device, dtype, (), block, (128, tk), (2, 1), d, density=1)
    rows, given, lengths = torch.arange(128, device=device)[:, None], dict[str, Any](), torch.tensor([128, 90])
    alone = (rows[:, 0] == 3) | (rows[:, 0] == 70)
    if why == "length":
        given["lengths"] = lengths.to(device)
        alone = lengths.to(device)[:, None, None] <= rows[:, 0]
    elif why == "documents":
        layout = documents((128, 128), 64, torch.tensor([0, 40, 100], device=device), causal=True)
        alone = rows[:, 0] >= 100
    elif why == "position":
        alone = rows[:, 0] < 32
    elif why in ("shift", "shift by length", "tall blocks"):
        blocks = [[False, True]] if why == "tall blocks" else [[False, True, False], [True, True, True]]
        layout = Layout.from_mask(torch.tensor(blocks, device=device), block, size=(128, tk))
        alone = rows[:, 0] < (64 if why == "tall blocks" else 32)
        given["lengths"] = torch.full((2,), 160, device=device) if why == "shift by length" else None
    elif why == "bias":
        bias = torch.zeros(1, 1, 128, 128, device=device, dtype=dtype).masked_fill(alone[:, None], -math.inf)
        given["bias"] = bias.requires_grad_()
    else:
        given["mask"] = ~alone[:, None].expand(128, 128)
    if why == "bias of blocks":
        given["bias"] = torch.randn(1, 1, 128, 128, device=device).to(dtype).requires_grad_()
        given["mask"] = from_dense(given["mask"].float(), layout) > 0
    if why == "relative":
        given["relative"] = terms_for(device, dtype, 128, 128, d, 2)[0]
        given["relative"].table.requires_grad_()
    alone, results = alone.expand(2, 2, 128), []
    for fill in (0, math.nan):
        plain = why not in ("bias", "bias of blocks", "relative")
        leaves = [q.masked_fill(alone[..., None], fill if plain else 0), k, v]
        leaves = [x.detach().requires_grad_() for x in leaves]
        out, lse = attention(*leaves, layout, causal=True, return_lse=True, **given)
        assert bool((lse == -math.inf).equal(alone)) and bool((out[alone] == 0).all())
        leaves += [given["bias"]] if "bias" in given else []
        leaves += [given["relative"].table] if "relative" in given else []
        of_lse = torch.ones_like(lse).masked_fill(alone, fill)
        results.append(torch.autograd.grad((out, lse), leaves, (grad.masked_fill(alone[..., None], fill), of_lse)))
    for got, wanted in zip(*results[::-1], strict=True):
        assert torch.equal(got, wanted) and bool(got.isfinite().all())


@pytest.mark.native
def test_gradcheck() -> None:
    q, k, v, _, layout = problem(torch.device("cpu"), torch.float64, (2,), (16, 16), (20, 18), (2, 1), 3)
    bias = torch.randn(1, 2, 20, 18, dtype=torch.float64, requires_grad=True)
    term = Relative(torch.randn(1, 5, 3, dtype=torch.float64), torch.arange(20), torch.arange(18))
    leaves = [x.requires_grad_() for x in (q, k, v, term.table)]

    def call(q: Tensor, k: Tensor, v: Tensor, table: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        relative = replace(term, table=table)
        out, lse = attention(q, k, v, layout, bias=bias, relative=relative, causal=True, return_lse=True)
        return out, lse.nan_to_num(0, 0, 0)

    assert torch.autograd.gradcheck(call, (*leaves, bias), fast_mode=True)


def test_bitwise_reproducible(device: torch.device) -> None:
    q, k, v, grad, layout = problem(device, torch.float32, (2,), (16, 16), (40, 50), (2, 1), 16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    first, second = (torch.autograd.grad(attention(*leaves, layout), leaves, grad) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in itertools.zip_longest(first, second))
