"""The two ways of `sae.encode` with TopK beside each other, for `encode_path.has_bound`.

Usage: python -m benchmarks.sae.tune_topk [--parts]. For each shape: a TopK encoder in bfloat16 that selects from dense
pre-activations or, on Hopper, packs what exceeds a bound from a sample of the columns, beside the product alone, in
CUDA graphs of ten calls. Latents fire evenly, are ranked by a scale, or are sorted by how often they fire; or all that
fire are in one tile, so that every row is computed a second time. --parts lists the kernels of the first two shapes.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from benchmarks import tune
from gossamer import gemm, sae
from gossamer._core.calls import Checked
from gossamer.rowsparse import Rows
from gossamer.sae import encode_path

# M, d_in, d_sae, k, how latents fire
SHAPES = [
    *((4096, 2304, 65536, 64, how) for how in ("evenly", "scaled", "sorted", "one tile")),
    *((m, 2304, 65536, 64, "evenly") for m in (512, 1024, 2048, 16384)),
    *((4096, 2304, 65536, k, "evenly") for k in (16, 32, 128, 256)),
    *((m, 768, 24576, 32, "evenly") for m in (1024, 2048, 4096, 16384)),
    *((m, 2304, 16384, 64, "evenly") for m in (2048, 4096, 16384)),
    (4096, 4096, 131072, 64, "evenly"),
]
SMALL = [(8, 32, 1024, 4, how) for how in ("evenly", "scaled", "one tile")]
CUDA = tune.DEVICE.type == "cuda"


def operands(m: int, d_in: int, d_sae: int, how: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """x, W_enc, b_enc, scale; pre-activations of standard deviation 1, but for the bias."""
    dtype, device = torch.bfloat16 if CUDA else torch.float32, tune.DEVICE
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(m, d_in, device=device, generator=generator).to(dtype)
    W_enc = torch.empty(d_in, d_sae, device=device, dtype=dtype)
    for part in W_enc.split(256):
        part.copy_(torch.randn(part.shape, device=device, generator=generator) / d_in**0.5)
    place = torch.arange(d_sae, device=device) / d_sae
    bias = {"sorted": -3 * place, "one tile": -100.0 * (place >= 256 / d_sae)}.get(how, 0 * place)
    scale = 0.5 + torch.rand(d_sae, device=device, generator=generator) if how == "scaled" else None
    return x, W_enc, bias.to(dtype), scale


def candidates(x: Tensor, W_enc: Tensor, b_enc: Tensor, scale: Tensor | None, k: int) -> tune.Calls:
    found: tune.Calls = {"product": lambda: torch.addmm(b_enc, x, W_enc)}
    for name, packs in (("dense", False), ("bound", True)):
        choice = (
            (encode_path, "has_bound", lambda *_, packs=packs: packs),
            (sys.modules["gossamer.sae.encode"], "_checked", Checked()),
        )
        found[name] = tune.under(lambda: sae.encode(x, W_enc, b_enc, gemm.TopK(k, scale)), *choice)
    return found


def again(call: Any) -> int:
    """How many rows a call computes a second time."""
    from gossamer.sae._triton import topk

    found, settle = [], topk._settle
    noted = lambda *arguments: found.append(int(arguments[5][0].sum())) or settle(*arguments)  # noqa: E731
    tune.under(call, (topk, "_settle", noted))()
    return found[0]


def smallest(rows: Rows, scale: Tensor | None) -> Tensor:
    """The k-th largest of what each row was ranked by."""
    ranked = rows.values.float() * (1 if scale is None else scale[rows.indices.long()])
    return ranked.view(rows.num_rows, -1).amin(1)


@torch.no_grad()
def main(shapes: list[tuple[int, int, int, int, str]], parts: bool) -> None:
    results = tune.Results(__file__)
    for at, shape in enumerate(shapes):
        *sizes, k, how = shape
        given = operands(*sizes, how)
        calls = candidates(*given, k)
        wanted, got = calls["dense"](), calls["bound"]()
        near = (smallest(wanted, given[3]) - smallest(got, given[3])).abs().max()
        assert torch.equal(wanted.counts, got.counts) and near <= 2**-5, f"{shape}: {near}"
        results.add(str(shape), tune.replayed(calls), against="dense")
        differ = (wanted.indices != got.indices).view(wanted.num_rows, -1).any(1).float().mean().item()
        results.note(str(shape), rows_again=again(calls["bound"]) if CUDA else 0, rows_that_differ_by_rounding=differ)
        if parts and at < 2:
            for name, call in calls.items():
                results.add(f"{shape} {name}, kernels", tune.kernels(call))
    results.keep()


if __name__ == "__main__":
    main(SHAPES if CUDA else SMALL, "--parts" in sys.argv[1:])
