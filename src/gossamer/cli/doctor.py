"""`gossamer doctor`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from gossamer import gemm, rowsparse, sae
from gossamer.cli.environment import describe, devices, versions

# What a float32 result may differ from float64 at these sizes, relative to the largest element.
_BUDGET = 1e-5
_SECONDS = 10.0

Check = tuple[str, Callable[[], Tensor], Tensor]


def doctor() -> None:
    """Show versions and devices, say which kernels run where, and check every operator.

    The check computes the public functions on small random data on every device, within ten seconds, and compares
    with float64. The exit code is 1 if anything differs or raises.
    """
    console = Console()
    console.print(_versions())
    found = devices()
    for device in found:
        console.print(f"{device}: " + ", ".join(f"{k} {_readable(k, v)}" for k, v in describe(device).items()))
    if len(found) == 1:
        console.print("no GPU: every operator runs as PyTorch code on the CPU")
    console.print(_kernels())
    failures = _self_check(found, console)
    for failure in failures:
        console.print(f"FAILED {failure}", style="bold red", markup=False, soft_wrap=True)
    if failures:
        raise typer.Exit(1)
    console.print("[bold green]all is well[/]")


def _versions() -> Table:
    table = Table(title="versions", title_justify="left")
    table.add_column("package")
    table.add_column("version")
    for package, version in versions().items():
        table.add_row(package, version or "[dim]not installed[/]")
    return table


def _readable(key: str, value: Any) -> str:
    return f"{value / 2**30:.3g} GiB" if key.endswith("_bytes") else str(value)


def _kernels() -> Table:
    """The registered operators and the dispatch keys that they have an implementation of their own for."""
    table = Table(title="operators", title_justify="left")
    for column in ("operator", "CPU (PyTorch)", "CUDA (Triton)", "gradient"):
        table.add_column(column)
    names = sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("gossamer::"))
    for name in names:
        has = [torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in ("CPU", "CUDA", "Autograd")]
        table.add_row(name.removeprefix("gossamer::"), *("yes" if each else "-" for each in has))
    return table


def _self_check(found: list[torch.device], console: Console) -> list[str]:
    failures, done, missed = [], 0, 0
    start = time.monotonic()
    for device in found:
        for name, compute, want in _checks(device):
            if time.monotonic() - start > _SECONDS:
                missed += 1
                continue
            with console.status(f"{device}: {name}"):
                try:
                    error = _difference(compute(), want)
                except Exception as raised:
                    failures.append(f"{name} on {device}: {type(raised).__name__}: {raised}")
                    continue
            done += 1
            if not error <= _BUDGET:
                failures.append(f"{name} on {device}: differs from float64 by {error:.2g}, more than {_BUDGET:g}")
    console.print(f"self-check: {done} results compared in {time.monotonic() - start:.1f} s")
    if missed:
        console.print(f"{missed} checks were not run: {_SECONDS:g} s were spent", style="yellow")
    return failures


def _difference(got: Tensor, want: Tensor) -> float:
    if got.shape != want.shape:
        raise ValueError(f"shape {list(got.shape)} where {list(want.shape)} was expected")
    worst = ((got.double() - want).abs().max() / want.abs().max()).item()
    return float("inf") if worst != worst else worst


def _checks(device: torch.device) -> Iterator[Check]:
    """(name, the function under test, its result in dense float64) of the public functions."""
    M, N, D, k = 7, 300, 40, 5
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    acts = randn(M, N)
    acts[acts < 1.5] = 0
    weight, bias, x, W_enc, b_enc = randn(N, D), randn(D), randn(M, D), randn(D, N), randn(N)
    dense = acts.double()
    product = dense @ weight.double()

    def packed(**options: Any) -> Tensor:
        return rowsparse.unpack(rowsparse.pack(acts, **options))

    def multiplied(**options: Any) -> Tensor:
        return rowsparse.matmul(rowsparse.pack(acts, **options), weight)

    def transposed(**options: Any) -> Tensor:
        return rowsparse.unpack(rowsparse.transpose(rowsparse.pack(acts, **options)))

    def sampled() -> Tensor:
        return rowsparse.unpack(rowsparse.sampled_matmul(x, weight, rowsparse.pack(acts)))

    def encoded(**options: Any) -> Tensor:
        return rowsparse.unpack(sae.encode(x, W_enc, b_enc, **options))

    def activated(format: str) -> Tensor:
        return rowsparse.unpack(gemm.linear_pack(x, W_enc.t(), b_enc, format=format)[0])

    packs: dict[str, dict[str, Any]] = {"ELL": {}, "ELL, overflowing": {"capacity": 2}, "CSR": {"format": "csr"}}
    for name, options in packs.items():
        yield f"rowsparse.pack ({name})", partial(packed, **options), dense
        yield f"rowsparse.matmul ({name})", partial(multiplied, **options), product
        yield f"rowsparse.transpose ({name})", partial(transposed, **options), dense.T
    yield "rowsparse.sampled_matmul", sampled, (x.double() @ weight.double().T) * (dense != 0)
    for method in ("auto", "exact", "fixed", "dense"):
        decode = partial(sae.decode, acts, weight, bias, method=method, capacity=N)
        yield f"sae.decode ({method})", decode, product + bias.double()
    yield (
        "gradients of sae.decode",
        partial(_gradients, sae.decode, acts, weight),
        _gradients(torch.matmul, dense, weight.double()),
    )
    z = x.double() @ W_enc.double() + b_enc.double()
    threshold = torch.full((N,), 2.0, device=device)
    yield "sae.encode (relu)", encoded, z.relu()
    jumprelu = partial(encoded, activation=gemm.JumpReLU(threshold))
    yield "sae.encode (jumprelu)", jumprelu, torch.where(z > 2.0, z, 0)
    yield "sae.encode (topk)", partial(encoded, activation=gemm.TopK(k)), _largest(z, k)
    batchtopk = partial(encoded, activation=gemm.BatchTopK(k))
    yield "sae.encode (batchtopk)", batchtopk, _largest(z.flatten(), k * M).view_as(z)
    scale = W_enc.norm(dim=0)
    tanh = torch.tanh(scale.double() * dense).sum(-1)
    yield "sae.tanh_l0", lambda: sae.tanh_l0(rowsparse.pack(acts), scale), tanh
    # In weights of a layer rows are what comes out.
    gate, up = W_enc.t() / D**0.5, randn(N, D) / D**0.5
    hidden = torch.nn.functional.silu(x.double() @ gate.double().t()) * (x.double() @ up.double().t())
    yield "gemm.linear_glu", partial(gemm.linear_glu, x, gate, up), hidden
    yield "gemm.gated_mlp", partial(gemm.gated_mlp, x, gate, up, weight.t()), hidden @ weight.double()
    for format in ("twell", "ell"):
        yield f"gemm.linear_pack ({format})", partial(activated, format), z.relu()


def _largest(z: Tensor, k: int) -> Tensor:
    values, indices = z.topk(k, dim=-1)
    return torch.zeros_like(z).scatter(-1, indices, values.relu())


def _gradients(decode: Callable[[Tensor, Tensor], Tensor], acts: Tensor, weight: Tensor) -> Tensor:
    """Both gradients of a sum of squares in one vector."""
    acts, weight = acts.detach().requires_grad_(), weight.detach().requires_grad_()
    grads = torch.autograd.grad(decode(acts, weight).square().sum(), (acts, weight))
    return torch.cat([grad.flatten() for grad in (grads[0] * (acts != 0), grads[1])])
