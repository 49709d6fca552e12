"""Matryoshka, standard and gated autoencoders, against dense PyTorch by their published recipes."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer import nn
from tests.nn import dense
from tests.syncs import without_a_sync

MATRYOSHKA: list[dict[str, Any]] = [
    {},
    {"widths": (dense.D_SAE,)},
    {"widths": [1, 7, 50, 96], "inner_weights": [0.5, 0.0, 2.0]},
]
KINDS = ("matryoshka", "matryoshka batch", "standard", "gated")
CASES = [*((kind, options) for kind in KINDS[:2] for options in MATRYOSHKA), ("standard", {}), ("gated", {})]


def make(kind: str, device: torch.device, **options: Any) -> Any:
    """With rows of about 6 latents, where ReLU would keep half of all."""
    model = dense.make(kind, device, **options)
    if kind in ("standard", "gated"):
        with torch.no_grad():
            model.W_enc.mul_(4)
            (model.b_enc if kind == "standard" else model.b_gate).sub_(0.8)
    return model


@pytest.mark.parametrize("path", ["sparse", "dense"])
@pytest.mark.parametrize("kind, options", CASES, ids=str)
def test_loss_and_gradients(
    kind: str, options: dict[str, Any], path: str, device: torch.device, generator: torch.Generator
) -> None:
    x = dense.sample(40, generator)
    model = make(kind, device, **options)
    model.density.pinned = path
    got, grads = dense.compare(model, x)
    assert all(grad.any() for grad in grads.values()) and got.l0 > 3 and model.last_path == path
    assert (got.l0_penalty > 0) == (not kind.startswith("matryoshka"))
    assert (got.further_mse > 0) == (kind == "gated" or len(getattr(model, "widths", ())) > 1)
    assert int(model.firing_counts.sum()) == round(got.l0.item() * 40)


@pytest.mark.parametrize("kind", ["standard", "gated"])
def test_rows_that_overflow(kind: str, device: torch.device, generator: torch.Generator) -> None:
    x = dense.sample(40, generator)
    model = make(kind, device)
    model.capacity, model.density.pinned = 3, "sparse"
    assert bool(model.encode(x).overflowed)
    model = make(kind, device)
    model.capacity, model.density.pinned = 3, "sparse"
    dense.compare(model, x)


@pytest.mark.parametrize("kind", KINDS)
def test_leading_dimensions_evaluation_and_no_rows(kind: str, device: torch.device, generator: torch.Generator) -> None:
    x = dense.sample(40, generator)
    model = make(kind, device)
    many = copy.deepcopy(model)
    for ours, theirs in zip(many.loss(x.view(2, 5, 4, -1)), model.loss(x), strict=True):
        torch.testing.assert_close(ours.reshape(theirs.shape), theirs)
    assert many.loss(x[:0]).loss.item() == 0
    model.eval()
    got = model.loss(x)
    torch.testing.assert_close(got.reconstruction, model(x))
    torch.testing.assert_close(model.decode(model.encode(x)), model(x))
    assert got.further_mse.item() == 0 and got.mse > 0
    assert model(x[0]).shape == x[0].shape


@pytest.mark.parametrize("kind", ["topk", "batchtopk", "jumprelu", *KINDS])
def test_a_single_row_without_leading_dimensions(kind: str, device: torch.device, generator: torch.Generator) -> None:
    x = dense.sample(40, generator).to(device)[:1]
    model = make(kind, device)
    found = []
    for given in (x, x[0]):
        one = copy.deepcopy(model)
        got = one.loss(given)
        found.append((got._replace(reconstruction=got.reconstruction.view(1, -1)), dense.gradients(got, one)))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_and_bfloat16(kind: str, device: torch.device, generator: torch.Generator) -> None:
    x = dense.sample(40, generator)
    model = make(kind, device)
    wide = copy.deepcopy(model).loss(x)
    narrow = make(kind, device, dtype=torch.bfloat16)
    for found in ("autocast", "bfloat16"):
        if found == "autocast":
            with torch.autocast(device.type, torch.bfloat16):
                got = model.loss(x)
        else:
            got = narrow.loss(x.bfloat16())
        assert got.reconstruction.dtype is torch.bfloat16 and got.loss.dtype is torch.float32
        for name in ("loss", "l0_penalty", "further_mse"):
            torch.testing.assert_close(getattr(got, name), getattr(wide, name), rtol=0.1, atol=0)
        trained = model if found == "autocast" else narrow
        for name, grad in dense.gradients(got, trained).items():
            assert grad.dtype is trained.get_parameter(name).dtype and bool(grad.isfinite().all())


@pytest.mark.parametrize("kind", KINDS)
def test_compile(kind: str, device: torch.device, generator: torch.Generator, compiled: Any) -> None:
    dense.compare_compiled(make(kind, device), dense.sample(40, generator), compiled)


@pytest.mark.gpu
def test_loss_without_a_sync(device: torch.device, generator: torch.Generator) -> None:
    x = dense.sample(64, generator)
    for kind in KINDS:
        model = make(kind, device)
        model.loss(x).loss.backward()
        with without_a_sync():
            model.loss(x).loss.backward()


@pytest.mark.native
@pytest.mark.parametrize("names", [("mse",), ("further_mse",), ("reconstruction",), ("reconstruction", "further_mse")])
def test_each_term_of_nested_widths(names: tuple[str, ...]) -> None:
    """Against autograd's sum over `reconstructions` in float64, which the CPU has, also for the gradient of x."""
    weights, generator = [0.5, 0.0, 2.0], torch.Generator().manual_seed(0)
    model = make("matryoshka", torch.device("cpu"), widths=[1, 7, 50, 96], inner_weights=weights, dtype=torch.float64)
    x = dense.sample(40, generator).double().requires_grad_()
    direction = torch.randn(x.shape, dtype=torch.float64, generator=generator)
    got = copy.deepcopy(model).loss(x)._asdict()
    *inner, whole = model.reconstructions(model.encode(x))
    errors = [(x - each).square().sum(1).mean() for each in inner]
    want = {"mse": (x - whole).square().sum(1).mean(), "reconstruction": whole}
    want["further_mse"] = torch.stack([error * weight for error, weight in zip(errors, weights)]).sum()
    for found in (got, want):
        found["reconstruction"] = (found["reconstruction"] * direction).sum()
    gradients = []
    for found in (got, want):
        gradients.append(torch.autograd.grad(torch.stack([found[name] for name in names]).sum(), x))
    torch.testing.assert_close([got[name] for name in names], [want[name] for name in names])
    torch.testing.assert_close(*gradients)


def test_large_numbers_of_x_do_not_round_what_nested_widths_reconstruct(
    device: torch.device, generator: torch.Generator
) -> None:
    x = dense.sample(40, generator).to(device)
    x[:, 0] += 6000
    model = make("matryoshka", device)
    with torch.no_grad():
        model.W_enc[0] = 0
    got, want = model.loss(x).reconstruction, model.reconstructions(model.encode(x))[-1]
    torch.testing.assert_close(got, want, rtol=0, atol=5e-5)


class Nothing(torch.autograd.Function):
    """Its backward pass hands no gradient on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


def test_nested_widths_without_any_gradient(device: torch.device, generator: torch.Generator) -> None:
    model = make("matryoshka", device)
    Nothing.apply(model.loss(dense.sample(5, generator).to(device)).loss).backward()
    assert not any(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", KINDS[:2])
def test_reconstructions(kind: str, training: bool, device: torch.device, generator: torch.Generator) -> None:
    """Of a container and of dense latents: each width is its own latents' decode."""
    x = dense.sample(40, generator).view(5, 8, -1)
    model = make(kind, device)
    model.loss(x)
    rows = model.train(training).encode(x)
    acts = rows.to_dense()
    for given in (rows, acts):
        found = model.reconstructions(given)
        for width, got in zip(model.widths, found, strict=True):
            torch.testing.assert_close(got, acts[..., :width] @ model.W_dec[:width] + model.b_dec)


def test_default_widths() -> None:
    assert nn.MatryoshkaSAE(4, 192, k=2).widths == (48, 192)
    assert nn.MatryoshkaSAE(4, 2, k=2).widths == (1, 2) and nn.MatryoshkaSAE(4, 1, k=1).widths == (1,)


def frequent(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(x `[rows, 24]`, its 48 atoms): the first quarter of them is in half of the rows' places."""
    atoms = torch.nn.functional.normalize(torch.randn(48, 24, generator=torch.Generator().manual_seed(5)), dim=1)
    weight = torch.where(torch.arange(48) < 12, 8.0, 1.0)
    chosen = torch.multinomial(weight.expand(rows, -1), 3, generator=generator)
    size = 0.5 + torch.rand(rows, 3, generator=generator)
    return torch.zeros(rows, 48).scatter(1, chosen, size) @ atoms, atoms


def test_the_first_quarter_finds_what_is_frequent(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.MatryoshkaSAE(24, 96, 3).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(400):
        optimizer.zero_grad()
        model.loss(frequent(256, generator)[0].to(device)).loss.backward()
        optimizer.step()
    atoms = frequent(1, generator)[1].to(device)
    learnt = torch.nn.functional.normalize(model.W_dec.detach(), dim=1)
    cosine = atoms @ learnt.t()
    assert (cosine[:12, :24].amax(1) > 0.9).float().mean() >= 0.9
    assert (cosine.amax(1) > 0.9).float().mean() >= 0.85


def test_gates_are_thresholds(device: torch.device, generator: torch.Generator) -> None:
    """`encode` is the gate times the magnitude."""
    x = dense.sample(40, generator)
    model = make("gated", device)
    z = (x - model.b_dec) @ model.W_enc
    wanted = (z + model.b_gate > 0) * (z * model.r_mag.exp() + model.b_mag).relu()
    torch.testing.assert_close(model.encode(x).to_dense(), wanted, rtol=1e-4, atol=1e-5)
    assert {name for name, _ in model.named_parameters()} == {"W_enc", "W_dec", "b_dec", "b_gate", "b_mag", "r_mag"}


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: nn.MatryoshkaSAE(4, 8, 2, widths=(4,)), ValueError, r"MatryoshkaSAE: widths must .* = 8, got \(4,\)"),
        (lambda: nn.MatryoshkaSAE(4, 8, 2, widths=(4, 4, 8)), ValueError, r"widths must ascend and end with d_sae = 8"),
        (lambda: nn.MatryoshkaSAE(4, 8, 2, widths=()), ValueError, r"widths must ascend and end with .* got \(\)"),
        (lambda: nn.MatryoshkaSAE(4, 8, 2, widths=(0, 8)), ValueError, "widths must be at least 1, got 0"),
        (lambda: nn.MatryoshkaSAE(4, 8, 2, widths=8), TypeError, r"MatryoshkaSAE: widths must be a list .*, got int"),
        (lambda: nn.MatryoshkaSAE(4, 8, 2, inner_weights=1), TypeError, "inner_weights must be a list .*, got int"),
        (lambda: nn.MatryoshkaSAE(4, 8, 2, widths=(0.5, 8)), TypeError, "widths must be an int, got float"),
        (lambda: nn.MatryoshkaSAE(4, 8, 2, widths=(4, 8), inner_weights=(1, 1)), ValueError, "2 widths .* got 2"),
        (lambda: nn.MatryoshkaSAE(4, 8, 2, widths=(4, 8), inner_weights=(-1,)), ValueError, "at least 0 .* got -1"),
        (lambda: nn.MatryoshkaSAE(4, 8, 9), ValueError, r"nn\.MatryoshkaSAE: k must be at most d_sae = 8, got 9"),
        (lambda: nn.StandardSAE(4, 8, l1_coefficient=-1), ValueError, r"nn\.StandardSAE: l1_coefficient must be at"),
        (lambda: nn.GatedSAE(4, 8, l1_coefficient="a"), TypeError, r"nn\.GatedSAE: l1_coefficient must be a number"),
        (lambda: nn.GatedSAE(4, 8, dead_after=0), ValueError, r"nn\.GatedSAE: dead_after must be at least 1, got 0"),
    ],
)  # fmt: skip
def test_errors(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
