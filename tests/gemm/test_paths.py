"""The paths of calls of gemm: by the table of docs/gemm.md, and by the ranges of a profiler."""

import pytest
import torch

from gossamer import gemm
from gossamer._core import tuning
from gossamer.gemm import linear_glu_path, linear_pack_path
from gossamer.gemm.records import LinearGlu, LinearPack
from tests.paths import calls_of, matrix_on, number, ranges_of

CALLS = calls_of("gemm.md", "## The path of a call", 6)
PATHS = {"linear_glu": linear_glu_path, "linear_pack": linear_pack_path}


@pytest.mark.native
@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("row", CALLS, ids=" ".join)
def test_the_table_of_the_docs(row: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    operator, (m, k, n), path = row[0], map(number, row[1:4]), row[5]
    monkeypatch.setattr(tuning, "hopper", lambda device: "Hopper" in row[4])
    monkeypatch.setattr(PATHS[operator], "INTERPRET", False)
    x, weight = matrix_on(row[4], m, k), matrix_on(row[4], n, k)
    chosen = {
        "linear_glu": lambda: linear_glu_path.choose_path(LinearGlu(x, weight, weight, None, None, "silu", False)),
        "linear_pack": lambda: linear_pack_path.choose_path(LinearPack(x, weight, None, None, 128, False)),
    }
    assert chosen[operator]() == path


@pytest.mark.native
def test_the_docs_name_every_path() -> None:
    named = {(operator, path) for operator, module in PATHS.items() for path in module.PATHS}
    assert named == {(row[0], row[5]) for row in CALLS}


def test_what_runs_is_named(device: torch.device, mode: str) -> None:
    """In a profiler's range, wherever kernels run."""
    x, weight = (torch.randn(*size, device=device) for size in ((3, 16), (16, 16)))
    calls = gemm.linear_glu, (lambda x, weight: gemm.linear_glu(x[:1], weight, weight)), gemm.linear_pack
    names = ranges_of("gossamer::gemm.", lambda: [call(x, weight) for call in calls])
    several = "tiles" if mode == "interpreter" else "products"
    wanted = {f"linear_glu/{several}", "linear_glu/row", "linear_pack/blocks"}
    assert names == (set() if mode == "cpu" else wanted)
