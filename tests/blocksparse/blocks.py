"""Random block-sparse tensors beside their dense selves."""

from typing import Any

import pytest
import torch
from hypothesis import strategies as st
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


def drawn(data: st.DataObject) -> tuple[Block, tuple[int, ...], tuple[int, int], float, torch.device]:
    """Block, leading dimensions, size and density of a property test, and where it runs."""
    block = data.draw(st.sampled_from([(16, 16), (32, 16), (16, 64)]))
    lead = data.draw(st.lists(st.integers(0, 3), max_size=2).map(tuple))
    size = data.draw(st.tuples(st.integers(0, 130), st.integers(0, 130)))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return block, lead, size, data.draw(st.sampled_from([0.0, 0.5, 1.0])), device


def draw_two(data: st.DataObject) -> tuple[Layout, Layout, int]:
    """Two layouts that agree but for the dimension whose number is third, as of a matrix and its index."""
    block, lead, size, density, device = drawn(data)
    dims = len(lead) + 2
    dim = data.draw(st.integers(-dims, dims - 1))
    shape = [*lead, *size]
    shape[dim] = data.draw(st.integers(0, 3 if dim % dims < len(lead) else 130))
    layout = random_layout(lead, size, block, device, density=density)
    other = random_layout(tuple(shape[:-2]), (shape[-2], shape[-1]), block, device, seed=1, density=density)
    return layout, other, dim


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
