"""Plots of a report."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

try:
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError("sparsity.Report.save: plots need matplotlib: pip install 'gossamer[cli]'.") from error

if TYPE_CHECKING:
    from gossamer.sparsity.report import Report

MEAN, MAX, GAIN, DEAD = "C0", "C7", "C2", "C3"
SHOWN = 6
"""Tokens at either end."""


def plots(report: Report) -> dict[str, Figure]:
    """Figures by name; those of which nothing is known are left out."""
    found = {"layers": _layers(report), "entries": _entries(report)}
    if report.positions().isfinite().any():
        found["positions"] = _positions(report)
    if report.tokens():
        found["tokens"] = _tokens(report)
    return found


def _layers(report: Report) -> Figure:
    """Mean and largest number of entries, gain in time, and dead neurons by layer."""
    rows = report.table()
    figure = Figure(figsize=(8, 7 if report.measured else 5), layout="constrained")
    panels = list(figure.subplots(3 if report.measured else 2, 1, sharex=True))
    entries, dead = panels[0], panels[-1]
    x = np.arange(len(rows))
    entries.bar(x, [row["mean"] for row in rows], color=MEAN, label="mean")
    entries.plot(x, [row["max"] for row in rows], "v", color=MAX, label="max")
    entries.set(ylabel="entries a token", yscale="symlog", ylim=(0, None))
    figure.legend(*entries.get_legend_handles_labels(), loc="outside upper right", ncols=2, fontsize=8)
    if report.measured:
        panels[1].plot(x, [row.get("speed-up", np.nan) for row in rows], "o-", color=GAIN)
        panels[1].axhline(1, color=GAIN, linewidth=0.8, linestyle=":")
        panels[1].set(ylabel="dense time over\nsparse time", ylim=(0, None))
    dead.bar(x, [100 * row["dead"] / row["neurons"] for row in rows], color=DEAD)
    dead.set(ylabel="neurons that\nnever fired (%)", xlabel="layer", ylim=(0, None))
    return figure


def _entries(report: Report) -> Figure:
    """How many tokens have how many entries: a column a layer, a row a range that doubles."""
    widest = max(found.num_neurons for found in report.layers.values())
    edges = np.concatenate([[0], 2 ** np.arange(int(np.ceil(np.log2(max(widest, 1)))) + 2)])
    shares = []
    for found in report.layers.values():
        held = found.histogram.cpu().numpy()
        sums = np.array([held[a:b].sum() for a, b in pairwise(edges)])
        shares.append(sums / max(1, sums.sum()))
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(np.array(shares).T, origin="lower", aspect="auto", cmap="Blues", vmin=0)
    labels = [f"{a}-{b - 1}" if b - a > 1 else f"{a}" for a, b in pairwise(edges)]
    axes.set_yticks(range(len(labels)), labels)
    axes.set(xlabel="layer", ylabel="entries of a token")
    figure.colorbar(image, label="share of tokens")
    return figure


def _positions(report: Report) -> Figure:
    """Mean entries by position, of each layer and of all."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for name in report.layers:
        means = report.positions(name).numpy()
        axes.plot(np.arange(1, len(means) + 1), means, color=MEAN, alpha=0.15, linewidth=0.8)
    means = report.positions().numpy()
    axes.plot(np.arange(1, len(means) + 1), means, color=MEAN, linewidth=2, label="all layers")
    axes.set(xscale="log", yscale="symlog", ylim=(0, None), xlabel="position", ylabel="mean entries")
    axes.legend(fontsize=8)
    return figure


def _tokens(report: Report) -> Figure:
    """The common tokens with the fewest and with the most entries."""
    tokens = report.tokens()
    few, many = tokens[:SHOWN], tokens[max(SHOWN, len(tokens) - SHOWN) :]
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    y = np.arange(len(few) + len(many))
    means = [mean for *_, mean in few + many]
    axes.bar_label(axes.barh(y, means, color=[MEAN] * len(few) + [MAX] * len(many)), fmt="%.1f", padding=3, fontsize=8)
    # What a token says may hold a dollar sign, which matplotlib would take for mathematics.
    axes.set_yticks(y, [repr(report.names(token)).replace("$", r"\$") for token, *_ in few + many])
    axes.set(xlabel="mean entries")
    return figure
