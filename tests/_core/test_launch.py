"""Kernel launches: which of them share what is compiled, and what is kept of them."""

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language

from gossamer._core import launch, stream_memory  # noqa: E402
from gossamer._core.ops import INTERPRET  # noqa: E402


@pytest.mark.native
def test_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """One buffer a stream; a graph gets words of its own, zeroed ahead while there are any."""
    streams, graph, capturing = [7], [False], [False]
    monkeypatch.setattr(stream_memory, "shared_stream", lambda device: None if graph[0] else streams[0])
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: capturing[0], raising=False)
    counters, cpu = stream_memory.Counters(), torch.device("cpu")
    first = counters.get(5, cpu)
    assert first.dtype is torch.int32 and first.numel() >= 5 and not first.any()
    assert counters.get(9, cpu) is first
    assert counters.get(first.numel() + 1, cpu).numel() > first.numel()
    streams[0] = 8
    assert counters.get(5, cpu) is not first
    graph[0] = True
    warm_up = counters.get(5, cpu)
    assert warm_up.numel() == 5
    capturing[0] = True
    block = counters._blocks[0]
    taken = [counters.get(5, cpu) for _ in range(counters._AHEAD)]
    places = {words.data_ptr() for words in taken}
    assert len(places) == counters._AHEAD and min(places) == block.data_ptr() and not block.any()
    assert counters.get(5, cpu).numel() == 5, "the last is taken"
    graph[0] = capturing[0] = False
    counters.get(5, cpu)
    graph[0] = capturing[0] = True
    assert counters.get(counters._WORDS + 1, cpu).numel() == counters._WORDS + 1
    assert counters.get(5, cpu).data_ptr() not in places


def test_streams_share_no_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that has not waited for another might read the other's before they are zero."""
    stream, cpu, zeros = [7], torch.device("cpu"), stream_memory.Zeros()
    monkeypatch.setattr(stream_memory, "shared_stream", lambda device: stream[0])
    first = zeros.get(4, cpu)
    assert zeros.get(4, cpu) is first and zeros.get(8, cpu) is not first and not first.any()
    stream[0] = 8
    assert zeros.get(4, cpu) is not first


def test_a_graph_zeroes_nothing_that_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros of a call before the capture outlive the graph; without one, and in a warm-up run, the pool has its own."""
    graph, capturing, cpu, zeros = [True], [True], torch.device("cpu"), stream_memory.Zeros()
    monkeypatch.setattr(stream_memory, "shared_stream", lambda device: None if graph[0] else 7)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: capturing[0], raising=False)
    assert zeros.get(4, cpu) is not zeros.get(4, cpu)
    graph[0] = False
    first = zeros.get(4, cpu)
    graph[0] = True
    assert zeros.get(4, cpu) is first and zeros.get(8, cpu) is not zeros.get(8, cpu)
    capturing[0] = False
    assert zeros.get(4, cpu) is not first


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


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_cuda_getDevice", None), ("_cuda_getCurrentRawStream", 7)):
        monkeypatch.setattr(torch._C, name, lambda *_, value=value: value, raising=False)


ONES, HALVES = torch.ones(32), torch.ones(32, dtype=torch.float16)
ARGUMENTS = [
    *(None, 1, 2, 3, 15, 16, 17, 32, -1, -16, 0, True, False, 1.0, 2.5, (1 << 31) - 1, 1 << 31, (1 << 31) + 1),
    *((), (1, 16), (16, 1), (1, 3), (None, 3), (ONES, 2), (ONES[1:], 2), (HALVES, 2), ((2, 3), 1), ((2, 3), 16)),
    *(ONES, ONES[4:], HALVES, ONES.double(), ONES.int()),
    *(torch.empty(size, dtype=torch.int8, device="meta") for size in (16, (1 << 31) - 1, 1 << 31)),
]


@pytest.mark.native
@pytest.mark.parametrize("backend", ["nvidia", "amd"])
def test_launches_share_what_triton_compiles_alike(
    backend: str, one_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any two arguments: what is compiled for one is launched for the other only if Triton would not tell them
    apart."""
    specialize = pytest.importorskip("triton._C.libtriton").native_specialize_impl
    compiler = pytest.importorskip(f"triton.backends.{backend}.compiler")
    kind = getattr(compiler, {"nvidia": "CUDABackend", "amd": "HIPBackend"}[backend])
    monkeypatch.setattr(launch, "_HIP", backend == "amd")
    shared = 0
    for first in ARGUMENTS:
        jitted = _Jitted(_counted_kernel)
        jitted.do_not_specialize, jitted.do_not_specialize_on_alignment = [], []
        kernel = launch.Kernel(jitted)
        for second in ARGUMENTS:
            kernel._compiled.clear()
            before = jitted.slow
            for argument in (first, second):
                kernel((1, 1, 1), (ONES, ONES, ONES, argument, 3), {"BLOCK": 8})
            if jitted.slow == before + 1:
                shared += 1
                found = [specialize(kind, argument, False, True, True) for argument in (first, second)]
                assert found[0] == found[1], (first, second)
    assert shared > len(ARGUMENTS), "integers of one kind share a kernel"


@pytest.mark.native
def test_what_else_decides_a_kernel(one_device: None) -> None:
    """Another tile or another number of warps is another kernel; what is not to be specialised is none."""
    jitted = _Jitted(_counted_kernel)
    counted, slow = launch.Kernel(jitted), 0
    for meta, options, epoch, new in (
        ({"BLOCK": 8}, {}, 1, True),
        ({"BLOCK": 8}, {}, 2, False),
        ({"BLOCK": 8}, {}, 16, False),
        ({"BLOCK": 8}, {}, 1 << 31, True),
        ({"BLOCK": 16}, {}, 1, True),
        ({"BLOCK": 8}, {"num_warps": 8}, 1, True),
        ({"BLOCK": 8}, {"num_stages": 3}, 1, True),
        ({"BLOCK": 8}, {"maxnreg": 80}, 1, True),
        ({"BLOCK": 8}, {"launch_pdl": True}, 1, True),
        ({"BLOCK": 8}, {}, 3, False),
    ):
        counted((1, 1, 1), (ONES, ONES, ONES, ONES, epoch), meta, **options)
        slow += new
        assert jitted.slow == slow, (meta, options, epoch)


class _Launcher:
    """Stands for Triton's launcher of a kernel, in the form that a version or a backend has."""

    def __init__(self, form: str) -> None:
        self.form, self.launched = form, []
        self.global_scratch_size, self.profile_scratch_size = 64 * (form == "scratch"), 0
        self.launch = lambda *args: self.launched.append(args)

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, packed: object, *args: object) -> None:
        if self.form == "joined":
            self.launch(x, y, z, stream, function, True, packed, args[:3], "signature", args[3:])
        elif self.form == "another order":
            self.launch(True, x, y, z, stream, function, packed, *args)
        else:
            self.launch(x, y, z, stream, function, True, None, packed, *args)


@pytest.mark.native
@pytest.mark.parametrize("form", ["flat", "joined", "another order", "scratch", "installed"])
def test_the_function_in_c_gets_what_the_launcher_gives_it(form: str, one_device: None) -> None:
    """A launch runs none of the launcher's Python, unless memory is to be allocated for it or the order is unknown."""
    launcher: Any = _Launcher(form)
    if form == "installed":
        own = launcher
        launcher = object.__new__(pytest.importorskip("triton.backends.nvidia.driver").CudaLauncher)
        names = ("launch_cooperative_grid", "launch_pdl", "arg_annotations", "kernel_signature")
        vars(launcher).update(vars(own), num_ctas=1, **{name: name for name in names})
        vars(launcher).update(global_scratch_align=1, profile_scratch_align=1)
    given = 11, "packed", None, None, None
    launcher(1, 2, 3, 7, *given, 5, 6)
    run, arguments = launch._direct(launcher, given)
    run(1, 2, 3, 7, *arguments, 5, 6)
    launched = own.launched if form == "installed" else launcher.launched
    assert len(launched) == 2 and launched[0] == launched[1]
    assert (run is launcher) == (form in ("another order", "scratch"))


@pytest.mark.skipif(INTERPRET, reason="nothing is compiled")
def test_pointers_that_may_stand_anywhere(one_device: None) -> None:
    """A launch with one of them off 16 bytes is as short as any; with another it is Triton's own."""
    jitted = _Jitted(_counted_kernel)
    counted = launch.Kernel(jitted)
    x, out, count = torch.ones(16), torch.empty(16), torch.arange(8, dtype=torch.int32)

    def call(x: torch.Tensor, count: torch.Tensor, more: torch.Tensor) -> None:
        counted((1, 1, 1), (x, count, more, out, 3), {"BLOCK": 8})

    for at in (0, 1, 2, 3):
        assert count[at:].data_ptr() % 16 == 4 * at
        call(x, count[at:], count[3 - at :])
    assert jitted.slow == 1 and len(jitted.compiled.launched) == 3
    assert jitted.compiled.launched[0][-6:-2] == tuple(t.data_ptr() for t in (x, count[1:], count[2:], out))
    call(x[1:], count, count)
    call(x[1:], count, count)
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


@pytest.mark.kernels
@pytest.mark.skipif(not INTERPRET, reason="a GPU may fault")
@pytest.mark.parametrize("first", [-1, 0, 1])
def test_memory_of_no_argument_is_an_error(first: int) -> None:
    """`tests/bounds.py`, of the interpreter."""

    @triton.jit
    def copied(x_ptr, out_ptr, first, BLOCK: tl.constexpr):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < BLOCK)
        tl.store(out_ptr + tl.arange(0, BLOCK), x)

    x, out = torch.arange(8.0), torch.empty(8)
    if first < 0:
        with pytest.raises(Exception, match="load of 1 elements beyond every argument"):
            copied[(1,)](x, out, first, BLOCK=8)
        with pytest.raises(Exception, match="store of 8 elements beyond every argument"):
            copied[(1,)](x, out[:0], 0, BLOCK=8)
    else:
        copied[(1,)](x, out, first, BLOCK=8)
        assert torch.equal(out[: 8 - first], x[first:])
