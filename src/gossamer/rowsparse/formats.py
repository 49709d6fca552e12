"""The containers for matrices with few stored entries per row.

All hold what they were packed from as `[M, N]`, remember its leading dimensions in `shape`, and own everything an
operator needs. An *entry* is a stored slot: explicit zeros are legal, repeated indices add up, and an index of -1
means "no entry". A row that holds more entries than there are slots has *overflowed*: it stays exact, because the
container keeps the `source` of such rows, and every operator reads it there, without asking the host. The source is
the dense matrix, or a `LinearSource`: what a linear layer computed it from.

Operators take the buffers of `rows.packed`. Whoever looks at `values`, `indices` or counts sees every entry: a
container that has a source settles first, after which its buffers hold the rows that overflowed as well, and are all
there is.
"""

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree

from gossamer._core import checks
from gossamer.rowsparse.container import (
    COUNTS,
    INDICES,
    SOURCE,
    VALUES,
    LinearSource,
    Packed,
    RowSparse,
    unchecked,
)


@dataclass(init=False, eq=False, repr=False)
class ELL(RowSparse):
    """ELLPACK: the same number of slots for every row.

    Args:
        values: `[M, capacity]`, float. What stands in a slot without an entry is not read.
        indices: `[M, capacity]`, int32 columns, ascending in each row; -1 marks a slot without an entry.
        nnz_per_row: `[M]`, int32: how many entries the row has. They stand in its first slots; a count above
            `capacity` says that the row overflowed and is to be read from `source`. (It is capacity + 1 where a tile
            of a `TwELL` overflowed and the row has no more.)
        shape: `(..., N)` with M the product of the leading dimensions.
        source: `[M, N]`, dense, right at least for the overflowed rows, or a `LinearSource`; None promises that no row
            overflowed.

    Raises:
        ValueError: the tensors' shapes or devices do not fit each other, or N is not below 2^31; on the CPU, an index
            outside [0, N) that is not -1, or a count below 0.
        TypeError: the indices or counts are not int32, the values not floating, or the source has another dtype.

    To look at indices and counts on a GPU costs a sync: there those that break the rule make their row NaN, or have it
    read from the source. `validate()` looks and raises. Under `torch.compile` nothing looks.

    >>> indices, nnz = torch.tensor([[3], [0]], dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    >>> rows = ELL(torch.ones(2, 1), indices, nnz, (2, 4))
    >>> rows.to_dense()[0].tolist()
    [0.0, 0.0, 0.0, 1.0]
    """

    COUNTS_NAME: ClassVar[str] = "nnz_per_row"
    SIZES: ClassVar[tuple[str, ...]] = ("capacity",)

    shape: tuple[int, ...]
    values: Tensor = VALUES
    indices: Tensor = INDICES
    nnz_per_row: Tensor = COUNTS
    source: Tensor | LinearSource | None = SOURCE

    def __init__(
        self,
        values: Tensor,
        indices: Tensor,
        nnz_per_row: Tensor,
        shape: tuple[int, ...],
        source: Tensor | LinearSource | None = None,
    ) -> None:
        operator = "rowsparse.ELL"
        m = _check_parts(operator, shape, values, indices, source, nnz_per_row=nnz_per_row)
        if values.dim() != 2 or values.shape[0] != m:
            raise ValueError(
                f"{operator}: values must have shape [M, capacity] with M = {m} from shape {shape}, "
                f"got {list(values.shape)}."
            )
        checks.shape(operator, "indices", indices, tuple(values.shape), "[M, capacity]", "like values")
        checks.shape(operator, "nnz_per_row", nnz_per_row, (m,), "[M]", "like values")
        _check_dtypes(operator, "", indices=(indices, torch.int32), nnz_per_row=(nnz_per_row, torch.int32))
        _check_source(operator, shape, values, source, indices=indices, nnz_per_row=nnz_per_row)
        if _readable(nnz_per_row):
            fits = (nnz_per_row <= values.shape[1])[:, None]
            _check_counts(operator, self.COUNTS_NAME, nnz_per_row)
            held = fits & (torch.arange(values.shape[1], device=values.device) < nnz_per_row[:, None])
            check_indices(operator, indices[held], shape[-1])
        self._hold(values, indices, _overflowing(nnz_per_row, values.shape[1]), source, shape=shape)

    @property
    def capacity(self) -> int:
        """Slots per row; after `settle` as many as the fullest row needs."""
        return self._packed.values.shape[1]

    def validate(self) -> "ELL":
        """Looks at the contents, which costs one sync, and returns self.

        Raises:
            ValueError: an index outside [-1, N), columns that do not ascend, a count below 0 or of more entries than a
                row can have, or an overflowed row without a source.
        """
        operator = "rowsparse.ELL"
        _, indices, counts, _ = self.packed
        check_indices(operator, indices, self.num_columns)
        # A row that overflowed holds every column once at most, but is marked by capacity + 1 at least.
        _check_slots(operator, self, max(self.num_columns, self.capacity + 1))
        fits = (counts <= self.capacity)[:, None]
        held = fits & (torch.arange(self.capacity, device=self.device) < counts[:, None])
        _check_ascending(operator, indices, held)
        return self


@dataclass(init=False, eq=False, repr=False)
class CSR(RowSparse):
    """Compressed sparse rows.

    Args:
        row_offsets: `[M + 1]`, int64: row r holds the entries `row_offsets[r]` to `row_offsets[r + 1]`. Offsets are
            true counts: a row that ends beyond the buffer overflowed and is to be read from `source`.
        indices: `[max_nnz]`, int32 columns, ascending in each row; slots past `row_offsets[-1]` hold anything.
        values: `[max_nnz]`, float.
        shape: `(..., N)` with M the product of the leading dimensions.
        source: `[M, N]`, dense, right at least for the overflowed rows; None promises that no row overflowed.

    Raises:
        ValueError: the tensors' shapes or devices do not fit each other, or N is not below 2^31; on the CPU,
            row_offsets that do not start at 0 or that decrease, or an index outside [0, N) that is not -1.
        TypeError: row_offsets is not int64, indices is not int32, the values are not floating, or the source has
            another dtype.

    On a GPU, where to look costs a sync, rows from the first wrong offset on are NaN, or are read from the source.

    >>> rows = CSR(torch.tensor([0, 1, 1]), torch.tensor([2], dtype=torch.int32), torch.ones(1), (2, 3))
    >>> rows.to_dense().tolist()
    [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    """

    COUNTS_NAME: ClassVar[str] = "row_offsets"
    SIZES: ClassVar[tuple[str, ...]] = ("max_nnz",)

    shape: tuple[int, ...]
    row_offsets: Tensor = COUNTS
    indices: Tensor = INDICES
    values: Tensor = VALUES
    source: Tensor | None = SOURCE

    def __init__(
        self, row_offsets: Tensor, indices: Tensor, values: Tensor, shape: tuple[int, ...], source: Tensor | None = None
    ) -> None:
        operator = "rowsparse.CSR"
        m = _check_parts(operator, shape, values, indices, source, row_offsets=row_offsets)
        checks.tensors(operator, source=source)
        checks.shape(operator, "row_offsets", row_offsets, (m + 1,), "[M + 1]", f"for shape {shape}")
        if values.dim() != 1:
            raise ValueError(f"{operator}: values must have shape [nnz], got {list(values.shape)}.")
        checks.shape(operator, "indices", indices, tuple(values.shape), "[nnz]", "like values")
        _check_dtypes(operator, "", row_offsets=(row_offsets, torch.int64), indices=(indices, torch.int32))
        _check_source(operator, shape, values, source, row_offsets=row_offsets, indices=indices)
        if _readable(row_offsets):
            _check_offsets(operator, row_offsets)
            check_indices(operator, indices[_held_by_offsets(row_offsets, len(values))], shape[-1])
        elif _on_gpu(row_offsets):
            row_offsets = ascending(row_offsets, len(values))
        self._hold(values, indices, row_offsets, source, shape=shape)

    @property
    def max_nnz(self) -> int:
        """Length of the buffers; the true count is `row_offsets[-1]`, on the device."""
        return self._packed.values.shape[0]

    @property
    def nnz_per_row(self) -> Tensor:
        """`[M]`, int64: how many entries each row has."""
        return self.row_offsets.diff()

    @property
    def overflowed(self) -> Tensor:
        """Bool `[]` on the device: whether any row ends beyond the buffer."""
        return self._packed.counts[-1] > self.max_nnz

    def validate(self) -> "CSR":
        """Looks at the contents, which costs one sync, and returns self.

        Raises:
            ValueError: offsets that do not start at 0 or that decrease, an index outside [-1, N), columns that do not
                ascend in a row, or an overflowed row without a source.
        """
        operator = "rowsparse.CSR"
        _, indices, offsets, source = self.packed
        nnz = int(offsets[-1])
        _check_offsets(operator, offsets)
        if source is None and nnz > self.max_nnz:
            raise ValueError(
                f"{operator}: row_offsets must start at 0, never decrease, and be at most len(values) = {self.max_nnz} "
                f"without a source, got {nnz} at the end. Sort the rows, or give the dense source or longer buffers."
            )
        held = _held_by_offsets(offsets, self.max_nnz)
        check_indices(operator, indices[held], self.num_columns)
        row = torch.searchsorted(offsets, torch.arange(self.max_nnz, device=self.device), right=True)
        _check_ascending(operator, indices, held, row)
        return self


@dataclass(init=False, eq=False, repr=False)
class TwELL(RowSparse):
    """Tile-wise ELLPACK: the columns are cut into tiles, and every row has the same number of slots in each tile.

    A kernel that computes a tile of the matrix can write its entries without knowing about the other tiles.

    Args:
        values: `[M, T, slots]`, float, with T = N / tile, rounded up. What stands in a slot without an entry is not
            read.
        indices: `[M, T, slots]`: columns within the tile, ascending; uint8 for tiles of up to 256 columns, else int16.
        nnz_per_tile: `[M, T]`, int16: how many entries the row has in the tile. They stand in its first slots; a
            count above `slots` says that the row overflowed and is to be read from `source`.
        shape: `(..., N)` with M the product of the leading dimensions.
        tile: columns per tile, 1 to 32,767.
        source: `[M, N]`, dense, right for all rows, or a `LinearSource`; None promises that no row overflowed. Rows
            with more entries than an ELL has slots by default are read from it as well.

    Raises:
        ValueError: the tensors' shapes or devices do not fit each other, tile is out of range, or N is not below 2^31;
            on the CPU, an index outside its tile or beyond N, or a count below 0. On a GPU see `ELL`.
        TypeError: indices or counts have another dtype, the values are not floating, or the source has another dtype.

    An operator that reads a TwELL brings its entries together first, as `rowsparse.convert` does: it is a format to
    write.

    Source: Cetin et al., "Sparser, Faster, Lighter Transformer Language Models", sections 3.1 to 3.3.

    >>> rows = pack(torch.tensor([[0.0, 2.0, 0.0, 3.0]]), format="twell", tile=2, slots=1)
    >>> rows.indices.tolist(), rows.nnz_per_tile.tolist()
    ([[[1], [1]]], [[1, 1]])
    """

    COUNTS_NAME: ClassVar[str] = "nnz_per_tile"
    SIZES: ClassVar[tuple[str, ...]] = ("tile", "slots")

    shape: tuple[int, ...]
    tile: int
    values: Tensor = VALUES
    indices: Tensor = INDICES
    nnz_per_tile: Tensor = COUNTS
    source: Tensor | LinearSource | None = SOURCE

    def __init__(
        self,
        values: Tensor,
        indices: Tensor,
        nnz_per_tile: Tensor,
        shape: tuple[int, ...],
        tile: int,
        source: Tensor | LinearSource | None = None,
    ) -> None:
        operator = "rowsparse.TwELL"
        m = _check_parts(operator, shape, values, indices, source, nnz_per_tile=nnz_per_tile)
        check_tile(operator, tile)
        tiles = -(-shape[-1] // tile)
        if values.dim() != 3 or tuple(values.shape[:2]) != (m, tiles):
            raise ValueError(
                f"{operator}: values must have shape [M, T, slots] with M = {m} and T = {tiles} from shape "
                f"{shape} in tiles of {tile}, got {list(values.shape)}."
            )
        checks.shape(operator, "indices", indices, tuple(values.shape), "[M, T, slots]", "like values")
        checks.shape(operator, "nnz_per_tile", nnz_per_tile, (m, tiles), "[M, T]", "like values")
        wanted = {"indices": (indices, tile_index_dtype(tile)), "nnz_per_tile": (nnz_per_tile, torch.int16)}
        _check_dtypes(operator, f" for tiles of {tile}", **wanted)
        _check_source(operator, shape, values, source, indices=indices, nnz_per_tile=nnz_per_tile)
        if _readable(nnz_per_tile):
            _check_counts(operator, self.COUNTS_NAME, nnz_per_tile)
            fits = (nnz_per_tile <= values.shape[2])[..., None]
            held = fits & (torch.arange(values.shape[2], device=values.device) < nnz_per_tile[..., None])
            check_tile_indices(operator, indices, held, tile, shape[-1])
        self._hold(values, indices, _overflowing(nnz_per_tile, values.shape[2]), source, shape=shape, tile=tile)

    @property
    def slots(self) -> int:
        """Slots per row and tile; after `settle` as many as the fullest tile of a row needs."""
        return self._packed.values.shape[2]

    @property
    def nnz_per_row(self) -> Tensor:
        """`[M]`, int32: how many entries each row has."""
        return self.nnz_per_tile.sum(1, dtype=torch.int32)

    def validate(self) -> "TwELL":
        """Looks at the contents, which costs one sync, and returns self.

        Raises:
            ValueError: an index outside its tile or beyond N, columns that do not ascend, a count below 0 or of more
                entries than a tile can have, or an overflowed row without a source.
        """
        operator = "rowsparse.TwELL"
        _, indices, counts, _ = self.packed
        _check_slots(operator, self, max(self.tile, self.slots))
        held = torch.arange(self.slots, device=self.device) < counts[..., None]
        check_tile_indices(operator, indices, held, self.tile, self.num_columns)
        _check_ascending(operator, indices, held)
        return self


Rows = ELL | CSR | TwELL
"""Any row-sparse container."""


def tile_index_dtype(tile: int) -> torch.dtype:
    """What holds a column within a tile."""
    return torch.uint8 if tile <= 256 else torch.int16


def empty_ell(like: Tensor, m: int, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """(values, indices, nnz_per_row) of an ELL, with anything in them, of the dtype and on the device of `like`."""
    values, nnz = like.new_empty(m, capacity), like.new_empty(m, dtype=torch.int32)
    return values, torch.empty_like(values, dtype=torch.int32), nnz


def column_dtype(n: int) -> torch.dtype:
    """Of columns in a list that a block keeps in training: 16 bits, without a sign, where these hold N of them."""
    return torch.int16 if n <= 65536 else torch.int32


def empty_twell(like: Tensor, m: int, n: int, tile: int, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """(values, indices, nnz_per_tile) of a TwELL, likewise."""
    tiles = (n + tile - 1) // tile
    values, counts = like.new_empty(m, tiles, slots), like.new_empty(m, tiles, dtype=torch.int16)
    return values, torch.empty_like(values, dtype=tile_index_dtype(tile)), counts


def offsets_of(counts: Tensor) -> Tensor:
    """Where lists of so many entries begin, one behind the other, and where the last ends: int64 `[M + 1]`."""
    offsets = torch.zeros(counts.shape[0] + 1, dtype=torch.int64, device=counts.device)
    torch.cumsum(counts, 0, dtype=torch.int64, out=offsets[1:])
    return offsets


def check_tile(operator: str, tile: int) -> None:
    checks.positive(operator, "tile", tile, "It is the number of columns per tile.")
    if tile > 32767:
        raise ValueError(f"{operator}: tile must be at most 32767, got {tile}.")


def threshold_dtype(dtype: torch.dtype) -> torch.dtype:
    """What thresholds and statistics are kept in beside weights of a dtype."""
    return torch.promote_types(dtype, torch.float32)


def _check_parts(operator: str, shape: Any, values: Any, indices: Any, source: Any, **counts: Tensor) -> int:
    """M, once the parts are what they should be."""
    checks.tensors(operator, indices=indices, **counts)
    if not isinstance(source, LinearSource):
        checks.tensors(operator, source=source)
    checks.floating(operator, values=values)
    if not isinstance(shape, tuple) or not shape or not all(isinstance(size, int | torch.SymInt) for size in shape):
        raise ValueError(f"{operator}: shape must be a tuple (..., N) of ints, got {shape!r}.")
    checks.columns(operator, "shape", shape[-1])
    return math.prod(shape[:-1])


def _check_dtypes(operator: str, why: str, **given: tuple[Tensor, torch.dtype]) -> None:
    for name, (tensor, dtype) in given.items():
        if tensor.dtype is not dtype:
            raise TypeError(
                f"{operator}: {name} must be {checks.name_of(dtype)}{why}, got {checks.name_of(tensor.dtype)}. "
                f"Convert it with {name}.to({dtype})."
            )


def _check_source(
    operator: str, shape: tuple[int, ...], values: Tensor, source: Tensor | LinearSource | None, **others: Tensor
) -> None:
    checks.same_device(operator, "values", values.device, **others, source=source)  # type: ignore[arg-type]
    if source is not None:
        expected = (math.prod(shape[:-1]), shape[-1])
        checks.shape(operator, "source", source, expected, "[M, N]", f"for shape {shape}")  # type: ignore[arg-type]
        if isinstance(source, Tensor) and source.dtype is not values.dtype:
            raise TypeError(
                f"{operator}: source must be {checks.name_of(values.dtype)} like values, "
                f"got {checks.name_of(source.dtype)}. Convert it with source.to(values.dtype)."
            )


def _check_slots(operator: str, rows: ELL | TwELL, most: int) -> None:
    """Raises where a list has fewer than 0 entries, or more than `most` or, without a source, than slots."""
    values, _, counts, source = rows.packed
    name = rows.COUNTS_NAME
    _check_counts(operator, name, counts)
    if source is None and bool(rows.overflowed):
        raise ValueError(
            f"{operator}: {name} must be at most {rows.SIZES[-1]} = {values.shape[-1]} without a source, "
            f"got {int(counts.max())}. Give the source or more slots."
        )
    if counts.numel() and int(counts.max()) > most:
        raise ValueError(f"{operator}: {name} must be at most {most}, the entries that fit, got {int(counts.max())}.")


def _check_counts(operator: str, name: str, counts: Tensor) -> None:
    if bool((counts < 0).any()):
        raise ValueError(f"{operator}: {name} must be at least 0, got {int(counts.min())}.")


def _check_offsets(operator: str, offsets: Tensor) -> None:
    if int(offsets[0]) != 0 or bool((offsets.diff() < 0).any()):
        raise ValueError(f"{operator}: row_offsets must start at 0 and never decrease.")


def _held_by_offsets(offsets: Tensor, max_nnz: int) -> Tensor:
    """Which slots belong to a row that fits the buffer."""
    return torch.arange(max_nnz, device=offsets.device) < torch.where(offsets > max_nnz, 0, offsets).max()


def _readable(counts: Tensor) -> bool:
    """Whether to look at numbers waits for nothing: a plain tensor of the CPU outside of a compiler and a transform."""
    return type(counts) is Tensor and checks.host_computes(counts) and not _wrapped(counts)


def _on_gpu(counts: Tensor) -> bool:
    return type(counts) is Tensor and counts.is_cuda and not torch.compiler.is_compiling() and not _wrapped(counts)


def _wrapped(tensor: Tensor) -> bool:
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def _overflowing(counts: Tensor, slots: int) -> Tensor:
    """Counts of which no operator reads one below 0 on a GPU: such a list overflows."""
    return torch.where(counts < 0, slots + 1, counts).to(counts.dtype) if _on_gpu(counts) else counts


def ascending(offsets: Tensor, max_nnz: int) -> Tensor:
    """Row offsets with which no kernel leaves the buffers: from the first one on that does not start at 0 or that
    decreases, rows end behind the buffers, as rows do that overflowed."""
    before = torch.cat([offsets.new_zeros(1), offsets[:-1]])
    wrong = offsets < before
    wrong[0] = False
    wrong[1:2] |= offsets[:1] != 0
    highest = offsets.cummax(0).values.clamp(min=max_nnz + 1)
    kept = torch.where(wrong.cummax(0).values, highest, offsets)
    kept[0] = 0
    return kept


def _check_ascending(operator: str, indices: Tensor, held: Tensor, cell: Tensor | None = None) -> None:
    """Raises where columns of a cell descend: those along the last dimension, or with the same number in `cell`.
    Holes count for nothing."""
    held = held & (indices >= 0)
    # The largest column so far, which the next must not go below.
    columns = torch.where(held, indices.long(), -1)
    if cell is not None:
        # One cell after another, each far above the one before.
        columns = torch.where(held, columns + cell * (checks.MAX_COLUMNS + 1), -1)
    if columns.numel() and bool((held & (columns < columns.cummax(-1).values)).any()):
        raise ValueError(f"{operator}: indices must ascend within a row. Sort them, with their values.")


def check_indices(operator: str, indices: Tensor, n: int) -> None:
    """Raises where a column is outside [0, n) and not -1. Waits for the device."""
    if indices.numel() == 0:
        return
    low, high = (int(bound) for bound in indices.aminmax())
    if low < -1 or high >= n:
        raise ValueError(
            f"{operator}: indices must lie in [0, N) with N = {n}, or be -1 for no entry, got {low} to {high}."
        )


def check_tile_indices(operator: str, indices: Tensor, held: Tensor, tile: int, n: int) -> None:
    """Raises where an entry, of which `held` has the slots, is outside its tile or beyond N. Waits for the device."""
    first = torch.arange(indices.shape[1], device=indices.device)[:, None] * tile
    wrong = held & ((indices < 0) | (indices >= (n - first).clamp(max=tile)))
    if bool(wrong.any()):
        raise ValueError(
            f"{operator}: indices must lie in [0, tile) with tile = {tile}, and below N = {n} in the last tile, got "
            f"{int(indices[wrong][0])}."
        )


def _register(cls: type) -> None:
    # As a pytree node a container can enter and leave a compiled region; its leaves are the buffers as they are.
    sizes = [f.name for f in fields(cls) if f.name in ("shape", "tile", "squared")]
    names = [f.name for f in fields(cls) if f.name not in sizes]

    def flatten(rows: Any) -> tuple[list[Any], tuple[Any, ...]]:
        if isinstance(rows, RowSparse):
            held = rows.packed._asdict()
            held[rows.COUNTS_NAME] = held.pop("counts")
            return [held[name] for name in names], tuple(getattr(rows, size) for size in sizes)
        return [getattr(rows, name) for name in names], tuple(getattr(rows, size) for size in sizes)

    def unflatten(tensors: Any, given: Any) -> Any:
        parts = dict(zip(names, tensors, strict=True)) | dict(zip(sizes, given, strict=True))
        if not issubclass(cls, RowSparse):
            return cls(**parts)
        # What comes back has been looked at when it was made.
        return unchecked(cls, counts=parts.pop(cls.COUNTS_NAME), **parts)

    _pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"gossamer.rowsparse.{cls.__name__}",
    )


for _cls in (LinearSource, ELL, CSR, TwELL):
    _register(_cls)
# What `torch.load` may make with its default, weights_only=True.
torch.serialization.add_safe_globals([ELL, CSR, TwELL, Packed])
