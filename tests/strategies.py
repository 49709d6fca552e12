"""Hypothesis strategies for row-sparse operators: any leading dimensions, odd and empty sizes, fillings and layouts.

Numbers are small integers, so that sums are exact in every dtype and results are compared for equality.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from gossamer.rowsparse import Rows, pack
from gossamer.rowsparse.rows import unchecked
from gossamer.testing import random_rows, random_slots

Draw = Callable[..., int]

LEADING = st.lists(st.integers(0, 3), max_size=3).map(tuple)
COLUMNS = st.one_of(st.integers(0, 70), st.sampled_from([128, 129]))
DEPTHS = st.one_of(st.integers(0, 20), st.sampled_from([128, 129]))
LAYOUTS = st.sampled_from(["contiguous", "transposed", "strided", "misaligned", "expanded"])
SEEDS = st.integers(0, 1 << 30)
PACKINGS: list[dict[str, Any]] = [
    *({"capacity": slots} for slots in (64, 5, 1, "exact")),
    *({"room": slots} for slots in (30, 0)),
]
"""Arguments of `pack_as`, of which some leave rows that overflow."""


def seeded(seed: int, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The values of x in another memory layout; "expanded" repeats the first row without memory for it."""
    if x.dim() == 0 or layout == "contiguous":
        return x.contiguous()
    if layout == "transposed":
        return x.movedim(-1, 0).contiguous().movedim(0, -1)
    between = math.nan if x.is_floating_point() else 0
    if layout == "strided":
        wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 1), between)
        wide[..., 1::2] = x
        return wide[..., 1::2]
    if layout == "misaligned":
        flat = x.new_full((x.numel() + 1,), between)
        flat[1:] = x.reshape(-1)
        return flat[1:].view(x.shape)
    if x.dim() == 1 or x.shape[0] == 0:
        return x
    return x[:1].expand_as(x)


@st.composite
def dense(draw: Draw, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[..., N] with rows that hold nothing, little, or everything."""
    leading, n = draw(LEADING), draw(COLUMNS)
    fillings = st.sampled_from([0, 1, 2, n // 2, n])
    m = math.prod(leading)
    x = random_rows(
        (*leading, n),
        l0=draw(st.lists(fillings, min_size=m, max_size=m)),
        dtype=dtype,
        device=device,
        generator=seeded(draw(SEEDS), device),
        integers=True,
    )
    return laid_out(x, draw(LAYOUTS))


@st.composite
def matrix(draw: Draw, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[rows, columns], dense, without zeros."""
    w = random_rows(
        (rows, columns), l0=columns, dtype=dtype, device=device, generator=seeded(draw(SEEDS), device), integers=True
    )
    return laid_out(w, draw(LAYOUTS))


@st.composite
def built(draw: Draw, dtype: torch.dtype, device: torch.device) -> Rows:
    """A container as users may build it: repeated columns, slots without an entry, NaN where nobody may look."""
    shape, capacity = (*draw(LEADING), draw(COLUMNS)), draw(st.integers(0, 40))
    options = {"dtype": dtype, "device": device, "generator": seeded(draw(SEEDS), device), "integers": True}
    return random_slots(shape, capacity, packed=draw(st.booleans()), padding=draw(st.integers(0, 5)), **options)


@st.composite
def packed(draw: Draw, dtype: torch.dtype, device: torch.device) -> Rows:
    """A packed container, overflowed or not."""
    x = draw(dense(dtype, device))
    if draw(st.booleans()):
        return pack(x, capacity=draw(st.one_of(st.none(), st.just("exact"), st.integers(1, 70))))
    return pack_as(x, room=draw(st.integers(0, 100)))


def pack_as(x: Tensor, room: int | None = None, **options: Any) -> Rows:
    """`pack`, or with a `room` rows that follow each other in that many slots, of which the last may overflow."""
    if room is None:
        return pack(x, **options)
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    values, indices, spans, _ = pack(x, capacity="exact").packed
    more = max(0, room - values.shape[0])
    values = torch.nn.functional.pad(values[:room], (0, more), value=math.nan)
    indices = torch.nn.functional.pad(indices[:room], (0, more), value=-1)
    # The gradient of a source is zero where it has no entry, as that of pack is.
    source = torch.where(flat != 0, flat, 0) if flat.requires_grad else flat
    return unchecked(values, indices, spans, tuple(x.shape), source)


def over(rows: Rows) -> Tensor:
    """Bool [M]: the rows that overflowed."""
    return rows.packed.spans.sum(0) > rows.packed.values.shape[0]


def at_entries(dense: Tensor, rows: Rows) -> Tensor:
    """The values of `rows` if every entry holds the element of `dense` [M, N] in its place; else 0."""
    values, indices, spans, _ = rows.packed
    out = torch.zeros_like(values, dtype=torch.float64)
    for row, (first, count) in enumerate(spans.t().tolist()):
        if first + count <= values.shape[0] and rows.num_columns:
            at = indices[first : first + count].long()
            out[first : first + count] = torch.where(at >= 0, dense[row, at.clamp(min=0)], 0)
    return out


def changed(rows: Rows, **parts: Any) -> Rows:
    """A container with other buffers, by their names in `packed`; nothing is completed."""
    return Rows(**{**rows.packed._asdict(), **parts}, shape=rows.shape)


def with_index(apart: bool, index: int, dtype: torch.dtype, device: torch.device) -> Rows:
    """Three rows of 30 columns with two ones each, `apart` or not; the second has one at column 0, and one at `index`,
    which is put there once the container is made: the constructor would refuse it."""
    columns = [[3, 4, -1], [0, 29, -1], [1, 2, -1]] if apart else [[3, 4], [0, 29], [1, 2]]
    indices = torch.tensor(columns, dtype=torch.int32, device=device)
    starts = torch.arange(3, device=device) * indices.shape[1]
    flat = indices.flatten()
    values = torch.ones(flat.shape, dtype=dtype, device=device)
    rows = Rows(values, flat, torch.stack([starts, torch.full_like(starts, 2)]), (3, 30))
    first = indices.shape[1]
    flat[first : first + 2] = torch.tensor(sorted((0, index)), dtype=torch.int32, device=device)
    return rows


def lost(device: torch.device, room: int = 1) -> Rows:
    """Two rows of four columns, of which the second overflows without a source: a promise broken."""
    spans = torch.tensor([[0, 1], [1, 3]], device=device)
    return Rows(torch.ones(room, device=device), torch.zeros(room, device=device).int(), spans, (2, 4))


def containers(dtype: torch.dtype, device: torch.device) -> st.SearchStrategy[Rows]:
    """Packed or built by hand."""
    return st.one_of(packed(dtype, device), built(dtype, device))
