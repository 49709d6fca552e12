"""Extraction by several processes: the bytes of one, in every interruption, and errors that reach all."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gossamer import nn
from gossamer.extract import Extraction, extract
from tests.extract.extraction import D_IN, D_SAE, SIZES, Killed, contents, model, stop_at

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
]

ROWS = 600
CPU = torch.device("cpu")

# What a rank does: one call after another, in one process for all of them, for it is starting that takes long.
SCRIPT = """
import sys, time, torch, torch.distributed as dist
from gossamer import nn
from gossamer.extract import Extraction, extract

sizes = {"batch_size": 32, "shard_rows": 64, "top": 5}
torch.manual_seed(0)
model = nn.TopKSAE(16, 192, 6)
x = torch.randn(192, 16, generator=torch.Generator().manual_seed(1)).repeat(4, 1)[:600]
out = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()


class Fails:
    def __init__(self, at):
        self.at = at

    def __len__(self):
        return 600

    def rows_from(self, start):
        for first in range(start, 600, 32):
            if first >= self.at and rank == 1:
                raise OSError("the disk of rank 1 is gone")
            yield x[first : first + 32]


def message(*args, **options):
    try:
        extract(*args, **(sizes | options))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


"""


def source() -> torch.Tensor:
    """Rows that come again three files later, so that the largest values are equal and the first row decides."""
    return torch.randn(192, D_IN, generator=torch.Generator().manual_seed(1)).repeat(4, 1)[:ROWS]


def start(code: str, out: Path, ranks: int = 2) -> list[subprocess.Popen[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    return [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT + code, str(out)],
            env=environment | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]


def finish(processes: list[subprocess.Popen[str]], codes: tuple[int, ...] = (0, 0, 0)) -> list[str]:
    found = [process.communicate(timeout=120) for process in processes]
    for process, code in zip(processes, codes):
        assert process.returncode == code, "\n".join(f"rank {rank}: {text}" for rank, (_, text) in enumerate(found))
    return [output for output, _ in found]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_bytes_of_one_process(tmp_path: Path) -> None:
    """From nothing, after a break with another number of ranks, and with rows that make no whole round."""
    x, sae = source(), model(CPU)

    for name in ("b", "c"):
        with pytest.raises(Killed):
            extract(x, sae, tmp_path / name, progress=stop_at(224), **SIZES)
    sizes = (1, 64, 128, 130, ROWS)
    code = """
seen = []
print(repr(extract(x, model, out + "/a", progress=lambda *done: seen.append(done), **sizes)))
extract(x, model, out + "/b", **sizes)
for rows in (1, 64, 128, 130, 600):
    extract(x[:rows], model, f"{out}/{rows}", **sizes)
assert (rank or seen[-1] == (600, 600)) and all(a < b for (a, _), (b, _) in zip(seen, seen[1:])), seen
"""
    outputs = finish(start(code, tmp_path))
    assert outputs[0] == outputs[1] == repr(extract(x, sae, tmp_path / "whole", **SIZES)) + "\n"
    extract(x, sae, tmp_path / "c", **SIZES)
    whole = contents(tmp_path / "whole")
    for name in ("a", "b", "c", "600"):
        assert contents(tmp_path / name) == whole, name
    for rows in sizes:
        extract(x[:rows], sae, tmp_path / f"one, {rows}", **SIZES)
        assert contents(tmp_path / f"one, {rows}") == contents(tmp_path / str(rows)), rows
    found = Extraction(tmp_path / "a")
    ties = (found.top_values[:, 1:] == found.top_values[:, :-1]) & (found.top_positions[:, 1:] >= 0)
    assert int(ties.sum()) > D_SAE // 4
    dense = torch.cat([sae.eval().encode(part).to_dense() for part in x.split(32)])
    best = dense.t().sort(descending=True, stable=True)
    assert torch.equal(found.top_positions, torch.where(best.values[:, :5] > 0, best.indices[:, :5], -1))


def test_a_rank_that_does_not_call_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def new_group(**_: Any) -> None:
        raise RuntimeError("wait timeout after 1800000ms")

    for name, value in (("is_initialized", True), ("get_world_size", 2), ("get_rank", 0)):
        monkeypatch.setattr(dist, name, lambda value=value: value)
    monkeypatch.setattr(dist, "new_group", new_group)
    with pytest.raises(RuntimeError, match=r"has 2 ranks, and not all of them have come here. Call it on each of them"):
        extract(source(), model(CPU), tmp_path / "out", **SIZES)


@pytest.mark.parametrize(
    "kills", [[(3, slice(1, 2))], pytest.param([(2, slice(None)), (3, slice(1, 2))], marks=pytest.mark.full)]
)
def test_killed(kills: list[tuple[int, slice]], tmp_path: Path) -> None:
    """SIGKILL to one rank of three, or first to both of two; then one process: the bytes of one process."""
    code = """
print("begun", flush=True)
try:
    extract(x, model, out, progress=lambda *_: time.sleep(0.05), **sizes)
except RuntimeError as error:
    sys.exit(f"{error}")
"""
    rows, out = 0, tmp_path / "out"
    for ranks, killed in kills:
        processes = start(code, out, ranks)
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "begun\n"
        while not rows < (rows_now := Extraction(out).rows if (out / "manifest.json").exists() else 0):
            time.sleep(0.01)
        rows = rows_now
        for process in processes[killed]:
            process.send_signal(signal.SIGKILL)
        for process in processes:
            _, errors = process.communicate(timeout=60)
            if process not in processes[killed]:
                assert process.returncode == 1 and "lost the others, for one of them has ended" in errors
        assert not Extraction(out).manifest["complete"]
    for name in ("out", "whole"):
        extract(source(), model(CPU), tmp_path / name, **SIZES)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_the_command_line(tmp_path: Path) -> None:
    nn.save_sae(model(CPU), tmp_path / "model")
    np.save(tmp_path / "acts.npy", source().numpy())
    command = [sys.executable, "-c", "from gossamer.cli import main; main()", "sae", "extract"]
    command += [str(tmp_path / "model"), str(tmp_path / "acts.npy"), "--device", "cpu", "--top", "5"]
    command += ["--batch-size", "32", "--shard-rows", "64", "--out", str(tmp_path / "out")]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "--no-python"]
    done = subprocess.run(
        torchrun + command, capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("600 rows, ") == 1
    extract(source(), model(CPU), tmp_path / "whole", **SIZES)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_damage_and_changes(tmp_path: Path) -> None:
    """Each rank verifies its shards, and its part of the source; a damaged manifest is an error on all of them."""
    code = """
import pathlib
from tests.extract.extraction import flip

def together(act):
    dist.barrier()
    if rank == 0:
        act()
    dist.barrier()


folder, seen = pathlib.Path(out), []
print(message(x, model, out, progress=lambda *done: seen.append(done)))
kept = (folder / "manifest.json").read_bytes()
shard, other = folder / "shard-000003.safetensors", x.clone()
other[3 * 64] += 1
together(lambda: flip(shard))
print(message(x, model, out))
together(lambda: flip(shard))
print(message(other, model, out))
seen.clear()
said = message(x, model, out, progress=lambda *done: seen.append(done))
print(said, seen[-1], all(a < b for a, b in zip(seen, seen[1:])))
together(lambda: (folder / "manifest.json").write_bytes(kept[:500]))
print(message(x, model, out))
together(lambda: (folder / "manifest.json").write_bytes(kept))
print(message(x, model, out))
print(message(x[:0], model, out))
"""
    extract(source(), model(CPU), tmp_path / "whole", **SIZES)
    first, second = (output.splitlines() for output in finish(start(code, tmp_path / "out")))
    for number, said in ((1, "shard-000003.safetensors is damaged"), (2, "its rows from 192 on differ")):
        # Of rank 1, whose shard it is.
        assert second[number].startswith("ValueError: extract: ") and said in second[number], second[number]
        assert first[number].startswith("RuntimeError: extract: rank 1 of 2 failed with ValueError: extract: ")
        assert said in first[number]
    for output in (first, second):
        assert output[0] == output[5] == "no error" and output[3] == "no error (600, 600) True", output
        assert "manifest.json is damaged" in output[4] and "source has no rows" in output[6]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_errors_reach_all(tmp_path: Path) -> None:
    """Wrong arguments on both or on one, and an error half-way on one: nobody waits for ever, all say why."""
    code = """
print(message(iter(x.split(10)), model, out + "/a"))
print(message(x, model, out + "/a", top=5 + rank))
print(message(x[rank:], model, out + "/a"))
print(message(x if rank == 0 else x.flip(0), model, out + "/a"))
print(message(x, model if rank == 0 else torch.nn.Linear(2, 2), out + "/a"))
print(message(Fails(300), model, out + "/b"))
print(Extraction(out + "/b"))
print(message(x, model, out + "/b"))
print(message(x, model, out + "/b", top=7))
print(message(x + 5, model, out + "/b"))
print(message(x if rank == 0 else x + 5, model, out + "/b"))
print(message(x, model, out + "/b"))
"""
    extract(source(), model(CPU), tmp_path / "whole", **SIZES)
    first, second = (output.splitlines() for output in finish(start(code, tmp_path)))
    elsewhere = "RuntimeError: extract: rank {} of 2 failed with "
    differ = "ValueError: extract: every rank must get the same arguments, and rank 1 has"
    for mine, other, rank, message in (
        *((first[line], second[line], 0, differ) for line in (1, 2, 3, 10)),
        (second[4], first[4], 1, "TypeError: extract: sae must have encode(x)"),
        (second[5], first[5], 1, "OSError: the disk of rank 1 is gone"),
        (first[8], second[8], 0, "ValueError: extract: "),
    ):
        assert mine.startswith(message), mine
        assert other.startswith(elsewhere.format(rank) + message), other
    for output in (first, second):
        assert "source must be one that can be read from any row on, for 2 processes share its rows" in output[0]
        assert output[6].startswith("Extraction(rows=256,") and "unfinished" in output[6]
        assert output[7] == output[11] == "no error"
        assert "was begun with another source: its rows from" in output[9]
    assert "another top than rank 0: 6, not 5" in first[1] and "another rows than rank 0: 599, not 600" in first[2]
    assert "another source than rank 0" in first[3] and "was begun with top = 5, not 7" in first[8]
    assert contents(tmp_path / "b") == contents(tmp_path / "whole")
