"""The loop: micro-batches, the optimizer, the recipe, checkpoints and the log of a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from gossamer._core import checks
from gossamer.ffn.training import columns_for, light_and_hot, lists_are_faster, sizes_for
from gossamer.sparsity import DeadNeuronTracker, reinitialize_, scalars
from gossamer.train.config import Config
from gossamer.train.data import Corpus
from gossamer.train.model import Outputs, Transformer, save_pretrained
from gossamer.train.resumable import Record, Resumable, reproducible

CHOSEN, FULL = 20, 1.25
"""Steps between choices of how blocks compute, and how many times L0 has to have room in lists."""
PROFILED = 4
"""Steps that a profile covers, after as many others in which kernels are compiled."""
RESERVE = 8
"""With `on_overflow="raise"`, one token in so many may be in no list; the paper reserves dense rows for as many."""
VALIDATED = 1 << 17
"""Tokens of a validation."""


class Run(Resumable):
    """A run of training in a folder, which a process of the same settings goes on with at its last checkpoint.

    The folder gets `config.json`, `log.jsonl` (a record a step), `checkpoints/` and at the end `model/`, a Llama of
    Hugging Face. Under `torchrun` each rank makes a Run, and the model is sharded by `fully_shard`.

    Args:
        config: of the run.
        corpus: the tokens.
        folder: of the run.
        device: where the model computes.
        checkpoint_every, keep: steps between checkpoints, and how many stay.
        validate_every: steps between validations on 131,072 tokens; 0 for one at the end alone.
        profiled: whether to write `profile.json`, a trace of four steps for Perfetto or chrome://tracing.

    Attributes:
        step: optimizer steps that were done.
        records: those of `log.jsonl`.

    Raises:
        ValueError: a folder with a run of other settings, a corpus that does not fit, a checkpoint that is corrupt.

    Source: Cetin et al., "Sparser, Faster, Lighter Transformer Language Models", sections 3.5 and 4, appendices B, C.
    """

    def __init__(
        self,
        config: Config,
        corpus: Corpus,
        folder: Path,
        *,
        device: torch.device | str = "cpu",
        checkpoint_every: int = 100,
        keep: int = 2,
        validate_every: int = 0,
        profiled: bool = False,
    ) -> None:
        self.config, self.corpus, self.folder, self.device = config, corpus, folder, torch.device(device)
        self.checkpoint_every, self.keep, self.validate_every = checkpoint_every, keep, validate_every
        self.profiled = profiled
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.windows = corpus.windows("train", config.length)
        self.held_out = corpus.windows("validation", config.length)
        self._check()
        self.model = _distributed(Transformer(config), config, self.world).to(self.device)
        matrices = [p for p in self.model.parameters() if p.dim() == 2]
        others = [p for p in self.model.parameters() if p.dim() != 2]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), eps=1e-8, fused=True)
        self.tracker, self.generator = DeadNeuronTracker(), torch.Generator(self.device)
        self._pending: tuple[int, Tensor, Any, Any] | None = None
        self._resume(dict(self.model.named_parameters()))

    def train(self, show: Callable[[Record], Any] = lambda record: None) -> None:
        """Trains to the last step. `show` takes the record of each step, on a GPU one step late.

        Raises:
            FloatingPointError: the loss or its gradient is NaN or infinite. The last checkpoint is good.
            OverflowError: with `on_overflow="raise"`, too many tokens were in no list. The weights are those of the
                step before.
            OSError: a checkpoint could not be written. Older ones are good.
        """
        with reproducible():
            self._train(show)
        tokenizer = self.corpus.folder / "tokenizer.json"
        save_pretrained(self.model, self.folder / "model", self.corpus.end, tokenizer, self.rank == 0)

    def _train(self, show: Callable[[Record], Any]) -> None:
        every, first = self.checkpoint_every, self.step
        self._before = self._now()
        tracer: profile | None = None
        while self.step < self.config.steps:
            if self.profiled and self.step == first + PROFILED:
                activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.device.type == "cuda")
                tracer = profile(activities=activities)
                tracer.__enter__()
            if self.step % CHOSEN == 0 or self.step == first:
                self._choose()
            values = self._step()
            self.step += 1
            self._collect(show)
            self._ask(values)
            if tracer is not None and self.step == min(first + 2 * PROFILED, self.config.steps):
                tracer.__exit__(None, None, None)
                if self.rank == 0:
                    tracer.export_chrome_trace(str(self.folder / "profile.json"))
            last = self.step == self.config.steps
            saves = last or self.step % every == 0
            validates = last or (self.validate_every and self.step % self.validate_every == 0)
            if saves or validates or self.device.type != "cuda":
                self._collect(show, self.validate if validates else None)
            if saves:
                self._save(dict(self.model.named_parameters()))
            if saves or validates:
                self._before = self._now()

    def _choose(self) -> None:
        """Sends each block on lists of its active entries, or on dense products, by how many neurons are hot and how
        many entries stand beside theirs in a step whose record every process has that comes here: a run that goes on
        chooses as one that was not stopped."""
        config, step = self.config, self.step // CHOSEN * CHOSEN - 1
        # A log may lack records, and those of other versions may lack numbers.
        known: Record = next((record for record in reversed(self.records) if record["step"] == step), {})
        sizes = (config.micro_batch * config.length, config.hidden, config.intermediate, config.hidden)
        room = sizes_for(sizes[0], config.intermediate, None).room
        for number, block in enumerate(self.model.blocks()):
            method = config.method
            columns = columns_for(known.get(f"hot/{number:02}"), config.intermediate)
            if method == "auto":
                method = "fused"
                mean = known.get(f"light/{number:02}")
                if mean is not None and self.device.type == "cuda" and config.activation != "silu":
                    index = self.device.index or 0
                    fits = FULL * mean * sizes[0] < room
                    if fits and lists_are_faster(mean, columns, sizes, config.gated, self.model.dtype.itemsize, index):
                        method = "gather"
            block.method, block.density.hot.pinned = method, str(columns)

    def validate(self) -> float:
        """The mean cross-entropy on text that training does not see."""
        size, count = self.config.micro_batch, max(VALIDATED // self.config.length, self.world)
        # All ranks make the same calls: each of them gathers the weights together.
        share = min(len(self.held_out), count) // self.world
        mine = range(self.rank * share, (self.rank + 1) * share)
        total = torch.zeros(2, device=self.device)
        with torch.no_grad():
            for first in range(0, share, size):
                numbers = mine[first : first + size]
                loss = self.model(_moved(self.held_out.batch(numbers), self.device)).loss
                total += torch.stack((loss * len(numbers), loss.new_tensor(len(numbers))))
        return float(torch.div(*self._summed(total)))

    def _step(self) -> Tensor:
        """One optimizer step; returns its numbers on the device."""
        config, micro = self.config, self.config.micro_batch
        share = config.batch // self.world
        first = self.step * config.batch + self.rank * share
        numbers = self.windows.shuffled(first, share, config.seed)
        weight, parts = config.schedule(self.step), share // micro
        sums, unlisted = list[Tensor](), torch.zeros(config.layers, dtype=torch.int64, device=self.device)
        for i in range(parts):
            tokens = self.windows.batch(numbers[i * micro : (i + 1) * micro])
            out: Outputs = self.model(_moved(tokens, self.device))
            loss, l1, l0 = out.loss, out.loss.new_zeros(()), out.loss.new_full((config.layers,), config.intermediate)
            if out.activity is not None:
                l1, l0 = out.activity.l1.mean(), out.activity.l0
                self.tracker.add(out.activity.fired)
                unlisted = torch.maximum(unlisted, out.activity.unlisted)
            ((loss + weight * l1) / parts).backward()
            sums.append(torch.cat((torch.stack((loss, l1)), l0)).detach() / parts)
        if config.on_overflow == "raise":
            self._refuse(unlisted)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, self.step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        dead = torch.zeros(config.layers, 1, dtype=torch.bool, device=self.device)
        light, hot = torch.tensor([[float(config.intermediate)], [0.0]], device=self.device).expand(2, config.layers)
        if out.activity is not None:
            light, hot = light_and_hot(out.activity.fired, micro * config.length, self.model.dtype.itemsize)
            dead = self.tracker.step()
            if config.reinitialize:
                self.generator.manual_seed((config.seed << 32) + self.step)
                for gate, silent in zip(self.model.gates(), dead):
                    reinitialize_(gate, silent, rate=config.reinitialize, generator=self.generator)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        means = self._summed(torch.stack(sums).sum(0)) / self.world
        light_hot = self._summed(torch.cat((light, hot)).float()) / self.world
        return torch.cat((norm[None], means, dead.float().mean(1), light_hot))

    def _refuse(self, unlisted: Tensor) -> None:
        """Raises where more tokens of a micro-batch are in no list than there may be, before the optimizer's step."""
        if self.world > 1:
            dist.all_reduce(unlisted, dist.ReduceOp.MAX)
        most, layer = (int(found) for found in unlisted.max(0))
        tokens = self.config.micro_batch * self.config.length
        if most > tokens // RESERVE:
            raise OverflowError(
                f"train: in step {self.step + 1}, {most} of {tokens} tokens of layer {layer} are in no list of active "
                f'entries, and on_overflow="raise" allows {tokens // RESERVE}. The weights are those of step '
                f'{self.step}. In another folder, give on_overflow="compute", method="fused" or a larger l1.'
            )

    def _summed(self, values: Tensor) -> Tensor:
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def _ask(self, values: Tensor) -> None:
        """Sends the numbers of a step to the host."""
        if self.device.type == "cuda":
            values = torch.empty(values.shape, pin_memory=True).copy_(values, non_blocking=True)
        self._pending = self.step, values, self._before, (after := self._now())
        self._before = after

    def _collect(self, show: Callable[[Record], Any], validation: Callable[[], float] | None = None) -> None:
        """Takes the numbers of the last step, writes its record, and refuses a loss or gradient that is not finite."""
        if self._pending is None:
            return
        (step, values, before, after), self._pending = self._pending, None
        if self.device.type == "cuda":
            after.synchronize()
        seconds = before.elapsed_time(after) / 1000 if self.device.type == "cuda" else after - before
        norm, loss, l1 = values[:3].tolist()
        layers = self.config.layers
        # Of a finite loss with a gradient that is not, the weights are lost as well.
        if not math.isfinite(loss + norm):
            self._refuse_numbers(
                f"the loss of step {step} is {loss}, and the norm of its gradient {norm}",
                "Give a lower lr, a longer warm-up or a smaller l1, in another folder.",
            )
        others = {"loss": loss, "l1": l1, "norm": norm, "lr": learning_rate(self.config, step - 1)}
        others["sparse layers"] = sum(block.method == "gather" for block in self.model.blocks())
        others |= {"coefficient": self.config.schedule(step - 1), "tokens/s": self.config.tokens_per_step / seconds}
        if validation is not None:
            others["validation"] = validation()
        dead, light_hot = values[3 + layers : 3 + 2 * layers, None], values[3 + 2 * layers :].tolist()
        names = [f"{name}/{number:02}" for name in ("light", "hot") for number in range(layers)]
        others |= dict(zip(names, light_hot, strict=True))
        record = {"step": step, **scalars(values[3 : 3 + layers], dead, **others)}
        if self.device.type == "cuda":
            record["peak_bytes"] = torch.cuda.max_memory_allocated(self.device)
            # A block that goes over to lists shows in the next record.
            torch.cuda.reset_peak_memory_stats(self.device)
        self._log(record, show)

    def _check(self) -> None:
        config = self.config
        for name in ("checkpoint_every", "keep"):
            checks.positive("train", name, getattr(self, name), "It is a number of steps or checkpoints.")
        if self.corpus.vocabulary > config.vocabulary:
            raise ValueError(
                f"train: vocabulary must be at least that of the corpus, {self.corpus.vocabulary}, got "
                f"{config.vocabulary}."
            )
        if config.batch % (config.micro_batch * self.world):
            raise ValueError(
                f"train: batch must be a multiple of micro_batch times the ranks, {config.micro_batch} times "
                f"{self.world}, got {config.batch}."
            )
        if not len(self.windows) or len(self.held_out) < self.world:
            raise ValueError(
                f"train: the corpus must have sequences of {config.length} tokens for training and for validation, got "
                f"{len(self.windows)} and {len(self.held_out)}. Pack more text, or give a smaller length."
            )


def learning_rate(config: Config, step: int) -> float:
    """A line from 0 to `lr` in `warmup` steps, then a cosine to 0; step is counted from 0.

    >>> from gossamer.train import learning_rate, preset
    >>> learning_rate(preset("tiny", lr=1.0, warmup=10, steps=20), 15)
    0.5
    """
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    return config.lr * 0.5 * (1 + math.cos(math.pi * (step - config.warmup) / max(config.steps - config.warmup, 1)))


def _distributed(model: Transformer, config: Config, world: int) -> Transformer:
    """The model, sharded over all ranks where there are several."""
    if world > 1:
        dtype = torch.bfloat16 if config.dtype == "bfloat16" else None
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy)
        # The root would otherwise stay whole after a validation, and its parameters be others than the optimizer's.
        fully_shard(model, mp_policy=policy, reshard_after_forward=True)
    return model


def _moved(tokens: Tensor, device: torch.device) -> Tensor:
    return tokens.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tokens
