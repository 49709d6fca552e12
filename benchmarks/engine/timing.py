"""Clocks: bursts of calls on either device, CUDA-graph capture, and the device's measured ceilings."""

from __future__ import annotations

import gc
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from gossamer.cli.energy import energy_counter

_GEMMS = {
    "bfloat16": (torch.bfloat16, "highest"),
    "tf32": (torch.float32, "high"),
    "float32": (torch.float32, "highest"),
}
LONG = 0.02
"""Seconds of a call that is measured well by itself."""


@dataclass(frozen=True)
class Timing:
    """Seconds per call: median, 20th and 80th percentile of `samples` bursts of `calls` calls each."""

    median: float
    p20: float
    p80: float
    samples: int
    calls: int

    @staticmethod
    def of(seconds: Sequence[float], calls: int) -> Timing:
        p20, median, p80 = torch.tensor(seconds, dtype=torch.float64).quantile(
            torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
        )
        return Timing(median.item(), p20.item(), p80.item(), len(seconds), calls)


@dataclass(frozen=True)
class Ceilings:
    """The device's measured rates: copy bandwidth in bytes/s (read plus written), GEMM rates in FLOP/s by precision."""

    bandwidth: float
    gemm: dict[str, float]

    def floor(self, moved: int, flops: int, dtype: torch.dtype, precision: str) -> float:
        """Least seconds for `moved` bytes and `flops` operations; the larger of the two terms."""
        if dtype == torch.float32:
            rate = self.gemm.get("float32" if precision == "highest" else "tf32")
        else:
            rate = self.gemm.get("bfloat16")
        return max(moved / self.bandwidth, flops / rate if rate else 0.0)


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Set the float32 matmul precision for a while."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def synchronize(device: torch.device) -> None:
    """Wait for the work of the device; the CPU is always done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection for a while: it would strike some bursts and not others, as `timeit` knows."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@uncollected()
def burst(call: Callable[[int], Any], calls: int, device: torch.device) -> float:
    """Seconds per call of `calls` back-to-back calls `call(0) ... call(calls - 1)`.

    On a GPU this is throughput as a user's loop sees it, between two events: device time, or the host's time to
    launch where that is longer. A call ahead of the first event keeps its latency out of the figure.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        for i in range(calls):
            call(i)
        return (time.perf_counter() - start) / calls
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    call(calls)
    first.record()
    for i in range(calls):
        call(i)
    last.record()
    last.synchronize()
    return first.elapsed_time(last) * 1e-3 / calls


def energy(call: Callable[[int], Any], calls: int, seconds: float, device: torch.device) -> float | None:
    """Joules per call at a steady state, by the driver's own counter; None where it has none.

    Watts times the time of a call: the counter moves in steps of up to 0.1 s, which rarely are a call's, so that power
    is taken from one step to another, at least `seconds` apart. As long again goes before, in which the GPU finds the
    power that it will hold. A thread reads the counter, which takes its time, and two bursts of several `calls` calls,
    30 ms or more each, are always ahead: a GPU that rests takes energy, too.
    """
    counter = energy_counter(device)
    if counter is None:
        return None
    calls *= math.ceil(0.03 / (calls * burst(call, calls, device)))
    steps: list[tuple[float, int]] = []
    ends: list[float] = []
    over = threading.Event()

    def watch() -> None:
        last = counter()
        while not over.is_set():
            now, read = time.perf_counter(), counter()
            if read != last and now > warm:
                steps.append((now, read))
            last = read
            time.sleep(1e-3)

    begin = time.perf_counter()
    warm = begin + seconds
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    ahead: deque[torch.cuda.Event] = deque()
    try:
        while len(ends) < 2 or len(steps) < 2 or steps[-1][0] - steps[0][0] < seconds:
            for i in range(calls):
                call(i)
            ahead.append(torch.cuda.Event())
            ahead[-1].record()
            if len(ahead) < 3:
                continue
            ahead.popleft().synchronize()
            now = time.perf_counter()
            if now > warm:
                ends.append(now)
            if len(ends) > 2 and now - begin > 20 * seconds:
                return None
    finally:
        over.set()
        watcher.join()
    watts = (steps[-1][1] - steps[0][1]) / 1000 / (steps[-1][0] - steps[0][0])
    return watts * (ends[-1] - ends[0]) / (len(ends) - 1) / calls


def calls_for(
    call: Callable[[int], Any], device: torch.device, target: float, copies: int, most: float = math.inf
) -> int:
    """How many calls fill `target` seconds, up to 512; on a GPU at least 4, if a call takes less than LONG, and each of
    the input's copies once. Fewer, but one, where these would take longer than `most` seconds."""
    burst(call, 1, device)
    once = burst(call, 1, device)
    least = max(4 if once < LONG else 1, copies) if device.type == "cuda" else 1
    return max(1, round(min(max(least, min(512, round(target / once))), most / once)))


def capture(call: Callable[[int], Any], calls: int, device: torch.device) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of `call(1) ... call(calls - 1), call(0)`, and the output of its last call."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        call(0)
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for i in range(1, calls):
                call(i)
            output = call(0)
    except Exception:
        # The generator would stay in the capture, and refuse to give random numbers outside of it.
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())
        raise
    return graph, output


def measure_ceilings(device: torch.device, quick: bool) -> Ceilings:
    """Best copy bandwidth and square GEMM rates on random data, the two figures that floors are computed from."""
    cuda = device.type == "cuda"
    size, side, repeats = (1 << 30, 8192, 10) if cuda else (1 << 27, 1024, 5)
    if quick:
        size, side, repeats = (1 << 28, 4096, 5) if cuda else (1 << 24, 256, 5)

    def best(function: Callable[..., Any], *arguments: torch.Tensor) -> float:
        return min(burst(lambda _: function(*arguments), 1, device) for _ in range(repeats))

    source = torch.randint(-128, 127, (size,), dtype=torch.int8, device=device)
    bandwidth = 2 * size / best(torch.Tensor.copy_, torch.empty_like(source), source)
    rates = {}
    for name, (dtype, precision) in _GEMMS.items():
        if cuda or name == "float32":
            factors = [torch.randn(side, side, device=device).to(dtype) for _ in range(2)]
            with matmul_precision(precision):
                rates[name] = 2 * side**3 / best(torch.matmul, *factors)
    return Ceilings(bandwidth, rates)
