"""The gradient of an indexer's scores straight through the selection, against dense float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.attention import Selection, select_topk, sparse_attention
from gossamer.testing import assert_close
from tests.attention.indexer import dense as indexed
from tests.attention.test_sparse_attention import random_mask, visible


def operands(
    b: int, h: int, g: int, t: int, d: int, n: int, di: int, dtype: torch.dtype, device: torch.device, generator: Any
) -> list[Tensor]:
    shapes = ((b, h, t, d), (b, g, t, d), (b, g, t, d), (b, n, t, di), (b, t, di), (b, t, n), (n,))
    return [torch.randn(s, device=device, generator=generator).to(dtype).requires_grad_() for s in shapes]


def scores_of(q_idx: Tensor, k_idx: Tensor, w: Tensor, bias: Tensor, activation: str = "sigmoid") -> Tensor:
    """[B, 1, T, T]."""
    return indexed(q_idx, k_idx, w, bias, q_idx.shape[3] ** -0.5, activation)[:, None]


def dense(
    q: Tensor, k: Tensor, v: Tensor, q_idx: Tensor, k_idx: Tensor, w: Tensor, bias: Tensor, mask: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, probabilities), with scores added to the logits and taken away again, as far as values go."""
    h, t, d = q.shape[1:]
    keep = visible(mask[:, None], t, t, options.get("causal", True), options.get("lengths"))
    k, v = (x.repeat_interleave(h // k.shape[1], 1) for x in (k, v))
    scores = scores_of(q_idx, k_idx, w, bias, options.get("indexer_activation", "sigmoid"))
    s = q @ k.transpose(2, 3) * (options.get("scale") or d**-0.5) + scores - scores.detach()
    some = keep.any(-1, keepdim=True)
    s = torch.where(some, s.masked_fill(~keep, -math.inf), 0)
    p = torch.where(keep, s.softmax(-1), 0)
    return p @ v, torch.where(some[..., 0], s.logsumexp(-1), 0), p


def by_formula(
    leaves: list[Tensor], mask: Tensor, towards: Tensor, of_lse: float, **options: Any
) -> tuple[Tensor, ...]:
    """Gradients of the indexer's inputs in float32 from numbers of another dtype, in which the output is rounded before
    its product with its gradient is taken, as every attention without a matrix of probabilities has it."""
    given = [x.detach().float().requires_grad_() for x in leaves]
    with torch.no_grad():
        out, _, p = dense(*given, mask, **options)
        v = given[2].repeat_interleave(p.shape[1] // given[2].shape[1], 1)
        grad = towards.float()
        delta = (grad * out.to(leaves[0].dtype).float()).sum(-1, keepdim=True) - of_lse
        g = (p * (grad @ v.transpose(2, 3) - delta)).sum(1, keepdim=True)
    scores = scores_of(*given[3:], options.get("indexer_activation", "sigmoid"))
    return torch.autograd.grad((scores * g).sum(), given[3:])


@pytest.mark.parametrize("case", [(1, 2, 1, 40, 16, 4, 16), (2, 2, 2, 70, 24, 3, 8), (1, 1, 1, 33, 16, 9, 20)], ids=str)
@pytest.mark.parametrize("through_lse, activation", [(False, "sigmoid"), (True, "sigmoid"), (True, "relu")])
def test_against_dense(
    case: tuple[int, ...], through_lse: bool, activation: str, dtype: torch.dtype, device: torch.device,
    generator: torch.Generator,
) -> None:  # fmt: skip
    leaves = operands(*case, dtype, device, generator)
    b, t = case[0], case[3]
    mask = random_mask((b, t, t), 0.3, generator)
    options: dict[str, Any] = {"indexer_activation": activation}
    if through_lse:
        options |= {"scale": 0.3, "lengths": torch.randint(t // 2, t + 1, (b,), device=device, generator=generator)}
    towards = torch.randn(leaves[0].shape, device=device, generator=generator).to(dtype)
    selection = Selection.from_mask(mask)
    given = {"indexer": tuple(leaves[3:]), "return_lse": True, "causal": True}
    out, lse = sparse_attention(*leaves[:3], selection, **given, **options)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    wanted_out, wanted_lse, _ = dense(*exact, mask, **options)
    of_lse = 0.5 if through_lse else 0.0
    found = []
    for o, e, given in ((out, lse, leaves), (wanted_out, wanted_lse, exact)):
        total = (o * towards.to(o.dtype)).sum() + torch.where(e.isfinite(), e, 0).sum() * of_lse
        found.append(torch.autograd.grad(total, given[3:]))
    plain = by_formula(leaves, mask, towards, of_lse, **options)
    for name, a, c, other in zip(("q_idx", "k_idx", "w", "bias"), *found, plain, strict=True):
        # 16-bit products round the slopes of the sigmoids, and terms of either sign nearly cancel.
        part = max(torch.finfo(dtype).eps, 2 * math.log2(t * t) * 2**-24)
        rounded = other + (c.abs().max() * part).to(other.dtype)
        assert_close(a, reference64=c, plain=rounded, name=f"gradient of {name}")


def test_nothing_else_changes(device: torch.device, generator: torch.Generator) -> None:
    leaves = operands(1, 2, 1, 70, 16, 2, 16, torch.float32, device, generator)
    q, k, v, *indexer = leaves
    selection = select_topk(*indexer, k=9, causal=True)
    plain = sparse_attention(q, k, v, selection, return_lse=True, causal=True)
    through = sparse_attention(q, k, v, selection, return_lse=True, indexer=tuple(indexer), causal=True)
    for a, b in zip(plain, through):
        assert torch.equal(a, b)
    for a, b in zip(*(torch.autograd.grad(x[0].square().sum(), (q, k, v)) for x in (plain, through))):
        assert torch.equal(a, b)
    frozen = tuple(x.detach() for x in indexer)
    sparse_attention(q, k, v, selection, indexer=frozen, causal=True).sum().backward()
    assert q.grad is not None and all(x.grad is None for x in indexer)


@pytest.mark.native
def test_gradient_of_the_scores_alone(device: torch.device, generator: torch.Generator) -> None:
    """A step against the gradient of the scores lowers what is summed, if the scores do enter the logits."""
    leaves = operands(1, 1, 1, 30, 8, 2, 8, torch.float64, torch.device("cpu"), torch.Generator().manual_seed(0))
    mask = torch.ones(1, 30, 30, dtype=torch.bool)
    out = sparse_attention(*leaves[:3], Selection.from_mask(mask), indexer=tuple(leaves[3:]), causal=True)
    grads = torch.autograd.grad(out.sum(), leaves[3:])
    wanted = torch.autograd.grad(dense(*leaves, mask)[0].sum(), leaves[3:])
    for a, b in zip(grads, wanted):
        torch.testing.assert_close(a, b)


@pytest.mark.native
def test_errors() -> None:
    leaves = operands(1, 2, 1, 5, 4, 2, 4, torch.float32, torch.device("cpu"), torch.Generator())
    q, k, v, *indexer = leaves
    selection = Selection.from_mask(torch.ones(1, 5, 5, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"indexer must be \(q_idx, k_idx, w, bias\), got list"):
        sparse_attention(q, k, v, selection, indexer=indexer, causal=True)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"w must have shape \[B, Tq, Hi\] = \[1, 5, 2\] like q_idx"):
        sparse_attention(q, k, v, selection, indexer=(*indexer[:2], indexer[2][:, :4], indexer[3]), causal=True)
    with pytest.raises(TypeError, match="q and q_idx must have one dtype, got float32 and float16"):
        sparse_attention(q, k, v, selection, indexer=(indexer[0].half(), *indexer[1:]), causal=True)
    with pytest.raises(ValueError, match="indexer_activation must be one of 'sigmoid', 'relu', got 'tanh'"):
        sparse_attention(q, k, v, selection, indexer_activation="tanh")  # type: ignore[call-overload]
    many = Selection.from_mask(torch.ones(1, 2, 5, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="selection must have one scope and as many keys as queries, 5, got 2 and 5"):
        sparse_attention(q, k, v, many, indexer=tuple(indexer), causal=True)
