"""The page of `gossamer sae report`: an extraction as a whole, and some of its latents."""

from __future__ import annotations

import random
from html import escape

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from gossamer.cli.figure import SPARSE, rate_histogram, svg
from gossamer.cli.page import context, counted, page, table, tiles
from gossamer.extract import Extraction

BUSIEST, SAMPLED = 8, 16
CONTEXTS = 8
_SEED = 0


def choose(found: Extraction) -> dict[str, list[int]]:
    """The latents to show when none are named: the busiest, and a sample of the others that fire."""
    order = found.firing_counts.argsort(descending=True, stable=True).tolist()
    alive = order[: int((found.firing_counts > 0).sum())]
    others = sorted(alive[BUSIEST:])
    sampled = sorted(random.Random(_SEED).sample(others, min(SAMPLED, len(others))))
    return {"The latents that fire most": alive[:BUSIEST], "A random sample of the others that fire": sampled}


def render(found: Extraction, latents: dict[str, list[int]]) -> str:
    """The whole page: of the extraction, and of latents under their headings. All text of the source is escaped."""
    rows, fired = max(found.rows, 1), found.firing_counts
    name, state = escape(found.folder.name), "" if found.manifest["complete"] else ", unfinished"
    nonfinite = found.manifest["nonfinite"]
    excluded = f" {nonfinite:,} values that are not finite are left out." if nonfinite else ""
    figures = (
        (f"rows in {counted(len(found), 'file')}{state}", f"{found.rows:,}"),
        (f"latents a row (L0), of {found.d_sae:,}", f"{int(fired.sum()) / rows:.1f}"),
        ("of the latents never fired", f"{int((fired == 0).sum()) / found.d_sae:.1%}"),
    )
    chosen = [latent for group in latents.values() for latent in group]
    overview = table(
        "The latents below",
        ("latent", "rows", "share of rows", "largest magnitude"),
        [
            (str(i), f"{int(fired[i]):,}", f"{int(fired[i]) / rows:.3%}", f"{float(found.maximum[i]):.4g}")
            for i in chosen
        ],
    )
    sections = "".join(
        f'<h2>{escape(heading)}</h2><div class="cards">{"".join(_card(found, latent) for latent in group)}</div>'
        for heading, group in latents.items()
        if group
    )
    body = "\n".join(
        (
            f"<header><h1>{name}</h1><p>The latents of a sparse autoencoder on {found.rows:,} rows of "
            f"activations.{excluded}</p></header>",
            tiles(figures),
            f"<h2>How often latents fire</h2><figure>{_rates(found)}</figure>",
            overview if chosen else "<p>No latent fired.</p>",
            sections,
        )
    )
    return page(f"{found.folder.name}: latents", body)


def _card(found: Extraction, latent: int) -> str:
    count = int(found.firing_counts[latent])
    head = f'<article class="card" id="latent-{latent}"><h3>{latent}</h3>'
    if not count:
        return f'{head}<p class="facts">never fired</p></article>'
    places = [
        (row, value)
        for row, value in zip(found.top_positions[latent].tolist(), found.top_values[latent].tolist())
        if row >= 0
    ][:CONTEXTS]
    if found.has_text:
        lines = "".join(context(value, *found.context(row, before=48, after=24)) for row, value in places)
    else:
        lines = "".join(f"<li>row {row:,}: {value:.4g}</li>" for row, value in places)
    return (
        f'{head}<p class="facts">fires in {count:,} rows ({count / max(found.rows, 1):.3%}), up to '
        f"{float(found.maximum[latent]):.4g}</p><figure>{_magnitudes(found, latent)}</figure><ol>{lines}</ol></article>"
    )


def _rates(found: Extraction) -> str:
    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        rates = found.firing_counts.numpy() / max(found.rows, 1)
        rate_histogram(axes, rates)
        axes.set(xlabel="share of rows in which a latent fires")
        axes.set_title(f"{int((rates > 0).sum()):,} of {len(rates):,} latents fired")

    return svg(draw, 2.4)


def _magnitudes(found: Extraction, latent: int) -> str:
    """Rows over magnitude, an octave a bar."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        counts = found.histogram[latent].numpy()
        held = np.flatnonzero(counts)
        first, last = int(held[0]), int(held[-1])
        octaves = np.arange(first, last + 1)
        axes.bar(octaves, counts[first : last + 1], 0.92, align="edge", color=SPARSE)
        axes.set(xlabel="magnitude", ylabel="rows", xlim=(first - 0.1, last + 1.1))
        axes.set_xticks([first, (first + last + 1) // 2, last + 1])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda octave, _: f"{Extraction.magnitude(int(octave)):.3g}"))

    return svg(draw, 1.5, 4.5)
