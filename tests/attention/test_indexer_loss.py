"""An indexer's distance from attention and its gradients, against dense float64."""

import math

import pytest
import torch
from torch import Tensor

from gossamer.attention import Selection, indexer_loss
from gossamer.testing import assert_close
from tests.attention.indexer import dense as indexed
from tests.attention.test_sparse_attention import dense, random_mask, visible


def reference(
    q: Tensor, k: Tensor, q_idx: Tensor, k_idx: Tensor, w: Tensor, bias: Tensor, mask: Tensor,
    lengths: Tensor | None = None, scale: float | None = None, scale_idx: float | None = None,
    activation: str = "sigmoid",
) -> Tensor:  # fmt: skip
    """By dense PyTorch; mask bool [B, T, T], causality included."""
    h, t, d = q.shape[1:]
    keep = visible(mask[:, None], t, t, True, lengths)
    _, lse = dense(q, k, k, mask[:, None], scale, True, lengths)
    s = q @ k.repeat_interleave(h // k.shape[1], 1).transpose(2, 3) * (scale or d**-0.5)
    wanted = torch.where(keep, (s - lse[..., None]).exp(), 0).mean(1)
    scores = indexed(q_idx, k_idx, w, bias, scale_idx or q_idx.shape[3] ** -0.5, activation)
    keep, some = keep[:, 0], keep[:, 0].any(-1)
    if lengths is not None:
        some = some & (torch.arange(t, device=q.device) < lengths[:, None])
    logs = torch.where(keep, scores, -math.inf).masked_fill(~keep.any(-1, keepdim=True), 0).log_softmax(-1)
    parts = torch.where(wanted > 0, wanted * (wanted.clamp(min=1e-300).log() - torch.where(keep, logs, 0)), 0)
    return (parts.sum(-1) * some).sum() / some.sum()


def operands(
    b: int, h: int, g: int, t: int, d: int, n: int, di: int, dtype: torch.dtype, device: torch.device, generator
) -> list[Tensor]:
    shapes = ((b, h, t, d), (b, g, t, d), (b, n, t, di), (b, t, di), (b, t, n), (n,))
    return [torch.randn(s, device=device, generator=generator).to(dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("of", ["all", "selected"])
@pytest.mark.parametrize(
    "b, h, g, t, d, n, di",
    [(1, 2, 2, 64, 16, 4, 16), (2, 4, 2, 70, 24, 3, 8), (1, 1, 1, 90, 32, 1, 64), (1, 2, 1, 40, 16, 9, 16)],
)
def test_against_dense(
    b: int, h: int, g: int, t: int, d: int, n: int, di: int, of: str, dtype: torch.dtype, device: torch.device,
    generator: torch.Generator,
) -> None:  # fmt: skip
    leaves = operands(b, h, g, t, d, n, di, dtype, device, generator)
    mask = random_mask((b, t, t), 0.3 if of == "selected" else 2, generator)
    selection = Selection.from_mask(mask) if of == "selected" else None
    lengths = torch.randint(t // 2, t + 1, (b,), device=device, generator=generator)
    more = {"lengths": lengths, "scale": 0.2, "scale_idx": 0.7}
    for options in ({}, more, {**more, "activation": "relu"}):
        exact, usual = ([x.detach().to(to).requires_grad_() for x in leaves] for to in (torch.float64, torch.float32))
        wanted, plain = (reference(*x, mask, **options) for x in (exact, usual))
        loss = indexer_loss(*leaves, selection=selection, **{"causal": True, **options})
        # One number, which plain PyTorch gets exactly by luck; its terms are logarithms, rounded in float32.
        torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-6)
        ours = torch.autograd.grad(loss, leaves[2:])
        # Plain PyTorch computes in float32 from the same numbers; 16-bit products round the slopes of the sigmoids,
        # and sums of thousands of terms of either sign lose some bits.
        others = (torch.autograd.grad(result, given[2:]) for result, given in ((wanted, exact), (plain, usual)))
        for name, a, c, other in zip(("q_idx", "k_idx", "w", "bias"), ours, *others):
            part = max(torch.finfo(dtype).eps, 2 * math.log2(t * t) * 2**-24)
            rounded = c + (other.double() - c).abs() + c.abs().max() * part + 1e-9
            assert_close(a, reference64=c, plain=rounded, name=f"gradient of {name}")


@pytest.mark.parametrize("heads, d", [(2, 0), (0, 8)])
def test_an_indexer_that_scores_all_keys_alike(
    heads: int, d: int, device: torch.device, generator: torch.Generator
) -> None:
    """Without columns or heads: the distance is that from the uniform distribution, and no gradient changes it."""
    leaves = operands(1, 2, 1, 33, 16, heads, d, torch.float32, device, generator)
    mask = torch.ones(1, 33, 33, dtype=torch.bool, device=device)
    loss = indexer_loss(*leaves, scale_idx=1.0, causal=True)
    torch.testing.assert_close(loss.double(), reference(*[x.double() for x in leaves], mask, scale_idx=1.0))
    for gradient in torch.autograd.grad(loss, leaves[2:]):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-6)


def test_dtypes_that_differ(device: torch.device, generator: torch.Generator) -> None:
    leaves = operands(1, 2, 1, 5, 16, 2, 8, torch.float32, device, generator)
    for at, name in ((2, "q_idx"), (3, "k_idx")):
        other = [*leaves[:at], leaves[at].half(), *leaves[at + 1 :]]
        with pytest.raises(TypeError, match=f"indexer_loss: q and {name} must have one dtype, got float32 and float16"):
            indexer_loss(*other)


def test_scores_beyond_the_range_of_exponentials(device: torch.device, generator: torch.Generator) -> None:
    """A ReLU has no bounds: exp(score) overflows from 89 on."""
    leaves = operands(1, 2, 1, 70, 16, 4, 16, torch.float32, device, generator)
    leaves[3].data *= 100
    loss = indexer_loss(*leaves, causal=True, activation="relu")
    exact = [x.detach().double().requires_grad_() for x in leaves]
    everything = torch.ones(1, 70, 70, dtype=torch.bool, device=device)
    wanted = reference(*exact, everything, activation="relu")
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-5)
    for a, c in zip(torch.autograd.grad(loss, leaves[2:]), torch.autograd.grad(wanted, exact[2:])):
        assert bool(a.isfinite().all()) and bool((a - c).abs().max() <= 1e-3 * c.abs().max())
