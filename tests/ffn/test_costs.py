"""What the ways are said to cost, against what they took."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gossamer._core import tuning
from gossamer.ffn import block, costs
from gossamer.ffn.block import METHODS
from gossamer.ffn.tracker import Known
from gossamer.rowsparse import Density

UNIONS = {
    ("gated", 29, "0%"): (29, 857, 0.0),
    ("gated", 1, "0%"): (1, 32, 0.0),
    ("gated", 10, "0%"): (10, 310, 0.0),
    ("gated", 100, "0%"): (100, 2446, 0.0),
    ("gated", 300, "0%"): (300, 0, 1.0),
    ("gated", 900, "0%"): (900, 0, 1.0),
    ("gated", 29, "90%"): (29, 121, 0.0),
    ("gated", 29, "70%"): (29, 300, 0.0),
    ("gated", 100, "90%"): (100, 396, 0.0),
    ("gated", "40, 440 in 15%", "0%"): (40, 1150, 0.15),
    ("plain", 29, "0%"): (29, 870, 0.0),
    ("plain", 100, "0%"): (100, 2640, 0.0),
    ("plain", 300, "0%"): (300, 0, 1.0),
    ("plain", 900, "0%"): (900, 0, 1.0),
}
"""What is known of the cases of `benchmarks ffn`: entries of a light row, columns of a group of 32, heavy rows."""
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
CASES = [
    case
    for file in ("ffn-blocks-nvidia-h200.json", "ffn-plain-nvidia-h200.json")
    for case in json.loads((RESULTS / file).read_text())["cases"]
]
FEW_ROWS = [
    (2048, 5632, 2, 1, 32, (19, 17, 38, 30)),
    (2048, 5632, 2, 1, 204, (27, 19, 38, 30)),
    (4096, 14336, 2, 1, 188, (70, 54, 134, 121)),
    (2048, 5632, 4, 1, 203, (38, 30, 63, 52)),
    (2048, 5632, 4, 1, 32, (27, 27, 62, 52)),
    (2048, 5632, 4, 2, 26, (37, 34, 76, 76)),
    (2048, 5632, 4, 4, 28, (53, 50, 94, 92)),
    (2048, 5632, 4, 4, 202, (83, 69, 94, 92)),
    (2048, 5632, 4, 8, 0.8, (68, 69, 150, 149)),
    (2048, 5632, 4, 8, 29, (95, 92, 150, 150)),
    (2048, 5632, 4, 8, 202, (151, 135, 150, 149)),
    (2048, 5632, 4, 16, 1.2, (126, 130, 263, 204)),
    (2048, 5632, 4, 16, 29, (194, 197, 264, 204)),
    (2048, 5632, 4, 16, 200, (293, 282, 264, 204)),
    (2242, 11620, 2, 1, 33, (147, 154, 88, 76)),
    (2242, 11620, 2, 2, 0.8, (59, 62, 100, 103)),
    (2242, 11620, 2, 2, 26, (76, 77, 100, 102)),
    (2242, 11620, 2, 4, 193, (97, 90, 100, 102)),
    (2242, 11620, 2, 8, 29, (83, 77, 101, 105)),
    (2242, 11620, 2, 8, 208, (116, 109, 101, 105)),
    (2242, 11620, 2, 16, 29, (92, 95, 134, 138)),
    (2242, 11620, 2, 16, 199, (132, 145, 135, 139)),
    (1100, 3004, 2, 1, 32, (30, 29, 24, 17)),
    (1100, 3004, 2, 2, 0.8, (22, 22, 35, 27)),
    (1100, 3004, 2, 4, 29, (30, 28, 34, 26)),
    (1100, 3004, 2, 8, 30, (31, 29, 34, 26)),
    (1100, 3004, 2, 4, 200, (32, 33, 34, 26)),
]
"""K = D, N, bytes of an element, M, active neurons of a row, and us of gathering with W_down by rows and by columns, of
the dense and of the fused way: a single row of many entries, float32 without TF32, and 16 bits in rows that begin on 4
bytes or 8. H100, PyTorch 2.11, as graphs, weights rotated over four layers."""


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An operand of 16 bits on an H200, as far as `costs_of` looks at it."""
    monkeypatch.setattr(costs, "INTERPRET", False)
    monkeypatch.setattr(tuning, "hopper", lambda _: True)
    monkeypatch.setattr(tuning, "rates", lambda _: tuning._H200)
    device = torch.device("cuda")
    return SimpleNamespace(is_cuda=True, element_size=lambda: 2, get_device=lambda: 0, device=device)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_the_way_that_took_the_least(case: dict[str, Any], hopper: Any) -> None:
    """Within 3%, as graphs, with W_down by rows; without a gate the fused way is the dense one."""
    given, gated = case["parameters"], case["name"] == "gated"
    times = {p["name"].removeprefix("gossamer, "): p["graph"]["median"] for p in case["providers"] if p["graph"]}
    times = {name: time for name, time in times.items() if name in METHODS}
    m, k, n = given["M"], given["K"], given["N"]
    light, union, share = UNIONS[case["name"], given["nnz"], given["shared"]]
    over = int(m * share)
    rows = Density(m, light, light, over, light * (m - over))
    unions = Density(m // 32, union, union, 0, union * (m // 32)) if m > costs.FEW else None
    cost = replace(costs.costs_of(n, k, k, gated, hopper), strided=True)
    way = costs.choose_path(Known(rows, unions), m, cost)
    assert times["dense" if way == "fused" and not gated else way] <= 1.03 * min(times.values()), way


@pytest.mark.parametrize(
    "case", [case for case in CASES if case["parameters"]["M"] <= costs.FEW], ids=lambda c: c["id"]
)
def test_few_rows_by_columns(case: dict[str, Any], hopper: Any) -> None:
    """Gathering is the fastest way, and its time is foreseen within 2 us, as by rows."""
    found = {p["name"]: p["graph"]["median"] for p in case["providers"]}
    m, cost = case["parameters"]["M"], costs.costs_of(5632, 2048, 2048, True, hopper)
    known = Known(Density(m, 29, 29, 0, 29 * m), None)
    for name, strided in (("gossamer, gather", True), ("gossamer, down by columns", False)):
        told = costs.few_rows(known, m, replace(cost, strided=strided))
        assert min(told, key=told.__getitem__) == "gather"
        assert abs(told["gather"] - found[name]) < 2e-6
        assert abs(told["fused"] - found["gossamer, fused"]) < 3e-6 and abs(told["dense"] - found["dense"]) < 3e-6


@pytest.mark.parametrize("k, n, size, m, mean, took", FEW_ROWS)
def test_few_rows_by_what_was_measured(
    k: int, n: int, size: int, m: int, mean: float, took: tuple[int, ...], hopper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way that is chosen takes at most 8% longer than the fastest; each is foreseen within a third."""
    monkeypatch.setattr(tuning, "rates", lambda _: tuning._H100)
    hopper.element_size = lambda: size
    cost = costs.costs_of(n, k, k, True, hopper)
    known = Known(Density(1000, mean, mean, 0, round(1000 * mean)), None)
    for strided, gathered in zip((True, False), took[:2], strict=True):
        times = {"gather": gathered, "dense": took[2], "fused": took[3]}
        told = costs.few_rows(known, m, replace(cost, strided=strided))
        assert times[min(told, key=told.__getitem__)] <= 1.08 * min(times.values())
        assert all(2 / 3 < 1e6 * told[way] / time < 4 / 3 for way, time in times.items())


def test_rates_that_are_below_memory_alone_count(hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever rows begin on, a GPU with slow memory waits for that; TF32 is multiplied as fast as weights are read."""
    monkeypatch.setattr(tuning, "rates", lambda _: replace(tuning._H100, copy=0.3e12))
    odd = costs.costs_of(999, 1001, 1001, True, hopper)
    assert odd.load == (1.0, 1.0) and min(odd.product) > 1
    assert costs.costs_of(1000, 1000, 1000, True, hopper).product == (1.0, 1.0)
    hopper.element_size = lambda: 4
    monkeypatch.setattr(tuning, "tf32", lambda: True)
    wide = costs.costs_of(1000, 1000, 1000, True, hopper)
    assert wide.wide and wide.further == wide.further_gate == 0


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
