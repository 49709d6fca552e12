"""Calls whose launches are repeated."""

import pytest
import torch

from gossamer._core.operator import OPERATORS, forget
from tests.ffn.dense import call, check, operands


@pytest.mark.gpu
@pytest.mark.parametrize("shift", [0.0, 2.0, 9.0])
def test_a_recording_repeats_the_launches(shift: float, device: torch.device, generator: torch.Generator) -> None:
    """Of few rows, and of many whose operands are read as they lie; with other operands, at other addresses."""
    from gossamer._core import tuning
    from gossamer._core.replay import Recording

    known = OPERATORS["sparse_ffn"].repeated._known
    for m in (7, 40, 2000):
        forget()
        for _ in range(3):
            a = operands((m, 256, 520, 64), torch.bfloat16, device, generator, shift=shift, shared=0.8)
            for activation in ("relu", "relu2"):
                out = call(a, method="gather", activation=activation)
                check(a, out, activation)
                assert out.equal(call(a, method="gather", activation=activation))
        by_columns = {**a, "down": a["down"].t().contiguous().t()}
        for _ in range(2):
            want = call(by_columns, method="gather")
            assert all(want.equal(call(by_columns, method="gather")) for _ in range(3))
            check(by_columns, want)
            by_columns["x"] = by_columns["x"].flip(0)
        recorded = any(type(found) is Recording for found in known.values())
        assert recorded or not (m == 7 or tuning.hopper(device))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [7, 40])
def test_one_tensor_for_two_operands_and_then_two(m: int, device: torch.device, generator: torch.Generator) -> None:
    """A repetition reads each operand of its own call."""
    a = operands((m, 256, 520, 64), torch.bfloat16, device, generator)
    for _ in range(2):
        one = {**a, "up": a["gate"], "up_bias": a["gate_bias"]}
        check(one, call(one, method="gather"))
        check(a, call(a, method="gather"))
