"""What the ways are said to cost, against what they took."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gossamer._core import tuning
from gossamer.ffn import block, costs
from gossamer.ffn.tracker import Known
from gossamer.rowsparse import Density

GATED = [
    (2048, 29, 857, 0, {"gather": 151, "fused": 183, "union": 172, "dense": 217}),
    (65536, 29, 857, 0, {"gather": 4300, "fused": 6460, "union": 4400, "dense": 7400}),
    (16384, 29, 857, 0, {"gather": 1080, "fused": 1480, "union": 1110, "dense": 1740}),
    (16384, 1, 32, 0, {"gather": 630, "fused": 1570, "union": 671, "dense": 1840}),
    (16384, 10, 310, 0, {"gather": 816, "fused": 1550, "union": 839, "dense": 1830}),
    (16384, 100, 2446, 0, {"gather": 2200, "fused": 1440, "union": 2190, "dense": 1760}),
    (16384, 300, 0, 16384, {"gather": 2220, "fused": 1590, "union": 2270, "dense": 1860}),
    (16384, 29, 121, 0, {"gather": 1040, "fused": 1480, "union": 753, "dense": 1790}),
    (16384, 29, 300, 0, {"gather": 1050, "fused": 1500, "union": 916, "dense": 1760}),
    (16384, 100, 396, 0, {"gather": 2110, "fused": 1450, "union": 1060, "dense": 1770}),
    (16384, 40, 1150, 2458, {"gather": 1440, "fused": 1500, "union": 1550, "dense": 1790}),
]
FEW = [
    (1, False, {"gather": 15.5, "fused": 24.6, "dense": 30.9}),
    (2, False, {"gather": 18.5, "fused": 25.8, "dense": 30.5}),
    (16, False, {"gather": 19.9, "fused": 26.4, "dense": 31.8}),
    (1, True, {"gather": 16.6, "fused": 24.6, "dense": 32.3}),
    (2, True, {"gather": 21.3, "fused": 25.8, "dense": 31.8}),
    (4, True, {"gather": 23.8, "fused": 25.8, "dense": 31.9}),
    (8, True, {"gather": 27.0, "fused": 25.9, "dense": 31.6}),
    (16, True, {"gather": 32.5, "fused": 26.4, "dense": 32.5}),
]
"""M, whether W_down lies by rows; microseconds of a gated block with 29 entries a row, weights out of memory."""
PLAIN = [
    (16384, 29, 870, 0, {"gather": 1010, "union": 1060, "dense": 1650}),
    (16384, 100, 2640, 0, {"gather": 1500, "union": 1530, "dense": 1610}),
    (16384, 900, 0, 16384, {"gather": 3080, "union": 3120, "dense": 1640}),
]
"""M, entries of a light row, columns of a group of 32, heavy rows; microseconds of the ways as graphs on an H200,
bfloat16, K = D = 2,048, N = 5,632 and 8,192, from `gossamer bench ffn`."""


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An operand of 16 bits on an H200, as far as `costs_of` looks at it."""
    monkeypatch.setattr(costs, "INTERPRET", False)
    monkeypatch.setattr(tuning, "hopper", lambda _: True)
    monkeypatch.setattr(tuning, "rates", lambda _: tuning._H200)
    device = torch.device("cuda")
    return SimpleNamespace(is_cuda=True, element_size=lambda: 2, get_device=lambda: 0, device=device)


@pytest.mark.parametrize("gated", [True, False])
def test_the_way_that_took_the_least(gated: bool, hopper: Any) -> None:
    """Within 5%; without a gate the fused way is the dense one."""
    cost = costs.costs_of(5632 if gated else 8192, 2048, 2048, gated, hopper)
    for m, light, union, over, times in GATED if gated else PLAIN:
        rows = Density(m, light, light, over, light * (m - over))
        way = costs.choose_path(Known(rows, Density(m // 32, union, union, 0, union * (m // 32))), m, cost)
        assert times["dense" if way == "fused" and not gated else way] <= 1.05 * min(times.values()), (m, light, way)


def test_the_way_of_few_rows_that_took_the_least(hopper: Any) -> None:
    cost = costs.costs_of(5632, 2048, 2048, True, hopper)
    for m, strided, times in FEW:
        way = costs.choose_path(Known(Density(m, 29, 29, 0, 29 * m), None), m, replace(cost, strided=strided))
        assert times[way] <= 1.05 * min(times.values()), (m, strided, way)


def test_groups_that_are_looked_at_are_no_beginnings() -> None:
    """Not in sequences whose length divides the batch by 8, as lengths do."""
    for m in (1024, 16384, 65536):
        step, length = costs.sample_step(m), m // 8
        groups = costs.sampled_groups(m, step)
        beginnings = sum(number * step * costs.GROUP % length < costs.GROUP for number in range(groups))
        assert (groups >= 8 and beginnings <= groups / 4) or step < 8


@pytest.mark.parametrize("m", [8 * 512, 3 * 2048])
def test_a_sample_of_sequences_that_begin_full(m: int, device: torch.device) -> None:
    hidden = torch.zeros(m, 40, device=device)
    hidden[:, 3] = 1.0
    hidden[:: m // 8, :] = 1.0
    nnz, unions = block.sampled(hidden)
    assert nnz.float().mean() < 4 and unions.float().mean() < 20
