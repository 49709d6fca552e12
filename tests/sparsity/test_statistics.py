"""sparsity.report and sparsity.Recorder, against counts by their definition."""

import importlib
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gossamer import nn, sparsity
from gossamer.sparsity import LayerStatistics, statistics
from gossamer.sparsity.report import Measured
from tests.syncs import without_a_sync


class Model(torch.nn.Module):
    """Two blocks over embedded tokens, the second without a gate."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(11, 16, device=device)
        self.first = nn.GatedMLP(16, 40, activation="relu", bias=True, method="auto", device=device)
        self.second = nn.MLP(16, 24, "relu2", bias=True, method="auto", device=device)
        with torch.no_grad():
            self.first.gate_proj.bias.fill_(-0.5)[7] = -100.0
            self.second.up_proj.bias.fill_(-0.7)[:3] = -100.0

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embedding(input_ids)
        return self.second(x + self.first(x))


def active(model: Model, ids: Tensor) -> dict[str, Tensor]:
    """Which neurons fire, `[B, T, N]`, by the layers themselves."""
    x = model.embedding(ids)
    first = F.relu(model.first.gate_proj(x))
    y = x + model.first.down_proj(first * model.first.up_proj(x))
    return {"first": first > 0, "second": model.second.up_proj(y) > 0}


def batches(device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(11, shape, generator=generator).to(device) for shape in ((3, 50), (2, 70), (1, 5))]


def test_counts(device: torch.device) -> None:
    model, given, done = Model(device), batches(device), []
    report = sparsity.report(model, given, measure=False, progress=lambda *step: done.append(step))
    got = report.layers
    assert done == [(1, 3), (2, 3), (3, 3)] and list(got) == ["first", "second"]
    with torch.no_grad():
        wanted = [active(model, ids) for ids in given]
    for name, n in (("first", 40), ("second", 24)):
        found, bits = got[name], [w[name] for w in wanted]
        entries = torch.cat([b.sum(2).flatten() for b in bits])
        assert found.num_neurons == n and found.tokens == 295 == found.position_tokens.sum()
        assert torch.equal(found.histogram, torch.bincount(entries, minlength=n + 1))
        assert found.mean == pytest.approx(entries.double().mean().item()) and found.max == entries.max()
        assert found.quantile(0.5) == entries.sort().values[(295 + 1) // 2 - 1]
        fired = sum(b.flatten(0, 1).sum(0) for b in bits)
        assert torch.equal(found.fired, fired) and found.dead == (fired == 0).sum() >= (1 if n == 40 else 3)
        for position in (0, 4, 49, 69):
            held = torch.cat([b[:, position].sum(1) for b in bits if b.shape[1] > position])
            assert report.positions(name)[position] == pytest.approx(held.double().mean().item())
        ids = torch.cat([i.flatten() for i in given])
        assert len(report.tokens(name)) == 11
        for token, often, mean in report.tokens(name):
            assert often == (ids == token).sum()
            assert mean == pytest.approx(entries[ids == token].double().mean().item())


def test_what_a_mask_leaves_out_is_not_counted(device: torch.device) -> None:
    model, ids = Model(device), batches(device)[0]
    mask = torch.ones_like(ids)
    mask[0, 20:] = mask[2] = 0
    found = sparsity.report(model, [{"input_ids": ids, "attention_mask": mask}], measure=False).layers["first"]
    with torch.no_grad():
        bits = active(model, ids)["first"][mask != 0]
    assert found.tokens == 70 and torch.equal(found.fired, bits.sum(0))
    assert found.position_tokens.tolist() == [2] * 20 + [1] * 30 and found.token_tokens.sum() == 70
    assert torch.equal(found.histogram, torch.bincount(bits.sum(1), minlength=41))


def test_many_rows_in_parts(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = Model(device), batches(device)
    whole = sparsity.report(model, given, measure=False).layers
    monkeypatch.setattr(statistics, "_ELEMENTS", 40 * 64)
    for name, found in sparsity.report(model, given, measure=False).layers.items():
        for got, want in zip(vars(found).values(), vars(whole[name]).values(), strict=True):
            assert torch.equal(got, want)


def test_recording_changes_nothing(device: torch.device) -> None:
    model, ids = Model(device), batches(device)[0]
    with torch.no_grad():
        plain = model(ids)
        with sparsity.Recorder(model) as recorder:
            assert torch.equal(model(ids), plain)
            with pytest.raises(ValueError, match=r"sparsity\.Recorder: nothing else may listen .* does to 'first'"):
                sparsity.report(model, [ids])
        # Positions are known of [B, T, K], tokens only of a batch.
        assert recorder.layers["first"].position_tokens.tolist() == [3] * 50
        assert not recorder.layers["first"].token_tokens.any()
        with pytest.warns(UserWarning, match="no call reached one of 2"), sparsity.Recorder(model) as other:
            pass
        assert not other.layers and model.first.sparse_block.observer is None
    # Where a gradient is needed a block is dense, and counted as well; once where it is computed again.
    for step in (lambda: model(ids), lambda: checkpoint(model, ids, use_reentrant=False).sum().backward()):
        with sparsity.Recorder(model) as other:
            step()
        assert list(other.layers) == list(recorder.layers)
        for name, found in other.layers.items():
            assert found.histogram.equal(recorder.layers[name].histogram)
            assert found.fired.equal(recorder.layers[name].fired)


def test_empty() -> None:
    found = LayerStatistics.empty(6, "cpu", 3)
    assert math.isnan(found.mean) and found.tokens == found.max == 0 and found.dead == 6
    found.add(torch.zeros(0, 6, dtype=torch.bool), None, None, None)
    found.add(torch.zeros(2, 6, dtype=torch.bool), None, None, None)
    assert found.mean == 0 and found.max == 0 and found.tokens == 2


def test_report(device: torch.device, tmp_path: Path) -> None:
    model, given = Model(device), batches(device)
    report = sparsity.report(model, given, names=lambda token: f"<{token}$")
    rows = report.table()
    assert [row["layer"] for row in rows] == ["first", "second"]
    for row, (name, found) in zip(rows, report.layers.items(), strict=True):
        assert (row["mean"], row["max"], row["dead"]) == (found.mean, found.max, found.dead)
        assert (row["p10"], row["speed-up"], row["p90"]) == report.measured[name].ratios
        assert min(row["dense"], row["sparse"]) > 0 and 0 < row["p10"] <= row["speed-up"] <= row["p90"]
        assert report.measured[name].path == row["path"] in ("gather", "fused", "dense")
    tokens = report.tokens()
    assert sorted(t for t, *_ in tokens) == list(range(11)) and [m for *_, m in tokens] == sorted(m for *_, m in tokens)
    assert all(often == sum((ids == token).sum() for ids in given) for token, often, _ in tokens)
    # Less than a tenth of the tokens is not common.
    assert all(often >= 29.5 for _, often, _ in report.tokens(common=0.1)) and len(report.tokens(common=0.1)) < 11
    both = torch.stack([report.positions(name) for name in report.layers]).mean(0)
    torch.testing.assert_close(report.positions(), both)
    report.save(tmp_path / "report")
    content = json.loads((tmp_path / "report" / "report.json").read_text())
    assert content["layers"][0]["mean"] == report.layers["first"].mean and len(content["tokens"]) == 11
    assert content["positions"] == report.positions().tolist()
    text = (tmp_path / "report" / "report.txt").read_text()
    assert f"tokens with the fewest entries: '<{tokens[0][0]}$' {tokens[0][2]:.1f}" in text
    assert report.verdict in text and content["verdict"] == report.verdict
    with pytest.raises(ValueError, match=r"layer must be one of 'first', 'second', got 'third'"):
        report.tokens("third")


def test_what_a_layer_gets_is_what_is_timed(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each block its own way and the dense one, on its own input; and nothing without `measure`."""
    ways: list[Any] = []

    def pairs(sparse: Any, dense: Any, where: torch.device) -> Any:
        outs = [sparse(), dense()]
        torch.testing.assert_close(outs[0], outs[1], rtol=1e-4, atol=1e-5)
        ways.append(outs[0].shape)
        return ((1.0, 3.0),) * 3

    monkeypatch.setattr(importlib.import_module("gossamer.sparsity.report"), "pairs", pairs)
    report = sparsity.report(Model(device), batches(device))
    assert [times.ratios[1] for times in report.measured.values()] == [3.0, 3.0] and ways == [(1, 5, 16)] * 2
    report = sparsity.report(Model(device), batches(device), measure=False)
    assert not report.measured and "path" not in report.table()[0] and len(ways) == 2


@pytest.mark.parametrize(
    "times, noise, said",
    [
        ([3.0, 1.0, 1.0], 0.0, "This model gains: plain PyTorch takes 1.67 times as long .* 1 of 3 layers gain. "),
        ([3.0, 1.0, 1.0], 0.3, r"This model gains: .* \(1.28 to 2.17 in eight of ten .* 1 of 3 layers gain. "),
        ([1.0, 0.5, 0.7], 0.0, "This model does not gain: plain PyTorch takes 0.73 times .* 0 of 3 layers gain. "),
        (
            [1.0, 1.02, 1.0],
            0.0,
            "This model gains nothing and loses nothing: plain PyTorch takes 1.01 times .* 0 of 3 ",
        ),
        ([1.2, 1.1, 1.0], 0.3, "No verdict: plain PyTorch takes 1.10 times .* 0 of 3 layers gain. "),
        ([0.8, 0.9, 1.0], 0.3, "No verdict: plain PyTorch takes 0.90 times .* 0 of 3 layers gain. "),
    ],
)
def test_verdict(times: list[float], noise: float, said: str) -> None:
    """With `noise` the machine slows either of the two down in turn, by that share."""
    layers = {f"layer{at}": LayerStatistics.empty(4, "cpu", 3) for at in range(3)}
    for at, found in enumerate(layers.values()):
        found.add(torch.arange(4)[None] <= torch.tensor([[at]]), None, None, None)
    ways = ("gather", "fused", "gather")
    slow = 1 + noise
    measured = {
        name: Measured(way, (*((1.0, dense), (slow, dense), (1.0, slow * dense)) * 4, (1.0, dense)))
        for name, way, dense in zip(layers, ways, times)
    }
    report = sparsity.Report(layers, measured)
    assert re.match(said, report.verdict) and "Paths: gather in 2, fused in 1. 50.0% of the neurons" in report.verdict
    assert report.verdict in str(report)
    unmeasured = sparsity.Report(layers, {})
    assert "Not measured: 50.0% of the neurons are active" in unmeasured.verdict and math.isnan(unmeasured.ratios[1])


def test_what_is_not_seen_is_said(device: torch.device) -> None:
    model = Model(device)
    model.second.up_proj.register_forward_hook(lambda *_: None)
    report = sparsity.report(model, batches(device), measure=False)
    assert list(report.layers) == ["first"] and report.missed == ("second",)
    assert str(report).endswith("\nnot called, or not as a sparse block: second")


def test_of_floats_no_tokens_are_known(device: torch.device) -> None:
    torch.manual_seed(0)
    mlp = nn.GatedMLP(16, 40, activation="relu", method="gather", device=device)
    report = sparsity.report(mlp, [(torch.randn(4, 8, 16, device=device),), torch.randn(6, 16, device=device)])
    assert report.tokens() == [] and report.positions().shape == (8,)
    assert report.layers[""].tokens == 38 and report.layers[""].position_tokens.sum() == 32


def test_bad_input(device: torch.device) -> None:
    for function in (sparsity.report, sparsity.Recorder):
        said = rf"sparsity\.{function.__name__}: model must have sparse blocks, got none\. nn\.GatedMLP"
        with pytest.raises(ValueError, match=said):
            function(torch.nn.Linear(2, 2), *([] if function is sparsity.Recorder else [[]]))  # type: ignore[operator]
    with pytest.raises(TypeError, match=r"sparsity\.Recorder: model must be a torch\.nn\.Module, got str"):
        sparsity.Recorder("model")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"sparsity\.report: batches must reach a sparse block"):
        sparsity.report(Model(device), [])


@pytest.mark.gpu
def test_no_wait(device: torch.device) -> None:
    model, given = Model(device), batches(device)
    sparsity.report(model, given, measure=False)
    with sparsity.Recorder(model) as recorder, torch.no_grad(), without_a_sync():
        for ids in given:
            recorder.read({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
            model(ids)
    assert recorder.layers["first"].tokens == 295
