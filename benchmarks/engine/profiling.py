"""Calls for a profiler: warmed up outside of its window, under named ranges, neither checked nor timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerActivity, profile

from benchmarks.engine.case import Case
from benchmarks.engine.timing import matmul_precision, synchronize
from gossamer._core.ranges import span

_WARM_UP = 3


def profile_case(case: Case, device: torch.device, seed: int, calls: int, show: Callable[[str], None]) -> None:
    """Calls each provider of `case` `calls` times between cudaProfilerStart and cudaProfilerStop.

    On the CPU PyTorch's own profiler runs instead, and `show` gets its tables: all named ranges, then the operators
    that took longest.
    """
    inputs = case.make(device, torch.Generator(device).manual_seed(seed))[0]
    with nullcontext() if case.grad else torch.inference_mode():
        for provider in case.providers:
            if device.type not in provider.devices:
                continue
            arguments = inputs if provider.prepare is None else provider.prepare(*inputs)
            with matmul_precision(provider.precision):
                for _ in range(_WARM_UP):
                    provider.call(*arguments)
                synchronize(device)
                name = f"{case.id}: {provider.name}"
                with _window(device, name, show), span(name):
                    for _ in range(calls):
                        provider.call(*arguments)
                    synchronize(device)


@contextmanager
def _window(device: torch.device, name: str, show: Callable[[str], None]) -> Iterator[None]:
    if device.type == "cuda":
        torch.cuda.profiler.start()
        yield
        torch.cuda.profiler.stop()
        show(f"{name}: done")
        return
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        yield
    events = seen.key_averages()
    ranges = EventList([event for event in events if event.is_user_annotation and event.key != name])
    tables = [ranges.table(sort_by="cpu_time_total", row_limit=-1, max_name_column_width=80)] if ranges else []
    tables.append(events.table(sort_by="self_cpu_time_total", row_limit=12))
    show("\n".join([name, *tables]))
