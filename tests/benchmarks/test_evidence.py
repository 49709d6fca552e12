"""docs/evidence.md: each command is one that exists, and tables and figures say what results have."""

import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import evidence, evidence_plots
from benchmarks.blocksparse.train import WAYS
from benchmarks.engine.case import load_cases
from benchmarks.engine.command import BENCHMARKS

ITEMS = [item for items in evidence.DOCUMENTS.values() for item in items]


def test_the_page_is_that_of_the_results() -> None:
    """Figures are there for each result; other versions of matplotlib draw other bytes."""
    assert evidence.main(["--check"]) == 0
    drawn = {item.picture.name for item in ITEMS if item.draw and evidence.latest(item.stem)}
    assert {path.name for path in evidence.PICTURES.glob("*.png")} == drawn


def test_each_figure_and_table_has_a_command_or_a_reason() -> None:
    for item in ITEMS:
        assert item.command or item.said.startswith("Not "), item.what
        assert bool(item.draw or item.rows) == bool(item.stem), item.what


@pytest.mark.parametrize("command", sorted({i.command for i in ITEMS if i.command.startswith(evidence.BENCH + " ")}))
def test_the_cases_of_a_command_exist(command: str) -> None:
    _, _, _, room, *options = shlex.split(command)
    given = dict(pairwise(options))
    lengths = {"lengths": (1024,)} if "--length" in given else {}
    cases = load_cases(BENCHMARKS, room, given.get("--case"), torch.device("cuda"), False, lengths)
    assert cases
    asked = {"ready_l0": 8, "ready_features": 5, "decode_ready": 5, "llama_8b": 8, "llama_70b": 8, "llama_405b": 8}
    for name, count in asked.items():
        assert sum(case.name == name for case in cases) in (0, count)


def provider(name: str, seconds: float, graph: float | None = None) -> dict[str, Any]:
    timings = {"eager": {"median": seconds}, "graph": {"median": graph} if graph else None}
    return {"name": name, "ours": name.startswith("gossamer"), "peak_bytes": 2**30, "joules": seconds} | timings


def case(name: str, providers: list[dict[str, Any]], **parameters: Any) -> dict[str, Any]:
    made = {"name": name, "parameters": parameters, "providers": providers, "dtype": "float32", "tokens": 1000}
    return made | {"flops": 10**12, "bytes": 10**9}


def result(*cases: dict[str, Any], **more: Any) -> dict[str, Any]:
    ceilings = {"bandwidth": 1e12, "gemm": {"bfloat16": 1e15}}
    return {"cases": list(cases), "device": {"name": "GPU"}, "started": "2026", "ceilings": ceilings, **more}


GATED = result(
    *(
        case(
            f"llama_{size}",
            [provider("gossamer", 2.0, 1.0), provider(evidence_plots.IN_PLACE, 3.0, 1.5)],
            M=M,
            K=2,
            N=3,
        )
        for size in ("8b", "70b")
        for M in (1024, 65536)
    )
)
READY = result(
    *(
        case(name, [provider("gossamer ELL", 2.0, 1.0), provider("dense", 9.0, 8.0)], B=32, F=F, D=768, L0=64)
        for name in ("ready_l0", "ready_features")
        for F in (4096, 8192)
    )
)


def test_rows_of_results() -> None:
    assert evidence.gated(GATED)[1:] == [
        ["1,024", "1.50", "", "1.50", "", "", ""],
        ["65,536", "1.50", "", "1.50", "", "", ""],
    ]
    assert evidence.ready(READY)[1] == ["B 32, F 4,096, D 768, L0 64", "8.00", "", "", "", ""]
    runs = [
        {"way": way, "length": 64, "batch": batch, "seconds": at, "peak_bytes": at * 2**30}
        for at, way in enumerate(WAYS, 1)
        for batch in (1, 2)
    ]
    made = evidence.training(result(runs=runs, largest_difference=1e-3))
    assert made[1] == ["64, 1", "1.00 GiB", "2.00 GiB", "3.00 GiB"]
    assert made[2] == ["64, 2", "1.00 GiB, 1.0 s", "2.00 GiB, 2.0 s", "3.00 GiB, 3.0 s"] and "1.0e-03" in made[3][1]
    layer = result(case("gated_sparse_attention", [provider("gossamer", 2.0, 1e-3)], B=2, T=64, hidden=2048, k=32))
    least = sum(flops for flops, _ in evidence.counted(64, 2048, 32).values())
    rate = f"{2 * least / 1e9:.0f}"
    assert evidence.layers(layer)[1] == ["T 64, gossamer", "1,000", "128,000", rate, "1,024"]
    whole = evidence.stages(layer)[-1]
    assert whole[0] == "all" and whole[2] == "100.0%"
    model = result(case("model", [provider("gossamer", 2.0), provider("dense", 3.0)], layers=28, entries=29))
    assert evidence.whole(model)[1][1:] == ["0", "0", "+50.0%", "3.00", "2.00", "33.3%"]


@pytest.mark.parametrize(("draw", "content"), [(evidence_plots.gated, GATED), (evidence_plots.ready, READY)])
def test_figures_are_drawn(draw: Any, content: dict[str, Any], tmp_path: Path) -> None:
    draw(content, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_a_result_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(evidence_plots, "RESULTS", tmp_path)
    assert "not measured yet" in evidence.page() and "![" not in evidence.page()


def test_commands_are_run_once_and_failures_end_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    class Done:
        returncode = 1

    monkeypatch.setattr(evidence.subprocess, "run", lambda words, cwd: ran.append(words) or Done())
    assert evidence.measure(["*blocksparse*"]) == len(ran) == 5
    assert [words[1:] for words in ran][-1] == ["-m", "benchmarks.blocksparse.train"]
    assert not any("corpus" in words for words in ran)
    ran.clear()
    assert evidence.measure(["nothing"]) == 1 and not ran
