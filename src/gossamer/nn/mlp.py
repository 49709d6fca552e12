"""Feed-forward blocks of transformers, with Hugging Face's parameter names."""

import torch
from torch import Tensor, nn

from gossamer import gemm
from gossamer._core import checks
from gossamer.gemm.linear_glu import GATES, activation_name


class GatedMLP(nn.Module):
    """down_proj(activation(gate_proj(x)) * up_proj(x)), gate and up in one product.

    Args:
        hidden_size: of x and of the result.
        intermediate_size: of what lies between.
        activation: of the gate, as in `gemm.linear_glu`.
        bias: whether the three layers have one.
        recompute: as in `gemm.gated_mlp`: whether a backward pass computes gate and up again instead of keeping them,
            and so keeps nothing.
        dtype: of the parameters; None takes PyTorch's default.
        device: of the parameters.

    Raises:
        ValueError: a size below 1, or an unknown activation.
        TypeError: a size that is no int.

    Attributes:
        gate_proj, up_proj: `nn.Linear(hidden_size, intermediate_size)`.
        down_proj: `nn.Linear(intermediate_size, hidden_size)`.

    Source: Shazeer 2020, "GLU Variants Improve Transformer"; the seed on fused gated MLPs.

    >>> GatedMLP(8, 24)(torch.ones(2, 5, 8)).shape
    torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str = "silu",
        bias: bool = False,
        *,
        recompute: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation_name("nn.GatedMLP", activation)
        _check_sizes("nn.GatedMLP", hidden_size, intermediate_size)
        self.recompute = recompute
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., hidden_size]` -> `[..., hidden_size]`."""
        return gemm.gated_mlp(
            x,
            self.gate_proj.weight,
            self.up_proj.weight,
            self.down_proj.weight,
            activation=self.activation,
            gate_bias=self.gate_proj.bias,
            up_bias=self.up_proj.bias,
            down_bias=self.down_proj.bias,
            recompute=self.recompute,
        )

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}" + (", recompute=True" if self.recompute else "")


class MLP(nn.Module):
    """down_proj(activation(up_proj(x))).

    Args:
        hidden_size, intermediate_size, activation, bias, dtype, device: as in `GatedMLP`.

    Raises:
        ValueError, TypeError: as `GatedMLP`.

    Attributes:
        up_proj, down_proj: as in `GatedMLP`.

    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.3.

    >>> MLP(8, 24, "relu")(torch.ones(2, 5, 8)).shape
    torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str = "gelu",
        bias: bool = False,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation_name("nn.MLP", activation)
        _check_sizes("nn.MLP", hidden_size, intermediate_size)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., hidden_size]` -> `[..., hidden_size]`."""
        return self.down_proj(GATES[self.activation](self.up_proj(x)))

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


def _check_sizes(operator: str, hidden_size: int, intermediate_size: int) -> None:
    checks.positive(operator, "hidden_size", hidden_size, "It is the size of x.")
    checks.positive(operator, "intermediate_size", intermediate_size, "It is the size of what lies between.")
