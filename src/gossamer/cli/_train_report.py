"""The page of `gossamer train report`: runs beside each other, in the figures of the paper."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from gossamer.cli.figure import svg
from gossamer.cli.page import counted, page, table
from gossamer.train import Config

SETTLED = 0.1
"""The share of the steps at the end that a run's figures are medians of."""


@dataclass(frozen=True)
class Found:
    """A run: its name, configuration, the records of its steps, and the entry of its device in `results.json`."""

    name: str
    config: Any
    records: list[dict[str, float]]
    results: dict[str, Any]

    def last(self, key: str) -> float:
        """The median of the last steps; NaN where nothing is known."""
        some = self.records[-max(1, round(SETTLED * len(self.records))) :]
        return median([record[key] for record in some if key in record] or [float("nan")])

    @property
    def label(self) -> str:
        """The name for figures, in which a dollar sign would begin a formula."""
        return self.name.replace("$", r"\$")

    @property
    def validation(self) -> float:
        return next((r["validation"] for r in reversed(self.records) if "validation" in r), float("nan"))


def read(folder: Path) -> Found:
    """Raises ValueError where no run is."""
    log, results = folder / "log.jsonl", folder / "results.json"
    if not log.exists() or not log.stat().st_size:
        raise ValueError(f"gossamer train report: RUNS must be folders of `gossamer train run`, got {folder}.")
    records = [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
    known = json.loads(results.read_text()) if results.exists() else {}
    return Found(folder.resolve().name, Config.load(folder / "config.json"), records, known)


def render(runs: list[Found]) -> str:
    """The whole page."""
    rows = [_row(run) for run in runs]
    names = ("run", "activation", "L1", "validation loss", "L0", "dead", "tokens/s", "peak", "mJ a token")
    figures = (
        ("Loss by step", lambda figure: curves(figure, runs, (("loss", "cross-entropy"),), zoomed=True)),
        ("Loss and active neurons, by weight of L1", lambda figure: _by_weight(figure, runs, "validation", "l0")),
        ("Speed and memory, by weight of L1", lambda figure: _by_weight(figure, runs, "tokens/s", "peak_bytes")),
        (
            "Active and dead neurons by step",
            lambda figure: curves(figure, runs, (("l0", "active neurons (L0)"), ("dead", "dead neurons"))),
        ),
        ("Active and dead neurons by layer, at the end", lambda figure: _by_layer(figure, runs)),
    )
    drawn = "".join(f"<h2>{title}</h2><figure>{svg(draw, 2.8)}</figure>" for title, draw in figures)
    config = runs[0].config
    body = (
        f"<header><h1>{escape(', '.join(run.name for run in runs))}</h1><p>{config.parameters:,} parameters, "
        f"{counted(config.layers, 'layer')} of {config.intermediate:,} neurons, {config.tokens_per_step:,} tokens a "
        f"step; medians of the last {SETTLED:.0%} of the steps.</p></header>"
        f"{table('Runs', names, rows)}{drawn}"
    )
    return page("gossamer train", body)


def _row(run: Found) -> tuple[str, ...]:
    config, peak, energy = run.config, run.last("peak_bytes"), run.results.get("mJ/token")
    return (
        run.name,
        config.activation + ("" if config.gated else ", plain"),
        f"{config.l1:g}" + (f", reinit {config.reinitialize:g}" if config.reinitialize else ""),
        f"{run.validation:.4f}",
        f"{run.last('l0'):.1f} of {config.intermediate:,}",
        f"{run.last('dead'):.1%}",
        f"{run.last('tokens/s'):,.0f}",
        "" if np.isnan(peak) else f"{peak / 2**30:.1f} GiB",
        "" if energy is None else f"{energy:.3g}",
    )


def curves(figure: Figure, runs: list[Found], keys: tuple[tuple[str, str], ...], zoomed: bool = False) -> None:
    """A panel for each key of the records, with its label."""
    panels = figure.subplots(1, len(keys), squeeze=False)[0]
    for axes, (key, label) in zip(panels, keys):
        for number, run in enumerate(runs):
            known = [record for record in run.records if key in record]
            width = max(1, len(known) // 100)
            values = [record[key] for record in known]
            smooth: Any = np.convolve(values, np.ones(width) / width, "valid") if known else []
            steps = [record["step"] for record in known][width - 1 :]
            axes.plot(steps, smooth, color=f"C{number}", label=run.label)
        axes.set(title=label, xlabel="step")
        if zoomed:
            low = min(record["loss"] for run in runs for record in run.records)
            late = max(run.records[len(run.records) // 10]["loss"] for run in runs)
            axes.set_ylim(0.98 * low, max(1.02 * late, low * 1.02))
        else:
            axes.set_ylim(bottom=0)
        if key in ("dead", "explained"):
            axes.yaxis.set_major_formatter(PercentFormatter(1))
    panels[0].legend(fontsize=9)


def _by_weight(figure: Figure, runs: list[Found], *keys: str) -> None:
    labels: dict[str, tuple[str, Callable[[Found], float]]] = {
        "validation": ("validation loss", lambda run: run.validation),
        "l0": ("active neurons (L0)", lambda run: run.last("l0")),
        "tokens/s": ("tokens a second", lambda run: run.last("tokens/s")),
        "peak_bytes": ("peak memory, GiB", lambda run: run.last("peak_bytes") / 2**30),
    }
    # Memory is known on GPUs alone.
    keys = tuple(key for key in keys if not np.isnan([labels[key][1](run) for run in runs]).all())
    panels = figure.subplots(1, len(keys), squeeze=False)[0]
    for axes, key in zip(panels, keys):
        title, value = labels[key]
        bars = axes.bar(range(len(runs)), [value(run) for run in runs], color=[f"C{i}" for i in range(len(runs))])
        axes.bar_label(bars, [_short(value(run)) for run in runs], fontsize=9)
        axes.set_xticks(range(len(runs)), [f"{run.label}\n{run.config.l1:g}" for run in runs])
        axes.set(title=title)
        if key == "validation" and np.isfinite([run.validation for run in runs]).all():
            axes.set_ylim(0.95 * min(run.validation for run in runs))


def _by_layer(figure: Figure, runs: list[Found]) -> None:
    panels: tuple[Axes, Axes] = figure.subplots(1, 2)
    for axes, key, title in zip(panels, ("l0", "dead"), ("active neurons (L0)", "dead neurons")):
        for number, run in enumerate(runs):
            layers = [run.last(f"{key}/{layer:02}") for layer in range(run.config.layers)]
            axes.plot(range(len(layers)), layers, color=f"C{number}", marker="o", markersize=3, label=run.label)
        axes.set(title=title, xlabel="layer")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(bottom=0)
    panels[1].yaxis.set_major_formatter(PercentFormatter(1))
    panels[0].legend(fontsize=9)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
