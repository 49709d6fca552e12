"""Two ways past one GPU, beside one GPU: a run sharded by `fully_shard`, and a block whose neurons are spread.

    torchrun --nproc-per-node 2 -m benchmarks.train.ranks corpus runs --json benchmarks/results/train-ranks-<gpu>.json

The run is that of the preset on the corpus, first of rank 0 alone, then of all ranks, from the same seed and on the
same text: the curves differ by rounding. The block is one of the paper's 1.5B model with 29 entries a token, by
`nn.GatedMLP` and spread by `nn.NeuronParallel`, forward and backward.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shlex
import statistics
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from benchmarks.provenance import provenance
from gossamer import nn
from gossamer.train import Config, Corpus, Run, preset

TOKENS, ENTRIES, CALLS = 16_384, 29, 20


def run(config: Config, corpus: Corpus, folder: Path, device: torch.device) -> dict[str, Any]:
    whole = Run(config, corpus, folder, device=device, checkpoint_every=config.steps)
    whole.train()
    settled = whole.records[len(whole.records) // 2 : -1]
    return {
        "loss": [record["loss"] for record in whole.records],
        "validation": whole.records[-1]["validation"],
        "sparse layers": whole.records[-1]["sparse layers"],
        "l0": whole.records[-1]["l0"],
        "tokens/s": statistics.median(record["tokens/s"] for record in settled),
        "peak_bytes": max(record.get("peak_bytes", 0) for record in settled),
    }


def both_passes(block: Any, x: Tensor, grad: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    block.zero_grad()
    out, activity = block(x)
    torch.autograd.backward((out, activity.l1), (grad, torch.full_like(activity.l1, 1e-3)))
    return out.detach()


def milliseconds(block: Any, x: Tensor, grad: Tensor) -> float:
    moments = [torch.cuda.Event(enable_timing=True) for _ in range(CALLS + 1)]
    for _ in range(5):
        both_passes(block, x, grad)
    for moment in moments[:-1]:
        moment.record()
        both_passes(block, x, grad)
    moments[-1].record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(moments))


def block(device: torch.device, world: int) -> dict[str, Any]:
    """Of `nn.NeuronParallel`: times of one rank and of all, and the largest difference over the largest number."""
    generator = torch.Generator(device).manual_seed(0)
    one = nn.GatedMLP(2048, 5632, "relu", bias=True, l1=True, dtype=torch.bfloat16, device=device)
    for name, parameter in one.named_parameters():
        spread = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.0
        parameter.data.normal_(0, spread, generator=generator)
        if name == "gate_proj.bias":
            parameter.data.fill_(-torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(1 - ENTRIES / 5632)).item())
    x, grad = (
        torch.randn(TOKENS, 2048, device=device, generator=generator, dtype=torch.bfloat16) for _ in range(2)
    )  # fmt: skip
    mesh = init_device_mesh(device.type, (world,))
    many = parallelize_module(copy.deepcopy(one), mesh, nn.NeuronParallel())
    found: dict[str, Any] = {}
    for method in ("fused", "gather"):
        one.method = many.method = method
        outs = [both_passes(part, x, grad) for part in (one, many)]
        differences = {"out": _beside(outs[1], outs[0])}
        for name, parameter in one.named_parameters():
            spread_grad: Any = many.get_parameter(name).grad
            full = spread_grad.full_tensor() if isinstance(spread_grad, DTensor) else spread_grad
            assert parameter.grad is not None
            differences[name] = _beside(full, parameter.grad)
        found[method] = {"differences": differences}
        for name, part in (("one", one), ("all", many)):
            dist.barrier()
            found[method][name] = milliseconds(part, x, grad)
    return found


def _beside(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).abs().max() / b.float().abs().max().clamp(min=1e-30))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path, help="folder for the runs")
    parser.add_argument("--preset", default="100m")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--l1", type=float, default=5e-3)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    command = shlex.join(["torchrun", "-m", "benchmarks.train.ranks", *sys.argv[1:]])
    found = provenance(command, Path(__file__).parents[2], device)
    corpus = Corpus(given.corpus)
    config = preset(
        given.preset, steps=given.steps, l1=given.l1, reinitialize=0.1, method="auto", compile=given.compile,
        dtype="bfloat16", vocabulary=corpus.vocabulary, warmup=min(100, given.steps // 4),
    )  # fmt: skip
    if rank == 0:
        found["one"] = run(config, corpus, given.out / "one", device)
        torch.cuda.empty_cache()
    dist.init_process_group("nccl", device_id=device)
    world = dist.get_world_size()
    found |= {"ranks": world, "block, ms": block(device, world)}
    _write(found, given.json, rank)
    found["all"] = run(config, corpus, given.out / "all", device)
    _write(found, given.json, rank)
    dist.destroy_process_group()


def _write(found: dict[str, Any], file: Path | None, rank: int) -> None:
    if rank:
        return
    if file:
        file.write_text(json.dumps(found, indent=1) + "\n")
    for method, times in found["block, ms"].items():
        worst = max(times["differences"].values())
        print(f"block, {method}: one {times['one']:.3f} ms, all {times['all']:.3f} ms, differ by {worst:.1e}")
    for name in ("one", "all"):
        if name in found:
            kept = found[name]
            print(
                f"{name}: {kept['tokens/s']:,.0f} tokens/s, {kept['peak_bytes'] / 2**30:.1f} GiB, L0 {kept['l0']:.1f}, "
                f"{kept['sparse layers']:.0f} sparse layers, validation {kept['validation']:.4f}",
                flush=True,
            )
    if "all" in found:
        worst = max(abs(a - b) for a, b in zip(found["one"]["loss"], found["all"]["loss"]))
        print(f"losses differ by {worst:.1e} at most")


if __name__ == "__main__":
    main()
