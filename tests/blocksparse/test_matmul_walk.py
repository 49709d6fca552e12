"""What `blocksparse.matmul` chooses on Hopper, without a GPU: as what was measured there has it."""

from typing import Any

import pytest
import torch

from gossamer._core import tuning
from gossamer.blocksparse.matmul_path import Walk, choose_walk, dense_is_faster

pytestmark = pytest.mark.native
GPU = torch.device("cuda", 0)


def walk_of(block: int, *densities: float | None, n: int = 8192, size: int = 2) -> Any:
    """What is chosen for four matrices on 132 multiprocessors, by the densities of both operands and the result."""
    return choose_walk((block,) * 3, densities, (4, n, n, n), size, 132)


def test_choice_of_a_walk() -> None:
    """By what was measured: pairs where few products of blocks are left, else every block or those of A."""
    every = Walk(128, False, False)
    for densities in ((1.0, 1.0, 1.0), (0.98, 0.98, 0.98), (0.75, 0.75, 0.75), (None, None, 0.75)):
        assert walk_of(64, *densities) == every
    assert walk_of(64, 0.5, 0.5, 0.5) is walk_of(64, 1.0, 0.1, 1.0) is None
    assert walk_of(64, 0.75, 0.75, 0.5) == walk_of(64, 0.75, 0.75, 0.25) == Walk(64, True, True, 64)
    # Of large products the kernel for every GPU multiplies present blocks of 64.
    assert all(walk_of(64, share, None, None) is None for share in (0.5, 0.25, 0.1))
    assert walk_of(64, 0.25, None, None, n=4096) == walk_of(64, 0.1, None, None, n=4096) == Walk(64, True, False, 64)
    assert walk_of(64, 0.5, None, None, n=2048) == walk_of(64, 0.5, None, None, n=4096) == Walk(64, True, False, 64)
    assert walk_of(64, 0.75, None, None) == every
    assert walk_of(128, 0.5, 0.5, 0.5) is walk_of(128, 0.25, 0.25, 0.25) is None
    assert walk_of(128, 0.75, 0.75, 0.75) == Walk(128, True, True, 32)
    assert walk_of(128, 0.5, 1.0, None) == walk_of(128, 0.5, None, None) == Walk(128, True, False, 32)


@pytest.mark.parametrize("sparsity, n, strips", [
    (50, 1024, False), (75, 1024, True), (50, 2048, True), (75, 2048, True), (50, 4096, True), (50, 8192, True),
    (75, 8192, True),
])  # fmt: skip
@pytest.mark.parametrize("more", [-0.01, 0.0, 0.01])
def test_strips_where_they_were_faster(sparsity: int, n: int, strips: bool, more: float) -> None:
    """Blocks of 64, a quarter of both operands' absent, with a diagonal; random masks have a few more or less."""
    inputs, result = (share + (1 - share) * 64 / n + more for share in (0.75, 1 - sparsity / 100))
    want = Walk(64, True, True, 64) if strips else Walk(128, False, False)
    assert walk_of(64, inputs, inputs, result, n=n) == want


@pytest.mark.parametrize("block, size", [(64, 2), (64, 4), (128, 2), (128, 4)])
@pytest.mark.parametrize("n, result, pairs", [
    (1024, 0.5, False), (1024, 0.25, False), (2048, 0.5, False), (2048, 0.25, True), (4096, 0.5, True),
    (4096, 0.25, True), (8192, 0.5, True), (8192, 0.25, True),
])  # fmt: skip
def test_blocks_of_the_result_of_a_dense_right_operand(
    n: int, result: float, pairs: bool, block: int, size: int
) -> None:
    """The kernel for every GPU, every block on Hopper's, or strips of blocks of 128, whichever was faster."""
    for left in (None, 1.0):
        want = None if pairs else Walk(128, False, False)
        if n >= 4096 and (block, size) == (128, 2):
            want = Walk(128, left is not None, True, 32)
        assert walk_of(block, left, None, result, n=n, size=size) == want


def hopper(copy: float, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = tuning.Rates(copy, 5.5e12, 45e12, 330e12, 650e12, 132, True)
    monkeypatch.setattr(tuning, "rates", lambda index: rates)
    monkeypatch.setattr(tuning, "hopper", lambda device: True)
    monkeypatch.setattr(tuning, "tf32", lambda: False)


def path(block: int, *densities: float | None, dtype: torch.dtype = torch.bfloat16, size: int = 4096) -> str:
    blocks = [0 if densities[i] is densities[j] is None else block for i, j in ((0, 2), (0, 1), (1, 2))]
    one, two, three = blocks
    a, b, out = densities
    dense = dense_is_faster((4, size, size, size), (one, two, three), [a, b, out], dtype, GPU)
    return "dense" if dense else "blocks"


def test_many_small_blocks_go_through_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper's tensor cores, and where no matrix is made dense that is nearly empty."""
    hopper(4.2e12, monkeypatch)
    assert path(16, 1.0, 1.0, 1.0) == "dense"
    # The measured 3.8 ms, beside 0.69 of a dense product.
    assert path(16, 0.75, 0.75, 0.5) == path(32, 0.75, 0.75, 0.5) == "dense"
    assert path(16, 0.75, 0.75, 0.5, dtype=torch.float32) == path(64, 1.0, 1.0, 1.0) == "blocks"
    assert path(16, 0.1, 1.0, 1.0) == path(16, None, None, 0.2) == path(32, 0.4, 0.4, 0.4) == "blocks"
    monkeypatch.setattr(tuning, "tf32", lambda: True)
    assert path(16, 0.75, 0.75, 0.5, dtype=torch.float32) == "dense"
    # The list is that of the only block-sparse operand, on either side.
    assert path(16, None, 0.5, None) == path(16, 0.5, None, None) == "dense"
    assert path(16, 0.75, 0.75, 0.5, size=64) == "blocks"
    monkeypatch.setattr(tuning, "hopper", lambda device: False)
    assert path(16, 1.0, 1.0, 1.0) == "blocks"
