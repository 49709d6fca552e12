"""Training for a bounded time: the byte model, then a JumpReLU SAE on its residual stream."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo.model import ByteModel
from gossamer.nn import JumpReLUSAE

Show = Callable[[float, str], None]
"""Told the share of the work that is done, in [0, 1], and a line about its state."""

Record = dict[str, Any]

# With the mean over neurons as the penalty, 1.0 leaves about 3% of them active and costs no accuracy at this size.
L1_COEFFICIENT = 1.0
L1_WARM_UP = 0.25
MODEL_LEARNING_RATE = 3e-3
MODEL_WARM_UP_STEPS = 20

SAE_LEARNING_RATE = 1e-3
LEARNING_DECAY = 0.25
INITIAL_CONTEXTS = 32
RECORDS = 100


class Clock:
    """How much of an allowance of time, or of steps where their number is given, is used."""

    def __init__(self, seconds: float, steps: int | None = None) -> None:
        self.seconds, self.steps = seconds, steps
        self.start = time.perf_counter()

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.start

    def share(self, step: int = 0) -> float:
        """The used share, in [0, 1], before step number `step`."""
        used, allowed = (self.elapsed, self.seconds) if self.steps is None else (step + 1, self.steps)
        return min(used / allowed, 1.0) if allowed > 0 else 1.0


def sample(text: Tensor, n_rows: int, length: int, generator: torch.Generator) -> Tensor:
    """n_rows random windows of a text: int64 `[n_rows, length]`. generator: on the CPU."""
    starts = torch.randint(len(text) - length + 1, (n_rows, 1), generator=generator).to(text.device)
    return text[starts + torch.arange(length, device=text.device)].long()


def bits_per_byte(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in bits: logits `[B, T, 256]`, targets `[B, T]` -> `[]`."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / math.log(2)


def train_model(
    model: ByteModel, text: Tensor, *, clock: Clock, batch_size: int, generator: torch.Generator, show: Show
) -> list[Record]:
    """Train with AdamW and an L1 penalty on the gates until the clock has run down; returns the training's course."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=MODEL_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    history: list[Record] = []
    step = 0
    while True:
        done = clock.share(step)
        warm = min(1.0, (step + 1) / MODEL_WARM_UP_STEPS)
        _set_learning_rates(optimizer, MODEL_LEARNING_RATE * warm * (1 - 0.95 * done))
        tokens = sample(text, batch_size, model.config.context + 1, generator)
        gates: list[Tensor] = []
        logits = model(tokens[:, :-1], gates=gates)
        loss = bits_per_byte(logits, tokens[:, 1:])
        penalty = torch.stack([gate.mean() for gate in gates]).mean()
        total = loss * math.log(2) + L1_COEFFICIENT * min(1.0, done / L1_WARM_UP) * penalty
        optimizer.zero_grad(set_to_none=True)
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if done == 1.0 or done * RECORDS >= len(history):
            active = torch.stack([(gate > 0).float().mean() for gate in gates]).mean()
            record = {
                "step": step,
                "tokens": step * batch_size * model.config.context,
                "seconds": clock.elapsed,
                "bits_per_byte": loss.item(),
                "active_fraction": active.item(),
            }
            history.append(record)
            show(done, f"{record['bits_per_byte']:.2f} bits per byte, {record['active_fraction']:.1%} active")
        if done == 1.0:
            return history


@torch.no_grad()
def activations(model: ByteModel, text: Tensor, *, n_contexts: int, generator: torch.Generator) -> Tensor:
    """The residual stream at random places of a text: `[n_contexts * context, d_model]`."""
    return model.residual(sample(text, n_contexts, model.config.context, generator)).flatten(0, 1)


def _shuffled(model: ByteModel, text: Tensor, *, batch_size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Endless batches, each drawn from eight batches' worth of contexts so that neighbours do not come together."""
    n_contexts = max(1, 8 * batch_size // model.config.context)
    while True:
        pool = activations(model, text, n_contexts=n_contexts, generator=generator)
        order = torch.randperm(len(pool), generator=generator).to(pool.device)
        yield from pool[order].split(batch_size)


def train_sae(
    sae: JumpReLUSAE,
    model: ByteModel,
    text: Tensor,
    *,
    clock: Clock,
    batch_size: int,
    generator: torch.Generator,
    show: Show,
) -> list[Record]:
    """Train with Adam until the clock has run down; returns the training's course. Its L0 finds the module by itself;
    the rate falls towards the end."""
    batches = _shuffled(model, text, batch_size=batch_size, generator=generator)
    sae.initialize_(activations(model, text, n_contexts=INITIAL_CONTEXTS, generator=generator))
    optimizer = torch.optim.Adam(sae.parameters())
    history: list[Record] = []
    step = 0
    while True:
        done = clock.share(step)
        _set_learning_rates(optimizer, SAE_LEARNING_RATE * min(1.0, 0.05 + (1 - done) / LEARNING_DECAY))
        x = next(batches)
        result = sae.loss(x)
        optimizer.zero_grad(set_to_none=True)
        result.loss.backward()
        optimizer.step()
        step += 1
        if done == 1.0 or done * RECORDS >= len(history):
            record = {
                "step": step,
                "tokens": step * batch_size,
                "seconds": clock.elapsed,
                "l0": result.l0.item(),
                "variance_explained": variance_explained(x, result.reconstruction.detach()).item(),
            }
            history.append(record)
            show(done, f"L0 {record['l0']:.1f}, {record['variance_explained']:.1%} explained")
        if done == 1.0:
            return history


def variance_explained(x: Tensor, reconstruction: Tensor) -> Tensor:
    """1 - squared error over squared distance from the mean: x, reconstruction `[M, d_in]` -> `[]`."""
    return 1 - (x - reconstruction).square().sum() / (x - x.mean(0)).square().sum()


def _set_learning_rates(optimizer: torch.optim.Optimizer, *rates: float) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
