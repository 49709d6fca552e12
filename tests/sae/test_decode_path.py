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


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    "m, n, d, dtype, dense",
    [
        # Microseconds of an H200 with 64 entries a row, packed and dense: 7.4 and 17.5.
        (64, 24576, 768, torch.bfloat16, False),
        # 36 and 201 with 46 entries a row, 8.4 and 78 with 14, and 45 and 213 with 1.
        (208, 30669, 1666, torch.float16, False),
        (1, 53230, 1406, torch.float32, False),
        (300, 7139, 5458, torch.bfloat16, False),
        # 93 and 25 with 94 entries a row, 306 and 28 with 67.
        (165, 6444, 1208, torch.float16, True),
        (696, 22572, 66, torch.float16, True),
        # 560 and 132 with 784 entries a row, 741 and 197 with 9,287: few columns in float32.
        (1022, 23780, 69, torch.float32, True),
        (1115, 29652, 121, torch.float32, True),
        # Of a launch.
        (62, 3135, 485, torch.float16, True),
    ],
)
def test_dense_where_looking_takes_as_long(m: int, n: int, d: int, dtype: torch.dtype, dense: bool) -> None:
    weight: Any = SimpleNamespace(device=torch.device("cuda", 99), element_size=lambda: dtype.itemsize)
    assert decode_path.dense_is_faster(m, n, d, weight) == dense
