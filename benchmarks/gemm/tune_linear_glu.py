"""Variants of the gated product beside each other, cuBLAS and Liger, for whoever tunes them. Needs a Hopper GPU.

Usage: python -m benchmarks.gemm.tune_linear_glu [small] [sustained] [M,K,N ...]. `small` replays CUDA graphs of few
calls, as in a chunk of a prefill or a step of decoding. `sustained` times them as in training. On a CPU it checks the
variants that read through pointers, at a small size, with GOSSAMER_INTERPRET=1.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks import tune
from gossamer import gemm
from gossamer._core import tuning
from gossamer._core.launch import Tile
from gossamer.gemm._gluon import linear_glu as kernel
from gossamer.gemm._triton import linear_glu as usual

CUDA = tune.DEVICE.type == "cuda"
SMALL = [(m, 4096, 14336) for m in (1, 16, 64, 128, 256, 512, 1024, 2048)] + [(128, 2048, 5632), (512, 2048, 5632)]
SUSTAINED = [(4096, 4096, 14336), (16384, 4096, 14336), (65536, 4096, 14336), (16384, 8192, 28672)]


def _alone(rows: int, columns: int, steps: int, device: torch.device) -> tuple[int, int, int]:
    return min(tuning.programs(device), rows * columns), rows * columns, 1


_usual = kernel.schedule
SCHEDULES: dict[str, Callable[..., tuple[int, int, int]]] = {
    "alone": _alone,
    "shared": _usual,
    "shared, 1 abreast": lambda *tiles: (*_usual(*tiles)[:2], 1),
}
"""Tiles computed by one program each; shared along K as they are; the same with one program at a step of K at a
time."""

ROW_TILES = [(256, 1), (512, 1), (1024, 1), (1024, 2), (2048, 1), (2048, 2), (4096, 4)]
"""Steps of K at a time and warps of the kernel for a single row."""


def variants(m: int) -> dict[str, tuple[tune.Change, ...]]:
    """The changes of each variant at m rows."""
    found: dict[str, tuple[tune.Change, ...]] = {"as it is": ()}
    for inner, warps in ROW_TILES if m == 1 else ():
        tile = Tile({"BLOCK_K": inner, "VEC": 8}, warps)
        found[f"row: {inner} of K, {warps} warps"] = ((usual, "row_tile", lambda k, size, tile=tile: tile),)
    on_hopper = itertools.product((16,) if m <= 1024 else (8, 16), SCHEDULES)
    for group, schedule in on_hopper if CUDA and m > 1 else ():
        found[f"{group} rows, {schedule}"] = (
            (kernel, "GROUP_M", group),
            (kernel, "schedule", SCHEDULES[schedule]),
            (usual, "choose_path", lambda *_: "hopper"),
        )
    return found


def candidates(m: int, k: int, n: int) -> tune.Calls:
    generator = torch.Generator(tune.DEVICE).manual_seed(0)
    draw = lambda *size: torch.randn(*size, device=tune.DEVICE, generator=generator)  # noqa: E731
    dtype = torch.bfloat16 if CUDA else torch.float32
    x, both = draw(m, k).to(dtype), (draw(2 * n, k) / k**0.5).to(dtype)
    gate, up = both[:n].clone(), both[n:].clone()
    plain = lambda: F.silu(F.linear(x, gate)) * F.linear(x, up)  # noqa: E731
    ours = lambda: gemm.linear_glu(x, gate, up)  # noqa: E731
    found = {name: tune.under(ours, *changes) for name, changes in variants(m).items()}
    if CUDA and m <= 256:
        found["torch.compile"] = torch.compile(plain, fullgraph=True, dynamic=False)
    try:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        found["Liger"] = lambda: LigerSiLUMulFunction.apply(x @ gate.t(), x @ up.t())
    except ImportError:
        print("liger-kernel is not installed")
    return tune.sound(found, plain()) | {"GEMM alone": lambda: x @ both.t()}


@torch.no_grad()
def main(arguments: list[str]) -> None:
    given: Any = [tuple(map(int, argument.split(","))) for argument in arguments if "," in argument]
    results = tune.Results(__file__)
    for part, measure, shapes in (("small", tune.replayed, SMALL), ("sustained", tune.sustained, SUSTAINED)):
        if part in arguments or not {"small", "sustained"} & set(arguments):
            for shape in given or (shapes if CUDA else [(1, 64, 40), (20, 64, 40)]):
                torch._dynamo.reset()
                results.add(f"{part} {shape}", measure(candidates(*shape)), against="GEMM alone")
    results.keep()


if __name__ == "__main__":
    main(sys.argv[1:])
