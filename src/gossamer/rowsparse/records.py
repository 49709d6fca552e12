"""The arguments of the room's operators: each operator is one record (`_core/operator.py`)."""

from typing import NamedTuple

import torch
from torch import Tensor

from gossamer._core.operator import Strided


class TransposeKeys(NamedTuple):
    """Entries of rows, regrouped by column."""

    indices: Tensor
    spans: Tensor
    n: int


class DenseTranspose(NamedTuple):
    """x `[M, N]`"""

    x: Strided


class PackRows(NamedTuple):
    """x `[M, N]`; None as capacity takes as many slots as there are entries."""

    x: Strided
    capacity: int | None


class Unpack(NamedTuple):
    """The dense matrix of entries, `[M, N]`; rows that overflowed are read from source `[M, N]`."""

    values: Tensor
    indices: Tensor
    spans: Tensor
    source: Strided | None
    n: int


class LinearRows(NamedTuple):
    """x `[M, K]`, weight `[N, K]`, bias and threshold `[N]`: the rows whose spans end beyond `room`."""

    x: Strided
    weight: Strided
    bias: Tensor | None
    threshold: Tensor | None
    spans: Tensor
    room: int


class Matmul(NamedTuple):
    """Rows times weight `[N, D]`, plus bias `[D]`; rows that overflowed are read from source `[M, N]`."""

    values: Tensor
    indices: Tensor
    spans: Tensor
    source: Strided | None
    weight: Strided
    bias: Tensor | None
    out_dtype: torch.dtype | None


class MatmulBwd(NamedTuple):
    """grad `[M, D]`; keys and col_offsets are those of `TransposeKeys`; mask `[M, N]` or None."""

    grad: Tensor
    indices: Tensor
    keys: Tensor
    col_offsets: Tensor
    values: Tensor
    spans: Tensor
    source: Strided | None
    weight: Strided | None
    dtype: torch.dtype
    mask: Strided | None


class SampledMatmul(NamedTuple):
    """x `[M, D]` times weight `[N, D]` at entries; source `[M, N]`; products of entries that are known already."""

    x: Strided
    weight: Strided
    indices: Tensor
    spans: Tensor
    source: Strided | None
    scatter: bool
    masked: bool
    products: Tensor | None
