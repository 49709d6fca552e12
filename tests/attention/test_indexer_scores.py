"""`indexer_scores` against dense float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.attention import indexer_scores
from gossamer.testing import assert_close
from tests.attention.indexer import dense, inputs, visible

# B, Hi, Tq, Tk, Di, causal, lengths
CASES = [
    (2, 3, 70, 70, 20, True, None),
    (1, 4, 64, 130, 64, True, None),
    (2, 1, 5, 100, 16, True, [100, 3]),
    (3, 2, 33, 33, 8, True, [33, 20, 0]),
    (2, 2, 33, 20, 8, False, [20, 7]),
    (1, 1, 1, 1, 1, True, None),
]


@pytest.mark.parametrize("activation", ["sigmoid", "relu"])
@pytest.mark.parametrize("case", CASES)
def test_scores_and_gradients(case: tuple[Any, ...], activation: Any, dtype: torch.dtype, device: torch.device) -> None:
    given = inputs(case, dtype, device, grad=True)
    lengths = None if case[6] is None else torch.tensor(case[6], device=device, dtype=torch.int32)
    scale = case[4] ** -0.5
    out = indexer_scores(*given, causal=case[5], lengths=lengths, activation=activation)
    seen = visible(case).to(device)
    assert torch.equal(out == -torch.inf, ~seen) and out.dtype is dtype
    wide = [x.detach().double().requires_grad_() for x in given]
    plain = [x.detach().clone().requires_grad_() for x in given]
    wanted, usual = dense(*wide, scale, activation), dense(*plain, scale, activation)
    grad = torch.randn(seen.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype) * seen
    zero = torch.zeros((), dtype=dtype, device=device)
    assert_close(
        torch.where(seen, out, zero), reference64=wanted.where(seen, 0), plain=usual.where(seen, zero), name="scores"
    )
    got = torch.autograd.grad(torch.where(seen, out, zero), given, grad)
    expected = torch.autograd.grad(wanted, wide, grad.double())
    peer = torch.autograd.grad(usual, plain, grad)
    for name, a, r, p in zip(("q", "k", "w", "bias"), got, expected, peer):
        # One gradient can be exact by luck where it is a sum of few terms.
        slack = float(r.abs().max()) * torch.finfo(dtype).eps
        assert_close(a, reference64=r, plain=p + slack * (p - r >= 0) - slack * (p - r < 0), name=name)


@pytest.mark.parametrize("heads, d", [(2, 0), (0, 8)])
def test_without_columns_or_heads(heads: int, d: int, device: torch.device) -> None:
    """Scores are the activations of the biases, or 0."""
    case = (2, heads, 3, 5, d, True, None)
    given = inputs(case, torch.float32, device, grad=True)
    out, seen = indexer_scores(*given, causal=True), visible(case).to(device)
    wide = [x.detach().double().requires_grad_() for x in given]
    wanted = dense(*wide, 1.0)
    assert torch.equal(out == -torch.inf, ~seen)
    torch.testing.assert_close(out[seen].double(), wanted[seen], rtol=1e-6, atol=1e-6)
    grads = torch.autograd.grad(out[seen].sum(), given)
    for a, b in zip(grads, torch.autograd.grad(wanted[seen].sum(), wide), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)


@pytest.mark.native
@pytest.mark.parametrize("activation", ["sigmoid", "relu"])
def test_gradcheck(activation: Any) -> None:
    case = (2, 2, 3, 5, 4, True, [5, 2])
    given = inputs(case, torch.float64, torch.device("cpu"), grad=True)
    lengths = torch.tensor(case[6])
    seen = visible(case)

    def scores(*tensors: Tensor) -> Tensor:
        return indexer_scores(*tensors, lengths=lengths, causal=True, activation=activation)[seen]

    assert torch.autograd.gradcheck(scores, given)


def test_without_bias_any_strides_and_out_dtype(device: torch.device) -> None:
    q, k, w, _ = inputs((2, 3, 20, 30, 16), torch.float32, device)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    w = w.expand(2, 20, 3)
    out = indexer_scores(q, k, w, scale=0.3, causal=False, out_dtype=torch.float16)
    wanted = dense(q.double(), k.double(), w.double(), None, 0.3)
    assert out.dtype is torch.float16
    assert_close(out, reference64=wanted, plain=dense(q, k, w, None, 0.3))


@pytest.mark.parametrize("activation", ["sigmoid", "relu"])
def test_nan_and_inf_propagate_where_they_are_seen(activation: Any, device: torch.device) -> None:
    q, k, w, bias = inputs((1, 2, 6, 6, 16), torch.float32, device)
    k[0, 3, 0] = torch.nan
    q[0, 0, 1] = torch.inf
    out = indexer_scores(q, k, w, bias, causal=True, activation=activation)
    wanted = dense(q.double(), k.double(), w.double(), bias.double(), 0.25, activation)
    seen = visible((1, 2, 6, 6, 16, True, None))[0].to(device)
    assert torch.equal(out[0].isnan(), wanted[0].isnan() & seen)


def test_without_heads(device: torch.device) -> None:
    given = inputs((1, 0, 2, 3, 4), torch.float32, device, grad=True)
    out = indexer_scores(*given, causal=False)
    assert not out.any() and not any(grad.any() for grad in torch.autograd.grad(out.sum(), given))


@pytest.mark.native
def test_autocast_and_compile(compiled: Any, device: torch.device) -> None:
    given = inputs((1, 2, 9, 9, 16), torch.float32, device)
    with torch.autocast(device.type, torch.bfloat16):
        out = indexer_scores(*given, causal=True)
    assert out.dtype is torch.bfloat16
    assert torch.equal(compiled(indexer_scores)(*given, causal=True), indexer_scores(*given, causal=True))


@pytest.mark.native
def test_bad_input(device: torch.device) -> None:
    q, k, w, bias = inputs((1, 2, 3, 4, 8), torch.float32, device)
    with pytest.raises(ValueError, match=r"indexer_scores: q_idx must have shape \[B, Hi, Tq, Di\], got \[2, 3, 8\]"):
        indexer_scores(q[0], k, w, bias, causal=True)
    with pytest.raises(ValueError, match=r"k_idx must have shape .* Di = 8 like q_idx, got \[1, 4, 7\]"):
        indexer_scores(q, k[..., :7], w, bias, causal=True)
    with pytest.raises(ValueError, match=r"w must have shape \[B, Tq, Hi\] = \[1, 3, 2\] like q_idx, got \[1, 3, 1\]"):
        indexer_scores(q, k, w[..., :1], bias, causal=True)
    with pytest.raises(ValueError, match=r"as many keys as queries or more, got Tq = 3 and Tk = 2. Use causal=False"):
        indexer_scores(q, k[:, :2], w, bias, causal=True)
    with pytest.raises(TypeError, match="q_idx and k_idx must have one dtype, got float32 and float16"):
        indexer_scores(q, k.half(), w, bias, causal=True)
    with pytest.raises(TypeError, match="lengths must be int32 or int64, got float32"):
        indexer_scores(q, k, w, bias, lengths=torch.ones(1, device=device), causal=True)
    with pytest.raises(ValueError, match="scale must be above 0 and finite, got 0"):
        indexer_scores(q, k, w, bias, scale=0.0, causal=True)
    with pytest.raises(ValueError, match="activation must be one of 'sigmoid', 'relu', got 'tanh'"):
        indexer_scores(q, k, w, bias, activation="tanh")  # type: ignore[arg-type]
