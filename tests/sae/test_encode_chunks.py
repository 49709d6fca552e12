"""Several programs for a row, where rows are few and long."""

import pytest
import torch

from tests.sae.dense import check_path

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("m, n, capacity", [(2, 5000, 5000), (1, 9001, 64), (3, 2049, 700)])
@pytest.mark.parametrize("jump", [False, True])
def test_chunks(m: int, n: int, capacity: int, jump: bool, generator: torch.Generator) -> None:
    check_path("chunks", m, n, capacity, jump, generator)
