"""Tools of the scripts that tune: candidates are compared with a reference, timed beside each other, and recorded.

A script states its candidates, as calls by name, and their right result. Figures to publish come from `make bench`.
Without a GPU the timings are of the CPU, or of Triton's interpreter on request, and show only that a script runs.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine.command import command_line
from benchmarks.engine.timing import burst, capture
from benchmarks.provenance import provenance
from gossamer._core.operator import forget

Calls = dict[str, Callable[[], Any]]
Change = tuple[Any, str, Any]
"""Of what, which attribute, and its other value."""

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@contextmanager
def replaced(*changes: Change) -> Iterator[None]:
    """With other attributes for a while: a tile, a threshold."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for change in changes:
        setattr(*change)
    forget()
    try:
        yield
    finally:
        for change in before:
            setattr(*change)
        forget()


def under(call: Callable[[], Any], *changes: Change) -> Callable[[], Any]:
    """The call, which then runs with other attributes."""

    def changed() -> Any:
        with replaced(*changes):
            return call()

    return changed


def error(got: Any, want: Any) -> float:
    """The largest of the relative errors, by norm, of a tensor or of a tuple of them."""
    pairs = [(got, want)] if isinstance(want, Tensor) else list(zip(got, want, strict=True))
    wide = [(a.detach().double(), b.detach().double()) for a, b in pairs]
    return max(float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in wide)


def sound(calls: Calls, want: Any, budget: float = 1e-2) -> Calls:
    """The candidates whose results are right to within `budget`. It prints the errors of the others."""
    found: Calls = {}
    for name, call in calls.items():
        try:
            wrong = error(call(), want)
        except Exception as problem:
            print(f"{name}: {type(problem).__name__}: {str(problem)[:200]}", flush=True)
            continue
        if wrong <= budget:
            found[name] = call
        else:
            print(f"{name}: wrong by {wrong:.2g}", flush=True)
    return found


def replayed(calls: Calls, rounds: int = 7, repeat: int = 10) -> dict[str, float]:
    """Median microseconds of a call in a CUDA graph of `repeat`, in another order in each round."""
    if DEVICE.type != "cuda":
        return {name: burst(lambda _, call=call: call(), 1, DEVICE) * 1e6 for name, call in calls.items()}
    graphs = {name: capture(lambda _, call=call: call(), repeat, DEVICE)[0] for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(rounds + 1):
        for name in random.sample(list(graphs), len(graphs)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            if turn:
                times[name].append(start.elapsed_time(end) * 1e3 / repeat)
    return {name: median(found) for name, found in times.items()}


def eager(calls: Calls, rounds: int = 7, repeat: int = 3) -> dict[str, float]:
    """The same as a user's loop sees it, for what no graph can hold."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            times[name].append(burst(lambda _, call=calls[name]: call(), repeat, DEVICE) * 1e6)
    return {name: median(found) for name, found in times.items()}


def sustained(calls: Calls, rounds: int = 2, seconds: float = 0.6) -> dict[str, float]:
    """The same of candidates that each run for a good half second, as training does: a GPU then holds its power limit,
    and what counts is the energy of a call."""
    if DEVICE.type != "cuda":
        return replayed(calls)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            events: list[tuple[Any, Any]] = []
            begin = time.perf_counter()
            while time.perf_counter() - begin < seconds:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                calls[name]()
                end.record()
                events.append((start, end))
                if len(events) > 6:
                    events[-6][1].synchronize()
            torch.cuda.synchronize()
            # The first half goes by until the GPU holds its power.
            times[name].append(median(start.elapsed_time(end) * 1e3 for start, end in events[len(events) // 2 :]))
    return {name: median(found) for name, found in times.items()}


def kernels(call: Callable[[], Any]) -> dict[str, float]:
    """Microseconds of each kernel of one call, by its name and its place among them."""
    call()
    activity = torch.profiler.ProfilerActivity.CUDA if DEVICE.type == "cuda" else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profile:
        call()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type.name == DEVICE.type.upper()]
    events.sort(key=lambda event: event.time_range.start)
    return {f"{at}: {event.name[:60]}": event.time_range.elapsed_us() for at, event in enumerate(events)}


class Results:
    """The findings of a script, printed as they come; `keep` writes them to the folder OUT, if that is set."""

    def __init__(self, script: str) -> None:
        self.script, self.found = Path(script), {}  # type: ignore[var-annotated]
        print(provenance("", self.script.parent, DEVICE)["device"]["name"], torch.__version__, flush=True)

    def add(self, label: str, row: Mapping[str, float], best: int | None = None, against: str | None = None) -> None:
        """Microseconds by name, the fastest first, all or the `best` of them; how many times faster than `against`."""
        self.found[label] = dict(row)
        print(f"\n{label}")
        for name, us in sorted(row.items(), key=lambda item: item[1])[:best]:
            ratio = "" if against is None or against not in row else f"{row[against] / us:9.3f} x {against}"
            print(f"  {name:60s} {us:11.1f} us{ratio}", flush=True)

    def note(self, label: str, **facts: float) -> None:
        """Facts that are no times, beside those of the label."""
        self.found.setdefault(label, {}).update(facts)
        print(f"  {', '.join(f'{name} {value:g}' for name, value in facts.items())}", flush=True)

    def keep(self, arguments: Sequence[str] | None = None) -> None:
        if folder := os.environ.get("OUT"):
            module = ".".join(self.script.relative_to(Path(__file__).parent.parent).with_suffix("").parts)
            command = command_line(f"python -m {module}", list(sys.argv[1:] if arguments is None else arguments))
            record = provenance(command, self.script.parent, DEVICE) | {"microseconds": self.found}
            Path(folder, f"{self.script.stem.replace('_', '-')}.json").write_text(json.dumps(record, indent=1) + "\n")
