"""The script that trains two transformers notices where the same keys give other losses."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.blocksparse import train

CPU = ["--device", "cpu", "--lengths", "512"]


def test_the_same_keys_give_the_same_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "TOKENS", 4096)
    monkeypatch.setattr(train, "SHARE", 1)
    train.main([*CPU, "--inputs", "32", "--out", str(tmp_path)])
    (file,) = tmp_path.glob("*.json")
    content = json.loads(file.read_text())
    assert content["largest_difference"] < 1e-5
    by = {(run["way"], run["batch"]): run["losses"] for run in content["runs"]}
    assert len(by) == 2 * len(train.WAYS)
    for way in train.WAYS:
        losses = by[way, 1]
        assert len(losses) == 33 and losses[-1] < 0.9 * losses[0]
    # Every key is another sum than the window's.
    assert by["dense SDPA", 1] != by["gossamer", 1]


def test_other_keys_end_with_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def wrong(*given: torch.Tensor) -> torch.Tensor:
        return 9 * train.materialised(*given)

    monkeypatch.setitem(train.WAYS, "same keys, matrix of scores", wrong)
    with pytest.raises(SystemExit, match="losses of the same keys differ"):
        train.main([*CPU, "--inputs", "2", "--out", str(tmp_path)])
