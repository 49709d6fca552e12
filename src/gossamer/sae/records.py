"""The arguments of the room's operators: each operator is one record (`_core/operator.py`)."""

from typing import NamedTuple

import torch
from torch import Tensor

from gossamer._core.operator import Strided, Written


class SaeCountFired(NamedTuple):
    values: Tensor
    indices: Tensor
    spans: Tensor
    source: Strided | None
    n: int


class SaeEncode(NamedTuple):
    x: Strided
    weight: Strided
    bias: Tensor | None
    b_dec: Strided | None
    threshold: Strided | None
    activation: str
    k: int
    bandwidth: float
    capacity: int | None
    scale: Tensor | None
    ste_to_input: bool


class SaeEncodeBwdColumns(NamedTuple):
    grad_values: Strided
    grad_source: Strided
    grad_l0: Strided
    col_offsets: Tensor
    keys: Tensor
    columns: Tensor
    values: Tensor
    spans: Tensor
    source: Strided
    threshold: Strided | None
    bandwidth: float


class SaeEncodeBwdSource(NamedTuple):
    grad: Strided
    source: Strided
    spans: Tensor
    room: int
    grad_l0: Strided | None
    threshold: Strided | None
    bandwidth: float


class SaeEncodeDense(NamedTuple):
    x: Strided
    weight: Strided
    bias: Tensor | None
    b_dec: Strided | None
    threshold: Tensor | None
    activation: str
    k: int
    bandwidth: float
    scale: Tensor | None
    ste_to_input: bool


class SaeEncodeDenseBwd(NamedTuple):
    grad: Written
    acts: Tensor
    grad_l0: Strided
    threshold: Tensor | None
    bandwidth: float
    ste_to_input: bool


class SaeTanhL0(NamedTuple):
    values: Tensor
    indices: Tensor
    spans: Tensor
    source: Strided | None
    scale: Tensor


class SaeTanhL0Bwd(NamedTuple):
    grad: Strided
    values: Tensor
    indices: Tensor
    spans: Tensor
    source: Strided | None
    scale: Tensor


class SaeDecode(NamedTuple):
    acts: Strided
    weight: Strided
    bias: Tensor | None
    capacity: int
    out_dtype: torch.dtype | None


class SaeDecodeLists(NamedTuple):
    acts: Strided
    weight: Strided
    bias: Tensor | None
    capacity: int
    out_dtype: torch.dtype | None
