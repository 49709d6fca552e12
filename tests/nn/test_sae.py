"""TopKSAE and JumpReLUSAE, against the same autoencoders in dense PyTorch."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer import gemm, nn, sae
from gossamer.nn._placement import Here
from gossamer.rowsparse import Rows
from tests.nn.dense import sample

D_IN, D_SAE = 16, 96


def models(**options: Any) -> list[nn.TopKSAE | nn.JumpReLUSAE]:
    torch.manual_seed(0)
    return [
        nn.TopKSAE(D_IN, D_SAE, 6, **options),
        nn.JumpReLUSAE(D_IN, D_SAE, bandwidth=0.2, initial_threshold=0.4, l0_coefficient=0.01, **options),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_initialisation(dtype: torch.dtype, device: torch.device) -> None:
    if dtype is torch.float64 and device.type == "cuda":
        pytest.skip("float64 runs on the CPU")
    for model in models(dtype=dtype, device=device):
        wide = torch.promote_types(dtype, torch.float32)
        assert model.W_enc.shape == (D_IN, D_SAE) and model.W_dec.shape == (D_SAE, D_IN)
        assert model.W_enc.is_contiguous() and torch.equal(model.W_enc, model.W_dec.t())
        assert model.W_dec.dtype is dtype and model.b_enc.dtype is model.b_dec.dtype is wide
        torch.testing.assert_close(model.W_dec.norm(dim=1).float(), torch.ones(D_SAE, device=device), rtol=0, atol=0.01)
        assert not model.b_enc.any() and not model.b_dec.any()
        assert model.firing_counts.dtype is torch.int64 and not model.firing_counts.any()
    assert isinstance(model, nn.JumpReLUSAE) and model.threshold.dtype is wide
    torch.testing.assert_close(model.threshold, torch.full_like(model.threshold, 0.4))
    assert {name for name, _ in model.named_parameters()} == {"W_enc", "W_dec", "b_enc", "b_dec", "log_threshold"}


def test_modules_are_thin(device: torch.device, generator: torch.Generator) -> None:
    """encode, decode and forward are the functions of `gossamer.sae` on the parameters, for any leading dimensions."""
    x = sample(30, generator).view(2, 3, 5, D_IN)
    topk, jump = models(device=device)
    same = sae.encode(x, topk.W_enc, topk.b_enc, activation=gemm.TopK(6), b_dec=topk.b_dec)
    assert torch.equal(topk.encode(x).to_dense(), same.to_dense())
    with torch.no_grad():
        same = sae.encode(x, jump.W_enc, jump.b_enc, activation=gemm.JumpReLU(jump.threshold))
        assert torch.equal(jump.encode(x).packed.indices, same.packed.indices)
    assert jump.encode(x).counts.sum() > same.counts.sum()
    jump.capacity = 5
    assert len(jump.encode(x).packed.values) == 150 and bool(jump.encode(x).overflowed)
    for model in (topk, jump):
        rows = model.encode(x)
        assert rows.shape == (2, 3, 5, D_SAE)
        torch.testing.assert_close(model.decode(rows), sae.decode(rows.to_dense(), model.W_dec, model.b_dec))
        # On a GPU a model that has seen rows overflow may go the dense way.
        assert model(x).shape == x.shape
        torch.testing.assert_close(model(x), model.decode(rows))
        assert model(x[0, 0, 0]).shape == (D_IN,) and model(x[:0]).shape == (0, 3, 5, D_IN)


def test_firing_counts(device: torch.device, generator: torch.Generator) -> None:
    for model in models(device=device):
        total = torch.zeros(D_SAE, dtype=torch.int64, device=device)
        silent = torch.zeros(D_SAE, dtype=torch.int64, device=device)
        for _ in range(3):
            x = sample(20, generator)
            model.loss(x)
            fired = (model.eval().encode(x).to_dense() != 0).sum(0)
            model.train()
            total += fired
            silent = torch.where(fired > 0, 0, silent + 1)
        assert torch.equal(model.firing_counts, total) and total.any()
        assert torch.equal(model.steps_since_fired, silent) and silent.any()
        state = model.state_dict()
        assert torch.equal(state["firing_counts"], total)
        other = models(device=device)[isinstance(model, nn.JumpReLUSAE)]
        other.load_state_dict(state)
        torch.testing.assert_close(other(x), model.eval()(x))


def test_terms_of_the_loss_are_apart(device: torch.device, generator: torch.Generator) -> None:
    """What is done to one in place, as in accumulating over batches, does not show in another."""
    x = sample(30, generator)
    for model in models(device=device):
        for terms in (model.loss(x), model.eval().loss(x)):
            before = [term.detach().clone() for term in terms]
            for term in (terms.loss, terms.l0_penalty, terms.dead_loss):
                with torch.no_grad():
                    term += 1
            after = [term.detach() for term in terms]
            moved = [not torch.equal(*pair) for pair in zip(before, after, strict=True)]
            assert moved == [name in ("loss", "l0_penalty", "dead_loss") for name in terms._fields]


def test_a_loss_is_shown_in_a_line(device: torch.device, generator: torch.Generator) -> None:
    model = nn.TopKSAE(16, 32, 4, device=device)
    loss = model.loss(torch.randn(3, 16, device=device, generator=generator))
    numbers = ", ".join(f"{name}={getattr(loss, name).item():.6g}" for name in ("loss", "mse", "l0_penalty", "l0"))
    assert repr(loss) == f"SAELoss({numbers}, reconstruction=float32 [3, 16], dead_loss=0, further_mse=0)"
    shapes = nn.SAELoss(*(part.to("meta") for part in loss))
    assert str(shapes).startswith("SAELoss(loss=float32 [], mse=float32 [], ")


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: nn.TopKSAE(4, 8, 9), ValueError, "nn.TopKSAE: k must be at most d_sae = 8, got 9"),
        (lambda: nn.TopKSAE(4, 8, 0), ValueError, "nn.TopKSAE: k must be at least 1"),
        (lambda: nn.TopKSAE(4.0, 8, 1), TypeError, "nn.TopKSAE: d_in must be an int, got float"),
        (lambda: nn.JumpReLUSAE(4, 0), ValueError, "nn.JumpReLUSAE: d_sae must be at least 1, got 0"),
        (lambda: nn.JumpReLUSAE(4, 8, bandwidth=0.0), ValueError, "bandwidth must be above 0 and finite, got 0.0"),
        (lambda: nn.JumpReLUSAE(4, 8, bandwidth="a"), TypeError, "bandwidth must be a number, got str"),
        (lambda: nn.JumpReLUSAE(4, 8, l0_coefficient=-1), ValueError, "l0_coefficient must be at least 0 .* got -1"),
        (lambda: nn.JumpReLUSAE(4, 8, l0_coefficient=float("nan")), ValueError, "l0_coefficient .* got nan"),
        (lambda: nn.TopKSAE(4, 8, 2, dtype=torch.int32), TypeError, "dtype must be torch.float32, .* got int32"),
        (lambda: nn.TopKSAE(4, 8, 2, dtype="float32"), TypeError, "dtype must be torch.float32, .* got str"),
        (lambda: nn.JumpReLUSAE(4, 8, capacity=0), ValueError, "capacity must be at least 1, got 0"),
        (lambda: nn.JumpReLUSAE(4, 8, initial_threshold=-1.0), ValueError, "initial_threshold must be above 0"),
        (lambda: nn.TopKSAE(4, 8, 2)(torch.ones(3, 5)), ValueError, r"x must have shape .* d_in = 4, got"),
    ],
)  # fmt: skip
def test_errors(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("use", ["encode", "forward", "loss"])
def test_what_does_not_fit_is_told_by_the_module(use: str) -> None:
    model = nn.TopKSAE(D_IN, D_SAE, 4)
    with pytest.raises(ValueError, match=rf"nn\.TopKSAE: x must have shape \[\.\.\., d_in\] with d_in = {D_IN}, got"):
        getattr(model, use)(torch.ones(2, D_IN + 1))
    with pytest.raises(TypeError, match=r"nn\.TopKSAE: x must be float32.* got int64"):
        getattr(model, use)(torch.ones(2, D_IN).long())


def test_batchtopk(device: torch.device, generator: torch.Generator) -> None:
    """A batch shares its entries, and the gradients are those of the dense product at them."""
    torch.manual_seed(0)
    model = nn.BatchTopKSAE(D_IN, D_SAE, 4, threshold_rate=0.25, device=device)
    x = sample(50, generator)
    got = model.loss(x)
    z = ((x - model.b_dec) @ model.W_enc + model.b_enc).relu()
    cut = z.flatten().topk(200).values[-1]
    acts = torch.where(z >= cut, z, 0)
    plain = (acts @ model.W_dec + model.b_dec - x).square().sum(-1).mean()
    torch.testing.assert_close(got.loss, plain)
    assert got.l0.item() == 4 and got.l0_penalty.item() == 0
    parameters = list(model.parameters())
    for ours, wanted in zip(torch.autograd.grad(got.loss, parameters), torch.autograd.grad(plain, parameters)):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)
    # The first batch sets the threshold, later ones move it.
    torch.testing.assert_close(model.threshold, cut.detach())
    assert torch.equal(model.firing_counts, (acts > 0).sum(0))
    before, other = model.threshold.clone(), sample(50, generator)
    model(other)
    smallest = ((other - model.b_dec) @ model.W_enc + model.b_enc).relu().flatten().topk(200).values[-1]
    torch.testing.assert_close(model.threshold, 0.75 * before + 0.25 * smallest)
    # In evaluation a row is what it is, whatever stands beside it.
    model.eval()
    fixed = model.threshold.clone()
    torch.testing.assert_close(model.encode(x[:1]).to_dense(), model.encode(x).to_dense()[:1])
    torch.testing.assert_close(model.encode(x).to_dense(), torch.where(z > fixed, z, 0))
    assert torch.equal(model.threshold, fixed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_leaves_the_threshold_wide(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    """In 16 bits a running mean that moves by a hundredth would stand still."""
    model = nn.BatchTopKSAE(D_IN, D_SAE, 4, device=device)
    x = sample(50, generator)
    model(x)
    first = model.threshold.clone()
    model.to(dtype)
    assert model.W_enc.dtype is dtype and torch.equal(model.threshold, first) and model.threshold.dtype is torch.float32
    for scale in (1.0, 1.05, 1.1):
        before = model.threshold.clone()
        model.loss((scale * x).to(dtype)).loss.backward()
        assert 0 < (model.threshold - before).abs() < 0.02 * before
    model.float().loss(x)
    assert model.threshold.dtype is torch.float32


@pytest.mark.parametrize("options", [{"bandwidth": 0.5}, {"target_l0": 8}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_leaves_learnt_thresholds_wide(
    options: dict[str, Any], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """In 16 bits a logarithm near 1 would not move by the thousandth that an optimizer adds."""
    model = nn.JumpReLUSAE(D_IN, D_SAE, initial_threshold=0.4, **options, device=device)
    x = sample(50, generator)
    model.loss(x).loss.backward()
    model.to(dtype)
    assert model.W_enc.dtype is dtype and model.log_threshold.dtype is torch.float32
    assert model.log_threshold.grad is not None and model.log_threshold.grad.dtype is torch.float32
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    before = model.log_threshold.detach().clone()
    optimizer.zero_grad()
    model.loss(x.to(dtype)).loss.backward()
    moves = model.log_threshold.grad != 0
    optimizer.step()
    assert moves.any() and bool((model.log_threshold != before)[moves].all())
    assert model.double().log_threshold.dtype is torch.float64


def test_batchtopk_without_anything_to_follow(device: torch.device) -> None:
    model = nn.BatchTopKSAE(D_IN, D_SAE, 4, capacity=2, device=device)
    model(torch.zeros(3, D_IN, device=device))
    model(torch.zeros(0, D_IN, device=device))
    assert model.threshold.item() == 0
    rows = model.encode(torch.randn(1, D_IN, device=device).expand(6, D_IN))
    dense = rows.to_dense()
    assert bool((rows.counts > 2).all()) and model.threshold == dense[dense > 0].min()
    assert repr(model) == "BatchTopKSAE(d_in=16, d_sae=96, k=4)"
    for options, error, message in (
        ({"k": 0}, ValueError, "k must be at least 1"),
        ({"k": 97}, ValueError, "k must be at most d_sae = 96, got 97"),
        ({"k": 3, "threshold_rate": 0}, ValueError, "threshold_rate must be above 0"),
        ({"k": 3, "threshold_rate": 1.5}, ValueError, "threshold_rate must be at most 1, got 1.5"),
        ({"k": 3, "capacity": 0}, ValueError, "capacity must be at least 1"),
    ):
        with pytest.raises(error, match=message):
            nn.BatchTopKSAE(D_IN, D_SAE, **options)


@pytest.mark.parametrize("kind", ["TopKSAE", "BatchTopKSAE", "JumpReLUSAE", "StandardSAE", "GatedSAE", "Transcoder"])
def test_a_pass_that_compiles_kernels_changes_nothing(kind: str, device: torch.device) -> None:
    options = {"k": 6} if kind in ("TopKSAE", "BatchTopKSAE", "Transcoder") else {}
    sizes = (D_IN, D_IN, D_SAE) if kind == "Transcoder" else (D_IN, D_SAE)
    model = getattr(nn, kind)(*sizes, **options, device=device)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x, state = torch.randn(5, D_IN, device=device), torch.get_rng_state()
    model._whole_pass(x)
    with torch.no_grad():
        model.eval()._whole_pass(x)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.density.basis(training=True) is None and torch.equal(torch.get_rng_state(), state)


class Seen(Here):
    """Lists the operators that a module calls, each with its operands' shapes, its options and the grad mode."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def encode(self, *operands: Any, **options: Any) -> tuple[Any, Tensor]:
        self.calls.append(("encode", torch.is_grad_enabled(), _shapes(operands), _shapes(options.items())))
        return super().encode(*operands, **options)

    def decode(self, *operands: Any) -> Tensor:
        self.calls.append(("decode", torch.is_grad_enabled(), _shapes(operands)))
        return super().decode(*operands)


def _shapes(given: Any) -> list[Any]:
    if isinstance(given, tuple | list | type({}.items())):
        return [_shapes(each) for each in given]
    if isinstance(given, gemm.JumpReLU):
        return ["JumpReLU", given.bandwidth]
    return [*given.shape] if isinstance(given, Tensor | Rows) else repr(given)


@pytest.mark.parametrize(
    "kind",
    ["TopKSAE", "BatchTopKSAE", "JumpReLUSAE", "StandardSAE", "GatedSAE", "MatryoshkaSAE", "MatryoshkaBatchTopKSAE"],
)
def test_kernels_compiled_ahead_are_those_of_the_call(
    kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once in each mode, and again where the first could not be."""
    model = getattr(nn, kind)(D_IN, D_SAE, **({"k": 6} if "TopK" in kind or "Mat" in kind else {}), device=device)
    model.density.pinned, model._placement = "sparse", (seen := Seen())
    x, able, walks = torch.randn(5, D_IN, device=device), [False], []

    def ahead(function: Any, x: Tensor) -> bool:
        if able[0]:
            function(x)
        walks.append(seen.calls.copy())
        seen.calls.clear()
        return able[0]

    monkeypatch.setattr(sys.modules["gossamer.nn.sae"], "ahead", ahead)
    for training, grad in ((True, True), (True, False), (False, True), (False, False)):
        model.train(training).requires_grad_()
        for able[0], times in ((False, 1), (True, 1), (True, 0)):
            walks.clear()
            seen.calls.clear()
            with torch.set_grad_enabled(grad):
                model.loss(x)
            assert len(walks) == times
            if able[0] and times:
                assert walks[0] and walks[0] == seen.calls[: len(walks[0])]
