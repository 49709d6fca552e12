"""gemm.gated_mlp, against the same in dense float64."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gossamer import gemm
from gossamer.gemm._torch import linear_glu as usual
from gossamer.gemm._torch.linear_glu import GATES
from gossamer.testing import assert_close

Leaves = dict[str, Tensor | None]


def leaves_of(
    m: int, k: int, n: int, generator: torch.Generator, dtype: torch.dtype, *, bias: bool = True, stacked: bool = False
) -> Leaves:
    draw = lambda *size: torch.randn(*size, device=generator.device, generator=generator)  # noqa: E731
    weight = (draw(2 * n, k) / k**0.5).to(dtype)
    leaves: Leaves = {"x": draw(m, k).to(dtype), "gate_weight": weight, "up_weight": None}
    if not stacked:
        leaves |= {"gate_weight": weight[:n].clone(), "up_weight": weight[n:].clone()}
    leaves["down_weight"] = (draw(k, n) / n**0.5).to(dtype)
    if bias:
        leaves |= {"gate_bias": draw(n).to(dtype), "up_bias": draw(n).to(dtype), "down_bias": draw(k).to(dtype)}
    return leaves


def plain(activation: str, a: Leaves) -> Tensor:
    gate, up = a["gate_weight"], a["up_weight"]
    if up is None:
        gate, up = gate.chunk(2, 0)
    hidden = GATES[activation](F.linear(a["x"], gate, a.get("gate_bias"))) * F.linear(a["x"], up, a.get("up_bias"))
    return F.linear(hidden, a["down_weight"], a.get("down_bias"))


def run(function: Any, leaves: Leaves, grad: Tensor, frozen: tuple[str, ...] = ()) -> dict[str, Tensor]:
    leaves = {
        name: None if leaf is None else leaf.detach().clone().requires_grad_(name not in frozen)
        for name, leaf in leaves.items()
    }
    out = function(leaves)
    out.backward(grad.to(out.dtype))
    grads = {name: leaf.grad for name, leaf in leaves.items() if leaf is not None and leaf.grad is not None}
    return {"out": out.detach(), **grads}


def doubled(leaves: Leaves) -> Leaves:
    return {name: None if leaf is None else leaf.double() for name, leaf in leaves.items()}


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("activation", GATES)
def test_gradients(
    activation: str, stacked: bool, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    for bias, recompute in ((True, False), (False, True)):
        leaves = leaves_of(200, 72, 136, generator, dtype, bias=bias, stacked=stacked)
        grad = torch.randn(200, 72, device=device, generator=generator).to(dtype)
        got = run(lambda a: gemm.gated_mlp(**a, activation=activation, recompute=recompute), leaves, grad)  # noqa: B023
        usual, wanted = (run(lambda a: plain(activation, a), a, grad) for a in (leaves, doubled(leaves)))
        assert got.keys() == wanted.keys()
        for name, tensor in got.items():
            assert tensor.dtype is dtype
            assert_close(tensor, reference64=wanted[name], plain=usual[name], name=name)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_function_as_activation(
    recompute: bool, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """The function is called with the gate, once more with `recompute` in a backward pass."""
    leaves = leaves_of(20, 16, 24, generator, dtype)
    grad = torch.randn(20, 16, device=device, generator=generator).to(dtype)
    calls = []
    activation = lambda gate: calls.append(gate.shape) or F.silu(gate)  # noqa: E731
    got = run(lambda a: gemm.gated_mlp(**a, activation=activation, recompute=recompute), leaves, grad)
    assert calls == [(20, 24)] * (2 if recompute else 1)
    usual, wanted = (run(lambda a: plain("silu", a), a, grad) for a in (leaves, doubled(leaves)))
    for name, tensor in got.items():
        assert_close(tensor, reference64=wanted[name], plain=usual[name], name=name)


@pytest.mark.native
@pytest.mark.parametrize("activation", GATES)
def test_gradcheck(activation: str) -> None:
    for stacked in (False, True):
        leaves = leaves_of(3, 4, 5, torch.Generator().manual_seed(0), torch.float64, stacked=stacked)
        names = [name for name, leaf in leaves.items() if leaf is not None]
        values = [leaves[name].requires_grad_() for name in names]
        call = lambda *a: gemm.gated_mlp(**{"up_weight": None, **dict(zip(names, a))}, activation=activation)  # noqa: B023, E731
        assert torch.autograd.gradcheck(call, values)


def test_frozen_parts(device: torch.device, generator: torch.Generator) -> None:
    leaves = leaves_of(9, 8, 7, generator, torch.float32)
    grad = torch.randn(9, 8, device=device, generator=generator)
    for frozen in (("x",), ("gate_weight", "up_weight"), ("down_weight",), tuple(leaves)[1:], ("gate_bias", "x")):
        got, wanted = (
            run(f, leaves, grad, frozen) for f in (lambda a: gemm.gated_mlp(**a), lambda a: plain("silu", a))
        )
        assert got.keys() == wanted.keys() and not set(frozen) & got.keys()
        for name, tensor in got.items():
            torch.testing.assert_close(tensor, wanted[name], rtol=1e-4, atol=1e-5)


def test_backward_twice_is_right(device: torch.device, generator: torch.Generator) -> None:
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves_of(9, 8, 7, generator, torch.float32).items()}
    out = gemm.gated_mlp(**leaves)
    first = torch.autograd.grad(out.sum(), list(leaves.values()), retain_graph=True)
    second = torch.autograd.grad(out.sum(), list(leaves.values()))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out.sum(), list(leaves.values()))


def test_hooks_keep_what_they_saw(device: torch.device, generator: torch.Generator) -> None:
    """Gradients take the places of gate and up only where nobody else may have the two."""
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves_of(9, 8, 7, generator, torch.float32).items()}
    seen: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        out = gemm.gated_mlp(**leaves)
    before = [tensor.clone() for tensor in seen]
    first = torch.autograd.grad(out.sum(), list(leaves.values()))
    assert all(torch.equal(a, b) for a, b in zip(seen, before))
    second = torch.autograd.grad(gemm.gated_mlp(**leaves).sum(), list(leaves.values()))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_hooks_may_give_another_layout(device: torch.device, generator: torch.Generator) -> None:
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves_of(9, 8, 7, generator, torch.float32).items()}
    wanted = torch.autograd.grad(gemm.gated_mlp(**leaves).sum(), list(leaves.values()))
    by_columns = lambda t: t.t().contiguous().t() if t.dim() == 2 else t  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, by_columns):
        out = gemm.gated_mlp(**leaves)
    for got, want in zip(torch.autograd.grad(out.sum(), list(leaves.values())), wanted):
        torch.testing.assert_close(got, want)


@pytest.mark.native
def test_compiled_backward_twice_is_right(device: torch.device, generator: torch.Generator) -> None:
    """With the backend that leaves what is traced as it is, and so overwrites what the graph keeps."""
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves_of(9, 8, 7, generator, torch.float32).items()}
    out = torch.compile(lambda: gemm.gated_mlp(**leaves), backend="eager")()
    first = torch.autograd.grad(out.sum(), list(leaves.values()), retain_graph=True)
    second = torch.autograd.grad(out.sum(), list(leaves.values()))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.gpu
@pytest.mark.parametrize("m, n, d", [(300, 272, 72), (1000, 5008, 136), (77, 16, 3080), (2100, 3072, 3072)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", GATES)
def test_gated_after_the_product(
    activation: str, dtype: torch.dtype, m: int, n: int, d: int, generator: torch.Generator
) -> None:
    draw = lambda *size: torch.randn(*size, device="cuda", generator=generator)  # noqa: E731
    grad, down = draw(m, d).to(dtype), (draw(d, n) / d**0.5).to(dtype)
    gates = draw(m, n).to(dtype), draw(m, n).to(dtype)
    found, plainly, exact = ([gate.to(kind, copy=True) for gate in gates] for kind in (dtype, dtype, torch.float64))
    operator = torch.ops.gossamer.gated_mlp_bwd_
    found.append(operator(grad, down, *found, activation))
    plainly.append(usual.gated_mlp_bwd(usual.GatedMlpBwd(grad, down, *plainly, activation)))
    exact.append(usual.gated_mlp_bwd(usual.GatedMlpBwd(grad.double(), down.double(), *exact, activation)))
    for got, want, by_torch in zip(found, exact, plainly):
        assert_close(got, reference64=want, plain=by_torch)


def test_second_derivatives_are_refused(device: torch.device, generator: torch.Generator) -> None:
    leaves = leaves_of(2, 3, 4, generator, torch.float32)
    x = leaves["x"].requires_grad_()
    with pytest.raises(NotImplementedError, match=r"gemm\.gated_mlp: second derivatives"):
        torch.autograd.grad(gemm.gated_mlp(**leaves).sum(), x, create_graph=True)


def test_what_a_backward_pass_keeps(device: torch.device, generator: torch.Generator) -> None:
    """Bytes beside operands: gate and up, or with `recompute` none."""
    leaves = leaves_of(64, 32, 96, generator, torch.float32)
    given = {leaf.data_ptr() for leaf in leaves.values() if leaf is not None}
    leaves = {name: None if leaf is None else leaf.requires_grad_() for name, leaf in leaves.items()}
    for recompute, wanted in ((False, 2 * 64 * 96 * 4), (True, 0)):
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()  # noqa: B023
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            gemm.gated_mlp(**leaves, recompute=recompute)
        assert sum(size for pointer, size in kept.items() if pointer not in given) == wanted


@pytest.mark.gpu
def test_memory_of_a_step(generator: torch.Generator) -> None:
    """At its peak a backward pass holds at most three times what is gated: gate and up, which become their gradients,
    and what they gated, or parts of it. With `recompute` it is the same, and nothing before."""
    leaves = leaves_of(4096, 512, 4096, generator, torch.bfloat16, bias=False)
    grad, hidden = torch.randn(4096, 512, device="cuda").bfloat16(), 4096 * 4096 * 2
    given = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    gc.collect()  # what earlier tests left would be freed within the step
    for recompute, kept in ((False, 2), (True, 0)):
        for _ in range(2):
            before = torch.cuda.memory_allocated()
            out = gemm.gated_mlp(**given, recompute=recompute)
            after = torch.cuda.memory_allocated() - before - out.numel() * 2
            torch.cuda.reset_peak_memory_stats()
            grads = torch.autograd.grad(out, list(given.values()), grad)
            peak = torch.cuda.max_memory_allocated() - before
            del grads, out
        # PyTorch counts whole blocks.
        assert abs(after - kept * hidden) < 1 << 22
        # What belongs to weights and to x is small beside it.
        assert peak <= 3.5 * hidden


@pytest.mark.native
def test_compile(device: torch.device, generator: torch.Generator, compiled: Any) -> None:
    leaves = leaves_of(9, 8, 7, generator, torch.float32)
    grad = torch.randn(9, 8, device=device, generator=generator)
    for recompute in (False, True):
        call = lambda a: gemm.gated_mlp(**a, recompute=recompute)  # noqa: B023, E731
        got, wanted = (run(f, leaves, grad) for f in (compiled(call), call))
        for name, tensor in got.items():
            torch.testing.assert_close(tensor, wanted[name])


@pytest.mark.native
def test_autocast(device: torch.device, generator: torch.Generator) -> None:
    leaves = leaves_of(9, 8, 7, generator, torch.float32)
    half = {name: leaf.bfloat16() if "bias" not in name else leaf for name, leaf in leaves.items()}
    grad = torch.randn(9, 8, device=device, generator=generator)

    def cast(a: Leaves) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return gemm.gated_mlp(**a)

    got, wanted = run(cast, leaves, grad), run(lambda a: gemm.gated_mlp(**a), half, grad)
    assert got["out"].dtype is torch.bfloat16
    for name, tensor in got.items():
        assert name == "out" or tensor.dtype is torch.float32
        torch.testing.assert_close(tensor.float(), wanted[name].float(), rtol=0.02, atol=0.02)


@pytest.mark.native
@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"down_weight": torch.ones(4, 5)}, ValueError, r"gated_mlp: down_weight must have shape \[D, N\] with N = 6"),
        ({"down_weight": None}, TypeError, r"down_weight must be a torch.Tensor, got None"),
        ({"down_weight": torch.ones(4, 6).half()}, TypeError, r"x and down_weight must have one dtype"),
        (
            {"down_bias": torch.ones(5)},
            ValueError,
            r"down_bias must have shape \[D\] = \[4\] like down_weight, got \[5\]",
        ),
        ({"x": torch.ones(2, 5)}, ValueError, r"gemm.gated_mlp: gate_weight must have shape \[N, K\] with K = 5"),
    ],
)
def test_errors(change: dict[str, Any], error: type[Exception], message: str) -> None:
    ok = {"x": torch.ones(2, 4), "gate_weight": torch.ones(6, 4), "up_weight": torch.ones(6, 4)}
    with pytest.raises(error, match=message):
        gemm.gated_mlp(**(ok | {"down_weight": torch.ones(4, 6)} | change))
