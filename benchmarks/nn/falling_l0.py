"""A run of `nn.JumpReLUSAE` whose L0 falls from half of the latents to 60, beside the same run by plain products.

Usage: python -m benchmarks.nn.falling_l0 [--steps 500] [--out FILE.json].

Thresholds begin next to 0 and are steered. The module goes its own way, or the dense way throughout; the third run is
the step of plain PyTorch, compiled, for its time alone. All with fused Adam, in bfloat16 on a GPU, on the same rows:
sums of few random directions.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from benchmarks.nn.bench_sae import BANDWIDTH, L0_COEFFICIENT, jumprelu_loss
from benchmarks.provenance import provenance
from gossamer import nn

CUDA = torch.cuda.is_available()
DEVICE, DTYPE = (torch.device("cuda", 0), torch.bfloat16) if CUDA else (torch.device("cpu"), torch.float32)
BATCH, D_IN, D_SAE, TARGET = (4096, 2304, 65536, 60) if CUDA else (64, 32, 512, 6)
ATOMS, ACTIVE, POOL = (16384, 40, 32) if CUDA else (128, 4, 8)


def rows() -> list[Tensor]:
    """POOL batches, in turn: each row the sum of ACTIVE of ATOMS unit directions, with coefficients in 0.5 to 1.5."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    atoms = torch.nn.functional.normalize(torch.randn(ATOMS, D_IN, device=DEVICE, generator=generator))
    found = []
    for _ in range(POOL):
        which = torch.randint(ATOMS, (BATCH, ACTIVE), device=DEVICE, generator=generator)
        weights = torch.rand(BATCH, ACTIVE, device=DEVICE, generator=generator) + 0.5
        mixed = torch.zeros(BATCH, ATOMS, device=DEVICE).scatter_add_(1, which, weights)
        found.append((mixed @ atoms).to(DTYPE))
    return found


def trained(step: Callable[[Tensor], tuple[Tensor, ...]], parameters: list[Tensor], steps: int) -> dict[str, Any]:
    """Seconds of the run, its first five steps left out, and what each step returned."""
    batches, adam = rows(), torch.optim.Adam(parameters, lr=3e-4, fused=True)
    seen: list[tuple[Tensor, ...]] = []
    begin = 0.0
    for at in range(steps):
        if at == 5:
            if CUDA:
                torch.cuda.synchronize()
            begin = time.perf_counter()
        adam.zero_grad()
        loss, *facts = step(batches[at % POOL])
        loss.backward()
        adam.step()
        seen.append(tuple(fact.detach().float() for fact in facts))
    if CUDA:
        torch.cuda.synchronize()
    return {"seconds": time.perf_counter() - begin, "seen": [torch.stack(column).tolist() for column in zip(*seen)]}


def module(pinned: str | None, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    sae = nn.JumpReLUSAE(D_IN, D_SAE, target_l0=TARGET, initial_threshold=0.01, dtype=DTYPE, device=DEVICE)
    sae.density.pinned = pinned
    ways: list[str | None] = []

    def step(x: Tensor) -> tuple[Tensor, ...]:
        found = sae.loss(x)
        ways.append(sae.density.last_path)
        return found.loss, found.mse, found.l0

    run = trained(step, list(sae.parameters()), steps)
    mse, l0 = run.pop("seen")
    return {**run, "mse": mse, "l0": l0, "dense_steps": ways.count("dense")}


def compiled(steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    sae = nn.JumpReLUSAE(D_IN, D_SAE, dtype=DTYPE, device=DEVICE)
    parameters = [sae.W_enc, sae.W_dec, sae.b_enc, sae.b_dec, sae.log_threshold]
    loss = torch.compile(
        partial(jumprelu_loss, bandwidth=BANDWIDTH, l0_coefficient=L0_COEFFICIENT), fullgraph=True, dynamic=False
    )
    run = trained(lambda x: (loss(x, *parameters),), parameters, steps)
    return {"seconds": run["seconds"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500 if CUDA else 60)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    for way in ("sparse", "dense"):
        # Kernels are compiled before a run that goes both ways is timed.
        module(way, 6)
    runs = {"gossamer": module(None, options.steps), "dense": module("dense", options.steps)}
    runs["torch.compile"] = compiled(options.steps)
    for name, run in runs.items():
        print(f"{name}: {run['seconds']:.2f} s", end="")
        if "mse" in run:
            l0, tail = run["l0"], options.steps // 10
            print(
                f", {run['dense_steps']} steps dense, L0 {l0[0]:,.0f} at first, {l0[options.steps // 4]:,.0f} after a "
                f"quarter, {mean(l0[-tail:]):.1f} at last; squared error at last {mean(run['mse'][-tail:]):.4f}",
                end="",
            )
        print()
    if options.out:
        command = " ".join(["python -m benchmarks.nn.falling_l0", *sys.argv[1:]])
        made = provenance(command, Path(__file__).parents[2], DEVICE)
        options.out.write_text(json.dumps(made | {"runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
