"""Kernel launches: what a key promises."""

import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language

from gossamer._core import launch  # noqa: E402
from gossamer._core.ops import INTERPRET  # noqa: E402


@triton.jit(do_not_specialize=["epoch"])
def _add_kernel(x_ptr, bias_ptr, out_ptr, N, epoch, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < N, other=0.0) + epoch
    if bias_ptr is not None:
        x += tl.load(bias_ptr + at, mask=at < N, other=0.0)
    tl.store(out_ptr + at, x, mask=at < N)


@pytest.mark.skipif(not INTERPRET, reason="kernels that are compiled take the key's word for it")
@pytest.mark.parametrize(
    "bias, n, block",
    [(None, 5, 8), (torch.float16, 5, 8), *((torch.float32, n, 8) for n in (1, 16, 1 << 31)), (torch.float32, 5, 16)],
)
def test_one_key_for_two_kernels(bias: torch.dtype | None, n: int, block: int) -> None:
    """What a compiled kernel takes for granted is an error in the interpreter where the key does not determine it."""
    add = launch.Kernel(_add_kernel)
    x, out = torch.ones(16), torch.empty(16)
    for epoch in (1, 2, 16):
        add("key", (1, 1, 1), (x, x, out, 5, epoch), {"BLOCK": 8})
        assert out[:5].tolist() == [2 + epoch] * 5
    vector = None if bias is None else torch.ones(16, dtype=bias)
    with pytest.raises(AssertionError, match=r"_add_kernel: one key, .*key.*, for two kernels"):
        add("key", (1, 1, 1), (x, vector, out, n, 1), {"BLOCK": block})


@pytest.mark.native
def test_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept, and when it is found; no GPU is asked."""
    capturing, here = [False], [0]
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: here[0], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: capturing[0], raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(launch, "transient", lambda device: False)
    plans, cpu, bound = launch.Plans(), torch.device("cpu"), object()
    plans.keep("key", cpu, None, bound)
    assert plans.get("key", 0, 0) is None, "the first launch cannot be repeated"
    counts = torch.zeros(3)
    plans.keep("key", cpu, bound, None, words=5, memory=(counts, None))
    plan = plans.get("key", 0, 32)
    assert plan is not None and plan.launches == (bound, None) and plan.addresses == [counts.data_ptr(), None]
    assert plan.memory[0].shape == (5,) and plan.flags == plan.memory[0].data_ptr() and not plan.memory[0].any()
    assert [plan.epochs.next() for _ in range(3)] == [1, 2, 3]
    assert plans.get("other", 0, 32) is None
    assert plans.get("key", 0, 36) is None, "a pointer off 16 bytes"
    assert plans.get("key", 1, 32) is None, "another device"
    capturing[0] = True
    assert plans.get("key", 0, 32) is None, "a graph records the stream"
    capturing[0] = False
    monkeypatch.setattr(launch, "transient", lambda device: True)
    plans.keep("late", cpu, bound)
    assert plans.get("late", 0, 0) is None, "its memory may not outlive the call"
    monkeypatch.setattr(launch, "transient", lambda device: False)
    for key in range(2 * launch.Plans._MOST):
        plans.keep(key, cpu, bound)
    assert len(plans._kept) <= launch.Plans._MOST and plans.get(key, 0, 0) is not None
