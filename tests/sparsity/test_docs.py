"""The examples of docs/sparsity.md run, one after the other."""

import re
from pathlib import Path

import torch

PAGE = (Path(__file__).parents[2] / "docs" / "sparsity.md").read_text(encoding="utf-8")


def test_examples() -> None:
    torch.manual_seed(0)
    names: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.S | re.M):
        exec(block, names)
    assert names["found"].tokens == names["batches"][0].numel()  # type: ignore[attr-defined]
