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
