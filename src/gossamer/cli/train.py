"""`gossamer train`: pack text, train a sparse transformer on it, and report."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text
from torch import distributed

from gossamer import train as training
from gossamer._core.files import make_folder
from gossamer.cli.application import Commands, set_fields
from gossamer.cli.energy import energy_counter
from gossamer.cli.environment import DEVICE_HELP, DTYPE_HELP, describe, ranks, resolve_device, resolve_dtype
from gossamer.cli.page import counted

train = Commands("Train transformers whose feed-forward blocks become sparse.")
_BARS = "▁▂▃▄▅▆▇█"


@train.command()
def pack(
    text: list[Path] = typer.Argument(
        None, help="Text files (.jsonl: a document a line; others: a document a file), or folders of .txt and .jsonl."
    ),
    out: Path = typer.Option(..., help="Folder for the tokens."),
    dataset: str | None = typer.Option(
        None, help="A data set of Hugging Face instead of text, as NAME or NAME:CONFIGURATION; its column text."
    ),
    tokenizer: Path | None = typer.Option(None, help="A tokenizer.json; without it one is learnt from the text."),
    vocabulary: int = typer.Option(24_576, min=257, help="Tokens of a tokenizer that is learnt."),
) -> None:
    """Tokenise text once, into memory-mapped shards with checksums.

    Of files: gossamer train pack books/ notes.txt --out corpus

    Of a data set, with the paper's tokenizer: gossamer train pack --dataset HuggingFaceFW/fineweb-edu --tokenizer
    tokenizer.json --out corpus
    """
    if bool(text) == bool(dataset):
        raise ValueError("give either TEXT or --dataset, and not both.")
    make_folder("gossamer train pack", "--out", out)

    def read() -> Iterable[str]:
        return training.read_dataset(dataset) if dataset else training.read_text(text)

    console = Console(stderr=True)
    with console.status("learning a tokenizer") as status:
        known = _tokenizer(tokenizer) if tokenizer else training.learn_tokenizer(read(), vocabulary)
        training.pack(read(), known, out, progress=lambda tokens: status.update(f"{tokens:,} tokens packed"))
    console.print(f"{training.Corpus(out).tokens:,} tokens for training, in {out}", markup=False)


@train.command()
def run(
    ctx: typer.Context,
    corpus: Path = typer.Argument(help="The folder that `gossamer train pack` wrote."),
    out: Path = typer.Option(..., help="Folder of the run. The same command again goes on where it was stopped."),
    preset: str = typer.Option("tiny", help=f"Sizes: {', '.join(training.PRESETS)}; 0.5b to 2b are the paper's."),
    activation: str = typer.Option("relu", help="Activation of the blocks: relu, relu2 (squared ReLU) or silu."),
    gated: bool = typer.Option(True, "--gated/--plain", help="Whether blocks have a gate; plain ones are wider."),
    method: str = typer.Option(
        "fused", help="In training: fused computes every neuron, auto goes on lists of the active ones where that pays."
    ),
    l1: float = typer.Option(
        0.0,
        min=0.0,
        help="Weight of L1 in the loss: 0 is dense, 2e-5 the paper's; the short preset tiny needs 2e-2.",
    ),
    l1_warmup: int = typer.Option(0, min=0, help="Steps before L1 begins."),
    l1_ramp: int = typer.Option(0, min=0, help="Steps in which it grows to its weight then."),
    reinitialize: float = typer.Option(
        0.0, min=0.0, max=1.0, help="Rate of new weights for dead neurons; 0.1 is good."
    ),
    steps: int | None = typer.Option(None, min=1, help="Optimizer steps, instead of the preset's."),
    batch: int | None = typer.Option(None, min=1, help="Sequences of a step, over all micro-batches and GPUs."),
    micro_batch: int | None = typer.Option(None, min=1, help="Sequences that a GPU computes at once: lower it first."),
    lr: float | None = typer.Option(None, help="Highest learning rate."),
    seed: int = typer.Option(0, min=0, help="Seed of weights and of the order of the text."),
    dtype: str = typer.Option("auto", help=DTYPE_HELP),
    compile: bool | None = typer.Option(None, help="Compile each layer: slower to begin, faster then."),
    recompute: bool | None = typer.Option(
        None, help="Compute layers again in the backward pass, to save memory; the paper's presets do."
    ),
    set_: list[str] = typer.Option([], "--set", help="Any other field of train.Config, as --set length=512."),
    device: str = typer.Option("auto", help=DEVICE_HELP),
    checkpoint_every: int = typer.Option(100, min=1, help="Steps between checkpoints, and between reports."),
    keep: int = typer.Option(2, min=1, help="Checkpoints that stay."),
    validate_every: int = typer.Option(0, min=0, help="Steps between validations; 0: one at the end."),
    profile: bool = typer.Option(False, help="Write a trace of four steps to profile.json."),
    log: str | None = typer.Option(None, help="Scalars to tensorboard or wandb, beside log.jsonl."),
) -> None:
    """Train a Transformer++ on packed text; write checkpoints, a log, a report and a Llama of Hugging Face.

    Dense, as a baseline: gossamer train run corpus --preset small --out dense

    Sparse: gossamer train run corpus --preset small --l1 1e-4 --reinitialize 0.1 --out sparse

    On several GPUs: torchrun --nproc-per-node 8 --no-python gossamer train run ...

    A run may be killed at any moment: the same command goes on at the last checkpoint, and gives the tensors of a run
    that was never killed, to the bit. L1 costs a little loss and leaves few neurons active (L0); too much of it kills
    neurons, which --reinitialize brings back. `integrations.transformers.patch(model, sparse=True)` makes the result
    fast.
    """
    ctx.obj = lambda: "the same command goes on at the last checkpoint"
    begin_log = log_writers(log)
    chosen = resolve_device(device, "gossamer train run")
    with ranks(chosen) as rank:
        tokens = training.Corpus(corpus)
        # Options have the names of the configuration's fields.
        given = {field.name: ctx.params.get(field.name) for field in fields(training.Config)}
        given |= {"vocabulary": tokens.vocabulary, "dtype": resolve_dtype(dtype, chosen)}
        given = {name: value for name, value in given.items() if value is not None}
        config = training.preset(preset, **given | set_fields(set_))
        console, joules = Console(quiet=rank != 0), energy_counter(chosen)
        whole = training.Run(
            config, tokens, out, device=chosen, checkpoint_every=checkpoint_every, keep=keep,
            validate_every=validate_every, profiled=profile,
        )  # fmt: skip
        console.print(_introduced(config, tokens, whole.step), markup=False)
        if distributed.is_torchelastic_launched():
            console.print(f"Stopped at any moment, {ctx.obj()}.")
        begun, first = joules() if joules else 0, whole.step

        def page(record: dict[str, float]) -> None:
            if record["step"] % checkpoint_every == 0:
                _report([out], out / "report.html")

        writers = [*begin_log(out), page] if rank == 0 else []
        with steps_bar(console) as bar:
            whole.train(_shower(bar, config, whole.step, writers))
        if rank == 0:
            found = {"device": describe(chosen), "parameters": config.parameters}
            if joules and whole.step > first:
                # This rank's card, over this rank's tokens.
                own = (whole.step - first) * config.tokens_per_step / whole.world
                found["mJ/token"] = (joules() - begun) / own
            (out / "results.json").write_text(json.dumps(found, indent=1))
            _report([out], out / "report.html")
            loss = next(
                (f"validation loss {r['validation']:.4f}; " for r in whole.records[::-1] if "validation" in r), ""
            )
            console.print(f"{loss}report, model and log in {out}", markup=False)


@train.command()
def report(
    runs: list[Path] = typer.Argument(help="Folders of runs, finished or not, to be compared."),
    out: Path = typer.Option(Path("report.html"), help="The page."),
) -> None:
    """Compare runs: loss, active and dead neurons by step and layer, speed, memory and energy, on one HTML page."""
    _report(runs, out)
    Console().print(f"{out}", markup=False)


def _report(runs: list[Path], out: Path) -> None:
    from gossamer.cli._train_report import read, render

    out.write_text(render([read(folder) for folder in runs]), encoding="utf-8")


def _tokenizer(file: Path) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # of tokenizers, which has no type of its own for it
        raise ValueError(f"--tokenizer must be a tokenizer.json, got {file}: {error}.") from error


def _introduced(config: training.Config, tokens: training.Corpus, step: int) -> str:
    epochs = config.steps * config.tokens_per_step / tokens.tokens
    begins = f"goes on at step {step}" if step else "begins"
    return (
        f"{config.parameters:,} parameters; {counted(config.steps, 'step')} of {config.tokens_per_step:,} tokens, "
        f"{epochs:.2g} times through the corpus; {begins}"
    )


def steps_bar(console: Console) -> Progress:
    """A bar of steps, with the field `state`, of which a narrow terminal shows the beginning."""
    whole: Any = {"table_column": Column(no_wrap=True)}
    columns = (TextColumn("{task.description}", **whole), BarColumn(20, **whole), MofNCompleteColumn(**whole))
    return Progress(*columns, TimeRemainingColumn(**whole), _State(), console=console)


class _State(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(task.fields["state"], no_wrap=True, overflow="ellipsis")


def _shower(bar: Progress, config: training.Config, step: int, writers: list[Any]) -> Callable[[Any], None]:
    task = bar.add_task("steps", completed=step, total=config.steps, state="")

    def show(record: dict[str, float]) -> None:
        layers = [record[f"l0/{layer:02}"] for layer in range(config.layers)]
        bars = "".join(_BARS[int(7 * count / max(*layers, 1e-9))] for count in layers)
        state = (
            f"loss {record['loss']:.3f}  L0 {record['l0']:.0f} {bars}  dead {record['dead']:.0%}  "
            f"{record['tokens/s']:,.0f} tokens/s"
        )
        bar.update(task, completed=record["step"], state=state)
        for write in writers:
            write(record)

    return show


def log_writers(log: str | None) -> Callable[[Path], list[Callable[[dict[str, float]], Any]]]:
    """Gives, of the folder of a run, the functions that take each record, for tensorboard or wandb. Raises where there
    is no such library, before there is a run."""
    if log is None:
        return lambda out: []
    if log == "wandb":
        import wandb

        def begin(out: Path) -> list[Callable[[dict[str, float]], Any]]:
            here = wandb.init(project="gossamer", name=out.name, dir=str(out))
            return [lambda record: here.log(record, step=int(record["step"]))]

        return begin
    if log == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        def write(writer: Any, record: dict[str, float]) -> None:
            for name, value in record.items():
                writer.add_scalar(name, value, int(record["step"]))

        return lambda out: [partial(write, SummaryWriter(str(out / "tensorboard")))]
    raise ValueError(f"--log must be tensorboard or wandb, got {log!r}.")
