"""A linear layer whose weight has only some of its blocks."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from gossamer import blocksparse
from gossamer._core import checks
from gossamer.blocksparse import BlockSparseTensor, Layout


class BlockSparseLinear(nn.Module):
    """x @ weight.T + bias, where weight has the blocks of a layout, fixed, and no others.

    Args:
        layout: of the weight `[out_features, in_features]`, without leading dimensions; the module keeps a copy.
            A layout made with `capacity=None` has parameters for its blocks alone.
        bias: whether there is one.
        dtype: of the parameters; None takes PyTorch's default.
        device: of the parameters; None takes the layout's.

    Raises:
        ValueError: layout has leading dimensions.
        TypeError: layout is no `Layout`.

    Attributes:
        values: the weight's blocks, `[capacity, height, width]`, a parameter.
        bias: `[out_features]`, a parameter, or None.
        blocks: the lists of the layout, a buffer.
        weight: `values` and the layout, a `BlockSparseTensor`.

    Source: Gray et al. 2017, GPU Kernels for Block-Sparse Weights; the initial values are `nn.Linear`'s for as many
    inputs as a row has on average.

    >>> layer = BlockSparseLinear(gossamer.blocksparse.Layout.random((8, 4), 16, 0.5))
    >>> layer(torch.randn(2, 5, 64)).shape
    torch.Size([2, 5, 128])
    """

    values: nn.Parameter
    bias: nn.Parameter | None
    blocks: Tensor

    def __init__(
        self,
        layout: Layout,
        bias: bool = True,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        operator = "nn.BlockSparseLinear"
        if not isinstance(layout, Layout):
            raise TypeError(f"{operator}: layout must be a blocksparse.Layout, got {type(layout).__name__}.")
        checks.float_dtype(operator, "dtype", dtype, "It is the dtype of the parameters.")
        if len(layout.shape) != 2:
            raise ValueError(f"{operator}: layout must be (rows, cols) blocks of one matrix, got {layout.shape}.")
        device = layout.device if device is None else torch.device(device)
        self.out_features, self.in_features = layout.size
        self._form = layout.form
        # A copy of its own: loading a state dict writes into it.
        self.register_buffer("blocks", layout.buffer.to(device, copy=True))
        options = {"dtype": dtype, "device": device}
        self.values = nn.Parameter(torch.empty(layout.capacity, *layout.block_size, **options))  # type: ignore[arg-type]
        if bias:
            self.bias = nn.Parameter(torch.empty(self.out_features, **options))  # type: ignore[arg-type]
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    @staticmethod
    def from_linear(linear: nn.Linear, layout: Layout) -> BlockSparseLinear:
        """The layer with the blocks of `linear`'s weight that a layout names, and its bias."""
        layer = BlockSparseLinear(
            layout, linear.bias is not None, dtype=linear.weight.dtype, device=linear.weight.device
        )
        with torch.no_grad():
            layer.values.copy_(blocksparse.from_dense(linear.weight, layer.layout).values)
            if layer.bias is not None:
                layer.bias.copy_(linear.bias)
        return layer

    def reset_parameters(self) -> None:
        """Draws values and bias anew; asks the device how many blocks there are."""
        share = 1.0 if self.values.is_meta else int(self.layout.nnz) / max(self._form.rows * self._form.cols, 1)
        bound = 1 / math.sqrt(max(self.in_features * share, 1))
        nn.init.uniform_(self.values, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    @property
    def layout(self) -> Layout:
        """Which blocks there are."""
        return Layout((), self._form, self.blocks)

    @property
    def weight(self) -> BlockSparseTensor:
        return BlockSparseTensor(self.values, self.layout)

    def forward(self, x: Tensor | BlockSparseTensor) -> Tensor:
        """x `[..., in_features]`, or block-sparse `[..., M, in_features]` -> `[..., out_features]`.

        Block-sparse matrices with leading dimensions are multiplied as one, below each other. Where M is not of whole
        blocks theirs are cut anew for it (`blocksparse.merge`).
        """
        one = isinstance(x, Tensor) and x.dim() == 1
        given = _below_each_other(x) if isinstance(x, BlockSparseTensor) else x[None] if one else x
        out: Tensor = blocksparse.matmul(given, self.weight, transpose_b=True)
        out = out.view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, blocks={self.values.shape[0]} of "
            f"{self._form.rows * self._form.cols}, block_size={self._form[3:5]}, bias={self.bias is not None}"
        )


def _below_each_other(x: BlockSparseTensor) -> BlockSparseTensor:
    """Matrices `[..., M, N]` as one of all their rows."""
    layout, (m, n) = x.layout, x.layout.size
    if not x.shape[:-2]:
        return x
    if m % layout.block_size[0] == 0 or layout.batch == 0:
        # Blocks stay where they are: they are numbered along rows, matrix after matrix.
        mask = layout.to_dense().reshape(layout.batch * layout.rows, layout.cols)
        size = layout.batch * m, n
        rows = Layout.from_mask(mask, layout.block_size, size=size, capacity=layout.capacity)
        return BlockSparseTensor(x.values, rows)
    while len(x.shape) > 2:
        x = blocksparse.merge(x, -3, -2)
    return x
