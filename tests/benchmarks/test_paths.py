"""The table of every path."""

import re

import pytest

from benchmarks import paths
from gossamer._core.operator import PATHS

pytestmark = pytest.mark.native


def test_the_page_is_that_of_the_source() -> None:
    assert paths.PAGE.read_text() == paths.page()


def test_paths_are_few_and_each_has_a_condition_and_steps() -> None:
    text = paths.page()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) == sum(map(len, PATHS.values())) <= paths.MOST
    assert all(len(row) == 4 and row[2].strip() and row[3].strip(" |") for row in rows)
    assert re.search(rf"^{len(rows)} paths of {len(PATHS)} functions", text, re.M)
