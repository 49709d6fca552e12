"""`sae.decode`: whole pipeline, ready formats, sweeps, real SAEs' shapes, memory and backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine import Case, Provider, copies, random_matrix, random_rows
from benchmarks.peers import torch_peers
from gossamer import rowsparse, sae
from gossamer.rowsparse.pack import default_capacity

# (name, F, D, L0) of the five pretrained SAEs that the article measures.
REAL = (
    ("gemma-scope-2b-l20-65k", 65536, 2304, 72),
    ("gemma-scope-9b-l20-65k", 65536, 3584, 72),
    ("gemma-scope-2b-l12-65k", 65536, 2304, 72),
    ("gemma-scope-2b-l12-262k", 262144, 2304, 100),
    ("qwen-scope-3.5-2b-l12", 32768, 2048, 100),
)
# Batch, latents, width: dense latents whose number of entries decides between gathering and a dense product.
DENSITIES = (
    (64, 16384, 2304, torch.bfloat16),
    (512, 32768, 1024, torch.bfloat16),
    (4096, 16384, 2304, torch.bfloat16),
    (4096, 24576, 768, torch.bfloat16),
    (4096, 65536, 2304, torch.bfloat16),
    (2048, 16384, 1024, torch.float32),
)


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Small shapes for `quick` and on the CPU, beside the article's first shape, which is always there."""
    bf16, fp32 = torch.bfloat16, torch.float32
    small = quick or device.type == "cpu"
    yield decode("decode", 32, 65536, 768, 64, fp32, compiled=True)
    if small:
        yield decode("decode", 64, 4096, 256, 32, fp32)
        yield ready(32, 16384, 256, 64, fp32)
    else:
        for shape in ((256, 65536, 768, 64, fp32), (32, 131072, 512, 128, fp32)):
            yield decode("decode", *shape, compiled=True)
        for dtype in (bf16, fp32):
            yield decode("decode", 4096, 65536, 2304, 72, dtype, compiled=True)
        for shape in ((32, 65536, 768, 64, fp32), (256, 65536, 768, 64, fp32), (32, 131072, 512, 128, fp32)):
            yield ready(*shape)

    for name, F, D, l0 in REAL:
        if not small:
            yield decode("decode_real", 32, F, D, l0, fp32, compiled=True, SAE=name)
    F, D = (4096, 256) if small else (65536, 768)
    for l0 in (16, 128, 1024) if small else [1 << i for i in range(4, 15)]:
        yield decode("sweep_l0", 32, F, D, l0, fp32, sweep="L0")
    for width in (1024, 4096, 16384) if small else [1 << i for i in range(12, 18)]:
        yield decode("sweep_features", 32, width, D, 64, fp32, sweep="F")
    # The article's tables of its decoder alone, from rows that are packed already.
    for l0 in (16, 128) if small else (16, 32, 64, 128, 256, 512, 1024, 4096):
        yield ready(32, F, D, l0, fp32, name="ready_l0", sweep="L0")
    for width in (1024, 4096) if small else (4096, 16384, 32768, 65536, 131072):
        yield ready(32, width, D, 64, fp32, name="ready_features", sweep="F")
    if not small:
        for dtype in (bf16, fp32):
            yield ready(4096, 65536, 2304, 72, dtype)
    for B in (1, 16, 256) if small else (1, 4, 16, 64, 256, 1024, 4096):
        yield decode("sweep_batch", B, F, D, 64, fp32, sweep="B")
    for rows, latents, width, dtype in () if small else DENSITIES:
        for share in (512, 256, 128, 32, 16):
            case = decode("decode_density", rows, latents, width, latents // share, dtype)
            yield replace(case, providers=case.providers[:2])
    if device.type == "cuda":
        for B in (32, 256) if small else (32, 256, 1024):
            for capacity in (512, 1024):
                yield decode("memory", B, F, D, 64, fp32, capacity=capacity)
    shape = (64, 4096, 256, 32) if small else (4096, 65536, 2304, 72)
    for dtype in (fp32,) if device.type == "cpu" else (bf16, fp32):
        for forward in (False, True):
            yield _backward(*shape, dtype, forward)
        yield _backward(*shape, dtype, False, always=8)


def decode(
    name: str,
    B: int,
    F: int,
    D: int,
    l0: int,
    dtype: torch.dtype,
    *,
    sweep: str | None = None,
    compiled: bool = False,
    capacity: int | None = None,
    **parameters: Any,
) -> Case:
    slots = capacity or max(512, 1 << (l0 - 1).bit_length())

    def auto(acts: Tensor, W_dec: Tensor) -> Tensor:
        return sae.decode(acts, W_dec, capacity=capacity)

    def exact(acts: Tensor, W_dec: Tensor) -> Tensor:
        return rowsparse.matmul(rowsparse.pack(acts, capacity="exact"), W_dec)

    def fixed(acts: Tensor, W_dec: Tensor, validate: bool) -> Tensor:
        rows = rowsparse.pack(acts, capacity=slots)
        # As the article's kernel: rows that overflow are refused, or trusted not to exist.
        if validate and bool(rows.overflowed):
            raise ValueError(f"A row has more entries than {slots}.")
        return rowsparse.matmul(replace(rows, source=None), W_dec)

    providers = [
        Provider("gossamer", auto, ours=True, capturable=True),
        Provider("dense", torch_peers.dense, capturable=True),
    ]
    if not sweep:
        providers += [
            Provider("gossamer exact", exact, ours=True),
            Provider("gossamer fixed, validated", lambda *x: fixed(*x, validate=True), ours=True),
            Provider("gossamer fixed", lambda *x: fixed(*x, validate=False), ours=True, capturable=True),
        ]
    if dtype == torch.float32:
        high: dict[str, Any] = {"capturable": True, "precision": "high", "devices": ("cuda",)}
        providers += [
            Provider("gossamer at tf32", auto, ours=True, **high),
            Provider("dense tf32", torch_peers.dense, **high),
        ]
    if compiled:
        providers.append(Provider("torch.compile", torch_peers.compiled, capturable=True))
    providers += [
        Provider("torch.sparse", torch_peers.sparse_csr),
        Provider("nonzero + embedding_bag", torch_peers.embedding_bag),
        *_published_pipelines(slots),
    ]
    limit = {"capacity": capacity} if capacity else {}
    return Case(
        room="sae",
        name=name,
        parameters={**parameters, "B": B, "F": F, "D": D, "L0": l0, **limit},
        dtype=dtype,
        make=lambda device, generator: _inputs(B, F, D, l0, dtype, device, generator),
        providers=tuple(providers),
        reference=_reference,
        bytes=_moved(B * F, B, F, D, l0, dtype),
        flops=2 * B * l0 * D,
        sweep=sweep,
    )


def ready(
    B: int, F: int, D: int, l0: int, dtype: torch.dtype, *, name: str = "decode_ready", sweep: str | None = None
) -> Case:
    # As many as `pack` gives by itself, which says that rows may have few; more where rows have more.
    capacity = max(default_capacity(F), 1 << (l0 - 1).bit_length())
    return Case(
        room="sae",
        name=name,
        parameters={"B": B, "F": F, "D": D, "L0": l0},
        dtype=dtype,
        make=lambda device, generator: _inputs(B, F, D, l0, dtype, device, generator),
        providers=(*torch_peers.products_of_rows(sae.decode, capacity), *_published_ready(capacity)),
        reference=_reference,
        bytes=_moved(2 * B * l0, B, F, D, l0, dtype),
        flops=2 * B * l0 * D,
        sweep=sweep,
    )


def _backward(B: int, F: int, D: int, l0: int, dtype: torch.dtype, forward: bool, always: int = 0) -> Case:
    """Gradients of dense `acts` (or of the stored values) and `W_dec`, with the forward pass or without.

    `always` neighbouring latents fire in every row, as some do in trained autoencoders.
    """

    def make(device: torch.device, generator: torch.Generator) -> list[tuple[Tensor, ...]]:
        made = []
        for acts, W_dec in _inputs(B, F, D, l0, dtype, device, generator):
            acts[:, :always] = 1
            made.append((acts.requires_grad_(), W_dec.requires_grad_(), random_matrix(B, D, dtype, device, generator)))
        return made

    def reference(acts: Tensor, W_dec: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        acts, W_dec, grad = acts.detach(), W_dec.detach().double(), grad.double()
        return (grad @ W_dec.T).mul_(acts != 0), acts.double().T @ grad

    def stored_only(grads: tuple[Tensor, Tensor], acts: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0] * (acts != 0), grads[1]

    def pack(acts: Tensor) -> rowsparse.Rows:
        rows = rowsparse.pack(acts.detach(), capacity=max(128, 1 << (l0 + always - 1).bit_length())).complete()
        rows.values.requires_grad_()
        return rows

    def scatter(grads: tuple[Tensor, Tensor], acts: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        rows = pack(acts)
        dense = torch.zeros(B, F + 1, dtype=grads[0].dtype, device=acts.device)
        columns = torch.where(rows.indices < 0, F, rows.indices).long().view(B, -1)
        return dense.scatter_(1, columns, grads[0].view(B, -1))[:, :F], grads[1]

    def provider(name: str, decode: Any, ours: bool, rows: bool = False) -> Provider:
        def values(acts: Any) -> Tensor:
            return acts.values if rows else acts

        def prepare(acts: Tensor, W_dec: Tensor, grad: Tensor) -> tuple[Any, ...]:
            first = pack(acts) if rows else acts
            return (first, W_dec, grad) if forward else (first, W_dec, grad, decode(first, W_dec))

        def call(acts: Any, W_dec: Tensor, grad: Tensor, out: Tensor | None = None) -> tuple[Tensor, ...]:
            again = out is not None
            out = decode(acts, W_dec) if out is None else out
            return torch.autograd.grad(out, (values(acts), W_dec), grad, retain_graph=again)

        return Provider(name, call, ours=ours, prepare=prepare, result=scatter if rows else stored_only)

    item = dtype.itemsize
    passes = 3 if forward else 2
    return Case(
        room="sae",
        name="forward_backward" if forward else "backward",
        parameters={"B": B, "F": F, "D": D, "L0": l0} | ({"always": always} if always else {}),
        dtype=dtype,
        make=make,
        providers=(
            provider("gossamer", sae.decode, ours=True),
            provider("gossamer from ELL", sae.decode, ours=True, rows=True),
            provider("dense", torch_peers.dense, ours=False),
        ),
        reference=reference,
        # Stored values only: the entries and their gradients, W_dec read, its gradient written, grad read.
        bytes=2 * B * (l0 + always) * (item + 4) + (min(B * l0, F) + F) * D * item + B * D * item,
        flops=passes * 2 * B * (l0 + always) * D,
        grad=True,
    )


def _published_pipelines(max_l0: int) -> list[Provider]:
    def decode(acts: Tensor, W_dec: Tensor, validate: bool) -> Tensor:
        from benchmarks.peers import jumprelu_sae_kernels

        return jumprelu_sae_kernels.decode_fixed(acts, W_dec, max_l0, validate)

    def exact(acts: Tensor, W_dec: Tensor) -> Tensor:
        from benchmarks.peers import jumprelu_sae_kernels

        return jumprelu_sae_kernels.decode_exact(acts, W_dec)

    return [
        Provider("jumprelu-sae-kernels, exact", exact, devices=("cuda",)),
        Provider("jumprelu-sae-kernels, fixed, validated", lambda *x: decode(*x, validate=True), devices=("cuda",)),
        Provider(
            "jumprelu-sae-kernels, fixed, unsafe",
            lambda *x: decode(*x, validate=False),
            devices=("cuda",),
            capturable=True,
        ),
    ]


def _published_ready(max_l0: int) -> list[Provider]:
    def exact(acts: Tensor, W_dec: Tensor) -> tuple[Any, Tensor]:
        from benchmarks.peers import jumprelu_sae_kernels

        return jumprelu_sae_kernels.pack_exact(acts), W_dec

    def fixed(acts: Tensor, W_dec: Tensor) -> tuple[Any, Tensor]:
        from benchmarks.peers import jumprelu_sae_kernels

        return jumprelu_sae_kernels.pack_fixed(acts, max_l0), W_dec

    def decode(rows: Any, W_dec: Tensor) -> Tensor:
        from benchmarks.peers import jumprelu_sae_kernels

        return jumprelu_sae_kernels.decode_packed(rows, W_dec)

    return [
        Provider("jumprelu-sae-kernels, exact", decode, prepare=exact, devices=("cuda",), capturable=True),
        Provider("jumprelu-sae-kernels, fixed", decode, prepare=fixed, devices=("cuda",), capturable=True),
    ]


def _inputs(
    B: int, F: int, D: int, l0: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Sequence[tuple[Tensor, Tensor]]:
    """Copies of `acts`; a `W_dec` too large for the cache is shared, for each copy gathers other rows of it."""
    shared = F * D * dtype.itemsize > 150 << 20
    count = copies(device, _moved(B * F, B, F, D, l0, dtype) if shared else (B + D) * F * dtype.itemsize)
    weights = [random_matrix(F, D, dtype, device, generator) for _ in range(1 if shared else count)]
    return [(random_rows(B, F, l0, dtype, device, generator), weights[0 if shared else i]) for i in range(count)]


def _reference(acts: Tensor, W_dec: Tensor) -> tuple[Tensor]:
    return (acts.double() @ W_dec.double(),)


def _moved(entries: int, B: int, F: int, D: int, l0: int, dtype: torch.dtype) -> int:
    """Least bytes: the entries read, each gathered row of `W_dec` at most once, the output written."""
    return (entries + min(B * l0, F) * D + B * D) * dtype.itemsize
