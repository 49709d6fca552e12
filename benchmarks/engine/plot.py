"""Pictures: time per call against one parameter, every provider a line; and ratios at random shapes, each a point."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from benchmarks.engine.random_cases import Ratio
from benchmarks.engine.report import floor_of
from benchmarks.engine.runner import CaseResult
from benchmarks.engine.timing import Ceilings


def plot_sweeps(results: Sequence[CaseResult], ceilings: Ceilings, device: str, folder: Path, stem: str) -> list[Path]:
    """Draw every group of cases that share a name and a sweep; returns the PNG files written.

    CUDA-graph times where a provider has them, eager times elsewhere; dashed the eager times of our first provider.
    """
    groups: dict[tuple[str, str, str], list[CaseResult]] = {}
    for result in results:
        if result.case.sweep and any(o.eager for o in result.outcomes):
            groups.setdefault((result.case.room, result.case.name, result.case.sweep), []).append(result)
    return [
        _plot(group, key[2], ceilings, device, folder / f"{stem}-{key[1]}.png")
        for key, group in groups.items()
        if len(group) > 1
    ]


def _plot(group: list[CaseResult], sweep: str, ceilings: Ceilings, device: str, path: Path) -> Path:
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    group = sorted(group, key=lambda r: float(r.case.parameters[sweep]))
    names = dict.fromkeys(o.provider.name for r in group for o in r.outcomes if o.eager)
    ours = next((o.provider.name for o in group[0].outcomes if o.provider.ours and o.eager), None)
    for number, name in enumerate(names):
        timed = [
            (r.case.parameters[sweep], o) for r in group for o in r.outcomes if o.provider.name == name and o.eager
        ]
        graphs = all(o.graph for _, o in timed)
        style: dict[str, Any] = {"color": f"C{number}", "linewidth": 2.5 if name == ours else 1.2}
        for kind in ("graph", "eager") if graphs and name == ours else ("graph",) if graphs else ("eager",):
            axes.plot(
                [float(x) for x, _ in timed],
                [getattr(o, kind).median * 1e6 for _, o in timed],
                "o--" if graphs and kind == "eager" else "o-",
                label=f"{name} ({kind})",
                markersize=4,
                **style,
            )
    floors = [(float(r.case.parameters[sweep]), floor_of(r, r.outcomes[0], ceilings) * 1e6) for r in group]
    axes.plot(*zip(*floors), ":", color="black", label="floor")
    fixed = ", ".join(f"{k} = {v}" for k, v in group[0].case.parameters.items() if k != sweep)
    axes.set(xscale="log", yscale="log", xlabel=sweep, ylabel="time per call (us)")
    axes.set_title(f"{group[0].case.room} {group[0].case.name}: {fixed}\n{device}", fontsize=10)
    axes.set_xticks([x for x, _ in floors], [f"{x:g}" for x, _ in floors])
    axes.set_xticks([], minor=True)
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def plot_ratios(ratios: Sequence[Ratio], device: str, path: Path) -> list[Path]:
    """Every case of a random sweep a point: dense PyTorch's time over ours against dense PyTorch's time."""
    timed = [(r.dense * r.ours * 1e6, r.dense, f"{r.room} {r.name}") for r in ratios if r.dense is not None]
    if not timed:
        return []
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for number, name in enumerate(dict.fromkeys(label for *_, label in timed)):
        x, y = zip(*[(time, ratio) for time, ratio, label in timed if label == name])
        axes.scatter(x, y, s=14, color=f"C{number}", alpha=0.7, label=f"{name} ({len(x)})")
    axes.axhline(1, color="black", linewidth=1)
    axes.axhline(0.95, color="black", linewidth=0.8, linestyle=":")
    axes.set(xscale="log", yscale="log", xlabel="dense PyTorch, time per call (us)")
    axes.set_ylabel("dense PyTorch's time over gossamer's")
    axes.set_title(f"shapes, dtypes and densities drawn at random: above 1 gossamer is faster\n{device}", fontsize=10)
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return [path]
