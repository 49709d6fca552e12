"""What the ways are said to cost, against what they took."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gossamer._core import tuning
from gossamer.ffn import costs
from gossamer.ffn.block import METHODS
from gossamer.rowsparse import Density

KNOWN = {1: (1, 0.0), 10: (10, 0.0), 29: (29, 0.0), 100: (100, 0.0), 300: (300, 1.0), 900: (900, 1.0)}
KNOWN |= {"40, 440 in 15%": (40, 0.15)}
"""What is known of the cases of `benchmarks ffn`: entries of a light row, share of heavy rows."""
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
]
"""K = D, N, bytes of an element, M, active neurons of a row, and us of gathering with W_down by rows and by columns, of
the dense and of the fused path: a single row of many entries, and float32 without TF32. H100, PyTorch 2.11, as graphs,
weights rotated over four layers."""


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An operand of 16 bits on an H200, as far as `costs_of` looks at it."""
    monkeypatch.setattr(costs, "INTERPRET", False)
    monkeypatch.setattr(tuning, "hopper", lambda _: True)
    monkeypatch.setattr(tuning, "rates", lambda _: tuning._H200)
    device = torch.device("cuda")
    return SimpleNamespace(is_cuda=True, element_size=lambda: 2, get_device=lambda: 0, device=device)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_the_path_that_took_the_least(case: dict[str, Any], hopper: Any) -> None:
    """Within 5%, as graphs, with W_down by rows; without a gate the fused path is the dense one."""
    given, gated = case["parameters"], case["name"] == "gated"
    times = {p["name"].removeprefix("gossamer, "): p["graph"]["median"] for p in case["providers"] if p["graph"]}
    times = {name: time for name, time in times.items() if name in METHODS}
    m, k, n = given["M"], given["K"], given["N"]
    light, share = KNOWN[given["nnz"]]
    over = int(m * share)
    rows = Density(m, light, light, over, light * (m - over))
    cost = replace(costs.costs_of(n, k, k, gated, hopper), by_rows=True)
    path = costs.choose_path(rows, m, cost)
    assert times["dense" if path == "fused" and not gated else path] <= 1.05 * min(times.values()), path


@pytest.mark.parametrize("k, n, size, m, mean, took", FEW_ROWS)
def test_few_rows_by_what_was_measured(
    k: int, n: int, size: int, m: int, mean: float, took: tuple[int, ...], hopper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path that is chosen takes at most 8% longer than the fastest."""
    monkeypatch.setattr(tuning, "rates", lambda _: tuning._H100)
    hopper.element_size = lambda: size
    known = Density(1000, mean, mean, 0, round(1000 * mean))
    for by_rows, gathered in zip((True, False), took[:2], strict=True):
        times = {"gather": gathered, "dense": took[2], "fused": took[3]}
        path = costs.choose_path(known, m, replace(costs.costs_of(n, k, k, True, hopper), by_rows=by_rows))
        assert times[path] <= 1.08 * min(times.values())


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("m", [1, 2, 16, 17, 2048, 65536])
def test_more_entries_never_make_gathering_faster(m: int, gated: bool, hopper: Any) -> None:
    for size, by_rows in ((2, True), (2, False), (4, True)):
        hopper.element_size = lambda size=size: size
        cost = replace(costs.costs_of(5632, 2048, 2048, gated, hopper), by_rows=by_rows)
        dense = min(costs.dense_seconds(m, cost).values())
        faster = [dense < costs.sparse_seconds(m, cost, nnz) for nnz in range(0, 5633, 16)]
        assert faster == sorted(faster) and faster[-1]
        times = [costs.sparse_seconds(m, cost, 29.0, over / 10) for over in range(11)]
        assert times == sorted(times)


def test_rows_that_cannot_be_gathered_at_speed(hopper: Any) -> None:
    """Multiples of 8 are fast in 16 bits."""
    known = Density(1000, 1, 1, 0, 1000)
    for sizes, gathers in (((999, 1000, 1000), False), ((1000, 1001, 1000), False), ((1000, 1000, 1000), True)):
        cost = costs.costs_of(*sizes, True, hopper)
        assert (costs.choose_path(known, 20_000, cost) == "gather") == gathers


@pytest.mark.parametrize(
    "m, k, n, nnz, gathers",
    [
        (15365, 240, 1056, 44, False),
        (5348, 251, 933, 21, True),
        (13, 6963, 31760, 3, False),
        (13, 6960, 31760, 3, True),
    ],
)
def test_float32_rows(m: int, k: int, n: int, nnz: int, gathers: bool, hopper: Any) -> None:
    """An H200 took 735 us for the first case gathered and 395 dense, for one row in six had more entries in a tile than
    there are slots; 120 and 181 for the second; 1,921 and 1,436 for the third, whose rows do not begin on 16 bytes."""
    hopper.element_size = lambda: 4
    cost = replace(costs.costs_of(n, k, k, m == 13, hopper), by_rows=True)
    path = costs.choose_path(Density(1000, nnz, nnz, 0, 1000 * nnz), m, cost)
    assert (path == "gather") == gathers


def test_rows_that_overflow_their_slots() -> None:
    """Of 200,000 random rows of 256 columns, as many as counted."""
    for share in (0.03, 0.05, 0.08):
        counts = torch.poisson(torch.full((200_000,), 256 * share), generator=torch.Generator().manual_seed(0))
        assert costs.overflowing(256 * share, 256) == pytest.approx(float((counts > 16).float().mean()), abs=5e-3)
    assert costs.overflowing(0, 0) == 0 == round(costs.overflowing(29, 5632), 6)
    assert costs.overflowing(5632, 5632) == pytest.approx(22)


def test_rows_that_are_counted_stand_at_many_places_of_their_sequences() -> None:
    """Whatever power of two the length is."""
    for m in (1024, 16384, 65536):
        step, length = costs.sample_step(m), m // 8
        counted = range(0, m, step)
        assert 200 <= len(counted) <= 256 and len({row % length for row in counted}) > len(counted) // 2
    assert [costs.sample_step(m) for m in (1, 200, 512)] == [1, 1, 3]


def test_an_eager_call_saves_the_device_more_than_it_adds_to_the_host(hopper: Any) -> None:
    """A graph goes by the device alone."""
    known, cost = Density(1000, 29, 29, 0, 29_000), costs.costs_of(5632, 2048, 2048, True, hopper)
    ways = ((True, False), (True, True), (False, False))  # eager, and by launches that are repeated
    paths = {m: tuple(costs.choose_path(known, m, cost, *way) for way in ways) for m in (1, 200, 16384)}
    assert paths[1] == ("dense", "gather", "gather") and paths[16384] == ("gather",) * 3
    assert paths[200] == ("dense", "dense", "fused")
