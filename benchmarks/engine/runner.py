"""Runs one case: every provider is checked against the reference, then the right ones are timed in turn."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from benchmarks.engine.case import Case, Inputs, Provider, Tensors, absolute_error
from benchmarks.engine.timing import Timing, burst, calls_for, capture, energy, matmul_precision, synchronize

Status = Literal["ok", "WRONG", "error", "skipped"]


@dataclass
class Outcome:
    """The outcome of one provider: status, its exception, error, timings, peak memory in bytes, joules a call."""

    provider: Provider
    status: Status = "ok"
    message: str = ""
    error: float | None = None
    eager: Timing | None = None
    graph: Timing | None = None
    peak: int | None = None
    joules: float | None = None


@dataclass
class CaseResult:
    """A case's outcomes in the order of its providers; `message` says why a case has none."""

    case: Case
    outcomes: list[Outcome] = field(default_factory=list)
    message: str = ""
    input_bytes: int = 0

    @property
    def failed(self) -> bool:
        """Whether the case could not run, any provider was wrong, or one of ours raised (under capture too)."""
        return bool(self.message) or any(
            o.status == "WRONG" or (o.provider.ours and o.status != "skipped" and o.message) for o in self.outcomes
        )


@dataclass(frozen=True)
class Settings:
    """How long to measure: rounds over all providers, and seconds per burst of calls; and whether to check results.

    A provider that was timed for `limit` seconds in all sits out the rounds after the second.
    """

    rounds: int
    burst: float
    deadline: float = float("inf")
    verify: bool = True
    limit: float = float("inf")


def run_case(
    case: Case, device: torch.device, settings: Settings, seed: int, tell: Callable[[str], None] = lambda _: None
) -> CaseResult:
    """Check and time all providers of `case`. An exception of a provider becomes its outcome.

    A peer that is not installed is skipped, and so is a case about a package that is not installed.
    """
    result = CaseResult(case)
    torch.compiler.reset()  # a peer compiled for the last case's shapes must not run into the recompilation limit
    tell("inputs")
    try:
        inputs = case.make(device, torch.Generator(device).manual_seed(seed))
        reference = case.reference(*inputs[0]) if settings.verify else None
    except ModuleNotFoundError as error:
        result.outcomes = [Outcome(provider, "skipped", _missing(error)) for provider in case.providers]
        return result
    except Exception as error:
        result.message = f"inputs or reference: {_explain(error)}"
        return result
    result.input_bytes = sum(t.nbytes for t in inputs[0] if isinstance(t, torch.Tensor))
    with nullcontext() if case.grad else torch.inference_mode():
        _measure(result, inputs, reference, device, settings, tell)
    del inputs, reference
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return result


def _measure(
    result: CaseResult,
    inputs: Sequence[Inputs],
    reference: Tensors | None,
    device: torch.device,
    settings: Settings,
    tell: Callable[[str], None],
) -> None:
    runs = []
    for provider in result.case.providers:
        tell(provider.name)
        outcome = Outcome(provider)
        result.outcomes.append(outcome)
        missing = provider.missing(device)
        if missing is not None:
            outcome.status, outcome.message = "skipped", missing
            continue
        with _reported(outcome):
            runs.append(_Run(result.case, outcome, inputs, reference, device, settings))
    shuffled = random.Random(0)
    for done in range(settings.rounds):
        if done >= 3 and time.monotonic() > settings.deadline:
            break
        tell(f"round {done + 1} of {settings.rounds}")
        # In another order each time: a GPU at its power limit is faster after one that drew less.
        for run in shuffled.sample(runs, len(runs)):
            run.sample()
    for run in runs:
        run.finish()


class _Run:
    """A provider that was found right, ready to be timed: prepared inputs, calls per burst, and perhaps a graph."""

    def __init__(
        self,
        case: Case,
        outcome: Outcome,
        inputs: Sequence[Inputs],
        reference: Tensors | None,
        device: torch.device,
        settings: Settings,
    ) -> None:
        provider = outcome.provider
        self.outcome, self.device, self.energy = outcome, device, case.energy
        self.limit, self.spent = settings.limit, 0.0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.eager_times: list[float] = []
        self.graph_times: list[float] = []
        prepare = provider.prepare or _as_they_are
        with matmul_precision(provider.precision):
            self.arguments = [prepare(*copy) for copy in inputs]
            self._check(case, self(0), inputs[0], reference)
            outcome.peak = self._peak()
            self.calls = calls_for(self, device, settings.burst, len(inputs), settings.limit / 8)
            if provider.capturable and device.type == "cuda":
                try:
                    self.graph, output = capture(self, self.calls, device)
                except Exception as error:
                    outcome.message = f"graph capture: {_explain(error)}"
                    return
                self.graph.replay()
                synchronize(device)
                self._check(case, output, inputs[0], reference, "replayed from a CUDA graph: ")

    def __call__(self, index: int) -> Any:
        return self.outcome.provider.call(*self.arguments[index % len(self.arguments)])

    def sample(self) -> None:
        if self.outcome.status != "ok" or (len(self.eager_times) >= 2 and self.spent > self.limit):
            return
        with _reported(self.outcome), matmul_precision(self.outcome.provider.precision):
            self.eager_times.append(burst(self, self.calls, self.device))
            if self.graph is not None:
                graph = self.graph
                self.graph_times.append(burst(lambda _: graph.replay(), 1, self.device) / self.calls)
            self.spent += self.calls * (self.eager_times[-1] + sum(self.graph_times[-1:]))

    def finish(self) -> None:
        if self.outcome.status == "ok":
            self.outcome.eager = Timing.of(self.eager_times, self.calls)
            self.outcome.graph = Timing.of(self.graph_times, self.calls) if self.graph_times else None
            if self.energy:
                with _reported(self.outcome):
                    # Bursts as short as may be: a model's call takes 0.1 s, and two bursts more than are measured wait.
                    self.outcome.joules = energy(self, len(self.arguments), 0.4, self.device)

    def _check(self, case: Case, output: Any, inputs: Inputs, reference: Tensors | None, how: str = "") -> None:
        if reference is None:
            return
        provider = self.outcome.provider
        tensors = provider.result(output, *inputs) if provider.result else _as_tuple(output)
        measure = case.error if case.atol is None else absolute_error
        error, budget = measure(tensors, reference), case.budget_of(provider)
        self.outcome.error = error if self.outcome.error is None else max(error, self.outcome.error)
        if not error <= budget:
            raise _Wrong(f"{how}error {error:.2g} exceeds {budget:.2g}")

    def _peak(self) -> int | None:
        if self.device.type != "cuda":
            return None
        synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self(0)
        synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before


class _Wrong(Exception):
    """A provider's result exceeds its error budget."""


@contextmanager
def _reported(outcome: Outcome) -> Iterator[None]:
    try:
        yield
    except _Wrong as wrong:
        outcome.status, outcome.message = "WRONG", str(wrong)
    except ModuleNotFoundError as error:
        outcome.status, outcome.message = "error" if outcome.provider.ours else "skipped", _missing(error)
    except Exception as error:
        outcome.status, outcome.message = "error", _explain(error)


def _missing(error: ModuleNotFoundError) -> str:
    return f"needs the package {str(error.name).partition('.')[0]}, which is not installed"


def _explain(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


def _as_they_are(*inputs: Any) -> Inputs:
    return inputs


def _as_tuple(output: Any) -> Tensors:
    return output if isinstance(output, tuple) else (output,)
