"""Ways and workspaces of `attention.select_topk` beside each other, for the figures beside the kernels.

Usage: python -m benchmarks.attention.tune_select_topk [T ...]. Needs a Hopper GPU; on a CPU it shows that it runs. 4
heads of 64 that drift, bfloat16, 2,048 keys a query or half of what there is. Selections are compared first.
"candidates" keeps keys that may be among the highest, "all" keys; "repeated" keys are the same eight over and over,
which no list settles.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks import tune
from benchmarks.attention.bench_select_topk import drifting
from gossamer import attention

CUDA = tune.DEVICE.type == "cuda"
DTYPE = torch.bfloat16 if CUDA else torch.float32
HEADS, D, SHARE = 4, 64, 0.9997


def inputs(t: int) -> tuple[Tensor, ...]:
    generator = torch.Generator(tune.DEVICE).manual_seed(0)
    q = drifting((1, HEADS, t, D), 2, tune.DEVICE, generator, share=SHARE).to(DTYPE)
    k = drifting((1, t, D), 1, tune.DEVICE, generator).to(DTYPE)
    w = drifting((1, t, HEADS), 1, tune.DEVICE, generator, share=SHARE).to(DTYPE)
    return q, k, w, torch.randn(HEADS, device=tune.DEVICE, generator=generator)


def ways(given: tuple[Tensor, ...], k: int) -> tune.Calls:
    """The variants that give the same words."""

    def call() -> Tensor:
        return attention.select_topk(*given, k=k, causal=True).words

    calls: tune.Calls = {"candidates": call}
    if CUDA:
        from gossamer.attention._triton import select_topk as kernels

        calls["all"] = tune.under(call, (kernels, "choose_keys", lambda *_: "all"))
    want = call()
    return {name: other for name, other in calls.items() if torch.equal(other(), want)}


def main(lengths: list[int]) -> None:
    results = tune.Results(__file__)
    for t in lengths:
        given, k = inputs(t), min(2048, t // 2)
        repeated = (given[0], given[1][:, :8].repeat(1, -(-t // 8), 1)[:, :t].contiguous(), *given[2:])
        for label, of, top in (("drifting", given, k), ("drifting", given, k // 8), ("repeated", repeated, k)):
            times = tune.replayed(ways(of, top), rounds=3, repeat=1)
            results.add(f"T {t}, k {top}, {label}", times, against="all")

        def within(mib: int, given: tuple[Tensor, ...] = given, k: int = k) -> Callable[[], Tensor]:
            return lambda: attention.select_topk(*given, k=k, workspace=mib << 20, causal=True).words

        calls: tune.Calls = {f"{mib} MiB": within(mib) for mib in (64, 128, 256, 512)}
        results.add(f"T {t}, workspaces, graph", tune.replayed(calls, rounds=3, repeat=1), against="256 MiB")
        results.add(f"T {t}, workspaces, eager", tune.eager(calls, rounds=3, repeat=1), against="256 MiB")
    results.keep()


if __name__ == "__main__":
    main([int(t) for t in sys.argv[1:]] or ([131072, 65536, 34000] if CUDA else [80]))
