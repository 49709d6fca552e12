"""The report's plots."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from demo.features import HIGHEST_RATE, LOWEST_RATE
from gossamer.cli.figure import DENSE, INK, MUTED, SPARSE, rate_histogram, svg


def model_plot(history: list[dict[str, Any]]) -> str:
    """Bits per byte and the active fraction of the feed-forward, over the bytes seen."""

    def draw(figure: Figure) -> None:
        bits, active = figure.subplots(1, 2)
        _curve(bits, history, "bits_per_byte", "Bits per byte, training batches")
        _curve(active, history, "active_fraction", "Active feed-forward neurons")
        active.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))

    return svg(draw, 2.6)


def sae_plot(history: list[dict[str, Any]]) -> str:
    """L0 and variance explained, over the bytes seen."""

    def draw(figure: Figure) -> None:
        l0, variance = figure.subplots(1, 2)
        _curve(l0, history, "l0", "L0")
        _curve(variance, history, "variance_explained", "Variance explained")
        variance.set_ylim(0, 1.02)
        variance.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))

    return svg(draw, 2.4)


def time_plot(comparison: list[dict[str, Any]]) -> str:
    """Time per call, dense beside sparse, for every operation of every size."""

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, len(comparison), squeeze=False)[0]
        for axes, case in zip(panels, comparison, strict=True):
            operations = case["operations"]
            y = np.arange(len(operations))[::-1]
            for offset, way, colour in ((0.19, "dense", DENSE), (-0.19, "sparse", SPARSE)):
                milliseconds = [operation[way]["median_seconds"] * 1e3 for operation in operations]
                bars = axes.barh(y + offset, milliseconds, 0.34, color=colour, label=way)
                axes.bar_label(bars, [f"{m:.3g}" for m in milliseconds], padding=3, color=INK, fontsize=9)
            axes.set(xlabel="milliseconds per call", title=f"{case['name']}, {case['d_sae']:,} latents")
            axes.set_yticks(y, [operation["operation"] for operation in operations])
            axes.set_xlim(right=axes.get_xlim()[1] * 1.12)
            axes.tick_params(axis="y", length=0)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper right", ncols=2, fontsize=9)

    return svg(draw, 2.7)


def rate_plot(firing_rates: list[float]) -> str:
    """How many latents fire how often; the range from which the features shown are taken is shaded."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        rates = np.asarray(firing_rates)
        rate_histogram(axes, rates)
        axes.axvspan(LOWEST_RATE, HIGHEST_RATE, color=MUTED, alpha=0.15, linewidth=0)
        axes.set(xlabel="share of bytes on which a latent fires")
        axes.set_title(
            f"{int((rates > 0).sum()):,} of {len(rates):,} latents fired; the shaded range is searched for features"
        )

    return svg(draw, 2.4)


def needle_plot(found: dict[str, Any]) -> str:
    """How often the needle is found, by how many keys a query takes and who chooses them."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        keys = [row["keys"] for row in found["by_keys"]]
        for way, colour, label in (
            ("selected", SPARSE, "what the indexer selects"),
            ("recent", DENSE, "the last keys"),
        ):
            axes.plot(keys, [row[way] for row in found["by_keys"]], color=colour, marker="o", label=label)
        axes.axhline(found["accuracy_all"], color=MUTED, linewidth=1, linestyle="--", label="all keys")
        axes.set_xscale("log", base=2)
        axes.set_xticks(keys, [str(k) for k in keys])
        axes.set(xlabel=f"keys that a query takes, of {found['length']}", ylim=(0, 1.05))
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.set_title("Needles found")
        axes.legend(fontsize=9)

    return svg(draw, 2.6)


def blocks_plot(found: dict[str, Any]) -> str:
    """Time of block-sparse operations, as a share of the dense ones', by the share of the blocks that are present."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for operation, colour in (("linear", DENSE), ("attention", SPARSE)):
            cases = [case for case in found["cases"] if case["operation"] == operation]
            shares = [case["sparse_seconds"] / case["dense_seconds"] for case in cases]
            axes.plot([case["density"] for case in cases], shares, color=colour, marker="o", label=operation)
        axes.plot((0, 1), (0, 1), color=MUTED, linewidth=1, linestyle="--", label="in proportion to the blocks")
        axes.axhline(1, color=MUTED, linewidth=0.8)
        axes.set(xlabel="share of the blocks that are present", xlim=(0, 1.02))
        axes.set_ylim(bottom=0)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.set_title("Time, as a share of the dense operation's")
        axes.legend(fontsize=9)

    return svg(draw, 2.6)


def _curve(axes: Axes, history: list[dict[str, Any]], key: str, title: str) -> None:
    millions = np.array([record["tokens"] for record in history]) / 1e6
    values = np.array([record[key] for record in history], dtype=float)
    width = max(1, len(values) // 12)
    smooth = [values[max(0, i - width) : i + width + 1].mean() for i in range(len(values))]
    axes.plot(millions, values, color=SPARSE, alpha=0.3, linewidth=1)
    axes.plot(millions, smooth, color=SPARSE)
    axes.set(title=title, xlabel="million bytes seen")
    axes.set_ylim(bottom=0)
