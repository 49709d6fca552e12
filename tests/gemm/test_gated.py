"""What gemm.linear_glu and gemm.gated_mlp have in common, against the same in dense float64."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gossamer import gemm
from gossamer.gemm._torch.linear_glu import GATES
from tests.gemm.gated import OPERATORS, compare, doubled, gradients, leaves_of, needing, plain

pytestmark = pytest.mark.parametrize("operator", OPERATORS)
EACH_WAY = pytest.mark.parametrize("recompute", [False, True])


def small(operator: str, generator: torch.Generator, **options: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Operands, and a gradient of the result."""
    leaves = leaves_of(9, 8, 7, generator, torch.float32, operator=operator, **options)
    return leaves, torch.randn(9, 8 if operator == "linear_glu" else 7, device=generator.device, generator=generator)


@EACH_WAY
@pytest.mark.parametrize("activation", GATES)
def test_gradients(
    operator: str, activation: str, recompute: bool, dtype: torch.dtype, device: torch.device, generator: Any
) -> None:
    # Sizes that the copy engine of a GPU takes, and sizes that it does not.
    for stacked, bias, (m, n, k) in (
        (False, True, (200, 136, 72)),
        (True, operator == "linear_glu" or not recompute, (200, 136, 72)),
        (False, operator == "linear_glu", (200, 130, 70)),
    ):
        leaves = leaves_of(m, n, k, generator, dtype, bias=bias, stacked=stacked, operator=operator)
        grad = torch.randn(m, n if operator == "linear_glu" else k, device=device, generator=generator).to(dtype)
        ours = partial(OPERATORS[operator], activation=activation, recompute=recompute)
        # The largest error of 136 sums of 200 rows is a matter of luck, for plain PyTorch as well.
        compare(ours, activation, leaves, grad, of_biases=3.0 if operator == "linear_glu" else 2.0)


def clamped(gate: Tensor, up: Tensor) -> Tensor:
    """The gate of gpt-oss, as its model code has it, with limits that these numbers reach."""
    gate, up = gate.clamp(min=None, max=1.0), up.clamp(min=-1.0, max=1.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


FUNCTIONS: list[tuple[Any, Callable[[Tensor, Tensor], Tensor]]] = [
    (torch.tanh, lambda gate, up: torch.tanh(gate) * up),
    (torch.nn.SiLU(), lambda gate, up: F.silu(gate) * up),
    (gemm.ClampedSwiGLU(limit=1.0), clamped),
]


@EACH_WAY
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("activation, gate", FUNCTIONS, ids=["tanh", "SiLU", "clamped"])
def test_a_function_as_activation(
    operator: str,
    activation: Any,
    gate: Callable[[Tensor, Tensor], Tensor],
    stacked: bool,
    recompute: bool,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> None:
    leaves = leaves_of(40, 24, 16, generator, dtype, stacked=stacked, operator=operator)
    grad = torch.randn(40, 24 if operator == "linear_glu" else 16, device=device, generator=generator).to(dtype)
    compare(partial(OPERATORS[operator], activation=activation, recompute=recompute), gate, leaves, grad)


@EACH_WAY
def test_a_function_is_called_with_the_gate(operator: str, recompute: bool, generator: torch.Generator) -> None:
    """Once more with `recompute` in a backward pass."""
    calls = []
    activation = lambda gate: calls.append(gate.shape) or F.silu(gate)  # noqa: E731
    gradients(partial(OPERATORS[operator], activation=activation, recompute=recompute), *small(operator, generator))
    assert calls == [(9, 8)] * (2 if recompute else 1)


@pytest.mark.native
@pytest.mark.parametrize("activation", GATES)
def test_gradcheck(operator: str, activation: str) -> None:
    for stacked in (False, True):
        generator = torch.Generator().manual_seed(0)
        leaves = needing(leaves_of(3, 4, 5, generator, torch.float64, stacked=stacked, operator=operator))
        for recompute in (False, True):
            call = partial(OPERATORS[operator], activation=activation, recompute=recompute)
            assert torch.autograd.gradcheck(lambda *a: call(**dict(zip(leaves, a))), list(leaves.values()))  # noqa: B023


@EACH_WAY
def test_each_gradient_alone_and_frozen_parts(operator: str, recompute: bool, generator: torch.Generator) -> None:
    leaves, grad = small(operator, generator)
    alone = [set(leaves) - {name} for name in leaves]
    call = partial(OPERATORS[operator], recompute=recompute)
    for frozen in (*alone, {"x"}, {"gate_weight", "up_weight"}, {"down_weight"}, {"gate_bias", "x"}):
        got = gradients(call, leaves, grad, frozen)
        wanted = gradients(lambda **given: plain("silu", given), doubled(leaves), grad, frozen)
        assert got.keys() == wanted.keys() == {"out", *leaves} - frozen
        for name, tensor in got.items():
            torch.testing.assert_close(tensor.double(), wanted[name], rtol=1e-4, atol=1e-5)
    assert not call(**leaves).requires_grad


@EACH_WAY
def test_backward_twice_is_right(operator: str, recompute: bool, generator: torch.Generator) -> None:
    """Nothing that is kept is overwritten while somebody may need it."""
    leaves = needing(small(operator, generator)[0])
    out = OPERATORS[operator](**leaves, recompute=recompute)
    first = torch.autograd.grad(out.sum(), list(leaves.values()), retain_graph=True)
    second = torch.autograd.grad(out.sum(), list(leaves.values()))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out.sum(), list(leaves.values()))


@pytest.mark.parametrize("recompute, wanted", [(False, 2 * 64 * 96 * 4), (True, 0)])
def test_what_a_backward_pass_keeps(operator: str, recompute: bool, wanted: int, generator: torch.Generator) -> None:
    """Bytes beside operands and result: gate and up, or nothing."""
    leaves = needing(leaves_of(64, 96, 32, generator, torch.float32, operator=operator))
    given = {leaf.data_ptr() for leaf in leaves.values()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        OPERATORS[operator](**leaves, recompute=recompute)
    assert sum(size for pointer, size in kept.items() if pointer not in given) == wanted


@pytest.mark.native
@EACH_WAY
def test_compile(operator: str, recompute: bool, generator: torch.Generator, compiled: Any) -> None:
    leaves, grad = small(operator, generator)
    call = partial(OPERATORS[operator], recompute=recompute)
    got, wanted = (gradients(f, leaves, grad) for f in (compiled(call), call))
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, wanted[name])


@pytest.mark.native
def test_autocast(operator: str, device: torch.device, generator: torch.Generator) -> None:
    leaves, grad = small(operator, generator)
    half = {name: leaf.bfloat16() if "bias" not in name else leaf for name, leaf in leaves.items()}

    def cast(**given: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return OPERATORS[operator](**given)

    got, wanted = gradients(cast, leaves, grad), gradients(OPERATORS[operator], half, grad)
    out = got.pop("out")
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out, wanted["out"])
    for name, tensor in got.items():
        assert tensor.dtype is torch.float32
        torch.testing.assert_close(tensor, wanted[name].float(), rtol=0.02, atol=0.02)


@EACH_WAY
@pytest.mark.parametrize("stacked", [False, True])
def test_a_backward_pass_under_another_autocast(
    operator: str, stacked: bool, recompute: bool, device: torch.device, generator: torch.Generator
) -> None:
    """It computes in the dtype of the forward pass."""
    leaves, grad = small(operator, generator, stacked=stacked)
    call = partial(OPERATORS[operator], recompute=recompute)

    def outside(**given: Tensor) -> Tensor:
        with torch.autocast(device.type, enabled=False):
            return call(**given)

    wanted = gradients(call, leaves, grad)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        got = gradients(outside, leaves, grad)
    for name, gradient in got.items():
        assert torch.equal(gradient, wanted[name]), name
