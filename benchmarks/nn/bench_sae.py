"""A training step of `nn.TopKSAE`, `nn.BatchTopKSAE`, `nn.MatryoshkaSAE` and `nn.JumpReLUSAE`: loss and gradients.

Beside them the same in plain PyTorch, as SAE libraries write it: dense latents, `torch.topk`, and for JumpReLU the
straight-through estimates as autograd functions. The optimizer and the loss for dead latents are left out, for they are
the same or missing there. SAELens's own trainer is in `bench sae --saelens`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine import Case, Provider, random_matrix
from gossamer import nn

NAMES = ("W_enc", "W_dec", "b_enc", "b_dec", "log_threshold")
BANDWIDTH, L0_COEFFICIENT = 0.25, 1e-3


class JumpReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, threshold: Tensor, bandwidth: float) -> Tensor:
        ctx.save_for_backward(z, threshold)
        ctx.bandwidth = bandwidth
        return z * (z > threshold)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        z, threshold = ctx.saved_tensors
        near = ((z - threshold).abs() < ctx.bandwidth / 2) * grad
        return grad * (z > threshold), -threshold / ctx.bandwidth * near.sum(0, dtype=threshold.dtype), None


class Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, threshold: Tensor, bandwidth: float) -> Tensor:
        ctx.save_for_backward(z, threshold)
        ctx.bandwidth = bandwidth
        return (z > threshold).to(threshold.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:  # type: ignore[override]
        z, threshold = ctx.saved_tensors
        return None, -(((z - threshold).abs() < ctx.bandwidth / 2) * grad).sum(0) / ctx.bandwidth, None


def jumprelu_loss(x: Tensor, *parameters: Tensor, bandwidth: float, l0_coefficient: float) -> Tensor:
    """The squared error of a row and the step penalty, as SAE libraries write them; parameters as in `NAMES`."""
    W_enc, W_dec, b_enc, b_dec, log_threshold = parameters
    z = torch.addmm(b_enc.to(x.dtype), x, W_enc)
    threshold = log_threshold.exp()
    acts = JumpReLU.apply(z, threshold, bandwidth).to(x.dtype)
    penalty = l0_coefficient * Step.apply(z, threshold, bandwidth).sum(1).mean()
    return squared_error(x, torch.addmm(b_dec.to(x.dtype), acts, W_dec)) + penalty


def squared_error(x: Tensor, reconstruction: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x - reconstruction).to(wide).square().sum(1).mean()


def gradients(loss: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    return lambda x, *parameters: torch.autograd.grad(loss(x, *parameters), parameters)


def reference(loss: Callable[..., Tensor], *given: Tensor) -> tuple[Tensor, ...]:
    x, *parameters = (tensor.detach().double() for tensor in given)
    return gradients(loss)(x, *(tensor.requires_grad_() for tensor in parameters))


def largest_error(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
    """Of the norm of each gradient. In 16 bits another latent is chosen here and there, for rounding makes ties."""
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(got, want, strict=True))


def random_parameters(
    B: int, D: int, F: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator, spread: float = 1.0
) -> list[Tensor]:
    """x and the parameters but for thresholds. Pre-activations are normal, with a deviation of about `spread`."""
    wide = torch.float32
    return [
        random_matrix(B, D, dtype, device, generator),
        random_matrix(D, F, wide, device, generator).mul_(spread * D**-0.5).to(dtype),
        torch.nn.functional.normalize(random_matrix(F, D, wide, device, generator)).to(dtype),
        random_matrix(1, F, wide, device, generator)[0] * 0.1 * spread,
        random_matrix(1, D, wide, device, generator)[0] * 0.1,
    ]


def load_parameters(model: Any, *parameters: Tensor) -> list[Tensor]:
    """Gives a module the parameters, and returns its own."""
    for name, parameter in zip(NAMES, parameters):
        setattr(model, name, torch.nn.Parameter(parameter.detach()))
    return [getattr(model, name) for name, _ in zip(NAMES, parameters)]


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """The article's large batch in bfloat16; a small float32 one for `quick` and on the CPU. JumpReLU also where more
    and more latents fire, up to half of them, as they do before a run has found its thresholds."""
    if quick or device.type == "cpu":
        shape, k, dtype, more = (64, 256, 4096), 16, torch.float32, (640, 2048)
    else:
        shape, k, dtype, more = (4096, 2304, 65536), 64, torch.bfloat16, (1494, 10394, 32768)
    for kind in ("topk", "batchtopk", "matryoshka", "jumprelu"):
        yield _train(kind, *shape, k, dtype)
    for l0 in more:
        yield _train("jumprelu", *shape, l0, dtype)


def _train(kind: str, B: int, D: int, F: int, k: int, dtype: torch.dtype) -> Case:
    def make(device: torch.device, generator: torch.Generator) -> list[tuple[Tensor, ...]]:
        """x and the parameters; one copy, for the weights alone exceed any cache."""
        made = random_parameters(B, D, F, dtype, device, generator)
        if kind == "jumprelu":
            # Where half of the latents fire the threshold is next to 0.
            made.append(torch.full((F,), math.log(max(NormalDist().inv_cdf(1 - k / F), 1e-3)), device=device))
        return [tuple(tensor.requires_grad_(at > 0) for at, tensor in enumerate(made))]

    widths = [F // 16, F // 8, F // 4, F // 2, F]

    def module(x: Tensor, *parameters: Tensor) -> tuple[Any, ...]:
        options: dict[str, Any] = {"dtype": dtype, "device": x.device}
        model: Any
        if kind == "jumprelu":
            model = nn.JumpReLUSAE(D, F, bandwidth=BANDWIDTH, l0_coefficient=L0_COEFFICIENT, **options)
        else:
            if kind == "matryoshka":
                options |= {"widths": widths, "inner_weights": [1.0] * 4}
            made = {"topk": nn.TopKSAE, "batchtopk": nn.BatchTopKSAE, "matryoshka": nn.MatryoshkaSAE}[kind]
            model = made(D, F, k, aux_coefficient=0, **options)
        return model, x, load_parameters(model, *parameters)

    def ours(model: Any, x: Tensor, parameters: list[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(model.loss(x).loss, parameters)

    def loss(x: Tensor, *parameters: Tensor) -> Tensor:
        if kind == "jumprelu":
            return jumprelu_loss(x, *parameters, bandwidth=BANDWIDTH, l0_coefficient=L0_COEFFICIENT)
        W_enc, W_dec, b_enc, b_dec = parameters
        z = torch.addmm(b_enc.to(x.dtype), x - b_dec.to(x.dtype), W_enc)
        flat = z.view(1, -1) if kind == "batchtopk" else z
        values, indices = flat.topk(k * B // len(flat), dim=-1, sorted=False)
        acts = torch.zeros_like(flat).scatter(-1, indices, values.relu()).view_as(z)
        out, errors, narrow = b_dec.to(x.dtype), [], 0
        for wide in widths if kind == "matryoshka" else (F,):
            out = out + (acts[:, narrow:wide] @ W_dec[narrow:wide])
            errors.append(squared_error(x, out))
            narrow = wide
        return torch.stack(errors).sum()

    l0 = {"L0" if kind == "jumprelu" else "k": k}
    return Case(
        room="nn",
        name=f"train_{kind}",
        parameters={"B": B, "D": D, "F": F, **l0},
        dtype=dtype,
        make=make,
        providers=(
            Provider("gossamer", ours, ours=True, prepare=module, capturable=True),
            Provider("dense", gradients(loss), capturable=True),
            Provider("torch.compile", gradients(torch.compile(loss, fullgraph=True, dynamic=False)), capturable=True),
        ),
        reference=partial(reference, loss),
        # Both weights read, both gradients written; x read for the encoder, its reconstruction and both gradients.
        bytes=(4 * D * F + 4 * B * D) * dtype.itemsize,
        # The encoder's product; of the sparse ones the decoder's, and gradients of W_dec, the latents and W_enc.
        flops=2 * B * D * (F + 4 * k),
        grad=True,
        error=largest_error,
        budget=0.3 if dtype == torch.bfloat16 else 1e-3,
    )
