"""Groups of processes on one machine, against one process: every case runs in one start of two, and of three.

On a machine with two GPUs the same cases run there, over NCCL. One start is one test, because starting processes is
what takes time; a failure names its case and rank.
"""

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from gossamer import nn, rowsparse, sae
from gossamer.sae.sharded import add_parts, copy_to_ranks
from tests.distributed.cases_sae import case_compile

ROOT = Path(__file__).parents[2]
FILES = ("cases_sae", "cases_nn", "cases_train", "cases_mlp")


def environment() -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    # Machines whose own name leads nowhere have a loopback.
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return {**loopback, **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def run_cases(folder: Path, world: int, device: str, files: tuple[str, ...]) -> None:
    modules = [f"tests.distributed.{file}" for file in files]
    logs = [folder / f"{rank}.log" for rank in range(world)]
    started = []
    for rank, log in enumerate(logs):
        command = [sys.executable, "-m", "tests.distributed.worker", str(folder), str(rank), str(world), device]
        with log.open("w") as file:
            options = {"cwd": ROOT, "env": environment(), "stdout": file, "stderr": subprocess.STDOUT}
            started.append(subprocess.Popen([*command, *modules], **options))
    try:
        codes = [process.wait(timeout=400) for process in started]
    finally:
        for process in started:
            process.kill()
    assert codes == [0] * world, "\n".join(log.read_text()[-4000:] for log in logs)
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
    raised = [f"{name} on rank {rank}: {each[name]}" for rank, each in enumerate(found) for name in each if each[name]]
    assert not raised, "\n".join(raised)
    assert all(each.keys() == found[0].keys() and each for each in found)


@pytest.mark.parametrize(
    "world, files", [pytest.param(2, FILES, marks=pytest.mark.full), (3, FILES), (4, ("cases_grid",))]
)
def test_on_the_cpu(world: int, files: tuple[str, ...], tmp_path: Path) -> None:
    run_cases(tmp_path, world, "cpu", files)


@pytest.mark.usefixtures("one_rank")
def test_it_compiles_in_a_group_of_one() -> None:
    """Of two, with every activation, where the cases run in a start of two: to trace them takes long."""
    case_compile(0, 1, torch.device("cpu"), kinds=("batchtopk",))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", [add_parts, copy_to_ranks])
def test_sums_over_ranks_compile_with_their_gradients(function: Any, dtype: torch.dtype) -> None:
    x = torch.randn(4, 6).to(dtype).requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: function(x.sin(), dist.group.WORLD), fullgraph=True, backend="aot_eager")
    (got,) = torch.autograd.grad(compiled(x).square().sum(), x, materialize_grads=True)
    (want,) = torch.autograd.grad(x.sin().square().sum(), x)
    torch.testing.assert_close(got, want)


@pytest.mark.usefixtures("one_rank")
def test_neurons_over_ranks_compile_in_a_group_of_one() -> None:
    one = nn.GatedMLP(8, 24, "relu", l1=True)
    many = parallelize_module(copy.deepcopy(one), init_device_mesh("cpu", (1,)), nn.NeuronParallel())
    x = torch.randn(5, 8)
    found, wanted = torch.compile(many, fullgraph=True, backend="aot_eager")(x), one(x)
    torch.testing.assert_close(found.out, wanted.out)
    (found.out.sum() + found.activity.l1).backward()
    (wanted.out.sum() + wanted.activity.l1).backward()
    for name, parameter in one.named_parameters():
        torch.testing.assert_close(many.get_parameter(name).grad.full_tensor(), parameter.grad, msg=name)


@pytest.mark.gpu
def test_on_two_gpus(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    run_cases(tmp_path, 2, "cuda", FILES)


@pytest.mark.full
@pytest.mark.parametrize("name", ["train.py", "train_sharded.py"])
def test_the_programs_of_the_docs(name: str, tmp_path: Path) -> None:
    """Under torchrun; what they save can be loaded."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "distributed.md").read_text(), re.S)
    (program,) = [block for block in blocks if block.startswith(f"# {name}\n")]
    (tmp_path / name).write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", name]
    # On the CPU everywhere: there need not be two GPUs.
    hidden = environment() | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=tmp_path, env=hidden, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (folder,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    model = nn.load_sae(folder)
    assert model.firing_counts.sum() == 20 * 256 * 16 * (2 if name == "train.py" else 1)


def test_without_a_group() -> None:
    for call in (
        lambda: sae.encode(torch.ones(2, 3), torch.ones(3, 4), group=object()),
        lambda: sae.decode(rowsparse.pack(torch.ones(2, 3)), torch.ones(3, 4), group=object()),
        lambda: nn.shard_sae(nn.TopKSAE(4, 8, 2)),
        lambda: nn.data_parallel_sae(nn.TopKSAE(4, 8, 2)),
    ):
        with pytest.raises(ValueError, match=r"group must be a process group, .* Start with torchrun"):
            call()
