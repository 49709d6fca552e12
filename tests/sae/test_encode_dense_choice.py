"""The path of a layer's latents, packed or dense, and with how many slots: by what earlier calls have shown."""

from typing import Any

import pytest
import torch

from gossamer.rowsparse import Density, DensityTracker
from gossamer.rowsparse.matmul_path import break_even
from gossamer.rowsparse.pack import default_capacity
from gossamer.sae.encode_dense import again, choose_path, most_slots, slots
from tests.paths import matrix

M, D, N = 4096, 2304, 65536


def path_by(known: Density | None, kind: str = "cuda", **options: Any) -> str:
    """The path by these statistics."""
    return choose_path(known, M, matrix(N, D, kind=kind), **({"expected": None, "training": True} | options))


def counted(counts: torch.Tensor) -> Density:
    """What a tracker knows of a call with these counts."""
    tracker = DensityTracker(lag=1)
    tracker.record(counts.int(), training=True, limit=most_slots(N))
    tracker.path(lambda _: "", training=True)
    known = tracker.known(training=True)
    assert known is not None
    return known


def spread(mean: float, deviation: float) -> Density:
    """Counts whose logarithm is normal."""
    generator = torch.Generator().manual_seed(0)
    drawn = (deviation * torch.randn(M, generator=generator)).exp()
    return counted(drawn * mean / drawn.mean())


@pytest.mark.usefixtures("h200")
def test_the_mean_decides_while_rows_fit() -> None:
    limit = break_even(M, N, D, matrix(N, D))
    assert 200 < limit < 1000
    for factor, wanted in ((0.9, "sparse"), (1.1, "dense")):
        assert path_by(spread(factor * limit, 0.3)) == wanted
        assert path_by(None, expected=int(factor * limit)) == wanted
        assert path_by(spread(1.5 * factor * limit, 0.3), times=1.5) == wanted
    assert path_by(None) == "dense" and path_by(None, training=False) == "sparse"


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("training", [True, False])
def test_rows_that_overflow_make_a_layer_dense(training: bool) -> None:
    """The falling run of benchmarks/nn: a mean of 300, and rows with 38,000 entries among them. A step took an
    H200 34 ms packed while the gradients took blocks of neighbours, and 11 dense."""
    for mean, deviation in ((300, 1.4), (320, 1.3)):
        known = spread(mean, deviation)
        assert known.light / M < 250 and known.over > 20
        assert path_by(known, training=training) == "dense", (mean, known)
    assert path_by(spread(100, 0.7), training=training) == "sparse"
    few = "sparse" if training else "dense"
    for count, wanted in ((0, "sparse"), (1, few), (40, few), (2000, "dense")):
        # In training few such rows are worth it wherever they lie; else the product of one block takes as long.
        some = torch.full((M,), 60)
        some[torch.randperm(M, generator=torch.Generator().manual_seed(0))[:count]] = 5000
        assert path_by(counted(some), training=training) == wanted


@pytest.mark.usefixtures("h200")
def test_a_cpu_multiplies_the_rows_that_overflowed_alone() -> None:
    few = torch.full((M,), 60)
    few[::20] = 5000
    assert again(counted(few), True, False) == again(counted(few), False, False) == pytest.approx(0.075, rel=0.02)
    assert again(counted(few), False, True) > 1
    assert path_by(counted(few), training=False) == "dense" and path_by(counted(few), "cpu", training=False) == "sparse"


def test_no_row_overflows_that_holds_a_quarter_more() -> None:
    least = default_capacity(N)
    assert slots(None, N) is None and slots(counted(torch.tensor([3, 700])), N) is None
    assert slots(counted(torch.tensor([3, 900])), N) == 2 * least == most_slots(N)
    assert slots(counted(torch.tensor([3, 40000])), N) == most_slots(N)
    for d_sae in (1, 100, 129, 5000):
        found = slots(counted(torch.tensor([d_sae])), d_sae)
        assert (found or default_capacity(d_sae)) <= d_sae
        assert found is None or found >= default_capacity(d_sae)
    empty = counted(torch.empty(0))
    assert slots(empty, N) is None and again(empty, True, True) == 0
