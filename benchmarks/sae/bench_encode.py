"""`sae.encode`: from the model's activations to row-sparse latents, ReLU, JumpReLU, TopK and BatchTopK."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import NormalDist

import torch
from torch import Tensor

from benchmarks.engine import Case, Provider, beside_dense, copies, random_matrix
from gossamer import sae
from gossamer.gemm import BatchTopK, JumpReLU, TopK


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """The article's large batch in bfloat16; a small float32 one for `quick` and on the CPU. Beside dense
    PyTorch alone: lists of their true size, for which the host waits, and few rows."""
    if quick or device.type == "cpu":
        shape, k, dtype = (64, 256, 4096), 16, torch.float32
    else:
        shape, k, dtype = (4096, 2304, 65536), 64, torch.bfloat16
    for activation in ("relu", "relu_csr", "jumprelu", "topk", "batchtopk"):
        yield encode(activation, *shape, k, dtype)
    if dtype == torch.float32:
        return
    for dtype in (torch.bfloat16, torch.float32):
        for shape in ((1024, 1024, 32768), (4096, 768, 24576), (4096, 2304, 16384), (16384, 1024, 32768)):
            yield beside_dense(encode("relu_csr", *shape, 64, dtype))
        for B in (1, 16):
            yield beside_dense(encode("relu", B, 2304, 65536, 64, dtype))
            yield beside_dense(encode("batchtopk", B, 768, 24576, 1024, dtype))


def encode(activation: str, B: int, D: int, F: int, k: int, dtype: torch.dtype) -> Case:
    """Dense peers end in dense latents, as SAE libraries' encoders do; "relu_csr" is ReLU to a CSR of its true size."""
    capturable = activation != "relu_csr"  # which waits for its size
    relu, thresholded = activation.startswith("relu"), not activation.endswith("topk")
    # Pre-activations are standard normal, but for the biases: about k exceed it. ReLU's biases bring them there.
    exceeded = NormalDist().inv_cdf(min(max(1 - k / F, 1e-9), 1 - 1e-9))
    threshold = 0.0 if relu else max(exceeded, 0.0)

    def activate(z: Tensor) -> Tensor:
        if thresholded:
            return torch.where(z > threshold, z, 0)
        return _topk(z, k) if activation == "topk" else _topk(z.view(1, -1), k * len(z)).view_as(z)

    def make(device: torch.device, generator: torch.Generator) -> list[tuple[Tensor, ...]]:
        return [
            (
                random_matrix(B, D, dtype, device, generator),
                random_matrix(D, F, torch.float32, device, generator).mul_(D**-0.5).to(dtype),
                random_matrix(1, F, dtype, device, generator)[0] * 0.1 - (exceeded if relu else 0),
                torch.full((F,), threshold, device=device),
            )
            for _ in range(copies(device, (B * D + D * F + B * F) * dtype.itemsize))
        ]

    def ours(x: Tensor, W_enc: Tensor, b_enc: Tensor, thresholds: Tensor) -> object:
        if relu:
            return sae.encode(x, W_enc, b_enc, "relu", capacity="exact" if activation == "relu_csr" else None)
        if activation == "jumprelu":
            return sae.encode(x, W_enc, b_enc, JumpReLU(thresholds))
        return sae.encode(x, W_enc, b_enc, TopK(k) if activation == "topk" else BatchTopK(k))

    def gemm(x: Tensor, W_enc: Tensor, b_enc: Tensor, _: Tensor) -> Tensor:
        return torch.addmm(b_enc, x, W_enc)

    def dense(x: Tensor, W_enc: Tensor, b_enc: Tensor, _: Tensor) -> Tensor:
        return activate(torch.addmm(b_enc, x, W_enc))

    def error(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
        """Largest deviation from float64 pre-activations (which have norm 1) of what is kept, and largest distance
        to the boundary of what is kept or left out wrongly: near it, rounding decides."""
        acts, z = got[0].double(), want[0]
        kept = acts != 0
        if thresholded:
            boundary, most = threshold, kept.numel()
        elif activation == "topk":
            boundary, most = z.topk(k, dim=1).values[:, -1:], k
        else:
            boundary, most = z.view(-1).topk(k * len(z)).values[-1], kept.numel()
        if (kept.sum(1) > most).any() or (activation == "batchtopk" and kept.sum() > k * len(z)):
            return float("inf")
        worst = torch.where(kept, (acts - z).abs().maximum(boundary - z), z - boundary).max().item()
        return float("inf") if worst != worst else worst

    return Case(
        room="sae",
        name=f"encode_{activation}",
        parameters={"B": B, "D": D, "F": F, "L0" if thresholded else "k": k},
        dtype=dtype,
        make=make,
        providers=(
            Provider("gossamer", ours, True, result=lambda rows, *_: (rows.to_dense(),), capturable=capturable),
            Provider("dense", dense, capturable=True),
            Provider("torch.compile", torch.compile(dense, fullgraph=True, dynamic=False), capturable=True),
            Provider("GEMM alone", gemm, result=lambda z, *_: (activate(z),), capturable=True, partial=True),
        ),
        reference=lambda x, W_enc, b_enc, _: (torch.addmm(b_enc.double(), x.double(), W_enc.double()),),
        bytes=(B * D + D * F + F) * dtype.itemsize + B * k * (dtype.itemsize + 4),
        flops=2 * B * D * F,
        error=error,
        budget=1e-4 if dtype == torch.float32 else 0.05,
    )


def _topk(z: Tensor, k: int) -> Tensor:
    values, indices = z.topk(k, dim=-1)
    return torch.zeros_like(z).scatter_(-1, indices, values.relu())
