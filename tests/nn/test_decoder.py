"""Where training begins and what holds the decoder: the geometric median, norms, projected gradients, frozen parts."""

import copy
import importlib
from typing import Any

import pytest
import torch

from gossamer.nn.median import geometric_median
from tests.nn import dense

KINDS = ("topk", "batchtopk", "jumprelu", "transcoder")


@pytest.mark.parametrize("case", ["outliers", "few", "a row is the median", "the mean is a row", "far away"])
def test_geometric_median(case: str, device: torch.device, generator: torch.Generator) -> None:
    """Its sum of distances is the smallest that a minimiser finds, in float64, from there and from the mean."""
    x = torch.randn(200, 5, device=device, generator=generator)
    if case == "outliers":
        x[:40] = 100 + 30 * x[:40]
    elif case == "few":
        x = x[:3]
    elif case == "a row is the median":
        x[50:] = x[50]
    elif case == "the mean is a row":
        x = torch.tensor([0.0, 0, 0, 2, 8], device=device)[:, None] * x[0]
    else:
        x = 0.01 * x + 1000
    got = geometric_median(x)
    rows = x.double().cpu()

    def spread(point: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vector_norm(rows - point, dim=1).sum()

    found = []
    for start in (got.double().cpu(), rows.mean(0)):
        point = start.clone().requires_grad_()
        minimiser = torch.optim.LBFGS([point], max_iter=200, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

        def closure(point: torch.Tensor = point, minimiser: Any = minimiser) -> torch.Tensor:
            minimiser.zero_grad()
            total = spread(point)
            total.backward()
            return total

        minimiser.step(closure)
        found.append(spread(point.detach()))
    assert spread(got.double().cpu()) <= min(found) * (1 + 1e-5) + 1e-5
    assert spread(got.double().cpu()) <= spread(rows.mean(0)) and got.dtype is torch.float32


def test_initialize(device: torch.device, generator: torch.Generator) -> None:
    for kind in KINDS:
        model = dense.make(kind, device, dtype=torch.bfloat16)
        x = torch.randn(4, 10, len(model.b_dec), device=device, generator=generator).bfloat16()
        model.initialize_(x)
        assert torch.equal(model.b_dec, geometric_median(x.flatten(0, 1))) and model.b_dec.requires_grad
        model.initialize_(x[0, 0])
        assert torch.equal(model.b_dec, x[0, 0].float())
        with pytest.raises(ValueError, match=rf"nn.{type(model).__name__}: x must be a sample .* got \[4, 10, 1\]"):
            model.initialize_(x[..., :1])
        with pytest.raises(ValueError, match=r"geometric_median: x must have shape \[M, D\] with M of at least 1"):
            model.initialize_(x[:0])
    with pytest.raises(ValueError, match=r"geometric_median: x must have shape \[M, D\] .* got \[3\]"):
        geometric_median(torch.ones(3))


def test_normalize(dtype: torch.dtype, device: torch.device) -> None:
    for kind in KINDS:
        model = dense.make(kind, device, dtype=dtype)
        with torch.no_grad():
            model.W_dec[3] = 0
            model.W_dec[4] = 1e-3 * model.W_dec[4]
        before = model.W_dec.detach().double()
        model.normalize_decoder_()
        wanted = before / before.norm(dim=1, keepdim=True)
        wanted[3] = 0
        torch.testing.assert_close(model.W_dec.detach().double(), wanted, rtol=0, atol=2 * torch.finfo(dtype).eps)


def test_projection(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    """What is left of the gradient is orthogonal to the rows, and is the gradient where it was so before."""
    for kind in KINDS:
        model = dense.make(kind, device, dtype=dtype)
        model.project_decoder_gradient_()
        assert model.W_dec.grad is None
        with torch.no_grad():
            model.W_dec[3] = 0
        rows = model.W_dec.detach().double()
        grad = torch.randn(rows.shape, device=device, generator=generator).to(dtype)
        model.W_dec.grad = grad.clone()
        model.project_decoder_gradient_()
        unit = torch.nn.functional.normalize(rows)
        wanted = grad.double() - (grad.double() * unit).sum(1, keepdim=True) * unit
        got = model.W_dec.grad.double()
        torch.testing.assert_close(got, wanted, rtol=0, atol=8 * torch.finfo(dtype).eps)
        assert (got * unit).sum(1).abs().max() < 16 * torch.finfo(dtype).eps
        assert torch.equal(model.W_dec.grad[3], grad[3])


def test_norms_stay_1_in_training(device: torch.device, generator: torch.Generator) -> None:
    for kind in KINDS:
        model = dense.make(kind, device)
        model.normalize_decoder_()
        begun = model.W_dec.detach().clone()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(20):
            x = dense.sample(40, generator)
            optimizer.zero_grad()
            model.loss(*dense.given(model, x)).loss.backward()
            model.project_decoder_gradient_()
            optimizer.step()
            model.normalize_decoder_()
        norms = model.W_dec.detach().norm(dim=1)
        torch.testing.assert_close(norms, torch.ones_like(norms))
        assert (model.W_dec - begun).abs().max() > 0.05


@pytest.mark.parametrize("frozen", [("W_dec",), ("W_enc",), ("W_enc", "b_enc", "log_threshold"), ("b_dec", "W_skip")])
@pytest.mark.parametrize("kind", KINDS)
def test_frozen_parts_cost_nothing(
    kind: str,
    frozen: tuple[str, ...],
    device: torch.device,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No gradient, and no product for one; the others have what they had."""
    counted: list[str] = []
    for name in ("rowsparse.matmul", "sae.encode"):
        module = importlib.import_module(f"gossamer.{name}")

        def spy(*args: Any, original: Any = module.gradients, name: str = name) -> Any:
            counted.append(name)
            return original(*args)

        monkeypatch.setattr(module, "gradients", spy)
    x = dense.sample(40, generator)
    options: dict[str, Any] = {"transcoder": {"skip": True}, "jumprelu": {"penalty": "tanh", "ste_to_input": True}}
    model = dense.make(kind, device, **options.get(kind, {}))
    model.density.pinned = "sparse"
    dense.kill(model, x, 5)
    whole = copy.deepcopy(model)
    whole.loss(*dense.given(model, x)).loss.backward()
    # The auxiliary loss has its own product with W_enc.
    aux = 0 if kind == "jumprelu" else 1
    assert counted.count("rowsparse.matmul") == 1 and counted.count("sae.encode") == 1 + aux
    counted.clear()
    for name in frozen:
        if getattr(model, name, None) is not None:
            getattr(model, name).requires_grad_(False)
    copy.deepcopy(model).loss(*dense.given(model, x)).loss.backward()
    counted.clear()
    model.loss(*dense.given(model, x)).loss.backward()
    assert counted.count("rowsparse.matmul") == (0 if "W_dec" in frozen else 1)
    assert counted.count("sae.encode") == (0 if "W_enc" in frozen else 1 + aux)
    for name, parameter in model.named_parameters():
        if name in frozen:
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad, msg=lambda m, n=name: f"{n} {m}")
