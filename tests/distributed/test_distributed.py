"""Groups of processes on one machine, against one process: every case runs in one start of two, and of three.

On a machine with two GPUs the same cases run there, over NCCL.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from gossamer import nn, rowsparse, sae

ROOT = Path(__file__).parents[2]
FILES = ("cases_sae", "cases_nn")


def cases(*files: str) -> list[str]:
    texts = [Path(__file__).with_name(f"{file}.py").read_text() for file in files]
    return [name for text in texts for name in re.findall(r"^def (case_\w+)", text, re.M)]


def environment() -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    # Machines whose own name leads nowhere have a loopback.
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return {**loopback, **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


Results = Callable[..., list[dict[str, str]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What the cases of some files raised, for each rank; processes are started once for (world, device, files)."""

    @cache
    def run(world: int, device: str, *files: str) -> list[dict[str, str]]:
        folder = tmp_path_factory.mktemp(f"{device}{world}")
        modules = [f"tests.distributed.{file}" for file in files]
        logs = [folder / f"{rank}.log" for rank in range(world)]
        started = []
        for rank, log in enumerate(logs):
            command = [sys.executable, "-m", "tests.distributed.worker", str(folder), str(rank), str(world), device]
            with log.open("w") as file:
                started.append(
                    subprocess.Popen(
                        [*command, *modules], cwd=ROOT, env=environment(), stdout=file, stderr=subprocess.STDOUT
                    )
                )
        try:
            codes = [process.wait(timeout=400) for process in started]
        finally:
            for process in started:
                process.kill()
        assert codes == [0] * world, "\n".join(log.read_text()[-4000:] for log in logs)
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]

    return run


def check(found: list[dict[str, str]], case: str) -> None:
    raised = [(rank, each[case]) for rank, each in enumerate(found) if each[case]]
    assert not raised, "\n".join(f"rank {rank}: {text}" for rank, text in raised)


@pytest.mark.parametrize("case", cases(*FILES))
@pytest.mark.parametrize("world", [2, 3])
def test_on_the_cpu(case: str, world: int, results: Results) -> None:
    check(results(world, "cpu", *FILES), case)


@pytest.mark.parametrize("case", cases("cases_grid"))
def test_on_a_grid(case: str, results: Results) -> None:
    check(results(4, "cpu", "cases_grid"), case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases(*FILES))
def test_on_two_gpus(case: str, results: Results) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    check(results(2, "cuda", *FILES), case)


@pytest.mark.full
@pytest.mark.parametrize("name", ["train.py", "train_sharded.py"])
def test_the_programs_of_the_docs(name: str, tmp_path: Path) -> None:
    """Under torchrun; what they save can be loaded."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "distributed.md").read_text(), re.S)
    (program,) = [block for block in blocks if block.startswith(f"# {name}\n")]
    (tmp_path / name).write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", name]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (folder,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    model = nn.load(folder)
    assert model.firing_counts.sum() == 20 * 256 * 16 * (2 if name == "train.py" else 1)


def test_without_a_group() -> None:
    for call in (
        lambda: sae.encode_sharded(torch.ones(2, 3), torch.ones(3, 4), activation="relu"),
        lambda: sae.decode_sharded(rowsparse.pack(torch.ones(2, 3)), torch.ones(3, 4)),
        lambda: nn.shard(nn.TopKSAE(4, 8, 2)),
        lambda: nn.data_parallel(nn.TopKSAE(4, 8, 2)),
    ):
        with pytest.raises(ValueError, match=r"group must be a process group, .* Start with torchrun"):
            call()
