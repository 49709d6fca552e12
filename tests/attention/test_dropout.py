"""Dropout of attention's probabilities, against dense float64 with the same mask."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.attention import Selection, sparse_attention
from gossamer.testing import assert_close, dropout_mask
from tests.attention.budget import no_luck
from tests.attention.test_sparse_attention import PATHS, random_mask, visible
from tests.attention.test_straight_through import scores_of


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, kept: Tensor, p: float, indexer: Any = None) -> Tensor:
    """In the dtype of q; with an indexer's inputs their scores are added to the logits, and taken away again."""
    h, t = q.shape[1:3]
    keep = visible(mask, t, k.shape[2], True, None).repeat_interleave(h // mask.shape[1], 1)
    k, v = (x.repeat_interleave(h // x.shape[1], 1) for x in (k, v))
    s = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
    if indexer is not None:
        scores = scores_of(*indexer)
        s = s + scores - scores.detach()
    some = keep.any(-1, keepdim=True)
    weights = torch.where(keep, torch.where(some, s.masked_fill(~keep, -math.inf), 0).softmax(-1), 0)
    return (weights * kept / (1 - p)) @ v


def by_formula(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, factors: Tensor, grad: Tensor, out: Tensor
) -> tuple[Tensor, ...]:
    """Gradients in the dtype of q, from the output and its gradient, as attention without a matrix has them."""
    (_, h, t, d), g = q.shape, k.shape[1]
    keep = visible(mask, t, t, True, None).repeat_interleave(h // mask.shape[1], 1)
    keys, values = (x.repeat_interleave(h // g, 1) for x in (k, v))
    s = (q @ keys.transpose(2, 3) * d**-0.5).masked_fill(~keep, -math.inf)
    w, factors = torch.where(keep, s.softmax(-1), 0), factors.to(q.dtype)
    delta = (grad * out).sum(-1, keepdim=True)
    ds = w * (grad @ values.transpose(2, 3) * factors - delta) * d**-0.5
    dk, dv = ds.transpose(2, 3) @ q, (w * factors).transpose(2, 3) @ grad
    return ds @ keys, *(x.unflatten(1, (g, -1)).sum(2) for x in (dk, dv))


@PATHS
@pytest.mark.parametrize("case", [(2, 4, 2, 70, 16, 16, 2), (1, 2, 1, 40, 16, 24, 1)], ids=str)
def test_against_dense(
    case: tuple[int, ...], path: str, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    b, h, g, t, d, dv, scopes = case
    shapes = ((b, h, t, d), (b, g, t, d), (b, g, t, dv))
    leaves = [torch.randn(s, device=device, generator=generator).to(dtype).requires_grad_() for s in shapes]
    mask, p = random_mask((b, scopes, t, t), 0.5, generator), 0.25
    kept = dropout_mask(p, 11, (b, h, t, t), device)
    out = sparse_attention(*leaves, Selection.from_mask(mask), causal=True, dropout=p, seed=11, path=path)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    usual = [x.detach() for x in leaves]
    wanted, plain = dense(*exact, mask, kept, p), dense(*usual, mask, kept, p)
    assert_close(out, reference64=wanted, plain=plain, name="out")
    towards = torch.randn(out.shape, device=device, generator=generator).to(dtype)
    precise = torch.autograd.grad(wanted, exact, towards.double())
    other = by_formula(*usual, mask, kept / (1 - p), towards, plain)
    for name, got, a, c in zip("qkv", torch.autograd.grad(out, leaves, towards), precise, other):
        assert_close(got, reference64=a, plain=no_luck(c, a, a.abs().amax(), t), name=f"gradient of {name}")


@pytest.mark.native
def test_gradcheck_with_an_indexer() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, 7, 3), (1, 2, 7, 3), (1, 2, 7, 5), (1, 2, 7, 4), (1, 7, 4), (1, 7, 2), (2,))
    leaves = [torch.randn(s, dtype=torch.float64, generator=generator, requires_grad=True) for s in shapes]
    mask, kept = random_mask((1, 1, 7, 7), 0.7, generator), dropout_mask(0.4, 3, (1, 4, 7, 7))
    selection = Selection.from_mask(mask)
    options = {"causal": True, "dropout": 0.4, "seed": 3}
    torch.autograd.gradcheck(lambda *x: sparse_attention(*x, selection, **options), leaves[:3])
    out = sparse_attention(*leaves[:3], selection, indexer=tuple(leaves[3:]), **options)
    wanted = dense(*leaves[:3], mask, kept, 0.4, leaves[3:])
    towards = torch.randn(out.shape, dtype=out.dtype, generator=generator)
    for a, b in zip(torch.autograd.grad(out, leaves, towards), torch.autograd.grad(wanted, leaves, towards)):
        torch.testing.assert_close(a, b)


@pytest.mark.kernels
def test_straight_through(device: torch.device, generator: torch.Generator) -> None:
    shapes = ((1, 2, 40, 16), (1, 1, 40, 16), (1, 1, 40, 24), (1, 3, 40, 8), (1, 40, 8), (1, 40, 3), (3,))
    leaves = [torch.randn(s, device=device, generator=generator, requires_grad=True) for s in shapes]
    mask, kept = random_mask((1, 1, 40, 40), 0.5, generator), dropout_mask(0.3, 5, (1, 2, 40, 40), device)
    out = sparse_attention(
        *leaves[:3], Selection.from_mask(mask), indexer=tuple(leaves[3:]), causal=True, dropout=0.3, seed=5
    )
    wanted = dense(*leaves[:3], mask, kept, 0.3, leaves[3:])
    towards = torch.randn(out.shape, device=device, generator=generator)
    for a, b in zip(torch.autograd.grad(out, leaves, towards), torch.autograd.grad(wanted, leaves, towards)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_of_one_seed(device: torch.device, generator: torch.Generator) -> None:
    """One seed gives one result, as an int and as a tensor, another seed another, and none draws from PyTorch's."""
    q, k, v = (torch.randn(1, 2, 40, 16, device=device, generator=generator) for _ in range(3))
    selection = Selection.from_mask(torch.ones(1, 40, 40, dtype=torch.bool, device=device))

    def run(seed: Any) -> Tensor:
        return sparse_attention(q, k, v, selection, causal=True, dropout=0.5, seed=seed)

    assert torch.equal(run(7), run(torch.tensor([7], device=device))) and not torch.equal(run(7), run(8))
    torch.manual_seed(0)
    first, second = run(None), run(None)
    torch.manual_seed(0)
    assert torch.equal(first, run(None)) and not torch.equal(first, second)
    # Few queries drop the same probabilities as many do.
    few = sparse_attention(
        q[:, :, :3],
        k,
        v,
        Selection.from_mask(torch.ones(1, 3, 40, dtype=torch.bool, device=device)),
        dropout=0.5,
        seed=7,
    )
    whole = sparse_attention(q, k, v, selection, dropout=0.5, seed=7)
    torch.testing.assert_close(few, whole[:, :, :3])


@pytest.mark.native
def test_share_that_is_kept() -> None:
    mask = dropout_mask(0.3, 1 << 40, (2, 3, 200, 300))
    shares = [mask.double().mean(dims) for dims in ((1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2))]
    for share, n in zip(shares, (180000, 120000, 1800, 1200)):
        assert bool(((share - 0.7).abs() < 5 * (0.21 / n) ** 0.5).all())
    # Neighbours along each dimension are independent.
    for dim in range(4):
        both = (mask.narrow(dim, 1, mask.shape[dim] - 1) & mask.narrow(dim, 0, mask.shape[dim] - 1)).double().mean()
        assert abs(float(both) - 0.49) < 0.006


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"dropout": 1.0}, ValueError, "dropout must be a float of at least 0 and below 1, .* got 1.0"),
        ({"dropout": -0.1}, ValueError, "dropout must be a float of at least 0 and below 1, .* got -0.1"),
        (
            {"seed": torch.ones(1)},
            TypeError,
            "seed must be an int in .*, or an int64 tensor of one element, got float32",
        ),
        ({"path": "decode"}, ValueError, "decode with at most 16 queries and without dropout, got 'decode' with 3"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_errors(change: dict[str, Any], error: type[Exception], message: str) -> None:
    q = torch.ones(1, 1, 3, 8)
    selection = Selection.from_mask(torch.ones(1, 3, 3, dtype=torch.bool))
    with pytest.raises(error, match=f"attention.sparse_attention: .*{message}"):
        sparse_attention(q, q, q, selection, **{"dropout": 0.5, **change})
