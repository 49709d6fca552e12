"""BatchTopK's selection from pre-activations beside `torch.topk` over the batch, also where its sample misleads it.

Usage: python benchmarks/sae/tune_batchtopk.py [--rounds N] [--parts]. Needs a GPU. What `sae.encode` with BatchTopK
does once z = x W_enc + b_enc is written: to sparse rows ("rows"), and of that to where the k-th largest of the batch is
known ("found"). z is standard normal, or made so that a sample of its rows and columns says little. Each is replayed
from a CUDA graph of ten calls, in random order; the table has medians in microseconds, and how many rows were read
again because their list was too short. --parts lists the kernels of each shape. Set OUT to a folder to keep the numbers
as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.sae.tune_decode import replayed
from gossamer.cli.bench.command import command_line
from gossamer.cli.environment import provenance
from gossamer.sae._triton import batchtopk
from gossamer.sae._triton.encode import activate

# M, d_sae, k, dtype, how z is distributed
SHAPES = [
    *((4096, 65536, k, torch.bfloat16, "normal") for k in (16, 64, 256, 1024, 4096, 16384)),
    (4096, 65536, 64, torch.float16, "normal"),
    (4096, 65536, 64, torch.float32, "normal"),
    *((m, 65536, 64, torch.bfloat16, "normal") for m in (1, 4, 16, 64, 512, 16384)),
    (4096, 24576, 32, torch.bfloat16, "normal"),
    (16384, 16384, 32, torch.bfloat16, "normal"),
    *(
        (4096, 65536, 64, torch.bfloat16, how)
        for how in ("heavy tail", "few above 0", "constant", "4 rows x 100", "400 rows x 100", "misled")
    ),
]


def pre_activations(m: int, n: int, k: int, dtype: torch.dtype, how: str) -> Tensor:
    z = torch.empty(m, n, device="cuda", dtype=dtype)
    generator = torch.Generator("cuda").manual_seed(0)
    for part in z.split(256):
        part.copy_(torch.randn(part.shape, device="cuda", generator=generator))
    if how == "heavy tail":
        z.pow_(5)
    elif how == "few above 0":
        z.copy_(torch.where(torch.rand(m, n, device="cuda", generator=generator) * n < k / 2, z, -z.abs()))
    elif how == "constant":
        z.fill_(1)
    elif how.endswith("rows x 100"):
        z[:: m // int(how.split()[0])] *= 100
    elif how == "misled":
        _, _, step = batchtopk.batch_sample(m, n, k)
        z[:, torch.arange(n, device="cuda") % step < batchtopk.BATCH_RUN] *= 10
    return z


def check(z: Tensor, k: int, rows: tuple[Tensor, ...]) -> None:
    """Compares with `torch.topk`."""
    values, indices, nnz, *_ = rows
    filled = torch.arange(values.shape[1], device="cuda") < nnz[:, None]
    assert torch.equal(values[filled], z.gather(1, indices.long().masked_fill(~filled, 0))[filled])
    want = z.view(-1).topk(k * len(z)).values.relu()
    got = values[filled].sort(descending=True).values
    assert torch.equal(got, want[: len(got)]) and not want[len(got) :].any(), "not the largest of the batch"


def measure(shape: tuple[int, int, int, torch.dtype, str], rounds: int, parts: bool) -> dict[str, float]:
    m, n, k, _, how = shape
    z = pre_activations(*shape)
    # Room for the row with the most entries.
    capacity = n if "rows" in how or how == "constant" else min(n, max(4 * k, 1024))
    calls = {
        "rows": lambda: activate("batch", z, None, None, k, 0.0, capacity, False, None),
        "found": lambda: batchtopk.find(z, None, k, None),
        "torch.topk": lambda: z.view(-1).topk(k * m),
    }
    check(z, k, calls["rows"]())
    bound = calls["found"]()
    again = int((bound.reach > bound.length).sum())
    found = replayed(calls, rounds)
    if parts:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            calls["rows"]()
        for event in profile.key_averages():
            print(f"  {event.self_device_time_total:9.1f} us {event.count:3} x {event.key[:90]}")
    return found | {"rows again": again}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="timings of each graph (default 5)")
    parser.add_argument("--parts", action="store_true", help="list the kernels of each shape")
    arguments = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    print(torch.cuda.get_device_name(), torch.__version__)
    for shape in SHAPES:
        m, n, k, dtype, how = shape
        name = f"{m} x {n}, k {k}, {str(dtype).removeprefix('torch.')}, {how}"
        found = results[name] = measure(shape, arguments.rounds, arguments.parts)
        if len(results) == 1:
            print(" " * 50, *(f"{column:>14}" for column in found))
        print(f"{name:50}", *(f"{value:14.1f}" for value in found.values()), flush=True)
        torch.cuda.empty_cache()
    if "OUT" in os.environ:
        command = command_line("python benchmarks/sae/tune_batchtopk.py", sys.argv[1:])
        record = provenance(command, Path(__file__).parent, torch.device("cuda", 0)) | {"microseconds": results}
        (Path(os.environ["OUT"]) / "tune_batchtopk.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
