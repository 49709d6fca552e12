"""The wheel of `make dist`, in an empty environment and away from the clone, does what README's start says."""

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[1]


@pytest.mark.full
def test_the_wheel_runs_the_start_of_readme(tmp_path: Path) -> None:
    pytest.importorskip("build")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "GOSSAMER"))}
    log = []

    def run(*command: str | Path, at: Path = tmp_path) -> str:
        done = subprocess.run([*map(str, command)], cwd=at, env=environment, capture_output=True, text=True)
        log.append(f"$ {' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
        assert done.returncode == 0, "\n".join(log)
        return done.stdout

    run(sys.executable, "-m", "build", "--outdir", tmp_path / "dist", at=HOUSE)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    (source,) = (tmp_path / "dist").glob("*.tar.gz")
    assert wheel.name.startswith(source.name.removesuffix(".tar.gz"))

    venv.create(tmp_path / "empty", with_pip=True)
    python = tmp_path / "empty" / ("Scripts" if os.name == "nt" else "bin") / "python"
    pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    run(*pip, "--constraint", HOUSE / "constraints.txt", f"{wheel}[cli,sae-lens]")
    where = run(python, "-c", "import gossamer; print(gossamer.__file__)")
    assert Path(where.strip()).is_relative_to(tmp_path)
    assert "all is well" in run(python.with_name("gossamer"), "doctor")

    start = (HOUSE / "README.md").read_text(encoding="utf-8").split("\n## Start\n")[1].split("\n## ")[0]
    blocks = re.findall(r"^```python\n(.*?)^```$", start, re.S | re.M)
    assert len(blocks) >= 2 and any("sae_lens.patch" in block for block in blocks)
    for block in blocks:
        run(python, "-c", block)
