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
"""What is known of the cases of `gossamer bench ffn`: entries of a light row, columns of a group of 32, heavy rows."""
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
CASES = [
    case
    for file in ("ffn-blocks-nvidia-h200.json", "ffn-plain-nvidia-h200.json")
    for case in json.loads((RESULTS / file).read_text())["cases"]
]


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
