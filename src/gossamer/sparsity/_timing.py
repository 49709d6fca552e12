"""How long a block takes one way and another."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

LEAST = 1e-3
"""Seconds that calls are repeated for, in each of which the clock is read once."""


def seconds(calls: Sequence[Callable[[], Any]], device: torch.device, rounds: int = 7) -> list[float]:
    """Median seconds of each call, taken in turn; waits for the device."""
    repeats = []
    for call in calls:
        _timed(call, 1, device)
        repeats.append(max(1, min(64, round(LEAST / max(_timed(call, 1, device), 1e-7)))))
    taken = [[_timed(call, n, device) for call, n in zip(calls, repeats)] for _ in range(rounds)]
    return [sorted(times)[rounds // 2] for times in zip(*taken)]


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
