"""nn.GatedMLP and nn.MLP, against plain PyTorch."""

import copy
import pickle
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize, prune

from gossamer import gemm, nn
from gossamer.gemm.linear_glu import GATES
from gossamer.testing import assert_close

METHODS = ("gather", "fused", "dense")


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


def test_functions_as_activation(device: torch.device) -> None:
    """A module is a part of the block, with its parameters, and a clamped gate changes up as well."""
    torch.manual_seed(0)
    x, silu = 3 * torch.randn(3, 8, device=device), torch.nn.functional.silu
    for activation in (torch.nn.SiLU(), silu):
        for kind in (nn.MLP, nn.GatedMLP):
            model, named = kind(8, 24, activation, device=device), kind(8, 24, "silu", device=device)
            named.load_state_dict(model.state_dict())
            torch.testing.assert_close(model(x), named(x))
            model.l1 = named.l1 = True
            torch.testing.assert_close(model(x).activity, named(x).activity)
    assert set(dict(nn.MLP(8, 24, torch.nn.PReLU()).named_parameters())) > {"activation.weight"}
    assert repr(nn.GatedMLP(8, 24, torch.nn.PReLU(), recompute=True)).count("PReLU") == 1
    with pytest.raises(ValueError, match=r"nn\.MLP: activation must return the gate's shape \[3, 24\]"):
        nn.MLP(8, 24, torch.sum, device=device)(x)
    model = nn.GatedMLP(8, 24, gemm.ClampedSwiGLU(alpha=1.5, limit=0.5), device=device)
    gate, up = model.gate_proj(x).clamp(max=0.5), model.up_proj(x).clamp(-0.5, 0.5)
    wanted = model.down_proj((up + 1) * gate * torch.sigmoid(1.5 * gate))
    torch.testing.assert_close(model(x), wanted)
    model.down_proj.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(model(x), wanted)
    with pytest.raises(ValueError, match=r"nn\.MLP: activation must not be a ClampedSwiGLU.* Use nn\.GatedMLP"):
        nn.MLP(8, 24, gemm.ClampedSwiGLU())


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


class Adapted(torch.nn.Module):
    """A layer with an adapter, that shows the weight of its base as PEFT's do."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.adapter = torch.nn.Linear(base.in_features, base.out_features, False, base.weight.device)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.adapter(x)


class Twice(torch.nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def adapt(model: Any, name: str) -> None:
    setattr(model, name, Adapted(getattr(model, name)))


def replace_forward(model: Any, name: str) -> None:
    layer = getattr(model, name)
    layer.forward = MethodType(lambda self, x: 2 * type(self).forward(self, x), layer)


PUT_ON: dict[str, Callable[[Any, str], Any]] = {
    "adapter": adapt,
    "forward": replace_forward,
    "forward hook": lambda model, name: getattr(model, name).register_forward_hook(lambda layer, args, out: out * 2),
    "pre-hook": lambda model, name: getattr(model, name).register_forward_pre_hook(lambda layer, args: (args[0] * 2,)),
    "backward hook": lambda model, name: getattr(model, name).register_full_backward_hook(
        lambda layer, grads, _: (grads[0] * 2,)
    ),
    "prune": lambda model, name: prune.random_unstructured(getattr(model, name), "weight", 0.5),
    "parametrization": lambda model, name: parametrize.register_parametrization(
        getattr(model, name), "weight", Twice()
    ),
}


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("what", PUT_ON)
def test_what_is_put_on_a_layer_is_heeded(what: str, name: str, device: torch.device) -> None:
    torch.manual_seed(0)
    model, x = nn.GatedMLP(8, 24, bias=True, device=device), torch.randn(3, 8, device=device)
    PUT_ON[what](model, name)
    grads = []
    # Twice, for a second backward pass must find a graph of its own.
    for forward in (nn.GatedMLP.forward, nn.GatedMLP.forward, plain):
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        out = forward(model, leaf)
        out.square().sum().backward()
        grads.append([out.detach(), leaf.grad, *(p.grad for p in model.parameters() if p.requires_grad)])
    for first, second, third in zip(*grads, strict=True):
        torch.testing.assert_close(first, third)
        torch.testing.assert_close(second, third)


def test_all_modules_hooked(device: torch.device) -> None:
    model, seen = nn.GatedMLP(8, 24, device=device), []
    handle = register_module_forward_hook(lambda module, args, out: seen.append(module))
    try:
        model(torch.ones(1, 8, device=device))
    finally:
        handle.remove()
    assert seen == [model.gate_proj, model.up_proj, model.down_proj, model]


def test_hooked_and_compiled(device: torch.device, compiled: Any) -> None:
    model, x = nn.GatedMLP(8, 24, device=device), torch.randn(3, 8, device=device)
    adapt(model, "up_proj")
    torch.testing.assert_close(compiled(model)(x), plain(model, x))


def test_exported(device: torch.device, compiled: Any) -> None:
    """torch.export traces with parameters of another type; that is no reason to call the layers."""
    for strict in (False, True):
        with torch.no_grad():
            program = torch.export.export(
                nn.GatedMLP(8, 24, device=device), (torch.ones(3, 8, device=device),), strict=strict
            )
        assert "linear_glu" in program.graph_module.code


@pytest.mark.usefixtures("one_rank")
@pytest.mark.native
def test_layers_sharded_one_by_one() -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    model, x = nn.GatedMLP(8, 24), torch.randn(3, 8)
    expected = model(x)
    for layer in (model.up_proj, model.down_proj):
        fully_shard(layer, mesh=mesh)
    model(x).sum().backward()
    torch.testing.assert_close(model(x), expected)
    whole = fully_shard(nn.GatedMLP(8, 24), mesh=mesh)
    whole(x).sum().backward()


@pytest.mark.parametrize("kind", [nn.GatedMLP, nn.MLP])
@pytest.mark.parametrize("activation", ["relu", "relu2"])
@pytest.mark.parametrize("method", ["auto", *METHODS])
def test_sparse(kind: type, activation: str, method: str, device: torch.device, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = kind(48, 136, activation, bias=True, method=method, dtype=dtype, device=device)
    active = model.gate_proj if kind is nn.GatedMLP else model.up_proj
    torch.nn.init.constant_(active.bias, -1.0)
    x = torch.randn(2, 20, 48, device=device).to(dtype)
    exact = copy.deepcopy(model).double()
    assert model.last_path is None
    for _ in range(6):
        with torch.no_grad():
            assert_close(model(x), reference64=plain(exact, x.double()), plain=plain(model, x))
    assert model.last_path in (METHODS if method == "auto" else (method, "dense"))
    # A gradient is that of the dense block.
    leaf = x.clone().requires_grad_()
    model(leaf).sum().backward()
    usual = x.clone().requires_grad_()
    plain(model, usual).sum().backward()
    torch.testing.assert_close(leaf.grad, usual.grad, rtol=3e-2 if dtype.itemsize == 2 else 1e-4, atol=3e-2)
    assert pickle.loads(pickle.dumps(copy.deepcopy(model))).method == method


@pytest.mark.parametrize("kind", [nn.GatedMLP, nn.MLP])
def test_a_changed_weight_is_seen(kind: type, device: torch.device) -> None:
    torch.manual_seed(0)
    model = kind(16, 64, "relu", bias=True, method="gather", device=device)
    x = torch.randn(40, 16, device=device)

    def check() -> None:
        want = plain(copy.deepcopy(model).double(), x.double())
        assert_close(model(x), reference64=want, plain=plain(model, x))

    with torch.no_grad():
        check()
        model.down_proj.weight.mul_(2)
        check()
        model.down_proj.weight.data.mul_(1.5)
        check()
        model.load_state_dict({name: t + 1 for name, t in model.state_dict().items()})
        check()
        model.down_proj.weight = torch.nn.Parameter(torch.randn(16, 64, device=device))
        check()
        model.down_proj.weight.data = torch.randn(16, 64, device=device)
        check()
        torch.nn.init.zeros_(model.down_proj.weight)
        check()
        model.double()
        if device.type == "cpu":
            check_double = model(x.double())
            torch.testing.assert_close(check_double, plain(model, x.double()))
    with torch.inference_mode():
        model.float()
        model(x)


@pytest.mark.parametrize("kind", [nn.GatedMLP, nn.MLP])
def test_sparse_calls_hooked_layers(kind: type, device: torch.device) -> None:
    model, seen = kind(16, 64, "relu", device=device), []
    with torch.no_grad():
        model(torch.randn(3, 16, device=device))
        model.down_proj.register_forward_hook(lambda *_: seen.append(1))
        model(torch.randn(3, 16, device=device))
    assert seen == [1]
    with pytest.raises(ValueError, match=rf"nn.{kind.__name__}: method must be one of auto, .*, got 'fast'"):
        kind(16, 64, "relu", method="fast")
