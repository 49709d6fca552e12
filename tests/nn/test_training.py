"""Modules trained, sparse against dense PyTorch."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.testing import assert_close
from tests.nn import dense

STEPS = 1000
KINDS: dict[str, dict[str, Any]] = {
    "topk": {"dead_after": 30},
    "batchtopk": {"dead_after": 30},
    "jumprelu": {"dead_after": 30, "pre_act_coefficient": 0.003},
}


def train(kind: str, device: torch.device, sparse: bool) -> dict[str, Tensor]:
    """Of each step the loss and L0, and the share of dead latents."""
    model = dense.make(kind, device, **KINDS[kind])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = torch.Generator(device).manual_seed(2)
    found: dict[str, list[Tensor]] = {"loss": [], "l0": [], "dead": []}
    for step in range(STEPS):
        given = dense.given(model, dense.sample(64, generator))
        if sparse and step in (0, 10, 100):
            compare_gradients(model, given)
        terms = model.loss(*given) if sparse else dense.loss(model, *given)
        optimizer.zero_grad()
        terms.loss.backward()
        optimizer.step()
        found["loss"].append(terms.loss.detach())
        found["l0"].append(terms.l0)
        found["dead"].append(model.dead().float().mean())
    return {name: torch.stack(values) for name, values in found.items()}


def compare_gradients(model: Any, given: tuple[Tensor, ...]) -> None:
    ours, plain, exact = (copy.deepcopy(model) for _ in range(3))
    exact.double()
    wanted = dense.gradients(dense.loss(exact, *(t.double() for t in given)), exact)
    usual = dense.gradients(dense.loss(plain, *given), plain)
    for name, grad in dense.gradients(ours.loss(*given), ours).items():
        assert_close(grad, reference64=wanted[name], plain=usual[name], name=name)


@pytest.mark.parametrize(
    "kind", ["batchtopk", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("topk", "jumprelu"))]
)
def test_a_thousand_steps(kind: str, device: torch.device) -> None:
    """From one seed the same losses, L0 and dead share within noise, and at steps 0, 10 and 100 gradients as near to
    float64 as the dense ones."""
    sparse, plain = train(kind, device, True), train(kind, device, False)
    torch.testing.assert_close(sparse["loss"][:20], plain["loss"][:20], rtol=1e-3, atol=0)
    ours, theirs = ({name: t[-200:].mean().item() for name, t in each.items()} for each in (sparse, plain))
    assert theirs["loss"] < 0.3 * plain["loss"][0].item()
    assert abs(ours["loss"] / theirs["loss"] - 1) < 0.03
    assert abs(ours["l0"] / theirs["l0"] - 1) < 0.03
    assert abs(ours["dead"] - theirs["dead"]) < 0.03


@pytest.mark.parametrize(
    "kind, options",
    [
        ("topk", {"aux_coefficient": 0.3, "aux_k": 4}),
        ("transcoder", {"aux_coefficient": 0.3, "aux_k": 4, "skip": True}),
        ("jumprelu", {"pre_act_coefficient": 0.05, "capacity": 12}),
        ("jumprelu", {"penalty": "quadratic", "target_l0": 5.0}),
        ("jumprelu", {"penalty": "tanh", "ste_to_input": True}),
    ],
)
def test_gradients_accumulate(
    kind: str, options: dict[str, Any], device: torch.device, generator: torch.Generator
) -> None:
    """Of two halves of a batch they are those of the batch; so are firing counts."""
    x = dense.sample(40, generator)
    model = dense.make(kind, device, **options)
    dense.kill(model, x, 12)
    halves = copy.deepcopy(model)
    # Long enough that the calls in between change nothing about who is dead.
    got = model.loss(*dense.given(model, x))
    got.loss.backward()
    for part in x.chunk(2):
        (halves.loss(*dense.given(halves, part)).loss / 2).backward()
    assert torch.equal(model.firing_counts, halves.firing_counts) and int(halves.dead().sum()) == 12
    assert (got.dead_loss > 0) == any("aux" in name or "pre_act" in name for name in options)
    for name, parameter in model.named_parameters():
        other = halves.get_parameter(name).grad
        torch.testing.assert_close(other, parameter.grad, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
