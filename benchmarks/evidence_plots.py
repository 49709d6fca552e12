"""The figures of docs/evidence.md, and readers of results that figures and tables share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.ticker import NullFormatter

from benchmarks.tables import RESULTS, over

Content = dict[str, Any]
IN_PLACE = "cuBLAS, SwiGLU in place"
ENTRIES = "entries of a token"


def latest(stems: str) -> Content | None:
    """The newest result of a GPU whose name begins with one of these words."""
    paths = [path for stem in stems.split() for path in RESULTS.glob(f"{stem}-nvidia*.json")]
    found: list[Content] = [json.loads(path.read_text()) for path in paths]
    return max(found, key=lambda content: str(content["started"]), default=None)


def cases(content: Content, name: str) -> list[Content]:
    return [case for case in content["cases"] if case["name"] == name]


def named(case: Content, name: str) -> Content | None:
    """The provider of this name, or the first whose name goes on behind it and a comma."""
    providers: list[Content] = case["providers"]
    exact = [p for p in providers if p["name"] == name]
    return next(iter(exact + [p for p in providers if p["name"].startswith(f"{name},")]), None)


def seconds(case: Content, name: str, kind: str = "best") -> float | None:
    """The median time of a provider: eager, in a graph, or in a graph where it has one."""
    provider = named(case, name)
    if provider is None or not provider["eager"]:
        return None
    timing = (provider["graph"] or provider["eager"]) if kind == "best" else provider[kind]
    return float(timing["median"]) if timing else None


def ratio(case: Content, peer: str, ours: str) -> str:
    """The time of `peer` over that of `ours`, by graphs where both have one."""
    first, second = named(case, peer), named(case, ours)
    return f"{over(first, second):.2f}" if first and second and first["eager"] and second["eager"] else ""


def size(case: Content) -> str:
    return ", ".join(f"{name} {case['parameters'][name]:,}" for name in ("B", "F", "D", "L0"))


def _line(axes: Any, points: Iterable[tuple[float, float | None]], label: str, **style: Any) -> None:
    known = sorted((x, y) for x, y in points if y is not None)
    if known:
        axes.plot(*zip(*known), marker="o", markersize=4, label=label, **style)


def _finish(
    figure: Any,
    panels: Sequence[Any],
    content: Content,
    path: Path,
    title: str,
    plain: str = "",
    ticks: Sequence[int] = (),
) -> None:
    """Titles, grids and legends; `plain` names the axes that are not logarithmic, `ticks` are those of x."""
    for axes in panels:
        axes.set(**{f"{axis}scale": "linear" if axis in plain else "log" for axis in "xy"})
        if axes.get_ylabel() == ENTRIES:
            axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:,.6g}")
            axis.set_minor_formatter(NullFormatter())
        if ticks:
            axes.set_xticks(ticks)
        axes.grid(True, which="both", alpha=0.25)
    panels[0].legend(fontsize=7)
    figure.suptitle(f"{title}\n{content['device']['name']}", fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _panels(count: int) -> tuple[Any, list[Any]]:
    figure, panels = plt.subplots(1, count, figsize=(max(6.5, 4.4 * count), 4.2), layout="constrained", squeeze=False)
    return figure, list(panels[0])


def operator(content: Content, path: Path) -> None:
    """Figure 1 of blksprs: time by size, a line for each sparsity."""
    figure, (axes,) = _panels(1)
    fit = [
        c for c in content["cases"]
        if c["dtype"] == "float32" and c["parameters"]["block"] == 64 and c["parameters"].get("dim", -1) == -1
        and c["parameters"].get("reduce", "sum") == "sum"
    ]  # fmt: skip
    styles = {"dense": "-", "blksprs": ":", "gossamer": "-"}
    for way, style in styles.items():
        for number, sparsity in enumerate((0,) if way == "dense" else (0, 25, 50, 75)):
            points = [
                (c["parameters"]["n"], (seconds(c, way, "eager") or 0) * 1e3 or None)
                for c in fit
                if c["parameters"]["sparsity"] == sparsity
            ]
            color = "black" if way == "dense" else f"C{number}"
            label = "PyTorch, dense" if way == "dense" else f"{way}, {sparsity}% absent"
            _line(axes, points, label, linestyle=style, color=color)
    axes.set(xlabel="n: 4 matrices of n x n, blocks of 64", ylabel="ms per call, eager")
    _finish(figure, [axes], content, path, f"{fit[0]['name']}, float32", ticks=(1024, 2048, 4096, 8192))


def ready(content: Content, path: Path) -> None:
    """The decoder alone, by L0 and by features."""
    figure, panels = _panels(2)
    for axes, name, given in zip(panels, ("ready_l0", "ready_features"), ("L0", "F")):
        for way in ("dense", "torch.sparse", "embedding_bag", "jumprelu-sae-kernels, fixed", "gossamer ELL"):
            points = [(c["parameters"][given], (seconds(c, way) or 0) * 1e6 or None) for c in cases(content, name)]
            _line(axes, points, way, linewidth=3 if way.startswith("gossamer") else 1.2)
        axes.set(xlabel={"L0": "L0, of 65,536 latents", "F": "latents, L0 64"}[given])
    panels[0].set(ylabel="us per call, by CUDA graph where it can")
    _finish(figure, panels, content, path, "decode 32 packed rows to 768, float32")


def gated(content: Content, path: Path) -> None:
    """TFLOP/s of the gated layer at the sizes of Llama 3."""
    figure, panels = _panels(3)
    for axes, name in zip(panels, ("llama_8b", "llama_70b", "llama_405b")):
        for way in ("gossamer", IN_PLACE, "Liger", "dense", "GEMM alone"):
            points = [
                (c["parameters"]["M"], c["flops"] / time * 1e-12 if (time := seconds(c, way)) else None)
                for c in cases(content, name)
            ]
            _line(axes, points, way, linewidth=3 if way == "gossamer" else 1.2)
        axes.set(xlabel="tokens", title=name.replace("_", " 3 ").replace("llama", "Llama").replace("b", "B"))
    panels[0].set(ylabel="TFLOP/s, by CUDA graph where it can")
    _finish(figure, panels, content, path, "linear_glu, bfloat16", "y", (1024, 4096, 16384, 65536))


def cache(content: Content, path: Path) -> None:
    """Tokens whose keys and values fit into the memory saved, chunks of 512 tokens."""
    figure, (axes,) = _panels(1)
    models = [model for model in content["kv_cache"] if "eager" in model["against"]]
    bars = axes.barh([m["name"] for m in models], [m["against"]["eager"]["kv_tokens"] for m in models])
    axes.bar_label(bars)
    axes.set(xlabel="further tokens in the KV cache, beside eager PyTorch")
    axes.set_title(f"memory saved in chunks of 512 tokens, {content['device']['name']}", fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def models(content: Content, path: Path) -> None:
    """Figure 4 of the paper on sparse models: speed and energy of a forward pass by entries."""
    figure, panels = _panels(2)
    for name, label in (("model", "gated"), ("model, plain", "not gated")):
        found = [c for c in cases(content, name) if c["parameters"]["layers"] == 28]
        faster, less = [], []
        for case in found:
            ours, dense = named(case, "gossamer"), named(case, "dense")
            if ours and dense and ours["eager"] and dense["eager"]:
                entries = case["parameters"]["entries"]
                faster.append((entries, 100 * (dense["eager"]["median"] / ours["eager"]["median"] - 1)))
                less.append((entries, 100 * (1 - ours["joules"] / dense["joules"])))
        _line(panels[0], faster, label)
        _line(panels[1], less, label)
    panels[0].set(xlabel="entries of a token", ylabel="more tokens a second than dense, %")
    panels[1].set(xlabel="entries of a token", ylabel="less energy a token than dense, %")
    _finish(figure, panels, content, path, "forward pass of 28 layers, 16,384 tokens", plain="y")


def steps(content: Content, path: Path) -> None:
    """Figure 5 of that paper: speed and peak memory of a training step by entries."""
    figure, panels = _panels(2)
    dense, *found = content["cases"]
    for axes, key, sign in ((panels[0], "tokens/ms", 1), (panels[1], "peak_bytes", -1)):
        _line(axes, [(c["entries"], sign * 100 * (c[key] / dense[key] - 1)) for c in found], "lists")
    panels[0].set(xlabel="entries of a token", ylabel="more tokens a second than dense, %")
    panels[1].set(xlabel="entries of a token", ylabel="less peak memory than dense, %")
    _finish(figure, panels, content, path, f"training step, {content['parameters'] / 1e9:.1f}B parameters", plain="y")


def curves(content: Content, path: Path) -> None:
    """Figures 2 and 9: loss, entries and dead neurons by step."""
    figure, panels = _panels(3)
    for axes, key, shown in zip(panels, ("loss", "l0", "dead"), ("loss", ENTRIES, "dead neurons, %")):
        for name, run in content["runs"].items():
            scale = 100 if key == "dead" else 1
            _line(axes, [(r["step"], scale * r[key]) for r in run["records"] if key in r], name, linewidth=1)
        axes.set(xlabel="step", ylabel=shown)
    parameters = next(iter(content["runs"].values()))["parameters"]
    _finish(figure, panels, content, path, f"{parameters / 1e6:.0f}M parameters", plain="xy")
