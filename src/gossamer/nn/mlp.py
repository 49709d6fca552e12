"""Feed-forward blocks of transformers, with Hugging Face's parameter names."""

from typing import Any

import torch
from torch import Tensor, nn

from gossamer import gemm
from gossamer._core import checks
from gossamer.ffn import BlockTracker, SparseBlock
from gossamer.gemm.linear_glu import GATES, activation_name
from gossamer.nn.plain import weight_and_bias, why_called


class _Sparse(nn.Module):
    """What blocks share whose activation leaves most entries 0: which way they go where no gradient is needed."""

    down_proj: nn.Linear

    def __init__(self, operator: str, activation: str, method: str) -> None:
        super().__init__()
        self.activation = activation_name(operator, activation)
        self.sparse_block = SparseBlock(method, operator)

    @property
    def method(self) -> str:
        """The way of a sparse block, as in `ffn.gated`; may be set at any time."""
        return self.sparse_block.method

    @method.setter
    def method(self, method: str) -> None:
        self.sparse_block.method = method

    @property
    def density(self) -> BlockTracker:
        """What `method="auto"` follows."""
        return self.sparse_block.density

    @property
    def copied_bytes(self) -> int:
        """Memory that a transposed copy of down_proj's weight takes, which ways that gather its columns read."""
        return self.sparse_block.copied_bytes

    @property
    def last_path(self) -> str | None:
        """The way last taken of those that `ffn.gated` names, or None before there was a call without gradients."""
        return self.sparse_block.last_path

    def _sparse(
        self, x: Tensor, gate: nn.Linear, up: nn.Linear | None, down: nn.Linear, recompute: bool = False
    ) -> Tensor | None:
        """The result, or None where the activation is not sparse, or a gradient needed and all computed."""
        of_up = (None, None) if up is None else weight_and_bias(up)
        weights = (*weight_and_bias(gate), *of_up, *weight_and_bias(down))
        return self.sparse_block(x, *weights, activation=self.activation, recompute=recompute)


class GatedMLP(_Sparse):
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
        method: the way of a block with `"relu"` or `"relu2"`, as in `ffn.gated`, with gradients too. `"fused"`
            computes everything, gate and up in one product; `"auto"` follows how sparse the block was a few calls ago,
            and in a CUDA graph takes what the device alone would by then. Ways that gather keep a transposed copy of
            down_proj's weight, unless that is stored column by column.
        dtype: of the parameters; None takes PyTorch's default.
        device: of the parameters.

    Raises:
        ValueError: a size below 1, or an unknown activation or method.
        TypeError: a size that is no int.

    Attributes:
        gate_proj, up_proj: `nn.Linear(hidden_size, intermediate_size)`.
        down_proj: `nn.Linear(intermediate_size, hidden_size)`.
        method: the way, which may be set at any time.
        density: the `ffn.BlockTracker` that `method="auto"` follows.
        sparse_block: the `ffn.SparseBlock` that has both, and by which `sparsity` finds the block.
        last_path: the way last taken without gradients, or None.
        copied_bytes: what a transposed copy of down_proj's weight takes; it is renewed when that changes in place.

    Source: Shazeer 2020, "GLU Variants Improve Transformer"; Tantaru 2025, "Towards Better Kernels for Gated MLP".

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
        method: str = "fused",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__("nn.GatedMLP", activation, method)
        _check_sizes("nn.GatedMLP", hidden_size, intermediate_size)
        self.recompute = recompute
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., hidden_size]` -> `[..., hidden_size]`."""
        # Attributes of a module that are modules are slow to get.
        layers: Any = self._modules
        gate, up, down = layers["gate_proj"], layers["up_proj"], layers["down_proj"]
        if why_called(gate_proj=gate, up_proj=up, down_proj=down) is not None:
            return down(GATES[self.activation](gate(x)) * up(x))
        checks.module_input("nn.GatedMLP", "x", x, gate.weight, "hidden_size", gate.in_features)
        out = self._sparse(x, gate, up, down, self.recompute)
        if out is not None:
            return out
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


class MLP(_Sparse):
    """down_proj(activation(up_proj(x))).

    Args:
        hidden_size, intermediate_size, activation, bias, method, dtype, device: as in `GatedMLP`.

    Raises:
        ValueError, TypeError: as `GatedMLP`.

    Attributes:
        up_proj, down_proj, method, density, sparse_block, last_path, copied_bytes: as in `GatedMLP`.

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
        method: str = "fused",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__("nn.MLP", activation, method)
        _check_sizes("nn.MLP", hidden_size, intermediate_size)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., hidden_size]` -> `[..., hidden_size]`."""
        layers: Any = self._modules
        up, down = layers["up_proj"], layers["down_proj"]
        out = None
        if why_called(up_proj=up, down_proj=down) is None:
            checks.module_input("nn.MLP", "x", x, up.weight, "hidden_size", up.in_features)
            out = self._sparse(x, up, None, down)
        return down(GATES[self.activation](up(x))) if out is None else out

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


def _check_sizes(operator: str, hidden_size: int, intermediate_size: int) -> None:
    checks.positive(operator, "hidden_size", hidden_size, "It is the size of x.")
    checks.positive(operator, "intermediate_size", intermediate_size, "It is the size of what lies between.")
