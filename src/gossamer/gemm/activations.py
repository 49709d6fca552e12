"""Activations that leave most entries 0, as values: each has its own parameters, looked at when it is made.

`gemm.linear_pack`, `ffn.gated`, `ffn.plain` and `sae.encode` take them. z is a pre-activation, and NaN is kept by all.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer._core import checks


class Parameters(NamedTuple):
    """The plain tensors and numbers by which operators know an activation."""

    name: str
    k: int = 0
    bandwidth: float | None = None
    ste_to_input: bool = False
    threshold: Tensor | None = None
    scale: Tensor | None = None


@dataclass(frozen=True)
class ReLU:
    """Keeps z > 0: `"relu"`."""

    parameters = Parameters("relu")


@dataclass(frozen=True)
class ReLU2:
    """Keeps z > 0 and squares it: `"relu2"`.

    Source: So et al. 2021, "Primer: Searching for Efficient Transformers for Language Modeling".
    """

    parameters = Parameters("relu2")


@dataclass(frozen=True, eq=False)
class JumpReLU:
    """Keeps z > threshold.

    Args:
        threshold: `[N]`, one for each column, or `[]`; compared in float32, and below 0 it acts as 0, because values
            are at least 0.
        bandwidth: width of the window around the threshold that gives it a gradient. Where the threshold takes one,
            or with ste_to_input, entries with threshold - bandwidth / 2 < z <= threshold are stored as well, with
            value 0. None: the threshold is a constant. For `sae.encode` alone.
        ste_to_input: whether the straight-through estimate reaches z as well as the threshold, with the opposite sign,
            as in Anthropic's recipe of 2025. It needs a bandwidth.

    Raises:
        TypeError: threshold is no floating tensor, bandwidth no number, or ste_to_input no bool.
        ValueError: threshold has more than one dimension, bandwidth is not above 0, or ste_to_input is without one.

    Source: Rajamanoharan et al. 2024, "Jumping Ahead", section 3; Conerly et al. 2025, "Dictionary Learning
    Optimization Techniques" (ste_to_input).

    >>> JumpReLU(torch.tensor(0.5), bandwidth=0.1).bandwidth
    0.1
    """

    threshold: Tensor
    bandwidth: float | None = None
    ste_to_input: bool = False

    def __post_init__(self) -> None:
        operator = "gemm.JumpReLU"
        # Values may be made for each call. Rare errors are found where values are used.
        if not isinstance(self.threshold, Tensor) or self.threshold.dtype not in checks.FLOATS:
            checks.floating(operator, threshold=self.threshold)
        if self.threshold.dim() > 1:
            raise ValueError(f"{operator}: threshold must have shape [N] or [], got {list(self.threshold.shape)}.")
        if self.bandwidth is not None:
            checks.number(operator, "bandwidth", self.bandwidth, "None gives no gradient.")
        if not isinstance(self.ste_to_input, bool):
            raise TypeError(f"{operator}: ste_to_input must be a bool, got {type(self.ste_to_input).__name__}.")
        if self.ste_to_input and self.bandwidth is None:
            raise ValueError(
                f"{operator}: ste_to_input needs bandwidth, the width of the window that it is an estimate in."
            )

    @property
    def parameters(self) -> Parameters:
        return Parameters("jumprelu", 0, self.bandwidth, self.ste_to_input, self.threshold)


@dataclass(frozen=True, eq=False)
class TopK:
    """Keeps the k largest z of each row that are above 0. Ties go to the lowest index, NaN counts as largest.

    Args:
        k: entries a row.
        scale: `[N]`, above 0, or None: the entries with the largest z * scale are kept then, for instance with the
            norms of decoder rows that are not 1. Stored values are z all the same, and scale has no gradient.

    Raises:
        TypeError: k is no int, or scale no floating tensor.
        ValueError: k is below 1, or scale has not one dimension.

    Source: Gao et al. 2024, "Scaling and evaluating sparse autoencoders".

    >>> TopK(32)
    TopK(k=32, scale=None)
    """

    k: int
    scale: Tensor | None = None

    def __post_init__(self) -> None:
        operator = f"gemm.{type(self).__name__}"
        checks.positive(operator, "k", self.k, "It is the number of entries per row.")
        if self.scale is not None:
            checks.floating(operator, scale=self.scale)
            if self.scale.dim() != 1:
                raise ValueError(f"{operator}: scale must have shape [N], got {list(self.scale.shape)}.")

    @property
    def parameters(self) -> Parameters:
        return Parameters("topk", self.k, scale=self.scale)


@dataclass(frozen=True, eq=False)
class AbsTopK(TopK):
    """Keeps the k largest |z| of each row, with their signs: latents may be below 0. Zeros are never kept, ties go to
    the lowest index, and NaN counts as largest. For `sae.encode` alone.

    Args:
        k, scale: as in `TopK`.

    Raises:
        TypeError, ValueError: as `TopK`.

    Source: "AbsTopK: Rethinking Sparse Autoencoders For Bidirectional Features", 2025.

    >>> AbsTopK(32)
    AbsTopK(k=32, scale=None)
    """

    @property
    def parameters(self) -> Parameters:
        return Parameters("abstopk", self.k, scale=self.scale)


@dataclass(frozen=True, eq=False)
class BatchTopK(TopK):
    """Keeps the k * M largest z of all M rows together that are above 0: k a row on average, as rows need them.

    Args:
        k: entries a row, on average.
        scale: as in `TopK`.

    Raises:
        TypeError, ValueError: as `TopK`.

    Source: Bussmann et al. 2024, "BatchTopK Sparse Autoencoders". For inference, where what a row keeps is not to
    depend on the others, `JumpReLU` with a threshold that follows the smallest value kept takes its place.

    >>> BatchTopK(32)
    BatchTopK(k=32, scale=None)
    """

    @property
    def parameters(self) -> Parameters:
        return Parameters("batchtopk", self.k, scale=self.scale)


@dataclass(frozen=True)
class GroupMax:
    """Keeps the largest z of each of k groups in a row, if it is above 0: a group has N / k consecutive columns. Ties
    go to the lowest index, and NaN counts as largest. For `sae.encode` without a process group.

    Args:
        k: groups of a row; it divides N.

    Raises:
        TypeError: k is no int.
        ValueError: k is below 1.

    Source: EleutherAI's sparsify, `fused_encoder` with the activation "groupmax".

    >>> GroupMax(32)
    GroupMax(k=32)
    """

    k: int

    def __post_init__(self) -> None:
        checks.positive("gemm.GroupMax", "k", self.k, "It is the number of groups of a row.")

    @property
    def parameters(self) -> Parameters:
        return Parameters("groupmax", self.k)


@dataclass(frozen=True)
class ClampedSwiGLU:
    """The gate of open-weight mixture-of-experts models: (clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g), where
    g is min(gate, limit). For `gemm.linear_glu`, `gemm.gated_mlp` and `nn.GatedMLP`, where PyTorch computes it.

    A call with gate returns its part, g * sigmoid(alpha * g).

    Args:
        alpha: of the sigmoid, above 0.
        limit: of gate and up, above 0.

    Raises:
        TypeError: alpha or limit is no number.
        ValueError: alpha or limit is not above 0.

    Source: the model gpt-oss, Hugging Face's `GptOssExperts`.

    >>> ClampedSwiGLU()
    ClampedSwiGLU(alpha=1.702, limit=7.0)
    """

    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self) -> None:
        for name in ("alpha", "limit"):
            checks.number("gemm.ClampedSwiGLU", name, getattr(self, name), "gpt-oss has 1.702 and 7.0.")

    def __call__(self, gate: Tensor) -> Tensor:
        gate = gate.clamp(max=self.limit)
        return gate * torch.sigmoid(self.alpha * gate)

    def factor(self, up: Tensor) -> Tensor:
        """The factor that up becomes, clamp(up, -limit, limit) + 1."""
        return up.clamp(-self.limit, self.limit) + 1


Activation = ReLU | ReLU2 | JumpReLU | TopK | GroupMax
_NAMED: dict[str, Activation] = {"relu": ReLU(), "relu2": ReLU2()}


def resolve(operator: str, activation: Any, allowed: tuple[type, ...]) -> Any:
    """The value that `activation` is or names; raises where it is none of those allowed."""
    found = _NAMED.get(activation) if isinstance(activation, str) else activation
    if type(found) in allowed:
        return found
    names = [f'"{name}"' for name, value in _NAMED.items() if type(value) in allowed]
    values = [f"gemm.{kind.__name__}(...)" for kind in allowed if kind not in (ReLU, ReLU2)]
    error = ValueError if isinstance(activation, str | Activation) else TypeError
    raise error(f"{operator}: activation must be {', '.join(names)} or {', '.join(values)}, got {activation!r}.")


def resolve_fixed(operator: str, activation: Any) -> ReLU | ReLU2 | JumpReLU:
    """An activation of each entry by itself, whose threshold is a constant."""
    found: ReLU | ReLU2 | JumpReLU = resolve(operator, activation, (ReLU, ReLU2, JumpReLU))
    if isinstance(found, JumpReLU) and found.bandwidth is not None:
        raise ValueError(
            f"{operator}: activation must be a JumpReLU without a bandwidth, because its threshold has no gradient "
            f"here, got {found.bandwidth}. sae.encode has one."
        )
    return found
