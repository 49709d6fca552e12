"""BatchTopK's selection from pre-activations beside `torch.topk` over the batch, also where its sample misleads it.

Usage: python -m benchmarks.sae.tune_batchtopk [--parts]. Needs Triton: a GPU, or GOSSAMER_INTERPRET=1. What
`sae.encode` with BatchTopK does once z = x W_enc + b_enc is written: to sparse rows ("rows"), and of that to where the
k-th largest of the batch is known ("found"). z is standard normal, or made so that a sample of its rows and columns
says little. In CUDA graphs of ten calls; beside them, how many rows were read again because their list was too short.
--parts lists the kernels of each shape.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from benchmarks import tune
from gossamer.rowsparse.entries import slots_of
from gossamer.sae._triton import batchtopk

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
SMALL = [(8, 512, 4, torch.float32, how) for how in ("normal", "constant", "4 rows x 100")]


def pre_activations(m: int, n: int, k: int, dtype: torch.dtype, how: str) -> Tensor:
    z = torch.empty(m, n, device=tune.DEVICE, dtype=dtype)
    generator = torch.Generator(tune.DEVICE).manual_seed(0)
    for part in z.split(256):
        part.copy_(torch.randn(part.shape, device=tune.DEVICE, generator=generator))
    if how == "heavy tail":
        z.pow_(5)
    elif how == "few above 0":
        z.copy_(torch.where(torch.rand(m, n, device=tune.DEVICE, generator=generator) * n < k / 2, z, -z.abs()))
    elif how == "constant":
        z.fill_(1)
    elif how.endswith("rows x 100"):
        z[:: m // int(how.split()[0])] *= 100
    elif how == "misled":
        _, _, step = batchtopk.batch_sample(m, n, k)
        z[:, torch.arange(n, device=tune.DEVICE) % step < batchtopk.BATCH_RUN] *= 10
    return z


def check(z: Tensor, k: int, rows: tuple[Tensor, ...]) -> None:
    """Compares with `torch.topk`."""
    values, indices, spans, _ = rows
    row, held = slots_of(spans, len(values))
    assert torch.equal(values[held], z[row[held], indices[held].long()])
    want = z.view(-1).topk(k * len(z)).values.relu()
    got = values[held].sort(descending=True).values
    assert torch.equal(got, want[: len(got)]) and not want[len(got) :].any(), "not the largest of the batch"


@torch.no_grad()
def main(shapes: list[tuple[int, int, int, torch.dtype, str]], parts: bool) -> None:
    results = tune.Results(__file__)
    for shape in shapes:
        m, n, k, dtype, how = shape
        z = pre_activations(*shape)
        calls: tune.Calls = {
            "rows": lambda: batchtopk.batch_topk(z, None, k, None),
            "found": lambda: batchtopk.find(z, None, k, None, torch.empty(2, m, dtype=torch.int64, device=z.device)),
            "torch.topk": lambda: z.view(-1).topk(k * m),
        }
        check(z, k, calls["rows"]())
        bound = calls["found"]()
        label = f"{m} x {n}, k {k}, {str(dtype).removeprefix('torch.')}, {how}"
        results.add(label, tune.replayed(calls), against="torch.topk")
        results.note(label, rows_again=int((bound.reach > bound.length).sum()))
        if parts:
            results.add(f"{label}, kernels", tune.kernels(calls["rows"]))
    results.keep()


if __name__ == "__main__":
    main(SHAPES if tune.DEVICE.type == "cuda" else SMALL, "--parts" in sys.argv[1:])
