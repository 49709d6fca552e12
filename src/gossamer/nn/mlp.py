"""Feed-forward blocks of transformers, with Hugging Face's parameter names."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gossamer import gemm
from gossamer._core import checks
from gossamer.ffn import Activity, BlockTracker, SparseBlock
from gossamer.ffn.block import NAMES
from gossamer.gemm.linear_glu import Gate, activation_name, gated
from gossamer.nn.plain import of_parts, weight_and_bias, why_called

_GATED, _PLAIN = ("gate_proj", "up_proj", "down_proj"), ("up_proj", "down_proj")


class Outputs(NamedTuple):
    """The outputs of a block with `l1=True`: the result `[..., hidden_size]`, and the `ffn.Activity` of the call."""

    out: Tensor
    activity: Activity


class _Sparse(nn.Module):
    """The common part of blocks whose activation may leave most entries 0: their path where no gradient is needed."""

    down_proj: nn.Linear

    def __init__(self, operator: str, activation: Gate, method: str, l1: bool) -> None:
        super().__init__()
        self.l1 = l1
        self.activation = activation_name(operator, activation)
        self.sparse_block = SparseBlock(method, operator)

    @property
    def method(self) -> str:
        """The path of a sparse block, as in `ffn.gated`; may be set at any time."""
        return self.sparse_block.method

    @method.setter
    def method(self, method: str) -> None:
        self.sparse_block.method = method

    @property
    def density(self) -> BlockTracker:
        """The tracker that `method="auto"` follows."""
        return self.sparse_block.density

    @property
    def last_path(self) -> str | None:
        """The path of the last call, by its name in `ffn.gated`; None before the first call without gradients."""
        return self.sparse_block.last_path

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        # Settled paths are those of a dtype and a device.
        self.sparse_block.density.settled.clear()
        return super()._apply(*args, **kwargs)

    def _path(self, x: Tensor) -> str | None:
        """The path of the sparse block, if it is known before anything is looked at; "dense" by plain layers."""
        return None if self.l1 else self.sparse_block.settled(x)

    def _sparse(
        self,
        x: Tensor,
        gate: nn.Linear,
        up: nn.Linear | None,
        down: nn.Linear,
        path: str | None,
        recompute: bool = False,
    ) -> Any:
        """The result, or None where the activation is not sparse, or a gradient is needed and the path computes all."""
        if self.activation not in NAMES:
            return None
        of_up = (None, None) if up is None else weight_and_bias(up)
        weights = (*weight_and_bias(gate), *of_up, *weight_and_bias(down))
        if path == "gather" and (again := self.sparse_block.again(x, weights, self.activation)) is not None:
            return again
        options: dict[str, Any] = {"activation": self.activation, "recompute": recompute, "with_activity": self.l1}
        out = self.sparse_block(x, *weights, **options)
        return Outputs(*out) if self.l1 and out is not None else out

    def _layer_by_layer(self, x: Tensor, gate: nn.Module, up: nn.Module | None, down: nn.Module) -> Any:
        """The result, with the activity where it is asked for. A returned tensor is seen by the hooks of `fully_shard`
        and by `torch.compile`, which an attribute is not."""
        operator = f"nn.{type(self).__name__}"
        active, hidden = gated(operator, self.activation, gate(x), None if up is None else up(x))
        return Outputs(down(hidden), Activity.of(active, hidden)) if self.l1 else down(hidden)

    def extra_repr(self) -> str:
        # A module is shown among the parts.
        return "" if isinstance(self.activation, nn.Module) else f"activation={self.activation!r}"


class GatedMLP(_Sparse):
    """down_proj(activation(gate_proj(x)) * up_proj(x)), gate and up in one product.

    Where one of the layers is not a plain `nn.Linear` (an adapter, a quantised or parametrized layer), has a hook, or
    parameters of another type (DTensor), or where a hook listens to all modules, the layers are called one after the
    other. Every call looks at this.

    Args:
        hidden_size: of x and of the result.
        intermediate_size: number of neurons.
        activation: of the gate, as in `gemm.linear_glu`; a module becomes a part of this one.
        bias: whether the three layers have one.
        recompute: as in `gemm.gated_mlp`: whether a backward pass computes gate and up again instead of keeping them,
            and so keeps nothing.
        method: the path of a block with `"relu"` or `"relu2"`, as in `ffn.gated`, with gradients too. `"fused"`
            computes everything, gate and up in one product; `"auto"` follows how sparse the block was a few calls ago,
            and in a CUDA graph takes the path of the counts by then.
        l1: whether a call returns `(out, activity)`, an `ffn.Activity` beside the result: L1 for the loss, L0, and on
            how many tokens each neuron fired. The call then computes all, unless `method` takes a path on lists of
            active entries where a gradient is needed.
        dtype: of the parameters; None takes PyTorch's default.
        device: of the parameters.

    Raises:
        ValueError: a size below 1, or an unknown activation or method.
        TypeError: a size that is no int.

    Attributes:
        gate_proj, up_proj: `nn.Linear(hidden_size, intermediate_size)`.
        down_proj: `nn.Linear(intermediate_size, hidden_size)`.
        method, l1: the path, and whether calls return their activity; both may be set at any time.
        density: the `ffn.BlockTracker` that `method="auto"` follows.
        sparse_block: the `ffn.SparseBlock` that has both, and by which `sparsity` finds the block.
        last_path: the path last taken without gradients, or None.

    Source: Shazeer 2020, "GLU Variants Improve Transformer"; Tantaru 2025, "Towards Better Kernels for Gated MLP".

    >>> GatedMLP(8, 24)(torch.ones(2, 5, 8)).shape
    torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: Gate = "silu",
        bias: bool = False,
        *,
        recompute: bool = False,
        method: str = "fused",
        l1: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__("nn.GatedMLP", activation, method, l1)
        _check_sizes("nn.GatedMLP", hidden_size, intermediate_size)
        self.recompute = recompute
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias, device, dtype)

    def forward(self, x: Tensor) -> Any:
        """x `[..., hidden_size]` -> `[..., hidden_size]`, or with `l1` `(out, activity)`."""
        # Attributes of a module that are modules are slow to get.
        layers: Any = self._modules
        gate, up, down = layers["gate_proj"], layers["up_proj"], layers["down_proj"]
        why = partial(why_called, gate_proj=gate, up_proj=up, down_proj=down)
        path = self._path(x)
        if path == "dense" or of_parts(self, _GATED, why) is not None:
            return self._layer_by_layer(x, gate, up, down)
        checks.module_input("nn.GatedMLP", "x", x, gate.weight, "hidden_size", gate.in_features)
        out = self._sparse(x, gate, up, down, path, self.recompute)
        if out is not None:
            return out
        if self.l1:
            return self._layer_by_layer(x, gate, up, down)
        (gate_weight, gate_bias), (up_weight, up_bias), (down_weight, down_bias) = map(
            weight_and_bias, (gate, up, down)
        )
        options: dict[str, Any] = {"gate_bias": gate_bias, "up_bias": up_bias, "down_bias": down_bias}
        return gemm.gated_mlp(
            x, gate_weight, up_weight, down_weight, activation=self.activation, recompute=self.recompute, **options
        )

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), "recompute=True" if self.recompute else "")))


class MLP(_Sparse):
    """down_proj(activation(up_proj(x))).

    Args:
        hidden_size, intermediate_size, activation, bias, l1, dtype, device: as in `GatedMLP`.
        method: the path, as in `ffn.plain`, with gradients too.

    Raises:
        ValueError, TypeError: as `GatedMLP`.

    Attributes:
        up_proj, down_proj, method, l1, density, sparse_block, last_path: as in `GatedMLP`.

    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.3.

    >>> MLP(8, 24, "relu")(torch.ones(2, 5, 8)).shape
    torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: Gate = "gelu",
        bias: bool = False,
        *,
        method: str = "dense",
        l1: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if isinstance(activation, gemm.ClampedSwiGLU):
            raise ValueError("nn.MLP: activation must not be a ClampedSwiGLU, which needs a gate. Use nn.GatedMLP.")
        super().__init__("nn.MLP", activation, method, l1)
        _check_sizes("nn.MLP", hidden_size, intermediate_size)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias, device, dtype)

    def forward(self, x: Tensor) -> Any:
        """x `[..., hidden_size]` -> `[..., hidden_size]`, or with `l1` `(out, activity)`."""
        layers: Any = self._modules
        up, down = layers["up_proj"], layers["down_proj"]
        out = None
        path = self._path(x)
        if path != "dense" and of_parts(self, _PLAIN, lambda: why_called(up_proj=up, down_proj=down)) is None:
            checks.module_input("nn.MLP", "x", x, up.weight, "hidden_size", up.in_features)
            out = self._sparse(x, up, None, down, path)
        return self._layer_by_layer(x, up, None, down) if out is None else out


def _check_sizes(operator: str, hidden_size: int, intermediate_size: int) -> None:
    checks.positive(operator, "hidden_size", hidden_size, "It is the size of x.")
    checks.positive(operator, "intermediate_size", intermediate_size, "It is the number of neurons.")
