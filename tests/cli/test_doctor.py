"""`gossamer doctor` and the frame around the commands."""

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import gossamer
from benchmarks.provenance import commit
from gossamer.cli import doctor, main
from gossamer.cli.environment import describe, devices, versions
from gossamer.cli.self_check import Check, checks

ONE = torch.ones(3)


def checks_of(*computed: object) -> object:
    def checks(device: torch.device) -> Iterator[Check]:
        for i, compute in enumerate(computed):
            yield Check(f"check {i}", "", compute, ONE.double())

    return checks


def run() -> tuple[int, str]:
    result = CliRunner().invoke(main, ["doctor"])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_this_installation_is_well() -> None:
    start = time.monotonic()
    code, output = run()
    assert code == 0, output
    # Beside others on a GPU, which compile as well, it has taken 37 s.
    assert time.monotonic() - start < (90 if torch.cuda.is_available() else 20)
    assert torch.__version__ in output and "all is well" in output
    for name in {check.name for check in checks(torch.device("cpu"))}:
        room, function = name.split(".")
        assert callable(getattr(getattr(gossamer, room), function))
        assert re.search(rf"{name}\s+│ PyTorch", output), name


def test_the_cache_of_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernel").mkdir()
    (tmp_path / "kernel" / "one.cubin").write_bytes(bytes(3 << 20))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(doctor, "checks", checks_of())
    assert f"compiled kernels: 0.00293 GiB in {tmp_path}" in run()[1].replace("\n", "")


def test_each_kernel_of_hopper_has_a_check_in_16_bits() -> None:
    kernels = {f"{file.parts[-3]}.{file.stem}" for file in Path(gossamer.__file__).parent.glob("*/_gluon/[a-z]*.py")}
    checked = {check.name for check in checks(torch.device("cpu")) if check.variant.startswith("bfloat16")}
    assert {re.sub("_(backward|order|reduce)$", "", name) for name in kernels} <= checked


@pytest.mark.parametrize(
    "compute, message",
    [
        (lambda: ONE * 1.001, "check 1 on cpu: differs from float64 by 0.001"),
        (lambda: ONE * float("nan"), "check 1 on cpu: differs from float64 by inf"),
        (lambda: ONE[:2], "check 1 on cpu: ValueError: shape [2] where [3] was expected"),
        (lambda: ONE / [], "check 1 on cpu: TypeError"),
    ],
)
def test_failures_are_named(monkeypatch: pytest.MonkeyPatch, compute: object, message: str) -> None:
    monkeypatch.setattr(doctor, "checks", checks_of(lambda: ONE, compute))
    code, output = run()
    assert code == 1 and message in output and "all is well" not in output and "check 0 on" not in output


def test_a_room_without_inputs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def pack(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(gossamer.rowsparse, "pack", pack)
    code, output = run()
    assert code == 1 and "FAILED rowsparse (inputs) on cpu: RuntimeError: no kernel image" in output
    assert "blocksparse.attention" in output


def test_checks_past_the_limit_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_SECONDS", {"cpu": -1.0, "cuda": -1.0})
    code, output = run()
    assert code == 0 and "checks were not run" in output


def test_environment() -> None:
    assert str(versions()["torch"]).partition("+")[0] == torch.__version__.partition("+")[0]
    assert devices()[0] == torch.device("cpu")
    assert describe(torch.device("cpu"))["name"]


def test_commit_outside_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOSSAMER_COMMIT", raising=False)
    assert commit(tmp_path) is None
    monkeypatch.setenv("GOSSAMER_COMMIT", "abc")
    assert commit(tmp_path) == "abc"


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_commit_is_of_a_checkout_that_tracks_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    monkeypatch.delenv("GOSSAMER_COMMIT", raising=False)
    tracked, installed = tmp_path / "src" / "gossamer", tmp_path / ".venv" / "gossamer"
    for folder in (tracked, installed):
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    git("init")
    git("add", "src")
    git("commit", "-m", "first")
    monkeypatch.setattr(gossamer, "__file__", str(installed / "__init__.py"))
    assert commit(installed) is None and commit(tmp_path) is None
    monkeypatch.setattr(gossamer, "__file__", str(tracked / "__init__.py"))
    head = commit(tmp_path)
    assert head is not None and len(head) == 12 and commit(tracked) == head
    (tracked / "__init__.py").write_text("changed = True\n")
    assert commit(tmp_path) == commit(tracked) == head + "+"


def python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_the_package_runs_as_the_command_does() -> None:
    command = [sys.executable, "-m", "gossamer", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"gossamer {gossamer.__version__}\n"), done.stderr


def test_help_lists_the_commands_without_importing_torch() -> None:
    done = python(
        "import sys; from typer.testing import CliRunner; from gossamer.cli import main;"
        "out = CliRunner().invoke(main, ['--help']).output;"
        "assert all(name in out for name in ('doctor', 'sae')), out;"
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    assert done.returncode == 0, done.stderr


def test_without_the_extra_it_says_what_to_install() -> None:
    done = python("import sys; sys.modules['typer'] = None; from gossamer.cli import main; main()")
    assert done.returncode == 1 and "pip install '.[cli]' in a clone" in done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["doctor", "--help"], ["doctor"]])
def test_a_terminal_may_lack_characters(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.setenv("COLUMNS", "20")  # too narrow, so that rich ends lines with an ellipsis
    monkeypatch.setattr(doctor, "checks", checks_of(lambda: ONE))
    result = CliRunner(charset="ascii").invoke(main, arguments)
    assert result.exit_code == 0 and "?" in result.output


def test_interruption_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "doctor", interrupted)
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 130 and result.output == "gossamer: interrupted\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("arguments", [["sae", "check", "."], ["train", "pack", ".", "--out", "corpus"]])
def test_commands_of_groups_end_alike(
    arguments: list[str], number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("gossamer.train.read_text", "gossamer.extract.Extraction.check"):
        monkeypatch.setattr(name, lambda *_: signal.raise_signal(number))
    before = signal.getsignal(signal.SIGTERM)
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 130 and result.output.endswith("gossamer: interrupted\n")
    assert signal.getsignal(signal.SIGTERM) is before


def test_help_breaks_lines_where_the_terminal_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    said = CliRunner().invoke(main, ["sae", "train", "--help"]).output
    assert any(line.strip().startswith("A run may be killed") and "nn.load_sae" in line for line in said.splitlines())


def test_unknown_command_and_version() -> None:
    assert CliRunner().invoke(main, ["benhc"]).exit_code == 2
    result = CliRunner().invoke(main, ["--version"])
    assert result.exit_code == 0 and result.output.startswith("gossamer 0.")
