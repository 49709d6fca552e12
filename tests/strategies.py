"""Hypothesis strategies for row-sparse operators: any leading dimensions, odd and empty sizes, fillings and layouts.

Numbers are small integers, so that sums are exact in every dtype and results are compared for equality.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from gossamer.rowsparse import CSR, ELL, Rows, TwELL, pack
from gossamer.testing import random_csr, random_ell, random_rows

Draw = Callable[..., int]

LEADING = st.lists(st.integers(0, 3), max_size=3).map(tuple)
COLUMNS = st.one_of(st.integers(0, 70), st.sampled_from([128, 129]))
DEPTHS = st.one_of(st.integers(0, 20), st.sampled_from([128, 129]))
LAYOUTS = st.sampled_from(["contiguous", "transposed", "strided", "misaligned", "expanded"])
SEEDS = st.integers(0, 1 << 30)


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
    generator = seeded(draw(SEEDS), device)
    options = {"dtype": dtype, "device": device, "generator": generator, "integers": True}
    if draw(st.booleans()):
        return random_ell(shape, capacity, **options)
    return random_csr(shape, capacity, padding=draw(st.integers(0, 5)), **options)


@st.composite
def packed(draw: Draw, dtype: torch.dtype, device: torch.device) -> Rows:
    """A packed container, overflowed or not."""
    x = draw(dense(dtype, device))
    if draw(st.booleans()):
        return pack(x, capacity=draw(st.one_of(st.none(), st.integers(1, 70))))
    return pack(x, format="csr", max_nnz=draw(st.one_of(st.none(), st.integers(0, 100))))


@st.composite
def tiled(draw: Draw, dtype: torch.dtype, device: torch.device) -> TwELL:
    """A packed TwELL, overflowed or not, with tiles of a few columns, and with ones that a row does not fill."""
    x = draw(dense(dtype, device))
    tile = draw(st.sampled_from([1, 3, 16, 64, 300]))
    rows = pack(x, format="twell", tile=tile, slots=draw(st.one_of(st.none(), st.integers(1, 8))))
    values, indices, counts, _ = rows.packed
    held = torch.arange(rows.slots, device=device) < counts[..., None]
    # Where nobody may look.
    return changed(rows, values=torch.where(held, values, math.nan), indices=torch.where(held, indices, 99))


def changed(rows: Any, **parts: Any) -> Any:
    """A container with other buffers, by their names in `packed`; nothing settles."""
    given = {**rows.packed._asdict(), **parts}
    given[rows.COUNTS_NAME] = given.pop("counts")
    given |= {"tile": rows.tile} if isinstance(rows, TwELL) else {}
    return type(rows)(**given, shape=rows.shape)


def with_index(format: str, index: int, dtype: torch.dtype, device: torch.device) -> Rows:
    """Three rows of 30 columns with two ones each; the second has one at column 0, and one at `index`, which is put
    there once the container is made: the constructor would refuse it."""
    indices = torch.tensor([[3, 4], [0, 29], [1, 2]], dtype=torch.int32, device=device)
    values = torch.ones(3, 2, dtype=dtype, device=device)
    rows: Rows
    if format == "ell":
        rows = ELL(values, indices, torch.full((3,), 2, dtype=torch.int32, device=device), (3, 30))
    else:
        rows = CSR(torch.arange(0, 7, 2, device=device), indices.flatten(), values.flatten(), (3, 30))
    indices[1] = torch.tensor(sorted((0, index)), dtype=torch.int32, device=device)
    return rows


def containers(dtype: torch.dtype, device: torch.device) -> st.SearchStrategy[Rows]:
    """Packed or built by hand."""
    return st.one_of(packed(dtype, device), built(dtype, device))
