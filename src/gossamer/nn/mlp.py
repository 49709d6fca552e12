"""Feed-forward blocks of transformers, with Hugging Face's parameter names."""

import torch
from torch import Tensor, nn

from gossamer import gemm
from gossamer._core import checks
from gossamer.gemm.linear_glu import GATES, activation_name
from gossamer.nn._plain import why_called


class GatedMLP(nn.Module):
    """down_proj(activation(gate_proj(x)) * up_proj(x)), gate and up in one product.

    Whatever is put on the layers is heeded: where one of them is not a plain `nn.Linear` (an adapter, a quantised or
    parametrized layer), has a hook, or parameters of another type (DTensor), or where a hook listens to all modules,
    they are called one after the other. This is looked at in every call.

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
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        if why_called(gate_proj=gate, up_proj=up, down_proj=down) is not None:
            return down(GATES[self.activation](gate(x)) * up(x))
        return gemm.gated_mlp(
            x,
            gate.weight,
            up.weight,
            down.weight,
            activation=self.activation,
            gate_bias=gate.bias,
            up_bias=up.bias,
            down_bias=down.bias,
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
