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
from torch.nn import functional as F

from gossamer import gemm
from gossamer._core import launch, tuning
from gossamer.cli.bench.command import command_line
from gossamer.cli.environment import provenance
from gossamer.gemm._gluon import linear_glu as kernel
from gossamer.gemm._triton import linear_glu as usual

SMALL = [(m, 4096, 14336) for m in (1, 16, 64, 128, 256, 512, 1024, 2048)] + [(128, 2048, 5632), (512, 2048, 5632)]
SUSTAINED = [(4096, 4096, 14336), (16384, 4096, 14336), (65536, 4096, 14336), (16384, 8192, 28672)]


def _alone(rows: int, columns: int, steps: int, device: torch.device) -> tuple[int, int, int]:
    return min(tuning.programs(device), rows * columns), rows * columns, 1


_usual = tuning.glu_schedule
SCHEDULES: dict[str, Callable[..., tuple[int, int, int]]] = {
    "alone": _alone,
    "shared": _usual,
    "shared, 1 abreast": lambda *tiles: (*_usual(*tiles)[:2], 1),
}
"""Tiles computed by one program each; shared along K as they are; the same with one program at a step of K at a
time."""

ROW_TILES = [(256, 1), (512, 1), (1024, 1), (1024, 2), (2048, 1), (2048, 2), (4096, 4)]
"""Steps of K at a time and warps of the kernel for a single row."""

POINTER_TILES = {
    16: [(16, 256, 2, 4), (32, 128, 4, 3), (32, 256, 4, 3), (32, 256, 4, 4), (64, 128, 4, 3), (64, 128, 4, 4)],
    32: [(32, 128, 4, 3), (64, 64, 4, 4), (64, 64, 4, 5), (64, 128, 4, 3)],
    64: [(32, 128, 4, 3), (32, 64, 4, 4), (64, 64, 4, 4), (64, 64, 4, 5)],
    128: [(32, 64, 4, 4), (32, 64, 4, 5), (64, 64, 8, 3), (64, 64, 8, 4)],
}
"""By rows of a tile: columns, steps of K at a time, warps and stages of the kernel that reads through pointers."""


@contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """With other attributes: (of what, name, value)."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for change in changes:
        setattr(*change)
    try:
        yield
    finally:
        for change in before:
            setattr(*change)


def variants(m: int, n: int, device: torch.device) -> dict[str, tuple[tuple[Any, str, Any], ...]]:
    """What to replace for each variant at m rows."""
    found: dict[str, tuple[tuple[Any, str, Any], ...]] = {"as it is": ()}
    if m == 1:
        for inner, warps in ROW_TILES:
            tile = {"BLOCK_K": inner, "VEC": 8}
            changes = (
                (tuning, "glu_row_tile", lambda k, size, tile=tile, warps=warps: (tile, warps)),
                (usual, "_linear_glu_row", launch.Kernel(usual._linear_glu_row_kernel)),
            )
            found[f"row: {inner} of K, {warps} warps"] = changes
    no_row = (tuning, "one_row", lambda *_: False)
    height = next((height for height in POINTER_TILES if m <= height), 0)
    if height:
        for columns, inner, warps, stages in POINTER_TILES[height]:
            tile = {"BLOCK_M": height, "BLOCK_N": columns, "BLOCK_K": inner, "GROUP_M": 8}
            changes = (
                (tuning, "glu_tile", lambda m, device, tile=tile, rest=(warps, stages): (tile, *rest)),
                (usual, "_linear_glu", launch.Kernel(usual._linear_glu_kernel)),
                (tuning, "glu_on_hopper", lambda *_: False),
                no_row,
            )
            found[f"pointers: {columns} columns, {inner} of K, {warps} warps, {stages} stages"] = changes
    for stages, group, schedule in itertools.product(*(((4,), (16,)) if m <= 1024 else ((3, 4), (8, 16))), SCHEDULES):
        found[f"{stages} stages, {group} rows, {schedule}"] = (
            (kernel, "GROUP_M", group),
            (tuning, "glu_stages", lambda m, stages=stages: (64, 5) if m <= 64 else (128, stages)),
            (tuning, "glu_schedule", SCHEDULES[schedule]),
            (tuning, "glu_on_hopper", lambda *_: True),
            no_row,
        )
    return found


def candidates(m: int, k: int, n: int) -> dict[str, Callable[[], Any]]:
    generator = torch.Generator("cuda").manual_seed(0)
    draw = lambda *size: torch.randn(*size, device="cuda", generator=generator)  # noqa: E731
    x, both = draw(m, k).bfloat16(), (draw(2 * n, k) / k**0.5).bfloat16()
    gate, up = both[:n].clone(), both[n:].clone()
    plain = lambda: F.silu(F.linear(x, gate)) * F.linear(x, up)  # noqa: E731
    wanted = plain().float()

    def ours(changes: tuple[tuple[Any, str, Any], ...]) -> Tensor:
        with replaced(*changes):
            return gemm.linear_glu(x, gate, up)

    found: dict[str, Callable[[], Any]] = {}
    for name, changes in variants(m, n, x.device).items():
        found[name] = lambda changes=changes: ours(changes)
        error = (found[name]().float() - wanted).norm() / wanted.norm()
        if not error < 0.01:
            raise AssertionError(f"{name}: wrong by {error:.3g} at M {m}, K {k}, N {n}")
    found["GEMM alone"] = lambda: x @ both.t()
    if m <= 256:
        found["torch.compile"] = torch.compile(plain, fullgraph=True, dynamic=False)
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
    for call in calls.values():
        call()
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
                torch._dynamo.reset()
                found = measure(candidates(*shape))
                results[f"{part} {shape}"] = found
                print(f"\n{part} {shape}")
                for name, ms in sorted(found.items(), key=lambda item: item[1]):
                    print(f"  {name:54s} {1000 * ms:9.1f} us  GEMM alone / {found['GEMM alone'] / ms:.3f}", flush=True)
    keep("tune_linear_glu", {"milliseconds": results})


if __name__ == "__main__":
    main()
