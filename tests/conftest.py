"""One set of tests, three ways to run it.

Plain `pytest` tests the CPU implementation, or the kernels where there is a GPU. `GOSSAMER_INTERPRET=1 pytest` sends
CPU tensors through the Triton kernels in Triton's interpreter, for the rooms that have kernels and the dtypes that it
computes rightly.
"""

import json
import shlex
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import hypothesis
import numpy
import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

import gossamer
from benchmarks.provenance import commit
from gossamer._core import replay, tuning
from gossamer._core.operator import forget
from gossamer._core.ops import INTERPRET
from gossamer.cli import environment

MODE = "interpreter" if INTERPRET else "gpu" if torch.cuda.is_available() else "cpu"
SOURCES = Path(gossamer.__file__).parent
INTERPRETED = {folder.parent.name for folder in SOURCES.glob("*/_triton")}
INTERPRETED_TOO = tuple(map(Path, ("test_empty.py", "test_strides.py", "_core/test_launch.py", "_core/test_replay.py")))
DTYPES = (torch.float32, torch.float16) if INTERPRET else (torch.float32, torch.float16, torch.bfloat16)

if INTERPRET:
    from tests import bounds

    bounds.install()

hypothesis.settings.register_profile(
    "gossamer",
    deadline=None,
    derandomize=True,
    max_examples={"interpreter": 6, "cpu": 60, "gpu": 60}[MODE],
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("gossamer")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--summary", metavar="FILE", help="write counts, device, versions and commit to FILE, as JSON")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not (file := config.getoption("--summary")):
        return
    stats = terminalreporter.stats
    where = torch.device("cuda" if MODE == "gpu" else "cpu")
    arguments = [a for a in map(str, config.invocation_params.args) if not a.startswith("--summary=")]
    content = {
        "command": shlex.join(["pytest", *arguments]),
        "mode": MODE,
        "commit": commit(Path(__file__).parents[1]),
        "versions": environment.versions(),
        "device": environment.describe(where),
        "counts": {kind: len(stats[kind]) for kind in ("passed", "failed", "error", "skipped") if kind in stats},
        "not_passed": sorted(report.nodeid for kind in ("failed", "error") for report in stats.get(kind, ())),
        "seconds_in_tests": round(sum(getattr(r, "duration", 0) for rs in stats.values() for r in rs), 1),
    }
    Path(file).write_text(json.dumps(content, indent=1) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "native: about the product path; skipped in the interpreter")
    config.addinivalue_line("markers", "kernels: about the kernels; skipped where neither a GPU nor the interpreter is")
    # The interpreter computes with NumPy, which warns where a GPU makes NaN and Inf without a word.
    config.addinivalue_line("filterwarnings", "ignore:.* encountered in .*:RuntimeWarning")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """In the interpreter, only what has kernels."""
    folder = Path(__file__).parent
    if not collection_path.is_relative_to(folder):
        # The template's test, which is put together elsewhere.
        return None
    path = collection_path.relative_to(folder)
    wanted = not path.parts or path.parts[0] in INTERPRETED or any(path in (f, *f.parents) for f in INTERPRETED_TOO)
    return True if INTERPRET and not wanted else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The interpreter is slow: of a test's parameters it takes one in four, and a dozen at most, in `make test`, and
    all with the marker `full`. The first one follows from the test's name, so that dtypes and paths take turns."""
    if not INTERPRET:
        return
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("full") is None:
            groups.setdefault(item.nodeid.split("[")[0], []).append(item)
    for name, group in groups.items():
        step = 4 * -(-len(group) // 48)
        first = zlib.crc32(name.encode()) % min(len(group), 4)
        for at, item in enumerate(group):
            if at % step != first:
                item.add_marker("full")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if INTERPRET:
        if _interpreter_is_broken():
            pytest.skip("Triton's interpreter before 3.7 fails on NumPy 2.4 and newer in loops with run-time bounds")
        if item.get_closest_marker("native"):
            pytest.skip("about the product path, not about the kernels")
    if item.get_closest_marker("kernels") and MODE == "cpu":
        pytest.skip("about the kernels, which run on a GPU or in the interpreter")
    if item.get_closest_marker("gpu") and MODE != "gpu":
        pytest.skip("needs a GPU")


def _interpreter_is_broken() -> bool:
    import triton

    return _version(triton.__version__) < (3, 7) and _version(numpy.__version__) >= (2, 4)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


@pytest.fixture(scope="session")
def mode() -> str:
    """ "cpu", "gpu" or "interpreter"."""
    return MODE


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the operators under test run."""
    return torch.device("cuda" if MODE == "gpu" else "cpu")


@pytest.fixture(scope="session")
def scale() -> int:
    """What sizes are multiplied with: 1 in the interpreter, which is slow, 4 on the CPU, 16 on the GPU."""
    return {"interpreter": 1, "cpu": 4, "gpu": 16}[MODE]


@pytest.fixture(scope="session", params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Every dtype that this way of running can test."""
    return request.param


@pytest.fixture
def generator(device: torch.device) -> torch.Generator:
    """A seeded generator on the device."""
    return torch.Generator(device).manual_seed(0)


@pytest.fixture
def compiled() -> Iterator[Callable[..., Any]]:
    """`torch.compile(fullgraph=True)` with the backend that fits the device; `torch.empty` is left alone."""
    torch._dynamo.reset()
    backend = "inductor" if MODE == "gpu" else "aot_eager"
    yield lambda function: torch.compile(function, fullgraph=True, backend=backend)
    torch._dynamo.reset()


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    backend = "cpu:gloo,cuda:nccl" if MODE == "gpu" else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices are those of an H200, as device 99, whose costs nobody keeps for another."""
    rates = tuning.Rates(copy=4.2e12, gather=5.5e12, ieee=45e12, tf32=330e12, half=650e12, programs=132, measured=True)
    monkeypatch.setattr(tuning, "rates", lambda index: rates)


@pytest.fixture(autouse=True)
def forgotten() -> None:
    """No operator repeats launches of another test, which may have changed what a launcher follows from."""
    forget()


@pytest.fixture(autouse=True)
def poison(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills new memory with NaN or a large integer, so that an element that nobody writes shows."""
    if "compiled" in request.fixturenames:
        return
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
    for kind, allocate in replay.EMPTY.items():
        monkeypatch.setitem(replay.EMPTY, kind, poisoned(allocate))


def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = allocate(*args, **kwargs)
        # A recorder of launches takes no step for its own but the allocation.
        with torch.no_grad(), _disable_current_modes() if replay.recorders else nullcontext():
            if out.is_floating_point():
                out.fill_(float("nan"))
            elif out.dtype is not torch.bool and not out.is_complex():
                out.fill_(0x5A5A5A5A >> max(32 - 8 * out.element_size(), 0))
        return out

    return call
