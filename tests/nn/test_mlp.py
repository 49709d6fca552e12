"""nn.GatedMLP and nn.MLP, against plain PyTorch."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer import nn
from gossamer.gemm.linear_glu import GATES
from gossamer.testing import assert_close


def plain(model: Any, x: Tensor) -> Tensor:
    up = model.up_proj(x)
    gate = GATES[model.activation]
    return model.down_proj(gate(model.gate_proj(x)) * up if isinstance(model, nn.GatedMLP) else gate(up))


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"activation": "gelu_new", "bias": True}], ids=str)
def test_gated_mlp(options: dict[str, Any], device: torch.device, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.GatedMLP(48, 136, dtype=dtype, device=device, **options)
    assert list(model.state_dict()) == [
        f"{name}.{part}"
        for name in ("gate_proj", "up_proj", "down_proj")
        for part in (("weight", "bias") if "bias" in options else ("weight",))
    ]
    results = []
    x = torch.randn(5, 60, 48, device=device).to(dtype)
    for module, forward in ((model, nn.GatedMLP.forward), (model, plain), (copy.deepcopy(model).double(), plain)):
        module.zero_grad()
        leaf = x.to(module.up_proj.weight.dtype).clone().requires_grad_()
        out = forward(module, leaf)
        (out * torch.linspace(-1, 1, 48, device=device, dtype=out.dtype)).sum().backward()
        grads = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
        results.append({"out": out.detach(), "x": leaf.grad, **grads})
    for name, got in results[0].items():
        assert_close(got, reference64=results[2][name], plain=results[1][name], name=name)


def test_mlp(device: torch.device) -> None:
    torch.manual_seed(0)
    for activation in GATES:
        model = nn.MLP(8, 24, activation, bias=True, device=device)
        x = torch.randn(3, 8, device=device)
        assert torch.equal(model(x), plain(model, x))
    assert list(model.state_dict()) == ["up_proj.weight", "up_proj.bias", "down_proj.weight", "down_proj.bias"]


def test_compiled_and_autocast(device: torch.device, compiled: Any) -> None:
    torch.manual_seed(0)
    model = nn.GatedMLP(16, 24, device=device)
    x = torch.randn(3, 16, device=device)
    torch.testing.assert_close(compiled(model)(x), model(x))
    with torch.autocast(device.type, torch.bfloat16):
        assert model(x).dtype is torch.bfloat16


@pytest.mark.parametrize("kind", [nn.MLP, nn.GatedMLP])
def test_errors(kind: type) -> None:
    name = f"nn.{kind.__name__}"
    with pytest.raises(ValueError, match=rf"{name}: hidden_size must be at least 1, got 0"):
        kind(0, 4)
    with pytest.raises(TypeError, match=rf"{name}: intermediate_size must be an int, got float"):
        kind(4, 4.0)
    with pytest.raises(ValueError, match=rf"{name}: activation must be one of silu, .* got 'tanh'"):
        kind(4, 4, "tanh")


def test_on_the_meta_device() -> None:
    block = nn.GatedMLP(8, 24, device="meta")
    x = torch.empty(2, 8, device="meta", requires_grad=True)
    block(x).sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
