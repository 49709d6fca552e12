"""What `sae.encode` is compared with."""

import math
from typing import Any

import torch
from torch import Tensor

from gossamer import sae
from gossamer.gemm import AbsTopK, BatchTopK, GroupMax, JumpReLU, TopK
from gossamer.rowsparse import Rows
from gossamer.sae.encode_path import choose_path

PACKINGS: list[dict[str, Any]] = [{"capacity": "exact"}, {"capacity": 6}, {"room": 3000}, {"room": 15}]
"""Arguments of `strategies.pack_as`; some of the rows overflow."""


def encode_with_l0(*args: Any, **options: Any) -> tuple[Rows, Tensor]:
    """(latents, their L0)"""
    rows = sae.encode(*args, **options)
    return rows, rows.l0


def in_slots(rows: Rows, part: str) -> Tensor:
    """Buffers in which every row has the same number of slots, as a matrix."""
    return getattr(rows.packed, part).view(rows.num_rows, -1)


def valued(
    activation: str = "relu",
    *,
    k: int = 0,
    threshold: Any = None,
    scale: Tensor | None = None,
    bandwidth: float | None = None,
    ste_to_input: bool = False,
    **others: Any,
) -> dict[str, Any]:
    """`others`, and the activation of a name as a value: for tests that go through all of them."""
    if activation == "jumprelu":
        return {"activation": JumpReLU(threshold, bandwidth, ste_to_input), **others}
    if activation == "groupmax":
        return {"activation": GroupMax(k), **others}
    kind = {"topk": TopK, "abstopk": AbsTopK, "batchtopk": BatchTopK}.get(activation)
    return {"activation": activation if kind is None else kind(k, scale), **others}


def selected(z: Tensor, activation: str, k: int | None = None, threshold: Tensor | None = None) -> Tensor:
    """Which pre-activations [..., N] an activation keeps: bool [..., N]."""
    z = z.abs() if activation == "abstopk" else z
    positive = ~(z <= 0)
    if threshold is not None:
        return positive & ~(z <= threshold.double())
    if k is None:
        return positive
    if activation == "groupmax":
        # The first of equal ones: `argmax` of NumPy, for which NaN is largest.
        first = torch.from_numpy(z.cpu().unflatten(-1, (k, -1)).numpy().argmax(-1)).to(z.device)[..., None]
        return positive & torch.zeros_like(z.unflatten(-1, (k, -1)), dtype=torch.bool).scatter_(
            -1, first, True
        ).flatten(-2)
    groups = z.reshape(1 if activation == "batchtopk" else -1, -1 if activation == "batchtopk" else z.shape[-1])
    count = k * (math.prod(z.shape[:-1]) if activation == "batchtopk" else 1)
    # A stable sort leaves ties in the order of their index; NaN counts as largest.
    order = groups.sort(dim=1, descending=True, stable=True).indices[:, :count]
    return positive & torch.zeros_like(groups, dtype=torch.bool).scatter_(1, order, True).view_as(z)


def whole(shape: tuple[int, ...], limit: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Small whole numbers: no dtype rounds their products and sums, and many of them tie."""
    drawn = torch.randint(-limit, limit + 1, shape, device=generator.device, generator=generator)
    return drawn.to(dtype)


def check_path(path: str, m: int, n: int, capacity: int, jump: bool, generator: torch.Generator) -> None:
    """ReLU or JumpReLU of [m, n] goes that way, and comes out right."""
    # Whole numbers: pre-activations are exact, and many are equal.
    x, weight = (whole(shape, 2, generator, torch.float32) for shape in ((m, 6), (6, n)))
    assert choose_path("relu", m, 0, weight) == path
    threshold = torch.arange(n, device=x.device) % 4 + 0.5
    rows = sae.encode(x, weight, None, JumpReLU(threshold) if jump else "relu", capacity=capacity)
    z = x @ weight
    kept = selected(z, "jumprelu", threshold=threshold) if jump else selected(z, "relu")
    wanted = torch.where(kept, z, 0)
    assert torch.equal(rows.to_dense(), wanted)
    assert torch.equal(rows.counts, (wanted != 0).sum(1))


SCALED = ("topk", "abstopk", "batchtopk")
"""Activations of a selection by size."""
BANDWIDTH = 0.75
"""Of the cases of JumpReLU."""


def jumprelu_case(
    shape: tuple[int, ...], d: int, n: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """(leaves, weights of the activations, weights of l0)."""
    device = generator.device

    def draw(*size: int) -> Tensor:
        return torch.randn(size, device=device, generator=generator, dtype=torch.float64)

    leaves = {"x": draw(*shape, d), "W_enc": draw(d, n) / d**0.5, "b_enc": draw(n) / 4, "b_dec": draw(d) / 4}
    leaves["threshold"] = 0.1 + draw(n).abs() / 2
    leaves = {name: leaf.to(dtype if name in ("x", "W_enc") else torch.float32) for name, leaf in leaves.items()}
    return leaves, draw(*shape, n), draw(*shape)


def gradients(leaves: dict[str, Tensor], dtype: torch.dtype, loss: Any) -> dict[str, Tensor]:
    own = {name: leaf.detach().to(dtype).requires_grad_() for name, leaf in leaves.items()}
    value = loss(**own)
    return dict(zip(own, torch.autograd.grad(value, own.values())))


def capacities(activation: str, *others: Any) -> tuple[Any, ...]:
    """Those that an activation takes."""
    return (None, *others) if activation in ("relu", "jumprelu") else (None,)


def options_for(activation: str, n: int, k: int, threshold: Tensor) -> dict[str, Any]:
    if activation == "jumprelu":
        return {"activation": activation, "threshold": threshold}
    if activation == "groupmax":
        k = max(groups for groups in range(1, min(k, n) + 1) if n % groups == 0)
    return {"activation": activation} if activation == "relu" else {"activation": activation, "k": min(k, n)}
