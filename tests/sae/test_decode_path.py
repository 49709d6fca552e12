"""sae.decode: what the host chooses by."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gossamer._core import tuning
from gossamer.sae import decode_path


@pytest.mark.parametrize("m, d", [(0, 768), (5, 0), (0, 0)])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_no_rows_or_columns_divide_by_nothing(kind: str, m: int, d: int, monkeypatch: Any) -> None:
    rates = SimpleNamespace(half=7e14, tf32=3e14, ieee=5e13, copy=3.4e12, gather=5e12)
    monkeypatch.setattr(tuning, "rates", lambda index: rates)
    weight: Any = SimpleNamespace(device=torch.device(kind, 0), element_size=lambda: 2)
    assert 32 <= decode_path.break_even(m, 65536, d, weight) <= 65536
