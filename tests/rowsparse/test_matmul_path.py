"""Which way products of rows go, by what the host knows: cases of the sweep on an H200, and on an H100."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gossamer._core import tuning
from gossamer.rowsparse.matmul_path import (
    LEAST,
    choose_path,
    choose_sampled_path,
    entry_seconds,
    gather_tile,
    rows_at_once,
)

pytestmark = pytest.mark.usefixtures("h200")


def on_gpu(*shape: int, dtype: torch.dtype) -> Any:
    """What the choice reads of a tensor."""
    sizes = {"shape": shape, "dim": lambda: len(shape), "element_size": lambda: dtype.itemsize}
    return SimpleNamespace(is_cuda=True, device=torch.device("cuda", 99), **sizes)


@pytest.mark.parametrize(
    "operator, m, n, d, slots, may_overflow, dtype, path",
    [
        # Measured in microseconds, gathered and dense: 16,441 and 701.
        ("matmul", 8482, 6978, 673, 6978, False, torch.float16, "dense"),
        # 9,113 and 1,183, with 3,991 entries in 7,982 slots.
        ("matmul", 11747, 14334, 391, 7982, True, torch.float16, "dense"),
        # 413 and 22.
        ("matmul", 1121, 2981, 145, 2981, False, torch.bfloat16, "dense"),
        # 2,568 and 100: rows of 21,655.
        ("matmul", 119, 47270, 929, 43310, True, torch.float16, "dense"),
        # 50 and 2,255.
        ("matmul", 4503, 27137, 1346, 16, True, torch.float16, "gather"),
        # 747 and 1,071, in slots that are half full.
        ("matmul", 4891, 3810, 1211, 538, True, torch.float32, "gather"),
        # 184 and 1,098.
        ("matmul", 18952, 2733, 1466, 10, True, torch.bfloat16, "gather"),
        # 3 and 9 of a launch or two.
        ("matmul", 9, 898, 72, 2, True, torch.bfloat16, "gather"),
        # TopK of an SAE.
        ("matmul", 4096, 65536, 2304, 64, False, torch.bfloat16, "gather"),
        ("matmul", 4096, 65536, 2304, 8192, False, torch.bfloat16, "dense"),
        # What `pack` gives by default.
        ("matmul", 4096, 65536, 2304, 1024, True, torch.bfloat16, "gather"),
        # 20 and 6; 203 and 175, of as many programs; 20 and 9; 801 and 360.
        ("matmul", 7959, 65, 85, 26, True, torch.bfloat16, "dense"),
        ("matmul", 3937, 500, 8136, 14, True, torch.bfloat16, "dense"),
        ("matmul", 2, 3378, 229, 1104, True, torch.float32, "dense"),
        ("matmul", 5742, 32452, 75, 9844, True, torch.bfloat16, "dense"),
        # 21 and 48; 363 and 724.
        ("matmul", 2076, 1469, 166, 124, True, torch.float32, "gather"),
        ("matmul", 6179, 442, 5808, 10, True, torch.float32, "gather"),
        ("matmul", 0, 65536, 2304, 8192, False, torch.bfloat16, "gather"),
        ("matmul", 4096, 0, 2304, 0, False, torch.bfloat16, "gather"),
        ("matmul", 4096, 65536, 0, 8192, False, torch.bfloat16, "gather"),
        # 118,112 and 6,986; 516 and 51.
        ("sampled_matmul", 10597, 17559, 2246, 16384, True, torch.float16, "dense"),
        ("sampled_matmul", 3240, 399, 1147, 399, False, torch.float16, "dense"),
        # 85 and 10; 528 and 236; 17 and 5, all of launches; 76 and 29.
        ("sampled_matmul", 912, 1708, 140, 1024, True, torch.bfloat16, "dense"),
        ("sampled_matmul", 18570, 3261, 161, 256, True, torch.float16, "dense"),
        ("sampled_matmul", 1, 353, 1728, 128, True, torch.float32, "dense"),
        ("sampled_matmul", 16, 12728, 1990, 8192, True, torch.float16, "dense"),
        # 169 and 606; 50 and 80.
        ("sampled_matmul", 3962, 52784, 119, 512, True, torch.bfloat16, "gather"),
        ("sampled_matmul", 92, 2979, 4363, 256, True, torch.float32, "gather"),
        # 507 and 1,522; 109 and 1,134; 14 and 94.
        ("sampled_matmul", 6750, 11028, 1145, 256, True, torch.float16, "gather"),
        ("sampled_matmul", 1079, 21331, 2176, 128, True, torch.float16, "gather"),
        ("sampled_matmul", 26, 45575, 911, 128, True, torch.float32, "gather"),
        ("sampled_matmul", 0, 4, 4, 4, False, torch.float32, "gather"),
    ],
)
def test_choice(
    operator: str, m: int, n: int, d: int, slots: int, may_overflow: bool, dtype: torch.dtype, path: str
) -> None:
    weight = on_gpu(n, d, dtype=dtype)
    if operator == "matmul":
        assert choose_path(on_gpu(m * slots, dtype=dtype), m, may_overflow, weight) == path
    else:
        x, indices = on_gpu(m, d, dtype=dtype), on_gpu(m * slots, dtype=torch.int32)
        assert choose_sampled_path(x, indices, may_overflow, weight) == path


@pytest.mark.parametrize(
    "operator, m, n, d, slots, dtype, path",
    [
        # Products of odd rows, 31 and 65 us; gathered it is 77 and 201. 4, of 13 with programs that have little to do.
        ("sampled_matmul", 16, 12728, 1990, 8192, torch.float16, "dense"),
        ("matmul", 72, 108738, 402, 3740, torch.float16, "dense"),
        ("sampled_matmul", 10, 17920, 88, 4096, torch.bfloat16, "dense"),
        # 88 and 205; 14 and 23; 8 and 27, a single row.
        ("matmul", 19, 62161, 2482, 3498, torch.float16, "gather"),
        ("sampled_matmul", 1432, 4677, 97, 128, torch.float16, "gather"),
        ("sampled_matmul", 1, 87511, 290, 1024, torch.float16, "gather"),
    ],
)
def test_choice_on_an_h100(
    operator: str, m: int, n: int, d: int, slots: int, dtype: torch.dtype, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "rates", lambda index: tuning.Rates(3.0e12, 5.0e12, 45e12, 330e12, 650e12, 132, False))
    weight = SimpleNamespace(**(vars(on_gpu(n, d, dtype=dtype)) | {"device": torch.device("cuda", 98)}))
    if operator == "matmul":
        assert choose_path(on_gpu(m * slots, dtype=dtype), m, True, weight) == path
    else:
        x, indices = on_gpu(m, d, dtype=dtype), on_gpu(m * slots, dtype=torch.int32)
        x.device = weight.device
        assert choose_sampled_path(x, indices, True, weight) == path


def test_tiles_are_tall_where_programs_are_few() -> None:
    """By rows, and by how many programs a row is; an entry of a single row takes a part of a step."""
    assert gather_tile(748, 107, 2) == gather_tile(1, 768, 2) == {"BLOCK_E": 32, "BLOCK_D": 64}
    assert gather_tile(200, 4096, 4) == gather_tile(256, 2304, 4) == {"BLOCK_E": 16, "BLOCK_D": 32}
    assert gather_tile(473, 4255, 4) == {"BLOCK_E": 4, "BLOCK_D": 128}
    assert gather_tile(748, 2304, 2) == gather_tile(2048, 107, 2) == {"BLOCK_E": 4, "BLOCK_D": 256}
    assert entry_seconds(1, 470, 4, 99) == pytest.approx(1e-6 / 32)
    # Rows that begin off 16 bytes, and rows that begin on them.
    assert entry_seconds(8482, 673, 2, 99) == pytest.approx(8482 * 768 * 2 / (0.9 * 5.5e12))
    assert entry_seconds(8482, 672, 2, 99) == pytest.approx(8482 * 768 * 2 / (1.4 * 5.5e12))


def test_a_cpu_gathers() -> None:
    x = torch.ones(4, 4)
    assert choose_path(x, 4, False, x) == choose_sampled_path(x, x, False, x) == "gather"


def test_memory_is_bounded() -> None:
    """By 64 MB, or by the operands where they take more."""
    assert rows_at_once(100, 1000, 2) == 100
    m, n = 1 << 16, 1 << 16
    step = rows_at_once(m, n, 2, torch.empty(8, dtype=torch.int8))
    assert step * n * 2 == LEAST and step % 128 == 0
    operand = torch.empty(4 * LEAST, dtype=torch.int8, device="meta")
    assert rows_at_once(m, n, 2, operand) == 4 * step
    assert rows_at_once(m, 1 << 30, 4) == 128
