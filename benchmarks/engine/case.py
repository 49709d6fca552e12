"""Cases, their providers, and the search for them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

Inputs = tuple[Any, ...]
Tensors = tuple[Tensor, ...]

# Largest relative error of a row against float64. One entry lost among 16,384 shows in float32, among 500 in bfloat16.
BUDGETS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
TF32_BUDGET = 2e-3


def relative_error(got: Tensors, want: Tensors) -> float:
    """Largest `norm(got - want) / norm(want)` of any row (last dimension); infinite where shape or NaN differ.

    Rows are judged one by one, for one lost entry vanishes in the norm of a large matrix. Rows far below the
    matrix's mean norm are measured against a thousandth of that mean.
    """
    if len(got) != len(want):
        return float("inf")
    worst = 0.0
    for a, b in zip(got, want):
        if a.shape != b.shape:
            return float("inf")
        if b.numel() == 0:
            continue
        norms = b.double().norm(dim=-1)
        floor = norms.square().mean().sqrt() * 1e-3 + torch.finfo(torch.float32).tiny
        errors = (a.double() - b.double()).norm(dim=-1) / norms.clamp_min(floor)
        worst = max(worst, float("inf") if errors.isnan().any() else errors.max().item())
    return worst


def error_beside_mean(got: Tensors, want: Tensors) -> float:
    """Largest error of a row over its norm or the mean norm of rows, whichever is more.

    For gradients and single products, some rows of which cancel: no relative error can judge these.
    """
    errors = []
    for a, b in zip(got, want, strict=True):
        norm = b.double().norm(dim=-1)
        errors.append(((a.double() - b.double()).norm(dim=-1) / norm.clamp(min=norm.mean())).max())
    return float(torch.stack(errors).max().nan_to_num(nan=torch.inf))


def absolute_error(got: Tensors, want: Tensors) -> float:
    """Largest difference of an element; infinite where shape or NaN differ."""
    if [a.shape for a in got] != [b.shape for b in want]:
        return float("inf")
    errors = [(a.double() - b.double()).abs().max() for a, b in zip(got, want) if b.numel()]
    return float(torch.stack(errors).max().nan_to_num(nan=torch.inf)) if errors else 0.0


@dataclass(frozen=True)
class Provider:
    """One way to compute a case.

    `prepare` makes the positional arguments of `call` from the case's inputs, which are the arguments by default. Only
    `call` is timed. `result(output, *inputs)` turns its output into the tensors that the reference gives. `capturable`
    providers are timed in a CUDA graph too. A `partial` provider does less than the case asks: it is shown, but is no
    peer to be best. `precision` is the float32 matmul precision. A provider that raises `ModuleNotFoundError` is
    skipped, and the table says so.
    """

    name: str
    call: Callable[..., Any]
    ours: bool = False
    prepare: Callable[..., Inputs] | None = None
    result: Callable[..., Tensors] | None = None
    capturable: bool = False
    partial: bool = False
    precision: str = "highest"
    devices: tuple[str, ...] = ("cpu", "cuda")

    def missing(self, device: torch.device) -> str | None:
        """Why it cannot run here, or None."""
        if not self.devices:
            return "does not take this case"
        return None if device.type in self.devices else f"needs {' or '.join(self.devices)}"


@dataclass(frozen=True)
class Case:
    """One measurement: inputs, the ways to compute them, and the least work that any of them must do.

    `make` returns as many independent copies of the inputs as it takes to exceed the cache (see `copies`); calls
    rotate among them. `bytes` and `flops` are the least that must be moved and computed. `reference` computes in
    float64, and `error` measures a result against it; with `atol`, the largest difference of an element does. `sweep`
    names the parameter along which cases of this name are plotted. With `energy` the energy of a call is measured as
    well. `tokens` is how many tokens a call takes; rate and energy are then given per token.
    """

    room: str
    name: str
    parameters: Mapping[str, int | str]
    dtype: torch.dtype
    make: Callable[[torch.device, torch.Generator], Sequence[Inputs]]
    providers: tuple[Provider, ...]
    reference: Callable[..., Tensors]
    bytes: int
    flops: int
    sweep: str | None = None
    grad: bool = False
    energy: bool = False
    error: Callable[[Tensors, Tensors], float] = field(default=relative_error)
    budget: float | None = None
    tokens: int | None = None
    atol: float | None = None

    @property
    def id(self) -> str:
        """`room/name/PARAMETER=value,...,dtype`: the name for `--case` and in `--list`."""
        parts = [f"{key}={value}" for key, value in self.parameters.items()]
        return f"{self.room}/{self.name}/{','.join([*parts, _dtype_name(self.dtype)])}"

    def budget_of(self, provider: Provider) -> float:
        """The error that `provider` may make; tf32 products get more."""
        if self.atol is not None:
            return self.atol
        if self.dtype == torch.float32 and provider.precision != "highest":
            return TF32_BUDGET
        return BUDGETS[self.dtype] if self.budget is None else self.budget


def copies(device: torch.device, touched: int, limit: int = 512) -> int:
    """How many copies of inputs, of which one call touches `touched` bytes, exceed the last cache three times."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 32 << 20
    return max(1, min(limit, -(-3 * cache // max(1, touched))))


def random_matrix(
    rows: int, columns: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Tensor:
    """Dense [rows, columns] of standard normal numbers, drawn in float32."""
    return torch.randn(rows, columns, device=device, generator=generator).to(dtype)


def random_rows(
    rows: int, columns: int, nnz: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Tensor:
    """Dense [rows, columns] with exactly `nnz` positive entries a row at random columns, zero elsewhere."""
    out = torch.zeros(rows, columns, dtype=dtype, device=device)
    chunk = max(1, (1 << 26) // columns)
    for start in range(0, rows, chunk):
        part = out[start : start + chunk]
        keys = torch.rand(part.shape, device=device, generator=generator)
        values = torch.randn(len(part), nnz, device=device, generator=generator).abs() + 0.1
        part.scatter_(1, keys.topk(nnz, dim=1, sorted=False).indices, values.to(dtype))
    return out


def load_cases(
    folder: Path,
    room: str | None,
    pattern: str | None,
    device: torch.device,
    quick: bool,
    given: Mapping[str, Any] = MappingProxyType({}),
    provider: str | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Case]:
    """The cases of `folder/<room>/bench_*.py`, each file giving `cases(device, quick)`, that match `pattern`.

    `given` may hold "lengths", "dtype" and "batch". They are arguments of `cases` where a file's function takes them.
    Cases that have something else are left out, and `tell` gets a line about them. With `provider`, only
    providers whose name matches, and cases that have one. Raises ValueError where there is no room, case or
    provider, and where no case is left.
    """
    files = sorted(folder.glob("*/bench_*.py"))
    rooms = sorted({file.parent.name for file in files})
    if room is not None and room not in rooms:
        raise ValueError(f"benchmarks: ROOM must be one of {', '.join(rooms)}, got {room!r}.")
    import_path(folder)
    found: list[Case] = []
    for file in files:
        if room in (None, file.parent.name):
            module = import_module(f"{folder.name}.{file.parent.name}.{file.stem}")
            taken = given.keys() & signature(module.cases).parameters.keys()
            made = list(module.cases(device, quick, **{name: given[name] for name in taken}))
            fit = [case for case in made if _has(case, **given)]
            if len(fit) < len(made):
                tell(f"left out: {len(made) - len(fit)} of {len(made)} cases of {file.parent.name}/{file.name}")
            found += fit
    if given and not found:
        asked = " and ".join(_OPTIONS[name] for name in given)
        raise ValueError(f"benchmarks: no case of {room or 'any room'} has that {asked}; --list shows every case.")
    if provider is not None:
        found = _by_provider(found, provider)
    if pattern is None:
        return found
    chosen = [c for c in found if any(fnmatchcase(name, pattern) for name in (c.name, c.id, c.id.split("/", 1)[1]))]
    if not chosen:
        names = sorted({case.name for case in found})
        raise ValueError(
            f"benchmarks: --case must match a name ({', '.join(names)}) or an id (see --list), got {pattern!r}."
        )
    return chosen


_OPTIONS = {"lengths": "--length", "dtype": "--dtype", "batch": "--batch"}


def _has(
    case: Case, lengths: Sequence[int] | None = None, dtype: torch.dtype | None = None, batch: int | None = None
) -> bool:
    """Whether a case has one of these lengths T, this dtype, and this number B of sequences."""
    T, B = case.parameters.get("T"), case.parameters.get("B")
    of_sequences = (lengths is None or T in lengths) and (batch is None or (batch == B and T is not None))
    return of_sequences and dtype in (None, case.dtype)


def import_path(folder: Path) -> None:
    """Lets the files of `benchmarks` be imported."""
    if str(folder.parent) not in sys.path:
        sys.path.insert(0, str(folder.parent))


def _by_provider(cases: list[Case], pattern: str) -> list[Case]:
    """The cases with those of their providers whose name matches, without those that have none."""
    fewer = [
        replace(case, providers=tuple(p for p in case.providers if fnmatchcase(p.name, pattern))) for case in cases
    ]
    if not any(case.providers for case in fewer):
        names = sorted({provider.name for case in cases for provider in case.providers})
        raise ValueError(f"benchmarks: --provider must match one of {', '.join(names)}, got {pattern!r}.")
    return [case for case in fewer if case.providers]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
