"""`gossamer sae extract` and `gossamer sae show`."""

from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from gossamer import nn
from gossamer.cli import main
from gossamer.sae import Extraction


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["sae", *map(str, arguments)], env={"COLUMNS": "200", "TERM": "dumb"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.fixture
def files(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    nn.save(nn.TopKSAE(8, 40, 3), tmp_path / "model")
    np.save(tmp_path / "acts.npy", torch.randn(100, 8).numpy())
    return tmp_path


def test_extract_and_show(files: Path) -> None:
    sizes = ("--batch-size", 16, "--shard-rows", 32, "--device", "cpu")
    for _ in range(2):
        code, output = run("extract", files / "model", files / "acts.npy", "--out", files / "out", *sizes)
        assert code == 0, output
        assert "100 rows, " in output and "4 files in" in output and "latents a row" in output
    found = Extraction(files / "out")
    busiest = int(found.firing_counts.argmax())
    code, output = run("show", files / "out", "--rows", 3)
    assert code == 0 and "complete" in output and "the latents that fire most" in output
    assert str(int(found.firing_counts[busiest])) in output
    code, output = run("show", files / "out", "--feature", busiest)
    assert code == 0 and f"latent {busiest}: fired in" in output and "where it is largest" in output
    assert f"{int(found.top_positions[busiest, 0])}" in output
    dead = (found.firing_counts == 0).nonzero()
    if dead.numel():
        code, output = run("show", files / "out", "--feature", int(dead[0]))
        assert code == 0 and "fired in 0 of 100 rows" in output


def test_errors(files: Path) -> None:
    for arguments, message in (
        (("extract", files / "model", files / "none.npy", "--out", files / "out"), "there is no file"),
        (("extract", files, files / "acts.npy", "--out", files / "out"), "must hold cfg.json"),
        (("extract", files / "model", files / "acts.npy"), "--out"),
        (("extract", files / "model", files / "acts.npy", "--out", files / "o", "--device", "tpu"), "--device"),
        (("show", files / "model"), "holds no manifest.json"),
    ):
        code, output = run(*arguments)
        assert code == 2, output
        assert message in output.replace("\n", " "), output
    run("extract", files / "model", files / "acts.npy", "--out", files / "out", "--device", "cpu")
    code, output = run("show", files / "out", "--feature", 40)
    assert code == 2 and "--feature must be below d_sae = 40" in output


def test_a_model_of_sae_lens(files: Path) -> None:
    sae_lens = pytest.importorskip("sae_lens")
    sae_lens.StandardSAE(sae_lens.StandardSAEConfig(d_in=8, d_sae=40)).save_model(files / "standard")
    code, output = run("extract", files / "standard", files / "acts.npy", "--out", files / "out", "--device", "cpu")
    assert code == 0, output
    assert Extraction(files / "out").rows == 100


def test_help() -> None:
    code, output = CliRunner().invoke(main, ["--help"]).exit_code, CliRunner().invoke(main, ["--help"]).output
    assert code == 0 and "Extract a sparse autoencoder's latents" in output
    code, output = run("extract", "--help")
    assert code == 0 and "goes on where it was stopped" in " ".join(output.split()).replace("│ ", "").replace(" │", "")
