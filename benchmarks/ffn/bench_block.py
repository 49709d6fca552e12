"""`ffn.gated` and `ffn.plain`: a block of the paper's 1.5B model, by how sparse it is and what neighbours share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from benchmarks.engine import Case, Provider, copies, error_beside_mean, relative_error
from benchmarks.engine.case import BUDGETS
from benchmarks.engine.timing import matmul_precision
from benchmarks.inputs import inputs_for
from gossamer import ffn, nn
from gossamer.gemm import JumpReLU
from gossamer.testing import random_rows

K, N, PLAIN = 2048, 5632, 8192
GROUP = 64
THRESHOLD = 2.0**-10
"""Of a JumpReLU: a number that 16 bits hold, and so small that a rounded z may fall on its other side."""


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """bfloat16 on a GPU; float32 on the CPU, and small for `quick`."""
    if quick:
        sizes, dtype = (64, 96, 256, 256), torch.float32
        yield block_case("gated", 40, 8, 0.0, sizes, dtype)
        yield block_case("plain", 40, 8, 0.0, sizes, dtype)
        return
    if device.type == "cpu":
        for m in (1, 2, 4, 8):
            yield block_case("gated", m, 29, 0.0, (K, N), torch.float32)
        return
    gated, plain, half = (K, N), (K, PLAIN), torch.bfloat16
    for m in (1, 4, 16):
        yield block_case("gated", m, 29, 0.0, gated, half)
    for m in (2048, 65536, 16384):
        yield block_case("gated", m, 29, 0.0, gated, half)
    for nnz in (1, 10, 100, 300, 900):
        yield block_case("gated", 16384, nnz, 0.0, gated, half)
    for nnz, shared in ((29, 0.9), (29, 0.7), (100, 0.9)):
        yield block_case("gated", 16384, nnz, shared, gated, half)
    yield block_case("gated", 16384, "40, 440 in 15%", 0.0, gated, half)
    for nnz in (29, 100, 300, 900):
        yield block_case("plain", 16384, nnz, 0.0, plain, half)


def counts(M: int, nnz: int | str) -> int | list[int]:
    """Entries of each row."""
    if isinstance(nnz, int):
        return nnz
    # Every row's place is as likely as any other's: 15 of 100, spread by a step that divides nothing.
    return [440 if i * 61 % 100 < 15 else 40 for i in range(M)]


def stored_by_columns(block: Any) -> Any:
    """A block of the same parameters but the weight of down, which stands column by column: a path that gathers
    its columns needs no copy, in CUDA graphs neither."""
    stored = copy.copy(block)
    stored._modules, stored.sparse_block = dict(block._modules), ffn.SparseBlock()
    stored.down_proj = copy.copy(block.down_proj)
    stored.down_proj._parameters = dict(block.down_proj._parameters)
    weight = block.down_proj.weight
    stored.down_proj.weight = Parameter(weight.data.t().contiguous().t(), weight.requires_grad)
    return stored


def dense_inputs(M: int, nnz: int, weight: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random inputs, and a bias with which rows have `nnz` entries on average: of a weight whose rows have norm 1."""
    n, k = weight.shape
    share = torch.tensor(min(nnz / n, 1 - 0.01 / n), dtype=torch.float64)
    x = torch.randn(M, k, device=weight.device, generator=generator).to(weight.dtype)
    return x, torch.full_like(weight[:, 0], torch.special.ndtri(share).item())


def through(block: Any, x: Tensor, method: str, activation: str) -> Tensor:
    """The block's result in one of our ways: a module has no threshold, but the functions have."""
    if activation != "jumprelu":
        block.method = method
        return block(x)
    options: dict[str, Any] = {"activation": JumpReLU(block.threshold), "method": method, "density": block.density}
    options |= {"up_bias": block.up_proj.bias, "down_bias": block.down_proj.bias}
    if not isinstance(block, nn.GatedMLP):
        return ffn.plain(x, block.up_proj.weight, block.down_proj.weight, **options)
    weights = block.gate_proj.weight, block.up_proj.weight, block.down_proj.weight
    return ffn.gated(x, *weights, gate_bias=block.gate_proj.bias, **options)


def activated(z: Tensor, activation: str) -> Tensor:
    """In plain PyTorch."""
    if activation == "jumprelu":
        return torch.where(z > THRESHOLD, z, 0)
    return F.relu(z).square() if activation == "relu2" else F.relu(z)


def block_case(
    kind: str,
    M: int,
    nnz: int | str,
    shared: float,
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    steps: int = 20,
    swept: bool = False,
    activation: str = "relu",
) -> Case:
    """steps: of the search for inputs. A case that is `swept` has the module as it comes and the dense way alone, and
    as many entries as it names on average where no gate can make a pattern."""
    k, n = sizes[-2:]
    gated = kind == "gated"

    def make(device: torch.device, generator: torch.Generator) -> list[tuple[Any, ...]]:
        """Several blocks where a single one would stay in the cache."""
        made = []
        for _ in range(min(4, copies(device, (M * n + 3 * n * k) * dtype.itemsize))):
            cls: Any = nn.GatedMLP if gated else nn.MLP
            named = "relu" if activation == "jumprelu" else activation
            block = cls(k, n, named, bias=True, dtype=dtype, device=device).requires_grad_(False)
            for parameter in block.parameters():
                if parameter.dim() == 2:
                    drawn = torch.randn(parameter.shape, device=device, generator=generator)
                    parameter.copy_(drawn * parameter.shape[1] ** -0.5)
                else:
                    parameter.zero_()
            active = block.gate_proj if gated else block.up_proj
            parts = []
            for first in range(0, M, 16384):
                rows = min(16384, M - first)
                if swept and isinstance(nnz, int) and nnz > k // 10:
                    x, bias = dense_inputs(rows, nnz, active.weight, generator)
                    parts.append(x)
                    continue
                l0 = counts(rows, nnz)
                options = {"dtype": dtype, "device": device, "generator": generator, "group": GROUP, "shared": shared}
                # A search does not need what TF32 rounds, and most of a case's time would be its.
                with matmul_precision("high"):
                    x, bias = inputs_for(random_rows((rows, n), l0=l0, **options), active.weight, steps=steps)
                parts.append(x)
            active.bias.copy_(bias)
            if activation == "jumprelu":
                active.bias += THRESHOLD
                block.threshold = torch.tensor(THRESHOLD, device=device)
            made.append((torch.cat(parts), block, None if swept else stored_by_columns(block)))
        return made

    def dense(x: Tensor, block: Any, _: Any) -> Tensor:
        if not gated:
            return block.down_proj(activated(block.up_proj(x), activation))
        return block.down_proj(activated(block.gate_proj(x), activation) * block.up_proj(x))

    def pinned(method: str, by_columns: bool = False) -> Callable[..., Tensor]:
        def call(x: Tensor, block: Any, stored: Any) -> Tensor:
            return through(stored if by_columns else block, x, method, activation)

        return call

    def steady(x: Tensor, *blocks: Any) -> tuple[Any, ...]:
        """A module knows how sparse it was some calls ago."""
        for block in filter(None, blocks):
            for _ in range(2 * block.density.rows.lag):
                through(block, x, "auto", activation)
        return x, *blocks

    def few(out: Tensor, *_: Any) -> tuple[Tensor]:
        """256 rows tell what all do, and float64 takes its time."""
        return (out[:: max(1, M // 256)],)

    def reference(x: Tensor, block: Any, _: Any) -> tuple[Tensor]:
        exact = {name: p.double() for name, p in block.named_parameters()}
        x = few(x)[0].double()
        up = F.linear(x, exact["up_proj.weight"], exact["up_proj.bias"])
        if gated:
            up *= activated(F.linear(x, exact["gate_proj.weight"], exact["gate_proj.bias"]), activation)
        else:
            up = activated(up, activation)
        return (F.linear(up, exact["down_proj.weight"], exact["down_proj.bias"]),)

    ways = ("gather", "fused") if gated else ("gather",)
    options = {"result": few, "capturable": True}
    ours = Provider("gossamer", pinned("auto"), ours=True, prepare=steady, **options)
    beside = Provider("dense", dense, **options)
    providers: tuple[Provider, ...] = (ours, beside)
    if not swept:
        providers = (
            ours,
            Provider("gossamer, down by columns", pinned("auto", True), ours=True, prepare=steady, **options),
            *(Provider(f"gossamer, {way}", pinned(way), ours=True, **options) for way in ways),
            beside,
            Provider("torch.compile", torch.compile(dense, fullgraph=True, dynamic=False), **options),
        )
    return Case(
        room="ffn",
        name=kind,
        parameters={"M": M, "K": k, "N": n, "nnz": nnz, "shared": f"{shared:.0%}"}
        | ({"activation": activation} if swept else {}),
        dtype=dtype,
        make=make,
        providers=providers,
        reference=reference,
        # The result of one or two entries is a product or two, which may cancel.
        error=error_beside_mean if isinstance(nnz, int) and nnz < 16 else relative_error,
        bytes=(2 * M * k + n * k) * dtype.itemsize,
        flops=2 * M * n * k,
        # A square doubles what is relative in an error.
        budget=2 * BUDGETS[dtype] if activation == "relu2" and dtype.itemsize == 2 else None,
    )
