"""`gossamer sae`: train autoencoders, extract latents of many activations, and look at them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from safetensors import SafetensorError
from torch import distributed

from gossamer import extract as extraction
from gossamer import nn
from gossamer._core.files import make_folder, write_text
from gossamer.cli.application import Commands, Failed, set_fields
from gossamer.cli.environment import DEVICE_HELP, DTYPE_HELP, ranks, resolve_device, resolve_dtype
from gossamer.cli.page import counted, visible
from gossamer.extract import Extraction
from gossamer.nn.checkpoint import OnlyInSAELens

sae = Commands("Train sparse autoencoders, extract their latents to disk, and look at them.")

_SOURCE = typer.Argument(
    help="Activations: .safetensors and .npy files, or folders of them, in order. With --model: text files "
    "(.jsonl: a document a line; others: a document a file), or folders of .txt and .jsonl."
)
_MODEL = typer.Option(None, help="A causal language model of Hugging Face, name or folder, that reads the text.")
_HOOK = typer.Option(None, help="The module of --model whose output the autoencoder takes, such as model.layers.12.")
_CONTEXT_SIZE = typer.Option(128, min=2, help="With --model: tokens that it reads as one.")
_CONTEXTS = typer.Option(16, min=1, help="With --model: contexts that it reads at once.")
_DEVICE = typer.Option("auto", help=DEVICE_HELP)
_KEY = typer.Option(None, help="The tensor of each .safetensors file, where it holds several.")


@sae.command()
def extract(
    ctx: typer.Context,
    autoencoder: Path = typer.Argument(
        metavar="SAE", help="Folder of the autoencoder, as nn.save_sae, SAELens or sparsify writes it."
    ),
    source: list[Path] = _SOURCE,
    out: Path = typer.Option(..., help="Folder for the shards. The same command again goes on where it was stopped."),
    model: str | None = _MODEL,
    hook: str | None = _HOOK,
    context_size: int = _CONTEXT_SIZE,
    contexts: int = _CONTEXTS,
    key: str | None = _KEY,
    device: str = _DEVICE,
    batch_size: int = typer.Option(4096, min=1, help="Rows at once."),
    shard_rows: int = typer.Option(65536, min=1, help="Rows a file; a multiple of --batch-size."),
    top: int = typer.Option(16, min=0, help="How many of its largest values to keep of each latent."),
) -> None:
    """Encode activations and write the latents to shards, with statistics of each latent.

    Of activations on disk: gossamer sae extract my-sae activations/ --out latents

    Of a model that reads text: gossamer sae extract my-sae text.txt --model gpt2 --hook transformer.h.6 --out latents

    On several GPUs: torchrun --nproc-per-node 8 --no-python gossamer sae extract ...
    """
    done = step = 0
    ctx.obj = lambda: f"stopped at row {done}; the same command goes on from the last whole file"
    where = str(resolve_device(device, "gossamer sae extract"))
    sae_model = _load(autoencoder, where)
    rows = _rows(source, model, hook, key, where, context_size, contexts)
    with ranks() as rank:
        console = Console(quiet=rank != 0)
        if distributed.is_initialized():
            console.print("Stopped at any moment, the same command goes on from the last whole file.")
        with _bar(console) as bar:
            task = bar.add_task("rows", total=None, visible=False)

            def progress(finished: int, total: int | None) -> None:
                nonlocal done, step
                if not done or finished - done < step:
                    # The rows of an earlier run, which are only verified, say nothing about the speed of this run.
                    bar.reset(task, completed=max(finished - batch_size, 0), total=total, visible=True)
                done, step = finished, finished - done
                bar.update(task, completed=finished, total=total)

            found = extraction.extract(
                rows, sae_model, out, key=key, batch_size=batch_size, shard_rows=shard_rows, top=top, progress=progress
            )
    sizes = (counted(found.rows, "row"), f"{found.nnz:,} entries", counted(len(found), "file"))
    console.print(f"{', '.join(sizes)} in {out}", markup=False)
    console.print(_summary(found))


@sae.command()
def train(
    ctx: typer.Context,
    source: list[Path] = _SOURCE,
    out: Path = typer.Option(..., help="Folder of the run. The same command again goes on where it was stopped."),
    kind: str = typer.Option(
        "topk", help="topk, batchtopk, jumprelu, matryoshka, matryoshka-batchtopk, standard, gated."
    ),
    d_sae: int = typer.Option(16_384, min=1, help="Latents."),
    l0: int | None = typer.Option(None, min=1, help="Latents of a row; 32 by default. Not of standard and gated."),
    lr: float | None = typer.Option(None, help="Adam's learning rate; by default 2e-4 * (16384 / d_sae) ** 0.5."),
    set_: list[str] = typer.Option([], "--set", help="Another argument of the class, as --set l1_coefficient=2."),
    sweep: list[str] = typer.Option([], help="Values to train an autoencoder with each, as --sweep l0=16,32,64."),
    steps: int | None = typer.Option(None, min=1, help="Optimizer steps; by default once through the source."),
    batch_size: int = typer.Option(4096, min=1, help="Rows of a step."),
    buffer: int | None = typer.Option(None, min=1, help="Rows that are shuffled together; by default 64 batches."),
    model: str | None = _MODEL,
    hook: str | None = _HOOK,
    context_size: int = _CONTEXT_SIZE,
    contexts: int = _CONTEXTS,
    key: str | None = _KEY,
    dtype: str = typer.Option("auto", help=DTYPE_HELP),
    seed: int = typer.Option(0, min=0, help="Seed of weights and of the order of rows."),
    device: str = _DEVICE,
    checkpoint_every: int = typer.Option(5000, min=1, help="Steps between checkpoints."),
    log_every: int = typer.Option(50, min=1, help="Steps between records of log.jsonl."),
    keep: int = typer.Option(2, min=1, help="Checkpoints that stay."),
    log: str | None = typer.Option(None, help="Scalars to tensorboard or wandb, beside log.jsonl."),
) -> None:
    """Train autoencoders on activations, all of them on one stream; evaluate them, and write a report.

    Of activations on disk: gossamer sae train activations/ --d-sae 16384 --l0 32 --out run

    Of a model that reads text: gossamer sae train text.txt --model gpt2 --hook transformer.h.6 --out run

    Several at once: gossamer sae train activations/ --kind batchtopk --sweep l0=16,32,64 --out run

    On several GPUs, each with a part of the sweep: torchrun --nproc-per-node 3 --no-python gossamer sae train ...

    A run may be killed at any moment: the same command goes on at the last checkpoint, and gives the tensors of a run
    that was never killed, to the bit. Each autoencoder is in a folder that SAELens and nn.load_sae read.
    """
    from gossamer.cli._sae_train_report import read, render
    from gossamer.cli.train import log_writers, steps_bar
    from gossamer.train import SAEConfig, SAERun

    def page() -> None:
        write_text("train", out / "report.html", render(out.resolve().name, read(out)))

    ctx.obj = lambda: "the same command goes on at the last checkpoint"
    begin_log, values = log_writers(log), _swept(ctx, sweep)
    with ranks() as rank, steps_bar(Console(quiet=rank != 0)) as bar:
        where = resolve_device(device, "gossamer sae train")
        config = SAEConfig(
            kind=kind, d_sae=d_sae, l0=l0, lr=lr, seed=seed, options=set_fields(set_), sweep=values, steps=steps,
            batch=batch_size, buffer=buffer or 64 * batch_size, dtype=resolve_dtype(dtype, where),
        )  # fmt: skip
        rows = _rows(source, model, hook, key, str(where), context_size, contexts)
        whole = SAERun(
            config, rows, out, key=key, device=where, checkpoint_every=checkpoint_every, log_every=log_every, keep=keep
        )
        if distributed.is_initialized():
            bar.console.print(f"Stopped at any moment, {ctx.obj()}.")
        task = bar.add_task("steps", completed=whole.step, total=whole.config.steps, state="")
        count = len(whole.config.names)
        writers = begin_log(out) if rank == 0 else []

        def show(record: dict[str, float]) -> None:
            state = "  ".join(
                f"{name} {form.format(sum(record[f'{name}/{i}'] for i in range(count)) / count)}"
                for name, form in (("loss", "{:.4g}"), ("explained", "{:.1%}"), ("l0", "{:.1f}"), ("dead", "{:.1%}"))
            )
            bar.update(task, completed=record["step"], state=f"{state}  {record['tokens/s']:,.0f} rows/s")
            for write in writers:
                write(record)
            if record["step"] % checkpoint_every == 0:
                page()

        whole.train(show)
        if rank == 0:
            page()
    console = bar.console
    for found in whole.results:
        recovered = f", loss recovered {found['loss recovered']:.1%}" if "loss recovered" in found else ""
        if "model loss" in found and not recovered:
            recovered = "; no loss to recover, for the model does no worse without the module"
        console.print(
            f"{found['name']}: explains {found['explained']:.1%} with L0 {found['l0']:.1f}, {found['dead']:.1%} of "
            f"latents never fired{recovered}",
            markup=False, soft_wrap=True,
        )  # fmt: skip
    console.print(f"report, log and autoencoders in {out}", markup=False, soft_wrap=True)


@sae.command()
def show(
    folder: Path = typer.Argument(help="The folder of an extraction, finished or not."),
    feature: int | None = typer.Option(
        None, min=0, help="A latent, with the text it fires on if that is known; without it, the busiest of all."
    ),
    rows: int = typer.Option(10, min=1, help="How many lines of the table at most."),
) -> None:
    """Show how often, how strongly and where latents fire. It verifies the statistics; `check` verifies the shards."""
    found = Extraction(folder)
    if feature is None:
        _show_all(Console(), found, rows)
    elif feature < found.d_sae:
        _show_one(Console(), found, feature, rows)
    else:
        raise ValueError(f"--feature must be below d_sae = {found.d_sae}, got {feature}.")
    _say_what_was_verified(found)


@sae.command()
def report(
    folder: Path = typer.Argument(help="The folder of an extraction, finished or not."),
    out: Path | None = typer.Option(
        None, help="Folder for index.html, which needs no other file; default: the folder of the extraction."
    ),
    features: str | None = typer.Option(
        None, help="Latents to show, such as 1,5,9; default: the busiest, and a random sample that is always the same."
    ),
) -> None:
    """Write a page on latents: how often, how strongly and, where the text is known, on which text they fire.

    It verifies the statistics; `check` verifies the shards, from which the text comes.
    """
    from gossamer.cli._sae_report import choose, render

    found, out = Extraction(folder), out or folder
    chosen = choose(found) if features is None else {"The latents asked for": _latents(features, found.d_sae)}
    make_folder("gossamer sae report", "--out", out)
    file = out / "index.html"
    write_text("gossamer sae report", file, render(found, chosen))
    Console().print(f"{counted(sum(map(len, chosen.values())), 'latent')} in {file}", markup=False, soft_wrap=True)
    _say_what_was_verified(found)


@sae.command()
def check(folder: Path = typer.Argument(help="The folder of an extraction, finished or not.")) -> None:
    """Verify by checksums that no file has changed since it was written."""
    try:
        with _bar(Console()) as bar:
            task = bar.add_task("rows", total=None, visible=False)
            found = Extraction.check(
                folder, lambda done, rows: bar.update(task, completed=done, total=rows, visible=True)
            )
    except ValueError as error:
        # The question is right, and the files are not.
        raise Failed(error) from error
    Console().print(repr(found), markup=False, soft_wrap=True)
    said = f"{counted(len(found), 'shard')}, their statistics and the manifest are as they were written."
    Console().print(said, markup=False, soft_wrap=True)


def _say_what_was_verified(found: Extraction) -> None:
    said = f"The statistics are as written. The shards were not verified: gossamer sae check {found.folder}"
    Console().print(said, markup=False, soft_wrap=True, style="dim")


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(20),
        MofNCompleteColumn(),
        _Speed(),
        TimeRemainingColumn(),
        console=console,
    )


def _latents(features: str, d_sae: int) -> list[int]:
    names = [name.strip() for name in features.split(",")]
    if not all(name.isdecimal() and int(name) < d_sae for name in names):
        raise ValueError(
            f"--features must be whole numbers below d_sae = {d_sae} with commas between them, got {features!r}."
        )
    return list(dict.fromkeys(map(int, names)))


def _marked(found: Extraction, row: int) -> list[Text]:
    """The text around a row, if it is known, on one line; quotation marks show the token where colours do not."""
    if not found.has_text:
        return []
    before, token, after = (visible(part) for part in found.context(row))
    return [Text.assemble(before, ("«" + token + "»", "bold reverse"), after)]


def _show_one(console: Console, found: Extraction, feature: int, rows: int) -> None:
    fired = int(found.firing_counts[feature])
    console.print(f"latent {feature}: fired in {fired:,} of {found.rows:,} rows ({fired / max(found.rows, 1):.3%})")
    if not fired:
        return
    console.print(f"largest magnitude {float(found.maximum[feature]):.4g}")
    counts = found.histogram[feature].tolist()
    octaves = [
        (f"{found.magnitude(octave):.3g}", f"{count:,}", "#" * max(round(40 * count / max(counts)), 1))
        for octave, count in enumerate(counts)
        if count
    ]
    console.print(_table("magnitudes", ("from", "rows", ""), octaves))
    largest = list(zip(found.top_positions[feature].tolist(), found.top_values[feature].tolist()))[:rows]
    names = ("row", "magnitude", "") if found.has_text else ("row", "magnitude")
    places = [(f"{row:,}", f"{value:.4g}", *_marked(found, row)) for row, value in largest if row >= 0]
    if places:
        console.print(_table("where it is largest", names, places))


def _show_all(console: Console, found: Extraction, rows: int) -> None:
    console.print(repr(found))
    console.print(_summary(found))
    order = found.firing_counts.argsort(descending=True, stable=True)[:rows].tolist()
    shown = [
        (str(latent), f"{count:,}", f"{count / max(found.rows, 1):.3%}", f"{float(found.maximum[latent]):.4g}")
        for latent in order
        if (count := int(found.firing_counts[latent]))
    ]
    console.print(_table("the latents that fire most", ("latent", "rows", "share", "largest"), shown))


def _table(title: str, names: tuple[str, ...], rows: list[tuple[Any, ...]]) -> Table:
    """A table of numbers, but for a column without a name."""
    table = Table(title=title, title_justify="left")
    for name in names:
        # Folded: text without spaces would be cut off before the token.
        table.add_column(name, justify="right" if name else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _summary(found: Extraction) -> str:
    fired, nonfinite = found.firing_counts, found.manifest["nonfinite"]
    left_out = f"; {nonfinite:,} values are not finite, and are left out" if nonfinite else ""
    latents = f"{int(fired.sum()) / max(found.rows, 1):.1f} latents a row"
    return f"{latents}; {int((fired == 0).sum()):,} of {found.d_sae:,} never fired{left_out}"


def _swept(ctx: typer.Context, sweep: list[str]) -> dict[str, list[Any]]:
    """Values by name, of NAME=VALUE,VALUE each."""
    found, beside = {}, set_fields(ctx.params["set_"])
    for name, value in set_fields(sweep).items():
        if isinstance(value, str):
            # Words, or numbers beside words.
            value = [set_fields([f"{name}={part}"])[name] for part in value.split(",")]
        found[name] = [*value] if isinstance(value, tuple | list) else [value]
        if name in ("d_sae", "l0", "lr", "seed"):
            if any(isinstance(each, str | list | tuple) for each in found[name]):
                raise ValueError(f"--sweep takes numbers for {name}, as {name}=1,2, got {name}={value}.")
            source = ctx.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE":
                option = f"--{name.replace('_', '-')}"
                raise ValueError(f"{option} must not be given beside --sweep {name}, which has its values.")
        if name in beside:
            raise ValueError(f"--set {name} must not be given beside --sweep {name}, which has its values.")
    return found


def _load(folder: Path, device: str) -> Any:
    """The SAE as a module of `nn`, or, for an architecture that is not there, of SAELens."""
    if (folder / "log.jsonl").exists() and (inside := sorted(file.parent for file in folder.glob("*/cfg.json"))):
        raise ValueError(
            f"{folder} is a run of `sae train`. Name one of its autoencoders: {', '.join(map(str, inside))}."
        )
    try:
        return nn.load_sae(folder, device=device).eval()
    except OnlyInSAELens as error:
        try:
            from sae_lens import SAE, TrainingSAE
            from sae_lens.registry import SAE_CLASS_REGISTRY, SAE_TRAINING_CLASS_REGISTRY
        except ImportError:
            raise error from None
        # Before version 6 SAELens wrote none for its standard SAEs.
        architecture = json.loads((folder / "cfg.json").read_text()).get("architecture", "standard")
        kind: Any = SAE if architecture in SAE_CLASS_REGISTRY else TrainingSAE
        if architecture in SAE_CLASS_REGISTRY | SAE_TRAINING_CLASS_REGISTRY:
            try:
                loaded = kind.load_from_disk(folder, device=device).eval()
            except RuntimeError as unfit:
                raise ValueError(f"SAELens cannot load {folder}: {unfit}") from unfit
            if getattr(loaded, "hook_z_reshaping_mode", False):
                # Files hold rows, and not heads of them.
                loaded.turn_off_forward_pass_hook_z_reshaping()
            return loaded
        raise ValueError(
            f"{folder / 'cfg.json'} has architecture = {architecture!r}, which neither "
            "gossamer.nn nor the installed SAELens has. SAELens has "
            f"{', '.join(SAE_CLASS_REGISTRY | SAE_TRAINING_CLASS_REGISTRY)}."
        ) from error


def _rows(
    source: list[Path], model: str | None, hook: str | None, key: str | None, device: str, context_size: int,
    contexts: int,
) -> Any:  # fmt: skip
    """Files of activations, or those of a model that reads text."""
    if (model is None) != (hook is None):
        raise ValueError(
            "--model and --hook belong together: which model reads the text, and at which of its modules. Without "
            "both, SOURCE is activations."
        )
    if model is None or hook is None:
        return list(source)
    if key is not None:
        raise ValueError("--key names a tensor of activations; with --model there is none.")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from gossamer.integrations.transformers import Activations

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        network: Any = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"--model: transformers cannot load {model!r}: {error}") from error
    return Activations(
        network.to(device).eval(), tokenizer, list(source), hook, context_size=context_size, batch_size=contexts
    )


class _Speed(ProgressColumn):
    """Rows a second."""

    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:,.0f} rows/s")
