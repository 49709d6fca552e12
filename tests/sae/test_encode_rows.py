"""Lists of elements that exceed a threshold, of short rows and of rows that several programs share."""

import pytest
import torch

from tests.sae.dense import check_path

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize(
    "m, n, capacity", [(3, 300, 300), (5, 2048, 64), (1, 7, 4), (2, 5000, 5000), (1, 9001, 64), (3, 17049, 700)]
)
@pytest.mark.parametrize("jump", [False, True])
def test_rows(m: int, n: int, capacity: int, jump: bool, generator: torch.Generator) -> None:
    check_path("list", m, n, capacity, jump, generator)
