"""`python -m demo`: the demo, from a checkout of the repository."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console

from demo.run import Settings, prepare, run
from gossamer.cli.application import application


def demo(
    text: Path | None = typer.Option(None, help="File or folder to train on; default: Python's standard library."),
    device: str = typer.Option("auto", help="auto, cpu, cuda or cuda:N."),
    out: Path = typer.Option(Path("report"), help="Folder for the report, the autoencoder and its latents."),
    seconds_model: float = typer.Option(70.0, min=0.0, help="Training time of the transformer."),
    seconds_sae: float = typer.Option(60.0, min=0.0, help="Training time of the sparse autoencoder."),
    seed: int = typer.Option(0, min=0, help="Seed of weights and batches; the times above decide how far they get."),
) -> None:
    """Train a small transformer and a sparse autoencoder on real text, and write a report.

    Feed-forward blocks, autoencoder, attention and block-sparse products each run beside the dense computation. The
    demo takes about five minutes on two cores, and less with shorter --seconds-model and --seconds-sae. It downloads
    nothing.
    """
    settings = Settings(
        text=text, device=device, out=out, seconds_model=seconds_model, seconds_sae=seconds_sae, seed=seed
    )
    try:
        device_found, corpus = prepare(settings)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    run(settings, device_found, corpus, Console())


main = application(demo, "demo")

if __name__ == "__main__":
    main()
