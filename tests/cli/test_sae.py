"""`gossamer sae extract`, `show`, `report` and `check`."""

import errno
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors import SafetensorError
from typer.testing import CliRunner

from gossamer import nn
from gossamer.cli import environment, main
from gossamer.cli.train import steps_bar
from gossamer.extract import Extraction, extract
from gossamer.extract import folder as disk
from gossamer.extract.text import Text
from tests.extract.extraction import flip


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["sae", *map(str, arguments)], env={"COLUMNS": "200", "TERM": "dumb"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


def refused(message: str, *arguments: object) -> None:
    code, output = run(*arguments)
    assert code == 2 and message in output, output


@pytest.fixture
def files(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    nn.save_sae(nn.TopKSAE(8, 40, 3), tmp_path / "model")
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


def test_it_says_what_was_verified(files: Path) -> None:
    """A flipped bit in a shard, of which nothing is read, is for `check` to find."""
    run("extract", files / "model", files / "acts.npy", "--out", files / "out", "--device", "cpu")
    flip(files / "out" / "shard-000000.safetensors")
    for arguments in (("show", files / "out"), ("show", files / "out", "--feature", 1), ("report", files / "out")):
        code, output = run(*arguments)
        assert code == 0 and f"The shards were not verified: gossamer sae check {files / 'out'}" in output
    assert run("check", files / "out")[0] == 1


def test_a_full_disk(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ("--batch-size", 16, "--shard-rows", 32, "--device", "cpu")
    original = disk.save_file

    def full(tensors: Any, path: Path) -> None:
        if path.name.startswith("shard-000002"):
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        original(tensors, path)

    monkeypatch.setattr(disk, "save_file", full)
    code, output = run("extract", files / "model", files / "acts.npy", "--out", files / "out", *sizes)
    monkeypatch.undo()
    assert code == 1 and "shard-000002.safetensors could not be written: No space left on device. " in output, output
    assert "the same command goes on from the last whole file" in output
    assert Extraction(files / "out").rows == 64
    code, output = run("extract", files / "model", files / "acts.npy", "--out", files / "out", *sizes)
    assert code == 0 and "100 rows, " in output


def test_train_extract_and_show(files: Path) -> None:
    """The same command again finds a finished run; its folders are autoencoders for the other commands."""
    given = ("train", files / "acts.npy", "--out", files / "run", "--d-sae", 24, "--batch-size", 8, "--device", "cpu")
    given = (*given, "--checkpoint-every", 4, "--log-every", 2, "--sweep", "l0=2,4", "--set", "aux_k=3")
    for _ in range(2):
        code, output = run(*given)
        assert code == 0 and "l0=4: explains" in output and f"autoencoders in {files / 'run'}" in output, output
    page = (files / "run" / "report.html").read_text(encoding="utf-8")
    assert re.search(r"11 steps of 8 rows, [1-9][0-9,]* rows a second", page)
    assert page.count("<svg") == 4 and "Explained variance by L0" in page and "l0=2" in page
    assert nn.load_sae(files / "run" / "l0=4").aux_k == 3
    code, output = run("extract", files / "run" / "l0=2", files / "acts.npy", "--out", files / "latents")
    assert code == 0 and "100 rows, 200 entries, 1 file in" in output
    for changed, message in (
        (("--lr", 1), "holds a run of other settings: lr None there and 1.0 here"),
        (("--kind", "vae", "--out", files / "b"), "kind must be one of topk"),
        (("--set", "k=8", "--out", files / "b"), "options must not have k, which follows from l0. Give l0."),
        (("--sweep", "l0=8", "--out", files / "b"), "l0 must be given once, got l0=8 too. Commas separate the values"),
        (("--hook", "h", "--out", files / "b"), "gossamer sae train: --model and --hook belong together"),
        (("--batch-size", 99, "--out", files / "b"), "source must have a batch of 99 rows beside 99"),
        (("--log", "paper", "--out", files / "b"), "gossamer sae train: --log must be tensorboard or wandb"),
        (("--lr", "nan", "--out", files / "b"), "gossamer sae train: --lr must be above 0 and finite, got nan"),
        (("--l0", 8, "--out", files / "b"), "--l0 must not be given beside --sweep l0, which has its values"),
        (("--sweep", "aux_k=1,2", "--out", files / "b"), "--set aux_k must not be given beside --sweep aux_k"),
        (("--sweep", "foo=1,2", "--out", files / "b"), "Options are aux_coefficient, aux_k, dead_after"),
    ):
        refused(message, *given, *changed)
    for swept in ("l0=abc", "l0=4,bb", "lr=(1,[2])"):
        name = swept[:2]
        said = f"--sweep takes numbers for {name}, as {name}=1,2, got {swept[:3]}"
        refused(said, *given[:-4], "--sweep", swept, "--out", files / "b")
    assert not (files / "b").exists()
    for swept, names in (("l0=[2, 3]", ["l0=2", "l0=3"]), ("penalty=step,tanh", ["penalty=step", "penalty=tanh"])):
        out = files / names[0]
        kind = ("--kind", "jumprelu", "--l0", 2) if "penalty" in swept else ()
        code, output = run(*given[:3], out, *given[4:10], "--steps", 2, *kind, "--sweep", swept)
        assert code == 0 and all(f"{name}: explains" in output for name in names), output
    code, output = run("extract", files / "run", files / "acts.npy", "--out", files / "latents")
    assert code == 2 and "Name one of its autoencoders: " in output and "l0=4" in output.replace("\n", ""), output
    file = next((files / "run" / "checkpoints").glob("*11.safetensors"))
    file.write_bytes(file.read_bytes()[:-9])
    code, output = run(*given)
    assert code == 2 and "is corrupt or truncated" in output and "step-00000008" in output


@pytest.mark.parametrize("command", ["sae", "train"])
def test_where_scalars_go_is_checked_before_there_is_a_run(
    command: str, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    given = ["train", files / "acts.npy"] if command == "sae" else ["run", files / "none"]
    for log, message in (
        ("paper", "--log must be tensorboard or wandb"),
        ("wandb", "wandb is missing: run pip install"),
    ):
        started = [command, *given, "--out", files / "b", "--log", log]
        result = CliRunner().invoke(main, [*map(str, started)], env={"COLUMNS": "200"})
        assert result.exit_code == 2 and message in result.output and not (files / "b").exists(), result.output


def test_a_bar_fits_into_80_columns() -> None:
    console = Console(width=80, file=io.StringIO(), force_terminal=True)
    with steps_bar(console) as bar:
        bar.add_task(
            "steps", completed=1234, total=30_000, state="loss 3.123  L0 176 " + "▇" * 12 + "  dead 10%  1,234 tok/s"
        )
    shown = re.sub(r"\x1b\[[^m]*m", "", console.file.getvalue())  # type: ignore[attr-defined]
    assert "1234/30000" in shown and "-:--:--" in shown and "loss 3.123" in shown and "…" in shown


def test_train_over_two_processes(files: Path) -> None:
    given = ["train", files / "acts.npy", "--d-sae", 24, "--batch-size", 8, "--device", "cpu", "--sweep", "l0=2,3,4"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "--no-python"]
    command = [sys.executable, "-c", "from gossamer.cli import main; main()", "sae", *given, "--out", files / "two"]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "300"}
    started = [*torchrun, *map(str, command)]
    done = subprocess.run(started, capture_output=True, text=True, timeout=120, env=variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("explains") == 3 and done.stdout.count("report, log and autoencoders in") == 1
    assert done.stdout.count("Stopped at any moment, the same command goes on at the last checkpoint") == 1
    one = [argument.replace("2,3,4", "2") for argument in started]
    few = subprocess.run(one, capture_output=True, text=True, timeout=120, env=variables)
    assert few.returncode and "must have an autoencoder for each, got 1" in few.stderr, few.stderr
    assert "l0=3" in (files / "two" / "report.html").read_text(encoding="utf-8")
    assert run(*given, "--out", files / "one")[0] == 0
    for name in ("l0=2/sae_weights.safetensors", "l0=3/sae_weights.safetensors", "results.json"):
        assert (files / "two" / name).read_bytes() == (files / "one" / name).read_bytes()


def test_devices_by_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [torch.device("cuda", 0), torch.device("cuda", 1)]
    monkeypatch.setattr(environment, "devices", lambda: [torch.device("cpu"), *gpus])
    for name, value in (("TORCHELASTIC_RUN_ID", "run"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    found = [environment.resolve_device(name, "gossamer sae train") for name in ("auto", "cuda", "cpu")]
    assert found == [gpus[1], gpus[1], torch.device("cpu")]
    with pytest.raises(ValueError, match=r"--device must be auto, cuda or cpu by torchrun, .* got 'cuda:1'"):
        environment.resolve_device("cuda:1", "gossamer sae train")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ValueError, match=r"this machine has 2 for 3 processes. Start fewer processes"):
        environment.resolve_device("auto", "gossamer sae train")


def test_a_loss_that_is_no_number_ends_a_run(files: Path) -> None:
    acts = np.load(files / "acts.npy")
    acts[60:] = np.nan
    np.save(files / "acts.npy", acts)
    code, output = run(
        "train", files / "acts.npy", "--out", files / "run", "--batch-size", 8, "--buffer", 8, "--device", "cpu",
        "--checkpoint-every", 2, "--log-every", 2,
    )  # fmt: skip
    assert code == 1 and "The checkpoint of step 6 is good" in output, output


def test_errors(files: Path) -> None:
    for arguments, message in (
        (("extract", files / "model", files / "none.npy", "--out", files / "out"), "there is no file"),
        (("extract", files, files / "acts.npy", "--out", files / "out"), "must hold cfg.json"),
        (("extract", files / "model", files / "acts.npy"), "--out"),
        (("extract", files / "model", files / "acts.npy", "--out", files / "o", "--device", "tpu"), "--device"),
        (("show", files / "model"), "holds no manifest.json"),
    ):
        refused(message, *arguments)
    run("extract", files / "model", files / "acts.npy", "--out", files / "out", "--device", "cpu")
    refused("--feature must be below d_sae = 40", "show", files / "out", "--feature", 40)


class Tags(HTMLParser):
    """What a page is made of: tags that open and close in order, and no address of anything outside."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.marked: list[str] = []
        self.cards: list[str] = []
        self.feed(page)
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img"), tag
        for name, value in attrs:
            assert name not in ("src", "href") or (value or "").startswith("#"), (tag, name, value)
            if tag == "article" and name == "id":
                self.cards.append(value or "")
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "mark":
            self.marked.append(data)


def test_report(files: Path) -> None:
    run("extract", files / "model", files / "acts.npy", "--out", files / "out", "--device", "cpu")
    found = Extraction(files / "out")
    pages = []
    for name in ("a", "b"):
        code, output = run("report", files / "out", "--out", files / name)
        assert code == 0 and "latents in" in output, output
        pages.append((files / name / "index.html").read_text(encoding="utf-8"))
    assert pages[0] == pages[1] and "http" not in pages[0]
    assert f"{int((found.firing_counts == 0).sum()) / 40:.1%}" in pages[0] and "latents a row (L0), of 40" in pages[0]
    cards = Tags(pages[0]).cards
    busiest = found.firing_counts.argsort(descending=True, stable=True)[:8].tolist()
    assert cards[:8] == [f"latent-{latent}" for latent in busiest] and len(set(cards)) == len(cards)
    assert f"row {int(found.top_positions[busiest[0], 0]):,}: " in pages[0]
    code, output = run("report", files / "out", "--out", files / "c", "--features", "5, 1,5")
    page = (files / "c" / "index.html").read_text(encoding="utf-8")
    assert code == 0 and "2 latents in" in output and Tags(page).cards == ["latent-5", "latent-1"]
    assert run("report", files / "out")[0] == 0
    assert (files / "out" / "index.html").read_text(encoding="utf-8") == pages[0]
    assert run("report", files / "out", "--out", files / "[/b]")[0] == 0
    for arguments, message in (
        (("report", files / "model"), "holds no manifest.json"),
        (("report", files / "out", "--features", "1,40"), "must be whole numbers below d_sae = 40"),
        (("report", files / "out", "--features", "1;2"), "got '1;2'"),
        (("report", files / "out", "--out", files / "acts.npy"), "--out must be a folder"),
    ):
        refused(message, *arguments)


class Tokens:
    """Rows with tokens that say what a page must not take for its own."""

    def __init__(self, folder: Path) -> None:
        self.rows = torch.from_numpy(np.load(folder / "acts.npy"))
        tokens = torch.arange(100, dtype=torch.int32) % 3
        self.text = Text(tokens, torch.arange(100) % 10 == 0, {0: "<b>&", 1: "\n\u202e", 2: "\udcff"})

    def __len__(self) -> int:
        return 100

    def rows_from(self, start: int) -> Iterator[torch.Tensor]:
        return iter(self.rows[start:].split(30))


def test_report_of_text(files: Path) -> None:
    extract(Tokens(files), nn.load_sae(files / "model"), files / "<out>", batch_size=16, shard_rows=32)
    assert run("report", files / "<out>", "--out", files / "a")[0] == 0
    page = (files / "a" / "index.html").read_text(encoding="utf-8")
    assert "<h1>&lt;out&gt;</h1>" in page and "<b>&amp;" not in page and "\u202e" not in page
    assert set(Tags(page).marked) == {"<b>&", "⏎\\u202e", "\N{REPLACEMENT CHARACTER}"}


def test_show_of_text(files: Path) -> None:
    """A token is shown where no space lets a line end before it; files that are not whole are named."""
    source = Tokens(files)
    source.text = Text(source.text.tokens, source.text.starts, {0: "解" * 30, 1: "释" * 30, 2: "言" * 30})
    found = extract(source, nn.load_sae(files / "model"), files / "out", batch_size=16, shard_rows=32)
    busiest = int(found.firing_counts.argmax())
    result = CliRunner().invoke(
        main, ["sae", "show", str(files / "out"), "--feature", str(busiest)], env={"COLUMNS": "60"}
    )
    assert result.exit_code == 0 and result.output.count("«") == result.output.count("»") == 10
    show, vocabulary = ("show", files / "out", "--feature", busiest), files / "out" / "vocabulary.json"
    vocabulary.write_text("[1]")
    refused("vocabulary.json is damaged", *show)
    vocabulary.unlink()
    refused("vocabulary.json is gone", *show)
    shards = sorted((files / "out").glob("shard-*"))
    for shard in shards:
        shard.write_bytes(shard.read_bytes()[:-5])
    refused("is damaged", *show)
    for shard in shards:
        shard.unlink()
    refused("is gone. Put a whole copy back", *show)


def test_a_report_that_cannot_be_written(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extract(torch.randn(100, 8), nn.load_sae(files / "model"), files / "out")
    (files / "out" / "index.html").write_text("before")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    code, output = run("report", files / "out")
    assert code == 1 and "index.html could not be written: No space left on device" in output
    assert (files / "out" / "index.html").read_text() == "before"
    assert not list((files / "out").glob("*.partial"))


def test_what_may_not_be_read(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is not gone: nobody is told to extract again."""
    extract(torch.randn(100, 8), nn.load_sae(files / "model"), files / "out")

    def refuse(file: Path) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(file))

    monkeypatch.setattr(disk.files, "digest", refuse)
    code, output = run("show", files / "out")
    assert code == 1 and "Permission denied" in output and "gone" not in output


def test_check(files: Path) -> None:
    """Exit 0 where all is whole, 1 with what is not, and 2 where there is nothing to look at."""
    extract(Tokens(files), nn.load_sae(files / "model"), files / "out", batch_size=16, shard_rows=32)
    code, output = run("check", files / "out")
    assert code == 0 and "rows=100" in output, output
    assert "4 shards, their statistics and the manifest are as they were written." in output
    flip(files / "out" / "shard-000001.safetensors")
    (files / "out" / "shard-000002.safetensors").unlink()
    code, output = run("check", files / "out")
    assert code == 1 and f"gossamer sae check: in {files / 'out'}, shard-000001.safetensors is damaged" in output
    assert "shard-000002.safetensors is gone. Put a whole copy back, or extract to another folder." in output
    (files / "out" / "manifest.json").write_text('{"version": 2, "sett')
    code, output = run("check", files / "out")
    assert code == 1 and "gossamer sae check: " in output and "manifest.json is damaged" in output
    code, output = run("check", files / "model")
    assert code == 2 and "gossamer sae check: " in output and "holds no manifest.json" in output


def test_errors_begin_with_the_command(files: Path) -> None:
    """And not with the function that it calls."""
    (files / "out").mkdir()
    (files / "out" / "manifest.json").write_text("{")
    for folder in ("model", "out"):
        for command in ("show", "report", "check"):
            output = run(command, files / folder)[1]
            assert f"gossamer sae {command}: " in output and "Extraction" not in output, output
            assert "extract: " not in output, output
    code, output = run("extract", files / "model", files / "none.npy", "--out", files / "out")
    assert code == 2 and "gossamer sae extract: there is no file" in output and output.count("extract: ") == 1


def test_values_that_are_not_finite_are_told(files: Path) -> None:
    x = torch.randn(100, 8)
    x[3] = torch.nan
    np.save(files / "acts.npy", x.numpy())
    code, output = run("extract", files / "model", files / "acts.npy", "--out", files / "out", "--device", "cpu")
    assert code == 0 and "values are not finite, and are left out" in output
    l0 = output.split(" latents a row")[0].split()[-1]
    assert f"{l0} latents a row" in run("show", files / "out")[1]
    # A run that is finished reads no batch: the bar is that of what it verifies.
    code, output = run("extract", files / "model", files / "acts.npy", "--out", files / "out", "--device", "cpu")
    assert code == 0 and "/?" not in output and "100/100" in output


def test_report_of_nothing(files: Path) -> None:
    extract(torch.zeros(9, 8), nn.JumpReLUSAE(8, 40, initial_threshold=1.0), files / "out")
    assert run("report", files / "out", "--out", files / "a")[0] == 0
    assert "No latent fired." in (files / "a" / "index.html").read_text(encoding="utf-8")
    assert run("report", files / "out", "--out", files / "a", "--features", "3")[0] == 0
    assert "never fired" in (files / "a" / "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("options", [{}, {"reshape_activations": "hook_z"}], ids=["", "heads"])
def test_a_model_of_sae_lens(options: dict[str, str], files: Path) -> None:
    """Heads are rows in files."""
    sae_lens = pytest.importorskip("sae_lens")
    sae_lens.StandardSAE(sae_lens.StandardSAEConfig(d_in=8, d_sae=40, **options)).save_model(files / "theirs")
    code, output = run("extract", files / "theirs", files / "acts.npy", "--out", files / "out", "--device", "cpu")
    assert code == 0 and "100 rows, " in output and Extraction(files / "out").rows == 100, output


def test_models_that_do_not_fit(files: Path) -> None:
    sae_lens = pytest.importorskip("sae_lens")
    from sae_lens.registry import get_sae_class

    sae_lens.StandardSAE(sae_lens.StandardSAEConfig(d_in=8, d_sae=40)).save_model(files / "standard")
    pursuit = get_sae_class("matching_pursuit")
    pursuit[0](pursuit[1](d_in=8, d_sae=40)).save_model(files / "pursuit")
    nn.save_sae(nn.TopKSAE(8, 40, 3), files / "sparsify", layout="sparsify")
    for folder, name, value, message in (
        ("standard", "d_sae", 41, "must hold W_dec [41, 8] by cfg.json, got [40, 8]"),
        ("pursuit", "d_sae", 41, "SAELens cannot load"),
        ("sparsify", "activation", "groupmax", "activation = 'groupmax', which these modules do not do"),
    ):
        file = files / folder / "cfg.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
        refused(message, "extract", files / folder, files / "acts.npy", "--out", files / "out", "--device", "cpu")


@pytest.mark.parametrize("architecture", ["batchtopk", "matryoshka_batchtopk"])
def test_a_model_that_sae_lens_has_in_training_alone(architecture: str, files: Path) -> None:
    """Its latents are SAELens's own: those of a batch of as many rows."""
    pytest.importorskip("sae_lens")
    from sae_lens.registry import get_sae_training_class

    sae_class, config_class = get_sae_training_class(architecture)
    options = {"matryoshka_widths": [10, 40]} if architecture == "matryoshka_batchtopk" else {}
    sae = sae_class(config_class(d_in=8, d_sae=40, k=2.5, decoder_init_norm=0.7, **options))
    sae.save_model(files / "training")
    sizes = ("--batch-size", 16, "--shard-rows", 32, "--device", "cpu")
    code, output = run("extract", files / "training", files / "acts.npy", "--out", files / "out", *sizes)
    assert code == 0, output
    with torch.no_grad():
        batches = [sae.eval().encode(x) for x in torch.from_numpy(np.load(files / "acts.npy")).split(16)]
    found = Extraction(files / "out")
    assert found.nnz == 250
    assert torch.equal(torch.cat([shard.to_dense() for shard in found]), torch.cat(batches))


def test_an_architecture_that_nothing_has(files: Path) -> None:
    pytest.importorskip("sae_lens")
    config = json.loads((files / "model" / "cfg.json").read_text())
    (files / "model" / "cfg.json").write_text(json.dumps(config | {"architecture": "other"}))
    code, output = run("extract", files / "model", files / "acts.npy", "--out", files / "out", "--device", "cpu")
    assert code == 2 and "architecture = 'other', which neither gossamer.nn nor the installed SAELens has" in output


def test_help() -> None:
    code, output = CliRunner().invoke(main, ["--help"]).exit_code, CliRunner().invoke(main, ["--help"]).output
    assert code == 0 and "Train sparse autoencoders, extract their latents" in output
    code, output = run("extract", "--help")
    assert code == 0 and "goes on where it was stopped" in output
