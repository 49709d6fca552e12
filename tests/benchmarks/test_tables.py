"""The generated places of the documents: what a later result puts into them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tables


def case(nnz: int, ours: float, dense: float) -> dict[str, Any]:
    def provider(name: str, seconds: float) -> dict[str, Any]:
        timing = {"median": seconds}
        return {"name": name, "ours": name == "gossamer", "precision": "highest", "eager": timing, "graph": None}

    parameters = {"M": 512, "K": 64, "N": 1000, "nnz": nnz}
    return {
        "name": "gated",
        "parameters": parameters,
        "dtype": "bfloat16",
        "providers": [provider("gossamer", ours), provider("dense", dense)],
    }


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for file in ("sae", "gemm", "nn"):
        shutil.copy(tables.RESULTS / f"{file}-nvidia-h200.json", tmp_path)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    return tmp_path


def row(table: str, name: str) -> list[str]:
    (line,) = [line for line in table.splitlines() if line.startswith(f"| `{name}`")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_result_that_is_not_there_is_said(results: Path) -> None:
    assert row(tables.break_evens(), "ffn.gated")[1] == "not measured yet: `gossamer bench ffn`"
    assert "No sweep is committed yet" in tables.sweeps()


def test_break_evens_come_from_the_densities_that_were_measured(results: Path) -> None:
    cases = [case(100, 2.0, 3.0), case(10, 1.0, 4.0), case(500, 5.0, 3.0), case(200, 3.0, 3.0)]
    (results / "ffn-nvidia-h200.json").write_text(json.dumps({"cases": cases}))
    assert row(tables.break_evens(), "ffn.gated")[1:] == ["M 512, K 64, N 1,000, bfloat16", "4 at 1.0%", "20%", "50%"]
    (results / "ffn-nvidia-h200.json").write_text(json.dumps({"cases": cases[:2]}))
    assert row(tables.break_evens(), "ffn.gated")[3:] == ["10%", "none measured"]


def test_a_sweep_has_a_row_for_each_kind_of_case(results: Path) -> None:
    figures = {"cases": 7, "geometric_mean": 2.25, "slower_by_5%_and_3us": 1 / 7, "worst": [{"id": "a", "ratio": 0.5}]}
    content = {"device": {"name": "NVIDIA H200"}, "summary": {"dense": {"matmul": figures, "all": {"cases": 0}}}}
    (results / "sweep-rowsparse-nvidia-h200.json").write_text(json.dumps(content))
    assert "| NVIDIA H200: matmul | 7 | 2.25 | 14.3% | 0.50 |" in tables.sweeps().splitlines()


def test_places_are_filled_in_order() -> None:
    made = [f"{tables.BEGIN}\n{text}\n{tables.END}" for text in ("one", "two")]
    page = f"before\n{tables.BEGIN}\nold\n{tables.END}\nbetween\n{tables.BEGIN}\n{tables.END}\nafter\n"
    assert tables.filled(page, *made) == f"before\n{made[0]}\nbetween\n{made[1]}\nafter\n"
    with pytest.raises(ValueError):
        tables.filled(page, *made, made[0])
