"""The page of `gossamer sae train`: autoencoders of one stream beside each other."""

from __future__ import annotations

import json
from functools import partial
from html import escape
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from gossamer.cli._train_report import Found, curves
from gossamer.cli.figure import svg
from gossamer.cli.page import counted, page, table
from gossamer.train.sae import DENSITIES, SAEConfig

_COLUMNS = {
    "explained": ("explained variance", "{:.2%}"),
    "l0": ("L0", "{:.1f}"),
    "dead": ("never fired", "{:.1%}"),
    "loss recovered": ("loss recovered", "{:.1%}"),
    "loss": ("model's loss with it", "{:.4f}"),
    "model loss": ("model's own loss", "{:.4f}"),
}


def read(folder: Path) -> list[Found]:
    """The autoencoders of a run, finished or not."""
    config = SAEConfig.load(folder / "config.json")
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    file = folder / "results.json"
    results = json.loads(file.read_text()) if file.exists() else [{} for _ in config.names]
    return [
        Found(name, config, [_own(record, f"/{i}") for record in records], results[i])
        for i, name in enumerate(config.names)
    ]


def _own(record: dict[str, float], suffix: str) -> dict[str, float]:
    """One autoencoder's part of a record: numbers of the others have their number behind the name."""
    numbered = {key for key in record if key.rpartition("/")[2].isdecimal() and not key.endswith(suffix)}
    return {key.removesuffix(suffix): value for key, value in record.items() if key not in numbered}


def render(title: str, found: list[Found]) -> str:
    """The whole page."""
    config = found[0].config
    figures = (
        ("Explained variance and L0 by step", (("explained", "explained variance"), ("l0", "L0"))),
        ("Loss and dead latents by step", (("loss", "loss"), ("dead", "dead latents"))),
    )
    drawn = [(name, svg(partial(curves, runs=found, keys=keys), 2.8)) for name, keys in figures]
    finished = [each for each in found if each.results]
    if finished:
        drawn.append(("How often latents fire, on rows held out", svg(lambda figure: _density(figure, finished), 2.8)))
    if len(finished) > 1:
        drawn.append(("Explained variance by L0", svg(lambda figure: _frontier(figure, finished), 2.8)))
    columns = {key: column for key, column in _COLUMNS.items() if any(key in each.results for each in found)}
    rows = [
        (
            each.name,
            *(form.format(each.results[key]) if key in each.results else "" for key, (_, form) in columns.items()),
        )
        for each in found
    ]
    names = ("autoencoder", *(label for label, _ in columns.values()))
    sizes = f"{counted(config.steps, 'step')} of {counted(config.batch, 'row')}"
    body = (
        f"<header><h1>{escape(title)}</h1><p>{escape(config.kind)}, {sizes}, "
        f"{found[0].last('tokens/s'):,.0f} rows a second; evaluated on {config.held_out:,} rows held out.</p></header>"
        f"{table('Autoencoders', names, rows)}"
        + "".join(f"<h2>{name}</h2><figure>{plot}</figure>" for name, plot in drawn)
    )
    return page(f"{title}: autoencoders", body)


def _density(figure: Figure, found: list[Found]) -> None:
    axes, (low, high, bins) = figure.subplots(), DENSITIES
    for number, each in enumerate(found):
        edges = np.logspace(low, high, bins + 1)
        axes.stairs(each.results["density"], edges, color=f"C{number}", label=each.label, linewidth=1.5)
    axes.set(xscale="log", xlabel="share of rows in which a latent fires", ylabel="latents")
    axes.legend(fontsize=9)


def _frontier(figure: Figure, found: list[Found]) -> None:
    axes = figure.subplots()
    for number, each in enumerate(found):
        axes.plot(each.results["l0"], each.results["explained"], "o", color=f"C{number}", label=each.label)
    axes.set(xlabel="L0", ylabel="explained variance")
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.legend(fontsize=9)
