"""Thresholds of few long rows, whose segments have a program each."""

from typing import Any

import pytest
import torch

few_rows = pytest.importorskip("gossamer.attention._triton.few_rows")
from tests.attention.test_threshold import check  # noqa: E402

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("levels", [31000, 5, 1])
@pytest.mark.parametrize("k, each", [(1, False), (40, False), (40, True), (300, False)])
def test_a_stable_sort_takes_the_same(
    k: int, each: bool, levels: int, device: torch.device, generator: torch.Generator, monkeypatch: Any
) -> None:
    monkeypatch.setattr(few_rows.threshold, "MAX_REGISTERS", 64)
    monkeypatch.setattr(few_rows, "FEW", 1)
    keys = torch.randint(1, levels + 1, (3, 256), device=device, generator=generator, dtype=torch.int16)
    wanted = torch.tensor([k, max(k // 2, 1), 1], dtype=torch.int32, device=device) if each else None
    check(few_rows.find_in_segments, keys, k, wanted)


@pytest.mark.parametrize("levels", [31000, 300])
@pytest.mark.parametrize("window, sinks", [(0, 0), (300, 0), (30, 7)])
def test_long_rows(
    window: int, sinks: int, levels: int, device: torch.device, generator: torch.Generator, monkeypatch: Any
) -> None:
    """With few levels many keys equal the threshold."""
    monkeypatch.setattr(few_rows.threshold, "MAX_REGISTERS", 64)
    monkeypatch.setattr(few_rows, "FEW", 1)
    keys = torch.randint(1, levels + 1, (3, 8192), device=device, generator=generator, dtype=torch.int16)
    check(few_rows.find_in_segments, keys, 500, window=window, sinks=sinks)
