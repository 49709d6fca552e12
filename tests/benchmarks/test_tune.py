"""What scripts that tune have in common, and two of them at a small size."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import tune
from benchmarks.sae import tune_topk

pytestmark = [pytest.mark.native, pytest.mark.skipif(tune.DEVICE.type == "cuda", reason="small sizes, for a CPU")]


def test_attributes_are_put_back() -> None:
    owner = SimpleNamespace(tile=1, rows=2)
    call = tune.under(lambda: (owner.tile, owner.rows), (owner, "tile", 3), (owner, "rows", 4))
    assert call() == (3, 4) and (owner.tile, owner.rows) == (1, 2)
    with pytest.raises(ZeroDivisionError), tune.replaced((owner, "tile", 5)):
        owner.tile /= 0
    assert owner.tile == 1


def test_only_what_is_right_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    want = torch.tensor([3.0, 4.0])
    calls = {
        "right": lambda: want * 1.001,
        "wrong": lambda: want * 1.5,
        "not a number": lambda: want / 0 * 0,
        "raises": lambda: want @ torch.ones(3),
    }
    found = tune.sound(calls, want)
    said = capsys.readouterr().out
    assert list(found) == ["right"]
    assert "wrong: wrong by 0.5" in said and "not a number: wrong by nan" in said and "raises: RuntimeError" in said
    assert tune.error((want, want * 1.25), (want, want)) == pytest.approx(0.25)
    with pytest.raises(ValueError, match="zip"):
        tune.error((want,), (want, want))
    for timer in (tune.replayed, tune.eager, tune.sustained):
        times = timer(found)
        assert list(times) == ["right"] and times["right"] > 0


def test_results_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    results = tune.Results(tune_topk.__file__)
    capsys.readouterr()
    results.add("shape", {"slow": 8.0, "fast": 2.0, "between": 4.0}, best=2, against="slow")
    results.note("shape", rows=7)
    lines = capsys.readouterr().out.split("\n")
    assert [line.split() for line in lines[1:4]] == [
        ["shape"], ["fast", "2.0", "us", "4.000", "x", "slow"], ["between", "4.0", "us", "2.000", "x", "slow"]
    ]  # fmt: skip
    results.keep(["--parts"])
    record = json.loads((tmp_path / "tune-topk.json").read_text())
    assert record["microseconds"] == {"shape": {"slow": 8.0, "fast": 2.0, "between": 4.0, "rows": 7}}
    assert record["command"] == "python -m benchmarks.sae.tune_topk --parts" and record["device"]["type"] == "cpu"


def test_small_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    tune_topk.main(tune_topk.SMALL, parts=False)
    found = json.loads((tmp_path / "tune-topk.json").read_text())["microseconds"]
    assert len(found) >= len(tune_topk.SMALL) and all(value >= 0 for row in found.values() for value in row.values())
