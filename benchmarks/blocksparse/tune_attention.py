"""Tiles and ways of `blocksparse.attention` beside each other and dense attention, for the tables beside the kernels.

Usage: python -m benchmarks.blocksparse.tune_attention [T | compile]. Needs a Hopper GPU; with GOSSAMER_INTERPRET=1 it
compares the kernels through pointers, which other GPUs have, with dense attention at a small length, and measures
nothing of worth. B 1, 16 heads of 64 and 128, bfloat16, a random layout a head. Each tile of each kernel is first
checked in float64 at a length that its blocks do not divide, with grouped heads, causal and with lengths; then come
CUDA graphs of the forward pass, and of the backward pass beside both passes of dense attention (cuDNN). `compile` fills
Triton's cache from eight processes and measures nothing.
"""

from __future__ import annotations

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import tune
from gossamer.blocksparse import Layout
from gossamer.blocksparse._gluon import attention as hopper
from gossamer.blocksparse._gluon import attention_backward as hopper_backward
from gossamer.blocksparse._triton import attention as general
from gossamer.blocksparse._triton import attention_backward as general_backward
from gossamer.blocksparse.attention_lists import Tile
from gossamer.blocksparse.attention_path import Problem
from gossamer.blocksparse.records import BlocksparseAttention, BlocksparseAttentionBwd

CUDA = tune.DEVICE.type == "cuda"
DTYPE = torch.bfloat16 if CUDA else torch.float32
HEADS = 16 if CUDA else 2
LENGTH = 8192 if CUDA else 64
# Width of a head, block
SHAPES = [(64, 64), (64, 128), (128, 64), (128, 128)] if CUDA else [(16, 32)]


def forward_tiles(d: int, block: int) -> list[Tile | None]:
    """Candidates; None is the kernel through pointers."""
    if not CUDA:
        return [None]
    found: list[Tile | None] = [Tile(64, 64), Tile(64, 64, stages=3), Tile(64, 64, registers=168), None]
    # One buffer of keys less lets a third program of heads of 128 on an SM.
    found += [Tile(64, 64, key_stages=1), Tile(64, 64, registers=168, key_stages=1)]
    if block == 128:
        found += [Tile(64, 128, registers=168), Tile(64, 128), Tile(128, 128, 8), Tile(128, 64, 8)]
    return found


Tiles = tuple[Tile, Tile]
"""Of the kernel over queries and of that over keys."""


def backward_tiles() -> list[Tiles | None]:
    if not CUDA:
        return [None]
    plain, deep = Tile(64, 64), Tile(64, 64, stages=3, registers=168)
    found: list[Tiles | None] = [(plain, plain), (deep, plain), (Tile(64, 64, stages=1), plain), None]
    return [*found, (Tile(64, 64, registers=168), Tile(64, 64, registers=232))]


def named(tile: Tile | Tiles | None) -> str:
    return "pointers" if tile is None else str(tile)


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
    def call(self) -> BlocksparseAttention:
        given: Any = self.layout.buffer, self.layout.form, (0, 1), self.problem.causal, self.problem.scale, 0, None
        return BlocksparseAttention(self.q, self.k, self.v, None, None, None, self.lengths, *given)

    def forward(self, tile: Tile | None) -> tuple[Tensor, Tensor]:
        if tile is None:
            return general.launch_attention_fwd(general.operands(self.call, general.tile_of))
        return hopper.launch_attention_fwd(self.call, tile)

    def backward(self, tiles: Tiles | None, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        stats = general_backward.attention_stats(out, self.grad, lse, None)
        call: Any = BlocksparseAttentionBwd(self.grad, None, out, lse, *self.call, False, False)
        if tiles is None:
            given = general.operands(call, general_backward.tile_of)
            return general_backward.launch_attention_bwd(given, self.grad, stats)
        return hopper_backward.launch_attention_bwd(call, self.grad, stats, *tiles)

    def calls(self) -> dict[str, tune.Calls]:
        """Of each pass, by tile."""
        out, lse = self.forward(None)
        d, block = self.problem.d, self.problem.block[0]
        return {
            "forward": {named(t): lambda t=t: self.forward(t)[0] for t in forward_tiles(d, block)},
            "backward": {named(t): lambda t=t: self.backward(t, out, lse) for t in backward_tiles()},
        }


def inputs(
    t: int, d: int, block: int, density: float, *, b: int = 1, heads: tuple[int, int] = (HEADS, HEADS),
    tk: int | None = None, causal: bool = False, lengths: bool = False,
) -> Inputs:  # fmt: skip
    g = torch.Generator(tune.DEVICE).manual_seed(0)
    tk = t if tk is None else tk
    sizes = (heads[0], t), (heads[1], tk), (heads[1], tk), (heads[0], t)
    q, k, v, grad = (torch.randn(b, *size, d, device=tune.DEVICE, generator=g).to(DTYPE) for size in sizes)
    mask = torch.rand(heads[0], -(-t // block), -(-tk // block), device=tune.DEVICE, generator=g) < density
    mask[..., 0] = True
    limits = torch.tensor([tk - tk // 9, tk // 5][:b], device=tune.DEVICE, dtype=torch.int32) if lengths else None
    problem = Problem(b, *heads, t, tk, d, d, (False, True), (block, block), causal, d**-0.5)
    return Inputs(q, k, v, grad, Layout.from_mask(mask, block, size=(t, tk)), limits, problem)


def exact(x: Inputs) -> tuple[Tensor, ...]:
    """Result and gradients in float64."""
    p = x.problem
    leaves = [y.double().requires_grad_() for y in (x.q, x.k, x.v)]
    k, v = (y.repeat_interleave(p.group, 1) for y in leaves[1:])
    block = p.block[0]
    present = x.layout.to_dense().repeat_interleave(block, 1).repeat_interleave(block, 2)[:, : p.tq, : p.tk]
    i, j = torch.arange(p.tq, device=tune.DEVICE)[:, None], torch.arange(p.tk, device=tune.DEVICE)
    if p.causal:
        present = present & (j <= i + p.tk - p.tq)
    present = present.expand(p.b, -1, -1, -1)
    if x.lengths is not None:
        present = present & (j < x.lengths[:, None, None, None])
    s = (leaves[0] @ k.transpose(2, 3) * p.scale).masked_fill(~present, -1e30)
    weights = s.softmax(-1) * present
    out = weights @ v
    return (out.detach(), *torch.autograd.grad(out, leaves, x.grad.double()))


def right(d: int, block: int) -> dict[str, list[str]]:
    """The candidates of each pass whose results are right, by name."""
    found: dict[str, list[str]] = {}
    t, tk = (500, 711) if CUDA else (40, 70)
    for options in ({}, {"causal": True}, {"lengths": True, "causal": True}):
        x = inputs(t, d, block, 0.4, b=2, heads=(4, 2), tk=tk, **options)
        out, *gradients = exact(x)
        for (name, calls), want in zip(x.calls().items(), (out, tuple(gradients))):
            wanted = {tile: calls[tile] for tile in found.get(name, calls)}
            found[name] = list(tune.sound(wanted, want))
    return found


def measure(results: tune.Results, d: int, block: int, density: float, t: int, tiles: dict[str, list[str]]) -> None:
    x = inputs(t, d, block, density)
    leaves = [y.detach().requires_grad_() for y in (x.q, x.k, x.v)]

    def dense() -> Tensor:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH], set_priority=True):
            return F.scaled_dot_product_attention(*leaves)

    peers: tune.Calls = {
        "forward": lambda: dense().detach(),
        "backward": lambda: torch.autograd.grad(dense(), leaves, x.grad),
    }
    share = float(x.layout.to_dense().double().mean())
    for name, calls in x.calls().items():
        label = f"D {d}, block {block}, density {density}, {name}"
        row = tune.replayed({"dense": peers[name], **{tile: calls[tile] for tile in tiles[name]}})
        results.add(label, row, against="dense")
        results.note(label, density=share)


def compiled(shape: tuple[int, int]) -> None:
    for calls in inputs(1024, *shape, 0.2).calls().values():
        for call in calls.values():
            # A variant that does not compile is told where it is checked.
            with suppress(Exception):
                call()
    torch.cuda.synchronize()


def main(t: int) -> None:
    results = tune.Results(__file__)
    for shape in SHAPES:
        tiles = right(*shape)
        for density in (0.5, 0.25, 0.1):
            measure(results, *shape, density, t, tiles)
    results.keep()


if __name__ == "__main__":
    if sys.argv[1:] == ["compile"]:
        with ProcessPoolExecutor(8, mp_context=multiprocessing.get_context("spawn")) as pool:
            list(pool.map(compiled, SHAPES))
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else LENGTH)
