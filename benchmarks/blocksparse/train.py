"""Transformers of one seed trained on the same random inputs, with block-sparse attention and with attention as usual.

    python -m benchmarks.blocksparse.train [--lengths 1024 8192] [--inputs 240] [--out DIR]

Tables 1 and 2 of "blksprs": the peak memory with one input a step, of a tenth of the inputs, and the seconds for all
inputs with 16,384 tokens a step. The tokens of an input are random vectors, to which one that they share is added. A
model learns to turn the first by a fixed rotation, for which it has to find the second in other tokens. The
block-sparse model and the one that masks a matrix of scores attend to the same keys, so that their losses agree; dense
attention has every key. The exit code is 1 where the losses of the same keys differ by more than 1% of the first loss.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.blocksparse.bench_transformer import Attend, Layer, dense, longformer, materialised
from benchmarks.engine import report
from benchmarks.engine.command import command_line, slug
from benchmarks.provenance import parsed, provenance
from gossamer.cli.environment import describe

ROOT = Path(__file__).resolve().parents[2]
WAYS: dict[str, Attend | None] = {"gossamer": None, "same keys, matrix of scores": materialised, "dense SDPA": dense}
TOKENS = 16384
"""Tokens of a step where memory is not what is measured."""
SHARE = 10
"""One of so many inputs is taken for the memory of one input a step."""
MOST = 0.01
"""The most by which two losses of the same keys may differ, as a share of the first loss."""


def train(
    way: str, length: int, batch: int, inputs: int, sizes: tuple[int, int, int, int], device: torch.device
) -> dict[str, Any]:
    """Losses of all steps, seconds, and peak bytes, of `inputs` inputs [length, width] in batches."""
    layers, width, heads, block = sizes
    layout, attend = longformer(length, block, device), WAYS[way]
    torch.manual_seed(0)
    model = nn.ModuleList(Layer(width, heads, device) for _ in range(layers))
    rotation = nn.init.orthogonal_(torch.empty(width, width, device=device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device.type == "cuda")
    generator = torch.Generator(device).manual_seed(1)

    def step() -> Tensor:
        shared, own = (torch.randn(batch, n, width, device=device, generator=generator) for n in (1, length))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            out = own + shared / 2
            for layer in model:
                out = layer(out, layout, attend)
            loss = F.mse_loss(out, own @ rotation)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = [step()]  # compiles, and is not timed
    _wait(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    begun = time.perf_counter()
    losses += [step() for _ in range(inputs // batch)]
    _wait(device)
    return {
        "way": way,
        "length": length,
        "batch": batch,
        "inputs": inputs,
        "seconds": time.perf_counter() - begun,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "losses": [round(float(loss), 6) for loss in losses],
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def difference(runs: Sequence[dict[str, Any]]) -> float:
    """The largest difference of two losses of the same step and the same keys, over the first loss."""
    ours, theirs, _ = ([run["losses"] for run in runs if run["way"] == way] for way in WAYS)
    pairs = zip(ours, theirs, strict=True)
    return max(abs(a - b) / second[0] for first, second in pairs for a, b in zip(first, second, strict=True))


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=(8192, 4096, 2048, 1024), help="of the inputs")
    parser.add_argument("--inputs", type=int, default=240, help="of a run, 240 by default")
    options, device = parsed(parser, arguments, "one layer of 64, as always on the CPU")
    quick = options.quick
    sizes = (1, 64, 2, 32) if quick else (4, 512, 8, 64)
    path = options.out / f"blocksparse-train-{slug(describe(device)['name'])}{'-quick' * quick}.json"
    settings = dict(zip(("layers", "width", "heads", "block"), sizes)) | {"inputs": options.inputs}
    command = command_line("python -m benchmarks.blocksparse.train", [*arguments])
    content: dict[str, Any] = provenance(command, ROOT, device) | {"settings": settings, "runs": []}
    for length in options.lengths:
        for batch, inputs in {1: options.inputs // SHARE, max(1, TOKENS // length): options.inputs}.items():
            for way in WAYS:
                run = train(way, length, batch, inputs, sizes, device)
                content["runs"].append(run)
                report.write_json(path, content)
                memory = f"{run['peak_bytes'] / 2**30:.2f} GiB, " if run["peak_bytes"] else ""
                said = f"{way}, {length:,} tokens, batch {batch}: {run['seconds']:.2f} s, {memory}"
                print(f"{said}loss {run['losses'][0]:.4f} to {run['losses'][-1]:.4f}", flush=True)
            # After each size, so that a killed run keeps the figures of the sizes that it finished.
            content["largest_difference"] = difference(content["runs"])
            report.write_json(path, content)
    print(f"losses of the same keys differ by {content['largest_difference']:.2e} at most; wrote {path}")
    if not content["largest_difference"] <= MOST:
        sys.exit("benchmarks.blocksparse.train: losses of the same keys differ")


if __name__ == "__main__":
    main(sys.argv[1:])
