"""A program for each row that lists what exceeds its threshold."""

import pytest
import torch

from tests.sae.dense import check_path

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("m, n, capacity", [(3, 300, 300), (5, 2048, 64), (1, 7, 4)])
@pytest.mark.parametrize("jump", [False, True])
def test_rows(m: int, n: int, capacity: int, jump: bool, generator: torch.Generator) -> None:
    check_path("rows", m, n, capacity, jump, generator)
