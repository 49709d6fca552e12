"""`gossamer train`, as its users run it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gossamer.cli import main
from gossamer.cli import train as command
from gossamer.cli._train_report import Found, curves
from gossamer.cli.figure import svg
from tests.train.corpora import write_corpus

pytestmark = pytest.mark.native
ROOT = Path(__file__).parents[2]
SIZES = [
    "--set", "layers=2", "--set", "hidden=32", "--set", "intermediate=44", "--set", "length=16", "--batch", "4",
    "--micro-batch", "2", "--steps", "6", "--device", "cpu",
]  # fmt: skip


def gossamer(*arguments: str | Path, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["train", *map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return re.sub(r"[\s│]+", " ", result.output)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    write_corpus(folder, tokens=4000, vocabulary=64)
    return folder


def test_from_text_to_a_report_of_two_runs(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    text = tmp_path / "<b>text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog, and then it sleeps.\n" * 40, encoding="utf-8")
    lines = [json.dumps(f"{i} times {i} is {i * i}, which everybody knows by heart. " * 4) for i in range(150)]
    (tmp_path / "more.jsonl").write_text("\n".join(lines))
    packed = gossamer("pack", text, tmp_path / "more.jsonl", "--out", tmp_path / "c", "--vocabulary", "300")
    assert "tokens for training" in packed
    other = gossamer("pack", text, "--out", tmp_path / "c", "--vocabulary", "280", code=2)
    assert "holds tokens of another tokenizer, which runs may need. Name another folder" in other
    dense, sparse = tmp_path / "dense", tmp_path / "<i>$spar$e"
    told = gossamer("run", tmp_path / "c", "--out", dense, *SIZES)
    assert "begins" in told and "validation loss" in told
    gossamer("run", tmp_path / "c", "--out", sparse, *SIZES, "--l1", "0.1", "--reinitialize", "0.1")
    gossamer("report", dense, sparse, "--out", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 5 and "&lt;i&gt;$spar$e" in page and "<i>$" not in page
    for title in ("Loss by step", "Speed and memory", "Active and dead neurons by layer"):
        assert title in page
    assert (dense / "model" / "config.json").exists() and (dense / "report.html").exists()
    assert "goes on at step 6" in gossamer("run", tmp_path / "c", "--out", dense, *SIZES)


def test_the_report_follows_a_run(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    drawn = command._report
    monkeypatch.setattr(
        command, "_report",
        lambda runs, out: seen.append(len((tmp_path / "log.jsonl").read_text().splitlines())) or drawn(runs, out),
    )  # fmt: skip
    gossamer("run", corpus, "--out", tmp_path, *SIZES, "--checkpoint-every", "2")
    assert seen == [2, 4, 6, 6] and "Active and dead neurons by step" in (tmp_path / "report.html").read_text()


def test_the_model_is_read_with_its_tokenizer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(f"number {i} follows {i - 1}. " * 6) for i in range(200)))
    gossamer("pack", tmp_path / "a.jsonl", "--out", tmp_path / "c", "--vocabulary", "280")
    gossamer("run", tmp_path / "c", "--out", tmp_path / "run", *SIZES)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    ids = tokenizer("number 7 follows", return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == "number 7 follows"
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] == ids.shape[1] + 3


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["pack", "--out", "OUT"], "give either TEXT or --dataset"),
        (["run", "EMPTY", "--out", "OUT"], "holds no corpus.json"),
        (["run", "CORPUS", "--out", "OUT", "--preset", "7b"], "name must be one of tiny, small, 100m"),
        (["run", "CORPUS", "--out", "OUT", "--set", "depth=3"], "changes must be of the fields"),
        (["run", "CORPUS", "--out", "OUT", "--set", "length"], "a field is set as NAME=VALUE, got length"),
        (["run", "CORPUS", "--out", "OUT", "--l1", "1", "--set", "l1=-3"], "coefficient must be at least 0"),
        (["run", "CORPUS", "--out", "OUT", "--lr", "nan"], "gossamer train run: --lr must be above 0 and finite"),
        (["run", "CORPUS", "--out", "OUT", "--set", "length=x"], "length must be an int, got str"),
        (["run", "CORPUS", "--out", "OUT", "--activation", "gelu"], "activation must be one of relu, relu2, silu"),
        (["run", "CORPUS", "--out", "OUT", "--device", "tpu"], "--device must be auto or a device of this machine"),
        (["run", "CORPUS", "--out", "OUT", "--log", "paper", *SIZES], "--log must be tensorboard or wandb"),
        (["report", "EMPTY"], "RUNS must be folders of `gossamer train run`"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    places = {"CORPUS": corpus, "EMPTY": tmp_path / "empty", "OUT": tmp_path / "out"}
    assert message in gossamer(*(places.get(a, a) for a in arguments), code=2)


def test_scalars_go_to_tensorboard_and_wandb(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each record whole, under the names that group into panels."""
    sent: list[tuple[int, dict[str, Any]]] = []

    class Here:
        def log(self, record: dict[str, Any], step: int) -> None:
            sent.append((step, dict(record)))

        def init(self, **kwargs: Any) -> Any:
            return self

    monkeypatch.setitem(sys.modules, "wandb", Here())
    gossamer("run", corpus, "--out", tmp_path / "w", *SIZES, "--log", "wandb")
    assert [step for step, _ in sent] == list(range(1, 7)) and {"loss", "l0/01", "dead/00"} <= sent[0][1].keys()
    pytest.importorskip("tensorboard")
    gossamer("run", corpus, "--out", tmp_path / "t", *SIZES, "--log", "tensorboard")
    assert list((tmp_path / "t" / "tensorboard").glob("events*"))


def test_a_disk_that_is_full_ends_a_run_with_one_line(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Any, show: Any) -> None:
        raise OSError(28, "train: step-1 could not be written: No space left on device.")

    monkeypatch.setattr(command.training.Run, "train", full)
    out = gossamer("run", corpus, "--out", tmp_path / "run", *SIZES, code=1)
    assert "No space left on device" in out and "Traceback" not in out


def start(corpus: Path, out: Path, *command: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "GLOO_SOCKET_IFNAME": "lo"}
    arguments = ["train", "run", str(corpus), "--out", str(out), "--checkpoint-every", "2", *SIZES]
    code = "from gossamer.cli import main; main()"
    line = [*(command or (sys.executable,)), *(() if command else ("-c", code)), *arguments]
    return subprocess.Popen(line, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.mark.full
def test_under_torchrun_two_processes_give_the_loss_of_one(corpus: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("from gossamer.cli import main\nmain()\n")
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program))
    for out, launched in ((tmp_path / "one", ()), (tmp_path / "two", launcher)):
        process = start(corpus, out, *launched)
        assert process.communicate(timeout=300) and process.returncode == 0
    one, two = (
        [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    assert len(one) == len(two) == 6
    for a, b in zip(one, two):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4) and a["l0"] == pytest.approx(b["l0"], rel=1e-2)


@pytest.mark.full
def test_interrupted_it_says_how_to_go_on(corpus: Path, tmp_path: Path) -> None:
    process = start(corpus, tmp_path / "run", *())
    log = tmp_path / "run" / "log.jsonl"
    while not (log.exists() and log.stat().st_size):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode in (130, 0)
    assert process.returncode == 0 or "goes on at the last checkpoint" in out


def test_a_report_of_records_that_lack_numbers() -> None:
    """As those of another version."""
    records: list[dict[str, float]] = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0, "dead": 0.1}]
    found, keys = [Found("run", None, records, {})], (("loss", "loss"), ("dead", "dead"), ("l0", "L0"))
    assert svg(lambda figure: curves(figure, found, keys), 2).count("<svg") == 1
