"""Gradients of `blocksparse.attention`: of masks and biases in either form, and what holds for all of them."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.blocksparse import Relative, attention, from_dense
from tests.blocksparse.attention_oracle import check, problem


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


@pytest.mark.parametrize("masked", [False, True])
def test_nan_behind_a_length_spoils_no_gradient(masked: bool, dtype: torch.dtype, device: torch.device) -> None:
    """NaN in the gradients of queries that meet no key: of both results behind a length, of the log-sum-exp where a
    mask leaves out every key."""
    q, k, v, grad, layout = problem(device, dtype, (), (64, 64), (128, 128), (2, 1), 64, density=1)
    lengths, rows = torch.tensor([128, 90], device=device), torch.arange(128, device=device)[:, None]
    given: dict[str, Any] = {"mask": rows.expand(128, 128) != 3} if masked else {"lengths": lengths}
    alone = (rows[:, 0] == 3).expand(2, 2, 128) if masked else (lengths[:, None] <= rows.T)[:, None].expand(2, 2, 128)
    leaves, results = [x.requires_grad_() for x in (q, k, v)], []
    for fill in (0, math.nan):
        out, lse = attention(*leaves, layout, causal=True, return_lse=True, **given)
        of_out = grad.masked_fill(alone[..., None], 0 if masked else fill)
        of_lse = torch.ones_like(lse).masked_fill(alone, fill)
        results.append(torch.autograd.grad((out, lse), leaves, (of_out, of_lse)))
    for got, wanted in zip(results[1], results[0]):
        assert torch.equal(got, wanted)


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


@pytest.mark.native
def test_second_derivatives_are_refused(device: torch.device) -> None:
    q, k, v, _, layout = problem(device, torch.float32, (), (16, 16), (32, 32), (1, 1), 8)
    with pytest.raises(NotImplementedError, match=r"blocksparse\.attention: second derivatives"):
        torch.autograd.grad(attention(q.requires_grad_(), k, v, layout).sum(), q, create_graph=True)


def test_bitwise_reproducible(device: torch.device) -> None:
    q, k, v, grad, layout = problem(device, torch.float32, (2,), (16, 16), (40, 50), (2, 1), 16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    first, second = (torch.autograd.grad(attention(*leaves, layout), leaves, grad) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in itertools.zip_longest(first, second))
