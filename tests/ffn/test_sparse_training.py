"""A sparse block under gradients, on lists of its active entries."""

from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gossamer import ffn
from gossamer._core.ops import INTERPRET
from gossamer.ffn.records import SparseTraining
from gossamer.ffn.sparse_training import sparse_training
from tests.ffn.dense import operands
from tests.ffn.trained import (
    BIASES,
    SMALL,
    TINY,
    block,
    check,
    drawn,
    gradients,
    leaves,
    operator_arguments,
    reference,
    taken,
)
from tests.graphs import captured
from tests.syncs import without_a_sync


@pytest.mark.parametrize("activation", ["relu", "relu2"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("shift", [0.75, 2.0, 5.0])
def test_gradients(
    gated: bool, activation: str, shift: float, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    a, grad = drawn(SMALL, dtype, device, generator, shift)
    check(taken(a, gated), grad, activation)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (33, 7, 65, 3), (5, 16, 513, 8), (64, 40, 31, 24)])
def test_odd_sizes(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    a, grad = drawn(shape, dtype, device, generator, 1.0)
    check({name: t for name, t in a.items() if name not in BIASES[1:]}, grad)


def test_threshold(device: torch.device, generator: torch.Generator) -> None:
    a, grad = drawn(SMALL, torch.float32, device, generator, 1.0)
    del a["gate_bias"]
    check(a, grad, threshold=torch.rand(SMALL[2], device=device, generator=generator))


@pytest.mark.parametrize("gated", [True, False])
def test_penalty_and_counts(gated: bool, device: torch.device, generator: torch.Generator) -> None:
    """The L1 penalty is the sum over neurons and the mean over rows, heavy rows included, and has its gradient."""
    m = 20 if INTERPRET else 41
    a, grad = drawn((m, 24, 70, 20), torch.float32, device, generator, 1.0)
    a = taken(a, gated)
    for limit in (300, 6):
        ours, wide = leaves(a), leaves(a, torch.float64)
        out, l1, nnz, fired, *_ = sparse_training(SparseTraining(*operator_arguments(ours, limit, 2000)))
        names = [name for name in a if name != "down_bias"]
        hidden = torch.relu(wide["x"] @ wide["gate"].t() + wide["gate_bias"])
        active = hidden > 0
        if gated:
            hidden = hidden * (wide["x"] @ wide["up"].t() + wide["up_bias"])
        exact = hidden.abs().sum() / m
        assert nnz.tolist() == active.sum(1).tolist() and fired.tolist() == active.sum(0).tolist()
        torch.testing.assert_close(l1.double(), exact.detach(), rtol=1e-6, atol=1e-6)
        for scale, of_out in ((3.0, 1.0), (2.0, 0.0)):
            loss = scale * l1 + (of_out * (out * grad).sum() if of_out else 0)
            down = wide["down"]
            whole = scale * exact + of_out * ((hidden @ down.t() + wide["down_bias"]) * grad.double()).sum()
            got = torch.autograd.grad(loss, [ours[name] for name in names], retain_graph=True)
            want = torch.autograd.grad(whole, [wide[name] for name in names], retain_graph=True)
            for name, result, exactly in zip(names, got, want, strict=True):
                torch.testing.assert_close(result.double(), exactly, rtol=2e-5, atol=2e-5, msg=name)


@hypothesis.settings(max_examples=3 if INTERPRET else 12)
@hypothesis.given(
    m=st.integers(1, 20 if INTERPRET else 70), n=st.integers(1, 70 if INTERPRET else 300), k=st.integers(1, 20),
    shift=st.sampled_from([-9.0, 0.0, 0.5, 1.5, 9.0]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_any_density(m: int, n: int, k: int, shift: float, seed: int, device: torch.device) -> None:
    a, grad = drawn((m, k, n, 8), torch.float32, device, torch.Generator(device).manual_seed(seed), shift)
    check(a, grad)


def test_same_bits_twice_and_accumulated(device: torch.device, generator: torch.Generator) -> None:
    a, grad = drawn(TINY if INTERPRET else (70, 24, 300, 40), torch.float32, device, generator, 1.0)
    a["x"][7] *= 64
    ours = leaves(a)
    first, second = (gradients(ours, block(ours), grad) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    for _ in range(2):
        (block(ours) * grad).sum().backward()
    for name, leaf in ours.items():
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, 2 * first[name])


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant: bool, device: torch.device, generator: torch.Generator) -> None:
    a, grad = drawn(TINY, torch.float32, device, generator, 1.0)
    ours = leaves(a)
    want = gradients(ours, block(ours), grad)
    (checkpoint(lambda x: block(ours | {"x": x}), ours["x"], use_reentrant=reentrant) * grad).sum().backward()
    for name, leaf in ours.items():
        assert torch.equal(leaf.grad, want[name])  # type: ignore[arg-type]


def test_gradients_lie_as_their_weights(device: torch.device, generator: torch.Generator) -> None:
    """In memory, so that nothing is copied when they are accumulated."""
    a, grad = drawn(SMALL, torch.float32, device, generator, 1.0)
    for turned in (False, True):
        ours = leaves(a | {"down": a["down"].t().contiguous().t()} if turned else a)
        found = gradients(ours, block(ours), grad)
        assert all(found[name].stride() == leaf.stride() for name, leaf in ours.items()), turned
        torch.testing.assert_close(found, gradients(want := leaves(a), block(want), grad))


def test_only_some_operands_need_gradients(device: torch.device, generator: torch.Generator) -> None:
    a, grad = drawn(TINY, torch.float32, device, generator, 1.0)
    want = gradients(ours := leaves(a), block(ours), grad)
    for name in a:
        some = dict(a) | {name: a[name].clone().requires_grad_()}
        assert torch.equal(torch.autograd.grad(block(some), some[name], grad)[0], want[name])


@pytest.mark.native
def test_autocast(device: torch.device, generator: torch.Generator) -> None:
    a, grad = drawn(SMALL, torch.float32, device, generator, 1.0)
    ours = leaves(a)
    with torch.autocast(device.type, torch.bfloat16):
        out = block(ours)
    got = gradients(ours, out, grad)
    assert out.dtype is torch.bfloat16
    exact = gradients(wide := leaves(a, torch.float64), reference(wide), grad)
    for name in ("x", "gate", "up", "down"):
        assert got[name].dtype is torch.float32
        assert (got[name].double() - exact[name]).norm() < 2e-2 * exact[name].norm()


@pytest.mark.native
def test_gradcheck() -> None:
    a = operands((5, 4, 12, 3), torch.float64, torch.device("cpu"), torch.Generator().manual_seed(3), 0.4)
    names = list(a)
    assert torch.autograd.gradcheck(
        lambda *t: block(dict(zip(names, t, strict=True))), [t.clone().requires_grad_() for t in a.values()]
    )


@pytest.mark.native
def test_compiled_whole(device: torch.device, generator: torch.Generator) -> None:
    a, grad = drawn(SMALL, torch.float32, device, generator, 1.0)
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    ours = leaves(a)
    compiled = torch.compile(lambda **t: block(t), backend=backend, fullgraph=True)
    want, got = gradients(ours, block(ours), grad), gradients(ours, compiled(**ours), grad)
    for name, result in got.items():
        torch.testing.assert_close(result, want[name])


@pytest.mark.gpu
def test_captured(device: torch.device, generator: torch.Generator) -> None:
    a, grad = drawn((256, 64, 512, 64), torch.bfloat16, device, generator, 2.0)
    a["x"][7] *= 64
    ours = leaves(a)

    def step() -> list[Tensor]:
        return list(gradients(ours, block(ours), grad).values())

    graph, out = captured(step)
    for seed in range(3):
        fresh, _ = drawn((256, 64, 512, 64), torch.bfloat16, device, torch.Generator(device).manual_seed(seed), 1.5)
        with torch.no_grad():
            ours["x"].copy_(fresh["x"])
            ours["x"][9] *= 64
        graph.replay()
        for got, want in zip(out, step(), strict=True):
            assert torch.equal(got, want)


@pytest.mark.gpu
def test_a_forward_pass_compiles_for_both(
    device: torch.device, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of the backward pass are compiled beside those of the forward pass, with a penalty and without."""
    from gossamer._core.launch import Kernel

    compiled, original = [], Kernel._keep

    def keep(kernel: Kernel, *args: Any) -> Any:
        compiled.append(kernel)
        return original(kernel, *args)

    monkeypatch.setattr(Kernel, "_keep", keep)
    # No other test has this dtype with these sizes.
    a, grad = drawn((256, 48, 464, 80), torch.float16, device, generator, 2.0)
    ours = leaves(a)
    first, (second, activity) = block(ours), block(ours, with_activity=True)
    assert compiled
    compiled.clear()
    gradients(ours, first, grad)
    gradients(ours, second + activity.l1, grad)
    assert not compiled


@pytest.mark.gpu
def test_no_wait(device: torch.device, generator: torch.Generator) -> None:
    a, grad = drawn((256, 64, 512, 64), torch.bfloat16, device, generator, 2.0)
    ours, tracker = leaves(a), ffn.BlockTracker()
    for method, density in (("gather", None), ("auto", tracker)):
        gradients(ours, block(ours, method=method, density=density), grad)
        torch.cuda.synchronize()
        with without_a_sync():
            gradients(ours, block(ours, method=method, density=density), grad)


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [True, False])
def test_large(gated: bool, device: torch.device, generator: torch.Generator) -> None:
    """At full sizes: rows that are dense, neurons that are, and a burst that no room was made for."""
    shape = (4096, 1024, 3072, 1024)
    for shift in (10.0, 5.0):
        a, grad = drawn(shape, torch.bfloat16, device, generator, shift)
        a["x"][:, 0], a["gate"][:, 0] = 0, 1
        a["x"][::40, 0] = 32
        a["gate_bias"][::500] = 30.0
        check(taken(a, gated), grad)
