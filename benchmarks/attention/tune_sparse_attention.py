"""Tiles of `attention.sparse_attention` beside each other and dense attention, for the tables beside the kernels.

Usage: python -m benchmarks.attention.tune_sparse_attention [T ...]. Needs a GPU; with GOSSAMER_INTERPRET=1 it compares
the tiles at a small length and measures nothing of worth. B 1, 16 heads of 128, 2,048 keys a query or half of what
there is, in a drifting selection, bfloat16. Each tile is checked against masked SDPA at a small length first. Then come
the forward pass, the gradient of q, and those of k and v, by lists, whose making is included, and up to 8,192 keys by
tiles.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import tune
from benchmarks.inputs import random_selection
from gossamer.attention import Selection, indexer_loss, sparse_attention
from gossamer.attention._triton import sparse_attention as forward
from gossamer.attention._triton import sparse_attention_bwd as backward
from gossamer.attention._triton.sparse_attention import Tile
from gossamer.attention.records import SparseAttentionBwd
from gossamer.attention.sparse_attention import Path as Way

CUDA = tune.DEVICE.type == "cuda"
DTYPE = torch.bfloat16 if CUDA else torch.float32
HEADS, D = (16, 128) if CUDA else (1, 16)
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
        device = tune.DEVICE
        generator = torch.Generator(device).manual_seed(0)
        drawn = (torch.randn(1, HEADS, t, D, device=device, generator=generator).to(DTYPE) for _ in range(4))
        self.q, self.k, self.v, self.grad = drawn
        self.selection = random_selection(t, k, device=device, generator=generator)
        with torch.no_grad():
            self.out, self.lse = sparse_attention(self.q, self.k, self.v, self.selection, return_lse=True, causal=True)
        self.rows, self.grad, self.q = backward.row_statistics(self.call("lists"))

    def call(self, path: Way) -> SparseAttentionBwd:
        attended = (self.grad, None, self.q, self.k, self.v, self.out, self.lse)
        return SparseAttentionBwd(*attended, self.selection.words, None, D**-0.5, True, path, 0, None)

    def run(self, kind: str, path: Way) -> Any:
        if kind == "forward":
            with torch.no_grad():
                return sparse_attention(self.q, self.k, self.v, self.selection, path=path, causal=True)
        if kind == "gradient of q":
            return backward.query_gradient(self.call(path), self.rows)
        of_keys = backward.key_gradients if path == "lists" else backward.key_gradients_of_tiles
        return of_keys(self.call(path), self.rows)

    def calls(self, kind: str, path: Way) -> tune.Calls:
        """By tile."""
        module, name = NAMES[kind]
        return {
            str(tile): tune.under(lambda: self.run(kind, path), (module, name, lambda *_, tile=tile: tile))
            for tile in TILES[kind]
        }


def check() -> dict[tuple[str, Way], list[str]]:
    """The tiles whose results are right, by name."""
    x = Inputs(2048, 256) if CUDA else Inputs(80, 20)
    leaves = [t.float().requires_grad_() for t in (x.q, x.k, x.v)]
    out = F.scaled_dot_product_attention(*leaves, attn_mask=x.selection.to_mask())
    dq, dk, dv = torch.autograd.grad(out, leaves, x.grad.float())
    wanted = {"forward": out.detach(), "gradient of q": dq, "gradients of k, v": (dk, dv)}
    jobs = [(kind, path) for kind in TILES for path in PATHS]
    return {job: list(tune.sound(x.calls(*job), wanted[job[0]], 1.5e-2)) for job in jobs}


def whole(results: tune.Results, t: int) -> None:
    """As shipped, and dense."""
    x = Inputs(t, min(2048, t // 2))
    leaves = [y.detach().requires_grad_() for y in (x.q, x.k, x.v)]

    def dense() -> Tensor:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
            return F.scaled_dot_product_attention(*leaves, is_causal=True)

    def ours() -> Tensor:
        return sparse_attention(*leaves, x.selection, causal=True)

    calls: tune.Calls = {}
    for name, call in (("dense", dense), ("gossamer", ours)):
        calls[f"{name}, forward"] = torch.no_grad()(call)
        calls[f"{name}, training"] = lambda call=call: torch.autograd.grad(call(), leaves, x.grad)
    results.add(f"T {t}", tune.eager(calls), against="dense, training")
    grads = [torch.autograd.grad(ours(), leaves, x.grad) for _ in range(2)]
    repeats = float(all(torch.equal(a, b) for a, b in zip(*grads)))
    union = (x.selection.words != 0).sum(-1).float().mean().item()
    results.note(f"T {t}", mean_union_of_64=union, repeats=repeats)


def others(results: tune.Results) -> None:
    """Decoding and the indexer's loss."""
    keys = torch.randn(2, 1, HEADS, 131072, D, device="cuda").bfloat16()
    q = torch.randn(1, HEADS, 1, D, device="cuda").bfloat16()
    taken = torch.randperm(131072, device="cuda")[:2048]
    one = Selection.from_indices(taken[None, None], 131072)
    calls: tune.Calls = {
        "gossamer": lambda: sparse_attention(q, keys[0], keys[1], one, causal=True),
        "dense": lambda: F.scaled_dot_product_attention(q, keys[0], keys[1]),
    }
    results.add("one query of 131072 keys, graph", tune.replayed(calls), against="dense")
    results.add("one query of 131072 keys, eager", tune.eager(calls), against="dense")
    for t in (8192, 32768):
        x = Inputs(t, 2048)
        q_idx, k_idx, w = (torch.randn(s, device="cuda").bfloat16() for s in ((1, 4, t, 64), (1, t, 64), (1, t, 4)))
        operands = (x.q, x.k, q_idx.requires_grad_(), k_idx, w, torch.zeros(4, device="cuda"))
        losses: tune.Calls = {
            "selected": lambda: indexer_loss(*operands, selection=x.selection, lse=x.lse, causal=True),
            "all": lambda: indexer_loss(*operands, lse=x.lse, causal=True),
        }
        results.add(f"indexer_loss, {t}", tune.eager(losses, rounds=3, repeat=1), against="all")


def main(lengths: list[int]) -> None:
    results = tune.Results(__file__)
    right = check()
    for t in lengths:
        whole(results, t)
        x = Inputs(t, min(2048, t // 2))
        for (kind, path), tiles in right.items():
            if path == "lists" or t <= 8192:
                calls = x.calls(kind, path)
                results.add(f"T {t}, {path}, {kind}", tune.eager({tile: calls[tile] for tile in tiles}))
    if CUDA:
        others(results)
    results.keep()


if __name__ == "__main__":
    main([int(t) for t in sys.argv[1:]] or ([32768, 8192, 4096, 2048] if CUDA else [80]))
