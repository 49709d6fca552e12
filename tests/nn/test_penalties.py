"""JumpReLUSAE's penalties and estimates, against dense PyTorch."""

from typing import Any

import pytest
import torch

from gossamer import nn
from tests.nn import dense


# At 4 slots most rows overflow, at 16 some, at None none.
@pytest.mark.parametrize("capacity", [None, 16, 4])
@pytest.mark.parametrize("recipe", dense.RECIPES)
def test_loss_and_gradients(
    recipe: str, capacity: int | None, device: torch.device, generator: torch.Generator
) -> None:
    x = dense.sample(40, generator)
    model = dense.make("jumprelu", device, capacity=capacity, l0_coefficient=0.2, **dense.RECIPES[recipe])
    dense.kill(model, x, 12)
    over = (model.encode(x).counts > (capacity or dense.D_SAE)).float().mean().item()
    assert over == 0 if capacity is None else 0 < over < 1 if capacity == 16 else over > 0.8
    got, grads = dense.compare(model, x)
    assert got.l0_penalty > 0 and got.l0 > 4 and bool(got.dead_loss > 0) == (recipe == "anthropic")
    assert all(grad.any() for grad in grads.values())


@pytest.mark.parametrize("recipe", dense.RECIPES)
def test_a_window_that_reaches_below_0(recipe: str, device: torch.device, generator: torch.Generator) -> None:
    """Pre-activations below 0 are in it too."""
    options = {"initial_threshold": 0.05, "bandwidth": 0.4, "l0_coefficient": 0.2}
    dense.compare(dense.make("jumprelu", device, **options, **dense.RECIPES[recipe]), dense.sample(40, generator))


def test_settings_change_something(device: torch.device, generator: torch.Generator) -> None:
    """Each recipe has gradients of its own; a reference that ignored a setting would not see it ignored."""
    x, found = dense.sample(40, generator), []
    for recipe in dense.RECIPES.values():
        model = dense.make("jumprelu", device, l0_coefficient=0.2, **recipe)
        found.append(dense.gradients(model.loss(x), model))
    for i, one in enumerate(found):
        for other in found[:i]:
            assert not torch.allclose(one["log_threshold"], other["log_threshold"], rtol=1e-3) or not torch.allclose(
                one["b_enc"], other["b_enc"], rtol=1e-3
            )


@pytest.mark.parametrize("target", [3.0, 6.0])
def test_quadratic_reaches_its_target(target: float, device: torch.device) -> None:
    """From about 18."""
    generator = torch.Generator(device).manual_seed(0)
    options = {"penalty": "quadratic", "target_l0": target, "l0_coefficient": 0.3}
    model = dense.make("jumprelu", device, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=6e-3)
    l0s = []
    for _ in range(200):
        optimizer.zero_grad()
        got = model.loss(dense.sample(64, generator))
        got.loss.backward()
        optimizer.step()
        l0s.append(got.l0)
    assert abs(torch.stack(l0s[-50:]).mean().item() / target - 1) < 0.25
    assert abs(l0s[0].item() / target - 1) > 0.3


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"penalty": "l1"}, ValueError, 'penalty must be "step", "quadratic" or "tanh", got \'l1\''),
        ({"penalty": "quadratic"}, ValueError, 'penalty="quadratic" needs a target_l0, got None'),
        (
            {"target_l0": 3.0, "l0_coefficient": 0.1},
            ValueError,
            "with a target_l0 the l0_coefficient of penalty='step' is steered, got 0.1. Leave out one",
        ),
        ({"warm_up": 0}, ValueError, "warm_up must be at least 1, got 0"),
        ({"penalty": "quadratic", "target_l0": 0.0}, ValueError, "target_l0 must be above 0 and finite, got 0.0"),
        ({"penalty": "quadratic", "target_l0": 9.0}, ValueError, "target_l0 must be at most d_sae = 8, got 9.0"),
        ({"tanh_scale": 0.0}, ValueError, "tanh_scale must be above 0 and finite, got 0.0"),
        ({"pre_act_coefficient": -1.0}, ValueError, "pre_act_coefficient must be at least 0 and finite, got -1.0"),
        ({"pre_act_coefficient": "a"}, TypeError, "pre_act_coefficient must be a number, got str"),
        ({"dead_after": 0}, ValueError, "dead_after must be at least 1, got 0"),
    ],
)
def test_errors(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"nn.JumpReLUSAE: {message}"):
        nn.JumpReLUSAE(4, 8, **options)
