"""Training for a bounded time: the byte model, then a JumpReLU SAE on its residual stream."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.cli._demo.model import ByteModel
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
THRESHOLD_LEARNING_RATE = 1e-2
L0_COEFFICIENT = 1e-3
L0_WARM_UP = 0.5
LEARNING_WARM_UP = 0.1
INITIAL_FIRING_RATE = 0.01
INITIAL_CONTEXTS = 32
DEAD_AFTER_BYTES = 100_000
READ_EVERY = 10
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
def activations(model: ByteModel, text: Tensor, *, n_contexts: int, scale: float, generator: torch.Generator) -> Tensor:
    """The scaled residual stream at random places of a text: `[n_contexts * context, d_model]`."""
    return model.residual(sample(text, n_contexts, model.config.context, generator)).flatten(0, 1) * scale


def _shuffled(
    model: ByteModel, text: Tensor, *, batch_size: int, scale: float, generator: torch.Generator
) -> Iterator[Tensor]:
    """Endless batches, each drawn from eight batches' worth of contexts so that neighbours do not come together."""
    n_contexts = max(1, 8 * batch_size // model.config.context)
    while True:
        pool = activations(model, text, n_contexts=n_contexts, scale=scale, generator=generator)
        order = torch.randperm(len(pool), generator=generator).to(pool.device)
        yield from pool[order].split(batch_size)


@torch.no_grad()
def initialise(sae: JumpReLUSAE, acts: Tensor) -> None:
    """Start near a solution for acts `[M, d_in]`.

    b_dec is their geometric median, each latent fires on 1% of them, and the encoder's scale is the one that fits them
    best: with a worse one the first steps silence many latents for good.
    """
    sae.initialize_(acts)
    centred = acts - sae.b_dec
    pre = centred @ sae.W_enc
    rank = max(1, round(len(acts) * (1 - INITIAL_FIRING_RATE)))
    threshold = pre.kthvalue(rank, dim=0).values.clamp_min(1e-3)
    reconstruction = torch.where(pre > threshold, pre, 0) @ sae.W_dec
    scale = (centred * reconstruction).sum() / reconstruction.square().sum()
    sae.W_enc.mul_(scale)
    sae.b_enc.copy_(-sae.b_dec @ sae.W_enc)
    sae.log_threshold.copy_((threshold * scale).log())


def train_sae(
    sae: JumpReLUSAE,
    model: ByteModel,
    text: Tensor,
    *,
    clock: Clock,
    batch_size: int,
    scale: float,
    target_l0: float,
    generator: torch.Generator,
    show: Show,
) -> list[Record]:
    """Train with Adam until the clock has run down; returns the training's course.

    The L0 coefficient rises over the first half, and is scaled by how far L0 lies from `target_l0`, so that L0 lands
    in the tens on any text.
    """
    batches = _shuffled(model, text, batch_size=batch_size, scale=scale, generator=generator)
    initialise(sae, activations(model, text, n_contexts=INITIAL_CONTEXTS, scale=scale, generator=generator))
    thresholds = [p for name, p in sae.named_parameters() if "threshold" in name]
    others = [p for name, p in sae.named_parameters() if "threshold" not in name]
    optimizer = torch.optim.Adam([{"params": others}, {"params": thresholds}], betas=(0.9, 0.99))
    history: list[Record] = []
    step, l0 = 0, target_l0
    while True:
        done = clock.share(step)
        decay = min(1.0, 0.05 + done / LEARNING_WARM_UP, 0.05 + 4 * (1 - done))
        _set_learning_rates(optimizer, SAE_LEARNING_RATE * decay, THRESHOLD_LEARNING_RATE * decay)
        pressure = min(max(l0 / target_l0, 0.25), 4.0) ** 2
        sae.l0_coefficient = L0_COEFFICIENT * min(1.0, done / L0_WARM_UP) * pressure
        x = next(batches)
        result = sae.loss(x)
        optimizer.zero_grad(set_to_none=True)
        result.loss.backward()
        optimizer.step()
        sae.normalize_decoder_()
        step += 1
        if step % READ_EVERY == 0:
            l0 = result.l0.item()
        if done == 1.0 or done * RECORDS >= len(history):
            dead = sae.dead().float().mean().item()
            record = {
                "step": step,
                "tokens": step * batch_size,
                "seconds": clock.elapsed,
                "l0": result.l0.item(),
                "variance_explained": variance_explained(x, result.reconstruction.detach()).item(),
                "dead_fraction": dead,
                "l0_coefficient": sae.l0_coefficient,
            }
            history.append(record)
            show(done, f"L0 {record['l0']:.1f}, {record['variance_explained']:.1%} explained, {dead:.0%} dead")
        if done == 1.0:
            return history


@torch.no_grad()
def fold_scale(sae: JumpReLUSAE, scale: float) -> None:
    """Make an autoencoder of scaled activations, `scale * x`, one of x itself, with the same latents."""
    sae.W_enc.mul_(scale)
    sae.W_dec.div_(scale)
    sae.b_dec.div_(scale)


def variance_explained(x: Tensor, reconstruction: Tensor) -> Tensor:
    """1 - squared error over squared distance from the mean: x, reconstruction `[M, d_in]` -> `[]`."""
    return 1 - (x - reconstruction).square().sum() / (x - x.mean(0)).square().sum()


def _set_learning_rates(optimizer: torch.optim.Optimizer, *rates: float) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
