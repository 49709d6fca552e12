"""The output of a run: tables on the terminal, JSON for the record."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.engine.case import Case, Provider
from benchmarks.engine.runner import CaseResult, Outcome
from benchmarks.engine.timing import Ceilings, Timing
from gossamer._core import files


def floor_of(result: CaseResult, outcome: Outcome, ceilings: Ceilings) -> float:
    """Least seconds that the device needs for the case at this provider's precision."""
    case = result.case
    return ceilings.floor(case.bytes, case.flops, case.dtype, outcome.provider.precision)


def headline(result: CaseResult) -> Outcome | None:
    """Our first provider that was timed: the one that ratios speak of."""
    return next((o for o in result.outcomes if o.provider.ours and o.eager), None)


def case_table(result: CaseResult, ceilings: Ceilings) -> Table:
    """One row per provider: times per call, and ratios of them over our first provider's.

    Rate and share of the floor are of the graph time where there is one.
    """
    case, ours = result.case, headline(result)
    table = Table(title=escape(case.id), title_justify="left", title_style="bold", caption_justify="left")
    skipped = [f"{o.provider.name} ({o.message})" for o in result.outcomes if o.status == "skipped"]
    least = f"at least {case.flops:.3g} FLOP and {case.bytes:.3g} bytes, {case.flops / case.bytes:.3g} FLOP a byte"
    table.caption = escape("\n".join([least] + [f"left out: {'; '.join(skipped)}"] * bool(skipped)))
    table.add_column("provider", no_wrap=True)
    graphs = any(o.graph for o in result.outcomes)
    for column in ("eager p20-p80", "ratio", *(("graph p20-p80", "graph ratio") if graphs else ())):
        table.add_column(column, justify="right", no_wrap=True)
    metered = any(o.joules for o in result.outcomes)
    for column in ("rate", "of floor", *(("energy",) if metered else ()), "peak", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    for outcome in result.outcomes:
        name = f"[bold]{escape(outcome.provider.name)}[/]" if outcome.provider.ours else escape(outcome.provider.name)
        if outcome.eager is None:
            if outcome.status != "skipped":
                table.add_row(name, f"[bold red]{outcome.status}[/]")
            continue
        best = outcome.graph or outcome.eager
        by_bytes = case.bytes / ceilings.bandwidth >= floor_of(result, outcome, ceilings)
        table.add_row(
            name,
            _spread(outcome.eager),
            _ratio(outcome.eager, ours.eager if ours else None),
            *((_spread(outcome.graph), _ratio(outcome.graph, ours.graph if ours else None)) if graphs else ()),
            f"{case.tokens / best.median * 1e-3:,.1f} tokens/ms, {case.flops / best.median * 1e-12:,.4g} TF/s"
            if case.tokens
            else f"{case.bytes / best.median * 1e-9:,.1f} GB/s"
            if by_bytes
            else f"{case.flops / best.median * 1e-12:,.2f} TF/s",
            f"{floor_of(result, outcome, ceilings) / best.median:.0%}",
            *((_energy(case, outcome.joules),) if metered else ()),
            "" if outcome.peak is None else f"{outcome.peak / 2**20:,.1f} MiB",
            "" if outcome.error is None else f"{outcome.error:.1e}",
        )
    return table


def notes(result: CaseResult) -> list[str]:
    """A line for each thing that went wrong in the case."""
    lines = [f"{result.case.id}: {result.message}"] if result.message else []
    return lines + [
        f"{o.provider.name}: {o.status}: {o.message}" for o in result.outcomes if o.message and o.status != "skipped"
    ]


def summary_table(results: list[CaseResult]) -> Table:
    """One row per case: our time, and the times of the dense way and of the best peer at our precision over it."""
    table = Table(title="summary: gossamer's time, and its peers' times over it", title_justify="left")
    for column in ("case", "eager", "graph", "dense", "dense, graph", "best peer", "best peer, graph"):
        table.add_column(column, justify="left" if column == "case" else "right", overflow="fold")
    for result in results:
        ours = headline(result)
        if ours is None:
            skipped = result.outcomes and all(o.status == "skipped" for o in result.outcomes)
            table.add_row(escape(result.case.id), "[dim]not measured[/]" if skipped else "[red]none[/]")
            continue
        cells = [duration(ours.eager.median) if ours.eager else "", duration(ours.graph.median) if ours.graph else ""]
        peers = [o for o in result.outcomes if _is_peer(o.provider, ours.provider)]
        dense = next((o for o in peers if o.provider.name == "dense"), None)
        cells += [_ratio(dense.eager, ours.eager), _ratio(dense.graph, ours.graph)] if dense else ["", ""]
        for kind in ("eager", "graph"):
            timed = [(t.median, o) for o in peers if (t := getattr(o, kind))]
            best = min(timed, key=lambda pair: pair[0], default=None)
            cells.append(
                f"{_ratio(getattr(best[1], kind), getattr(ours, kind))} {best[1].provider.name}" if best else ""
            )
        table.add_row(escape(result.case.id), *cells)
    return table


def record(result: CaseResult, ceilings: Ceilings) -> dict[str, Any]:
    """The case as JSON: times in seconds, memory in bytes, ratios of every peer's time over each of ours."""
    case = result.case
    providers = []
    for outcome in result.outcomes:
        floor = floor_of(result, outcome, ceilings)
        providers.append(
            {
                "name": outcome.provider.name,
                "ours": outcome.provider.ours,
                "precision": outcome.provider.precision,
                "status": outcome.status,
                "message": outcome.message,
                "error": outcome.error if outcome.error is not None and math.isfinite(outcome.error) else None,
                "budget": case.budget_of(outcome.provider),
                "floor": floor,
                "share_of_floor": {
                    kind: floor / timing.median
                    for kind, timing in (("eager", outcome.eager), ("graph", outcome.graph))
                    if timing
                },
                "eager": asdict(outcome.eager) if outcome.eager else None,
                "graph": asdict(outcome.graph) if outcome.graph else None,
                "peak_bytes": outcome.peak,
                "joules": outcome.joules,
            }
        )
    return {
        "id": case.id,
        "room": case.room,
        "name": case.name,
        "parameters": dict(case.parameters),
        "dtype": str(case.dtype).removeprefix("torch."),
        "sweep": case.sweep,
        "bytes": case.bytes,
        "flops": case.flops,
        "tokens": case.tokens,
        "input_bytes": result.input_bytes,
        "message": result.message,
        "providers": providers,
        "ratios": {kind: _ratios(result, kind) for kind in ("eager", "graph")},
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content`, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_text("benchmarks", path, json.dumps(content, indent=1) + "\n")


def make_console() -> Console:
    """The terminal's width, or 160 columns where output goes to a file."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def duration(seconds: float) -> str:
    """Three or more significant digits in the fitting unit, as `24.1 us`."""
    factor, unit = _unit(seconds)
    return f"{_digits(seconds * factor)} {unit}"


def _unit(seconds: float) -> tuple[float, str]:
    return next(((f, u) for f, u in ((1e6, "us"), (1e3, "ms")) if seconds * f < 1000), (1.0, "s"))


def _digits(number: float) -> str:
    return f"{number:.{max(0, 2 - math.floor(math.log10(number))) if number > 0 else 0}f}"


def _energy(case: Case, joules: float | None) -> str:
    if not joules:
        return ""
    return f"{_digits(joules / case.tokens * 1e3)} mJ/token" if case.tokens else f"{_digits(joules * 1e3)} mJ"


def _spread(timing: Timing | None) -> str:
    if timing is None:
        return ""
    factor, _ = _unit(timing.median)
    return f"{duration(timing.median)} ({_digits(timing.p20 * factor)}-{_digits(timing.p80 * factor)})"


def _is_peer(provider: Provider, ours: Provider) -> bool:
    return not (provider.ours or provider.partial) and provider.precision == ours.precision


def _ratio(peer: Timing | None, ours: Timing | None) -> str:
    return f"{peer.median / ours.median:.2f}x" if peer and ours else ""


def _ratios(result: CaseResult, kind: str) -> dict[str, dict[str, float]]:
    timed = {o.provider: t.median for o in result.outcomes if (t := getattr(o, kind))}
    return {
        ours.name: {peer.name: seconds / timed[ours] for peer, seconds in timed.items() if not peer.ours}
        for ours in timed
        if ours.ours
    }
