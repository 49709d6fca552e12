"""`gemm.linear_pack`: a layer whose active entries are packed, and an autoencoder's forward pass through it."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import NormalDist

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.engine import Case, Provider, copies, random_matrix
from gossamer import gemm, sae


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """An encoder with W_enc as SAELens has it, and the up projection of a sparse feed-forward block, both in bfloat16;
    small float32 ones for `quick` and on the CPU."""
    if quick or device.type == "cpu":
        encoder, layer, dtype = (64, 256, 4096, 16), (64, 256, 704, 8), torch.float32
    else:
        encoder, layer, dtype = (4096, 2304, 65536, 64), (16384, 2048, 5632, 29), torch.bfloat16
    yield linear_pack("linear_pack_jumprelu", *encoder, dtype, jump=True)
    yield linear_pack("linear_pack_relu", *layer, dtype, jump=False)
    yield _forward(*encoder, dtype)


def _bound(n: int, l0: int) -> float:
    """The threshold that standard normal pre-activations exceed `l0` times in `n`."""
    return NormalDist().inv_cdf(1 - l0 / n)


def operands(
    M: int, K: int, N: int, l0: int, dtype: torch.dtype, jump: bool, device: torch.device, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """x, weight [N, K], bias, threshold. A JumpReLU's weight is the transpose of what lies in memory."""
    weight = random_matrix(*((K, N) if jump else (N, K)), dtype, device, generator).mul_(K**-0.5)
    bias = torch.full((N,), 0.0 if jump else -_bound(N, l0), dtype=dtype, device=device)
    threshold = torch.full((N,), _bound(N, l0), device=device) if jump else None
    return random_matrix(M, K, dtype, device, generator), weight.t() if jump else weight, bias, threshold


def _activated(x: Tensor, weight: Tensor, bias: Tensor, threshold: Tensor | None) -> Tensor:
    z = F.linear(x, weight, bias)
    return torch.relu(z) if threshold is None else torch.where(z > threshold, z, 0)


def _value(threshold: Tensor | None) -> str | gemm.JumpReLU:
    return "relu" if threshold is None else gemm.JumpReLU(threshold)


def linear_pack(name: str, M: int, K: int, N: int, l0: int, dtype: torch.dtype, jump: bool) -> Case:
    def make(device: torch.device, generator: torch.Generator) -> list[tuple[Tensor | None, ...]]:
        count = copies(device, (M * K + K * N + M * N) * dtype.itemsize)
        return [operands(M, K, N, l0, dtype, jump, device, generator) for _ in range(count)]

    def error(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
        """Largest deviation from float64 pre-activations of what is kept, and largest distance to the boundary of what
        is kept or left out wrongly: near it, rounding decides."""
        acts, z = got[0].double(), want[0]
        boundary = _bound(N, l0) if jump else 0.0
        worst = torch.where(acts != 0, (acts - z).abs().maximum(boundary - z), z - boundary).max().item()
        return float("inf") if worst != worst else worst

    def packed(x: Tensor, weight: Tensor, bias: Tensor, threshold: Tensor | None) -> object:
        return gemm.linear_pack(x, weight, bias, _value(threshold))

    def encode(x: Tensor, weight: Tensor, bias: Tensor, threshold: Tensor | None) -> object:
        return sae.encode(x, weight.t(), bias, _value(threshold))

    def dense_of(rows: object, *_: Tensor | None) -> tuple[Tensor, ...]:
        return (rows.to_dense(),)  # type: ignore[attr-defined]

    def ours(call: object, label: str) -> Provider:
        return Provider(label, call, ours=True, result=dense_of, capturable=True)  # type: ignore[arg-type]

    return Case(
        room="gemm",
        name=name,
        parameters={"M": M, "K": K, "N": N, "L0": l0},
        dtype=dtype,
        make=make,
        providers=(
            ours(packed, "gossamer, ELL"),
            ours(encode, "gossamer, sae.encode"),
            Provider("dense", _activated, capturable=True),
            Provider("torch.compile", torch.compile(_activated, fullgraph=True, dynamic=False), capturable=True),
            Provider(
                "GEMM alone",
                lambda x, weight, bias, _: F.linear(x, weight, bias),
                result=lambda z, _x, _w, _b, threshold: (torch.where(z > (threshold if jump else 0), z, 0),),
                capturable=True,
                partial=True,
            ),
        ),
        reference=lambda x, weight, bias, _: (F.linear(x.double(), weight.double(), bias.double()),),
        bytes=(M * K + K * N + M * l0) * dtype.itemsize,
        flops=2 * M * N * K,
        error=error,
        budget={torch.float32: 1e-4}.get(dtype, 4e-2),
    )


def _forward(B: int, D: int, N: int, l0: int, dtype: torch.dtype) -> Case:
    """encode and decode: the reconstruction is compared."""

    def make(device: torch.device, generator: torch.Generator) -> list[tuple[Tensor, ...]]:
        W_dec = random_matrix(N, D, dtype, device, generator).mul_(D**-0.5)
        return [(*operands(B, D, N, l0, dtype, True, device, generator), W_dec)]

    def dense(x: Tensor, weight: Tensor, bias: Tensor, threshold: Tensor, W_dec: Tensor) -> Tensor:
        return _activated(x, weight, bias, threshold) @ W_dec

    def packed(x: Tensor, weight: Tensor, bias: Tensor, threshold: Tensor, W_dec: Tensor) -> Tensor:
        return sae.decode(gemm.linear_pack(x, weight, bias, gemm.JumpReLU(threshold)), W_dec)

    def encoded(x: Tensor, weight: Tensor, bias: Tensor, threshold: Tensor, W_dec: Tensor) -> Tensor:
        return sae.decode(sae.encode(x, weight.t(), bias, activation=gemm.JumpReLU(threshold)), W_dec)

    def few(out: Tensor, *_: Tensor) -> tuple[Tensor]:
        """64 rows tell what all do, and float64 takes its time."""
        return (out[:: max(1, B // 64)],)

    def reference(x: Tensor, weight: Tensor, bias: Tensor, threshold: Tensor, W_dec: Tensor) -> tuple[Tensor]:
        """Of what plain PyTorch keeps: an entry at the threshold is kept or not by rounding, and weighs a whole row."""
        kept = _activated(few(x)[0], weight, bias, threshold) != 0
        z = F.linear(few(x)[0].double(), weight.double(), bias.double())
        return (torch.where(kept, z, 0) @ W_dec.double(),)

    return Case(
        room="gemm",
        name="linear_pack_decode",
        parameters={"B": B, "D": D, "F": N, "L0": l0},
        dtype=dtype,
        make=make,
        providers=(
            Provider("gossamer", packed, ours=True, result=few, capturable=True),
            Provider("gossamer, sae.encode", encoded, ours=True, result=few, capturable=True),
            Provider("dense", dense, result=few, capturable=True),
            Provider("torch.compile", torch.compile(dense, fullgraph=True, dynamic=False), result=few, capturable=True),
        ),
        reference=reference,
        bytes=(2 * B * D + 2 * D * N) * dtype.itemsize,
        flops=2 * B * N * D,
        # One entry of a row more or less, where rounding decides.
        budget={torch.float32: 1e-4}.get(dtype, 0.3),
    )
