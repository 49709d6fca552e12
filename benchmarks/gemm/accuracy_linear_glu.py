"""How exact `gemm.linear_glu` is beside eager PyTorch, against float64.

Usage: python benchmarks/gemm/accuracy_linear_glu.py [--quick] [--device cpu] [--rows 256] [--draws 20] [--out DIR].
Hidden sizes K are 1,024 to 16,384 with an intermediate size N = 4 K, which says over how many elements the error is
taken and enters none of them. The weights of gate and up are those of a fresh nn.Linear and x is standard normal, all
bfloat16; each size is drawn anew 20 times. Eager PyTorch is silu(F.linear(x, gate)) * F.linear(x, up) with PyTorch's
own settings. The float64 result is computed from the same bfloat16 numbers.

A relative difference is the Frobenius norm of a difference over that of the float64 result. The exit code is 1 where
gossamer's is more than 1% above eager PyTorch's in any draw. The file also has the largest and the mean absolute
difference between gossamer and eager PyTorch.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.engine import report
from benchmarks.engine.command import command_line, slug
from benchmarks.provenance import parsed, provenance
from gossamer import gemm
from gossamer.cli.environment import describe

ROOT = Path(__file__).resolve().parents[2]
SIZES, TOYS = (1024, 2048, 4096, 8192, 16384), (64, 128, 256)
FACTOR = 4
# Two results that are rounded in the same places differ by far less in the norm of so many elements.
ALLOWED = 1.01
DIFFERENCES = ("gossamer - float64", "eager - float64", "gossamer - eager")


def eager(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def differences(M: int, K: int, N: int, device: torch.device) -> Tensor:
    """Of one random initialisation: the relative `DIFFERENCES`, and the last one's largest and mean element [5]."""
    gate, up = (nn.Linear(K, N, bias=False, device=device, dtype=torch.bfloat16).weight for _ in range(2))
    x = torch.randn(M, K, device=device).bfloat16()
    ours, theirs = gemm.linear_glu(x, gate, up), eager(x, gate, up)
    squares = torch.zeros(4, dtype=torch.float64, device=device)
    apart = (ours.double() - theirs.double()).abs_()
    # Both weights of the largest size take 16 GiB in float64: blocks of columns keep them at 1 GiB.
    block = max(1, (1 << 26) // K)
    for first in range(0, N, block):
        columns = slice(first, first + block)
        want = eager(x.double(), gate[columns].double(), up[columns].double())
        a, b = ours[:, columns].double(), theirs[:, columns].double()
        squares += torch.stack([part.square().sum() for part in (a - want, b - want, a - b, want)])
    return torch.cat([(squares[:3] / squares[3]).sqrt(), torch.stack([apart.max(), apart.mean()])]).cpu()


def summary(values: Tensor) -> dict[str, float | None]:
    """Mean and maximum over the draws; None, which JSON has, where a draw gave NaN."""
    return {
        name: number if math.isfinite(number := float(value)) else None
        for name, value in (("mean", values.mean()), ("max", values.max()))
    }


def cell(found: dict[str, float | None], form: str) -> str:
    return " / ".join("not finite" if value is None else format(value, form) for value in found.values())


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, torch.device]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256, metavar="M", help="rows of x, 256 by default")
    parser.add_argument("--draws", type=int, metavar="COUNT", help="random initialisations of a size, 20 by default")
    parser.add_argument("--seed", type=int, default=0, help="seed of a size's first draw, 0 by default")
    options, device = parsed(parser, arguments, "toy sizes and 3 draws, as always on the CPU: does it run")
    options.draws = (3 if options.quick else 20) if options.draws is None else options.draws
    for name in ("rows", "draws"):
        if (value := getattr(options, name)) < 1:
            parser.error(f"--{name} must be at least 1, got {value}")
    return options, device


def main(arguments: Sequence[str]) -> None:
    options, device = parse(arguments)
    hardware, console = describe(device), report.make_console()
    content: dict[str, Any] = {
        **provenance(command_line("python benchmarks/gemm/accuracy_linear_glu.py", [*arguments]), ROOT, device),
        "settings": {
            "rows": options.rows,
            "draws": options.draws,
            "seed": options.seed,
            "quick": options.quick,
            "allowed_ratio": ALLOWED,
            # cuBLAS may then add partial sums in bfloat16, which is eager PyTorch's error to bear.
            "allow_bf16_reduced_precision_reduction": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        },
        "sizes": [],
    }
    path = options.out / f"gemm-accuracy-{slug(hardware['name'])}{'-quick' if options.quick else ''}.json"
    title = f"linear_glu, bfloat16, {options.rows} rows, {hardware['name']}: mean / maximum of {options.draws} draws"
    table = Table(title=title, title_justify="left")
    for column in ("K", "N", *DIFFERENCES, "gossamer's error over eager's"):
        table.add_column(column, justify="right", no_wrap=True)
    worse = []
    for K in TOYS if options.quick else SIZES:
        N = FACTOR * K
        torch.manual_seed(options.seed)
        with torch.inference_mode():
            bar = track(range(options.draws), f"K = {K}, N = {N}", console=console)
            found = torch.stack([differences(options.rows, K, N, device) for _ in bar])
        ratio = found[:, 0] / found[:, 1]
        relative = {name: summary(found[:, i]) for i, name in enumerate(DIFFERENCES)}
        ratios = summary(ratio)
        absolute = {name: summary(found[:, i]) for i, name in ((3, "largest"), (4, "mean"))}
        record = {"M": options.rows, "K": K, "N": N, "relative": relative, "absolute": absolute, "ratio": ratios}
        content["sizes"].append(record)
        report.write_json(path, content)
        table.add_row(str(K), str(N), *(cell(r, ".3e") for r in relative.values()), cell(ratios, ".4f"))
        if not (ratio <= ALLOWED).all():
            worse.append(f"{ratio.max():.4g} times at K = {K}")
    console.print(f"wrote {path}", markup=False)
    console.print(table)
    if worse:
        sys.exit(f"gemm.linear_glu: its error exceeds eager PyTorch's, {', '.join(worse)}; {ALLOWED} times is allowed.")


if __name__ == "__main__":
    main(sys.argv[1:])
