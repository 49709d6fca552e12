"""The scripts of docs/gallery, in small: each stands on its own, and draws its picture."""

import runpy
import sys
from pathlib import Path

import pytest

GALLERY = Path(__file__).parents[1] / "docs" / "gallery"
SCRIPTS = sorted(GALLERY.glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_draws_its_picture(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    if script.stem == "train_sparse":
        pytest.importorskip("tokenizers")
    from matplotlib import pyplot

    source = script.read_text(encoding="utf-8")
    assert source.count("\n") <= 62 and (GALLERY / f"{script.stem}.png").is_file()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script), "3"])
    matplotlib.use("agg")
    runpy.run_path(str(script))
    pyplot.close("all")
    assert (tmp_path / f"{script.stem}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_help_says_what_a_script_does(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    if script.stem == "train_sparse":
        pytest.importorskip("tokenizers")
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(script))
    said = capsys.readouterr().out
    assert left.value.code == 0 and "training steps" in said and script.read_text(encoding="utf-8")[3:40] in said


def test_each_system_has_one() -> None:
    systems = {"autoencoders", "feed_forward", "gated_mlp", "block_sparse", "gated_attention", "train_sparse"}
    assert {script.stem for script in SCRIPTS} == systems
