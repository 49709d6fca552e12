"""A few seconds of the random search of `tests/neighbours.py`."""

from collections.abc import Callable

import pytest

from tests.neighbour_scenarios import SCENARIOS
from tests.neighbours import Case, Scenario, check


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_neighbours(scenario: Callable[[Case], Scenario]) -> None:
    outcomes = [check(scenario, seed) for seed in range(40)]
    assert outcomes.count("ran") > 30
