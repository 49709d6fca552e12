"""The gated block in all its ways."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from gossamer import ffn, gemm
from gossamer._core.ops import INTERPRET
from gossamer.ffn import costs
from gossamer.rowsparse import Density
from tests.ffn.dense import METHODS, SMALL, call, check, dense, operands, value
from tests.graphs import captured
from tests.syncs import without_a_sync


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("activation", ["relu", "relu2", "jumprelu"])
def test_matches_dense(
    method: str, activation: str, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    if INTERPRET and dtype is torch.float16 and activation != "relu2":
        pytest.skip("one activation tells what a dtype does")
    a = operands(SMALL, dtype, device, generator)
    threshold = torch.full((300,), 0.6, device=device) if activation == "jumprelu" else None
    out = call(a, activation=value(activation, threshold), method=method)
    assert out.dtype is dtype
    check(a, out, activation, threshold)


@pytest.mark.parametrize("m", [3, 20])
def test_no_biases_and_any_strides(
    m: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    a = operands((m, 25, 301, 39), dtype, device, generator)
    a = {name: a[name] for name in ("x", "gate", "up", "down")}
    a["x"] = a["x"] - 0.25
    strided = {name: t.t().contiguous().t() for name, t in a.items()}
    assert not strided["x"].is_contiguous()
    for method in ("gather",) if INTERPRET else METHODS:
        check(a, call(strided, method=method))
        apart = {name: torch.stack([t, t], 1)[:, 0] for name, t in a.items()}
        check(a, call(apart, method=method))


@pytest.mark.parametrize("method", METHODS)
def test_leading_dimensions(method: str, device: torch.device, generator: torch.Generator) -> None:
    a = operands((18, 24, 300, 40), torch.float32, device, generator)
    flat = call(a, method=method)
    assert call(a | {"x": a["x"].view(3, 6, 24)}, method=method).equal(flat.view(3, 6, 40))
    assert call(a | {"x": a["x"][0]}, method="dense").shape == (40,)


@pytest.mark.parametrize("m", [5, 20])
def test_nan_and_inf(m: int, device: torch.device, generator: torch.Generator) -> None:
    a = operands((m, 24, 300, 40), torch.float32, device, generator)
    whole = call(a, method="gather")
    a["x"][1, 3] = float("nan")
    out = call(a, method="gather")
    assert out[1].isnan().all()
    rest = torch.arange(m, device=device) != 1
    torch.testing.assert_close(out[rest], whole[rest])
    a["x"][1, 3] = 0
    z = a["x"] @ a["gate"].t() + a["gate_bias"]
    column = int((z > 0).sum(0).argmax())
    a["down"][7, column] = float("inf")
    out = call(a, method="gather")
    hit = (z > 0)[:, column]
    assert not out[hit, 7].isfinite().any()
    assert out[:, torch.arange(40, device=device) != 7].isfinite().all()


@pytest.mark.parametrize("m", [4, 33])
def test_bitwise_the_same_twice(m: int, device: torch.device, generator: torch.Generator) -> None:
    a = operands((m, 24, 300, 40), torch.float32, device, generator, shared=0.8)
    assert call(a, method="gather").equal(call(a, method="gather"))


@pytest.mark.native
@pytest.mark.parametrize("activation", ["relu", "relu2", "jumprelu"])
def test_gradients(activation: str, device: torch.device, generator: torch.Generator) -> None:
    a = operands((6, 8, 30, 5), torch.float32, device, generator, shift=0.5)
    threshold = torch.tensor(0.3, device=device) if activation == "jumprelu" else None
    leaves = {name: t.clone().requires_grad_() for name, t in a.items()}
    want = {name: t.double().requires_grad_() for name, t in a.items()}
    weight = torch.randn(6, 5, device=device, generator=generator)
    for method in METHODS:
        (call(leaves, activation=value(activation, threshold), method=method) * weight).sum().backward()
    names = ("gate_bias", "up_bias", "down_bias")
    more = {name: want[name] for name in names} | {"threshold": None if threshold is None else threshold.double()}
    out = dense(want["x"], want["gate"], want["up"], want["down"], activation, **more)
    (out * weight).sum().backward()
    for name in a:
        torch.testing.assert_close(leaves[name].grad.double(), len(METHODS) * want[name].grad, rtol=1e-4, atol=1e-4)


@pytest.mark.native
def test_gradcheck() -> None:
    a = operands((3, 4, 6, 3), torch.float64, torch.device("cpu"), torch.Generator().manual_seed(0), shift=0.3)
    leaves = [a[name].requires_grad_() for name in ("x", "gate", "up", "down")]
    assert torch.autograd.gradcheck(lambda *t: ffn.gated(*t, gate_bias=a["gate_bias"]), leaves)


@pytest.mark.native
def test_autocast(device: torch.device, generator: torch.Generator) -> None:
    a = operands(SMALL, torch.float32, device, generator)
    for method in METHODS:
        with torch.autocast(device.type, torch.bfloat16):
            out = call(a, method=method)
        assert out.dtype is torch.bfloat16
        half = {name: t if name.endswith("bias") else t.bfloat16() for name, t in a.items()}
        torch.testing.assert_close(out, call(half, method=method), rtol=0, atol=0)


def test_the_way_is_followed(device: torch.device, generator: torch.Generator) -> None:
    a, tracker = operands((18, 24, 300, 40), torch.float32, device, generator), ffn.BlockTracker(lag=1)
    for _ in range(2):
        check(a, call(a, density=tracker))
        assert tracker.last_path in METHODS
    known = tracker.rows.known(training=False)
    assert known is not None and known.rows > 0
    kept = (a["x"] @ a["gate"].t() + a["gate_bias"] > 0).sum(1)
    assert kept.min() <= known.mean <= kept.max()
    pinned = ffn.BlockTracker(pinned="gather")
    check(a, call(a, density=pinned))
    assert pinned.last_path == "gather"


def test_what_a_block_costs_follows_its_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    from gossamer.ffn import block

    asked = []
    monkeypatch.setattr(block, "_checked", type(block._checked)())
    monkeypatch.setattr(block, "costs_of", lambda *sizes: asked.append(sizes[:4]) or costs.costs_of(*sizes))
    a = operands(SMALL, torch.float32, torch.device("cpu"), torch.Generator().manual_seed(0))
    m, k, n, d = SMALL
    assert (call(a).shape, asked) == ((m, d), [(n, k, d, True)])


def test_the_cheapest_way() -> None:
    cost = costs.Costs(gate=1.0, entry=0.01, heavy=3.0, fused=2.5, dense=2.6)

    def known(mean: float, over: int = 0) -> Any:
        # Rows over the limit, 300, have 1,000 entries each.
        return Density(1000, mean, 0, over, int(1000 * mean) - 1000 * over)

    assert costs.choose_path(None, 1000, cost) == "fused"
    assert costs.choose_path(known(29), 1000, cost) == "gather"
    assert costs.choose_path(known(200), 1000, cost) == "fused"
    few = replace(cost, read=5e-6, column=2e-9, n=5632)
    assert [costs.choose_path(k, 16, few) for k in (None, known(29), known(5000))] == ["fused", "gather", "fused"]
    # From W_down by rows whole lines are read for a column each.
    rows = replace(few, by_rows=True)
    assert [costs.choose_path(known(60), 16, c) for c in (few, rows, replace(rows, line=4))] == [
        "gather",
        "fused",
        "gather",
    ]
    assert costs.choose_path(known(920, over=900), 1000, cost) == "fused"
    assert costs.choose_path(known(180, over=150), 1000, cost) == "gather"
    assert replace(cost, entry=0.001).limit == 3000
    assert costs.choose_path(known(29), 1000, replace(cost, gathers=False)) == "fused"
    # A host that takes longer to launch than the device to compute.
    quick = replace(cost, gate=1e-8, entry=1e-10, heavy=3e-8, fused=2.5e-8, dense=2.6e-8)
    assert [costs.choose_path(known(29), m, quick) for m in (1000, 100_000)] == ["fused", "gather"]
    assert [costs.choose_path(known(29), m, quick, eager=True) for m in (1000, 100_000)] == ["dense", "gather"]


def test_the_cheapest_way_on_a_cpu() -> None:
    """Large weights are gathered where the union of 16 rows is no quarter of the columns; small blocks are dense."""

    def known(mean: float) -> Any:
        return Density(1, mean, 0, 0, int(mean))

    sizes = {"large": (5632, 4096), "small": (176, 128)}
    assert [costs.on_cpu(None, m, *sizes["large"]) for m in (1, 8, 256)] == ["gather"] * 3
    assert [costs.on_cpu(known(29), m, *sizes["large"]) for m in (1, 8, 256)] == ["gather"] * 3
    assert [costs.on_cpu(known(400), m, *sizes["large"]) for m in (1, 256)] == ["gather", "fused"]
    assert [costs.on_cpu(what, m, *sizes["small"]) for what in (None, known(8)) for m in (1, 16)] == ["dense"] * 4
    assert costs.on_cpu(None, 0, *sizes["large"]) in METHODS


@pytest.mark.native
def test_compiles(compiled: Callable[..., Any], device: torch.device, generator: torch.Generator) -> None:
    a = operands(SMALL, torch.float32, device, generator)
    for method in ("auto", *METHODS):
        out = compiled(lambda a, method=method: call(a, method=method))(a)
        check(a, out)


@pytest.mark.native
@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"x": torch.ones(3, 7)}, ValueError, r"gate_weight must have shape \[N, K\] with K = 7 like x, got \[300, 24"),
        ({"up": torch.ones(4, 24)}, ValueError, r"up_weight must have shape \[N, K\] = \[300, 24\] like gate_weight"),
        (
            {"down": torch.ones(4, 24)},
            ValueError,
            r"down_weight must have shape \[D, N\] with N = 300 like gate_weight",
        ),
        ({"down_bias": torch.ones(4)}, ValueError, r"down_bias must have shape \[D\] = \[40\] like down_weight"),
        ({"up_bias": torch.ones(4)}, ValueError, r"up_bias must have shape \[N\] = \[300\] like gate_weight"),
        ({"down": torch.ones(40, 300).half()}, TypeError, "x and down_weight must have one dtype, got float32 and"),
        ({"gate": torch.ones(300, 24).int()}, TypeError, "gate_weight must be float32, float16 or bfloat16"),
        ({"activation": "silu"}, ValueError, r'activation must be "relu", "relu2" or gemm.JumpReLU.*, got \'silu\''),
        ({"activation": "jumprelu"}, ValueError, "activation must be .* got 'jumprelu'"),
        ({"activation": gemm.JumpReLU(torch.ones(4), 0.1)}, ValueError, "JumpReLU without a bandwidth"),
        ({"method": "fast"}, ValueError, "method must be one of auto, gather, fused, dense, got 'fast'"),
        ({"density": 3}, TypeError, "density must be an ffn.BlockTracker or None, got int"),
    ],
)
def test_bad_input(change: dict[str, Any], error: type[Exception], message: str) -> None:
    a = operands(SMALL, torch.float32, torch.device("cpu"), torch.Generator().manual_seed(0))
    tensors = {name: change.pop(name) for name in list(change) if name in a}
    with pytest.raises(error, match=f"^ffn.gated: .*{message}"):
        call(a | tensors, **change)


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [0.0, 0.9])
@pytest.mark.parametrize("shift", [0.0, 1.0, 2.5])
def test_many_rows(shift: float, shared: float, device: torch.device, generator: torch.Generator) -> None:
    """Every way at a size at which Hopper has kernels of its own: all rows heavy, some, and none."""
    a = operands((4500, 256, 1032, 272), torch.bfloat16, device, generator, shift, shared)
    a["x"][7::50] *= 16
    a["x"][4000] = 0
    for method in ("auto", *METHODS):
        for activation in ("relu", "relu2"):
            out = call(a, method=method, activation=activation)
            check(a, out, activation)
            assert out.equal(call(a, method=method, activation=activation))


@pytest.mark.full
@pytest.mark.native
def test_a_million_rows(device: torch.device, generator: torch.Generator) -> None:
    """Some of which are heavy. On a GPU the hidden activations are more than 2^31."""
    gpu = device.type == "cuda"
    shape = ((1 << 20) + 5, 16, 2056 if gpu else 72, 16)
    a = operands(shape, torch.bfloat16 if gpu else torch.float32, device, generator)
    a["x"][11::4096] *= 16
    some = torch.arange(0, shape[0], 1021, device=device)
    some = torch.cat([some, torch.arange(11, shape[0], 4096, device=device), some.new_tensor([shape[0] - 1])])
    for method in ("auto", *METHODS):
        check({**a, "x": a["x"][some]}, call(a, method=method)[some])


@pytest.mark.gpu
def test_captured(device: torch.device, generator: torch.Generator) -> None:
    for m in (5, 300, 4500):
        a = operands((m, 256, 1032, 272), torch.bfloat16, device, generator, 1.5)
        for method in ("auto", *METHODS):
            graph, out = captured(lambda a=a, method=method: call(a, method=method))
            a["x"].neg_()
            graph.replay()
            check(a, out)


@pytest.mark.gpu
def test_no_wait(device: torch.device, generator: torch.Generator) -> None:
    a, tracker = operands((300, 256, 1032, 272), torch.bfloat16, device, generator, 1.5), ffn.BlockTracker(lag=50)
    for method in ("auto", *METHODS):
        call(a, method=method)
    with without_a_sync():
        for method in ("auto", *METHODS):
            call(a, method=method)
        call(a, density=tracker)
