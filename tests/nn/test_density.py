"""Autoencoders that take plain dense products: the same losses and gradients, and when they take them."""

import math
from typing import Any

import pytest
import torch

from gossamer import nn
from tests.nn import dense

KINDS = ("topk", "batchtopk", "jumprelu", "transcoder")
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "jumprelu": [
        {},
        {"penalty": "quadratic", "target_l0": 3},
        {"penalty": "tanh", "ste_to_input": True},
        {"target_l0": 3.0, "l0_coefficient": None},
    ],
    "transcoder": [{}, {"skip": True}],
}


@pytest.mark.parametrize("kind, options", [(kind, o) for kind in KINDS for o in OPTIONS.get(kind, [{}])], ids=str)
def test_both_ways_agree(kind: str, options: dict[str, Any], device: torch.device, generator: torch.Generator) -> None:
    """Terms of the loss, every gradient, and what a step in training counts; what is steered scales its x."""
    x, found = 16 * dense.sample(40, generator), []
    model = dense.make(kind, device, **options)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for path in ("sparse", "dense"):
        model.load_state_dict(before)
        model.density.pinned = path
        model.zero_grad()
        loss = model.loss(*dense.given(model, x))
        loss.loss.backward()
        assert model.density.last_path == path
        assert getattr(model, "input_scale", 0.5) < 1
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        found.append((loss._asdict(), grads, dict(model.named_buffers())))
        found[-1] = tuple({k: v.detach().clone() for k, v in part.items() if v is not None} for part in found[-1])
    for sparse, plain in zip(*found):
        assert sparse.keys() == plain.keys()
        for name in sparse:
            torch.testing.assert_close(
                plain[name], sparse[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n} {m}"
            )


@pytest.mark.parametrize("kind", KINDS)
def test_inference_both_ways(kind: str, device: torch.device, generator: torch.Generator) -> None:
    x, outs = dense.sample(40, generator), []
    model = dense.make(kind, device)
    model.loss(*dense.given(model, x))
    model.eval()
    for path in ("sparse", "dense"):
        model.density.pinned = path
        with torch.no_grad():
            outs.append(model(x))
    torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("path", ["sparse", "dense"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "kind, options",
    [
        *((kind, {}) for kind in ("topk", "batchtopk", "transcoder", "jumprelu")),
        ("jumprelu", {"penalty": "quadratic", "target_l0": 3.0}),
        ("jumprelu", {"penalty": "tanh", "ste_to_input": True, "pre_act_coefficient": 0.1}),
        ("jumprelu", {"target_l0": 3.0, "l0_coefficient": None}),
    ],
    ids=str,
)
def test_the_loss_of_no_rows_is_0(
    kind: str, options: dict[str, Any], training: bool, path: str, device: torch.device
) -> None:
    """Where latents are dead, too."""
    model = dense.make(kind, device, **options).train(training)
    model.density.pinned = path
    model.steps_since_fired.fill_(1 << 20)
    loss = model.loss(*dense.given(model, torch.empty(0, dense.D_IN, device=device)))
    loss.loss.backward()
    assert not any(term.any() for term in loss)
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or not parameter.grad.any(), name


def test_the_path_follows_the_rows(device: torch.device, generator: torch.Generator) -> None:
    """Half of 512 latents fire: dense from the first call in training on; in inference once that is known."""
    model, x = nn.JumpReLUSAE(32, 512, device=device), torch.randn(200, 32, device=device, generator=generator)
    paths = []
    for _ in range(7):
        with torch.no_grad():
            model.eval()(x)
            paths.append(model.density.last_path)
        model.train().loss(x).loss.backward()
        assert model.density.last_path == "dense"
    assert paths == ["sparse"] * 4 + ["dense"] * 3
    with torch.no_grad():
        model.log_threshold.fill_(10.0)
    for _ in range(6):
        model.loss(x).loss.backward()
    assert model.density.last_path == "sparse"


def test_slots_follow_the_rows(device: torch.device, generator: torch.Generator) -> None:
    """None overflows once it is known how many entries rows have, whatever waits for its backward pass."""
    model, x = nn.JumpReLUSAE(32, 2048, device=device), torch.randn(64, 32, device=device, generator=generator)
    model.log_threshold.detach().fill_(1.33 - math.log(2))
    asked, packs = [], model._encode
    model.density.pinned = "sparse"
    model._encode = lambda x, capacity: asked.append(capacity) or packs(x, capacity)
    waiting = [model.loss(x) for _ in range(6)]
    assert len(waiting) == 6 and asked == [None] * 4 + [256] * 2
    known = model.density.known(training=True)
    assert known is not None and 128 < known.largest < 256
    capacities = nn.JumpReLUSAE(32, 2048, capacity=40, device=device)
    assert len(capacities.encode(x).packed.values) == 40 * len(x)


@pytest.mark.full
@pytest.mark.native
def test_a_run_whose_rows_empty_has_the_loss_of_dense(device: torch.device) -> None:
    """L0 falls from 2,000 to some tens in 560 steps: dense at first, sparse in the end, and the same curve."""
    curves, l0, paths = {}, [], []
    for path in ("dense", None):
        generator = torch.Generator(device).manual_seed(0)
        atoms = torch.nn.functional.normalize(torch.randn(256, 128, device=device, generator=generator))
        torch.manual_seed(1)
        model = nn.JumpReLUSAE(128, 4096, bandwidth=0.1, l0_coefficient=3.0, device=device)
        model.density.pinned = path
        optimizer = torch.optim.Adam(model.parameters(), lr=6e-3)
        curves[path] = []
        for step in range(560):
            model.l0_coefficient = 3.0 * min(1.0, step / 150)
            drawn, size = (torch.rand(64, 256, device=device, generator=generator) for _ in range(2))
            terms = model.loss(torch.where(drawn < 0.03, size, 0) @ atoms)
            optimizer.zero_grad()
            terms.loss.backward()
            optimizer.step()
            curves[path].append(float(terms.loss.detach()))
            if path is None:
                l0.append(float(terms.l0.mean().detach()))
                paths.append(model.density.last_path)
    assert l0[0] > 1500 and l0[-1] < 60
    assert paths[0] == "dense" and "sparse" in paths
    for first in range(0, 560, 40):
        dense, followed = (sum(curves[path][first : first + 40]) for path in ("dense", None))
        assert abs(followed - dense) < 0.05 * dense


def test_k_is_known_without_looking(device: torch.device, generator: torch.Generator) -> None:
    x = torch.randn(200, 32, device=device, generator=generator)
    for k, path in ((2, "sparse"), (500, "dense")):
        model = nn.TopKSAE(32, 512, k, device=device, aux_coefficient=0)
        model.loss(x).loss.backward()
        assert model.density.last_path == path and model.density.known(training=True) is None
