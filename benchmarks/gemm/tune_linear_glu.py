"""Variants of Hopper's gated product beside each other, cuBLAS and Liger, for whoever tunes them.

Usage: python benchmarks/gemm/tune_linear_glu.py [small] [sustained] [M,K,N ...]. `small` replays CUDA graphs of few
calls, candidates in another order each round: what a chunk of a prefill or a step of decoding sees. `sustained` runs
each candidate for a good half second, as training does: a GPU then holds its power limit, and what counts is the energy
of a call. Figures to publish come from `gossamer bench gemm`. Set OUT to a folder to keep the numbers as JSON.
"""

import itertools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer import gemm
from gossamer._core import tuning
from gossamer.cli.bench.command import command_line
from gossamer.cli.environment import provenance
from gossamer.gemm._gluon import linear_glu as kernel

SMALL = [(m, 4096, 14336) for m in (1, 16, 64, 128, 256, 512, 1024, 2048)] + [(128, 2048, 5632), (512, 2048, 5632)]
SUSTAINED = [(4096, 4096, 14336), (16384, 4096, 14336), (65536, 4096, 14336), (16384, 8192, 28672)]


def _alone(rows: int, columns: int, steps: int, device: torch.device) -> tuple[int, int, int]:
    return min(tuning.programs(device), rows * columns), rows * columns, 1


def _spread(rows: int, columns: int, steps: int, device: torch.device) -> tuple[int, int, int]:
    return tuning.programs(device), 0, 1


_usual = tuning.glu_schedule
SCHEDULES: dict[str, Callable[..., tuple[int, int, int]]] = {
    "alone": _alone,
    "shared": _usual,
    "shared, 1 abreast": lambda *tiles: (*_usual(*tiles)[:2], 1),
    "spread": _spread,
}
"""Tiles computed by one program each; shared along K as they are; the same with one program at a step of K at a time;
all of them shared by all programs."""


@contextmanager
def variant(stages: int, group: int, schedule: str, follows: bool) -> Iterator[None]:
    """The kernel with so many stages and rows of tiles at a time, a schedule, and an early start or none."""
    before = kernel.GROUP_M, tuning.glu_stages, tuning.glu_schedule, tuning.starts_early
    kernel.GROUP_M = group
    tuning.glu_stages = lambda m: (64, 5) if m <= 64 else (128, stages)
    tuning.glu_schedule = SCHEDULES[schedule]
    tuning.starts_early = lambda: follows
    try:
        yield
    finally:
        kernel.GROUP_M, tuning.glu_stages, tuning.glu_schedule, tuning.starts_early = before


def candidates(m: int, k: int, n: int) -> dict[str, Callable[[], Any]]:
    generator = torch.Generator("cuda").manual_seed(0)
    draw = lambda *size: torch.randn(*size, device="cuda", generator=generator)  # noqa: E731
    x, both = draw(m, k).bfloat16(), (draw(2 * n, k) / k**0.5).bfloat16()
    gate, up = both[:n].clone(), both[n:].clone()

    def ours(*options: Any) -> Tensor:
        with variant(*options):
            return gemm.linear_glu(x, gate, up)

    found: dict[str, Callable[[], Any]] = {"as it is": lambda: gemm.linear_glu(x, gate, up)}
    stages, groups = ((4,), (16,)) if m <= 1024 else ((3, 4), (8, 16))
    tiles = -(-m // (64 if m <= 64 else 128)) * -(-n // 128)
    schedules = [name for name in SCHEDULES if name != "spread" or tiles <= 4 * tuning.programs(x.device)]
    for options in itertools.product(stages, groups, schedules, (False, True)):
        name = "{} stages, {} rows, {}{}".format(*options[:3], ", starts early" if options[3] else "")
        found[name] = lambda options=options: ours(*options)
    found["GEMM alone"] = lambda: x @ both.t()
    try:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        found["Liger"] = lambda: LigerSiLUMulFunction.apply(x @ gate.t(), x @ up.t())
    except ImportError:
        print("liger-kernel is not installed")
    return found


def small(candidates: dict[str, Callable[[], Any]], rounds: int = 25, calls: int = 10) -> dict[str, float]:
    graphs = {}
    for name, call in candidates.items():
        call()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(calls):
                call()
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name in random.sample(list(graphs), len(graphs)):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graphs[name].replay()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop) / calls)
    return {name: statistics.median(found) for name, found in times.items()}


def sustained(calls: dict[str, Callable[[], Any]], rounds: int = 2, seconds: float = 0.6) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            events: list[tuple[Any, Any]] = []
            begin = time.perf_counter()
            while time.perf_counter() - begin < seconds:
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                calls[name]()
                stop.record()
                events.append((start, stop))
                if len(events) > 6:
                    events[-6][1].synchronize()
            torch.cuda.synchronize()
            # The first half goes by until the GPU holds its power.
            later = [start.elapsed_time(stop) for start, stop in events[len(events) // 2 :]]
            times[name].append(statistics.median(later))
    return {name: statistics.median(found) for name, found in times.items()}


def keep(script: str, results: dict[str, Any]) -> None:
    """Writes results where OUT says, if it does."""
    if folder := os.environ.get("OUT"):
        command = command_line(f"python benchmarks/gemm/{script}.py", sys.argv[1:])
        record = provenance(command, Path(__file__).parent, torch.device("cuda", 0)) | results
        Path(folder, f"{script.replace('_', '-')}.json").write_text(json.dumps(record, indent=1))


def main() -> None:
    given = [tuple(map(int, argument.split(","))) for argument in sys.argv[1:] if "," in argument]
    parts = [part for part in ("small", "sustained") if part in sys.argv[1:]] or ["small", "sustained"]
    results: dict[str, dict[str, float]] = {}
    with torch.no_grad():
        for part in parts:
            measure, shapes = (small, SMALL) if part == "small" else (sustained, SUSTAINED)
            for shape in given or shapes:
                found = measure(candidates(*shape))
                results[f"{part} {shape}"] = found
                print(f"\n{part} {shape}")
                for name, ms in sorted(found.items(), key=lambda item: item[1]):
                    print(f"  {name:54s} {1000 * ms:9.1f} us  GEMM alone / {found['GEMM alone'] / ms:.3f}", flush=True)
    keep("tune_linear_glu", {"milliseconds": results})


if __name__ == "__main__":
    main()
