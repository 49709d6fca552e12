"""Tiles and ways of `blocksparse.attention` beside each other and dense attention, for the tables beside the kernels.

Usage: python benchmarks/blocksparse/tune_attention.py [--compile] [--length T]. Needs a Hopper GPU. B 1, 16 heads of 64
and 128, bfloat16, a random layout a head. Each tile of each kernel is first checked in float64 at a length that its
blocks do not divide, with grouped heads, causal and with lengths; then come medians in milliseconds of CUDA graphs and
their ratio to density times dense attention (cuDNN): of the forward pass, and of both passes with the fastest forward
tile. The kernels through pointers, which other GPUs have, run beside them. --compile fills Triton's cache from eight
processes and measures nothing. Set OUT to a folder to keep the numbers as JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gossamer.blocksparse import Layout
from gossamer.blocksparse._gluon import attention as hopper
from gossamer.blocksparse._gluon import attention_backward as hopper_backward
from gossamer.blocksparse._gluon.attention import Tile
from gossamer.blocksparse._gluon.attention_backward import Tiles
from gossamer.blocksparse._triton import attention as general
from gossamer.blocksparse._triton import attention_backward as general_backward
from gossamer.blocksparse.attention_path import Problem

HEADS = 16


def forward_tiles(d: int, block: int) -> list[Tile | None]:
    """Candidates; None is the kernel through pointers."""
    found: list[Tile | None] = [Tile(64, 64, 2), Tile(64, 64, 3), Tile(64, 64, 2, registers=168), None]
    # One buffer of keys less lets a third program of heads of 128 on an SM.
    found += [Tile(64, 64, 2, key_stages=1), Tile(64, 64, 2, registers=168, key_stages=1)]
    if block == 128:
        found += [Tile(64, 128, 2, registers=168), Tile(64, 128, 2), Tile(128, 128, 2, 8), Tile(128, 64, 2, 8)]
    return found


def backward_tiles(d: int) -> list[Tiles | None]:
    plain, deep = Tile(64, 64, 2), Tile(64, 64, 3, registers=168)
    found: list[Tiles | None] = [Tiles(plain, plain), Tiles(deep, plain), Tiles(Tile(64, 64, 1), plain), None]
    return [*found, Tiles(Tile(64, 64, 2, registers=168), Tile(64, 64, 2, registers=232))]


@dataclass(frozen=True)
class Inputs:
    """Of one shape, with what the passes hand to each other."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    layout: Layout
    lengths: Tensor | None
    problem: Problem

    @property
    def lists(self) -> tuple[Tensor, ...]:
        x = self.layout
        return x.row_offsets, x.col_indices, x.row_indices, x.col_offsets, x.transpose_order, x.positions

    def operands(self, tile: Any) -> Any:
        none = None, None, None
        return general.operands(self.problem, self.q, self.k, self.v, *none, self.lengths, tile, self.problem.d)

    def forward(self, tile: Tile | None) -> tuple[Tensor, Tensor]:
        if tile is None:
            given = self.operands(general.tile_of(self.problem.d, 2, self.problem.block))
            return general.launch_attention_fwd(self.problem, given, *self.lists[:2])
        return hopper.launch_attention_fwd(
            self.problem, self.q, self.k, self.v, *self.lists[:2], self.lengths, tile=tile
        )

    def backward(self, tiles: Tiles | None, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        stats = general_backward.attention_stats(out, self.grad, lse, None)
        if tiles is None:
            given = self.operands(general_backward.tile_of(self.problem.d, 2, self.problem.block))
            return general_backward.launch_attention_bwd(self.problem, given, self.grad, stats, self.lists)
        given = self.q, self.k, self.v, self.grad, stats, self.lists, self.lengths
        return hopper_backward.launch_attention_bwd(self.problem, *given, tiles=tiles)


def inputs(
    t: int, d: int, block: int, density: float, *, b: int = 1, heads: tuple[int, int] = (HEADS, HEADS),
    tk: int | None = None, causal: bool = False, lengths: bool = False,
) -> Inputs:  # fmt: skip
    g = torch.Generator("cuda").manual_seed(0)
    tk = t if tk is None else tk
    sizes = (heads[0], t), (heads[1], tk), (heads[1], tk), (heads[0], t)
    q, k, v, grad = (torch.randn(b, *size, d, device="cuda", generator=g).bfloat16() for size in sizes)
    mask = torch.rand(heads[0], -(-t // block), -(-tk // block), device="cuda", generator=g) < density
    mask[..., 0] = True
    limits = torch.tensor([tk - 77, 130][:b], device="cuda", dtype=torch.int32) if lengths else None
    problem = Problem(b, *heads, t, tk, d, (False, True), (block, block), causal, d**-0.5)
    return Inputs(q, k, v, grad, Layout.from_mask(mask, block, size=(t, tk)), limits, problem)


def exact(x: Inputs) -> tuple[Tensor, ...]:
    """Result and gradients in float64."""
    p = x.problem
    leaves = [y.double().requires_grad_() for y in (x.q, x.k, x.v)]
    k, v = (y.repeat_interleave(p.group, 1) for y in leaves[1:])
    block = p.block[0]
    present = x.layout.to_dense().repeat_interleave(block, 1).repeat_interleave(block, 2)[:, : p.tq, : p.tk]
    i, j = torch.arange(p.tq, device="cuda")[:, None], torch.arange(p.tk, device="cuda")
    if p.causal:
        present = present & (j <= i + p.tk - p.tq)
    present = present.expand(p.b, -1, -1, -1)
    if x.lengths is not None:
        present = present & (j < x.lengths[:, None, None, None])
    s = (leaves[0] @ k.transpose(2, 3) * p.scale).masked_fill(~present, -1e30)
    weights = s.softmax(-1) * present
    out = weights @ v
    return (out, *torch.autograd.grad(out, leaves, x.grad.double()))


def check(d: int, block: int) -> bool:
    """Whether every candidate is right; prints those that are not."""
    right = True
    for options in ({}, {"causal": True}, {"lengths": True, "causal": True}):
        x = inputs(500, d, block, 0.4, b=2, heads=(4, 2), tk=711, **options)
        want = exact(x)
        out, lse = x.forward(None)
        jobs: list[tuple[Any, Callable[[], tuple[Tensor, ...]], tuple[Tensor, ...]]] = []
        jobs += [(t, lambda t=t: (x.forward(t)[0],), want[:1]) for t in forward_tiles(d, block)]
        jobs += [(t, lambda t=t: x.backward(t, out, lse), want[1:]) for t in backward_tiles(d)]
        for tile, call, wanted in jobs:
            try:
                errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(call(), wanted, strict=True)]
            except Exception as error:
                print(f"D {d} block {block} {options} {tile}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                right = False
                continue
            if not max(errors) < 1e-2:
                print(f"D {d} block {block} {options} {tile}: WRONG, {errors}", flush=True)
                right = False
    return right


def graph(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        call()
    return captured


def timed(calls: dict[str, Callable[[], Any]], rounds: int = 7) -> dict[str, float]:
    """Median milliseconds of graphs, in turn."""
    graphs = {name: graph(call) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, captured in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            captured.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end))
    return {name: median(of) for name, of in times.items()}


def measure(t: int, d: int, block: int, density: float) -> dict[str, float]:
    x = inputs(t, d, block, density)
    share = float(x.layout.to_dense().double().mean())
    leaves = [y.detach().requires_grad_() for y in (x.q, x.k, x.v)]

    def dense() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(*leaves)

    calls: dict[str, Callable[[], Any]] = {"dense": lambda: dense().detach()}
    calls["dense, both"] = lambda: torch.autograd.grad(dense(), leaves, x.grad)
    calls |= {f"forward {tile}": lambda tile=tile: x.forward(tile) for tile in forward_tiles(d, block)}
    out, lse = x.forward(forward_tiles(d, block)[0])
    calls |= {f"backward {tile}": lambda tile=tile: x.backward(tile, out, lse) for tile in backward_tiles(d)}
    found = timed(calls)
    fastest = min(value for name, value in found.items() if name.startswith("forward"))
    print(
        f"D {d} block {block} density {share:.3f}: dense {found['dense']:.3f}, both passes {found['dense, both']:.3f}"
    )
    for name, value in found.items():
        if name.startswith("forward"):
            print(f"   {name}: {value:.3f} = {value / (found['dense'] * share):.3f} x density x dense")
        elif name.startswith("backward"):
            ratio = (value + fastest) / (found["dense, both"] * share)
            print(f"   {name}: {value:.3f}, both passes {ratio:.3f} x density x dense", flush=True)
    return {"density": share, **found}


def compiled(job: tuple[int, int]) -> str:
    d, block = job
    x = inputs(1024, d, block, 0.2)
    failed = []
    for tile in forward_tiles(d, block):
        try:
            out, lse = x.forward(tile)
        except Exception as error:
            failed.append(f"{tile}: {str(error)[:200]}")
    for tiles in backward_tiles(d):
        try:
            x.backward(tiles, out, lse)
        except Exception as error:
            failed.append(f"{tiles}: {str(error)[:200]}")
    torch.cuda.synchronize()
    return f"D {d} block {block}: compiled" + "".join(f"\n   {line}" for line in failed)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--length", type=int, default=8192)
    arguments = parser.parse_args()
    jobs = [(d, block) for d in (64, 128) for block in (64, 128)]
    if arguments.compile:
        with ProcessPoolExecutor(8, mp_context=multiprocessing.get_context("spawn")) as pool:
            for line in pool.map(compiled, jobs):
                print(line, flush=True)
        return
    numbers = {}
    for d, block in jobs:
        print(f"D {d} block {block}: " + ("right" if check(d, block) else "see above"), flush=True)
        for density in (0.5, 0.25, 0.1):
            numbers[f"D {d}, block {block}, {density}"] = measure(arguments.length, d, block, density)
    if folder := os.environ.get("OUT"):
        Path(folder, "tune-blocksparse-attention.json").write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
