"""`python -m benchmarks`: the engine on toy cases, and the shipped cases as they are listed and checked."""

import io
import json
import os
import signal
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.__main__ import main
from benchmarks.engine import Case, Provider, command, copies, random_rows, relative_error
from benchmarks.engine.case import load_cases
from benchmarks.engine.random_cases import draw_cases
from benchmarks.engine.report import duration, summary_table
from benchmarks.engine.runner import CaseResult, Settings, run_case
from benchmarks.engine.timing import Ceilings, Timing

CPU = torch.device("cpu")
SETTINGS = Settings(rounds=2, burst=1e-4)

TOY = """
import torch
from benchmarks.engine import Case, Provider

def broken(a, b):
    raise RuntimeError("not installed")

def absent(a, b):
    import a_peer_that_nobody_has.ops

def cases(device, quick):
    providers = [
        Provider("gossamer", torch.matmul, ours=True),
        Provider("dense", torch.matmul),
        Provider("broken", broken),
        Provider("elsewhere", torch.matmul, devices=("cuda",)),
        Provider("absent", absent),
    ]
    {extra}
    for n in (4, 8):
        yield Case(
            room="toy", name="product", parameters={{"n": n}}, dtype=torch.float32, sweep="n",
            make=lambda d, g, n=n: [tuple(torch.randn(2, n, n, generator=g, device=d)) for _ in range(3)],
            providers=tuple(providers), reference=lambda a, b: (a.double() @ b.double(),),
            bytes=12 * n * n, flops=2 * n**3,
        )
"""


def toy_case(*providers: Provider, grad: bool = False) -> Case:
    return Case(
        room="toy",
        name="double",
        parameters={"n": 6},
        dtype=torch.float32,
        make=lambda device, generator: [(torch.randn(6, 6, generator=generator),)],
        providers=providers,
        reference=lambda x: (2 * x.double(),),
        bytes=1,
        flops=1,
        grad=grad,
    )


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of benchmarks with one room; returns where its results go."""
    folder = tmp_path / f"toys_{tmp_path.name.replace('-', '_')}"
    (folder / "toy").mkdir(parents=True)
    (folder / "toy" / "bench_product.py").write_text(TOY.format(extra=""))
    monkeypatch.setattr(command, "BENCHMARKS", folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path / "out"


def bench(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["--device", "cpu", "--quick", *map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_tables_json_and_plot(toys: Path) -> None:
    code, output = bench("toy", "--out", toys)
    assert code == 0, output
    assert "toy/product/n=8,float32" in output and "summary" in output
    assert "broken: error: RuntimeError: not installed" in output
    (file,) = toys.glob("*.json")
    content = json.loads(file.read_text())
    assert torch.__version__.startswith(content["versions"]["torch"]) and content["device"]["type"] == "cpu"
    assert content["ceilings"]["bandwidth"] > 0 and content["command"].startswith("python -m benchmarks")
    first = content["cases"][0]
    by_name = {provider["name"]: provider for provider in first["providers"]}
    assert [by_name[name]["status"] for name in ("gossamer", "broken", "elsewhere")] == ["ok", "error", "skipped"]
    missing = "needs the package a_peer_that_nobody_has, which is not installed"
    assert (by_name["absent"]["status"], by_name["absent"]["message"]) == ("skipped", missing)
    assert missing in " ".join(output.split()) and "absent: " not in output
    eager = by_name["gossamer"]["eager"]
    assert 0 < eager["p20"] <= eager["median"] <= eager["p80"] and eager["samples"] == 3
    assert by_name["dense"]["peak_bytes"] is None and by_name["broken"]["eager"] is None
    ratio = first["ratios"]["eager"]["gossamer"]["dense"]
    assert ratio == pytest.approx(by_name["dense"]["eager"]["median"] / eager["median"])
    (picture,) = toys.glob("*.png")
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stem.endswith("-product")


def test_a_case_about_a_package_that_is_not_there_is_no_failure(toys: Path) -> None:
    file = command.BENCHMARKS / "toy" / "bench_product.py"
    file.write_text(file.read_text().replace("make=lambda d, g, n=n: [", "make=lambda d, g, n=n: absent(d, g) or ["))
    code, output = bench("toy", "--out", toys)
    assert code == 0 and "not measured" in output and "a_peer_that_nobody_has" in output
    (written,) = toys.glob("*.json")
    statuses = {p["status"] for case in json.loads(written.read_text())["cases"] for p in case["providers"]}
    assert statuses == {"skipped"}


@pytest.mark.parametrize(
    "extra, status",
    [
        ('providers.append(Provider("off", lambda a, b: (a @ b) * 1.001))', "off: WRONG"),
        ('providers.insert(0, Provider("mine", broken, ours=True))', "mine: error: RuntimeError"),
        ('providers.insert(0, Provider("mine", absent, ours=True))', "mine: error: needs the package a_peer"),
    ],
    ids=["a wrong provider", "an error of ours", "a package that ours needs"],
)
def test_exit_code_is_1(toys: Path, extra: str, status: str) -> None:
    (command.BENCHMARKS / "toy" / "bench_product.py").write_text(TOY.format(extra=extra))
    code, output = bench("toy", "--out", toys)
    assert code == 1 and status in output


SWEEP = """
import torch
from benchmarks.engine import Case, Provider, log_uniform

RANGES = "n 2-64"

def draw(random, device, quick):
    n = log_uniform(random, 2, 64)
    return Case(
        room="toy", name="product", parameters={"n": n}, dtype=torch.float32,
        make=lambda d, g: [tuple(torch.randn(2, n, n, generator=g, device=d))],
        providers=(
            Provider("gossamer", torch.matmul, ours=True), Provider("gossamer, another", torch.matmul, ours=True),
            Provider("dense", lambda a, b: torch.matmul(a, b)), Provider("torch.compile", torch.matmul),
            Provider("no product", lambda a, b: a @ b, partial=True),
        ),
        reference=lambda a, b: (a.double() @ b.double(),), bytes=12 * n * n, flops=2 * n**3,
    )
"""


@pytest.fixture
def swept(toys: Path) -> Path:
    """With cases at random in their room, too."""
    (command.BENCHMARKS / "toy" / "sweep.py").write_text(SWEEP)
    return toys


def test_a_sweep_at_random(swept: Path) -> None:
    code, output = bench("sweep", "--out", swept, "--cases", 7, "--seed", 3)
    assert code == 0, output
    assert "below 1.00" in output and "worst, beside dense PyTorch" in output
    (file,) = swept.glob("*.json")
    content = json.loads(file.read_text())
    assert len(content["cases"]) == 7 and content["settings"]["seed"] == 3 and file.stem.startswith("sweep-")
    sizes = [case["parameters"]["n"] for case in content["cases"]]
    assert all(2 <= n <= 64 for n in sizes) and len(set(sizes)) > 1
    # Ours, and the peers that need not compile.
    assert [p["name"] for p in content["cases"][0]["providers"]] == ["gossamer", "dense"]
    figures = content["summary"]["dense"]["all"]
    found = [case["ratios"]["eager"]["gossamer"]["dense"] for case in content["cases"]]
    assert figures["cases"] == 7 and figures["below_1.00"] == sum(ratio < 1 for ratio in found) / 7
    assert figures["worst"][0]["ratio"] == min(found) and figures["worst"][-1]["ratio"] == max(found)
    assert figures["geometric_mean"] == pytest.approx(torch.tensor(found).log().mean().exp().item())
    (picture,) = swept.glob("*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert figures == content["summary"]["dense"]["toy"] == content["summary"]["dense"]["toy/product"]
    assert content["settings"]["limit"] == 0.25 and content["seconds"] > 0 and "not_run" not in content
    assert "7 cases in" in output and "s each" in output
    # The same seed draws the same shapes.
    again = bench("sweep", "--cases", 7, "--seed", 3, "--list")[1]
    assert again.split() == [case["id"] for case in content["cases"]]
    assert bench("sweep", "--cases", 7, "--seed", 4, "--list")[1] != again


def test_a_terminated_sweep_keeps_what_it_has_and_goes_on(swept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def terminated(*arguments: object) -> CaseResult:
        calls.append(arguments)
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return run_case(*arguments)

    monkeypatch.setattr(command, "run_case", terminated)
    before = signal.getsignal(signal.SIGTERM)
    code, output = bench("sweep", "--out", swept, "--cases", 6)
    (file,) = swept.glob("*.json")
    assert code == 130 and f"interrupted; the finished cases are in {file}" in output
    assert signal.getsignal(signal.SIGTERM) is before
    first = json.loads(file.read_text())
    ids = bench("sweep", "--cases", 6, "--list")[1].split()
    assert [case["id"] for case in first["cases"]] == ids[:3] and first["not_run"] == ids[3:]
    assert first["summary"]["dense"]["all"]["cases"] == 3

    monkeypatch.setattr(command, "run_case", run_case)
    code, output = bench("sweep", "--out", swept, "--cases", 6, "--resume")
    assert code == 0 and "3 cases are kept" in output
    second = json.loads(file.read_text())
    assert second["cases"][:3] == first["cases"] and [case["id"] for case in second["cases"]] == ids
    assert "not_run" not in second and second["seconds"] > first["seconds"]
    assert second["summary"]["dense"]["all"]["cases"] == 6

    code, output = bench("sweep", "--out", swept, "--cases", 6, "--resume", "--rounds", 7)
    assert code == 2 and "--resume needs the settings that" in output and "Leave out --resume" in output
    assert json.loads(file.read_text()) == second


def test_a_killed_sweep_has_written(swept: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def killed(*arguments: object) -> CaseResult:
        (file,) = swept.glob("*.json")
        content = json.loads(file.read_text())
        assert len(content["cases"]) == 1 and len(content["not_run"]) == 2
        raise SystemExit(9)

    def first(*arguments: object) -> CaseResult:
        monkeypatch.setattr(command, "run_case", killed)
        return run_case(*arguments)

    monkeypatch.setattr(command, "run_case", first)
    assert bench("sweep", "--out", swept, "--cases", 3)[0] == 9


def test_a_sweep_that_breaks_keeps_what_it_has_and_tries_again(swept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[CaseResult] = []

    def broken(case: Case, *arguments: object) -> CaseResult:
        if len(results) == 2:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        result = run_case(case, *arguments)
        if results:
            result.outcomes.clear()
            result.message = "inputs or reference: out of memory"
        results.append(result)
        return result

    monkeypatch.setattr(command, "run_case", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        bench("sweep", "--out", swept, "--cases", 4)
    (file,) = swept.glob("*.json")
    content = json.loads(file.read_text())
    assert len(content["cases"]) == 2 and len(content["not_run"]) == 2
    monkeypatch.setattr(command, "run_case", run_case)
    # The case that was not timed is tried again.
    code, output = bench("sweep", "--out", swept, "--cases", 4, "--resume")
    assert code == 0 and "1 cases are kept" in output
    again = json.loads(file.read_text())["cases"]
    assert again[0] == content["cases"][0] and len(again) == 4 and all(case["providers"] for case in again)


def test_rooms_of_a_sweep_take_turns() -> None:
    folder = command.BENCHMARKS
    drawn = [case.room for case in draw_cases(folder, None, 3, 0, CPU, True)]
    rooms = sorted(file.parent.name for file in folder.glob("*/sweep.py"))
    assert drawn == rooms * 3
    alone = draw_cases(folder, "sae", 3, 0, CPU, True)
    assert [case.id for case in alone] == [case.id for case in draw_cases(folder, "sae", 9, 0, CPU, True)][:3]


def test_a_slow_provider_is_timed_no_longer_than_its_limit() -> None:
    calls = []

    def slow(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        time.sleep(0.02)
        return 2 * x

    case = toy_case(Provider("slow", slow, ours=True), Provider("dense", lambda x: 2 * x))
    by_name = {o.provider.name: o for o in run_case(case, CPU, Settings(9, 0.1, limit=0.08), 0).outcomes}
    timed = by_name["slow"].eager
    # 5 calls would fill a burst, and half a one an eighth of the limit. A busy machine sleeps longer than it is asked.
    assert timed is not None and timed.calls == 1 and 2 <= timed.samples <= 5 and len(calls) <= 8
    other = by_name["dense"].eager
    assert other is not None and other.samples >= timed.samples


def test_shipped_ranges_draw_what_runs() -> None:
    """Of every room a case that is right; that ranges are stated; that a GPU's are drawn, too."""
    folder = command.BENCHMARKS
    cases = draw_cases(folder, None, 1, 0, CPU, True)
    assert {case.room for case in cases} >= {"sae", "gemm", "rowsparse"}
    for case in cases:
        result = run_case(case, CPU, Settings(1, 1e-4), 0)
        assert not result.failed, (case.id, result)
    for file in folder.glob("*/sweep.py"):
        assert "log-uniform" in import_module(f"benchmarks.{file.parent.name}.sweep").RANGES
        drawn = draw_cases(folder, file.parent.name, 50, 1, torch.device("cuda"), False)
        assert len({case.id for case in drawn}) > 40 and len({case.dtype for case in drawn}) == 3


@pytest.mark.parametrize("room", ["gemm", "rowsparse", "sae"])
def test_wild_ranges_reach_beyond_the_stated_ones(room: str) -> None:
    """A room draws within the sizes and densities that it states, and beyond them where it is asked to."""

    def within(parameters: dict[str, int]) -> bool:
        rows, columns = parameters.get("N", parameters.get("F", 0)), parameters.get("K", parameters.get("D", 2**23))
        entries = parameters.get("nnz", parameters.get("L0", parameters.get("k", 1)))
        whole = (rows | columns) % 64 == 0
        return whole and columns >= 256 and rows >= 1024 and rows * columns >= 2**23 and entries * 64 <= rows

    for wild in (False, True):
        cases = draw_cases(command.BENCHMARKS, room, 60, 2, torch.device("cuda"), False, wild)
        outside = [case.id for case in cases if not within(case.parameters)]
        assert len(outside) > 20 if wild else not outside, outside


def test_help_names_the_rooms() -> None:
    result = CliRunner().invoke(main, ["--help"], env={"COLUMNS": "200"})
    said = " ".join(result.output.replace("│", " ").split())
    assert "attention, blocksparse, ffn, gemm, integrations, nn, rowsparse, sae. All of them by default" in said


def test_a_spent_budget_is_said(toys: Path) -> None:
    code, output = bench("toy", "--out", toys, "--budget", "1e-9")
    assert code == 0 and "1 cases not run: toy/product/n=8,float32" in output
    (file,) = toys.glob("*.json")
    content = json.loads(file.read_text())
    assert [case["id"] for case in content["cases"]] == ["toy/product/n=4,float32"]
    assert content["not_run"] == ["toy/product/n=8,float32"]


@pytest.mark.parametrize("finished", [0, 1])
def test_interruption_says_what_is_kept(toys: Path, monkeypatch: pytest.MonkeyPatch, finished: int) -> None:
    calls = []

    def interrupted(*arguments: object) -> CaseResult:
        calls.append(arguments)
        if len(calls) > finished:
            raise KeyboardInterrupt
        return run_case(*arguments)

    monkeypatch.setattr(command, "run_case", interrupted)
    code, output = bench("toy", "--out", toys)
    files = list(toys.glob("*.json"))
    assert code == 130 and len(files) == finished
    kept = f"the finished cases are in {files[0]}" if finished else "nothing was written"
    assert output.endswith(f"benchmarks: interrupted; {kept}\n")
    assert all(len(json.loads(file.read_text())["cases"]) == 1 for file in files)


def test_nothing_is_measured_without_a_folder_to_write_to(toys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(command, "measure_ceilings", measured)
    toys.touch()
    code, output = bench("--out", toys)
    assert code == 2
    assert f"benchmarks: --out must be a folder that can be written to, got {toys}: File exists" in output


def test_list_and_case(toys: Path) -> None:
    assert bench("--list")[1].split() == ["toy/product/n=4,float32", "toy/product/n=8,float32"]
    assert bench("--list", "--case", "*n=8*")[1].split() == ["toy/product/n=8,float32"]
    assert bench("--list", "--case", "product")[1].count("\n") == 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere"], "ROOM must be one of toy, got 'nowhere'"),
        (["--case", "nothing"], "--case must match a name (product)"),
        (["--device", "abacus"], "benchmarks: --device must be auto or a device of this machine (cpu"),
        (["--device", "cuda:99"], "got 'cuda:99'"),
        (["--budget", "0"], "--budget must be positive, got 0; leave it out"),
        (["--budget", "-5"], "--budget must be positive, got -5; leave it out"),
        (["--budget", "nan"], "--budget must be positive, got nan; leave it out"),
        (["toy", "--cases", "3"], "--room, --cases, --resume and --wild belong to a sweep"),
        (["toy", "--resume"], "--room, --cases, --resume and --wild belong to a sweep"),
        (["sweep", "--case", "x*"], "shapes choose among fixed cases"),
        (["sweep", "--room", "attic"], "--room must be one of"),
        (["toy", "--provider", "nobody"], "one of absent, broken, dense, elsewhere, gossamer, got 'nobody'"),
        (["toy", "--length", "128"], "left out: 2 of 2 cases of toy/bench_product.py"),
        (["toy", "--length", "128"], "benchmarks: no case of toy has that --length; --list shows every case."),
        (["toy", "--dtype", "int8"], "--dtype must be one of float32, float16, bfloat16, got 'int8'"),
    ],
)
def test_bad_arguments(toys: Path, arguments: list[str], message: str) -> None:
    code, output = bench(*arguments)
    assert code == 2 and message in output


def test_wrong_results_are_not_timed() -> None:
    def off_by_one_entry(x: torch.Tensor) -> torch.Tensor:
        out = 2 * x
        out[3, 2] = 0
        return out

    wrong, right, shape = run_case(
        toy_case(
            Provider("wrong", off_by_one_entry),
            Provider("right", lambda x: 2 * x),
            Provider("shape", lambda x: 2 * x[:5]),
        ),
        CPU,
        SETTINGS,
        seed=0,
    ).outcomes
    assert (wrong.status, right.status, shape.status) == ("WRONG", "ok", "WRONG")
    assert wrong.eager is None and right.eager is not None and right.eager.samples == 2
    assert "exceeds" in wrong.message


def test_prepare_result_and_precision() -> None:
    seen = []

    def call(x: torch.Tensor, factor: int) -> torch.Tensor:
        seen.append((torch.get_float32_matmul_precision(), torch.is_inference_mode_enabled()))
        return x * factor

    provider = Provider(
        "p", call, prepare=lambda x: (x, 4), result=lambda out, x: (out / 2,), precision="high", ours=True
    )
    before = torch.get_float32_matmul_precision()
    result = run_case(toy_case(provider), CPU, SETTINGS, seed=0)
    assert not result.failed and set(seen) == {("high", True)}
    assert torch.get_float32_matmul_precision() == before
    run_case(toy_case(provider, grad=True), CPU, SETTINGS, seed=0)
    assert seen[-1] == ("high", False)


def test_best_peer_does_all_of_the_work() -> None:
    result = run_case(
        toy_case(
            Provider("gossamer", lambda x: 2 * x, ours=True),
            Provider("slow", lambda x: [2 * x for _ in range(1000)][-1]),
            Provider("part", lambda x: x, result=lambda out, x: (2 * out,), partial=True),
        ),
        CPU,
        SETTINGS,
        seed=0,
    )
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(summary_table([result]))
    text = console.export_text()
    assert "slow" in text and "part" not in text


@pytest.mark.parametrize(
    "seconds, text",
    [(0, "0 us"), (3.456e-6, "3.46 us"), (24.12e-6, "24.1 us"), (0.5, "500 ms"), (1234, "1234 s")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graph_times_and_peak_memory() -> None:
    def syncs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a @ b) * (1 + 0 * a.sum().item())

    device = torch.device("cuda")
    case = Case(
        room="toy",
        name="product",
        parameters={},
        dtype=torch.float32,
        make=lambda d, g: [tuple(torch.randn(2, 64, 64, device=d, generator=g)) for _ in range(5)],
        providers=(Provider("gossamer", torch.matmul, ours=True, capturable=True), Provider("syncs", syncs)),
        reference=lambda a, b: (a.double() @ b.double(),),
        bytes=1,
        flops=1,
    )
    result = run_case(case, device, SETTINGS, seed=0)
    first, second = result.outcomes
    assert not result.failed and first.graph is not None and first.graph.calls >= 5
    assert first.peak is not None and first.peak >= 64 * 64 * 4 and second.graph is None
    broken = run_case(
        Case(**{**vars(case), "providers": (Provider("syncs", syncs, ours=True, capturable=True),)}),
        device,
        SETTINGS,
        0,
    )
    assert broken.failed and broken.outcomes[0].message.startswith("graph capture: ")
    assert broken.outcomes[0].eager is not None
    assert torch.rand(1, device=device) < 1  # the generator is out of the capture that failed


def test_failing_inputs_are_a_failed_case() -> None:
    case = toy_case(Provider("p", lambda x: x))
    broken = Case(**{**vars(case), "make": lambda *_: 1 / 0})
    result = run_case(broken, CPU, SETTINGS, seed=0)
    assert result.failed and "ZeroDivisionError" in result.message


def test_relative_error_judges_each_row() -> None:
    want = torch.ones(1000, 4, dtype=torch.float64)
    got = want.clone()
    got[7] = 0
    assert relative_error((got,), (want,)) == 1
    assert relative_error((want,), (want,)) == 0
    assert relative_error((want * float("nan"),), (want,)) == float("inf")
    assert relative_error((want[:3],), (want,)) == float("inf")
    assert relative_error((want, want), (want,)) == float("inf")


def test_random_rows_have_exactly_nnz_positive_entries() -> None:
    x = random_rows(9, 50, 7, torch.bfloat16, CPU, torch.Generator().manual_seed(0))
    assert x.dtype == torch.bfloat16 and (x > 0).sum(1).tolist() == [7] * 9 and (x < 0).sum() == 0
    assert len({tuple(row.nonzero().flatten().tolist()) for row in x}) == 9


def test_copies_exceed_the_cache_unless_limited() -> None:
    assert copies(CPU, 1 << 30) == 1
    assert copies(CPU, 1 << 20) * (1 << 20) >= 3 * (32 << 20)
    assert copies(CPU, 1, limit=5) == 5


def test_floor_takes_the_larger_term() -> None:
    ceilings = Ceilings(bandwidth=100.0, gemm={"float32": 10.0, "tf32": 50.0, "bfloat16": 200.0})
    assert ceilings.floor(100, 1000, torch.float32, "highest") == 100
    assert ceilings.floor(100, 1000, torch.float32, "high") == 20
    assert ceilings.floor(10_000, 1000, torch.bfloat16, "highest") == 100
    assert Timing.of([3.0, 1.0, 2.0], 4) == Timing(2.0, pytest.approx(1.4), pytest.approx(2.6), 3, 4)


def test_shipped_cases_have_unique_ids() -> None:
    folder = command.BENCHMARKS
    for quick in (True, False):
        ids = [case.id for case in load_cases(folder, None, None, CPU, quick)]
        assert len(ids) == len(set(ids)) and any(i.startswith("sae/decode/") for i in ids)


def test_one_provider_of_one_case(toys: Path) -> None:
    code, text = bench("toy", "--out", toys, "--provider", "goss*", "--case", "*n=4*")
    assert code == 0 and "dense" not in text.split("summary")[0]


def test_results_that_nobody_checks(toys: Path) -> None:
    code, _ = bench("toy", "--out", toys, "--skip-verify", "--provider", "dense")
    found = json.loads(next(toys.glob("*.json")).read_text())
    assert code == 0 and found["cases"][0]["providers"][0]["error"] is None
    assert found["cases"][0]["providers"][0]["eager"]["median"] > 0


@pytest.mark.parametrize("option, calls", [("--profile", 3), ("--ncu", 1)])
def test_calls_for_a_profiler(toys: Path, option: str, calls: int) -> None:
    code, text = bench("toy", "--out", toys, option, "--provider", "dense", "--case", "*n=4*")
    assert code == 0 and "toy/product/n=4,float32: dense" in text and not toys.exists()
    row = next(line for line in text.splitlines() if line.strip().startswith("aten::mm"))
    assert row.split()[-1] == str(calls)
