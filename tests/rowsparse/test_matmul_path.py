"""The rule by which products of rows go dense, by what the host knows: measured cases of an H200, and monotony."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.rowsparse.matmul_path import (
    LEAST,
    break_even,
    choose_path,
    dense_is_faster,
    rows_at_once,
)
from tests.paths import matrix

pytestmark = pytest.mark.usefixtures("h200")


@pytest.mark.parametrize(
    "operator, m, n, d, slots, may_overflow, dtype, path",
    [
        # The comments have the microseconds of gathering and of the dense product: 2,568 and 100.
        ("matmul", 119, 47270, 929, 43310, True, torch.float16, "dense"),
        # 50 and 2,255; 747 and 1,071, in slots that are half full; 184 and 1,098; 3 and 9 of a launch or two.
        ("matmul", 4503, 27137, 1346, 16, True, torch.float16, "gather"),
        ("matmul", 4891, 3810, 1211, 538, True, torch.float32, "gather"),
        ("matmul", 18952, 2733, 1466, 10, True, torch.bfloat16, "gather"),
        ("matmul", 9, 898, 72, 2, True, torch.bfloat16, "gather"),
        # TopK of an SAE, and the slots that `pack` gives by default.
        ("matmul", 4096, 65536, 2304, 64, False, torch.bfloat16, "gather"),
        ("matmul", 4096, 65536, 2304, 8192, False, torch.bfloat16, "dense"),
        ("matmul", 4096, 65536, 2304, 1024, True, torch.bfloat16, "gather"),
        # 20 and 9; 801 and 360; 21 and 48.
        ("matmul", 2, 3378, 229, 1104, True, torch.float32, "dense"),
        ("matmul", 5742, 32452, 75, 9844, True, torch.bfloat16, "dense"),
        ("matmul", 2076, 1469, 166, 124, True, torch.float32, "gather"),
        # Half-full slots: 805 and 553; 810 and 572; 412 and 570. Full ones: 498 and 551; 177 and 239.
        ("matmul", 16384, 5632, 2048, 196, True, torch.bfloat16, "dense"),
        ("matmul", 4096, 14336, 4096, 400, True, torch.bfloat16, "dense"),
        ("matmul", 4096, 14336, 4096, 196, True, torch.bfloat16, "gather"),
        ("matmul", 16384, 5632, 2048, 60, False, torch.bfloat16, "gather"),
        ("matmul", 2048, 32768, 1024, 300, False, torch.bfloat16, "gather"),
        ("matmul", 0, 65536, 2304, 8192, False, torch.bfloat16, "gather"),
        ("matmul", 4096, 0, 2304, 0, False, torch.bfloat16, "gather"),
        ("matmul", 4096, 65536, 0, 8192, False, torch.bfloat16, "gather"),
        # 118,112 and 6,986; 85 and 10; 528 and 236.
        ("sampled_matmul", 10597, 17559, 2246, 16384, True, torch.float16, "dense"),
        ("sampled_matmul", 912, 1708, 140, 1024, True, torch.bfloat16, "dense"),
        ("sampled_matmul", 18570, 3261, 161, 256, True, torch.float16, "dense"),
        # 169 and 606; 50 and 80; 507 and 1,522; 14 and 94.
        ("sampled_matmul", 3962, 52784, 119, 512, True, torch.bfloat16, "gather"),
        ("sampled_matmul", 92, 2979, 4363, 256, True, torch.float32, "gather"),
        ("sampled_matmul", 6750, 11028, 1145, 256, True, torch.float16, "gather"),
        ("sampled_matmul", 26, 45575, 911, 128, True, torch.float32, "gather"),
        ("sampled_matmul", 0, 4, 4, 4, False, torch.float32, "gather"),
    ],
)
def test_choice(
    operator: str, m: int, n: int, d: int, slots: int, may_overflow: bool, dtype: torch.dtype, path: str
) -> None:
    assert choose_path(m, m * slots, may_overflow, matrix(n, d, dtype=dtype)) == path, operator


@given(st.integers(0, 40000), st.integers(1, 131072), st.integers(0, 8192), st.booleans(), st.booleans(), st.data())
def test_more_entries_never_go_back_to_gathering(
    m: int, n: int, d: int, half: bool, packed: bool, data: st.DataObject
) -> None:
    weight = matrix(n, d, dtype=torch.bfloat16 if half else torch.float32)
    few, many = sorted(data.draw(st.tuples(st.floats(0, n), st.floats(0, n))))
    less, more = (dense_is_faster(m, n, d, nnz, weight, packed=packed) for nnz in (few, many))
    assert more >= less
    # Rows that are stored densely are not unpacked first.
    assert dense_is_faster(m, n, d, few, weight, packed=False) >= dense_is_faster(m, n, d, few, weight)


@pytest.mark.parametrize("m, d", [(0, 768), (5, 0), (0, 0), (4096, 2304)])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_break_even(kind: str, m: int, d: int) -> None:
    """No row or column divides by nothing; at the break-even gathering is ahead by more than half."""
    weight = matrix(65536, d)
    weight.device = torch.device(kind, 99)
    limit = break_even(m, 65536, d, weight)
    assert 32 <= limit <= 65536
    if m and d and kind == "cuda":
        assert not dense_is_faster(m, 65536, d, 2 * limit, weight)
        assert dense_is_faster(m, 65536, d, 4 * limit, weight)


def test_a_cpu_gathers() -> None:
    assert choose_path(4, 4, False, torch.ones(4, 4)) == "gather"


def test_memory_is_bounded() -> None:
    """By 64 MB, or by the operands where they take more."""
    assert rows_at_once(100, 1000, 2) == 100
    m, n = 1 << 16, 1 << 16
    step = rows_at_once(m, n, 2, torch.empty(8, dtype=torch.int8))
    assert step * n * 2 == LEAST and step % 128 == 0
    operand = torch.empty(4 * LEAST, dtype=torch.int8, device="meta")
    assert rows_at_once(m, n, 2, operand) == 4 * step
    assert rows_at_once(m, 1 << 30, 4) == 128
