"""Calls whose launches are repeated."""

import pytest
import torch

from gossamer._core import replay
from gossamer._core.operator import OPERATORS, forget
from gossamer._core.ops import INTERPRET
from gossamer.ffn.records import SparseTraining
from gossamer.ffn.sparse_training import sparse_training
from tests.ffn.dense import call, check, operands
from tests.ffn.trained import drawn, leaves, operator_arguments, taken


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


@pytest.mark.kernels
@pytest.mark.parametrize("hot, gated", [(16, True), (0, False)])
def test_both_passes_of_training(
    hot: int, gated: bool, device: torch.device, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repetition has the bits of a call that is not one: with hot neurons, rows without a list and the L1 penalty."""
    from gossamer.ffn._triton import train_hot

    shape = (20, 16, 70, 12) if INTERPRET else (300, 64, 512, 48)
    monkeypatch.setattr(train_hot, "LEAST", 3)
    forget()
    for _ in range(3):
        a, grad = drawn(shape, torch.float32, device, generator, 1.0)
        a["x"][3] *= 30
        ours = leaves(taken(a, gated))

        def step() -> list[torch.Tensor]:
            arguments = operator_arguments(ours, shape[2] // 7, 20 * shape[0], hot=hot)  # noqa: B023
            found = sparse_training(SparseTraining(*arguments))
            of = (found[0] * grad).sum() + found[1]  # noqa: B023
            return [*found[:4], *torch.autograd.grad(of, list(ours.values()))]  # noqa: B023

        got = step()
        with monkeypatch.context() as patch:
            patch.setattr(replay, "walking", {0})
            want = step()
        assert all(map(torch.equal, got, want))
    for name in ("sparse_training", "sparse_training_bwd"):
        repeated = OPERATORS[name].repeated
        assert repeated is not None
        assert [type(found) for found in repeated._known.values()] == [replay.Recording]
    forget()
