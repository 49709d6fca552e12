"""Training of sparse autoencoders: one or several at once, on one stream of activations."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from inspect import signature
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer import nn, sae
from gossamer._core import checks, files
from gossamer.extract.ranks import Ranks
from gossamer.extract.source import Source, ahead, checksum
from gossamer.train.config import Settings
from gossamer.train.resumable import Record, Resumable, ask_cublas, reproducible

KINDS: dict[str, Any] = {
    "topk": nn.TopKSAE,
    "batchtopk": nn.BatchTopKSAE,
    "jumprelu": nn.JumpReLUSAE,
    "matryoshka": nn.MatryoshkaSAE,
    "matryoshka-batchtopk": nn.MatryoshkaBatchTopKSAE,
    "standard": nn.StandardSAE,
    "gated": nn.GatedSAE,
}
HELD_OUT = 8
"""Batches for evaluation at most, by default."""
FALL = 0.2
"""The share of the steps, at the end, over which the learning rate falls to 0."""
DENSITIES = (-6.0, 0.0, 60)
"""Of the histogram of firing rates: its ends, as powers of ten, and its bins."""
_OPERATOR = "train.SAEConfig"


@dataclass(frozen=True)
class SAEConfig(Settings):
    """A run that trains autoencoders on one stream of activations.

    Args:
        kind: `"topk"`, `"batchtopk"`, `"jumprelu"`, `"matryoshka"`, `"matryoshka-batchtopk"`, `"standard"` or
            `"gated"`: the class of `gossamer.nn`.
        d_sae: number of latents.
        l0: latents of a row, `k` or `target_l0` of the class; None is 32, and right for the two kinds with L1.
        lr: of Adam; None takes 2e-4 * (16384 / d_sae)^0.5. It falls to 0 over the last fifth of the steps.
        seed: of weights and of the order of rows.
        options: other arguments of the class, without `k` and `target_l0`.
        sweep: by the name of d_sae, l0, lr, seed or an option, the list of values to train an autoencoder with each.
            Several names give all combinations. They take the place of values that are given beside them.
        steps: optimizer steps; None goes through the source once.
        batch: rows of a step.
        buffer: rows that are shuffled together, a multiple of batch; up to three times as many are in memory.
        held_out: rows at the beginning that are for evaluation alone, a multiple of batch; None takes a tenth of the
            source, at most 8 batches.
        dtype: `"float32"`, or `"bfloat16"` for x and products; weights, gradients and moments stay float32.
        source: the checksum of the first rows, which a `SAERun` fills in.

    Raises:
        ValueError: an unknown kind or dtype, a size or seed that does not fit, an empty sweep, a name that another
            argument sets.
        TypeError: a size that is no int.

    >>> SAEConfig(sweep={"l0": [16, 32]}).names
    ['l0=16', 'l0=32']
    """

    kind: str = "topk"
    d_sae: int = 16_384
    l0: int | None = None
    lr: float | None = None
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    sweep: dict[str, list[Any]] = field(default_factory=dict)
    steps: int | None = None
    batch: int = 4096
    buffer: int = 1 << 18
    held_out: int | None = None
    dtype: str = "float32"
    source: str | None = None

    def __post_init__(self) -> None:
        for name in ("options", "sweep"):
            # As a file gives them back, with lists for tuples.
            object.__setattr__(self, name, json.loads(json.dumps(getattr(self, name))))
        for name, known in (("kind", tuple(KINDS)), ("dtype", ("float32", "bfloat16"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{_OPERATOR}: {name} must be one of {', '.join(known)}, got {getattr(self, name)!r}.")
        for name in ("batch", "buffer", "steps", "held_out"):
            if getattr(self, name) is not None:
                checks.positive(_OPERATOR, name, getattr(self, name), "It is a number of rows or steps.")
        for name in ("buffer", "held_out"):
            if (getattr(self, name) or 0) % self.batch:
                raise ValueError(
                    f"{_OPERATOR}: {name} must be a multiple of batch = {self.batch}, got {getattr(self, name)}."
                )
        for name in ("options", "sweep"):
            for argument in {"k", "target_l0"} & {*getattr(self, name)}:
                raise ValueError(f"{_OPERATOR}: {name} must not have {argument}, which follows from l0. Give l0.")
        for argument in {"d_sae", "l0", "lr", "seed"} & {*self.options}:
            raise ValueError(f"{_OPERATOR}: options must not have {argument}. Give it beside them.")
        if not all(isinstance(values, list) and values for values in self.sweep.values()):
            raise ValueError(f"{_OPERATOR}: sweep must have a list of values for each name, got {self.sweep}.")
        for seed in (self.seed, *self.sweep.get("seed", ())):
            if type(seed) is not int or not 0 <= seed < 1 << 63:
                raise ValueError(f"{_OPERATOR}: seed must be an int from 0 to 2^63 - 1, got {seed!r}.")
        hints = {"l0": "It is the number of latents of a row.", "lr": "2e-4 fits 16,384 latents."}
        for name, hint in hints.items():
            for value in (getattr(self, name), *self.sweep.get(name, ())):
                if value is not None:
                    checks.number(_OPERATOR, name, value, hint)
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"{_OPERATOR}: sweep must name each value once, got {self.sweep}.")

    @property
    def points(self) -> list[dict[str, Any]]:
        """The values of `sweep` by name, of each autoencoder."""
        return [dict(zip(self.sweep, values)) for values in itertools.product(*self.sweep.values())]

    @property
    def names(self) -> list[str]:
        """Of the autoencoders; `"sae"` is the only one without a sweep."""
        return [",".join(f"{name}={value}" for name, value in point.items()) or "sae" for point in self.points]

    def make(self, d_in: int, point: dict[str, Any]) -> tuple[Any, float]:
        """The autoencoder of one of `points`, on the CPU, and its learning rate."""
        given = {name: getattr(self, name) for name in ("d_sae", "l0", "lr", "seed")} | self.options | point
        d_sae, l0, lr, seed = (given.pop(name) for name in ("d_sae", "l0", "lr", "seed"))
        if self.kind not in ("standard", "gated"):
            given["target_l0" if self.kind == "jumprelu" else "k"] = 32 if l0 is None else l0
        elif l0 is not None:
            raise ValueError(f"{_OPERATOR}: kind {self.kind} takes no l0, got {l0}. Give its option l1_coefficient.")
        kind = KINDS[self.kind]
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = kind(d_in, d_sae, **given)
        except TypeError as error:
            known = [found for base in kind.__mro__ for found in signature(base).parameters.values()]
            names = {found.name for found in known if found.kind is found.KEYWORD_ONLY}
            names -= {"dtype", "device", "target_l0"}
            raise ValueError(
                f"{_OPERATOR}: options and sweep must have arguments of nn.{kind.__name__}: "
                f"{str(error).rpartition('__init__() ')[2]}. Options are {', '.join(sorted(names))}."
            ) from error
        return model, 2e-4 * (16_384 / d_sae) ** 0.5 if lr is None else lr


class SAERun(Resumable):
    """A run that trains autoencoders in a folder, with which a process of the same settings goes on to the bit.

    All autoencoders of a sweep train on the same batches: the source is read, and a language model runs, once. Rows are
    shuffled in blocks of `config.buffer`, in main memory, while the next block is read; they go to a GPU through pinned
    memory. A checkpoint needs no copy of them: the order follows from the seed and the step.

    Autoencoders other than JumpReLU, which finds a scale by itself, see rows times a power of 2 that brings the first
    batch nearest to a variance of 1 in each element. The files that a run writes are in the units of the source.

    Where `torch.distributed` is initialised, all ranks make the run with the same arguments, on a file system that they
    share. Rank r of W trains the autoencoders r, r + W, ... and reads the source by itself. Files have the
    tensors of one process, to the bit on the same hardware, and another number of ranks goes on with them.

    Args:
        config: of the run.
        source: as in `gossamer.extract`; an iterable without a length must have all rows of `config.steps`.
        folder: of the run. It gets `config.json`, `log.jsonl`, `checkpoints/`, and at the end `results.json` and a
            folder for each autoencoder, which SAELens and `nn.load_sae` read.
        key: the tensor of each `.safetensors` file; None if it holds one.
        device: where autoencoders train.
        checkpoint_every, log_every: steps between checkpoints and between records; keep: checkpoints that stay.

    Attributes:
        config: with all sizes known.
        models: a `ModuleList` of this rank's autoencoders, with `scale` `[]`.
        step, records: as in `Run`; records grow on rank 0, and on other ranks stay as the folder had them. A record has
            the means of the steps since the one before; those of autoencoder number i have the suffix `/i`.
        results: on rank 0 of each autoencoder its `evaluate_sae`, once the run is finished; and of a source with
            `losses` the losses and, where the module matters to the model, the loss recovered.

    Raises:
        ValueError: a folder with a run of other settings or of another source, too few rows, a corrupt checkpoint,
            ranks with different arguments or folders, or without an autoencoder.
        TypeError, FileNotFoundError: as `gossamer.extract`, of the source.

    >>> import tempfile; config = SAEConfig(d_sae=64, batch=8, buffer=16, sweep={"l0": [2, 4]})
    >>> SAERun(config, torch.randn(100, 4), tempfile.mkdtemp()).train()
    """

    def __init__(
        self,
        config: SAEConfig,
        source: Any,
        folder: str | Path,
        *,
        key: str | None = None,
        device: torch.device | str = "cpu",
        checkpoint_every: int = 5000,
        log_every: int = 50,
        keep: int = 2,
    ) -> None:
        ask_cublas()
        for name, value in (("checkpoint_every", checkpoint_every), ("log_every", log_every), ("keep", keep)):
            checks.positive("train", name, value, "It is a number of steps or checkpoints.")
        self.folder, self.device, self.keep, self.given = Path(folder), torch.device(device), keep, source
        self.checkpoint_every, self.log_every = checkpoint_every, log_every
        self._stopped = False
        with ExitStack() as stack:
            self.ranks = stack.enter_context(Ranks("train"))
            # Rows of any width, which the shuffled block takes from the host.
            self.source = Source(source, key, config.batch, torch.empty(0, dtype=getattr(torch, config.dtype)))
            stack.callback(self.source.close)
            self._prepare(config)
            self._opened = stack.pop_all()

    def _prepare(self, config: SAEConfig) -> None:
        self.derived = ["source", "buffer", *(name for name in ("steps", "held_out") if getattr(config, name) is None)]
        self.config = self._sized(config)
        held = [*self.source.read(0, self.config.held_out)]
        if sum(map(len, held)) < self.config.held_out:
            raise ValueError(f"train: source must have more than the {self.config.held_out} rows for evaluation.")
        self.held_out = torch.cat(held)
        self.config = replace(self.config, source=checksum(self.held_out))
        self.rank, count = self.ranks.rank, len(config.points)
        if count < self.ranks.size:
            raise ValueError(
                f"train: a sweep over {self.ranks.size} processes must have an autoencoder for each, got {count}. "
                "Start fewer processes."
            )
        # The numbers of steps, and whether there are losses, decide when ranks share.
        alike = {name: getattr(self, name) for name in ("checkpoint_every", "log_every", "keep")}
        self.ranks.check_alike(asdict(self.config) | alike | {"losses": callable(getattr(self.given, "losses", None))})
        self._numbers = range(self.rank, count, self.ranks.size)
        made = [config.make(self.held_out.shape[1], config.points[number]) for number in self._numbers]
        self.models: Any = torch.nn.ModuleList(model for model, _ in made).to(self.device)
        self.models.register_buffer("scale", torch.ones((), device=self.device))
        groups = [{"params": [*model.parameters()], "lr": lr, "highest": lr} for model, lr in made]
        self.optimizer = torch.optim.Adam(groups, fused=True)
        self._resume(self._held, self.ranks)
        if self.ranks.size > 1:
            self._check_folder()
        for model in self.models:
            if self.step and isinstance(model, nn.JumpReLUSAE):
                model.look_up_whether_fresh()

    def _check_folder(self) -> None:
        """Raises, on all ranks, where the folder of one is not that of rank 0, or shows another last checkpoint."""
        with NamedTemporaryFile(prefix=".rank-", dir=self.folder) as own:
            found = self.ranks.share(lambda: (self.step, Path(own.name).name))

            def compare() -> None:
                for rank, (step, name) in enumerate(found):
                    if step != self.step or not (self.folder / name).exists():
                        raise ValueError(
                            f"train: folder must be one that all ranks share, and {self.folder} of rank {rank}, at "
                            f"step {step}, is another than that of rank 0, at step {self.step}. Name a folder on a "
                            "file system that all ranks see."
                        )

            self.ranks.share(compare)

    @property
    def _held(self) -> dict[str, Tensor]:
        """Tensors by their names among those of all ranks."""
        found = {}
        for name, tensor in self.models.state_dict(keep_vars=True).items():
            number, dot, rest = name.partition(".")
            found[f"{self._numbers[int(number)]}.{rest}" if dot else name] = tensor
        return found

    def _sized(self, config: SAEConfig) -> SAEConfig:
        """The configuration with the numbers of rows and steps that follow from the source."""
        length, batch = self.source.length, config.batch
        some = HELD_OUT if length is None else min(max(length // (10 * batch), 1), HELD_OUT)
        held = config.held_out or some * batch
        steps = config.steps
        if length is None and steps is None:
            raise ValueError("train: steps must be given for a source that does not know its length.")
        self._epoch: int = steps if length is None else (length - held) // batch  # type: ignore[assignment]
        if self._epoch < 1:
            raise ValueError(
                f"train: source must have a batch of {batch} rows beside {held} for evaluation, got {length} rows. "
                "Give a smaller batch."
            )
        return replace(config, steps=steps or self._epoch, held_out=held)

    def train(self, show: Callable[[Record], Any] = lambda record: None) -> None:
        """Trains to the last step, evaluates, and writes the autoencoders. `show` takes each record.

        A source with `losses`, as `Activations`, gives the loss recovered last: all files are written before.

        Raises:
            FloatingPointError: a loss or weight is NaN or infinite. The last checkpoint is good.
            OSError: a checkpoint could not be written. Older ones are good.
            ValueError: the source ended early.
            RuntimeError: a second call.
        """
        if self._stopped:
            raise RuntimeError("train: a SAERun trains once. Another of the same folder goes on from there.")
        batches = self._batches()
        # A thread of its own for gradients would wait for the interpreter, which reads batches meanwhile, at each turn.
        here = torch.autograd.set_multithreading_enabled(False)
        with self._opened:
            with reproducible(), here, closing(batches), closing(ahead(batches, self.device)) as moved:
                try:
                    self._train(moved, show)
                finally:
                    # The thread that reads a block need not read all of it.
                    self._stopped = True
            finished, results = [in_units_of_x(model, self.models.scale) for model in self.models], []
            for number, model in zip(self._numbers, finished):
                name = self.config.names[number]
                results.append({"name": name, **evaluate_sae(model, self.held_out, self.config.batch)})
                finite = all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values())
                if not (finite and math.isfinite(results[-1]["explained"])):
                    self._refuse(f"in the units of the source a number of the autoencoder {name} is not finite")
                nn.save_sae(model, self.folder / name)
            self._write(results)
            if callable(losses := getattr(self.given, "losses", None)):
                # The model may be of a kind that has none: autoencoders are on the disk by now.
                self._write([found | _recovered(losses, model) for found, model in zip(results, finished)])

    def _write(self, results: list[dict[str, Any]]) -> None:
        self.results = self._of_all(results)

        def write() -> None:
            if self.rank == 0:
                files.write_text("train", self.folder / "results.json", json.dumps(self.results, indent=1))

        # No rank leaves before the file is whole: all learn an error of it.
        self.ranks.share(write)

    def _of_all(self, mine: list[Any]) -> list[Any]:
        """On rank 0 one for each autoencoder, from those of each rank's; on others their own."""
        found = self.ranks.share(lambda: mine)
        return [each for turn in itertools.zip_longest(*found) for each in turn if each is not None]

    def _train(self, batches: Iterator[Tensor], show: Callable[[Record], Any]) -> None:
        sums, before = None, self._now()
        done = self.step
        while self.step < self.config.steps:
            x = next(batches)
            if not self.step:
                self._begin(x)
            values = self._step(x)
            sums = values if sums is None else sums + values
            self.step += 1
            saves = self.step == self.config.steps or self.step % self.checkpoint_every == 0
            if saves or self.step % self.log_every == 0:
                self._collect(sums / (self.step - done), before, self.step - done, show)
                if saves:
                    self._save_all()
                sums, before, done = None, self._now(), self.step

    def _begin(self, x: Tensor) -> None:
        """The scale, and the start of each autoencoder, from the first batch."""
        if self.config.kind != "jumprelu":
            variance = (x.double() - x.double().mean(0)).square().mean()
            scale = (-variance.log2() / 2).round().exp2().float()
            self.models.scale.copy_(torch.where(scale.isfinite() & (scale > 0), scale, 1))
        for model in self.models:
            model.initialize_((x * self.models.scale).float())

    def _step(self, x: Tensor) -> Tensor:
        """One optimizer step of each autoencoder; its numbers `[autoencoders, 4]` on the device."""
        x = x * self.models.scale
        total, values = (x - x.mean(0)).float().square().sum(1).mean(), []
        for group in self.optimizer.param_groups:
            group["lr"] = group["highest"] * min(1.0, (1 - self.step / self.config.steps) / FALL)
        for model in self.models:
            with torch.autocast(x.device.type, torch.bfloat16, enabled=self.config.dtype == "bfloat16"):
                found = model.loss(x)
            found.loss.backward()
            # A steered JumpReLU computes its loss in units of its own.
            explained = 1 - found.mse.detach() / (total * getattr(model, "input_scale", total.new_ones(())) ** 2)
            values.append(torch.stack([found.loss.detach(), explained, found.l0, model.dead().float().mean()]))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(values).float()

    def _collect(self, means: Tensor, before: Any, steps: int, show: Callable[[Record], Any]) -> None:
        """Writes the record of some steps, and refuses numbers that are not finite."""
        after, found = self._now(), means.tolist()
        if not all(math.isfinite(loss) for loss, *_ in found):
            self._refuse(f"the loss of steps {self.step - steps + 1} to {self.step} is {[loss for loss, *_ in found]}")
        found = self._of_all(found)
        if self.rank:
            return
        seconds = before.elapsed_time(after) / 1000 if self.device.type == "cuda" else after - before
        record: Record = {"step": self.step, "tokens/s": steps * self.config.batch / seconds}
        names = ("loss", "explained", "l0", "dead")
        record |= {f"{name}/{i}": value for i, numbers in enumerate(found) for name, value in zip(names, numbers)}
        self._log(record, show)

    def _refuse(self, what: str) -> None:
        way = "Look for rows of the source that are not finite, or give a lower lr in another folder."
        self._refuse_numbers(what, way)

    def _save_all(self) -> None:
        held = self._held
        if not torch.stack([tensor.detach().float().sum() for tensor in held.values()]).isfinite().all():
            # The loss of a step is that of the weights before it.
            self._refuse(f"a weight is not finite after step {self.step}")
        self._save(held, self.ranks)
        for model in self.models:
            # A checkpoint does not hold the counts of the last calls: a run that is loaded here begins without, too.
            model.density.forget()

    def _batches(self) -> Generator[Tensor]:
        """The batches from the next step on, on their way to the device through pinned memory."""
        pinned = self.device.type == "cuda"
        with closing(ahead(self._blocks(), torch.device("cpu"))) as blocks:
            for (epoch, first, _, done), block in zip(self._spans(), blocks):
                generator = np.random.default_rng((self.config.seed, epoch, first))
                order = torch.from_numpy(generator.permutation(len(block))).split(self.config.batch)
                # To gather a batch takes all cores, and to put rows into their places as they are read would take one.
                for which in order[done:]:
                    x = torch.empty(len(which), block.shape[1], dtype=block.dtype, pin_memory=pinned)
                    yield torch.index_select(block, 0, which, out=x).to(self.device, non_blocking=True)

    def _blocks(self) -> Generator[Tensor]:
        """Blocks of rows in the order of the source, from that of the next step to that of the last."""
        for _, first, steps, _ in self._spans():
            begin, count, filled = self.config.held_out + first * self.config.batch, steps * self.config.batch, 0
            block = torch.empty(count, self.held_out.shape[1], dtype=self.held_out.dtype)
            for found in self.source.read(begin, count):
                block[filled : filled + len(found)] = found
                filled += len(found)
                if self._stopped:
                    return
            if filled < count:
                raise ValueError(
                    f"train: the source must have {count} rows from row {begin} on for {self.config.steps} steps, got "
                    f"{filled}. Give fewer steps."
                )
            yield block

    def _spans(self) -> Iterator[tuple[int, int, int, int]]:
        """Of each block from that of the next step on: its epoch, its first step in it, its steps, and those done."""
        per, step = self.config.buffer // self.config.batch, self.step
        while step < self.config.steps:
            epoch, place = divmod(step, self._epoch)
            first = place // per * per
            count = min(per, self._epoch - first, self.config.steps - epoch * self._epoch - first)
            yield epoch, first, count, place - first
            step += count - (place - first)


def _recovered(losses: Callable[..., list[float]], model: Any) -> dict[str, float]:
    """A language model's losses with an autoencoder's rows, and the share of its loss recovered."""

    def reconstructed(rows: Tensor) -> Tensor:
        return model(rows.to(model.W_enc)).to(rows)

    measured = losses(lambda rows: rows, torch.zeros_like, reconstructed)
    if not measured:
        return {}
    own, without, ours = measured
    found = {"model loss": own, "loss without": without, "loss": ours}
    # A module without which the model does no worse has no share.
    return found if without <= own else found | {"loss recovered": (without - ours) / (without - own)}


@torch.no_grad()
def evaluate_sae(model: Any, rows: Tensor, batch: int = 4096) -> dict[str, Any]:
    """An autoencoder on rows that it was not trained on.

    Args:
        model: an autoencoder of `nn` in evaluation mode.
        rows: `[M, d_in]`, on any device.
        batch: rows at once.

    Returns:
        `"explained"`, the share of the rows' variance; `"l0"`, latents of a row; `"dead"`, the share of latents that
        never fire; `"density"`, a histogram in 60 bins from -6 to 0 of the logarithm to base 10 of firing rates, the
        shares of rows in which a latent fires.

    >>> evaluate_sae(gossamer.nn.TopKSAE(4, 16, k=2).eval(), torch.randn(32, 4))["l0"] <= 2
    True
    """
    fired, error = torch.zeros(model.d_sae, dtype=torch.int64, device=model.W_enc.device), 0.0
    for part in rows.split(batch):
        x = part.to(fired.device, model.W_enc.dtype)
        latents = model.encode(x)
        fired += sae.count_fired(latents)
        error += float((x - model.decode(latents)).double().square().sum())
    centred = rows.double() - rows.double().mean(0)
    rates = fired.cpu().double() / len(rows)
    low, high, bins = DENSITIES
    return {
        "explained": 1 - error / max(float(centred.square().sum()), 1e-300),
        "l0": float(rates.sum()),
        "dead": float((rates == 0).double().mean()),
        "density": torch.histc(rates[rates > 0].log10().clamp(low, high), bins, low, high).long().tolist(),
    }


def in_units_of_x(model: Any, scale: Tensor) -> Any:
    """A copy in evaluation mode of an autoencoder that was trained on scale * x, which does the same to x."""
    found = copy.deepcopy(model).eval()
    with torch.no_grad():
        for name, tensor in (*found.named_parameters(), *found.named_buffers()):
            if name in ("b_enc", "b_gate", "b_mag", "b_dec", "threshold"):
                tensor.div_(scale)
    if hasattr(found, "l1_coefficient"):
        found.l1_coefficient /= float(scale)
    return found
