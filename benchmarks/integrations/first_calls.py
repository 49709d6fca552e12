"""First calls of a process: blocks, an autoencoder and patched models that compile kernels when they meet them.

    python -m benchmarks.integrations.first_calls [--kind NAME ...] [--how HOW ...] [--jobs 1]

Each kind is called 32 times, and its density changes every 8 calls, so that its path does. Each row is a process of its
own: with an empty cache of kernels, then with the cache that this process has left, and with an empty one but after
`gossamer.warm_up`. Times are milliseconds until the result. With OUT set, they go to OUT/first_calls.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from statistics import median
from typing import Any

import torch

import gossamer
from benchmarks.integrations.generate import CUDA, make
from benchmarks.tune import DEVICE, Results
from gossamer import nn
from gossamer.integrations.transformers import patch

Step = Callable[[bool], Callable[[], Any]]
DTYPE = torch.bfloat16 if CUDA else torch.float32


def _block(train: bool) -> tuple[Any, tuple[Any, ...], Step]:
    sizes = (2048, 5632) if CUDA else (64, 176)
    block = nn.GatedMLP(*sizes, "relu", method="auto", dtype=DTYPE, device=DEVICE, bias=True).requires_grad_(train)
    x = torch.randn(4096 if train else 512, sizes[0], device=DEVICE, dtype=DTYPE)

    def step(sparse: bool) -> Callable[[], Any]:
        with torch.no_grad():
            block.gate_proj.bias.fill_(-3.0 if sparse else 0.5)
        return (lambda: block(x).sum().backward()) if train else (lambda: block(x))

    return block, (x,), step


def _autoencoder() -> tuple[Any, tuple[Any, ...], Step]:
    sizes = (2048, 32768) if CUDA else (64, 512)
    sae = nn.JumpReLUSAE(*sizes, device=DEVICE, dtype=DTYPE)
    x = torch.randn(1024, sizes[0], device=DEVICE, dtype=DTYPE)

    def step(sparse: bool) -> Callable[[], Any]:
        with torch.no_grad():
            sae.log_threshold.fill_(1.2 if sparse else -1.0)
        return lambda: sae.loss(x).loss.backward()

    return sae.loss, (x,), step


def _model(name: str, patched: bool) -> tuple[Any, tuple[Any, ...], Step]:
    model = make(name).requires_grad_(False)
    if patched:
        patch(model, sparse=True)
    biases = [layer.bias for key, layer in model.named_modules() if key.endswith(("gate_proj", "fc1"))]
    kept = [bias.clone() for bias in biases]
    ids = torch.randint(2, 32000, (8, 2048) if CUDA else (2, 16), device=DEVICE)

    def step(sparse: bool) -> Callable[[], Any]:
        for bias, before in zip(biases, kept, strict=True):
            bias.copy_(before if sparse else torch.full_like(bias, 0.5))
        return lambda: model(ids, logits_to_keep=1)

    return model, (ids,), step


KINDS: dict[str, Callable[[], tuple[Any, tuple[Any, ...], Step]]] = {
    "a block": lambda: _block(False),
    "a block in training": lambda: _block(True),
    "an autoencoder in training": _autoencoder,
    "prefill of llama, plain": lambda: _model("llama 2048/5632 relu", False),
    "prefill of llama, patched": lambda: _model("llama 2048/5632 relu", True),
    "prefill of opt, patched": lambda: _model("opt 2048/8192 relu", True),
}


def _timed(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    if CUDA:
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3


def measure(kind: str, warm: bool) -> dict[str, float]:
    """In this process: its first call, the longest of the later ones, and their median, in milliseconds."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    # The libraries of PyTorch's products are loaded before.
    torch.ones(64, 64, device=DEVICE, dtype=DTYPE) @ torch.ones(64, 64, device=DEVICE, dtype=DTYPE)
    target, inputs, step = KINDS[kind]()
    step(True)
    row = {"warm_up": _timed(lambda: gossamer.warm_up(target, *inputs))} if warm else {}
    times = [_timed(step(number // 8 % 2 == 0)) for number in range(32)]
    return row | {"first": times[0], "longest later": max(times[1:]), "median": median(times)}


HOW = ("an empty cache", "a filled cache", "after warm_up")


def _spawned(kind: str, ways: Sequence[str]) -> dict[str, dict[str, float]]:
    found = {}
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        for how, folder in zip(HOW, (first, first, second)):
            if how not in ways or (how == "after warm_up" and kind.endswith("plain")):
                continue
            command = [sys.executable, "-m", "benchmarks.integrations.first_calls", "--one", kind]
            command += ["--warm"] * (how == "after warm_up")
            environment = os.environ | {"TRITON_CACHE_DIR": folder}
            out = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
            found[f"{kind}, {how}, ms"] = json.loads(out.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", action="append", choices=KINDS, help="repeatable; all by default")
    parser.add_argument("--how", action="append", choices=HOW, help="repeatable; all by default")
    parser.add_argument("--jobs", type=int, default=1, help="kinds side by side")
    parser.add_argument("--one", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.warm)))
        return
    results = Results(__file__)
    with ThreadPoolExecutor(options.jobs) as pool:
        spawned = pool.map(partial(_spawned, ways=options.how or HOW), options.kind or KINDS)
        for label, row in chain.from_iterable(found.items() for found in spawned):
            results.found[label] = row
            print(f"{label}: {', '.join(f'{name} {value:.4g}' for name, value in row.items())}", flush=True)
    results.keep()


if __name__ == "__main__":
    main()
