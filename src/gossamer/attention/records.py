"""The records of the room's operators: the arguments that schema, implementations and gradients share."""

from typing import NamedTuple

import torch
from torch import Tensor

from gossamer._core.operator import Strided

QUERIES = 64
"""Queries that share a word of a selection."""


class WordsOfMask(NamedTuple):
    """Words int64 `[B, S, ceil(Tq / 64), Tk]` of a bool mask `[B, S, Tq, Tk]`."""

    mask: Tensor


class MaskOfWords(NamedTuple):
    """The inverse of `WordsOfMask`."""

    words: Tensor
    num_queries: int


class RotaryGates(NamedTuple):
    """q, k, v `[B, T, heads or groups, D]` and gate `[B, T, heads * D or 0]` of y `[B, T, N]`, cos and sin
    `[T or B, T, D]`."""

    y: Tensor
    cos: Tensor
    sin: Tensor
    heads: int
    groups: int
    value_gate: bool
    output_gate: bool


class RotaryGatesBwd(NamedTuple):
    """The gradient of y."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dgate: Tensor
    y: Tensor
    cos: Tensor
    sin: Tensor
    value_gate: bool


class IndexerScores(NamedTuple):
    """Scores `[B, Tq, Tk]` of q `[B, Hi, Tq, Di]`, k `[B, Tk, Di]`, w `[B, Tq, Hi]` and bias `[Hi]`."""

    q: Tensor
    k: Tensor
    w: Tensor
    bias: Tensor | None
    lengths: Tensor | None
    scale: float
    causal: bool
    activation: str
    out_dtype: torch.dtype


class IndexerScoresBackward(NamedTuple):
    """Gradients of q, k, w and bias, the last in the dtype that is computed in."""

    grad: Tensor
    q: Tensor
    k: Tensor
    w: Tensor
    bias: Tensor | None
    lengths: Tensor | None
    scale: float
    causal: bool
    activation: str


class SelectTopk(NamedTuple):
    """Words of a `Selection` of one scope. `rule` is "" where each query takes `top` keys."""

    q: Strided
    k: Strided
    w: Tensor
    bias: Tensor | None
    lengths: Tensor | None
    mean: Tensor | None
    predictor: Tensor | None
    top: int
    k_min: int
    k_max: int
    rule: str
    temperature: float
    scale: float
    causal: bool
    window: int
    sinks: int
    workspace: int
    granularity: int
    activation: str

    @property
    def bounds(self) -> tuple[int, int, int]:
        """The fewest columns that a query takes, the usual number and the most."""
        return self.k_min // self.granularity, self.top // self.granularity, self.k_max // self.granularity


class SparseAttention(NamedTuple):
    """out `[B, H, Tq, Dv]`, in memory as `[B, Tq, H, Dv]`, and lse `[B, H, Tq]`. With a table k and v are pools of
    pages `[P, page_size, G, D or Dv]`. The indexer's inputs are for the gradient alone. `drop` and `seed` are those of
    `_core.dropout`."""

    q: Strided
    k: Strided
    v: Strided
    words: Tensor
    lengths: Tensor | None
    table: Tensor | None
    scale: float
    causal: bool
    path: str
    drop: int
    seed: Tensor | None
    q_idx: Strided | None
    k_idx: Strided | None
    w: Strided | None
    bias: Strided | None
    scale_idx: float
    activation: str


class SparseAttentionBwd(NamedTuple):
    """Gradients of q, k and v, `[0]` unless `attended`, and straight through the selection those of q_idx, k_idx, w and
    bias, `[0]` without an indexer."""

    grad: Strided
    grad_lse: Tensor | None
    q: Strided
    k: Strided
    v: Strided
    out: Strided
    lse: Tensor
    words: Tensor
    lengths: Tensor | None
    scale: float
    causal: bool
    path: str
    drop: int
    seed: Tensor | None
    q_idx: Tensor | None = None
    k_idx: Tensor | None = None
    w: Tensor | None = None
    bias: Tensor | None = None
    scale_idx: float = 1.0
    activation: str = "sigmoid"
    attended: bool = True


class IndexerLoss(NamedTuple):
    """The loss, and its gradients of q_idx, k_idx, w and bias."""

    q: Tensor
    k: Tensor
    lse: Tensor
    q_idx: Tensor
    k_idx: Tensor
    w: Tensor
    bias: Tensor
    words: Tensor
    lengths: Tensor | None
    scale: float
    scale_idx: float
    causal: bool
    activation: str
