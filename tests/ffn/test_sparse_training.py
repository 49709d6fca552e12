"""A sparse block under gradients, on lists of its active entries."""

from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gossamer import ffn, gemm, nn
from gossamer._core import tuning
from gossamer._core.ops import INTERPRET
from gossamer.ffn import training
from gossamer.ffn.records import SparseTraining
from gossamer.ffn.sparse_training import sparse_training
from gossamer.testing import assert_close
from tests.ffn.dense import SMALL as LARGER
from tests.ffn.dense import dense, operands

SMALL = (20, 16, 70, 12) if INTERPRET else LARGER
"""M, K, N, D. The interpreter takes seconds for each of a call's ten kernels."""
TINY = (10, 8, 36, 6)
"""For tests that compute a block many times, and compare it with itself."""
BIASES = ("gate_bias", "up_bias", "down_bias")


def taken(a: dict[str, Tensor], gated: bool) -> dict[str, Tensor]:
    """The operands of a block that take part."""
    return {name: t for name, t in a.items() if gated or not name.startswith("up")}


def block(a: dict[str, Tensor], activation: Any = "relu", **options: Any) -> Tensor:
    options = {"method": "gather", "activation": activation} | options
    if "up" in a:
        biases = {name: a.get(name) for name in BIASES}
        return ffn.gated(a["x"], a["gate"], a["up"], a["down"], **biases, **options)
    return ffn.plain(a["x"], a["gate"], a["down"], up_bias=a.get("gate_bias"), down_bias=a.get("down_bias"), **options)


def reference(a: dict[str, Tensor], activation: str = "relu", threshold: Tensor | None = None) -> Tensor:
    more = {name: a.get(name) for name in BIASES} | {"threshold": threshold}
    return dense(a["x"], a["gate"], a.get("up"), a["down"], activation, **more)


def leaves(a: dict[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    return {name: t.detach().to(dtype or t.dtype).clone().requires_grad_() for name, t in a.items()}


def gradients(a: dict[str, Tensor], out: Tensor, grad: Tensor) -> dict[str, Tensor]:
    found = torch.autograd.grad(out, list(a.values()), grad.to(out.dtype))
    return {"out": out.detach(), **dict(zip(a, found, strict=True))}


def check(a: dict[str, Tensor], grad: Tensor, activation: str = "relu", threshold: Tensor | None = None) -> None:
    """Result and gradients within their budgets."""
    value = activation if threshold is None else gemm.JumpReLU(threshold)
    ours, plain, wide = leaves(a), leaves(a), leaves(a, torch.float64)
    wide_threshold = None if threshold is None else threshold.double()
    got = gradients(ours, block(ours, value), grad)
    usual = gradients(plain, reference(plain, activation, threshold), grad)
    want = gradients(wide, reference(wide, activation, wide_threshold), grad)
    rows, magnitude = a["x"].shape[0], {name: t.square().mean().sqrt() for name, t in want.items()}
    for name, result in got.items():
        # Of so few elements the error of plain PyTorch may be small by luck.
        assert_close(
            result, reference64=want[name], plain=usual[name], factor=3.0, length=max(rows, a["gate"].shape[0]),
            magnitude=magnitude[name], name=name,
        )  # fmt: skip


def drawn(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, generator: torch.Generator,
    shift: float = 2.0,
) -> tuple[dict[str, Tensor], Tensor]:  # fmt: skip
    a = operands(shape, dtype, device, generator, shift)
    return a, torch.randn(shape[0], shape[3], device=device, generator=generator).to(dtype)


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


def test_dense_rows_and_dense_neurons(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    m, n = (40, 80) if INTERPRET else (140, 300)
    a, grad = drawn((m, 24, n, 40), dtype, device, generator, 3.0)
    a["x"][:, 0], a["gate"][:, 0] = 0, 1
    a["x"][[3, 17, 18, m - 1], 0] = 8
    a["gate_bias"][[5, n - 50]] = 9.0
    a["x"][20] = 0
    check(a, grad)


def test_threshold(device: torch.device, generator: torch.Generator) -> None:
    a, grad = drawn(SMALL, torch.float32, device, generator, 1.0)
    del a["gate_bias"]
    check(a, grad, threshold=torch.rand(SMALL[2], device=device, generator=generator))


def operator_arguments(a: dict[str, Tensor], limit: int, room: int, slots: int = 256) -> tuple[Any, ...]:
    weights = (a["x"], a["gate"], a.get("gate_bias"), None, a.get("up"), a.get("up_bias"), a["down"])
    return *weights, a.get("down_bias"), False, limit, room, slots


@pytest.mark.parametrize("limit, room, slots", [(6, 1600, 256), (300, 160, 256), (300, 1600, 1), (0, 16, 16)])
@pytest.mark.parametrize("gated", [True, False])
def test_rows_in_no_list(
    gated: bool, limit: int, room: int, slots: int, device: torch.device, generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Too many entries for a row, for the buffer and for a tile: such rows are computed all the same, in turns."""
    if device.type == "cuda" or INTERPRET:
        from gossamer.ffn._triton import heavy as kernels
        from gossamer.ffn._triton import train_heavy

        for module in (kernels, train_heavy):
            monkeypatch.setattr(module, "reserved", lambda *_: 16)
    a, grad = drawn((41, 24, 70, 20), torch.float32, device, generator, 1.0)
    a = taken(a, gated)
    counts = (a["x"] @ a["gate"].t() + a["gate_bias"] > 0).sum(1)
    ours, wide = leaves(a), leaves(a, torch.float64)
    out, _, nnz, fired, _, _, offsets, heavy, _ = sparse_training(
        SparseTraining(*operator_arguments(ours, limit, room, slots))
    )
    listed = heavy[1 : 1 + int(heavy[0])]
    assert nnz.tolist() == counts.tolist() and int(fired.sum()) == int(counts.sum())
    # On the CPU a tile has slots for all.
    assert (listed.numel() > 0 or slots == 1) and listed.tolist() == sorted(listed.tolist())
    held = offsets.diff()
    assert (held[listed] == 0).all()
    others = torch.ones_like(counts, dtype=torch.bool)
    others[listed] = False
    assert (held == counts)[others].all() and int(offsets[-1]) <= room
    if limit < 300:
        assert others.tolist() == (counts <= limit).tolist()
    got = gradients(ours, out, grad)
    want = gradients(wide, reference(wide), grad)
    for name, result in got.items():
        torch.testing.assert_close(result.double(), want[name], rtol=2e-5, atol=2e-5)


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


@pytest.mark.parametrize("method", ["gather", "dense"])
@pytest.mark.parametrize("gated", [True, False])
def test_activity(gated: bool, method: str, device: torch.device, generator: torch.Generator) -> None:
    """Every way hands out the same, with gradients and without."""
    a = taken(drawn((2 * 17, 24, 300, 40), torch.float32, device, generator, 1.0)[0], gated)
    gate = torch.relu(a["x"] @ a["gate"].t() + a["gate_bias"])
    hidden = gate * (a["x"] @ a["up"].t() + a["up_bias"]) if gated else gate
    a["x"] = a["x"].view(2, 17, 24)
    counts = (gate > 0).sum(1)
    sizes = training.sizes_for(34, 300, None)
    kept = torch.where(counts > sizes.limit, 0, counts)
    unlisted = int((counts > 0).sum() - ((kept > 0) & (kept.cumsum(0) <= sizes.room)).sum())
    assert unlisted > 5
    for given in (a, leaves(a)):
        out, activity = block(given, method=method, with_activity=True)
        torch.testing.assert_close(out.flatten(0, 1), reference(a | {"x": a["x"].flatten(0, 1)}), rtol=1e-4, atol=1e-4)
        assert isinstance(activity, ffn.Activity) and activity.l1.requires_grad == out.requires_grad
        torch.testing.assert_close(activity.l1.detach(), hidden.abs().sum() / 34)
        torch.testing.assert_close(activity.l0, (gate > 0).sum() / 34)
        assert activity.fired.tolist() == (gate > 0).sum(0).tolist()
        # Of a tile, a GPU has slots for some entries alone.
        on_lists = method == "gather" and out.requires_grad
        assert not on_lists or device.type == "cuda" or INTERPRET or activity.unlisted == unlisted
        assert activity.unlisted >= unlisted if on_lists else activity.unlisted == 0


@pytest.mark.parametrize("method", ["auto", "gather"])
def test_module_in_training(method: str, device: torch.device, generator: torch.Generator) -> None:
    module = nn.GatedMLP(24, 300, "relu", method=method, device=device)
    _, activity = nn.MLP(24, 300, "relu", method=method, l1=True, device=device)(torch.randn(5, 24, device=device))
    assert activity.l1.requires_grad and 0 < float(activity.l0) < 300
    x, grad = (torch.randn(3, 11, 24, device=device, generator=generator) for _ in range(2))
    got = torch.autograd.grad(module(x.requires_grad_()), [x, *module.parameters()], grad)
    module.method = "dense"
    want = torch.autograd.grad(module(x), [x, *module.parameters()], grad)
    assert module.last_path == ("fused" if method == "auto" else "gather")
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


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

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for seed in range(3):
        fresh, _ = drawn((256, 64, 512, 64), torch.bfloat16, device, torch.Generator(device).manual_seed(seed), 1.5)
        with torch.no_grad():
            ours["x"].copy_(fresh["x"])
            ours["x"][9] *= 64
        graph.replay()
        for got, want in zip(out, step(), strict=True):
            assert torch.equal(got, want)


@pytest.mark.gpu
def test_no_wait(device: torch.device, generator: torch.Generator) -> None:
    a, grad = drawn((256, 64, 512, 64), torch.bfloat16, device, generator, 2.0)
    ours, tracker = leaves(a), ffn.BlockTracker()
    for method, density in (("gather", None), ("auto", tracker)):
        gradients(ours, block(ours, method=method, density=density), grad)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            gradients(ours, block(ours, method=method, density=density), grad)
        finally:
            torch.cuda.set_sync_debug_mode("default")


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


def test_auto_follows_its_tracker(device: torch.device, generator: torch.Generator) -> None:
    """Dense until something is known, and then what pays; the device's counts arrive without a wait."""
    shape = TINY if INTERPRET else (64, 24, 300, 40)
    a, grad = drawn(shape, torch.float32, device, generator, 3.0)
    tracker, pays = ffn.BlockTracker(lag=2), training.pays
    ours, ways = leaves(a), []
    try:
        training.pays = lambda known, *_: known is not None and known.mean < 20
        for _ in range(5):
            out = block(ours, method="auto", density=tracker)
            (out * grad).sum().backward()
            ways.append(tracker.last_path)
    finally:
        training.pays = pays
    assert ways == ["fused", "fused", "gather", "gather", "gather"]
    known = tracker.rows.known(training=True)
    assert known is not None and known.rows == shape[0]


def test_bursts_in_the_middle_of_training(device: torch.device, generator: torch.Generator) -> None:
    """Steps in which all rows, one in three, or one neuron of all rows are active, between others: the weights stay
    those of dense training, and lists go on with the size that they had."""
    m, n = (40, 80) if INTERPRET else (140, 300)
    wide = nn.GatedMLP(24, n, "relu", bias=True, dtype=torch.float64, device=device)
    with torch.no_grad():
        wide.gate_proj.bias.fill_(-1.5)
        wide.gate_proj.weight[:, 0] = 1
    ours = nn.GatedMLP(24, n, "relu", bias=True, method="auto", l1=True, device=device)
    ours.load_state_dict(wide.state_dict())
    ours.density.rows.pinned = "gather"
    unlisted: dict[int, int] = {}
    optimizers = [torch.optim.SGD(block.parameters(), lr=1e-3) for block in (ours, wide)]
    for step in (2, 4, 5) if INTERPRET else range(7):
        x = torch.randn(m, 24, device=device, generator=generator)
        x[:, 0] = 8.0 if step == 2 else 0.0
        x[:: 1 if step == 2 else 3, 0] = 8.0 * (step in (2, 4))
        for block in (ours, wide):
            with torch.no_grad():
                block.gate_proj.bias[7] = 9.0 if step == 5 else -1.5
        out, activity = ours(x)
        (out.square().mean() + 1e-3 * activity.l1).backward()
        gate = torch.relu(wide.gate_proj(x.double()))
        hidden = gate * wide.up_proj(x.double())
        (wide.down_proj(hidden).square().mean() + 1e-3 * hidden.abs().sum() / m).backward()
        unlisted[step] = int(activity.unlisted)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, a), b in zip(ours.named_parameters(), wide.parameters()):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4, msg=f"{name}, step {step}")
        # The rounding of one step is not carried into the next.
        ours.load_state_dict(wide.state_dict())
    assert unlisted[2] > 0.8 * m and unlisted[4] > 0.3 * m
    if not INTERPRET:
        assert unlisted[0] == unlisted[6] == 0


def test_lists_pay_where_few_entries_are_active(monkeypatch: pytest.MonkeyPatch) -> None:
    """Monotone in the entries, with the break-even that was measured on an H200."""
    monkeypatch.setattr(tuning, "rates", lambda index: tuning._H200)
    for gated, n, most in ((True, 5632, (70, 85)), (False, 8192, (95, 120))):
        found = [training.lists_are_faster(mean, (16384, 2048, n, 2048), gated, 2, 0) for mean in range(300)]
        assert most[0] <= sum(found) <= most[1] and found == sorted(found, reverse=True)
    assert not training.lists_are_faster(1.0, (64, 256, 704, 256), True, 2, 0)


def test_sizes() -> None:
    """Room for what is known, by powers of two; slots for a tile's share of it."""
    for mean, each, slots in ((None, 64, 16), (29, 64, 16), (60, 128, 16), (300, 512, 64), (5000, 5632, 256)):
        assert training.sizes_for(16384, 5632, mean) == (256, 16384 * each, slots)
    assert training.sizes_for(5, 3, None) == (64, 16, 16)
    assert training.sizes_for(1 << 28, 5632, 60).room == 1 << 30


def test_second_derivatives_are_refused(device: torch.device, generator: torch.Generator) -> None:
    ours = leaves(drawn(SMALL, torch.float32, device, generator, 1.0)[0])
    with pytest.raises(NotImplementedError, match=r"ffn.gated: second derivatives are not implemented"):
        torch.autograd.grad(block(ours).sum(), list(ours.values()), create_graph=True)
