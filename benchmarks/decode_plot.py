"""README's plot: time of a decode against how many latents fire, from CUDA graphs where a provider has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(content: dict[str, Any], plot: Path) -> None:
    """Draws the cases of `sweep_l0` in a result of `python -m benchmarks sae`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    cases = sorted((c for c in content["cases"] if c["name"] == "sweep_l0"), key=lambda c: c["parameters"]["L0"])
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    lines = {
        "dense": "dense PyTorch",
        "torch.sparse": "torch.sparse",
        "jumprelu-sae-kernels, fixed, validated": "jumprelu-sae-kernels, exact or an error",
        "jumprelu-sae-kernels, fixed, unsafe": "jumprelu-sae-kernels, drops what does not fit",
        "gossamer": "gossamer, exact",
    }
    for name, shown in lines.items():
        points = []
        for case in cases:
            provider = next((p for p in case["providers"] if p["name"] == name and p["eager"]), None)
            if provider is not None:
                timing = provider["graph"] or provider["eager"]
                points.append((case["parameters"]["L0"], timing["median"] * 1e6))
        style = {"linestyle": ":", "color": "C2"} if name.endswith("unsafe") else {}
        style = {"linewidth": 3, "color": "C3"} if name == "gossamer" else style
        axes.plot(*zip(*points), marker="o", label=shown, **style)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="latents that fire, of 65,536",
        ylabel="microseconds, by CUDA graph where it can",
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,.0f}")
    shape = cases[0]["parameters"]
    axes.set_title(f"decode a batch of {shape['B']} to d_in {shape['D']}, float32, {content['device']['name']}")
    axes.grid(True, which="both", alpha=0.25)
    axes.legend()
    figure.savefig(plot, dpi=120)
    plt.close(figure)
