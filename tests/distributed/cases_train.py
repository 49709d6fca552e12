"""A run of training over several processes, against one: `fully_shard`, the tracker, new weights, checkpoints."""

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gossamer import nn, sparsity
from gossamer._core import files
from gossamer.train import Config, Corpus, Run, SAEConfig, SAERun, loop
from tests.train import test_sae
from tests.train.corpora import write_corpus
from tests.train.stopping import Stopped, stop

SMALL = Config(
    layers=2, hidden=32, intermediate=44, heads=2, vocabulary=64, length=16, batch=12, micro_batch=2, steps=6, lr=1e-2,
    warmup=2, l1=2.0, reinitialize=0.5,
)  # fmt: skip


def shared_folder(rank: int) -> Path:
    found = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(found)
    return Path(found[0])


@contextmanager
def by_itself() -> Iterator[None]:
    """As in a process without others."""
    initialized, dist.is_initialized = dist.is_initialized, lambda: False
    try:
        yield
    finally:
        dist.is_initialized = initialized


def close(found: float, wanted: float) -> bool:
    return abs(found - wanted) <= 2e-4 * max(1.0, abs(wanted))


def case_training(rank: int, world: int, device: torch.device) -> None:
    """All ranks together give the curve of one, also where they go on from the checkpoint of one."""
    folder = shared_folder(rank)
    if rank == 0:
        write_corpus(folder / "corpus", tokens=4000, vocabulary=64)
    dist.barrier()
    corpus = Corpus(folder / "corpus")
    together = Run(SMALL, corpus, folder / "together", device=device, checkpoint_every=3)
    together.train()
    again = Run(SMALL, corpus, folder / "together", device=device)
    kept, loop.VALIDATED = loop.VALIDATED, 1  # as few sequences as there are ranks: each still makes the same calls
    few = again.validate()
    loop.VALIDATED = kept
    alone: list[dict[str, float]] = []
    if rank == 0:
        with by_itself():
            run = Run(SMALL, corpus, folder / "alone", device=device)
            run.train()
            alone = run.records
    dist.barrier()
    assert 2 < few < 6
    assert again.step == SMALL.steps and len(again.records) == SMALL.steps
    for found, wanted in zip(together.records, alone):
        for key in ("loss", "l1", "l0", "dead", "norm"):
            assert close(found[key], wanted[key]), (found["step"], key, found[key], wanted[key])
    if rank == 0:
        assert close(together.records[-1]["validation"], alone[-1]["validation"])
        assert any(record["dead"] > 0 for record in alone), "no neuron died: the test shows nothing"


def case_batch_must_divide(rank: int, world: int, device: torch.device) -> None:
    folder = shared_folder(rank)
    if rank == 0:
        write_corpus(folder, tokens=4000, vocabulary=64)
    dist.barrier()
    message = ""
    try:
        Run(replace(SMALL, batch=10 * world + 2), Corpus(folder), folder / "run", device=device)
    except ValueError as error:
        message = str(error)
    assert "batch must be a multiple of micro_batch times the ranks" in message, message


def case_activity_of_a_sharded_block(rank: int, world: int, device: torch.device) -> None:
    """L1 reaches the weights through `fully_shard`, and counts are those of the rank's tokens."""
    mesh = init_device_mesh(device.type, (world,))
    torch.manual_seed(1)
    block = nn.GatedMLP(8, 24, "relu", l1=True, device=device)
    one: Any = nn.GatedMLP(8, 24, "relu", l1=True, device=device)
    one.load_state_dict(block.state_dict())
    x = torch.randn(world, 3, 8, device=device)
    fully_shard(block, mesh=mesh)
    out = block(x[rank])
    (out.out.square().mean() + out.activity.l1).backward()
    tracker = sparsity.DeadNeuronTracker()
    tracker.add(out.activity.fired)
    dead = tracker.step()
    wanted = one(x)
    (wanted.out.square().mean() + wanted.activity.l1).backward()
    for name, parameter in block.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), one.get_parameter(name).grad, msg=name)
    assert torch.equal(dead, wanted.activity.fired == 0)
    generators = [torch.Generator(device).manual_seed(3) for _ in range(2)]
    dead[::3] = True
    sparsity.reinitialize_(block.gate_proj.weight, dead, generator=generators[0])
    sparsity.reinitialize_(one.gate_proj.weight, dead, generator=generators[1])
    assert torch.equal(block.gate_proj.weight.full_tensor(), one.gate_proj.weight)


def case_sweep(rank: int, world: int, device: torch.device) -> None:
    """Ranks that share a sweep leave the files of one process, and each number of ranks goes on with those of another.
    The error of one rank ends all."""
    folder = shared_folder(rank)
    config = SAEConfig(d_sae=48, batch=16, buffer=64, steps=30, lr=1e-3, sweep={"l0": [2, 3, 4, 5, 6][: 2 * world - 1]})

    def train(name: str, config: SAEConfig = config, at: int = 99) -> SAERun:
        options: dict[str, Any] = {"checkpoint_every": 10, "log_every": 5, "device": device}
        found = SAERun(config, test_sae.rows(), folder / name, **options)
        found.train(stop(at))
        return found

    found: list[Any] = []

    def refused(expected: type[Exception], message: str, *given: Any) -> None:
        try:
            train(*given)
            found.append("nothing was raised")
        except Exception as error:
            found.append(None if isinstance(error, expected) and message in str(error) else error)

    mine: tuple[type[Exception], str] = (Stopped, "") if rank == 0 else (RuntimeError, "train: rank 0 of")
    refused(*mine, "together", config, 15)
    whole = train("together")
    if rank == 0:
        with by_itself():
            train("alone")
            refused(Stopped, "", "mixed", config, 15)
    dist.barrier()
    train("mixed")
    few = f"a sweep over {world} processes must have an autoencoder for each, got 1. Start fewer processes"
    refused(ValueError, few, "few", replace(config, sweep={}))
    if rank == 0:
        mine = ValueError, "every rank must get the same arguments, and rank 1 has another lr than rank 0"
    refused(*mine, "other", replace(config, lr=1e-3 + 1e-4 * (rank == 1)))
    assert not any(found), found
    assert whole.step == 30 and len(whole.results) == (2 * world - 1 if rank == 0 else len(whole.models))
    if rank == 0:
        for name in ("together", "mixed"):
            for read in (test_sae.curve, test_sae.files, lambda path: (path / "results.json").read_text()):
                assert read(folder / name) == read(folder / "alone"), name


def case_an_error_of_a_sweep_ends_all_ranks(rank: int, world: int, device: torch.device) -> None:
    """Arguments and folders that differ, the last file, an interrupt: no rank waits, and all learn why."""
    folder = shared_folder(rank)
    config = SAEConfig(d_sae=24, batch=16, buffer=64, steps=10, sweep={"l0": [2, 3, 4][:world]})
    write, saved = files.write_text, SAERun._saved

    def message(name: str, show: Any = lambda record: None, **options: Any) -> str:
        options = {"checkpoint_every": 10, "log_every": 5, "device": device} | options
        try:
            SAERun(config, test_sae.rows(), folder / name, **options).train(show)
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    def full(operator: str, file: Path, text: str) -> None:
        if file.name == "results.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(operator, file, text)

    def interrupt(record: dict[str, float]) -> None:
        raise KeyboardInterrupt

    said = [message("run", log_every=5 + (rank == 1)), message("run", checkpoint_every=10 - (rank == 1))]
    said += [message(f"own-{rank}"), message("run", interrupt)]
    try:
        files.write_text = full
        said.append(message("run"))
        files.write_text = write
        if rank == 1:
            SAERun._saved = lambda run: []  # type: ignore[method-assign]
        said.append(message("run"))
    finally:
        files.write_text, SAERun._saved = write, saved  # type: ignore[method-assign]
    said.append(message("run"))
    wanted = [
        "train: every rank must get the same arguments, and rank 1 has another log_every than rank 0: 6, not 5.",
        "the same arguments, and rank 1 has another checkpoint_every than rank 0: 9, not 10.",
        "of rank 1, at step 0, is another than that of rank 0, at step 0. Name a folder",
        "lost the others" if rank else "KeyboardInterrupt",
        "No space left on device. All ranks stop; the same call goes on" if rank else "No space left on device",
        "of rank 1, at step 0, is another than that of rank 0, at step 10. Name a folder",
        "no error",
    ]
    assert all(text in found for text, found in zip(wanted, said, strict=True)), said
    assert not [*folder.rglob(".rank-*")]
