"""Dropout of block-sparse attention's weights, against dense PyTorch with the same mask; masks of other layouts."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.blocksparse import BlockSparseTensor, Layout, adapt, attention, from_dense, repeat, sliding_window
from gossamer.blocksparse.records import BlocksparseAttention
from gossamer.testing import dropout_mask
from tests.blocksparse.attention_oracle import elements, problem


def dense(
    q: Tensor, k: Tensor, v: Tensor, present: Tensor, bias: Tensor | None, kept: Tensor, p: float, scale: float
) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q @ k.transpose(2, 3) * scale
    s = (s if bias is None else s + bias).masked_fill(~present, -math.inf)
    some = present.any(-1, keepdim=True)
    return (torch.where(present, torch.where(some, s, 0).softmax(-1), 0) * kept / (1 - p)) @ v


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("size", [(100, 100), (32, 96)])
def test_against_dense(size: tuple[int, int], biased: bool, dtype: torch.dtype, device: torch.device) -> None:
    q, k, v, grad, layout = problem(device, dtype, (1,), (32, 32), size, (4, 2), 16, dv=24)
    p, scale = 0.3, 0.25
    kept = dropout_mask(p, 17, (2, 4, *size), device)
    bias = torch.randn(1, 1, *size, device=device).to(dtype) if biased else None
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, bias) if x is not None]
    given: dict[str, Any] = {"bias": leaves[3]} if biased else {}
    out = attention(*leaves[:3], layout, causal=True, scale=scale, dropout=p, seed=17, **given)
    stands = torch.arange(size[0], device=device)[:, None] + size[1] - size[0]
    present = elements(layout, 2, 4) & (torch.arange(size[1], device=device) <= stands)
    results = []
    for kind in (torch.float64, dtype):
        others = [x.detach().to(kind).requires_grad_() for x in leaves]
        wanted = dense(*others[:3], present, others[3] if biased else None, kept.to(kind), p, scale)
        results.append((wanted, *torch.autograd.grad(wanted, others, grad.to(kind))))
    for got, exact, plain in zip((out, *torch.autograd.grad(out, leaves, grad)), *results):
        # Weights are rounded for their products, and the output is before its product with its gradient.
        floor = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype] * exact.abs().max()
        allowed = torch.maximum(2 * (plain.double() - exact).abs().max(), floor)
        assert bool(((got.double() - exact).abs() <= allowed).all())


@pytest.mark.native
def test_gradcheck() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 2, 20, 3), (1, 1, 20, 3), (1, 1, 20, 5))
    leaves = [torch.randn(s, dtype=torch.float64, generator=generator, requires_grad=True) for s in shapes]
    layout = Layout.from_mask(torch.ones(2, 2).bool().tril(), 16, size=(20, 20))
    options = {"causal": True, "dropout": 0.4, "seed": 3}
    torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, layout, **options), leaves)


def test_one_seed(device: torch.device) -> None:
    """One seed gives one result, and few queries, whose keys are split, drop what many do."""
    q, k, v, _, layout = problem(device, torch.float32, (), (16, 16), (32, 2048), (2, 2), 16, density=1)

    def run(seed: Any) -> Tensor:
        return attention(q, k, v, layout, dropout=0.5, seed=seed)

    out = run(7)
    assert torch.equal(out, run(torch.tensor(7, device=device))) and not torch.equal(out, run(8))
    kept = dropout_mask(0.5, 7, (2, 2, 32, 2048), device)
    wanted = dense(q, k, v, elements(layout, 2, 2), None, kept, 0.5, 0.25)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    # Of each 2^31 weights one is kept, and the factor of that one is finite.
    assert bool(attention(q, k, v, layout, dropout=1 - 1e-12, seed=7).isfinite().all())
    kept = dropout_mask(0.9999, 7, (2, 2, 32, 2048), device)
    wanted = dense(q, k, v, elements(layout, 2, 2), None, kept, 0.9999, 0.25)
    torch.testing.assert_close(attention(q, k, v, layout, dropout=0.9999, seed=7), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.kernels
def test_values_of_dropout_share_kernels(device: torch.device) -> None:
    from gossamer.blocksparse._triton.attention import operands, tile_of

    q, k, v, _, layout = problem(device, torch.float32, (), (16, 16), (32, 32), (2, 2), 16, density=1)
    seed, given = torch.tensor([7], device=device), (layout.buffer, layout.form, (0, 0), False, 1.0)
    calls = [BlocksparseAttention(q, k, v, *(None,) * 4, *given, drop, seed) for drop in (1, 2)]
    assert len({operands(call, tile_of).config for call in calls}) == 1


@pytest.mark.native
@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"dropout": 1}, ValueError, r"dropout must be a float .* got 1. Give a probability such as 0.1, or 0.0"),
        ({"dropout": True}, ValueError, r"dropout must be a float .* got True. Give a probability"),
        ({"seed": 1.5}, TypeError, r"seed must be an int in .* got float. Give None to have one drawn"),
        ({"seed": True}, TypeError, r"seed must be an int in .* got bool"),
        ({"seed": 1 << 63}, ValueError, r"seed must be an int in .* got 9223372036854775808. Take it modulo 2\^63"),
        ({"seed": -(1 << 63) - 1}, ValueError, r"seed must be an int in \[-2\^63, 2\^63\)"),
        ({"seed": torch.ones(1)}, TypeError, r"seed must be .* got float32 \[1\]. Use torch.tensor\(\[n\]\)"),
    ],
    ids=str,
)
def test_errors(given: dict[str, Any], error: type[Exception], message: str) -> None:
    q, layout = torch.ones(1, 1, 16, 8), Layout.from_mask(torch.ones(1, 1).bool(), 16)
    with pytest.raises(error, match=f"blocksparse.attention: {message}"):
        attention(q, q, q, layout, **given)
    for seed in (-(1 << 63), (1 << 63) - 1):
        assert attention(q, q, q, layout, dropout=0.5, seed=seed).shape == q.shape


def test_mask_and_bias_of_other_layouts(device: torch.device) -> None:
    """Their blocks are those of another layout, of another size: where they have none a mask is False, a bias 0."""
    q, k, v, _, layout = problem(device, torch.float32, (), (32, 32), (64, 64), (2, 2), 16)
    other = Layout.from_mask(torch.rand(4, 4, device=device) < 0.6, 16)
    mask = from_dense(torch.rand(64, 64, device=device) < 0.7, other)
    bias = from_dense(torch.randn(64, 64, device=device), other)
    values = bias.values.requires_grad_()
    out = attention(q, k, v, layout, mask=mask, bias=BlockSparseTensor(values, other))
    wanted = attention(q, k, v, layout, mask=mask.to_dense(), bias=adapt(bias, (64, 64)).to_dense())
    torch.testing.assert_close(out, wanted)
    (got,) = torch.autograd.grad(out.square().sum(), values, retain_graph=True)
    assert bool((got != 0).any())


def test_mask_and_bias_of_a_pattern(device: torch.device) -> None:
    """Elements that the pattern of their layout leaves out are absent, whatever their values hold."""
    q, k, v, _, layout = problem(device, torch.float32, (), (32, 32), (64, 64), (2, 2), 16, density=1)
    other = sliding_window((64, 64), 16, (10, 5)).to(device)
    inside, shape = other.element_mask(), (other.capacity, 16, 16)
    mask = BlockSparseTensor(torch.ones(shape, dtype=torch.bool, device=device), other)
    torch.testing.assert_close(attention(q, k, v, layout, mask=mask), attention(q, k, v, layout, mask=inside))
    values = torch.randn(shape, device=device).requires_grad_()
    dense = torch.where(inside, BlockSparseTensor(values.detach(), other).to_dense(), 0).requires_grad_()
    out = attention(q, k, v, layout, bias=BlockSparseTensor(values, other))
    wanted = attention(q, k, v, layout, bias=dense)
    torch.testing.assert_close(out, wanted)
    (got,), (exact,) = (torch.autograd.grad(x.square().sum(), y) for x, y in ((out, values), (wanted, dense)))
    exact = from_dense(torch.where(inside, exact, 0), other).values
    torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-5)


def test_mask_of_other_matrices(device: torch.device) -> None:
    """The error names ways out, and both give what a dense mask gives."""
    q, k, v, _, layout = problem(device, torch.float32, (2,), (32, 32), (64, 64), (2, 2), 16, density=1)
    mask = from_dense(torch.rand(64, 64, device=device) < 0.7, Layout.from_mask(torch.ones(4, 4).bool(), 16).to(device))
    with pytest.raises(
        ValueError, match=r"mask must be of \[2, 64, 64\] .* with blocksparse.repeat, or give mask dense"
    ):
        attention(q, k, v, layout, mask=mask)
    wanted = attention(q, k, v, layout, mask=mask.to_dense())
    torch.testing.assert_close(attention(q, k, v, layout, mask=repeat(mask, (2, 1, 1))), wanted)
