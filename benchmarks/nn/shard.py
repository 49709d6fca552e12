"""An autoencoder in training, whole on one GPU and spread over all by `nn.shard_sae`: times, memory, collectives.

    torchrun --nproc-per-node 2 -m benchmarks.nn.shard --json benchmarks/results/nn-shard-<gpu>.json

Each pass is the loss of a `TopKSAE` and its gradients, from the same weights and rows. The last measurement has weights
and Adam's state in float32 and computes in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.provenance import provenance
from gossamer import nn

PASSES = 6


def measured(call: Callable[[], object]) -> dict[str, float]:
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    begun = perf_counter()
    for _ in range(PASSES):
        call()
    torch.cuda.synchronize()
    return {"ms": (perf_counter() - begun) / PASSES * 1e3, "peak_bytes": torch.cuda.max_memory_allocated()}


def collectives(call: Callable[[], object]) -> dict[str, float]:
    """Milliseconds a call, of NCCL's kernels, of all others, and of both at the same time."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PASSES):
            call()
        torch.cuda.synchronize()
    kernels = [e for e in profiler.events() if e.device_type == DeviceType.CUDA]
    spans = [(e.time_range.start, e.time_range.end, "nccl" in e.name.lower()) for e in kernels]
    nccl, rest = (_covered([(a, b) for a, b, is_nccl in spans if is_nccl == want]) for want in (True, False))
    both = nccl + rest - _covered([(a, b) for a, b, _ in spans])
    return {"collectives_ms": nccl, "other_kernels_ms": rest, "both_ms": max(both, 0.0)}


def _covered(spans: list[tuple[float, float]]) -> float:
    total, end = 0.0, float("-inf")
    for a, b in sorted(spans):
        total, end = total + max(b - max(a, end), 0.0), max(end, b)
    return total / PASSES / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=4096, help="of a batch, the same on all ranks")
    parser.add_argument("--d-in", type=int, default=4096)
    parser.add_argument("--d-sae", type=int, default=262_144)
    parser.add_argument("--k", type=int, default=64)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    command = shlex.join(["torchrun", "-m", "benchmarks.nn.shard", *sys.argv[1:]])
    found: dict[str, Any] = provenance(command, Path(__file__).parents[2], device) | {"ranks": dist.get_world_size()}
    x = torch.randn(given.rows, given.d_in, device=device, generator=torch.Generator(device).manual_seed(0)).bfloat16()

    torch.manual_seed(0)
    whole = nn.TopKSAE(given.d_in, given.d_sae, given.k, aux_coefficient=0, dtype=torch.bfloat16, device=device)
    for parameter in whole.parameters():
        dist.broadcast(parameter.data, 0)
    models = {"whole": whole, "sharded": nn.shard_sae(whole)}
    del whole
    for name in list(models):
        model = models[name]
        parameters = list(model.parameters())

        def call(model: Any = model, parameters: Any = parameters) -> object:
            return torch.autograd.grad(model.loss(x).loss, parameters)

        found[name] = {"loss": float(model.loss(x).loss), **measured(call)}
        if name == "sharded":
            found[name] |= collectives(call)
        del models[name], model, parameters, call
        torch.cuda.empty_cache()

    trained = nn.shard_sae(nn.TopKSAE(given.d_in, given.d_sae, given.k, device=device))
    torch.cuda.empty_cache()
    optimizer = torch.optim.Adam(trained.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = trained.loss(x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    found["sharded, Adam in float32"] = measured(step)
    if dist.get_rank() == 0:
        print(json.dumps(found, indent=1))
        if given.json is not None:
            given.json.write_text(json.dumps(found, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
