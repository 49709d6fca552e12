"""A run of training over several processes, against one: `fully_shard`, the tracker, new weights, checkpoints."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gossamer import nn, sparsity
from gossamer.train import Config, Corpus, Run, loop
from tests.train.corpora import write_corpus

SMALL = Config(
    layers=2, hidden=32, intermediate=44, heads=2, vocabulary=64, length=16, batch=12, micro_batch=2, steps=6, lr=1e-2,
    warmup=2, l1=2.0, reinitialize=0.5,
)  # fmt: skip


def shared_folder(rank: int) -> Path:
    found = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(found)
    return Path(found[0])


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
        initialized, dist.is_initialized = dist.is_initialized, lambda: False
        try:
            run = Run(SMALL, corpus, folder / "alone", device=device)
            run.train()
            alone = run.records
        finally:
            dist.is_initialized = initialized
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
