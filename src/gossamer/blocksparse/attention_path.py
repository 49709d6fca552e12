"""The path of a block-sparse attention on a GPU, chosen by what the host knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gossamer._core import tuning
from gossamer._core.ops import INTERPRET
from gossamer.blocksparse.lists import Form
from gossamer.blocksparse.records import BlocksparseAttention, BlocksparseAttentionBwd

Path = Literal["split", "hopper", "tiles"]
PATHS: dict[Path, str] = {
    "split": "so few queries that programs are left: the keys of each query are cut among several programs",
    "hopper": "16 bits on Hopper, heads of up to 128 columns, a multiple of 8 and as many in v, blocks from 64 on, a "
    "positive scale, nothing added to the scores and no dropout: kernels that the copy engine feeds",
    "tiles": "all other calls: tiles of queries that walk their lists of keys",
}


@dataclass(frozen=True)
class Problem:
    """The facts for which the kernels of one attention are compiled and launched. `own`: whether each batch, and each
    head, has a matrix of the layout; `dv` is the width of values."""

    b: int
    h: int
    key_heads: int
    tq: int
    tk: int
    d: int
    dv: int
    own: tuple[bool, bool]
    block: tuple[int, int]
    causal: bool
    scale: float

    @property
    def group(self) -> int:
        """Query heads that share a head of keys."""
        return self.h // self.key_heads

    @property
    def rows(self) -> int:
        """Block rows of a head."""
        return -(-self.tq // self.block[0])

    @property
    def columns(self) -> int:
        """Block columns of a head."""
        return -(-self.tk // self.block[1])


def problem_of(call: BlocksparseAttention | BlocksparseAttentionBwd) -> Problem:
    """The problem of an operator's arguments."""
    (b, h, tq, d), (_, hk, tk, _), dv = call.q.shape, call.k.shape, call.v.shape[3]
    own, (height, width) = (call.own[0] > 0, call.own[1] > 0), call.form[3:5]
    return Problem(b, h, max(hk, 1), tq, tk, d, dv, own, (height, width), call.causal, call.scale)


def leaves_idle(call: BlocksparseAttentionBwd) -> bool:
    """Whether a query of a listed block may take no key. Below a diagonal every block of its row may begin behind it,
    unless the diagonal meets each block that it cuts in the corner of a block row."""
    form, ahead = Form(*call.form), call.k.shape[2] - call.q.shape[2]
    aligned = call.lengths is None and ahead % form.height == 0 and form.width % form.height == 0
    return call.bias is not None or form.cut > 0 or (call.causal and not aligned)


def choose_path(call: BlocksparseAttention | BlocksparseAttentionBwd) -> Path:
    """One of `PATHS`."""
    plain = call.bias is None and call.relative is None and call.seed is None
    return path_for(problem_of(call), call.q.dtype, call.q.device, plain)


def path_for(problem: Problem, dtype: torch.dtype, device: torch.device, plain: bool) -> Path:
    """The path of a problem, to whose scores nothing is added, and of which none is dropped, if it is `plain`."""
    if splits_of(problem, device) > 1:
        return "split"
    half = dtype in (torch.float16, torch.bfloat16)
    fits = problem.d == problem.dv and problem.d % 8 == 0 and 0 < problem.d <= 128
    fits = fits and min(problem.block) >= 64 and problem.tk > 0
    # A running maximum is kept of scores that are not yet scaled.
    fits = fits and plain and half and problem.scale > 0
    return "hopper" if fits and not INTERPRET and tuning.hopper(device) else "tiles"


def first_key(limits: Tensor, tq: int, tk: int) -> Tensor:
    """The position of the first query, where keys end at `limits`: the last query is aligned with the last key, but of
    up to Tk queries none stands in front of the first key, and of more Tq - Tk."""
    return (limits - tq).clamp(min=min(tk - tq, 0))


def empty_like(x: Tensor, width: int | None = None) -> Tensor:
    """`[B, H, T, D]` that lies as `[B, T, H, D]` in memory, as results do; D is that of x unless it is given."""
    b, h, t, d = x.shape
    return x.new_empty(b, t, h, d if width is None else width).transpose(1, 2)


ROWS, KEYS = 64, 64
"""Queries of a program, and keys of a step, by which the work of "split" is measured."""


def splits_of(problem: Problem, device: torch.device) -> int:
    """Into how many parts the keys of few queries are split: two programs an SM, of eight steps at least."""
    programs = -(-problem.tq // min(ROWS, problem.block[0])) * problem.b * problem.h
    steps = problem.columns * problem.block[1] // KEYS
    most = min(2 * tuning.programs(device) // max(programs, 1), steps // 8, 64)
    return 1 << max(most, 1).bit_length() - 1
