"""The energy of a call, as `python -m benchmarks` measures it, and how many calls it takes to measure one."""

import time

import pytest
import torch

from benchmarks.engine import timing
from benchmarks.engine.timing import burst, calls_for, energy


@pytest.mark.parametrize("length, calls", [(1e-3, 8), (0.03, 4), (0.25, 4)])
def test_energy_of_a_gpu_that_is_simulated(length: float, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """700 W at work and 100 at rest, by a counter that moves every 50 ms and takes 4 to read."""
    busy = [(0.0, 0.0)]

    class Event:
        def record(self) -> None:
            self.end = busy[-1][1]

        def synchronize(self) -> None:
            time.sleep(max(0.0, self.end - time.perf_counter()))

    def call(_: int) -> None:
        begin = max(time.perf_counter(), busy[-1][1])
        busy.append((begin, begin + length))

    def counter() -> int:
        time.sleep(4e-3)
        now = time.perf_counter() // 0.05 * 0.05
        worked = sum(max(0.0, min(end, now) - begin) for begin, end in list(busy)[1:] if begin < now)
        return round(1000 * (100 * now + 600 * worked))

    monkeypatch.setattr(timing, "energy_counter", lambda _: counter)
    monkeypatch.setattr(timing, "burst", lambda *_: length)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    joules = energy(call, calls, 0.3, torch.device("cpu"))
    assert joules is not None and abs(joules / (700 * length) - 1) < 0.1


@pytest.mark.parametrize("length, calls", [(1e-4, 30), (2e-3, 4), (0.1, 2)])
def test_a_call_of_a_model_is_not_repeated(length: float, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond what it takes to have each of the inputs' copies once."""
    monkeypatch.setattr(timing, "burst", lambda *_: length)
    assert calls_for(lambda _: None, torch.device("cuda"), 3e-3, 2) == calls


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_energy_is_that_of_the_calls() -> None:
    """Of short ones, too: what a GPU takes while the counter is read would be most of it."""
    device = torch.device("cuda")
    a = torch.randn(2048, 2048, device=device).bfloat16()
    few, many = (energy(lambda _: a @ a, calls, 0.4, device) for calls in (4, 4000))
    if few is None or many is None:
        pytest.skip("the driver has no counter")
    assert 20 < many / burst(lambda _: a @ a, 100, device) < 1200  # watts
    assert abs(few / many - 1) < 0.1
