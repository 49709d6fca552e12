"""Functions of several kernels: what is not compiled is compiled side by side, and runs when all of it is."""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gossamer._core.compiling import THREADS, NotCompiled, ahead, together, walk

launch = pytest.importorskip("gossamer._core.launch")


class _Compiled:
    function, packed_metadata = 0, ()

    def __init__(self, name: str, log: list[tuple[str, str]]) -> None:
        self.name, self.log = name, log

    def run(self, *_: object) -> None:
        self.log.append(("launched", self.name))


class _Jitted:
    """Stands for a function of `@triton.jit` that takes until `others` have begun to compile, too."""

    do_not_specialize = do_not_specialize_on_alignment = ()
    arg_names = ("x_ptr",)

    def __init__(self, name: str, log: list[tuple[str, str]], others: threading.Barrier | None = None) -> None:
        self.compiled, self.log, self.others = _Compiled(name, log), log, others
        self.ready = self.fails = False

    def run(self, *_: object, warmup: bool, **__: object) -> _Compiled:
        assert warmup and threading.current_thread() is not threading.main_thread()
        if self.others is not None:
            self.others.wait(timeout=30)
        if self.fails:
            raise RuntimeError("no such instruction")
        self.log.append(("compiled", self.compiled.name))
        self.ready = True
        return self.compiled

    def __getitem__(self, _: object) -> object:
        def call(*_: object, **__: object) -> _Compiled:
            if self.fails:
                raise RuntimeError("no such instruction")
            self.log.append(("launched" if self.ready else "compiled alone", self.compiled.name))
            self.ready = True
            return self.compiled

        return call


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    state = [False]
    for name, value in (("_cuda_getDevice", None), ("_cuda_getCurrentRawStream", 7)):
        monkeypatch.setattr(torch._C, name, lambda *_, value=value: value, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: state[0], raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(launch, "INTERPRET", False)
    return state


def _kernels(log: list[tuple[str, str]], *names: str, side_by_side: bool = True) -> dict[str, _Jitted]:
    others = threading.Barrier(len(names)) if side_by_side else None
    return {name: _Jitted(name, log, others) for name in names}


def test_kernels_compile_side_by_side_and_launch_in_order(capturing: list[bool]) -> None:
    log: list[tuple[str, str]] = []
    fns = _kernels(log, "a", "b", "c")
    kernels = {name: launch.Kernel(fn) for name, fn in fns.items()}
    x = torch.zeros(16)

    @together
    def function(*names: str) -> str:
        for name in names:
            kernels[name]((1, 1, 1), (x,), {})
        return "done"

    # Each waits for the other two; that b is launched twice compiles it once.
    assert function("a", "b", "b", "c") == "done"
    assert sorted(log[:3]) == [("compiled", name) for name in "abc"]
    assert log[3:] == [("launched", name) for name in "abbc"]
    del log[:]
    assert function("c", "a") == "done"
    assert log == [("launched", "c"), ("launched", "a")]


def test_kernels_compile_ahead_and_none_runs(capturing: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    log: list[tuple[str, str]] = []
    a, b = (launch.Kernel(fn) for fn in _kernels(log, "a", "b").values())
    x, on_gpu = torch.zeros(16), SimpleNamespace(is_cuda=True)

    def function(_: object) -> None:
        a((1, 1, 1), (x,), {})
        b((1, 1, 1), (x,), {})

    capturing[0] = True
    assert not ahead(function, on_gpu)
    capturing[0] = False
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert not ahead(function, on_gpu)
    assert not ahead(function, x) and not log
    assert ahead(function, on_gpu)
    assert sorted(log) == [("compiled", "a"), ("compiled", "b")]
    function(on_gpu)
    assert log[2:] == [("launched", "a"), ("launched", "b")]


def test_a_later_kernel_alone(capturing: list[bool]) -> None:
    """What has run before it runs again, and nothing runs between."""
    log: list[tuple[str, str]] = []
    fns = _kernels(log, "a", "b", side_by_side=False)
    a, b = (launch.Kernel(fn) for fn in fns.values())
    x = torch.zeros(16)
    a((1, 1, 1), (x,), {})

    @together
    def inner() -> None:
        b((1, 1, 1), (x,), {})

    @together
    def outer() -> None:
        a((1, 1, 1), (x,), {})
        inner()

    outer()
    assert log == [
        ("compiled alone", "a"), ("launched", "a"), ("compiled", "b"), ("launched", "a"), ("launched", "b"),
    ]  # fmt: skip


def test_nothing_waits_in_a_graph(capturing: list[bool]) -> None:
    log: list[tuple[str, str]] = []
    (fn,) = _kernels(log, "a").values()
    kernel = launch.Kernel(fn)
    capturing[0] = True
    together(lambda: kernel((1, 1, 1), (torch.zeros(16),), {}))()
    assert log == [("compiled alone", "a")]


def test_errors_are_those_of_the_launch(capturing: list[bool]) -> None:
    log: list[tuple[str, str]] = []
    fns = _kernels(log, "a", "b", side_by_side=False)
    fns["a"].fails = True
    a, b = (launch.Kernel(fn) for fn in fns.values())
    x = torch.zeros(16)

    @together
    def function() -> None:
        b((1, 1, 1), (x,), {})
        a((1, 1, 1), (x,), {})

    with pytest.raises(RuntimeError, match="no such instruction"):
        function()
    fns["a"].fails = False
    function()
    assert log[-3:] == [("compiled", "a"), ("launched", "b"), ("launched", "a")]


def test_what_is_neither_compiled_nor_a_kernel() -> None:
    """Values, arguments and errors of a plain function pass, and its name stays."""

    @together
    def divide(a: int, b: int = 1) -> float:
        return a / b

    assert divide(6, b=3) == 2 and divide.__name__ == "divide" and THREADS > 1
    with pytest.raises(ZeroDivisionError):
        divide(1, 0)
    assert not issubclass(NotCompiled, RuntimeError)


def test_compiled_functions_are_left_alone() -> None:
    @together
    def add(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    compiled = torch.compile(add, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(torch.zeros(3)), torch.ones(3))


def test_checkpoints_count_a_first_call_once() -> None:
    """Gradient checkpointing compares what a forward pass saved with what its repetition saves."""
    done: set[int] = set()

    def kernel() -> None:
        if walk.raises and not done:
            raise NotCompiled
        if walk.pool is not None and not done:
            walk.submit("kernel", done.add, 1)

    @together
    def layer(x: torch.Tensor) -> torch.Tensor:
        kernel()
        return (x.sin() * x).sum()

    x = torch.randn(3, requires_grad=True)
    checkpoint(layer, x, use_reentrant=False).backward()
    (wanted,) = torch.autograd.grad((x.sin() * x).sum(), x)
    torch.testing.assert_close(x.grad, wanted)
