"""The choice of lists or dense products under gradients, and what modules keep of it."""

import pytest
import torch

from gossamer import ffn, nn
from gossamer._core import tuning
from gossamer._core.ops import INTERPRET
from gossamer.ffn import training
from gossamer.ffn.block import Block
from gossamer.rowsparse import Density
from tests.ffn.trained import (
    TINY,
    block,
    drawn,
    leaves,
    reference,
    taken,
)


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


def test_lists_pay_where_few_entries_are_active(monkeypatch: pytest.MonkeyPatch) -> None:
    """Monotone in the entries, with the break-even that was measured on an H200."""
    monkeypatch.setattr(tuning, "rates", lambda index: tuning._H200)
    for gated, n, most in ((True, 5632, (80, 95)), (False, 8192, (95, 130))):
        found = [training.lists_are_faster(mean, 0, (16384, 2048, n, 2048), gated, 2, 0) for mean in range(300)]
        assert most[0] <= sum(found) <= most[1] and found == sorted(found, reverse=True)
    # Beside a tenth of the rows that are dense 29 entries pay, and not beside a fourth.
    found = [training.lists_are_faster(29, 0, (16384, 2048, 5632, 2048), True, 2, 0, heavy / 20) for heavy in range(6)]
    assert found[2] and not found[5] and found == sorted(found, reverse=True)
    assert not training.lists_are_faster(1.0, 0, (64, 256, 704, 256), True, 2, 0)
    # Of a trained model, with half of the entries or more in hot neurons: 28 entries pay in wide blocks alone.
    assert training.lists_are_faster(14.2, 256, (16384, 2048, 4096, 2048), True, 2, 0)
    for mean, columns in ((10.9, 256), (7.0, 256), (3.9, 192)):
        assert not training.lists_are_faster(mean, columns, (16384, 768, 2048, 768), True, 2, 0)


def test_sizes() -> None:
    """Room for what is known, by powers of two; slots for a tile's share of it."""

    def known(mean: float, over: int = 0, rows: int = 16384) -> Density:
        return Density(rows, mean, 5632, over, int(mean * rows) - 1000 * over)

    for mean, each, slots in ((29, 64, 64), (60, 128, 64), (300, 512, 64), (5000, 5632, 256)):
        assert training.sizes_for(16384, 5632, known(mean), 64) == (704, 16384 * each, slots, 64)
    assert training.sizes_for(16384, 5632, None) == (704, 16384 * 64, 64, 0)
    # Heavy rows go through dense tiles, and need no room.
    assert training.sizes_for(16384, 5632, known(40, 500))[:2] == (704, 16384 * 16)
    assert training.sizes_for(16384, 5632, known(110, 1600))[:2] == (704, 16384 * 16)
    assert training.sizes_for(5, 3, None) == (64, 16, 64, 0)
    assert training.sizes_for(1 << 28, 5632, known(60, rows=1 << 28)).room == 1 << 30
    # Columns for as many hot neurons as there were, in steps, and none for few.
    for hot, columns in ((0, 0), (7, 0), (8, 64), (64, 64), (65, 128), (900, 320)):
        assert training.columns_for(hot, 5632) == columns
    assert training.columns_for(None, 5632) == 320 and training.columns_for(None, 300) == 32


def test_light_entries() -> None:
    """Those beside the most frequent neurons, of which there are as many as columns, and which many rows have."""
    fired = torch.tensor([[900] * 5 + [30] * 295, [0] * 250 + [100 + i for i in range(50)], [500] * 300])
    light, hot = training.light_and_hot(fired, 1000, 2)
    assert hot.tolist() == [32] * 3
    # Of neurons that are equally frequent as many have columns as there are.
    assert light.tolist() == pytest.approx([268 * 30 / 1000, sum(100 + i for i in range(18)) / 1000, 268 * 0.5])
    assert training.hot_neurons(fired, 1000, 2)[2].nonzero().squeeze(1).tolist() == list(range(32))
    light, hot = training.light_and_hot(torch.full((2, 12), 7), 1000, 2)
    assert light.tolist() == pytest.approx([0.084] * 2) and hot.tolist() == [0, 0]


@pytest.mark.parametrize("dense", [0, 10])
def test_by_chance_few_neurons_of_a_random_pattern_are_hot(
    dense: int, generator: torch.Generator, device: torch.device
) -> None:
    """As few as have no columns, also beside rows that are nearly dense: every tenth."""
    x, gate = (torch.randn(rows, 16, device=device, generator=generator) for rows in (16384, 5632))
    # Every neuron is as frequent as any other.
    gate = torch.nn.functional.normalize(gate)
    bias = torch.full((5632,), -2.3, device=device)
    if dense:
        x[::dense] *= 100
    entries, hot = training.sampled_gate(Block(x, gate, bias, None, None, None, gate.t(), None, "relu"))
    light = entries[entries < 5632 // 4].float()
    assert 40 < light.mean() < 80 and hot.item() < training.WORTH
    assert (len(light) < len(entries)) == bool(dense)


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
