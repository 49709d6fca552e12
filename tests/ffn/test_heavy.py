"""Rows with so many entries that dense tiles take less time."""

import pytest
import torch

from tests.ffn.dense import SMALL, call, check, operands


@pytest.mark.parametrize("shift", [0.0, 1.0, 9.0])
def test_any_density(shift: float, device: torch.device, generator: torch.Generator) -> None:
    """Half of the entries, so that every row is heavy; some heavy rows; none has an entry."""
    a = operands(SMALL, torch.float32, device, generator, shift)
    check(a, call(a, method="gather"))


@pytest.mark.kernels
@pytest.mark.parametrize("gated, activation", [(True, "relu2"), (False, "relu")])
def test_the_rows_that_are_listed(
    gated: bool, activation: str, device: torch.device, generator: torch.Generator
) -> None:
    """In the list's order, which may be any; the others are not written."""
    from gossamer.ffn._triton import heavy

    a = operands((70, 24, 130, 20), torch.float32, device, generator, shift=1.0)
    a = a if gated else {name: t for name, t in a.items() if not name.startswith("up")}
    rows = torch.randperm(70, generator=torch.Generator().manual_seed(0))[:66].to(device)
    weights = (a["gate"], a["gate_bias"], None, a.get("up"), a.get("up_bias"))
    weights += (a["down"].t().contiguous(), a["down_bias"])
    for some in (rows, rows[:3], rows[:0]):
        listed = torch.empty(74, dtype=torch.int32, device=device)
        heavy.start(listed, 5)
        listed[0] = len(some)
        listed[4 : 4 + len(some)] = some
        out = torch.full((70, 20), 7.0, device=device)
        heavy.project(listed, a["x"], weights, out, activation == "relu2")
        check({**a, "x": a["x"][some]}, out[some], activation)
        others = torch.ones(70, dtype=torch.bool, device=device)
        others[some] = False
        assert (out[others] == 7).all()


@pytest.mark.gpu
@pytest.mark.parametrize("shift", [0.0, 1.0, 9.0])
def test_many_rows_by_columns(shift: float, generator: torch.Generator) -> None:
    """Are computed as those by rows, to the same bits, whether some, all or none are heavy."""
    device = torch.device("cuda", torch.cuda.current_device())
    a = operands((4100, 256, 1032, 64), torch.bfloat16, device, generator, shift)
    by_columns = {**a, "down": a["down"].t().contiguous().t()}
    out = call(by_columns, method="gather")
    check(by_columns, out)
    assert out.equal(call(a, method="gather"))
