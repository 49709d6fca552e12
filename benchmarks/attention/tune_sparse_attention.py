"""Tiles of `attention.sparse_attention` beside each other and dense attention, for the tables beside the kernels.

Usage: python benchmarks/attention/tune_sparse_attention.py [--compile] [--lengths T ...]. Needs a GPU. B 1, 16 heads of
128, 2,048 keys a query or half of what there is, in a drifting selection, bfloat16. Each tile is checked against masked
SDPA in float32 at a small length first. Then come medians in milliseconds: of the forward pass, of the gradient of q,
and of those of k and v, by lists, whose making is included, and up to 8,192 keys by tiles. --compile fills Triton's
cache from eight processes and measures nothing. Set OUT to a folder to keep the numbers as JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gossamer.attention import Selection, indexer_loss, sparse_attention, sparse_decode
from gossamer.attention._triton import sparse_attention as forward
from gossamer.attention._triton import sparse_attention_bwd as backward
from gossamer.attention._triton.sparse_attention import Tile
from gossamer.attention.sparse_attention import Path as Way
from gossamer.testing import random_selection

HEADS, D = 16, 128
PATHS: tuple[Way, ...] = ("lists", "tiles")
TILES = {
    "forward": [
        Tile(2, 64, 8, 2, 128), Tile(2, 64, 8, 3, 128), Tile(1, 64, 4, 2), Tile(1, 64, 4, 3), Tile(2, 64, 8, 2),
        Tile(2, 64, 8, 3), Tile(2, 32, 8, 3, 128), Tile(1, 32, 4, 3), Tile(2, 128, 8, 2), Tile(1, 64, 4, 3, 168),
        Tile(1, 32, 4, 4, 128),
    ],
    "gradient of q": [
        Tile(1, 64, 4, 2), Tile(2, 64, 8, 2), Tile(1, 32, 4, 3), Tile(2, 64, 8, 3), Tile(2, 32, 8, 3),
        Tile(1, 32, 4, 3, 168),
    ],
    "gradients of k, v": [
        Tile(8, 128, 8, 3), Tile(8, 128, 8, 2), Tile(8, 64, 4, 2), Tile(8, 64, 4, 3), Tile(16, 128, 8, 3),
        Tile(4, 128, 8, 3), Tile(8, 64, 8, 3),
    ],
}  # fmt: skip
NAMES = {
    "forward": (forward, "fwd_tile"),
    "gradient of q": (backward, "query_tile"),
    "gradients of k, v": (backward, "key_tile"),
}


class Inputs:
    """Of one length, with what the passes hand to each other."""

    def __init__(self, t: int, k: int) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        drawn = (torch.randn(1, HEADS, t, D, device="cuda", generator=generator).bfloat16() for _ in range(4))
        self.q, self.k, self.v, self.grad = drawn
        self.selection = random_selection(t, k, device="cuda", generator=generator)
        with torch.no_grad():
            self.out, self.lse = sparse_attention(self.q, self.k, self.v, self.selection, return_lse=True)
        self.rows = backward.row_statistics(self.grad, self.out, self.lse, None)

    def run(self, kind: str, tile: Tile, path: Way = "lists") -> Any:
        module, name = NAMES[kind]
        shipped = getattr(module, name)
        setattr(module, name, lambda *_: tile)
        given = (self.grad, self.q, self.k, self.v, self.rows, self.selection.words, None, D**-0.5, True)
        try:
            if kind == "forward":
                with torch.no_grad():
                    return sparse_attention(self.q, self.k, self.v, self.selection, path=path)
            if kind == "gradient of q":
                return backward.query_gradient(*given, path)
            of_keys = backward.key_gradients if path == "lists" else backward.key_gradients_of_tiles
            return of_keys(*given)
        finally:
            setattr(module, name, shipped)


def timed(call: Callable[[], Any], rounds: int = 5) -> float:
    """Median milliseconds."""
    call()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return median(times)


def compiled(job: tuple[str, Tile]) -> str:
    start = time.time()
    try:
        for path in PATHS:
            Inputs(2048, 256).run(*job, path)
        torch.cuda.synchronize()
        return f"{job} {time.time() - start:.1f} s"
    except Exception as error:
        return f"{job} {type(error).__name__}: {str(error)[:200]}"


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b).norm() / b.norm())


def check(jobs: list[tuple[str, Tile]]) -> list[tuple[str, Tile]]:
    """The jobs whose results are right."""
    x = Inputs(2048, 256)
    leaves = [t.float().requires_grad_() for t in (x.q, x.k, x.v)]
    out = F.scaled_dot_product_attention(*leaves, attn_mask=x.selection.to_mask())
    dq, dk, dv = torch.autograd.grad(out, leaves, x.grad.float())
    wanted = {"forward": (out.detach(),), "gradient of q": (dq,), "gradients of k, v": (dk, dv)}
    good = []
    for kind, tile in jobs:
        try:
            runs = [x.run(kind, tile, path) for path in PATHS]
            pairs = [(got if isinstance(got, tuple) else (got,), wanted[kind]) for got in runs]
            errors = [relative(a, b) for got, want in pairs for a, b in zip(got, want)]
        except Exception as error:
            print(f"{kind} {tile}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        if max(errors) < 1.5e-2:
            good.append((kind, tile))
        else:
            print(f"{kind} {tile}: WRONG, errors {errors}", flush=True)
    return good


def whole(t: int) -> dict[str, float]:
    """As shipped, and dense."""
    x = Inputs(t, min(2048, t // 2))
    leaves = [y.detach().requires_grad_() for y in (x.q, x.k, x.v)]
    found = {}

    def dense() -> Tensor:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
            return F.scaled_dot_product_attention(*leaves, is_causal=True)

    for name, call in (("dense", dense), ("gossamer", lambda: sparse_attention(*leaves, x.selection))):
        with torch.no_grad():
            found[f"{name}, forward"] = timed(call)
        found[f"{name}, training"] = timed(lambda: torch.autograd.grad(call(), leaves, x.grad))
    grads = [torch.autograd.grad(sparse_attention(*leaves, x.selection), leaves, x.grad) for _ in range(2)]
    found["repeats"] = float(all(torch.equal(a, b) for a, b in zip(*grads)))
    counts = x.selection.counts.float().mean().item()
    return {"mean union of 64": counts, **found}


def others() -> dict[str, float]:
    """Decoding and the indexer's loss."""
    found = {}
    keys = torch.randn(2, 1, HEADS, 131072, D, device="cuda").bfloat16()
    q = torch.randn(1, HEADS, 1, D, device="cuda").bfloat16()
    taken = torch.randperm(131072, device="cuda")[:2048]
    one = Selection.from_indices(taken[None, None], 131072, capacity=2048)
    for name, call in (
        ("gossamer, one query of 131072 keys", lambda: sparse_decode(q, keys[0], keys[1], one)),
        ("dense, one query of 131072 keys", lambda: F.scaled_dot_product_attention(q, keys[0], keys[1])),
    ):
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        found[f"{name}, graph"], found[f"{name}, eager"] = timed(graph.replay, 9), timed(call, 9)
    for t in (8192, 32768):
        x = Inputs(t, 2048)
        q_idx, k_idx, w = (torch.randn(s, device="cuda").bfloat16() for s in ((1, 4, t, 64), (1, t, 64), (1, t, 4)))
        operands = (x.q, x.k, q_idx.requires_grad_(), k_idx, w, torch.zeros(4, device="cuda"))
        found[f"indexer_loss, selected, {t}"] = timed(
            lambda: indexer_loss(*operands, selection=x.selection, lse=x.lse), 3
        )
        found[f"indexer_loss, all, {t}"] = timed(lambda: indexer_loss(*operands, lse=x.lse), 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--lengths", type=int, nargs="*", default=[32768, 8192, 4096, 2048])
    arguments = parser.parse_args()
    jobs = [(kind, tile) for kind, tiles in TILES.items() for tile in tiles]
    if arguments.compile:
        with ProcessPoolExecutor(8, mp_context=multiprocessing.get_context("spawn")) as pool:
            for line in pool.map(compiled, jobs):
                print(line, flush=True)
        return
    numbers: dict[str, Any] = {}
    jobs = check(jobs)
    for t in arguments.lengths:
        numbers[f"T {t}"] = found = whole(t)
        print(f"T {t}: " + ", ".join(f"{name} {value:.3f}" for name, value in found.items()), flush=True)
        x = Inputs(t, min(2048, t // 2))
        for path in PATHS if t <= 8192 else PATHS[:1]:
            for kind, tile in jobs:
                name = f"{path}, {kind} {tile}"
                found[name] = timed(lambda: x.run(kind, tile, path))
                print(f"   {name}: {found[name]:.3f}", flush=True)
        if t == arguments.lengths[0]:
            numbers["others"] = found = others()
            print("\n".join(f"   {name}: {value:.4f}" for name, value in found.items()), flush=True)
    if folder := os.environ.get("OUT"):
        Path(folder, "tune-sparse-attention.json").write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
