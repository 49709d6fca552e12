"""The two ways of `sae.encode` with TopK beside each other, for `encode_path.has_bound`.

Usage: python benchmarks/sae/tune_topk.py [--rounds N] [--parts]. Needs a Hopper GPU. For each shape: a TopK encoder in
bfloat16 that selects from dense pre-activations, or packs what exceeds a bound from a sample of the columns, beside
the product alone. Latents fire evenly, are ranked by a scale, or are sorted by how often they fire; or all that fire
are in one tile, so that every row is computed a second time. Each is replayed from a CUDA graph of ten calls, in random
order; the table has medians in microseconds. --parts lists the kernels of the first two shapes. Set OUT to a folder to
keep the numbers as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.sae.tune_decode import replayed
from gossamer import gemm, sae
from gossamer.cli.bench.command import command_line
from gossamer.cli.environment import provenance
from gossamer.rowsparse import ELL
from gossamer.sae import encode_path
from gossamer.sae._triton import topk

# M, d_in, d_sae, k, how latents fire
SHAPES = [
    *((4096, 2304, 65536, 64, how) for how in ("evenly", "scaled", "sorted", "one tile")),
    *((m, 2304, 65536, 64, "evenly") for m in (512, 1024, 2048, 16384)),
    *((4096, 2304, 65536, k, "evenly") for k in (16, 32, 128, 256)),
    *((m, 768, 24576, 32, "evenly") for m in (1024, 2048, 4096, 16384)),
    *((m, 2304, 16384, 64, "evenly") for m in (2048, 4096, 16384)),
    (4096, 4096, 131072, 64, "evenly"),
]


def operands(m: int, d_in: int, d_sae: int, how: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """x, W_enc, b_enc, scale; pre-activations of standard deviation 1, but for the bias."""
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(m, d_in, device="cuda", generator=generator).bfloat16()
    W_enc = torch.empty(d_in, d_sae, device="cuda", dtype=torch.bfloat16)
    for part in W_enc.split(256):
        part.copy_(torch.randn(part.shape, device="cuda", generator=generator) / d_in**0.5)
    place = torch.arange(d_sae, device="cuda") / d_sae
    bias = {"sorted": -3 * place, "one tile": -100.0 * (place >= 256 / d_sae)}.get(how, 0 * place)
    scale = 0.5 + torch.rand(d_sae, device="cuda", generator=generator) if how == "scaled" else None
    return x, W_enc, bias.bfloat16(), scale


def ways(x: Tensor, W_enc: Tensor, b_enc: Tensor, scale: Tensor | None, k: int) -> dict[str, Callable[[], Any]]:
    def encoded(packs: bool) -> Callable[[], Any]:
        def call() -> Any:
            choice, encode_path.has_bound = encode_path.has_bound, lambda *_: packs
            rows = sae.encode(x, W_enc, b_enc, activation=gemm.TopK(k, scale))
            encode_path.has_bound = choice
            return rows

        return call

    return {"product": lambda: torch.addmm(b_enc, x, W_enc), "dense": encoded(False), "bound": encoded(True)}


def again(*given: Any) -> int:
    """How many rows are computed a second time."""
    found, settle = [], topk._settle
    topk._settle = lambda *arguments: found.append(int(arguments[5].sum())) or settle(*arguments)  # type: ignore
    ways(*given)["bound"]()
    topk._settle = settle
    return found[0]


def smallest(rows: ELL, scale: Tensor | None) -> Tensor:
    """The k-th largest of what each row was ranked by."""
    return (rows.values.float() * (1 if scale is None else scale[rows.indices.long()])).amin(1)


def measure(shape: tuple[int, int, int, int, str], rounds: int) -> dict[str, float]:
    *sizes, k, how = shape
    given = operands(*sizes, how)
    calls = ways(*given, k)
    wanted, got = calls["dense"](), calls["bound"]()
    near = smallest(wanted, given[3]) - smallest(got, given[3])
    assert torch.equal(wanted.nnz_per_row, got.nnz_per_row) and near.abs().max() <= 2**-5, (
        f"{shape}: {near.abs().max()}"
    )
    missing = (wanted.indices != got.indices).any(1).float().mean()
    found = replayed(calls, rounds)
    return found | {"rows again": again(*given, k), "rows that differ by rounding": round(missing.item(), 4)}


def list_parts(shape: tuple[int, int, int, int, str]) -> None:
    *sizes, k, how = shape
    for name, call in ways(*operands(*sizes, how), k).items():
        call()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(10):
                call()
        print(name, how)
        for event in profile.key_averages():
            print(f"  {event.self_device_time_total / 10:9.1f} us {event.count / 10:5.1f} x {event.key[:90]}")


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="timings of each graph (default 5)")
    parser.add_argument("--parts", action="store_true", help="list the kernels of the first two shapes")
    arguments = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    print(torch.cuda.get_device_name(), torch.__version__)
    for shape in SHAPES:
        found = results[str(shape)] = measure(shape, arguments.rounds)
        if len(results) == 1:
            print(" " * 38, *(f"{name:>14}" for name in found))
        print(f"{shape!s:38}", *(f"{value:14.10g}" if value < 1 else f"{value:14.1f}" for value in found.values()))
        torch.cuda.empty_cache()
    if arguments.parts:
        for shape in SHAPES[:2]:
            list_parts(shape)
    if "OUT" in os.environ:
        command = command_line("python benchmarks/sae/tune_topk.py", sys.argv[1:])
        record = provenance(command, Path(__file__).parent, torch.device("cuda", 0)) | {"microseconds": results}
        (Path(os.environ["OUT"]) / "tune_topk.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
