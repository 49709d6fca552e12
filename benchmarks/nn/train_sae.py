"""`gossamer sae train` from memory: rows a second, and the share of time in which the GPU computes or copies.

Usage: python -m benchmarks.nn.train_sae [--kind topk] [--l0 64 ...] [--d-sae 65536] [--steps 200] [--out FILE.json].

Rows are normal, in main memory, and pass through the run's shuffled blocks in pinned memory. Beside the run stands the
sum of the times of its autoencoders' steps, one at a time, on a batch that stays on the GPU.

A profiler slows the host, so the time in which the GPU is busy comes from profiled steps, and is divided by the time of
steps without a profiler.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.provenance import provenance
from gossamer.train import SAEConfig, SAERun
from gossamer.train.resumable import reproducible

CUDA = torch.cuda.is_available()
D_IN, BATCH, ROWS = (2304, 4096, 1 << 17) if CUDA else (32, 64, 4096)


class Measured(Exception):
    """The end of a run of which nothing has to be written."""


def busy(tracer: profile) -> float:
    """The milliseconds in which there was a kernel or a copy."""
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in tracer.events() or ()
        if event.device_type == DeviceType.CUDA
    )
    if not spans:
        return float("nan")
    total, end = 0.0, spans[0][0]
    for start, stop in spans:
        total += max(stop - max(start, end), 0)
        end = max(end, stop)
    return total / 1e3


def run(config: SAEConfig, rows: Tensor, steps: int) -> dict[str, Any]:
    """Of the second third of the steps the rows a second, of the last third the share of the GPU."""
    activities, found = [ProfilerActivity.CUDA if CUDA else ProfilerActivity.CPU], dict[str, Any]()
    tracer = profile(activities=activities)

    def show(record: dict[str, float]) -> None:
        if record["step"] == 2 * steps:
            found["rows/s"] = record["tokens/s"]
            tracer.__enter__()
        elif record["step"] == 3 * steps:
            tracer.__exit__(None, None, None)
            raise Measured

    with tempfile.TemporaryDirectory() as folder:
        whole = SAERun(config, rows, Path(folder), device="cuda" if CUDA else "cpu", log_every=steps)
        with suppress(Measured):
            whole.train(show)
        found["ms a step"] = BATCH / found["rows/s"] * 1e3
        found["busy"] = busy(tracer) / steps / found["ms a step"]
        x = rows[:BATCH].to(whole.device)
        found["ms of steps alone"] = sum(alone(whole, number, x, steps) for number in range(len(whole.models)))
    return found


def alone(whole: SAERun, number: int, x: Tensor, steps: int) -> float:
    """Milliseconds of a step of one autoencoder of a run."""
    models, groups = whole.models, whole.optimizer.param_groups
    whole.models, whole.optimizer.param_groups = torch.nn.ModuleList([models[number]]), [groups[number]]
    whole.models.scale = models.scale
    with reproducible(), torch.autograd.set_multithreading_enabled(False):
        for at in range(steps + 5):
            if at == 5:
                if CUDA:
                    torch.cuda.synchronize()
                begin = time.perf_counter()
            whole._step(x)
        if CUDA:
            torch.cuda.synchronize()
    whole.models, whole.optimizer.param_groups = models, groups
    return (time.perf_counter() - begin) / steps * 1e3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", default="topk")
    parser.add_argument("--l0", type=int, nargs="+", default=[64])
    parser.add_argument("--d-sae", type=int, default=65_536 if CUDA else 256)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    dtype = torch.bfloat16 if CUDA else torch.float32
    config = SAEConfig(
        kind=given.kind, d_sae=given.d_sae, sweep={"l0": given.l0}, steps=10 * given.steps, batch=BATCH,
        buffer=ROWS // 4, held_out=BATCH, dtype=str(dtype).removeprefix("torch."),
    )  # fmt: skip
    rows = torch.randn(ROWS, D_IN, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = run(config, rows, given.steps)
    found["times the steps alone"] = found["ms a step"] / found["ms of steps alone"]
    print({name: round(value, 4) for name, value in found.items()}, file=sys.stderr, flush=True)
    if given.out is not None:
        shown = {"kind": given.kind, "l0": given.l0, "d_sae": given.d_sae, "batch": BATCH, "d_in": D_IN, **found}
        command = " ".join(["python -m benchmarks.nn.train_sae", *sys.argv[1:]])
        made = provenance(command, Path(__file__).parents[2], torch.device("cuda", 0) if CUDA else torch.device("cpu"))
        given.out.write_text(json.dumps({**made, "run": shown}, indent=1))


if __name__ == "__main__":
    main()
