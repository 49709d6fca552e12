"""Inputs of benchmarks: hidden states with a given pattern."""

import torch

from benchmarks.inputs import inputs_for
from gossamer.testing import random_rows


def test_inputs_for_a_pattern() -> None:
    generator = torch.Generator().manual_seed(0)
    pattern, weight = (
        random_rows((20, 300), l0=12, generator=generator),
        torch.randn(300, 128, generator=generator),
    )
    for dtype in (torch.float32, torch.bfloat16):
        x, bias = inputs_for(pattern, weight.to(dtype))
        assert x.dtype is bias.dtype is dtype
        assert torch.equal(x.float() @ weight.to(dtype).float().t() + bias.float() > 0, pattern != 0)
