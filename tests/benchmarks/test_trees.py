"""benchmarks/trees.py: two checkouts, timed in turns."""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks import trees

ROOT = Path(__file__).parents[2]


def test_a_tree_beside_itself(tmp_path: Path) -> None:
    out = tmp_path / "trees.json"
    options = ["--room", "gemm", "--case", "linear_glu/*", "--rounds", "2", "--out", str(out)]
    command = [sys.executable, "benchmarks/trees.py", ".", ".", *options]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "gemm/linear_glu/" in ran.stdout and ": eager " in ran.stdout
    for times in json.loads(out.read_text()).values():
        assert len(times) == 2 and all(answer["eager"] > 0 for pair in times for answer in pair)


def test_a_line() -> None:
    times = [[{"eager": 2e-6, "graph": 1e-6}, {"eager": 3e-6, "graph": 1e-6}], [{"eager": 2.2e-6}, {"eager": 3e-6}]]
    assert trees.told(times) == "eager 1.429 (1.100) of 2.1 us"  # one round has no graph
