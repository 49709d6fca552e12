"""Feed-forward blocks of transformers, with Hugging Face's parameter names."""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from gossamer import gemm
from gossamer._core import checks
from gossamer.ffn import Activity, BlockTracker, SparseBlock
from gossamer.ffn.block import NAMES
from gossamer.gemm.linear_glu import Gate, activation_name, gated
from gossamer.nn.plain import of_parts, weight_and_bias, why_called

_PARTS = ("gate_proj", "up_proj", "down_proj")


class Outputs(NamedTuple):
    """The outputs of a block with `l1=True`: the result `[..., hidden_size]`, and the `ffn.Activity` of the call."""

    out: Tensor
    activity: Activity


class _Block(nn.Module):
    """A block of `_layers` and `down_proj`. The activation follows `gate_proj`, or without one `up_proj`."""

    _operator: ClassVar[str]
    _layers: ClassVar[tuple[str, ...]]
    up_proj: nn.Linear
    down_proj: nn.Linear
    recompute = False

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: Gate, bias: bool, method: str, l1: bool, **made: Any
    ) -> None:
        super().__init__()
        checks.positive(self._operator, "hidden_size", hidden_size, "It is the size of x.")
        checks.positive(self._operator, "intermediate_size", intermediate_size, "It is the number of neurons.")
        self.l1 = l1
        self.activation = activation_name(self._operator, activation)
        self.sparse_block = SparseBlock(method, self._operator)
        for name in self._layers:
            self.add_module(name, nn.Linear(hidden_size, intermediate_size, bias, **made))
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias, **made)

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

    def forward(self, x: Tensor) -> Any:
        """x `[..., hidden_size]` -> `[..., hidden_size]`, or with `l1` `(out, activity)`."""
        # Attributes of a module that are modules are slow to get.
        layers: Any = self._modules
        gate, up, down = layers.get("gate_proj"), layers["up_proj"], layers["down_proj"]
        # The path of the sparse block, if it is known before anything is looked at.
        path = None if self.l1 else self.sparse_block.settled(x)
        if path == "dense" or of_parts(self, _PARTS, self._why_called) is not None:
            return self._layer_by_layer(x, gate, up, down)
        first = up if gate is None else gate
        checks.module_input(self._operator, "x", x, first.weight, "hidden_size", first.in_features)
        (first_weight, first_bias), (down_weight, down_bias) = weight_and_bias(first), weight_and_bias(down)
        up_weight, up_bias = (None, None) if gate is None else weight_and_bias(up)
        weights = (first_weight, first_bias, up_weight, up_bias, down_weight, down_bias)
        options: dict[str, Any] = {"activation": self.activation, "recompute": self.recompute}
        if self.activation in NAMES:
            if path == "gather" and (again := self.sparse_block.again(x, weights, self.activation)) is not None:
                return again
            out = self.sparse_block(x, *weights, **options, with_activity=self.l1)
            if out is not None:
                return Outputs(*out) if self.l1 else out
        if self.l1 or up_weight is None:
            return self._layer_by_layer(x, gate, up, down)
        options |= {"gate_bias": first_bias, "up_bias": up_bias, "down_bias": down_bias}
        return gemm.gated_mlp(x, first_weight, up_weight, down_weight, **options)

    def _why_called(self) -> str | None:
        return why_called(**{name: self._modules[name] for name in (*self._layers, "down_proj")})

    def _layer_by_layer(self, x: Tensor, gate: nn.Module | None, up: nn.Module, down: nn.Module) -> Any:
        """The result, with the activity where it is asked for. A returned tensor is seen by the hooks of `fully_shard`
        and by `torch.compile`, which an attribute is not."""
        first, second = (up(x), None) if gate is None else (gate(x), up(x))
        active, hidden = gated(self._operator, self.activation, first, second)
        return Outputs(down(hidden), Activity.of(active, hidden)) if self.l1 else down(hidden)

    def extra_repr(self) -> str:
        # A module is shown among the parts.
        return "" if isinstance(self.activation, nn.Module) else f"activation={self.activation!r}"


class GatedMLP(_Block):
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

    _operator, _layers = "nn.GatedMLP", ("gate_proj", "up_proj")
    gate_proj: nn.Linear

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
        made = {"dtype": dtype, "device": device}
        super().__init__(hidden_size, intermediate_size, activation, bias, method, l1, **made)
        self.recompute = recompute

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), "recompute=True" if self.recompute else "")))


class MLP(_Block):
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

    _operator, _layers = "nn.MLP", ("up_proj",)

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
        made = {"dtype": dtype, "device": device}
        super().__init__(hidden_size, intermediate_size, activation, bias, method, l1, **made)
