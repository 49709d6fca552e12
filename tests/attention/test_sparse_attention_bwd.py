"""Gradients of attention over selected keys by themselves; beside the results they are in test_sparse_attention."""

import pytest
import torch
from torch import Tensor

from benchmarks.inputs import random_selection
from gossamer.attention import Selection, sparse_attention
from tests.attention.test_sparse_attention import PATHS, inputs, random_mask


@pytest.mark.native
@pytest.mark.parametrize("scopes, lengths", [(1, None), (2, [9]), (4, None)])
def test_gradcheck(scopes: int, lengths: list[int] | None) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, 7, 3), (1, 2, 9, 3), (1, 2, 9, 3))
    leaves = [torch.randn(s, dtype=torch.float64, generator=generator, requires_grad=True) for s in shapes]
    mask = random_mask((1, scopes, 7, 9), 0.6, generator)
    mask[..., 0] = True
    options = {"lengths": None if lengths is None else torch.tensor(lengths), "return_lse": True, "causal": True}
    selection = Selection.from_mask(mask)
    torch.autograd.gradcheck(lambda q, k, v: sparse_attention(q, k, v, selection, **options), leaves)


@pytest.mark.native
def test_bitwise_reproducible(device: torch.device, generator: torch.Generator, scale: int) -> None:
    t = 128 * scale
    q, k, v = inputs(1, 4, 2, t, t, 32, torch.float32, device, generator)
    selection = random_selection(t, 40, device=device, generator=generator)

    def results() -> tuple[Tensor, ...]:
        out = sparse_attention(q, k, v, selection, causal=True)
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

    first = results()
    for _ in range(3):
        for a, b in zip(first, results()):
            assert torch.equal(a, b)


@PATHS
@pytest.mark.parametrize("scopes", [2, *(pytest.param(s, marks=pytest.mark.full) for s in (1, 4))])
def test_keys_of_many_groups(
    scopes: int, path: str, device: torch.device, generator: torch.Generator, mode: str
) -> None:
    """More queries than a list has, and heads that share keys: sums over all of them, added in one order."""
    t = 530 if mode == "interpreter" else 1200
    shapes = ((1, 4, t, 16), (1, 2, 40, 16), (1, 2, 40, 16))
    q, k, v = (torch.randint(-2, 3, shape, device=device, generator=generator).float() for shape in shapes)
    mask = random_mask((1, scopes, t, 40), 0.2, generator)
    mask[:, :, :, 30:] = False
    # With scores of 0 each key has the same share, 1 / 2^n of it exactly, so that sums are exact in any order.
    q = torch.zeros_like(q)
    mask &= mask.cumsum(-1) <= 4
    mask &= mask.sum(-1, keepdim=True) == 4
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = sparse_attention(*leaves, Selection.from_mask(mask), causal=False, path=path)
    towards = torch.randint(-3, 4, out.shape, device=device, generator=generator).float()
    dv = torch.autograd.grad(out, v, towards)[0]
    p = mask.repeat_interleave(4 // scopes, 1).double() / 4
    wanted = (p.transpose(2, 3) @ towards.double()).view(1, 2, 2, 40, 16).sum(2)
    assert torch.equal(dv.double(), wanted)
