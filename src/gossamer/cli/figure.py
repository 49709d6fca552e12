"""Plots for a page, as SVG that takes its colours and font from it."""

from __future__ import annotations

import re
from collections.abc import Callable
from io import StringIO
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

# Colours that occur nowhere else stand for the page's own, so that a plot follows its light or dark scheme.
INK, MUTED, DENSE, SPARSE = "#000001", "#000002", "#000003", "#000004"
_PAGE = {INK: "--ink", MUTED: "--muted", DENSE: "--dense", SPARSE: "--sparse"}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "gossamer",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "lines.linewidth": 1.8,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "legend.frameon": False,
}


def rate_histogram(axes: Axes, rates: np.ndarray) -> None:
    """A histogram of firing rates `[d_sae]`, without the latents that never fired."""
    fired = rates[rates > 0]
    if len(fired):
        edges = np.logspace(np.log10(fired.min()) - 0.05, np.log10(fired.max()) + 0.05, 50)
        axes.hist(fired, bins=edges.tolist(), color=SPARSE)
    axes.set(xscale="log", ylabel="latents")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))


def svg(draw: Callable[[Figure], None], height: float, width: float = 9) -> str:
    """The SVG of a figure of so many inches, on which `draw` has drawn."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure)
        buffer = StringIO()
        figure.savefig(buffer, format="svg", metadata={"Creator": None, "Date": None, "Format": None, "Type": None})
    found = buffer.getvalue()
    found = found[found.index("<svg") :]
    for colour, name in _PAGE.items():
        found = found.replace(colour, f"var({name})")
    found = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", found)
    found = re.sub(r"\s*<metadata>.*?</metadata>", "", found, flags=re.DOTALL)
    return re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', 'role="img"', found, count=1)
