"""`gemm.linear_glu`: the gated half of an MLP, for inference, at the shapes of Llama 3's sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.engine import Case, Provider, copies, random_matrix
from gossamer import gemm

# Tokens, hidden size, intermediate size. 256 and 512 are chunks of a prefill, 1 to 128 tokens a step of decoding.
LLAMA = [
    *((tokens, 2048, 8192) for tokens in (1, 16, 128)),
    *((tokens, 4096, 14336) for tokens in (1, 16, 128, 256, 512, 1024, 4096, 16384, 32768, 65536)),
    (4096, 8192, 28672),
    (16384, 8192, 28672),
    (4096, 16384, 53248),
]
# Tokens of a chunk, whose tiles of 128 rows fill different parts of a GPU; hidden and intermediate sizes of models.
CHUNKS = (96, 128, 160, 200, 256, 300, 512, 800)
CHUNK_SIZES = ((1024, 2816), (2048, 5632), (2048, 8192), (4096, 14336), (5120, 13824), (8192, 28672))
# The figure of "Fused SwiGLU": its sizes, and its token counts from the largest on, for a run may be cut short.
FIGURE = {"llama_8b": (4096, 14336), "llama_70b": (8192, 28672), "llama_405b": (16384, 53248)}
TOKENS = (65536, 4096, 16384, 1024, 32768, 8192, 2048, 49152)


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """bfloat16; small float32 cases for `quick` and on the CPU."""
    if quick or device.type == "cpu":
        yield linear_glu(64, 256, 704, torch.float32)
        for tokens in (32, 64):
            yield _of_figure("llama_toy", tokens, 256, 704, torch.float32)
        return
    for shape in LLAMA:
        yield linear_glu(*shape, torch.bfloat16)
    for shape in CHUNK_SIZES:
        for tokens in CHUNKS:
            yield _named("linear_glu_chunk", linear_glu(tokens, *shape, torch.bfloat16), ("gossamer", "dense", "Liger"))
    for name, shape in FIGURE.items():
        for tokens in TOKENS:
            yield _of_figure(name, tokens, *shape, torch.bfloat16)


def _of_figure(name: str, tokens: int, K: int, N: int, dtype: torch.dtype) -> Case:
    """The case by the model's name, without the ways that the figure does not compare."""
    case = linear_glu(tokens, K, N, dtype)
    ways = tuple(p.name for p in case.providers if p.name not in ("gossamer, stacked", "torch.compile"))
    return replace(_named(name, case, ways), sweep="M")


def _named(name: str, case: Case, ways: tuple[str, ...]) -> Case:
    """The case by another name, with some of its providers, and without the energy of a call."""
    return replace(case, name=name, providers=tuple(p for p in case.providers if p.name in ways), energy=False)


def linear_glu(M: int, K: int, N: int, dtype: torch.dtype) -> Case:
    def make(device: torch.device, generator: torch.Generator) -> list[tuple[Tensor, ...]]:
        made = []
        for _ in range(copies(device, (M * K + 2 * N * K) * dtype.itemsize)):
            stacked = random_matrix(2 * N, K, dtype, device, generator).mul_(K**-0.5)
            both = stacked[:N].clone(), stacked[N:].clone()
            made.append((random_matrix(M, K, dtype, device, generator), *both, stacked))
        return made

    def dense(x: Tensor, gate: Tensor, up: Tensor, _: Tensor) -> Tensor:
        return F.silu(F.linear(x, gate)) * F.linear(x, up)

    def liger(x: Tensor, gate: Tensor, up: Tensor, _: Tensor) -> Tensor:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        return LigerSiLUMulFunction.apply(F.linear(x, gate), F.linear(x, up))

    def in_place(x: Tensor, gate: Tensor, up: Tensor, both: Tensor) -> Tensor:
        from benchmarks.peers.swiglu_in_place import swiglu_

        return swiglu_(F.linear(x, both))

    def some(out: Tensor, *_: Tensor) -> tuple[Tensor]:
        """512 rows tell what all do, and float64 takes its time."""
        return (out[:: max(1, M // 512)],)

    def halves(out: Tensor, *_: Tensor) -> tuple[Tensor]:
        return some(F.silu(out[:, :N]) * out[:, N:])

    return Case(
        room="gemm",
        name="linear_glu",
        parameters={"M": M, "K": K, "N": N},
        dtype=dtype,
        make=make,
        providers=(
            Provider(
                "gossamer", lambda x, gate, up, _: gemm.linear_glu(x, gate, up), ours=True, result=some, capturable=True
            ),
            Provider(
                "gossamer, stacked",
                lambda x, gate, up, both: gemm.linear_glu(x, both),
                ours=True,
                result=some,
                capturable=True,
            ),
            Provider("dense", dense, result=some, capturable=True),
            Provider(
                "torch.compile", torch.compile(dense, fullgraph=True, dynamic=False), result=some, capturable=True
            ),
            Provider("cuBLAS, SwiGLU in place", in_place, result=some, capturable=True, devices=("cuda",)),
            Provider("Liger", liger, result=some, capturable=True, devices=("cuda",)),
            Provider(
                "GEMM alone",
                lambda x, gate, up, both: F.linear(x, both),
                result=halves,
                capturable=True,
                partial=True,
            ),
        ),
        reference=lambda x, gate, up, both: (dense(some(x)[0].double(), gate.double(), up.double(), both),),
        bytes=(M * K + 2 * N * K + M * N) * dtype.itemsize,
        flops=4 * M * N * K,
        energy=K == 4096 and M in (512, 4096, 16384, 65536),
    )
