"""`gossamer doctor` and the frame around the commands."""

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
from typer.testing import CliRunner

from gossamer.cli import doctor, main
from gossamer.cli.environment import commit, describe, devices, versions

ONE = torch.ones(3)


def checks_of(*computed: object) -> object:
    def checks(device: torch.device) -> Iterator[doctor.Check]:
        for i, compute in enumerate(computed):
            yield f"check {i}", compute, ONE.double()

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
    assert time.monotonic() - start < 20
    assert torch.__version__ in output and "all is well" in output and "pack_ell" in output


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
    monkeypatch.setattr(doctor, "_checks", checks_of(lambda: ONE, compute))
    code, output = run()
    assert code == 1 and message in output and "all is well" not in output and "check 0" not in output


def test_checks_past_the_limit_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_SECONDS", -1.0)
    code, output = run()
    assert code == 0 and "checks were not run" in output


def test_environment() -> None:
    assert versions()["torch"] == torch.__version__
    assert devices()[0] == torch.device("cpu")
    assert describe(torch.device("cpu"))["name"]


def test_commit_outside_git(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOSSAMER_COMMIT", raising=False)
    assert commit(tmp_path) is None
    monkeypatch.setenv("GOSSAMER_COMMIT", "abc")
    assert commit(tmp_path) == "abc"


def python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_help_lists_the_commands_without_importing_torch() -> None:
    done = python(
        "import sys; from typer.testing import CliRunner; from gossamer.cli import main;"
        "out = CliRunner().invoke(main, ['--help']).output;"
        "assert all(name in out for name in ('doctor', 'bench', 'demo')), out;"
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    assert done.returncode == 0, done.stderr


def test_without_the_extra_it_says_what_to_install() -> None:
    done = python("import sys; sys.modules['typer'] = None; from gossamer.cli import main; main()")
    assert done.returncode == 1 and done.stderr.strip().endswith('pip install "gossamer[cli]"')


def test_unknown_command_and_version() -> None:
    assert CliRunner().invoke(main, ["benhc"]).exit_code == 2
    result = CliRunner().invoke(main, ["--version"])
    assert result.exit_code == 0 and result.output.startswith("gossamer 0.")
