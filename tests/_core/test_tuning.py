"""What is known of a GPU, where code is compiled."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from gossamer._core import tuning


def test_compiled_code_has_rates_as_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo neither traces them nor warns of a cache."""
    found = SimpleNamespace(major=9, minor=0, total_memory=144e9, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)

    def scaled(x: Tensor) -> Tensor:
        if tuning.hopper(x.device) or tuning.dependent_launch(x.device):
            return x
        return x * tuning.rates(99).programs

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = torch.compile(scaled, backend="eager", fullgraph=True)(torch.ones(2))
    assert out.tolist() == [132, 132]
