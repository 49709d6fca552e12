"""`python -m benchmarks` and its sweep on the room attention."""

import json
import re
from pathlib import Path

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
    shown = re.findall(r"^  (gsa/.*): [0-9.]+ ms in 3 calls$", text, re.M)
    names = ("qkv_proj", "value_gate, rotary_emb", "indexer", "topk_select", "sparse_attn", "output_gate", "o_proj")
    assert set(shown) == {f"gsa/{name}" for name in names}
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


def test_cases_that_are_left_out_are_told() -> None:
    """Of a file that takes no batch, in a room of which no file takes a dtype, and where nothing is left."""
    told: list[str] = []
    cases = load_cases(BENCHMARKS, "attention", None, CPU, True, {"batch": 2}, tell=told.append)
    assert cases and all(case.parameters["B"] == 2 for case in cases)
    assert told == ["left out: 6 of 6 cases of attention/bench_select_topk.py"]
    whole = load_cases(BENCHMARKS, "gemm", None, CPU, True)
    kept = load_cases(BENCHMARKS, "gemm", None, CPU, True, {"dtype": torch.float32}, tell=told.append)
    assert [case.id for case in kept] == [case.id for case in whole] and len(told) == 1
    for given, room, option in (({"dtype": torch.float16}, "gemm", "--dtype"), ({"lengths": (64,)}, "sae", "--length")):
        with pytest.raises(ValueError, match=f"no case of {room} has that {option}; --list shows every case"):
            load_cases(BENCHMARKS, room, None, CPU, True, given)


def test_results_are_checked_at_another_length(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """At that length alone, by the error that is asked for; and a wrong result ends with 1, without a timing."""
    given = ["attention", "--device", "cpu", "--quick", "--case", "gated_sparse_attention", "--provider", "gossamer"]
    given += ["--length", "256", "--verify-length", "128", "--out", str(tmp_path)]
    found = CliRunner().invoke(main, [*given, "--atol", "0.1"])
    assert found.exit_code == 0, found.output
    assert "checked attention/gated_sparse_attention/B=1,T=128,hidden=64" in found.output
    assert "tokens/ms" in found.output and "FLOP a byte" in found.output
    (file,) = tmp_path.glob("*.json")
    content = json.loads(file.read_text())
    (case,) = content["cases"]
    assert content["settings"]["verify_length"] == 128 and not content["settings"]["verify"]
    assert (case["parameters"]["T"], case["tokens"], case["providers"][0]["error"]) == (256, 256, None)
    assert case["providers"][0]["budget"] == 0.1
    file.unlink()
    wrong = CliRunner().invoke(main, [*given, "--atol", "1e-30"])
    assert wrong.exit_code == 1 and "gossamer: WRONG: error" in wrong.output and "exceeds 1e-30" in wrong.output
    assert not list(tmp_path.iterdir())


def test_the_stages_of_a_layer() -> None:
    """The published count of FLOPs at T 4,096, whose scores and attention are not causal."""
    from benchmarks.attention.bench_gated_sparse_attention import least_flops, stages

    T, width, k = 4096, 2048, 2048
    found = stages(T, width, k)
    seen, taken = T * (T + 1) / 2, k * (k + 1) / 2 + (T - k) * k
    indexer = 2 * T * width * (256 + 64 + 4) + 2 * 64 * 4 * seen
    assert least_flops(T, width, k, False) == 12 * T * width**2 + indexer + 4 * width * taken
    assert least_flops(T, width, k, True) == 3 * (12 * T * width**2 + 4 * width * taken) + indexer
    assert found["output projection"] == (2 * T * width**2, 2 * (2 * T * width + width**2))
