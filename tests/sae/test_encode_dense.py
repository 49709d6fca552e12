"""Dense latents and their gradients, beside dense float64 and beside what the sparse path stores."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer import gemm, sae
from gossamer.sae.decode import decode_dense
from gossamer.sae.encode_dense import encode_dense
from gossamer.testing import assert_close
from tests.sae.dense import encode_with_l0, valued

FULL = pytest.mark.full
SHAPES = [(7, 12, 90), pytest.param((1, 5, 1030), marks=FULL), pytest.param((70, 8, 33), marks=FULL)]
CASES: list[dict[str, Any]] = [
    {"activation": "relu"},
    {"activation": "jumprelu"},
    {"activation": "jumprelu", "bandwidth": 0.6},
    {"activation": "jumprelu", "bandwidth": 0.6, "ste_to_input": True},
    {"activation": "topk", "k": 5},
    {"activation": "batchtopk", "k": 5},
    {"activation": "topk", "k": 5, "scale": True},
]


def operands(
    m: int, d: int, n: int, device: torch.device, generator: torch.Generator, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    wide = torch.promote_types(dtype, torch.float32)
    made = [
        torch.randn(m, d, device=device, generator=generator).to(dtype),
        (torch.randn(d, n, device=device, generator=generator) * d**-0.5).to(dtype),
        torch.randn(n, device=device, generator=generator).to(wide) * 0.1,
        torch.randn(d, device=device, generator=generator).to(wide) * 0.1,
        torch.rand(n, device=device, generator=generator).to(wide) - 0.2,
    ]
    return tuple(t.requires_grad_() for t in made)


def options_of(options: dict[str, Any], threshold: Tensor, n: int) -> dict[str, Any]:
    options = dict(options)
    if options["activation"] == "jumprelu":
        options["threshold"] = threshold
    if options.pop("scale", False):
        options["scale"] = torch.linspace(0.5, 2, n, device=threshold.device)
    return options


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_same_as_the_sparse_path(
    options: dict[str, Any], shape: tuple[int, int, int], device: torch.device, generator: torch.Generator
) -> None:
    """Latents, L0, counts and every gradient: of what is stored, with a capacity for all."""
    m, d, n = shape
    if "k" in options and m == 70:
        options = {**options, "k": 20}
    results = []
    for dense in (True, False):
        generator.manual_seed(1)
        x, W, b, b_dec, threshold = operands(m, d, n, device, generator)
        weight = torch.randn(n, 4, device=device, generator=generator)
        given = options_of(options, threshold, n)
        if dense:
            acts, l0, fired, nnz = encode_dense(x, W, b, **valued(b_dec=b_dec, **given))
            out = decode_dense(acts, weight, None)
        else:
            rows, l0 = (
                encode_with_l0(x, W, b, **valued(b_dec=b_dec, capacity=n, **given))
                if "k" not in given
                else (encode_with_l0(x, W, b, **valued(b_dec=b_dec, **given)))
            )
            acts, fired, nnz = rows.to_dense(), sae.count_fired(rows), rows.counts.int()
            out = sae.decode(rows, weight)
        total = out.square().sum() + (l0 * torch.arange(1.0, m + 1, device=device)).sum() * 0.1
        grads = torch.autograd.grad(total, (x, W, b, b_dec, threshold), allow_unused=True)
        results.append((acts.detach(), l0.detach(), fired, nnz, *grads))
    for got, want in zip(*results):
        if want is None:
            assert got is None or not got.any()
        else:
            torch.testing.assert_close(got, want.to(got.dtype), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("options", CASES[:4], ids=str)
def test_against_float64(
    options: dict[str, Any], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    m, d, n = 40, 24, 120
    x, W, b, b_dec, threshold = operands(m, d, n, device, generator, dtype)
    given = options_of(options, threshold, n)
    acts, *_ = encode_dense(x, W, b, **valued(b_dec=b_dec, **given))
    inner = (x - b_dec).to(dtype)
    pre = ((inner @ W) + b).to(dtype)
    kept = acts != 0
    # Which side of the threshold a latent is on is rounding's choice; what it is worth there is not.
    exact = (x.double() - b_dec.double()) @ W.double() + b.double()
    assert_close(acts, reference64=torch.where(kept, exact, 0), plain=torch.where(kept, pre, 0))
    limit = 0 if options["activation"] == "relu" else threshold.clamp(min=0)
    assert bool((kept == ~(pre <= limit))[(exact - limit).abs() > 0.05].all())


@pytest.mark.native
@pytest.mark.parametrize("options", CASES[:2], ids=str)
def test_gradcheck(options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, W, b, b_dec, threshold = operands(3, 4, 6, torch.device("cpu"), generator, torch.float64)
    given = options_of(options, threshold.detach(), 6)

    def call(x: Tensor, W: Tensor, b: Tensor, b_dec: Tensor) -> Tensor:
        return encode_dense(x, W, b, **valued(b_dec=b_dec, **given))[0]

    assert torch.autograd.gradcheck(call, (x, W, b, b_dec))


def test_nan_is_kept_and_the_window_is_marked(device: torch.device) -> None:
    x = torch.tensor([[float("nan")], [1.0]], device=device)
    W = torch.tensor([[1.0, 0.4, -1.0]], device=device, requires_grad=True)
    threshold = torch.full((3,), 0.5, device=device, requires_grad=True)
    acts, l0, fired, nnz = encode_dense(x, W, activation=gemm.JumpReLU(threshold, 0.5))
    assert acts[0].isnan().all() and acts[1].tolist() == [1.0, 0.0, 0.0]
    assert acts[1].signbit().tolist() == [False, True, False]
    assert l0.tolist() == [3.0, 1.0] and fired.tolist() == [2, 1, 1] and nnz.tolist() == [3, 2]


def test_strides_and_leading_dimensions(device: torch.device, generator: torch.Generator) -> None:
    x = torch.randn(6, 3, 4, device=device, generator=generator).transpose(0, 1)
    W = torch.randn(20, 6, device=device, generator=generator).t()[:, ::2]
    b = torch.randn(20, device=device, generator=generator)[::2]
    acts, l0, *_ = encode_dense(x.transpose(1, 2), W, b, activation="relu")
    torch.testing.assert_close(acts, (x.transpose(1, 2) @ W + b).relu())
    assert l0.shape == (3, 4)


def test_a_layout_by_latent_gets_its_gradient_in_it(device: torch.device, generator: torch.Generator) -> None:
    W = torch.randn(9, 4, device=device, generator=generator).t().requires_grad_()
    acts, *_ = encode_dense(torch.randn(5, 4, device=device, generator=generator), W, activation="relu")
    acts.sum().backward()
    assert W.grad.stride() == W.stride()


@pytest.mark.parametrize("path", ["slots", "overflow", "exact", "batch", "dense"])
def test_gradient_of_a_float32_b_dec(path: str, device: torch.device, generator: torch.Generator) -> None:
    """A gradient passes through a 16-bit W_enc to a float32 b_dec in float32, where x takes none."""
    x, W, b_dec = (torch.randn(s, device=device, generator=generator) for s in ((40, 24), (24, 90), (24,)))
    x, W, b_dec = x.half(), W.half(), b_dec.requires_grad_()
    if path == "dense":
        acts = encode_dense(x, W, None, b_dec=b_dec)[0]
    elif path == "batch":
        acts = sae.encode(x, W, None, gemm.BatchTopK(20), b_dec=b_dec).to_dense()
    else:
        capacity = {"slots": 90, "overflow": 30, "exact": "exact"}[path]
        acts = sae.encode(x, W, None, b_dec=b_dec, capacity=capacity).to_dense()
    weights = torch.randn(acts.shape, device=device, generator=generator).half()
    (grad,) = torch.autograd.grad(acts, b_dec, weights)
    wanted = -(W.double() @ torch.where(acts > 0, weights, 0).double().sum(0))
    torch.testing.assert_close(grad.double(), wanted, rtol=1e-5, atol=1e-4)
