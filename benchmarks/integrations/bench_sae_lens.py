"""`integrations.sae_lens`: SAELens as it is against SAELens patched, at the shapes of five pretrained SAEs.

Weights are random and thresholds set so that L0 is what the published SAE has. A training step is a step of SAELens's
own trainer, optimizer included, at a learning rate of 0, so that all steps compute the same.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine import Case, Provider, random_rows
from benchmarks.sae.bench_decode import REAL


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Small shapes for `quick` and on the CPU."""
    small = quick or device.type == "cpu"
    for name, F, D, l0 in REAL[:1] if small else REAL:
        shape = (4096, 256, 32) if small else (F, D, l0)
        yield _inference("sae_lens_decode", name, 32, *shape)
        yield _inference("sae_lens_forward", name, 32, *shape)
    shape = (256, 4096, 256) if small else (4096, 65536, 2304)
    half = torch.float32 if device.type == "cpu" else torch.bfloat16
    for kind in ("topk", "batchtopk", "matryoshka_batchtopk", "jumprelu", "standard", "gated"):
        yield _training(kind, *shape, half)
    yield _training("topk", *shape, half, dead=shape[1] // 10)
    if device.type == "cuda":
        yield _training("topk", *shape, torch.float32, autocast=True)


def _inference(name: str, sae_name: str, B: int, F: int, D: int, l0: int) -> Case:
    def make(device: torch.device, generator: torch.Generator) -> list[tuple[Any, ...]]:
        from sae_lens import JumpReLUSAE, JumpReLUSAEConfig

        from gossamer.integrations.sae_lens import patch

        stock = JumpReLUSAE(JumpReLUSAEConfig(d_in=D, d_sae=F, device=str(device), apply_b_dec_to_input=False))
        _randomize(stock, generator)
        stock.threshold.data.fill_(_threshold(l0 / F))
        patched = copy.copy(stock)
        patched.__dict__ = dict(stock.__dict__)
        patch(patched)
        if name == "sae_lens_decode":
            given = random_rows(B, F, l0, torch.float32, device, generator)
        else:
            given = torch.randn(B, D, device=device, generator=generator)
        return [(stock, patched, given)]

    def reference(stock: Any, patched: Any, given: Tensor) -> tuple[Tensor]:
        acts = given.double()
        if name == "sae_lens_forward":
            pre = acts @ stock.W_enc.double() + stock.b_enc.double()
            acts = torch.where(pre > stock.threshold.double(), pre, 0)
        return (acts @ stock.W_dec.double() + stock.b_dec.double(),)

    call = (lambda sae, given: sae.decode(given)) if name == "sae_lens_decode" else (lambda sae, given: sae(given))
    encoder = 0 if name == "sae_lens_decode" else F * D
    return Case(
        room="integrations",
        name=name,
        parameters={"SAE": sae_name, "B": B, "F": F, "D": D, "L0": l0},
        dtype=torch.float32,
        make=make,
        providers=(
            Provider("gossamer", lambda _, patched, given: call(patched, given), ours=True, capturable=True),
            Provider("SAELens", lambda stock, _, given: call(stock, given), capturable=True),
        ),
        reference=reference,
        bytes=4 * (encoder + (0 if encoder else B * F) + min(B * l0, F) * D + 2 * B * D),
        flops=2 * B * (encoder + l0 * D),
    )


def _training(kind: str, B: int, F: int, D: int, dtype: torch.dtype, autocast: bool = False, dead: int = 0) -> Case:
    k, selects = 64, kind.endswith("topk")

    def make(device: torch.device, generator: torch.Generator) -> list[tuple[Any, ...]]:
        from sae_lens.registry import get_sae_training_class

        from gossamer.integrations.sae_lens import patch

        kind_class, config_class = get_sae_training_class(kind)
        options: dict[str, Any] = {"l1_coefficient": 1e-3}
        if selects:
            options = {"k": k, "matryoshka_widths": [F >> 4, F >> 3, F >> 2, F >> 1, F]}
            options = options if kind == "matryoshka_batchtopk" else {"k": k}
        elif kind == "jumprelu":
            options = {"l0_coefficient": 1e-3}
        config = config_class(d_in=D, d_sae=F, device=str(device), dtype=_name(dtype), **options)
        stock = kind_class(config)
        _randomize(stock, generator)
        if not selects:
            name, sign = {"jumprelu": ("threshold", 1), "standard": ("b_enc", -1), "gated": ("b_gate", -1)}[kind]
            getattr(stock, name).data.fill_(sign * _threshold(k / F))
        patched = copy.deepcopy(stock)
        patch(patched)
        x = torch.randn(B, D, device=device, generator=generator).to(dtype)
        return [(*(_trainer(sae, B, device, autocast) for sae in (stock, patched)), x)]

    def step(trainer: Any, x: Tensor) -> Tensor:
        trainer.n_forward_passes_since_fired[:dead] = 1e9
        loss: Tensor = trainer._train_step(trainer.sae, x).losses["mse_loss"]
        return loss.detach().view(1, 1)

    def reference(stock: Any, patched: Any, x: Tensor) -> tuple[Tensor]:
        sae = stock.sae
        with torch.no_grad():
            W_enc, W_dec, b_dec = (t.double() for t in (sae.W_enc, sae.W_dec, sae.b_dec))
            pre = (x.double() - b_dec * sae.cfg.apply_b_dec_to_input) @ W_enc
            pre += getattr(sae, "b_enc", pre.new_zeros(()))
            ranked = pre * W_dec.norm(dim=1)
            if not selects:
                keep = pre > (sae.threshold if kind == "jumprelu" else -sae.b_gate if kind == "gated" else 0)
            elif kind == "topk":
                keep = ranked >= ranked.topk(k, dim=1).values[:, -1:]
            else:
                keep = ranked >= ranked.flatten().topk(k * B).values[-1]
            error = torch.where(keep, pre, 0) @ W_dec + b_dec - x.double()
            return (error.square().sum(1).mean().view(1, 1),)

    nnz = B * k
    return Case(
        room="integrations",
        name="sae_lens_training_step",
        parameters={"SAE": kind, "B": B, "F": F, "D": D, "k": k, "dead": dead, "autocast": int(autocast)},
        dtype=dtype,
        make=make,
        providers=(
            Provider("gossamer", lambda _, patched, x: step(patched, x), ours=True),
            Provider("SAELens", lambda stock, _, x: step(stock, x)),
        ),
        reference=reference,
        # Weights are read, gradients written and read, and the optimizer's states read and written.
        bytes=2 * F * D * dtype.itemsize * 9,
        flops=2 * B * F * D + 4 * 2 * nnz * D,
        grad=True,
        budget=2e-2,
    )


def _trainer(sae: Any, B: int, device: torch.device, autocast: bool) -> Any:
    from sae_lens.config import LoggingConfig, SAETrainerConfig
    from sae_lens.training.sae_trainer import SAETrainer

    config = SAETrainerConfig(
        n_checkpoints=0, checkpoint_path=None, save_final_checkpoint=False, total_training_samples=1 << 40,
        device=str(device), autocast=autocast, lr=0.0, lr_end=0.0, lr_scheduler_name="constant", lr_warm_up_steps=0,
        adam_beta1=0.9, adam_beta2=0.999, lr_decay_steps=0, n_restart_cycles=1, train_batch_size_samples=B,
        dead_feature_window=1 << 24, feature_sampling_window=1 << 30, logger=LoggingConfig(log_to_wandb=False),
    )  # fmt: skip
    return SAETrainer(config, sae, iter(()))


def _randomize(sae: Any, generator: torch.Generator) -> None:
    """Directions at random: of input rows that are standard normal, pre-activations are so, too."""
    with torch.no_grad():
        directions = torch.randn(sae.W_dec.shape, device=sae.W_dec.device, generator=generator)
        directions /= directions.norm(dim=1, keepdim=True)
        sae.W_dec.copy_(directions)
        sae.W_enc.copy_(directions.t())


def _threshold(share: float) -> float:
    """The number that so large a share of standard normal numbers exceeds."""
    return torch.special.ndtri(torch.tensor(1 - share, dtype=torch.float64)).item()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
