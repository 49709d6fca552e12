"""The records of the room's operators: the arguments that schema, implementations and gradients share.

A layout is its buffer and its form; `form` fields hold a `Form`, and () where there is no layout.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gossamer._core.operator import Strided
from gossamer.blocksparse.lists import Form, Lists


class BlocksparseLayout(NamedTuple):
    """The buffer of the layout of a bool mask `[Z, R, C]`; `form` says how it lies."""

    mask: Tensor
    form: tuple[int, ...]


class BlocksparseFromDense(NamedTuple):
    """The blocks of dense matrices x `[Z, M, N]`."""

    x: Tensor
    layout: Tensor
    form: tuple[int, ...]


class BlocksparseToDense(NamedTuple):
    """Dense matrices `[Z, M, N]` of blocks, with `fill` where there is none."""

    values: Tensor
    layout: Tensor
    form: tuple[int, ...]
    fill: float


class BlocksparseTranspose(NamedTuple):
    """Transposed blocks, in the order of the transposed layout."""

    values: Tensor
    layout: Tensor
    form: tuple[int, ...]


class BlocksparseReduced(NamedTuple):
    """`[rows, b]`: the sums (`how` "sum", in float32 at least, of integers int64) or the maxima ("max") of whole rows
    of values (`dim` -1), or of columns (-2)."""

    values: Tensor
    layout: Tensor
    form: tuple[int, ...]
    dim: int
    how: str


class BlocksparseShifted(NamedTuple):
    """Values with the vectors of their rows added (`how` "add") or multiplied ("mul"), in the dtype of values."""

    values: Tensor
    vectors: Tensor
    layout: Tensor
    form: tuple[int, ...]
    dim: int
    how: str


class Direction(NamedTuple):
    """The dimension along which indices point: 0 a leading one, 1 rows, 2 columns; of a leading dimension, the product
    of those behind it, its length in the indices, and its length in the matrices they point into."""

    axis: int
    inner: int = 1
    d_index: int = 1
    d: int = 1

    def bound(self, form: Form) -> int:
        """How many places the indices may name."""
        return (self.d, form.m, form.n)[self.axis]


class BlocksparseGather(NamedTuple):
    """Blocks of the indices' layout: the elements that indices find in values, 0 for none.

    An index out of range is none; with `strict` it is an error on the CPU and NaN on a GPU. `axis` is a `Direction`.
    """

    values: Tensor
    index: Tensor  # type: ignore[assignment]
    layout: Tensor
    form: tuple[int, ...]
    index_layout: Tensor
    index_form: tuple[int, ...]
    axis: tuple[int, ...]
    strict: bool


class BlocksparseGatherReach(NamedTuple):
    """Bool `[Z, rows, cols]`: the blocks of matrices of `target` form in which there are elements that indices name."""

    index: Tensor  # type: ignore[assignment]
    index_layout: Tensor
    index_form: tuple[int, ...]
    axis: tuple[int, ...]
    target: tuple[int, ...]


class BlocksparseScatterReduce(NamedTuple):
    """Blocks of the layout: `src`, aligned with index, or ones if None, joined with what is given, or zeros if None.

    `reduce` is "sum", "prod", "amax", "amin" or "last"; `axis` is a `Direction`.
    """

    given: Tensor | None
    src: Tensor | None
    index: Tensor  # type: ignore[assignment]
    layout: Tensor
    form: tuple[int, ...]
    index_layout: Tensor
    index_form: tuple[int, ...]
    axis: tuple[int, ...]
    reduce: str
    include_self: bool
    dtype: torch.dtype


class BlocksparseRearrange(NamedTuple):
    """Blocks of the layout `out_layout`, each element of which comes from where the maps say.

    A map is int64 `[length, K]`: the sources of each matrix, row or column, -1 for none; None is the place itself.
    Several sources are added. `layout` is the buffer of the values' layout, or its half of rows alone. The inverses map
    back, for the gradient. `tile` is the height and width of tiles that stay together.
    """

    values: Tensor
    layout: Tensor
    form: tuple[int, ...]
    out_layout: Tensor
    out_form: tuple[int, ...]
    z_map: Tensor | None
    i_map: Tensor | None
    j_map: Tensor | None
    z_inverse: Tensor | None
    i_inverse: Tensor | None
    j_inverse: Tensor | None
    tile: tuple[int, ...]


class BlocksparseSoftmax(NamedTuple):
    """softmax(scale * values) along rows. The mask is dense, `[1 or Z, 1 or M, 1 or N]`, or of blocks, with a dimension
    more."""

    values: Tensor
    mask: Strided | None
    layout: Tensor
    form: tuple[int, ...]
    scale: float


class BlocksparseSoftmaxBwd(NamedTuple):
    """The gradient of values, from that of the result; elements that are 0 in the result get none."""

    grad: Tensor
    out: Tensor
    layout: Tensor
    form: tuple[int, ...]
    scale: float


class BlocksparseMatmul(NamedTuple):
    """op(a) @ op(b), each of which and the result dense, without a layout and with the form (), or block-sparse.

    `sizes` are Z, M, K and N of [Z, M, K] @ [Z, K, N], `block` the blocks along the last three, 0 where only dense
    matrices have that dimension. A block-sparse operand may be stored transposed.
    """

    a: Strided
    b: Strided
    a_layout: Tensor | None
    a_form: tuple[int, ...]
    b_layout: Tensor | None
    b_form: tuple[int, ...]
    out_layout: Tensor | None
    out_form: tuple[int, ...]
    sizes: tuple[int, ...]
    block: tuple[int, ...]
    trans_a: bool
    trans_b: bool

    def lists(self) -> list[Lists | None]:
        """The lists of a, b and the result."""
        parts = (self.a_layout, self.a_form), (self.b_layout, self.b_form), (self.out_layout, self.out_form)
        return [None if layout is None else Lists(layout, form) for layout, form in parts]


class BlocksparseAttention(NamedTuple):
    """softmax(q k^T * scale) v at a layout -> (out `[B, H, Tq, Dv]`, float32 log-sum-exp `[B, H, Tq]`).

    `relative` is the product of queries with tables of relative positions, `places` the positions of queries and keys,
    as `relative.py` makes them; `own` the matrices of the layout that a batch and a head are apart; `drop` and `seed`
    those of `_core.dropout`.
    """

    q: Strided
    k: Strided
    v: Strided
    bias: Strided | None
    relative: Tensor | None
    places: Tensor | None
    lengths: Tensor | None
    layout: Tensor
    form: tuple[int, ...]
    own: tuple[int, ...]
    causal: bool
    scale: float
    drop: int
    seed: Tensor | None


class BlocksparseAttentionBwd(NamedTuple):
    """Gradients of q, k, v, the bias and `relative`, the last two empty unless `with_bias` and `with_relative`."""

    grad: Strided
    grad_lse: Tensor | None
    out: Strided
    lse: Tensor
    q: Strided
    k: Strided
    v: Strided
    bias: Strided | None
    relative: Tensor | None
    places: Tensor | None
    lengths: Tensor | None
    layout: Tensor
    form: tuple[int, ...]
    own: tuple[int, ...]
    causal: bool
    scale: float
    drop: int
    seed: Tensor | None
    with_bias: bool
    with_relative: bool
