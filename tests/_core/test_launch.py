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


@triton.jit(do_not_specialize=["count_ptr", "epoch"], do_not_specialize_on_alignment=[2])
def _counted_kernel(x_ptr, count_ptr, more_ptr, out_ptr, epoch, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    count = tl.load(count_ptr) + tl.load(more_ptr)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < count, other=0.0) + epoch)


class _Compiled:
    """Stands for what Triton compiles, and counts."""

    function, packed_metadata = 0, ()

    def __init__(self) -> None:
        self.launched: list[tuple[object, ...]] = []

    def run(self, *args: object) -> None:
        self.launched.append(args)


class _Jitted:
    """Stands for a function of `@triton.jit`; counts what comes through Triton's own launcher."""

    def __init__(self, fn: object) -> None:
        self.arg_names = fn.arg_names
        self.do_not_specialize, self.do_not_specialize_on_alignment = ["count_ptr", "epoch"], [2]
        self.compiled, self.slow = _Compiled(), 0

    def __getitem__(self, grid: object) -> object:
        def call(*args: object, **options: object) -> _Compiled:
            self.slow += 1
            return self.compiled

        return call


@pytest.mark.skipif(INTERPRET, reason="nothing is compiled")
def test_pointers_that_may_stand_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch with one of them off 16 bytes is as short as any; with another it is Triton's own."""
    for name, value in (("_cuda_getDevice", None), ("_cuda_getCurrentRawStream", 7)):
        monkeypatch.setattr(torch._C, name, lambda *_, value=value: value, raising=False)
    jitted = _Jitted(_counted_kernel)
    counted = launch.Kernel(jitted)
    x, out, count = torch.ones(16), torch.empty(16), torch.arange(8, dtype=torch.int32)

    def call(x: torch.Tensor, count: torch.Tensor, more: torch.Tensor) -> object:
        return counted("key", (1, 1, 1), (x, count, more, out, 3), {"BLOCK": 8}, head=1)

    for at in (0, 1, 2, 3):
        assert count[at:].data_ptr() % 16 == 4 * at
        assert call(x, count[at:], count[3 - at :]) is not None
    assert jitted.slow == 1 and len(jitted.compiled.launched) == 3
    assert jitted.compiled.launched[0][-6:-2] == tuple(t.data_ptr() for t in (x, count[1:], count[2:], out))
    assert call(x[1:], count, count) is None and call(x[1:], count, count) is None
    assert jitted.slow == 3


@pytest.mark.skipif(INTERPRET, reason="nothing is specialised")
@pytest.mark.parametrize("backend", ["nvidia", "amd"])
def test_triton_takes_nothing_for_granted_of_them(backend: str) -> None:
    """Whatever its alignment, Triton compiles one kernel for a pointer that is not to be specialised."""
    specialize = pytest.importorskip("triton._C.libtriton").native_specialize_impl
    compiler = pytest.importorskip(f"triton.backends.{backend}.compiler")
    kind = {"nvidia": "CUDABackend", "amd": "HIPBackend"}[backend]
    count = torch.arange(8, dtype=torch.int32)
    for loose, aligned in ((False, True), (True, False)):
        found = {specialize(getattr(compiler, kind), count[at:], False, loose, aligned) for at in range(4)}
        assert len(found) == 1
    assert len({specialize(getattr(compiler, kind), count[at:], False, True, True) for at in range(4)}) == 2


@pytest.mark.skipif(not INTERPRET, reason="about the interpreter's check of keys")
def test_one_key_for_pointers_that_may_stand_anywhere() -> None:
    counted = launch.Kernel(_counted_kernel)
    x, out, count = torch.ones(16), torch.empty(16), torch.arange(8, dtype=torch.int32)
    for at in range(4):
        counted("key", (1, 1, 1), (x, count[at:], count[1:], out, at), {"BLOCK": 8})
        assert out[:8].tolist() == [1.0 + at] * (1 + at) + [float(at)] * (7 - at)
    with pytest.raises(AssertionError, match=r"_counted_kernel: one key, .*key.*, for two kernels"):
        counted("key", (1, 1, 1), (x, count.long(), count, out, 1), {"BLOCK": 8})
