"""Calls for a profiler: under named ranges, neither checked nor timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.engine.case import Case
from benchmarks.engine.timing import matmul_precision, synchronize
from gossamer._core.ranges import span

_WARM_UP = 3


def profile_cases(
    cases: Sequence[Case], device: torch.device, seed: int, calls: int, show: Callable[[str], None], *, apart: bool
) -> None:
    """Calls each provider of each case `calls` times, after a warm-up.

    On a GPU the calls lie between cudaProfilerStart and cudaProfilerStop: one window around all of them, because nsys
    stops at the first end of a window. A warm-up has a range of its own in it. With `apart` each provider has a window
    and warms up before it, as ncu needs it, which collects from every window. On the CPU PyTorch's own profiler runs,
    and `show` gets its tables: all named ranges, then the operators that took longest.
    """
    cuda = device.type == "cuda"
    with _window() if cuda and not apart else nullcontext():
        for case in cases:
            inputs = case.make(device, torch.Generator(device).manual_seed(seed))[0]
            with nullcontext() if case.grad else torch.inference_mode():
                for provider in case.providers:
                    if provider.missing(device) is not None:
                        continue
                    name = f"{case.id}: {provider.name}"
                    with matmul_precision(provider.precision):
                        with span(f"warm-up of {name}"):
                            arguments = inputs if provider.prepare is None else provider.prepare(*inputs)
                            for _ in range(_WARM_UP):
                                provider.call(*arguments)
                            synchronize(device)
                        with (_window() if apart else nullcontext()) if cuda else _tables(name, show), span(name):
                            for _ in range(calls):
                                provider.call(*arguments)
                            synchronize(device)
                    if cuda:
                        show(f"{name}: done")


@contextmanager
def _window() -> Iterator[None]:
    torch.cuda.profiler.start()
    try:
        yield
    finally:
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


@contextmanager
def _tables(name: str, show: Callable[[str], None]) -> Iterator[None]:
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        yield
    events = seen.key_averages()
    ranges = sorted(
        (event for event in events if event.is_user_annotation and event.key != name),
        key=lambda event: -event.cpu_time_total,
    )
    lines = [f"  {event.key}: {event.cpu_time_total / 1000:.3f} ms in {event.count} calls" for event in ranges]
    show("\n".join([name, *lines, events.table(sort_by="self_cpu_time_total", row_limit=12)]))
