"""The scripts that measure the error and the memory of `gemm.linear_glu` notice what they are there for."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from benchmarks.__main__ import main
from benchmarks.gemm import accuracy_linear_glu as accuracy
from benchmarks.gemm import memory_linear_glu as memory

CPU = ["--device", "cpu"]


def results(folder: Path) -> dict:
    (file,) = folder.glob("*.json")
    return json.loads(file.read_text())


def test_the_error_is_that_of_rounding(tmp_path: Path) -> None:
    accuracy.main([*CPU, "--draws", "2", "--out", str(tmp_path)])
    for size in results(tmp_path)["sizes"]:
        relative = {name: found["mean"] for name, found in size["relative"].items()}
        # A bfloat16 has 8 bits: one rounding is off by up to 2^-9 in relative terms, and there are at most four.
        assert all(2**-10 < value < 2**-7 for value in relative.values()), relative
        parts = relative["gossamer - float64"], relative["eager - float64"]
        assert size["ratio"]["mean"] == pytest.approx(parts[0] / parts[1], rel=0.02)


@pytest.mark.parametrize("spoil", ["more rounding", "nan"])
def test_a_less_exact_kernel_ends_with_1(spoil: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def worse(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        out = accuracy.eager(x, gate, up)
        if spoil == "nan":
            out[0, 0] = torch.nan
        return out * 1.004

    monkeypatch.setattr(accuracy.gemm, "linear_glu", worse)
    with pytest.raises(SystemExit, match=r"its error exceeds eager PyTorch's.*K = 64, .*K = 256; 1.01 times") as ended:
        accuracy.main([*CPU, "--draws", "2", "--out", str(tmp_path)])
    assert isinstance(ended.value.code, str)  # which Python prints, ending with 1
    assert (results(tmp_path)["sizes"][0]["ratio"]["mean"] is None) == (spoil == "nan")


def test_tokens_gained() -> None:
    llama = memory.MODELS[0]
    assert llama.kv_bytes == 128 * 1024  # 32 layers of 8 heads of 128, keys and values, 2 bytes each
    MiB = 2**20
    found = memory.gains(llama, {"gossamer": 14 * MiB, "eager": 42 * MiB, "Liger": 14 * MiB + 200_000})
    assert found["eager"] == {"saved_bytes": 28 * MiB, "kv_tokens": 224}
    assert found["Liger"] == {"saved_bytes": 200_000, "kv_tokens": 1}
    assert memory.gains(llama, {"eager": 42 * MiB}) == {}


def test_memory_on_the_cpu_is_labelled_as_computed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory.main([*CPU, "--out", str(tmp_path)])
    content = results(tmp_path)
    assert "not measured" in content["settings"]["bytes"] and "not measured" in capsys.readouterr().out
    assert [len(content[part]) for part in ("calls", "kv_cache")] == [len(memory.TOY_TOKENS), len(memory.MODELS)]
    assert len(list(tmp_path.glob("*-toy.png"))) == 1


def test_the_figure_has_every_size(tmp_path: Path) -> None:
    from benchmarks.gemm import bench_linear_glu

    made = [c for c in bench_linear_glu.cases(torch.device("cuda"), False) if c.name.startswith("llama")]
    assert len(made) == 24 and {c.parameters["M"] for c in made} == set(bench_linear_glu.TOKENS)
    assert all("cuBLAS, SwiGLU in place" in [p.name for p in c.providers] for c in made)
    given = ["gemm", "--case", "llama*", "--device", "cpu", "--quick", "--rounds", "1", "--out", str(tmp_path)]
    ran = CliRunner().invoke(main, given)
    assert ran.exit_code == 0, ran.output
    assert [c["name"] for c in results(tmp_path)["cases"]] == ["llama_toy"] * 2


def test_a_wrong_result_ends_with_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from benchmarks.gemm import bench_linear_glu

    monkeypatch.setattr(bench_linear_glu.gemm, "linear_glu", lambda x, gate, up: x @ up.t())
    with pytest.raises(SystemExit, match="64 tokens, 256 to 704: gossamer: WRONG"):
        memory.main([*CPU, "--out", str(tmp_path)])
