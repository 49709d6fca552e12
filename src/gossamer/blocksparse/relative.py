"""The terms that attention adds to the scores for relative positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree

from gossamer._core import autocast, checks
from gossamer.blocksparse.attention_path import first_key

_NAME = "blocksparse.Relative"
_BOUND, _FARTHEST = 1 << 30, 1 << 32
"""The bound of positions; and a first relative position of a table whose rows no pair of positions reaches."""


@dataclass(frozen=True, eq=False)
class Relative:
    """A term of relative positions: query i and key j score q_i . (k_j + table[c + clip(key_j - query_i, -c, c)]).

    Positions are any integers: places in a sequence, times, pitches. Several may be equal, and they need not ascend.

    Args:
        table: `[H, R, D]`, or `[1, R, D]` for all heads; float, R = 2c + 1 odd. Row c belongs to equal positions, the
            first and the last row to all that are c or more apart.
        query_positions: int `[Tq]` or `[B, Tq]`, within 2^30 of 0.
        key_positions: int `[Tk]` or `[B, Tk]`, likewise.

    Raises:
        ValueError: table has no three dimensions, or an even R.
        TypeError: a table that is not floating, or positions that are no integers.

    Source: Shaw et al. 2018, "Self-Attention with Relative Position Representations", equation 4.

    >>> Relative(torch.randn(1, 5, 8), torch.arange(32), torch.arange(32)).clip
    2
    """

    table: Tensor
    query_positions: Tensor
    key_positions: Tensor

    def __post_init__(self) -> None:
        checks.floating(_NAME, table=self.table)
        if self.table.dim() != 3 or self.table.shape[1] % 2 == 0:
            raise ValueError(f"{_NAME}: table must have shape [H, R, D] with an odd R, got {list(self.table.shape)}.")
        for name in ("query_positions", "key_positions"):
            given = getattr(self, name)
            checks.tensors(_NAME, **{name: given})
            if given.is_floating_point() or given.is_complex() or given.dtype is torch.bool:
                raise TypeError(f"{_NAME}: {name} must be integers, got {checks.name_of(given.dtype)}. Round them.")

    @classmethod
    def starting_at(
        cls, table: Tensor, query_positions: Tensor, key_positions: Tensor, first: int, *, zeros_beyond: bool = False
    ) -> Relative:
        """A term whose rows belong to key_j - query_i = `first`, `first` + 1 and on, for bounds that are not symmetric.

        Args:
            table: `[H or 1, R, D]`, any R from 1 on.
            query_positions: as in `Relative`.
            key_positions: as in `Relative`.
            first: the relative position of the first row, any int.
            zeros_beyond: pairs before the first and behind the last row have no term; otherwise they have these rows.

        Raises:
            ValueError: table has no three dimensions, or no row.
            TypeError: first is no int, or as in `Relative`.

        >>> Relative.starting_at(torch.randn(1, 4, 8), torch.arange(32), torch.arange(32), -3).table.shape
        torch.Size([1, 5, 8])
        """
        checks.floating(_NAME, table=table)
        if table.dim() != 3 or table.shape[1] == 0:
            raise ValueError(f"{_NAME}: table must have shape [H, R, D] with R of at least 1, got {list(table.shape)}.")
        if not isinstance(first, int) or isinstance(first, bool):
            raise TypeError(f"{_NAME}: first must be an int, the relative position of the first row, got {first!r}.")
        first, edge = max(-_FARTHEST, min(first, _FARTHEST)), torch.zeros_like(table[:, :1])
        if zeros_beyond:
            table, first = torch.cat([edge, table, edge], 1), first - 1
        if table.shape[1] % 2 == 0:
            table = torch.cat([table, table[:, -1:]], 1)
        term = cls(table, query_positions, key_positions)
        return cls(table, query_positions, key_positions.long() - (first + term.clip))

    @property
    def clip(self) -> int:
        """c: from where on positions are all the same."""
        return self.table.shape[1] // 2


def prepare(
    operator: str, q: Tensor, k: Tensor, relative: Relative | Sequence[Relative] | None, lengths: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """(the product of each query and each relative position `[B, H, Tq, terms * R]`; where queries and keys are, int32
    `[terms, B, Tq + Tk]`) of the terms. A table that is shorter than another is continued by its outermost rows, which
    stand for all positions beyond. With `lengths`, of a causal call, queries behind the keys of their sequence count as
    zeros."""
    given_terms = () if relative is None else relative
    terms = tuple(given_terms) if isinstance(given_terms, Sequence) else (given_terms,)
    if not terms:
        return None, None
    (b, h, tq, d), tk = q.shape, k.shape[2]
    places, tables = [], []
    for term in terms:
        if not isinstance(term, Relative):
            raise TypeError(
                f"{operator}: relative must hold blocksparse.Relative terms, got {type(term).__name__}. Make one of "
                "a table and two tensors of positions."
            )
        given = {"query_positions": term.query_positions, "key_positions": term.key_positions}
        checks.same_device(operator, "q", q.device, table=term.table, **given)
        if term.table.shape[0] not in (1, h) or term.table.shape[2] != d:
            raise ValueError(
                f"{operator}: table of relative must have shape [H or 1, R, D] with H = {h} and D = {d} like q, got "
                f"{list(term.table.shape)}."
            )
        for (name, positions), length, letter in zip(given.items(), (tq, tk), ("Tq", "Tk")):
            if tuple(positions.shape) not in ((length,), (1, length), (b, length)):
                raise ValueError(
                    f"{operator}: {name} of relative must have shape [{letter}] or [B, {letter}] = {[b, length]}, got "
                    f"{list(positions.shape)}."
                )
        # Kernels compute in int32. Keys of a table that starts elsewhere may be farther away.
        bounds = zip(given.values(), (_BOUND, 2 * _BOUND - 1))
        near = [x.long().clamp(-bound, bound).to(torch.int32).expand(b, x.shape[-1]) for x, bound in bounds]
        places.append(torch.cat(near, 1))
        tables.append(term.table)
    if lengths is not None:
        # The operator reads no such row, and gradients of 0 times NaN would reach the table.
        limits = lengths.clamp(max=tk)
        behind = torch.arange(tq, device=q.device) >= (limits - first_key(limits, tq, tk))[:, None]
        q = q.masked_fill(behind[:, None, :, None], 0)
    clip = max(term.clip for term in terms)
    table = torch.cat([_widened(each, clip).expand(h, -1, -1) for each in tables], 1)
    wide = autocast.cast(q, table)
    if wide[0].dtype is not wide[1].dtype:  # type: ignore[union-attr]
        raise TypeError(
            f"{operator}: table of relative must have the dtype of q, {checks.name_of(q.dtype)}, got "
            f"{checks.name_of(terms[0].table.dtype)}. Convert it with .to(q.dtype), or use torch.autocast."
        )
    with autocast.disabled(q.device):
        return wide[0] @ wide[1].transpose(1, 2), torch.stack(places)  # type: ignore[union-attr, operator]


def _widened(table: Tensor, clip: int) -> Tensor:
    """A table with rows for all relative positions up to `clip`."""
    more = clip - table.shape[1] // 2
    first, last = (table[:, at].unsqueeze(1).expand(-1, more, -1) for at in (0, -1))
    return torch.cat([first, table, last], 1) if more else table


torch.serialization.add_safe_globals([Relative])

_pytree.register_pytree_node(
    Relative,
    lambda term: ([term.table, term.query_positions, term.key_positions], None),
    lambda parts, _: Relative(*parts),
    serialized_type_name="gossamer.blocksparse.Relative",
)
