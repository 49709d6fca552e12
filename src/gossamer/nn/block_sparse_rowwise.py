"""Modules of PyTorch's on block-sparse tensors."""

from __future__ import annotations

from torch import nn

from gossamer._core import checks
from gossamer.blocksparse import BlockSparseTensor, Layout, from_dense, layer_norm, matmul, rms_norm

ELEMENTWISE = {nn.Dropout, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish}
ELEMENTWISE |= {nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Softsign, nn.Softshrink, nn.Hardshrink, nn.Hardtanh}
ELEMENTWISE |= {nn.Hardswish, nn.Hardsigmoid, nn.Threshold, nn.Identity}
"""Modules that work element by element: they need the stored values alone."""


class BlockSparseRowwise(nn.Module):
    """Lets a module that works on rows take a `BlockSparseTensor`, and return one of the same layout, or of another.

    Absent blocks are zeros to it, and stay absent, also where the module would turn zeros into something else.
    Activations and `nn.Dropout` run on the stored values; `nn.LayerNorm` and `nn.RMSNorm` over the last dimension on
    stored blocks; `nn.Linear` computes the blocks of its result that are asked for; any other module runs on rows made
    dense for the time of the call, and x's blocks of its result are kept.

    Args:
        module: takes and returns `[..., M, N]`; an `nn.Linear` may return another N. It stays the same module: its
            parameters, state and mode are its own.

    Raises:
        TypeError: the input is no `BlockSparseTensor`.
        ValueError: a norm is over more than the last dimension, or of another length; a layout is given, and the module
            is no `nn.Linear`; or the layout does not fit.

    Source: Schön and Tompits, blksprs, section 3.3 (wrappers for PyTorch modules).

    >>> from gossamer import blocksparse
    >>> x = blocksparse.from_dense(-torch.ones(32, 32), blocksparse.Layout.from_mask(torch.eye(2).bool(), 16))
    >>> BlockSparseRowwise(torch.nn.ReLU())(x).values.sum().item()
    0.0
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: BlockSparseTensor, layout: Layout | None = None) -> BlockSparseTensor:
        """x: `[..., M, N]`, floating -> the same, in the dtype of the module's result; of an `nn.Linear` `[..., M,
        out_features]`.

        layout: of the result of an `nn.Linear`; None takes x's. Elements elsewhere, the bias too, are left out.
        """
        if not isinstance(x, BlockSparseTensor):
            raise TypeError(
                f"nn.BlockSparseRowwise: x must be a BlockSparseTensor, got {type(x).__name__}. Make one with "
                "blocksparse.from_dense, or call the module itself."
            )
        module = self.module
        hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
        # A hook on the module, or a subclass of it, has to see rows.
        plain = not any(hooks)
        if plain and type(module) is nn.Linear:
            if layout is None and module.out_features != x.shape[-1]:
                raise ValueError(
                    f"nn.BlockSparseRowwise: layout must say which blocks of the result to compute, for x has "
                    f"{x.shape[-1]} columns and the nn.Linear returns {module.out_features}."
                )
            out = matmul(x, module.weight, x.layout if layout is None else layout, transpose_b=True)
            return out if module.bias is None else out + module.bias
        if layout is not None:
            raise ValueError(
                f"nn.BlockSparseRowwise: layout is for a plain nn.Linear, which {type(module).__name__} is not, or it "
                "has a hook. Leave it out, and use blocksparse.adapt on the result."
            )
        if plain and type(module) in ELEMENTWISE:
            return x.apply(module)
        if plain and type(module) in (nn.LayerNorm, nn.RMSNorm):
            assert isinstance(module, nn.LayerNorm | nn.RMSNorm)
            if tuple(module.normalized_shape) != x.shape[-1:]:
                raise ValueError(
                    f"nn.BlockSparseRowwise: the norm must be over rows of x, ({x.shape[-1]},), got "
                    f"{tuple(module.normalized_shape)}."
                )
            if isinstance(module, nn.LayerNorm):
                return layer_norm(x, module.weight, module.bias, module.eps)
            return rms_norm(x, module.weight, module.eps)
        rows, operator = module(x.to_dense()), "nn.BlockSparseRowwise"
        checks.tensors(operator, result=rows)
        checks.shape(operator, "the result of the module", rows, x.shape, "[..., M, N]", "like x")
        return from_dense(rows, x.layout)
