"""The two operators of gather and scatter, each of which is a part of the other's gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from gossamer._core import checks, tuning
from gossamer._core.operator import register
from gossamer._core.ops import INTERPRET, refuse_second
from gossamer.blocksparse._torch import gather as _gather_cpu
from gossamer.blocksparse._torch import scatter_reduce as _scatter_cpu
from gossamer.blocksparse.layout import Layout
from gossamer.blocksparse.lists import Form
from gossamer.blocksparse.records import BlocksparseGather, BlocksparseGatherReach, BlocksparseScatterReduce, Direction
from gossamer.blocksparse.tensor import BlockSparseTensor, check_blocks

Path = Literal["matrices", "shared", "transposed", "lines"]
PATHS: dict[Path, str] = {
    "matrices": "indices along a leading dimension: a program walks the matrices that follow each other",
    "transposed": "indices along columns: blocks are transposed, and walked by rows",
    "shared": "floats on Hopper along rows of up to 16,384 columns, and a reduction: results of rows in shared memory",
    "lines": "all other calls: a walk of rows with results in global memory",
}
LONGEST = 16384
"""Columns of a row at most whose result stands in shared memory: three rows share a multiprocessor then."""


def choose_path(call: BlocksparseScatterReduce) -> Path:
    """One of `PATHS`, by what the host knows."""
    form, axis, src = Form(*call.form), call.axis[0], call.src
    if axis < 2:
        return "transposed" if axis else "matrices"
    # There entries of a row are not joined one after the other: none can tell which is the last.
    floats = src is not None and src.is_floating_point() and call.dtype.is_floating_point and call.reduce != "last"
    fits = floats and 0 < form.n <= LONGEST and not INTERPRET
    return "shared" if fits and tuning.hopper(call.index.device) else "lines"


@dataclass(frozen=True)
class Indexed:
    """Blocks of indices into the matrices of a layout.

    Args:
        index: values of the indices; `at` holds the buffer and the form of the layout that they point into, those of
            their own layout, and the `Direction`.
    """

    index: Tensor
    at: Any

    def gather(self, values: Tensor, strict: bool = False) -> Tensor:
        """Blocks of index's layout: the elements that the indices find in values, 0 for none. An index out of range
        is none, or an error with `strict`, which a GPU shows as NaN."""
        call = BlocksparseGather(values, self.index, *self.at, strict)  # type: ignore[call-arg]
        return _gather(call)

    def scatter(
        self, given: Tensor | None, src: Tensor | None, reduce: str, include_self: bool, dtype: torch.dtype
    ) -> Tensor:
        """Blocks of the layout: `src`, aligned with index, or ones if None, joined with what is given, or zeros."""
        options: Any = reduce, include_self, dtype
        return _scatter(BlocksparseScatterReduce(given, src, self.index, *self.at, *options))

    def count(self) -> Tensor:
        """int32 blocks of the layout: how many indices point at each element."""
        return self.scatter(None, None, "sum", True, torch.int32)


def indexed(operator: str, layout: Layout, dim: int, index: BlockSparseTensor) -> Indexed:
    """The indices of a public function, checked; `layout` is what they point into."""
    dims = len(layout.shape)
    dim, values = _check_index(operator, "index", index, dims, dim)
    other = index.layout
    checks.same_device(operator, "input", layout.device, index=index.values)
    if other.block_size != layout.block_size:
        raise ValueError(
            f"{operator}: index must have blocks of {layout.block_size[0]} x {layout.block_size[1]} like input, got "
            f"{other.block_size[0]} x {other.block_size[1]}. Use blocksparse.adapt."
        )
    lead, lead_index = layout.dense_shape, other.dense_shape
    if len(lead) != len(lead_index) or any(k != dim and b > a for k, (a, b) in enumerate(zip(lead, lead_index))):
        raise ValueError(
            f"{operator}: index must have the dimensions of input, and be at most as long along each but dim {dim}; "
            f"input is {list(lead)}, index {list(lead_index)}."
        )
    missing = [0 if k == dim else a - b for k, (a, b) in enumerate(zip(lead[:-2], lead_index))]
    if any(missing):
        # Matrices without blocks behind those of index: its blocks keep their order, and their values.
        more = [0, 0, 0, 0, *(n for amount in reversed(missing) for n in (0, amount))]
        mask = torch.nn.functional.pad(other.to_dense(), more)
        other = Layout.from_mask(mask, other.block_size, size=other.size, capacity=other.capacity)
    along = _axis(dim, lead, lead_index)
    return Indexed(values, (layout.buffer, layout.form, other.buffer, other.form, along))


def layout_of_indices(indices: BlockSparseTensor, dim: int, size: int, *, capacity: int | None = None) -> Layout:
    """The layout that a gather reads, and a scatter writes: the blocks with elements that indices name.

    Args:
        indices: `[..., M, N]`, int8, int16, int32 or int64; an index out of range names nothing.
        dim: the dimension along which they point, a leading one too.
        size: of that dimension; the others are those of indices.
        capacity: as in `Layout.from_mask`.

    Raises:
        ValueError: dim is none of the dimensions, or size is below 1.
        TypeError: indices are no such integers.
        NotImplementedError: `capacity=None` under CUDA-graph capture.

    Source: Schön and Tompits, blksprs, section 3.3 (sparsity layout creation).

    >>> indices = from_dense(torch.full((16, 16), 40), Layout.from_mask(torch.ones(1, 1).bool(), 16))
    >>> layout_of_indices(indices, -1, 64).to_dense().tolist()
    [[False, False, True, False]]
    """
    operator = "blocksparse.layout_of_indices"
    dim, values = _check_index(operator, "indices", indices, len(indices.shape), dim)
    checks.positive(operator, "size", size, "It is the size of the dimension into which indices point.")
    layout, shape = indices.layout, list(indices.shape)
    shape[dim] = size
    (*lead, m, n), (height, width) = shape, layout.block_size
    along = _axis(dim, shape, indices.shape)
    target = Form(math.prod(lead), -(-m // height), -(-n // width), height, width, m, n, 0)
    mask = _reach(BlocksparseGatherReach(values, layout.buffer, layout.form, along, target))
    return Layout.from_mask(mask.view(*lead, *mask.shape[1:]), layout.block_size, size=(m, n), capacity=capacity)


def _check_index(operator: str, name: str, index: Any, dims: int, dim: int) -> tuple[int, Tensor]:
    """dim, from 0 on, and the values of the indices in a dtype that kernels read."""
    check_blocks(operator, **{name: index})
    narrow = index.dtype in (torch.int8, torch.int16)
    if not narrow and index.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"{operator}: {name} must be int8, int16, int32 or int64, got {checks.name_of(index.dtype)}. Convert it "
            f"with {name}.to(torch.int64)."
        )
    values = index.values.to(torch.int32) if narrow else index.values
    if not isinstance(dim, int) or not -dims <= dim < dims:
        raise ValueError(f"{operator}: dim must be from {-dims} to {dims - 1}, got {dim}.")
    return dim % dims, values


def _axis(dim: int, shape: Sequence[int], index_shape: Sequence[int]) -> Direction:
    axis = max(0, dim - (len(shape) - 3))
    return Direction(axis) if axis else Direction(0, math.prod(shape[dim + 1 : -2]), index_shape[dim], shape[dim])


def _back(call: Any) -> Indexed:
    return Indexed(call.index, (call.layout, call.form, call.index_layout, call.index_form, call.axis))


def _gather_backward(call: BlocksparseGather, kept: Any, grads: Any, needs: Any) -> dict[str, Tensor]:
    return {"values": _back(call).scatter(None, grads[0], "sum", True, grads[0].dtype)}


def _keep_scatter(call: BlocksparseScatterReduce, out: Tensor) -> tuple[Any, ...]:
    needed = call.reduce in ("prod", "amax", "amin")
    dtypes = [None if t is None else t.dtype for t in (call.given, call.src)]
    return (*((call.given, call.src, out) if needed else (None, None, None)), dtypes)


def _scatter_backward(call: BlocksparseScatterReduce, kept: Any, grads: Any, needs: Any) -> dict[str, Tensor | None]:
    (grad,), back, (given, src, out, dtypes) = grads, _back(call), kept
    found: tuple[Tensor | None, Tensor]
    if call.reduce == "last":
        found = _last_backward(back, grad)
    elif call.reduce == "sum":
        own = grad if call.include_self else torch.where(back.count() == 0, grad, 0)
        found = own, back.gather(grad)
    elif call.reduce == "prod":
        found = _product_backward(back, call.include_self, grad, given, src, out)
    else:
        found = _extremum_backward(back, call.include_self, grad, given, src, out)
    wanted = zip(("given", "src"), found, dtypes)
    return {name: g.to(dtype) for name, g, dtype in wanted if getattr(needs, name) and g is not None}


def _last_backward(back: Indexed, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Each element's gradient goes to the one entry that it was taken from."""
    dtype = torch.int32 if back.index.numel() < 1 << 31 else torch.int64
    number = torch.arange(1, back.index.numel() + 1, dtype=dtype, device=grad.device).view(back.index.shape)
    last = back.scatter(None, number, "last", True, dtype)
    return torch.where(last == 0, grad, 0), torch.where(back.gather(last) == number, back.gather(grad), 0)


def _extremum_backward(
    back: Indexed, include_self: bool, grad: Tensor, given: Tensor | None, src: Tensor, out: Tensor
) -> tuple[Tensor | None, Tensor]:
    """Equal extrema share the gradient, as in PyTorch; NaN are equal."""
    found = back.gather(out)
    ties = ((src == found) | (src.isnan() & found.isnan())).float()
    share = back.scatter(None, ties, "sum", True, torch.float32)
    kept = None
    if given is not None and include_self:
        tie = ((given == out) | (given.isnan() & out.isnan())).float()
        share = share + tie
        kept = grad * tie / share.clamp(min=1)
    elif given is not None:
        kept = torch.where(share == 0, grad, 0)
    return kept, back.gather(grad / share.clamp(min=1)) * ties


def _product_backward(
    back: Indexed, include_self: bool, grad: Tensor, given: Tensor | None, src: Tensor, out: Tensor
) -> tuple[Tensor | None, Tensor]:
    """The other factors of each factor: the product divided by it, or without it where it is the only zero."""
    refuse_second("blocksparse.scatter")
    wide = torch.promote_types(out.dtype, torch.float32)
    grad, out = grad.to(wide), out.to(wide)
    zero = src == 0
    zeros = back.scatter(None, zero.float(), "sum", True, torch.float32)
    alone = zero & (back.gather(zeros) == 1)
    others = back.scatter(given, torch.where(alone, 1, src), "prod", include_self, wide)
    divided = back.gather(grad * out) / torch.where(zero, 1, src)
    kept = None
    if given is not None and include_self:
        kept = grad * back.scatter(torch.ones_like(given), src, "prod", True, wide)
    elif given is not None:
        kept = torch.where(back.count() == 0, grad, 0)
    # A factor may be NaN where no index is: beyond the matrix, and behind the last block.
    entry = back.gather(torch.ones_like(grad)) != 0
    return kept, torch.where(entry, torch.where(alone, back.gather(grad * others), divided), 0)


_INDEXED = ("index", "layout", "index_layout")


@register(
    BlocksparseGather,
    cpu=_gather_cpu.gather,
    fake=lambda call: call.values.new_empty(call.index.shape),
    backward=_gather_backward,
    saved=_INDEXED,
    repeats=True,
)
def _gather() -> Any:
    from gossamer.blocksparse._triton.gather import gather

    return gather


@register(
    BlocksparseScatterReduce,
    cpu=_scatter_cpu.scatter_reduce,
    fake=lambda call: call.index.new_empty(Form(*call.form).blocks, dtype=call.dtype),
    choose_path=choose_path,
    paths=PATHS,
    backward=_scatter_backward,
    saved=_INDEXED,
    keep=_keep_scatter,
    repeats=True,
)
def _scatter(path: str) -> Any:
    from gossamer.blocksparse._triton import scatter_reduce as kernels

    return getattr(kernels, f"scatter_{path}")


@register(
    BlocksparseGatherReach,
    cpu=_gather_cpu.reach,
    fake=lambda call: call.index.new_empty(*call.target[:3], dtype=torch.bool),
)
def _reach() -> Any:
    from gossamer.blocksparse._triton.gather import reach

    return reach
