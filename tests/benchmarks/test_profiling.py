"""What a profiler sees of `python -m benchmarks --profile` and `--ncu`."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from benchmarks.engine import Case, Provider, profiling


@pytest.mark.parametrize("apart", [False, True])
def test_windows_of_a_gpu_that_is_simulated(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One around everything, for nsys stops at the first end; for ncu one a provider, without its warm-up."""
    seen: list[str] = []

    @contextmanager
    def window() -> Iterator[None]:
        seen.append("start")
        yield
        seen.append("stop")

    monkeypatch.setattr(profiling, "_window", window)
    monkeypatch.setattr(profiling, "synchronize", lambda device: None)
    monkeypatch.setattr(torch, "Generator", lambda device: SimpleNamespace(manual_seed=lambda seed: None))
    names = ("ours", "theirs")
    providers = [Provider(name, lambda name=name: seen.append(name)) for name in names]
    elsewhere = Provider("elsewhere", lambda: seen.append("elsewhere"), devices=("cpu",))
    cases = [
        Case("toy", name, {}, torch.float32, lambda *_: [()], (*providers, elsewhere), lambda: (), 1, 1)
        for name in ("first", "second")
    ]
    profiling.profile_cases(cases, torch.device("cuda"), 0, 2, lambda _: None, apart=apart)
    warm = profiling._WARM_UP
    if apart:
        assert seen == [x for name in names * 2 for x in (*[name] * warm, "start", name, name, "stop")]
    else:
        assert seen == ["start", *(name for name in names * 2 for _ in range(warm + 2)), "stop"]


def test_a_provider_that_does_not_take_a_case_says_so() -> None:
    for devices, said in (((), "does not take this case"), (("cuda",), "needs cuda"), (("cpu", "cuda"), None)):
        assert Provider("name", lambda: None, devices=devices).missing(torch.device("cpu")) == said
