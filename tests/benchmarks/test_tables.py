"""The generated places of the documents: what a later result puts into them."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tables
from benchmarks.engine.random_cases import summary


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


def row(table: list[str], name: str) -> list[str]:
    (line,) = [line for line in table if line.startswith(f"| `{name}`")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_result_that_is_not_there_is_said(results: Path) -> None:
    assert row(tables.break_evens(), "ffn.gated")[1] == "not measured yet: `python -m benchmarks ffn`"
    assert tables.sweeps() == ["No sweep is committed yet. `python -m benchmarks sweep` makes one."]


def test_break_evens_come_from_the_densities_that_were_measured(results: Path) -> None:
    cases = [case(100, 2.0, 3.0), case(10, 1.0, 4.0), case(500, 5.0, 3.0), case(200, 3.0, 3.0)]
    (results / "ffn-blocks-nvidia-h200.json").write_text(json.dumps({"cases": cases}))
    assert row(tables.break_evens(), "ffn.gated")[1:] == ["M 512, K 64, N 1,000, bfloat16", "4 at 1.0%", "20%", "50%"]
    (results / "ffn-blocks-nvidia-h200.json").write_text(json.dumps({"cases": cases[:2]}))
    assert row(tables.break_evens(), "ffn.gated")[3:] == ["10%", "none measured"]


def sweep_file(cases: int, worst: float, room: str = "rowsparse") -> dict[str, Any]:
    """As `python -m benchmarks sweep` writes it: every second case is at `worst`, the others at 2."""

    def provider(name: str, seconds: float) -> dict[str, Any]:
        return {"name": name, "ours": name == "gossamer", "eager": {"median": seconds}, "graph": None}

    records = [
        {
            "room": room,
            "name": "matmul",
            "id": f"{room}/matmul/M={at},N=2,float32",
            "parameters": {"M": at, "N": 2},
            "providers": [provider("gossamer", 1e-3), provider("dense", 1e-3 * (worst if at % 2 else 2.0))],
        }
        for at in range(cases)
    ]
    device = {"name": "NVIDIA H200", "runtime": "CUDA 13", "driver": "580"}
    made = {"device": device, "versions": {"torch": "2.13", "triton": "3.7"}, "commit": "abc"}
    return made | {"command": "gossamer", "started": "2026", "cases": records, "summary": summary(records)}


def test_a_sweep_has_a_row_for_each_kind_of_peer(results: Path) -> None:
    (results / "sweep-rowsparse-nvidia-h200.json").write_text(json.dumps(sweep_file(8, 0.5)))
    made = tables.sweeps()
    figures = "8 | 50.0% | 50.0% | 1.00 | 0.50 | 50.0% |"
    for peer in ("dense PyTorch", "the best peer"):
        assert f"| `rowsparse` | {peer} | {figures}" in made
    assert "- rowsparse: NVIDIA H200 (CUDA 13, driver 580), PyTorch 2.13, Triton 3.7, commit abc, `gossamer`." in made


def test_readme_has_a_line_for_each_room_that_was_swept(results: Path) -> None:
    assert tables.NO_SWEEP in tables.slower() and tables.NO_SWEEP in tables.densities()
    (results / "sweep-nvidia-h200.json").write_text(json.dumps(sweep_file(8, 0.98)))
    (results / "sweep-ffn-nvidia-h200.json").write_text(json.dumps(sweep_file(4, 4.0, "ffn")))
    lines = tables.slower()
    assert "| `rowsparse` | 8 | 50.0% | 0.0% | 1.40 | 0.98 |  |" in lines
    assert "| `ffn` | 4 | 0.0% | 0.0% | 2.83 | 2.00 |  |" in lines
    # The newer of two sweeps of a room counts.
    for started, worst in (("2020", 0.25), ("2030", 0.5)):
        content = sweep_file(6, worst) | {"started": started}
        (results / f"sweep-rowsparse-{started}.json").write_text(json.dumps(content))
    assert "| `rowsparse` | 6 | 50.0% | 50.0% | 1.00 | 0.50 |  |" in tables.slower()


@pytest.mark.parametrize(
    ("room", "parameters", "what"),
    [
        ("sae", {"F": 1000, "L0": (1, 10, 100, 1000)}, "of the latents of a row"),
        ("ffn", {"N": 1000, "nnz": (1, 10, 100, 1000)}, "of a token's neurons"),
        ("attention", {"T": 1000, "k": (1, 10, 100, 1000)}, "of the keys"),
        ("blocksparse", {"sparsity": (99.5, 98, 90, 0)}, "of the blocks"),
    ],
)
def test_a_room_of_which_every_case_has_a_density_is_told_by_density(
    results: Path, room: str, parameters: dict[str, Any], what: str
) -> None:
    content = sweep_file(4, 0.5, room)
    for at, made in enumerate(content["cases"]):
        made["parameters"] = {name: x[at] if isinstance(x, tuple) else x for name, x in parameters.items()}
    (results / f"sweep-{room}-nvidia-h200.json").write_text(json.dumps(content))
    told = [line for line in tables.densities() if line.startswith(f"| `{room}`")]
    assert [[cell.strip() for cell in line.split("|")[2:7]] for line in told] == [
        [f"{label} {what}", "1", below, below, mean]
        for label, below, mean in (
            ("up to 1%", "0.0%", "2.00"),
            ("1% to 5%", "100.0%", "0.50"),
            ("5% to 25%", "0.0%", "2.00"),
            ("25% or more", "100.0%", "0.50"),
        )
    ]
    assert f"| `{room}` | 4 | 50.0% | 50.0% | 1.00 | 0.50 | 2.00, up to 1% |" in tables.slower()
    del content["cases"][0]["parameters"][max(parameters)]
    (results / f"sweep-{room}-nvidia-h200.json").write_text(json.dumps(content))
    assert not any(f"`{room}`" in line for line in tables.densities())


def test_selecting_is_beside_dense_attention_by_length() -> None:
    content = tables.read("attention-selected-nvidia-h100-80gb-hbm3.json")
    (case,) = [c for c in content["cases"] if c["name"] == "selected_attention" and c["parameters"]["T"] == 32768]
    times = {p["name"]: (p["graph"] or p["eager"])["median"] for p in case["providers"] if p["eager"]}
    (line,) = [line for line in tables.selecting() if line.startswith("| 32,768 |")]
    assert line.split("|")[2].strip() == f"{times['dense SDPA, cuDNN'] / times['gossamer']:.2f}"


def test_the_page_has_ten_tables_and_links_every_result() -> None:
    page = tables.page()
    assert page.count("| gossamer |") == len(tables.SECTIONS) == 10
    for file in tables.RESULTS.glob("*.json"):
        assert page.count(f"(../benchmarks/results/{file.name})") == 1, file


def test_a_row_of_the_page() -> None:
    """Ours, the dense way, and the fastest of the peers that do the same."""
    found = case(10, 2.0, 4.0)
    found["providers"].append({**found["providers"][1], "name": "peer", "eager": {"median": 3.0}})
    for provider, memory in zip(found["providers"], (1, 4, 9)):
        provider["peak_bytes"] = memory
    (row,) = tables.times([found], named=False)[2:]
    cells = [cell.strip() for cell in row.split("|")[2:-1]]
    assert cells == ["2,000,000", "4,000,000", "3,000,000 peer", "1.50", "25%"]


def test_the_last_runs_of_the_tests_on_a_gpu() -> None:
    lines = [line for line in tables.tests() if line.startswith("| `")]
    files = ("tests-nvidia-h200.json", "tests-nvidia-h100-80gb-hbm3.json")
    runs = [run for file in files for run in tables.read(file)["runs"][-tables.LAST_RUNS :]]
    for line, run in zip(lines, runs, strict=True):
        passed, failed, skipped = (run["counts"][name] for name in ("passed", "failed", "skipped"))
        assert line.endswith(f"| `{run['commit']}` | {passed} | {failed} | {skipped} |")


def test_places_are_filled_in_order() -> None:
    made = [f"{tables.BEGIN}\n{text}\n{tables.END}" for text in ("one", "two")]
    page = f"before\n{tables.BEGIN}\nold\n{tables.END}\nbetween\n{tables.BEGIN}\n{tables.END}\nafter\n"
    assert tables.filled(page, ["one"], ["two"]) == f"before\n{made[0]}\nbetween\n{made[1]}\nafter\n"
    with pytest.raises(ValueError):
        tables.filled(page, ["one"], ["two"], ["three"])


def test_a_cpu_has_no_driver() -> None:
    device = {"type": "cpu", "name": "EPYC", "cores": 2, "threads": 2}
    made = tables.environment({"device": device, "versions": {"torch": "2.13", "triton": "3.7"}})
    assert made == "EPYC, 2 threads, PyTorch 2.13"


def test_a_time_on_a_gpu_is_in_a_committed_result() -> None:
    """Of users' pages: the tables that are generated aside, each paragraph that gives a GPU's figures links a file."""
    for page in (tables.README, *sorted((tables.ROOT / "docs").glob("*.md"))):
        text = re.sub(f"{tables.BEGIN}.*?{tables.END}", "", page.read_text(encoding="utf-8"), flags=re.S)
        for paragraph in re.split(r"\n\s*\n|\n(?=- |#)", text):
            if re.search(r"\bH[12]00\b", paragraph) and re.search(r"\d (us|ms|GiB|MiB)\b|\btook \d", paragraph):
                assert "benchmarks/results/" in paragraph or page.name == "evidence.md", (page.name, paragraph)
