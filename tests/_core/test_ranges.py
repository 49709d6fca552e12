"""Ranges that profilers show."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from gossamer._core import ranges
from gossamer._core.ranges import span
from gossamer.nn import GatedSparseAttention

pytestmark = pytest.mark.native
STEPS = ["qkv_proj", "value_gate", "rotary_emb", "indexer", "topk_select", "sparse_attn", "output_gate", "o_proj"]


def test_every_step_has_one(device: torch.device) -> None:
    layer = GatedSparseAttention(32, 4, k_base=8, k_min=4, k_max=16, d_indexer=16).to(device)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        layer(torch.randn(1, 20, 32, device=device))
    names = [event.key for event in seen.key_averages() if event.key.startswith("gsa/")]
    assert all(any(step in name for name in names) for step in STEPS)


def test_nothing_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "NVIDIA_LOOKS", False)
    assert span("a") is span("b")


def test_nvidias_tools_see_them_where_they_have_started_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "NVIDIA_LOOKS", True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    said: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", said.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: said.append("end"))
    with span("a"), span("b"):
        pass
    assert said == ["a", "b", "end", "end"]


def test_a_module_compiles_around_them(compiled: object, device: torch.device) -> None:
    layer = GatedSparseAttention(32, 4, k_base=8, k_min=4, k_max=16, d_indexer=16).to(device)
    x = torch.randn(1, 20, 32, device=device)
    torch.testing.assert_close(compiled(layer)(x), layer(x))  # type: ignore[operator]
