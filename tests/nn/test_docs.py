"""The examples of docs/sae.md and docs/training.md run, each as it stands."""

import re
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "docs"
PAGES = [(FOLDER / name).read_text(encoding="utf-8") for name in ("sae.md", "training.md")]
BLOCKS = [block for page in PAGES for block in re.findall(r"^```python\n(.*?)^```$", page, re.S | re.M)]


@pytest.mark.parametrize("block", range(len(BLOCKS)))
def test_examples(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {}
    exec(BLOCKS[block], names)
    # What the page says of shapes.
    for name, shape in re.findall(r"^(\w+) = .*# \[([\d, ]+)\]$", BLOCKS[block], re.M):
        assert list(names[name].shape) == [int(size) for size in shape.split(",")]  # type: ignore[attr-defined]
