"""The template at the end of CONTRIBUTING.md is an operator that works, and that obeys what the page says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.native

ROOT = Path(__file__).parents[2]
TEMPLATE = (ROOT / "CONTRIBUTING.md").read_text().partition("\n## A template\n")[2]
FILES = dict(re.findall(r"```python\n# (\S+)\n(.*?)```", TEMPLATE, re.DOTALL))

# Joins the room to the package, as the process that runs its files sees it.
JOIN = """
import gossamer
gossamer.__path__.append({source!r})
"""

CHECKS = """
import join
import doctest, torch
from benchmarks.engine.runner import Settings, run_case
from gossamer.room import row_energy as public
from gossamer.room._triton import row_energy as kernels
from room_benchmarks import cases
from tests import aot

assert doctest.testmod(public, extraglobs={"torch": torch}) == (0, 1)
for kernel, example in kernels.EXAMPLES.items():
    for target in aot.TARGETS:
        compiled = aot.compile_kernel(kernel, aot.complete(kernel, example), target)
        assert compiled.metadata.shared <= aot.SHARED_MEMORY_LIMIT[target]
        if target == "sm_90":
            used = aot.resources(compiled)
            assert used["LOCAL"] == used["STACK"] == 0, used
for case in cases(torch.device("cpu"), quick=True):
    result = run_case(case, torch.device("cpu"), Settings(rounds=1, burst=0.001), seed=0)
    assert not result.failed and len(result.outcomes) == 2, result
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("template")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "join.py").write_text(JOIN.format(source=str(folder / "src" / "gossamer")))
    (folder / "room_benchmarks.py").write_text(FILES["benchmarks/room/bench_row_energy.py"])
    return folder


def run(folder: Path, *arguments: str, **variables: str) -> str:
    """What a Python process with the room prints."""
    path = os.pathsep.join([str(folder), str(ROOT / "src"), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": path, "GOSSAMER_INTERPRET": "0", **variables}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_it_is_short_and_whole() -> None:
    stems = [Path(name).stem.removeprefix("test_").removeprefix("bench_") for name in FILES]
    assert sorted(stems) == ["records", *["row_energy"] * 5]
    count = sum(bool(line.strip()) for text in FILES.values() for line in text.splitlines())
    assert count <= 150 and f"in {count} lines" in TEMPLATE


@pytest.mark.parametrize("interpret", ["0", "1"])
def test_its_tests_pass(folder: Path, interpret: str) -> None:
    pytest.importorskip("triton")
    test = ["tests/room/test_row_energy.py", "-p", "join", "-p", "tests.conftest", "--import-mode=importlib"]
    said = run(folder, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *test, GOSSAMER_INTERPRET=interpret)
    if interpret == "1" and "NumPy" in said and " skipped" in said:
        pytest.skip("Triton's interpreter does not run here")
    passed = re.search(r"(\d+) passed", said)
    assert passed is not None and int(passed[1]) >= 5, said


def test_it_compiles_and_is_measured(folder: Path) -> None:
    pytest.importorskip("triton")
    run(folder, "-c", CHECKS)


def test_its_style(folder: Path) -> None:
    pytest.importorskip("ruff")
    # The rest of the package is elsewhere.
    ours = "lint.isort.known-first-party = ['benchmarks', 'gossamer']"
    for command in (["check", "--config", ours], ["format", "--check"]):
        run(folder, "-m", "ruff", *command, "--config", str(ROOT / "pyproject.toml"), "src", "tests", "benchmarks")
