"""How `blocksparse.attention` goes about it on a GPU, chosen by what the host knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gossamer._core import tuning
from gossamer._core.ops import INTERPRET

Path = Literal["hopper", "split", "tiles"]


@dataclass(frozen=True)
class Problem:
    """What the kernels of one attention are compiled and launched for. `own`: whether each batch, and each head, has a
    matrix of the layout."""

    b: int
    h: int
    key_heads: int
    tq: int
    tk: int
    d: int
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


def problem_of(
    q: Tensor, k: Tensor, z_batch: int, z_head: int, height: int, width: int, causal: bool, scale: float
) -> Problem:
    """The problem of an operator's arguments."""
    (b, h, tq, d), (_, hk, tk, _) = q.shape, k.shape
    return Problem(b, h, max(hk, 1), tq, tk, d, (z_batch > 0, z_head > 0), (height, width), causal, scale)


def choose_path(problem: Problem, dtype: torch.dtype, device: torch.device, plain: bool) -> Path:
    """How the GPU goes about it.

    "split" cuts the keys of few queries among programs, and joins what these find. "hopper" has kernels of its own for
    16-bit heads of up to 128 columns, a multiple of 8, in blocks from 64 on, where nothing is added to the scores
    (`plain`) and their scale is positive. "tiles" takes the rest.
    """
    if splits_of(problem, device) > 1:
        return "split"
    return "hopper" if on_hopper(problem, dtype, device, plain) else "tiles"


def on_hopper(problem: Problem, dtype: torch.dtype, device: torch.device, plain: bool) -> bool:
    """Whether the kernels written for Hopper can do it."""
    half = dtype in (torch.float16, torch.bfloat16)
    fits = problem.d % 8 == 0 and 0 < problem.d <= 128 and min(problem.block) >= 64 and problem.tk > 0
    # A running maximum is kept of scores that are not yet scaled.
    return plain and half and fits and problem.scale > 0 and not INTERPRET and tuning.hopper(device)


def empty_like(x: Tensor) -> Tensor:
    """`[B, H, T, D]` that lies as `[B, T, H, D]` in memory, as results do."""
    b, h, t, d = x.shape
    return x.new_empty(b, t, h, d).transpose(1, 2)


ROWS, KEYS = 64, 64
"""Queries of a program, and keys of a step, by which the work of "split" is measured."""


def splits_of(problem: Problem, device: torch.device) -> int:
    """Into how many parts the keys of few queries are split: two programs an SM, of eight steps at least."""
    programs = -(-problem.tq // min(ROWS, problem.block[0])) * problem.b * problem.h
    steps = problem.columns * problem.block[1] // KEYS
    most = min(2 * tuning.programs(device) // max(programs, 1), steps // 8, 64)
    return 1 << max(most, 1).bit_length() - 1
