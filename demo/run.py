"""The demo from its text to its report."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

import gossamer
from benchmarks.provenance import commit
from demo import features, measure, report
from demo.blocks import block_sparse
from demo.model import ByteModel, ModelConfig
from demo.needle import needle_stage
from demo.text import Corpus, load_corpus
from demo.train import Clock, Show, train_model, train_sae
from gossamer import nn
from gossamer._core import files
from gossamer._core.files import make_folder
from gossamer.cli import environment
from gossamer.extract import Extraction, extract
from gossamer.integrations.transformers import Activations

GPU_BATCHES = 8
QUALITY_ROWS = 4096
EXTRACT_BATCH, EXTRACT_SHARD = 1024, 65_536
PROBE_WINDOWS = 32
SAE, LATENTS, ACTIVATIONS = "sae", "latents", "activations.npy"
# In a folder that a demo wrote, and that the next one may therefore replace.
_MARK = ".gossamer-demo"
# The report's units as every terminal can show them.
_ASCII = str.maketrans("×µ", "xu")


@dataclass(frozen=True)
class Settings:
    """The settings of a run. Batches are windows for the model and bytes of text for the SAE, eight times as many on a
    GPU.

    A number of steps, where given, replaces the seconds of that training, which a CPU then repeats exactly. Lengths and
    widths without a model of their own are those on which attention and products are timed.
    """

    text: Path | None = None
    device: str = "auto"
    out: Path = Path("report")
    seconds_model: float = 70.0
    seconds_sae: float = 60.0
    steps_model: int | None = None
    steps_sae: int | None = None
    steps_needle: int = 160
    seconds_blocks: float = 5.0
    attention_length: int = 4096
    linear_width: int = 2048
    seconds_compare: float = 12.0
    seconds_features: float = 25.0
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    d_sae: int = 4096
    target_l0: float = 32.0
    warm_up: int = 100
    batch_model: int = 8
    batch_sae: int = 512
    batch_compare: int = 1024
    n_validation: int = 128
    n_feature_windows: int = 2048
    n_features: int = 20
    large: bool = True


def prepare(settings: Settings) -> tuple[torch.device, Corpus]:
    """Find out before anything is trained whether the run can end: the device, the text, the folder to write to.

    Raises ValueError for one that cannot be used.
    """
    device = environment.resolve_device(settings.device, "demo")
    corpus = load_corpus(settings.text, seed=settings.seed, min_bytes=8 * (settings.model.context + 1))
    make_folder("demo", "--out", settings.out)
    for folder in (settings.out / SAE, settings.out / LATENTS):
        if os.path.lexists(folder) and not (folder / _MARK).is_file():
            raise ValueError(
                f"demo: --out must be a folder in which {folder.name} is free or a demo's, got "
                f"{settings.out}, where it is something else and would be replaced; name another one."
            )
    return device, corpus


def run(settings: Settings, device: torch.device, corpus: Corpus, console: Console) -> dict[str, Any]:
    """Train, measure, and write to `settings.out`; returns the results.

    The files are `index.html`, `results.json`, the autoencoder `sae/` and its extraction `latents/`: all of them
    at the end, in place of those of an earlier run, so that a run that is stopped leaves those.
    """
    console.print(f"{len(corpus.train):,} bytes of {corpus.source} on {device}", highlight=False, markup=False)
    try:
        with tempfile.TemporaryDirectory(dir=settings.out, prefix=".demo-") as unfinished:
            results = _results(settings, device, corpus, console, Path(unfinished))
            page = report.render(results)
            data = json.dumps(_plain(results), indent=1, allow_nan=False, ensure_ascii=False)
            for name in (SAE, LATENTS):
                _replace(Path(unfinished, name), settings.out / name)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("nothing was written") from None
    files.write_text("demo", settings.out / "index.html", page)
    files.write_text("demo", settings.out / "results.json", data)
    console.print(summary(results))
    console.print(f"Report: {settings.out / 'index.html'}", highlight=False, markup=False, soft_wrap=True)
    for line in ("Go on with:", *(f"  {command}" for command in go_on(settings.out, results))):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return results


def _results(settings: Settings, device: torch.device, corpus: Corpus, console: Console, out: Path) -> dict[str, Any]:
    return {
        "command": shlex.join(["python", "-m", "demo", *sys.argv[1:]]),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(Path(gossamer.__file__).parent),
        "versions": environment.versions(),
        "seed": settings.seed,
        "settings": asdict(settings),
        "text": {
            "source": corpus.source,
            "files": corpus.n_files,
            "train_bytes": len(corpus.train),
            "validation_bytes": len(corpus.validation),
        },
        **_experiment(settings, device, corpus, console, out),
    }


def _experiment(
    settings: Settings, device: torch.device, corpus: Corpus, console: Console, out: Path
) -> dict[str, Any]:
    train, validation = corpus.train.to(device), corpus.validation.to(device)
    torch.manual_seed(settings.seed)
    generator = torch.Generator().manual_seed(settings.seed)
    larger = GPU_BATCHES if device.type == "cuda" else 1
    model = ByteModel(settings.model).to(device)
    tokens = measure.contexts(validation, settings.n_validation, settings.model.context + 1)
    with fastest_threads(model, tokens[: settings.batch_model]), _progress(console) as stages:
        with stages("byte model") as show:
            model_history = train_model(
                model,
                train,
                clock=Clock(settings.seconds_model, settings.steps_model),
                batch_size=settings.batch_model * larger,
                generator=generator,
                show=show,
            )
            bits = measure.evaluate(model, tokens)
        model.requires_grad_(False)
        with stages("fused feed-forward") as show:
            plain = measure.layer_by_layer(model, tokens)
            active = plain["active_fraction_per_block"]
            mlp = measure.compare_mlp(model, tokens[:, :-1], seconds=min(2.0, settings.seconds_compare / 3))
            show(1.0, f"{plain['generated_alike']} of {plain['generated']} bytes generated alike")
        with stages("sparse feed-forward") as show:
            sparse = measure.sparse_feed_forward(model, tokens, seconds=min(1.0, settings.seconds_compare / 6))
            show(1.0, f"{sparse['generated_alike']} of {sparse['generated']} bytes generated alike")
        with stages("sparse autoencoder") as show:
            sae, scale, sae_history = _autoencoder(settings, model, train, generator, show)
            nn.save_sae(sae, out / SAE)
        with stages("reconstruction") as show:
            x = model.residual(tokens[:, :-1]).flatten(0, 1)[:QUALITY_ROWS]
            quality = measure.quality(sae, x)
            losses = measure.splice_losses(model, sae, tokens, bits)
            show(1.0, f"loss recovered: {report.loss_recovered(losses)}")
        with stages("dense against sparse") as show:
            x = x[: settings.batch_compare]
            comparison = [measure.compare("trained SAE", sae, x, seconds=settings.seconds_compare, show=show)]
        if settings.large:
            with stages("at full size") as show:
                large = measure.large_sae(device, settings.seed)
                comparison.append(measure.compare("untrained SAE", *large, seconds=settings.seconds_compare, show=show))
                del large
        attention = _attention(settings, device, stages)
        with stages("features") as show:
            found = _extract(settings, model, sae, validation, out, show)
            top = features.top_features(found, settings.n_features)
            silent = (found.firing_counts == 0).double().mean().item()
            show(1.0, f"{len(top)} features from {found.rows:,} bytes; {silent:.0%} of the latents never fired there")
        hardware = environment.describe(device)
    return {
        "hardware": hardware,
        "model": {
            "parameters": sum(p.numel() for p in model.parameters()),
            "validation_bits_per_byte": bits,
            "active_fraction": sum(active) / len(active),
            "active_fraction_per_block": active,
            "history": model_history,
            "layer_by_layer": plain,
            "feed_forward": mlp,
            "sparse": sparse,
        },
        "sae": {
            **quality,
            "activation_scale": scale,
            "history": sae_history,
        },
        "loss": losses,
        "comparison": comparison,
        **attention,
        "features": {
            "bytes_read": found.rows,
            "firing_rates": (found.firing_counts.double() / found.rows).tolist(),
            "top": top,
        },
    }


def _attention(settings: Settings, device: torch.device, stages: Any) -> dict[str, Any]:
    """The parts without the byte model: attention over selected keys, and block-sparse operations."""
    with stages("sparse attention") as show:
        needle = needle_stage(
            device,
            settings.seed,
            Clock(0, settings.steps_needle),
            seconds=min(2.0, settings.seconds_compare / 6),
            length=settings.attention_length,
            show=show,
        )
    with stages("block-sparse") as show:
        blocks = block_sparse(
            device,
            settings.seed,
            seconds=min(settings.seconds_blocks, settings.seconds_compare / 2),
            width=settings.linear_width,
            length=settings.attention_length,
            show=show,
        )
    return {"needle": needle, "block_sparse": blocks}


def _autoencoder(
    settings: Settings, model: ByteModel, text: torch.Tensor, generator: torch.Generator, show: Show
) -> tuple[nn.JumpReLUSAE, float, list[dict[str, float]]]:
    """(trained on the model's residual stream, with its input scale folded in; that scale; its history)"""
    batch = settings.batch_sae * (GPU_BATCHES if text.is_cuda else 1)
    sae = nn.JumpReLUSAE(
        settings.model.d_model,
        settings.d_sae,
        target_l0=settings.target_l0,
        # On a CPU the whole training may be a few hundred steps.
        warm_up=settings.warm_up,
        device=text.device,
    )
    history = train_sae(
        sae,
        model,
        text,
        clock=Clock(settings.seconds_sae, settings.steps_sae),
        batch_size=batch,
        generator=generator,
        show=show,
    )
    scale = sae.input_scale.item()
    return sae.eval(), scale, history


def _extract(
    settings: Settings, model: ByteModel, sae: nn.JumpReLUSAE, text: torch.Tensor, out: Path, show: Show
) -> Extraction:
    """The latents of windows of a text, as many as there is time for, and some of the activations beside the SAE."""

    def source(n_windows: int) -> Activations:
        return features.residual_source(model, measure.contexts(text, n_windows, settings.model.context))

    sizes: dict[str, Any] = {"batch_size": EXTRACT_BATCH, "shard_rows": EXTRACT_SHARD, "top": features.TOP}
    for name in ("warm-up", "probe"):
        clock = Clock(0)
        probe = extract(source(min(PROBE_WINDOWS, settings.n_feature_windows)), sae, out / name, **sizes)
    affordable = int(settings.seconds_features / clock.elapsed * probe.rows / settings.model.context)
    rows = source(min(max(affordable, PROBE_WINDOWS), settings.n_feature_windows))
    np.save(out / SAE / ACTIVATIONS, next(rows.rows_from(0)).cpu().numpy())

    def progress(done: int, _: int | None) -> None:
        show(done / len(rows), f"{done:,} bytes read")

    return extract(rows, sae, out / LATENTS, **sizes, progress=progress)


@contextmanager
def fastest_threads(model: ByteModel, tokens: torch.Tensor) -> Iterator[None]:
    """For a while, as many CPU threads as make a training step on tokens `[B, T]` fastest.

    PyTorch takes one for every core it sees. In a container that owns fewer, or beside other work, threads that wait
    for each other make small products many times slower than one thread would be.
    """
    before = torch.get_num_threads()
    if tokens.device.type != "cpu":
        yield
        return
    seconds = {}
    for halvings in range(before.bit_length()):
        torch.set_num_threads(before >> halvings)
        times = []
        for _ in range(4):
            clock = Clock(0)
            model(tokens).logsumexp(-1).mean().backward()
            times.append(clock.elapsed)
        seconds[before >> halvings] = sorted(times)[1]
    model.zero_grad(set_to_none=True)
    torch.set_num_threads(min(seconds, key=lambda threads: seconds[threads]))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def summary(results: dict[str, Any]) -> Table:
    """The main figures as a table for the terminal."""
    table = Table(show_header=False, title="the demo of gossamer", title_justify="left")
    for row in report.headline(results):
        table.add_row(*(cell.translate(_ASCII) for cell in row))
    return table


def go_on(out: Path, results: dict[str, Any]) -> list[str]:
    """Commands that go on with the files of a run."""
    # `make demo` runs in an environment that need not be on the path.
    beside = Path(sys.executable).with_name("gossamer")
    script = str(beside) if beside.exists() and not shutil.which("gossamer") else "gossamer"
    top, latents = results["features"]["top"], str(out / LATENTS)
    feature = str(top[0]["feature"]) if top else "0"
    return [
        shlex.join([script, "sae", "show", latents, "--feature", feature]),
        shlex.join([script, "sae", "report", latents]),
    ]


@contextmanager
def _progress(console: Console) -> Iterator[Any]:
    columns = (
        TextColumn("{task.description:22}"),
        BarColumn(12, table_column=Column(min_width=12)),
        TimeElapsedColumn(table_column=Column(min_width=7, no_wrap=True)),
        TextColumn("{task.fields[state]}"),
    )
    with Progress(*columns, console=console) as progress:

        @contextmanager
        def stage(name: str) -> Iterator[Show]:
            task = progress.add_task(name, total=1.0, state="")
            yield lambda done, state: progress.update(task, completed=done, state=state)
            progress.update(task, completed=1.0)

        yield stage


def _plain(value: Any) -> Any:
    """The value in types that JSON has: paths become text, NaN and infinities null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _replace(new: Path, place: Path) -> None:
    """Put a folder where another may be, which goes where the new one was: there is never a part of either."""
    (new / _MARK).write_text("Written by gossamer's demo. Its next run into the same place replaces this folder.\n")
    if place.exists():
        os.replace(place, new.with_name(f"old-{new.name}"))
    os.replace(new, place)
