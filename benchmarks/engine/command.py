"""`python -m benchmarks`."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.engine import random_cases, report
from benchmarks.engine.case import Case, load_cases
from benchmarks.engine.profiling import profile_cases
from benchmarks.engine.random_cases import draw_cases
from benchmarks.engine.runner import CaseResult, Settings, run_case
from benchmarks.engine.timing import Ceilings, measure_ceilings
from benchmarks.provenance import provenance
from gossamer._core.files import make_folder
from gossamer.cli.environment import describe, resolve_device

BENCHMARKS = Path(__file__).parents[1]
_ROOMS = ", ".join(sorted({file.parent.name for file in BENCHMARKS.glob("*/bench_*.py")}))


def bench(
    room: str | None = typer.Argument(
        None, help=f"The room to measure: {_ROOMS}. All of them by default; sweep draws shapes at random."
    ),
    case: str | None = typer.Option(None, metavar="GLOB", help="Only cases whose name or id matches, as 'decode*'."),
    device: str = typer.Option("auto", help="auto (the GPU if there is one), cpu, cuda, cuda:1, ..."),
    quick: bool = typer.Option(False, "--quick", help="Small sizes and few rounds: does it run, not how fast it is."),
    rounds: int | None = typer.Option(
        None, min=1, help="Rounds over all providers. 10 by default, 5 on the CPU and in a sweep, 3 with --quick."
    ),
    out: Path | None = typer.Option(None, metavar="DIR", help="Where results go. benchmarks/results by default."),
    budget: float = typer.Option(
        float("inf"), metavar="SECONDS", help="Start no further case after this time; the first always runs."
    ),
    seed: int = typer.Option(0, help="Seed of the random inputs, and of the shapes of a sweep."),
    list_cases: bool = typer.Option(False, "--list", help="Print the ids of the cases and leave."),
    swept: str | None = typer.Option(None, "--room", help="Of a sweep: the room to sweep. All that can be by default."),
    count: int | None = typer.Option(None, "--cases", min=1, help="Of a sweep: cases of each room. 200 by default."),
    wild: bool = typer.Option(
        False, "--wild", help="Of a sweep: draw from ranges beyond the sizes and densities that the rooms are for."
    ),
    length: list[int] = typer.Option(
        [], min=64, help="Only cases of sequences of this length; the room attention makes them. Repeatable."
    ),
    dtype: str | None = typer.Option(None, help="Only cases of float32, float16 or bfloat16; attention makes them."),
    batch: int | None = typer.Option(None, min=1, help="Only cases of so many sequences; attention makes them."),
    provider: str | None = typer.Option(None, metavar="GLOB", help="Only providers whose name matches, as 'goss*'."),
    resume: bool = typer.Option(
        False, "--resume", help="Of a sweep: keep the cases that its file has already, and measure the others."
    ),
    skip_verify: bool = typer.Option(False, "--skip-verify", help="Time results that nobody has checked."),
    verify_length: int | None = typer.Option(None, min=64, help="Check results of this length alone; time the others."),
    atol: float | None = typer.Option(None, min=0, help="Largest error of an element, instead of each row's relative."),
    profile: bool = typer.Option(
        False, "--profile", help="Three calls of each provider for nsys --capture-range=cudaProfilerApi; no timing."
    ),
    ncu: bool = typer.Option(False, "--ncu", help="One call of each provider for ncu --profile-from-start off."),
) -> None:
    """Measure gossamer beside its peers.

    Every provider is checked against float64 before it is timed; all are timed in turn. Writes JSON and a plot per
    sweep. The exit code is 1 if any provider is wrong or one of ours fails.

    A sweep (`python -m benchmarks sweep`) draws shapes, dtypes and densities at random, over ranges that each room
    states as those it is for (with --wild, over wider ones), and says how often, how far and where gossamer is slower
    than dense PyTorch and the best peer. A provider is timed for a quarter of a second at most. A sweep that is stopped
    keeps its cases; --resume goes on with it.
    """
    folder = BENCHMARKS
    if not budget > 0:
        _fail(f"benchmarks: --budget must be positive, got {budget:g}; leave it out to run every case.")
    sweeps = room == "sweep"
    given = _given(length, dtype, batch)
    _refuse_mixed(sweeps, swept or count or resume or wild, case or provider or given or verify_length)
    where = _device(device)
    # Processes that compile ahead would take the host's time from the measurement.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    try:
        if sweeps:
            cases = draw_cases(folder, swept, count or (5 if quick else 200), seed, where, quick, wild)
        else:
            cases = load_cases(folder, room, case, where, quick, given, provider, partial(typer.echo, err=True))
        checked = _of_length(cases, folder, room, where, quick, given, provider, verify_length)
    except ValueError as error:
        _fail(str(error))
    cases, checked = ([replace(each, atol=atol) for each in some] for some in (cases, checked))
    if list_cases:
        typer.echo("\n".join(c.id for c in cases))
        return
    if profile or ncu:
        profile_cases(cases, where, seed, 1 if ncu else 3, typer.echo, apart=ncu)
        return
    _verify(checked, where, seed)
    settings = _settings(where, rounds, quick, sweeps, budget, not (skip_verify or verify_length))
    own = [swept or slug(case or ""), *map(str, length), dtype or "", f"batch-{batch}" if batch else ""]
    own += [slug(provider or ""), "unverified" * skip_verify, "wild" * wild, slug(describe(where)["name"])]
    path = _path(out or folder / "results", [room or "all", *own, "quick" * quick])
    made = provenance(command_line("python -m benchmarks", sys.argv[1:]), folder.parent, where)
    settled = {name: getattr(settings, name) for name in ("rounds", "burst", "verify")}
    asked = {"verify_length": verify_length, "atol": atol, "limit": settings.limit if sweeps else None}
    settled |= {"seed": seed, "quick": quick} | {name: value for name, value in asked.items() if value is not None}
    log = _Log(path, made | {"settings": settled, "cases": []}, sweeps)
    if resume:
        log.resume()
    results = _measured(cases, log, where, settings, seed, quick)
    if any(result.failed for result in results):
        raise typer.Exit(1)


def _of_length(
    cases: list[Case], folder: Path, room: str | None, where: torch.device, quick: bool, given: dict[str, Any],
    provider: str | None, length: int | None,
) -> list[Case]:  # fmt: skip
    """The cases of this length that have the names of `cases`; none without a length."""
    if length is None:
        return []
    names = {case.name for case in cases}
    found = load_cases(folder, room, None, where, quick, {**given, "lengths": (length,)}, provider)
    return [case for case in found if case.name in names]


def _verify(cases: list[Case], where: torch.device, seed: int) -> None:
    """Checks all ways of the cases, and says how far off each is; leaves with 1 where one is wrong."""
    failed = False
    for case in cases:
        result = run_case(case, where, Settings(rounds=1, burst=0.0), seed)
        errors = [f"{o.provider.name} {o.error:.2g}" for o in result.outcomes if o.error is not None]
        typer.echo("\n  ".join([f"checked {case.id}: {', '.join(errors)}", *report.notes(result)]))
        failed |= result.failed
    if failed:
        raise typer.Exit(1)


def _path(folder: Path, parts: list[str]) -> Path:
    """The file of these parts in a folder, which is there then."""
    try:
        make_folder("benchmarks", "--out", folder)
    except ValueError as error:
        _fail(str(error))
    return folder / f"{'-'.join(filter(None, parts))}.json"


def _settings(
    where: torch.device, rounds: int | None, quick: bool, sweeps: bool, budget: float, verify: bool
) -> Settings:
    usual, seconds = (10, 0.003) if where.type == "cuda" else (5, 0.02)
    most = rounds or (3 if quick else min(usual, 5) if sweeps else usual)
    seconds = min(seconds, 0.002) if sweeps and not quick else seconds
    limit = random_cases.LIMIT if sweeps else math.inf
    return Settings(most, seconds, time.monotonic() + budget, verify, limit)


class _Log:
    """A run's file: the cases measured so far, and in `not_run` the others. A killed run keeps it."""

    def __init__(self, path: Path, content: dict[str, Any], sweeps: bool) -> None:
        """Every case is written at once; the hundreds of cases of a sweep every few seconds."""
        self.path, self.content, self.sweeps = path, content, sweeps
        self._begun, self._before, self._written = time.monotonic(), 0.0, -math.inf

    def resume(self) -> None:
        """Takes the cases that the file holds, if ours was timed. Leaves with a message where they were measured
        otherwise."""
        if not self.path.is_file():
            return
        kept = json.loads(self.path.read_text())
        for name in ("settings", "device", "versions", "commit"):
            if kept.get(name) != self.content[name]:
                _fail(
                    f"benchmarks sweep: --resume needs the {name} that {self.path} was made with, "
                    f"{kept.get(name)}, got {self.content[name]}. Leave out --resume, or choose another --out."
                )
        timed = [case for case in kept["cases"] if any(p["ours"] and p["eager"] for p in case["providers"])]
        self.content["cases"], self._before = timed, kept.get("seconds", 0.0)

    def add(self, record: dict[str, Any], left: list[str]) -> None:
        self.content["cases"].append(record)
        self.left(left)
        if not self.sweeps or time.monotonic() - self._written > _PAUSE:
            self.write()

    def left(self, cases: list[str]) -> None:
        self.content.pop("not_run", None)
        if cases:
            self.content["not_run"] = cases

    def write(self) -> None:
        if self.sweeps:
            self.content["seconds"] = self._before + time.monotonic() - self._begun
            self.content["summary"] = random_cases.summary(self.content["cases"])
        report.write_json(self.path, self.content)
        self._written = time.monotonic()


_PAUSE = 3.0


def _measured(
    cases: list[Case], log: _Log, where: torch.device, settings: Settings, seed: int, quick: bool
) -> list[CaseResult]:
    """Runs the cases, prints and writes each as soon as it is done, and then concludes."""
    console = report.make_console()
    results: list[CaseResult] = []
    content, sweeps = log.content, log.sweeps
    done = {record["id"] for record in content["cases"]}
    todo = [case for case in cases if case.id not in done]
    if done:
        console.print(f"{len(done)} cases are kept from {log.path}", markup=False)
    bar = Progress(
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        auto_refresh=False,  # a thread that redraws while a burst is timed would slow the launches
    )
    try:
        with bar:
            task = bar.add_task("ceilings", total=len(todo))
            ceilings = measure_ceilings(where, quick)
            content["ceilings"] = {"bandwidth": ceilings.bandwidth, "gemm": ceilings.gemm}
            name = describe(where)["name"]
            console.print(
                f"{name}: copy {ceilings.bandwidth * 1e-9:,.0f} GB/s; "
                + "; ".join(f"{kind} GEMM {rate * 1e-12:,.2f} TFLOP/s" for kind, rate in ceilings.gemm.items())
            )
            log.left([c.id for c in todo])
            for number, item in enumerate(todo):
                if results and time.monotonic() > settings.deadline:
                    break

                def tell(what: str, item_id: str = item.id) -> None:
                    bar.update(task, description=f"{item_id}: {what}")
                    bar.refresh()

                result = run_case(item, where, settings, seed, tell)
                log.add(report.record(result, ceilings), [c.id for c in todo[number + 1 :]])
                results.append(result)
                shown = random_cases.line(content["cases"][-1]) if sweeps else report.case_table(result, ceilings)
                console.print(shown)
                for note in report.notes(result):
                    console.print(f"  {note}", style="red", markup=False)
                bar.advance(task)
            bar.update(task, description="done")
            log.write()
    except KeyboardInterrupt:
        if results:
            log.write()
        kept = f"the finished cases are in {log.path}" if results else "nothing was written"
        raise KeyboardInterrupt(kept) from None
    except Exception:
        # After some errors a GPU does nothing more in this process.
        if results:
            log.write()
        raise
    _conclude(console, log, results, ceilings, name)
    return results


def _conclude(console: Console, log: _Log, results: list[CaseResult], ceilings: Ceilings, device: str) -> None:
    """Prints the summary of a run, and draws it."""
    from benchmarks.engine.plot import plot_ratios, plot_sweeps

    content, folder, stem = log.content, log.path.parent, log.path.stem
    if log.sweeps:
        console.print(*random_cases.tables(content["cases"]), sep="\n")
        plots = plot_ratios(random_cases.ratios(content["cases"]), device, folder / f"{stem}.png")
        seconds, count = content["seconds"], len(content["cases"])
        console.print(f"{count} cases in {seconds:.0f} s, compilation included: {seconds / max(count, 1):.2f} s each")
    else:
        console.print(report.summary_table(results))
        plots = plot_sweeps(results, ceilings, device, folder, stem)
    for written in (log.path, *plots):
        console.print(f"wrote {written}", markup=False)
    if missing := content.get("not_run"):
        console.print(f"budget spent, {len(missing)} cases not run: {', '.join(missing)}", markup=False)


def _refuse_mixed(sweeps: bool, of_sweeps: Any, of_cases: Any) -> None:
    if not sweeps and of_sweeps:
        _fail("benchmarks: --room, --cases, --resume and --wild belong to a sweep. Name the room itself otherwise.")
    if sweeps and of_cases:
        _fail(
            "benchmarks sweep: --case, --provider and shapes choose among fixed cases; a sweep takes "
            "--room, --cases, --resume and --wild."
        )


def _given(lengths: list[int], dtype: str | None, batch: int | None) -> dict[str, Any]:
    """The lengths, dtype and batch that the user asks for, by their names in `load_cases`."""
    dtypes = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    if dtype is not None and dtype not in dtypes:
        _fail(f"benchmarks: --dtype must be one of {', '.join(dtypes)}, got {dtype!r}.")
    given = {"lengths": tuple(lengths) or None, "dtype": dtypes[dtype] if dtype else None, "batch": batch}
    return {name: value for name, value in given.items() if value is not None}


def _device(name: str) -> torch.device:
    try:
        device = resolve_device(name, "benchmarks")
    except ValueError as error:
        _fail(str(error))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def command_line(program: str, arguments: list[str]) -> str:
    """The command that repeats a measurement, without the folder of its results."""
    pairs = zip(["", *arguments], arguments)
    kept = [given for before, given in pairs if "--out" not in (before, given) and not given.startswith("--out=")]
    return shlex.join([*program.split(), *kept])


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _fail(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(2)
