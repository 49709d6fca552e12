"""How long a block takes one way and another."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

LEAST = 1e-3
"""Seconds that calls are repeated for, in each of which the clock is read once."""


def pairs(
    first: Callable[[], Any], second: Callable[[], Any], device: torch.device, rounds: int = 15
) -> tuple[tuple[float, float], ...]:
    """Seconds of two calls, `rounds` times; waits for the device. The two are timed one right after the other, in turn
    the one and the other first, so that a load that comes and goes meets both."""
    calls, repeats = (first, second), []
    for call in calls:
        _timed(call, 1, device)
        repeats.append(max(1, min(64, round(LEAST / max(_timed(call, 1, device), 1e-7)))))
    taken = []
    for number in range(rounds):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        times = {at: _timed(calls[at], repeats[at], device) for at in order}
        taken.append((times[0], times[1]))
    return tuple(taken)


def _timed(call: Callable[[], Any], repeats: int, device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) / repeats
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(repeats):
        call()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) * 1e-3 / repeats
