"""gemm.gated_mlp, against the same in dense float64."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer import gemm
from gossamer.gemm._torch import linear_glu as usual
from gossamer.gemm._torch.linear_glu import GATES
from gossamer.testing import assert_close
from tests.gemm.gated import Leaves, leaves_of, needing


def operands(
    m: int, n: int, k: int, generator: torch.Generator, dtype: torch.dtype = torch.float32, **options: Any
) -> Leaves:
    return needing(leaves_of(m, n, k, generator, dtype, operator="gated_mlp", **options))


def test_hooks_keep_what_they_saw(device: torch.device, generator: torch.Generator) -> None:
    """Gradients take the places of gate and up only where nobody else may have the two."""
    leaves = operands(9, 8, 7, generator)
    seen: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        out = gemm.gated_mlp(**leaves)
    before = [tensor.clone() for tensor in seen]
    first = torch.autograd.grad(out.sum(), list(leaves.values()))
    assert all(torch.equal(a, b) for a, b in zip(seen, before))
    second = torch.autograd.grad(gemm.gated_mlp(**leaves).sum(), list(leaves.values()))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_hooks_may_give_another_layout(device: torch.device, generator: torch.Generator) -> None:
    leaves = operands(9, 8, 7, generator)
    wanted = torch.autograd.grad(gemm.gated_mlp(**leaves).sum(), list(leaves.values()))
    by_columns = lambda t: t.t().contiguous().t() if t.dim() == 2 else t  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, by_columns):
        out = gemm.gated_mlp(**leaves)
    for got, want in zip(torch.autograd.grad(out.sum(), list(leaves.values())), wanted):
        torch.testing.assert_close(got, want)


@pytest.mark.native
def test_compiled_backward_twice_is_right(device: torch.device, generator: torch.Generator) -> None:
    """With the backend that leaves what is traced as it is, and so overwrites what the graph keeps."""
    leaves = operands(9, 8, 7, generator)
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


@pytest.mark.gpu
def test_memory_of_a_step(generator: torch.Generator) -> None:
    """At its peak a backward pass holds at most three times what is gated: gate and up, which become their gradients,
    and what they gated, or parts of it. With `recompute` it is the same, and nothing before."""
    given = operands(4096, 4096, 512, generator, torch.bfloat16, bias=False)
    grad, hidden = torch.randn(4096, 512, device="cuda").bfloat16(), 4096 * 4096 * 2
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
