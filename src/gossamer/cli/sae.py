"""`gossamer sae`: extract latents of many activations, and look at them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from gossamer import nn
from gossamer import sae as operators
from gossamer.cli.environment import resolve_device

sae = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Extract a sparse autoencoder's latents to disk, and look at them."
)


@sae.command()
def extract(
    model: Path = typer.Argument(help="Folder of the SAE, as nn.save, SAELens or sparsify writes it."),
    source: list[Path] = typer.Argument(help="Activations: .safetensors and .npy files, or folders of them, in order."),
    out: Path = typer.Option(..., help="Folder for the shards. The same command again goes on where it was stopped."),
    key: str | None = typer.Option(None, help="The tensor of each .safetensors file, where it holds several."),
    device: str = typer.Option("auto", help="auto (the GPU if there is one), cpu, cuda or cuda:N."),
    batch_size: int = typer.Option(4096, min=1, help="Rows at once."),
    shard_rows: int = typer.Option(65536, min=1, help="Rows a file; a multiple of --batch-size."),
    top: int = typer.Option(16, min=0, help="How many of its largest values to keep of each latent."),
) -> None:
    """Encode activations and write the latents to shards, with what each latent did."""
    console = Console()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Speed(),
        TimeRemainingColumn(),
        console=console,
    )
    done = 0
    try:
        autoencoder = _load(model, str(resolve_device(device, "sae extract")))
        with bar:
            task = bar.add_task("rows", total=None)

            def progress(rows: int, total: int | None) -> None:
                nonlocal done
                if not done:
                    # What an earlier run has done says nothing about the speed of this one.
                    bar.reset(task, completed=max(rows - batch_size, 0), total=total)
                done = rows
                bar.update(task, completed=rows, total=total)

            found = operators.extract(
                list(source),
                autoencoder,
                out,
                key=key,
                batch_size=batch_size,
                shard_rows=shard_rows,
                top=top,
                progress=progress,
            )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"stopped at row {done}; the same command goes on from the last whole file") from None
    except (ValueError, TypeError, FileNotFoundError) as error:
        raise typer.BadParameter(str(error)) from error
    except OSError as error:
        console.print(f"gossamer sae extract: {error}; whole files in {out} are kept", style="bold red", markup=False)
        raise typer.Exit(1) from None
    console.print(f"{found.rows:,} rows, {found.nnz:,} entries, {len(found)} files in {out}")
    console.print(f"{found.nnz / max(found.rows, 1):.1f} latents a row; {_dead(found)} of {found.d_sae:,} never fired")


@sae.command()
def show(
    folder: Path = typer.Argument(help="What extract wrote, finished or not."),
    feature: int | None = typer.Option(None, min=0, help="A latent; without it, the whole matrix and its busiest."),
    rows: int = typer.Option(10, min=1, help="How many lines of the table at most."),
) -> None:
    """Show how often, how strongly and where latents fire."""
    console = Console()
    try:
        found = operators.Extraction(folder)
    except (ValueError, FileNotFoundError) as error:
        raise typer.BadParameter(str(error)) from error
    if feature is None:
        _show_all(console, found, rows)
        return
    if feature >= found.d_sae:
        raise typer.BadParameter(f"gossamer sae show: --feature must be below d_sae = {found.d_sae}, got {feature}.")
    fired = int(found.firing_counts[feature])
    console.print(f"latent {feature}: fired in {fired:,} of {found.rows:,} rows ({fired / max(found.rows, 1):.3%})")
    if not fired:
        return
    console.print(f"largest magnitude {float(found.maximum[feature]):.4g}")
    table = Table(title="magnitudes", title_justify="left")
    table.add_column("from", justify="right")
    table.add_column("rows", justify="right")
    table.add_column("")
    counts = found.histogram[feature].tolist()
    for octave, count in enumerate(counts):
        if count:
            length = round(40 * count / max(counts))
            table.add_row(f"{2.0 ** (octave - 24):.3g}", f"{count:,}", "#" * max(length, 1))
    console.print(table)
    table = Table(title="where it is largest", title_justify="left")
    table.add_column("row", justify="right")
    table.add_column("magnitude", justify="right")
    for position, value in list(zip(found.top_positions[feature].tolist(), found.top_values[feature].tolist()))[:rows]:
        if position >= 0:
            table.add_row(f"{position:,}", f"{value:.4g}")
    console.print(table)


def _show_all(console: Console, found: operators.Extraction, rows: int) -> None:
    console.print(repr(found))
    console.print(f"{found.nnz / max(found.rows, 1):.1f} latents a row; {_dead(found)} of {found.d_sae:,} never fired")
    table = Table(title="the latents that fire most", title_justify="left")
    for name in ("latent", "rows", "share", "largest"):
        table.add_column(name, justify="right")
    order = found.firing_counts.argsort(descending=True, stable=True)[:rows].tolist()
    for latent in order:
        count = int(found.firing_counts[latent])
        if count:
            share = f"{count / max(found.rows, 1):.3%}"
            table.add_row(str(latent), f"{count:,}", share, f"{float(found.maximum[latent]):.4g}")
    console.print(table)


def _dead(found: operators.Extraction) -> str:
    return f"{int((found.firing_counts == 0).sum()):,}"


def _load(folder: Path, device: str) -> Any:
    """The SAE as a module of `nn`, or, for an architecture that is not there, of SAELens."""
    try:
        return nn.load(folder, device=device).eval()
    except ValueError as error:
        try:
            from sae_lens import SAE
        except ImportError:
            raise error from None
        if "integrations.sae_lens" not in str(error):
            raise
        return SAE.load_from_disk(folder, device=device).eval()


class _Speed(ProgressColumn):
    """Rows a second."""

    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:,.0f} rows/s")
