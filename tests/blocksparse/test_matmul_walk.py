"""What `blocksparse.matmul` chooses on Hopper, without a GPU: as what was measured there has it."""

from typing import Any

import pytest
import torch

from gossamer.blocksparse._gluon.matmul_walk import Walk, band_of, choose_walk

pytestmark = pytest.mark.native


def walk_of(block: int, *densities: float | None, n: int = 8192, size: int = 2) -> Any:
    """What is chosen for four matrices on 132 multiprocessors, by the densities of both operands and the result."""
    parts = []
    for density in densities:
        stored = [torch.empty(round(1000 * (density or 0))), torch.empty(1000)]
        parts.append((None,) * 6 if density is None else (stored[0], stored[0], None, None, None, stored[1]))
    return choose_walk((block,) * 3, *parts, (4, n, n, n), size, 132)


def test_choice_of_a_walk() -> None:
    """By what was measured: pairs where few products of blocks are left, else every block or those of A."""
    every = Walk(128, False, False)
    for densities in ((1.0, 1.0, 1.0), (0.98, 0.98, 0.98), (0.75, 0.75, 0.75), (None, None, 0.75)):
        assert walk_of(64, *densities) == every
    assert walk_of(64, 0.5, 0.5, 0.5) is walk_of(64, 1.0, 0.1, 1.0) is None
    assert walk_of(64, 0.75, 0.75, 0.5) == walk_of(64, 0.75, 0.75, 0.25) == Walk(64, True, True, 64)
    assert walk_of(64, None, None, 0.25) == Walk(64, False, True, 64)
    assert walk_of(64, 0.25, None, None) == walk_of(64, 0.1, None, None) == Walk(64, True, False, 64)
    assert walk_of(128, 0.5, 0.5, 0.5) is walk_of(128, 0.25, 0.25, 0.25) is None
    assert walk_of(128, 0.75, 0.75, 0.75) == Walk(128, True, True, 32)
    assert walk_of(128, 0.5, 1.0, None) == walk_of(128, 0.5, None, None) == Walk(128, True, False, 32)


@pytest.mark.parametrize("sparsity, n, strips", [
    (50, 1024, False), (75, 1024, False), (50, 2048, True), (75, 2048, True), (50, 4096, True), (50, 8192, True),
    (75, 8192, True),
])  # fmt: skip
@pytest.mark.parametrize("more", [-0.01, 0.0, 0.01])
def test_strips_where_they_were_faster(sparsity: int, n: int, strips: bool, more: float) -> None:
    """Blocks of 64, a quarter of both operands' absent, with a diagonal; random masks have a few more or less."""
    inputs, result = (share + (1 - share) * 64 / n + more for share in (0.75, 1 - sparsity / 100))
    want = Walk(64, True, True, min(64, n // 64)) if strips else Walk(128, False, False)
    assert walk_of(64, inputs, inputs, result, n=n) == want


def test_a_band_of_strips_is_of_one_matrix() -> None:
    assert [band_of(64, rows) for rows in (1, 16, 31, 32, 63, 64, 1000)] == [16, 16, 16, 32, 32, 64, 64]
    assert [band_of(128, rows) for rows in (8, 31, 32, 64)] == [16, 16, 32, 32]
