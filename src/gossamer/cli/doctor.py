"""`gossamer doctor`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from gossamer.cli.environment import describe, devices, versions
from gossamer.cli.self_check import checks, watched

# On a GPU the first call of each kernel compiles it.
_SECONDS = {"cpu": 10.0, "cuda": 120.0}
_LEAST = (8, 0)
Paths = dict[str, dict[str, dict[str, str]]]


def doctor() -> None:
    """Show versions and devices, name the code that computes each function on them, and check its results.

    The check computes the functions on small random data on every device, and compares with float64: seconds on a CPU,
    up to two minutes on a GPU that has compiled nothing yet. The exit code is 1 if anything differs or raises.
    """
    console = Console()
    console.print(_versions())
    if (kernels := cache()).is_dir():
        size = sum(file.stat().st_size for file in kernels.rglob("*") if file.is_file())
        console.print(f"compiled kernels: {_readable('_bytes', size)} in {kernels}", markup=False, soft_wrap=True)
    found = [device for device in devices() if _usable(device, console)]
    if len(found) == 1:
        console.print("no GPU that gossamer can use: every function runs as PyTorch code on the CPU")
    paths: Paths = {}
    failures = [failure for device in found for failure in _self_check(device, paths, console)]
    console.print(_functions(paths, found))
    for failure in failures:
        console.print(f"FAILED {failure}", style="bold red", markup=False, soft_wrap=True)
    if failures:
        raise typer.Exit(1)
    console.print("[bold green]all is well[/]")


def cache() -> Path:
    """The folder in which Triton keeps compiled kernels."""
    home = os.environ.get("TRITON_HOME") or Path.home()
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache"))


def _versions() -> Table:
    table = Table(title="versions", title_justify="left")
    table.add_column("package")
    table.add_column("version")
    for package, version in versions().items():
        table.add_row(package, version or "[dim]not installed[/]")
    return table


def _usable(device: torch.device, console: Console) -> bool:
    """Whether gossamer runs on a device, which it describes."""
    console.print(f"{device}: " + ", ".join(f"{k} {_readable(k, v)}" for k, v in describe(device).items()))
    if device.type != "cuda":
        return True
    from gossamer._core import tuning

    if not torch.version.hip and torch.cuda.get_device_capability(device) < _LEAST:
        console.print(f"{device}: its compute capability is below {_LEAST[0]}.{_LEAST[1]}, which the kernels need")
        return False
    known = tuning.rates(device.index).measured
    basis = "were measured on such a GPU" if known else "come from a model of bytes and operations, not measured here"
    console.print(f"{device}: the choices between paths {basis}")
    return True


def _readable(key: str, value: Any) -> str:
    return f"{value / 2**30:.3g} GiB" if key.endswith("_bytes") else str(value)


def _self_check(device: torch.device, paths: Paths, console: Console) -> list[str]:
    """The failures on a device. `paths` gets each path by function and device, and the first variant that took it."""
    failures, done, missed = [], 0, 0
    start, most = time.monotonic(), _SECONDS[device.type]
    for check in checks(device):
        if time.monotonic() - start > most:
            missed += 1
            continue
        with console.status(f"{device}: {check}"):
            try:
                with watched() as kinds:
                    error = check.difference()
            except Exception as raised:
                failures.append(f"{check} on {device}: {type(raised).__name__}: {raised}")
                continue
        done += 1
        path = " and ".join(sorted(kinds)) or "PyTorch"
        taken = paths.setdefault(check.name, {}).setdefault(str(device), {})
        taken.setdefault(path, check.variant)
        if not error <= check.budget:
            failures.append(f"{check} on {device}: differs from float64 by {error:.2g}, more than {check.budget:g}")
    console.print(f"{device}: {done} results compared in {time.monotonic() - start:.1f} s")
    if missed:
        console.print(f"{missed} checks were not run: {most:g} s were spent", style="yellow")
    return failures


def _functions(paths: Paths, found: list[torch.device]) -> Table:
    """The path of each public function in the check, device by device."""
    table = Table(title="the code that computes each function", title_justify="left")
    for column in ("function", *map(str, found)):
        table.add_column(column)
    for name, by_device in paths.items():
        table.add_row(name, *(_listed(by_device.get(str(device), {})) for device in found))
    return table


def _listed(taken: dict[str, str]) -> str:
    """The usual path, and each other path with the variants that take it."""
    shown = [f"{path} ({variant})" if number else path for number, (path, variant) in enumerate(taken.items())]
    return "; ".join(shown) or "-"
