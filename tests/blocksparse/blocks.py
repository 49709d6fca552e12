"""Random block-sparse tensors beside their dense selves."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.blocksparse import BlockSparseTensor, Layout, from_dense, repeat

Block = tuple[int, int]


def native(*values: Any) -> Any:
    """Parameters that the slow interpreter leaves out, for its kernels see others like them."""
    return pytest.param(*values, marks=pytest.mark.native)


def random_layout(
    lead: tuple[int, ...], size: tuple[int, int], block: Block, device: torch.device, *, seed: int = 0,
    density: float = 0.6,
) -> Layout:  # fmt: skip
    """With some room behind the last block."""
    shape = (*lead, -(-size[0] // block[0]), -(-size[1] // block[1]))
    generator = torch.Generator(device).manual_seed(seed)
    mask = torch.rand(shape, device=device, generator=generator) < density
    return Layout.from_mask(mask, block, size=size, capacity=mask.numel() + 2)


def elements(layout: Layout) -> Tensor:
    """Bool `[..., M, N]`: what the layout stores."""
    wide = layout.to_dense().repeat_interleave(layout.block_size[0], -2).repeat_interleave(layout.block_size[1], -1)
    return wide[..., : layout.size[0], : layout.size[1]]


def random_blocks(layout: Layout, dtype: torch.dtype, *, seed: int = 0, integers: bool = False) -> Tensor:
    """Dense `[..., M, N]`, zero where the layout stores nothing; `integers` are small, so that sums are exact."""
    generator = torch.Generator(layout.device).manual_seed(seed)
    if integers or not dtype.is_floating_point:
        x = torch.randint(-3, 4, layout.dense_shape, device=layout.device, generator=generator)
    else:
        x = torch.randn(layout.dense_shape, device=layout.device, generator=generator)
    return torch.where(elements(layout), x.to(dtype), 0).to(dtype)


def random_index(layout: Layout, bound: int, *, seed: int = 0, dtype: torch.dtype = torch.int64) -> BlockSparseTensor:
    """From -1, which is none, to `bound - 1`; what stands where nothing takes part is out of every range."""
    generator = torch.Generator(layout.device).manual_seed(seed)
    index = torch.randint(-1, max(bound, 0), layout.dense_shape, device=layout.device, generator=generator).to(dtype)
    blocks = from_dense(index, layout)
    inside = from_dense(torch.ones_like(index, dtype=torch.bool), layout).values
    return BlockSparseTensor(torch.where(inside, blocks.values, min(1 << 20, torch.iinfo(dtype).max)), layout)


def dense_index(index: BlockSparseTensor, bound: int) -> Tensor:
    """int64 `[..., M, N]`, with `bound` for what names nothing."""
    dense = index.to_dense(-1).long()
    return torch.where(dense < 0, bound, dense)


def repeat_interleave(x: BlockSparseTensor, times: int, dim: int, **options: Any) -> BlockSparseTensor:
    """Each row, column or matrix of x repeated."""
    sizes = [1] * len(x.shape)
    sizes[dim] = times
    return repeat(x, sizes, interleave=True, **options)
