"""`python -m benchmarks` and its sweep on the room attention."""

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.__main__ import main
from benchmarks.engine.case import load_cases
from benchmarks.engine.command import BENCHMARKS
from benchmarks.engine.random_cases import draw_cases

CPU = torch.device("cpu")


def test_ranges_are_shown_for_a_profiler() -> None:
    """All of them, however many operators there are."""
    given = [
        "--device",
        "cpu",
        "--quick",
        "--profile",
        "--case",
        "*/gated_sparse_attention/*",
        "--provider",
        "gossamer",
    ]
    result = CliRunner().invoke(main, ["attention", *given])
    assert result.exit_code == 0, result.output
    text = result.output
    shown = [line.split()[0] for line in text.splitlines() if line.strip().startswith("gsa/")]
    assert {"gsa/qkv_proj", "gsa/indexer", "gsa/topk_select", "gsa/sparse_attn", "gsa/o_proj"} <= set(shown)
    assert text.index("gsa/topk_select") < text.index("aten::")


def test_dense_attention_is_pinned_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is called cuDNN's is computed by nothing else."""
    from benchmarks.attention import bench_selected_attention, bench_sparse_attention

    def names(device: str) -> set[str]:
        modules = bench_selected_attention, bench_sparse_attention
        made = [case for module in modules for case in module.cases(torch.device(device), False, lengths=(4096,))]
        return {p.name for case in made if case.name != "sparse_decode" for p in case.providers if "SDPA" in p.name}

    mask = "dense SDPA, the selection as mask"
    assert names("cpu") == {"dense SDPA", mask}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert names("cuda") == {"dense SDPA, cuDNN", mask}


def test_the_sweep_of_attention_draws_selections() -> None:
    cases = draw_cases(BENCHMARKS, "attention", 40, 0, CPU, True)
    names = [case.name for case in cases]
    assert 0 < names.count("select_topk") < 20 and {"sparse_attention", "sparse_decode"} <= set(names)
    peers = {p.name for case in cases if case.name == "select_topk" for p in case.providers if not p.ours}
    assert peers == {"dense scores, torch.topk"}


def test_lengths_of_attention() -> None:
    given = {"lengths": (128,), "dtype": torch.float16, "batch": 2}
    cases = load_cases(BENCHMARKS, "attention", None, CPU, True, given, "gossamer")
    named = [case for case in cases if case.name.startswith("sparse_attention")]
    assert {case.name for case in named} == {
        "sparse_attention", "sparse_attention_training", "sparse_attention_random", "sparse_attention_training_random",
    }  # fmt: skip
    assert all(case.parameters["T"] == 128 and case.parameters["B"] == 2 for case in named)
    assert all(case.dtype is torch.float16 for case in cases)
