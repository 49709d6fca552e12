"""Containers for matrices with few stored entries per row.

All hold what they were packed from as `[M, N]`, remember its leading dimensions in `shape`, and own everything an
operator needs. An *entry* is a stored slot: explicit zeros are legal, repeated indices add up, and an index of -1
means "no entry". A row that holds more entries than there are slots has *overflowed*: it stays exact, because the
container keeps the `source` of such rows, and every operator reads it there, without asking the host. The source is
the dense matrix, or a `LinearSource`: what a linear layer computed it from.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from gossamer._core import checks


@dataclass(frozen=True, eq=False)
class LinearSource:
    """The rows max(x @ weight.T + bias, 0), or 0 up to a threshold, or squared, by what they are computed from.

    The source of a container that was packed while the product was computed: the dense matrix never existed. Operators
    compute the rows that overflowed again, and no others.

    Args:
        x: `[M, K]`, float, any strides.
        weight: `[N, K]`, any strides; the dtype and device of x.
        bias: `[N]`, added in float32, or None.
        threshold: `[N]`, compared in float32, or None for 0. z is kept where not z <= max(threshold, 0).
        squared: whether what is kept is z squared.

    Raises:
        ValueError: the tensors' shapes or devices do not fit each other.
        TypeError: a tensor is not floating, or x and weight have two dtypes.

    Source: this package's own; the seed on sparse feed-forward blocks keeps such rows in a dense backup.

    >>> LinearSource(torch.ones(2, 3), torch.ones(5, 3)).requires_grad
    False
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    threshold: Tensor | None = None
    squared: bool = False

    def __post_init__(self) -> None:
        operator = "rowsparse.LinearSource"
        optional = {"bias": self.bias, "threshold": self.threshold}
        given = {name: tensor for name, tensor in optional.items() if tensor is not None}
        checks.floating(operator, x=self.x, weight=self.weight, **given)
        if self.x.dim() != 2 or self.weight.dim() != 2 or self.x.shape[1] != self.weight.shape[1]:
            raise ValueError(
                f"{operator}: x and weight must have shapes [M, K] and [N, K], got {list(self.x.shape)} and "
                f"{list(self.weight.shape)}."
            )
        for name, tensor in given.items():
            checks.shape(operator, name, tensor, (self.weight.shape[0],), "[N]", "like weight")
        checks.same_device(operator, "weight", self.weight.device, x=self.x, **given)
        if self.x.dtype is not self.dtype:
            raise TypeError(
                f"{operator}: x must be {checks.name_of(self.dtype)} like weight, got {checks.name_of(self.x.dtype)}. "
                "Convert it with x.to(weight.dtype)."
            )

    @property
    def shape(self) -> tuple[int, int]:
        """(M, N)."""
        return self.x.shape[0], self.weight.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def requires_grad(self) -> bool:
        return any(t is not None and t.requires_grad for t in (self.x, self.weight, self.bias))


class _RowSparse:
    """What the formats share."""

    values: Tensor
    indices: Tensor
    shape: tuple[int, ...]
    source: "Tensor | LinearSource | None"

    @property
    def num_rows(self) -> int:
        """M: the product of the leading dimensions."""
        return math.prod(self.shape[:-1])

    @property
    def num_columns(self) -> int:
        """N: the size of the last dimension."""
        return self.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def requires_grad(self) -> bool:
        return self.values.requires_grad or (self.source is not None and self.source.requires_grad)

    def detach(self) -> "Any":
        """The same entries, cut from the autograd graph."""
        return _map(self, lambda tensor: tensor.detach())

    def to(self, *args: Any, **kwargs: Any) -> "Any":
        """As `torch.Tensor.to`: a dtype converts values and a dense source, a device moves every tensor.

        A `LinearSource` stays in its dtype: in another it would keep other entries. What it gives is converted.
        """
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=non_blocking)

        def convert(tensor: Tensor) -> Tensor:
            return tensor.to(device, dtype if tensor.is_floating_point() else None, non_blocking)

        if not isinstance(self.source, LinearSource):
            return _map(self, convert)
        rest = _map(replace(self, source=None), convert)  # type: ignore[type-var]
        return replace(rest, source=_map(self.source, move))

    def to_dense(self) -> Tensor:
        """The dense `[..., N]` tensor; repeated indices are added up."""
        from gossamer.rowsparse.pack import unpack

        return unpack(self)  # type: ignore[arg-type]

    def _describe(self, size: str) -> str:
        overflow = "none possible" if self.source is None else "kept exact through source"
        return (
            f"{type(self).__name__}(shape={self.shape}, {size}, dtype={checks.name_of(self.dtype)}, "
            f"device={self.device}, overflow={overflow})"
        )


@dataclass(frozen=True, eq=False, repr=False)
class ELL(_RowSparse):
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
        ValueError: the tensors' shapes or devices do not fit each other, or N is not below 2^31.
        TypeError: the indices or counts are not int32, the values not floating, or the source has another dtype.

    Indices outside [0, N) raise on the CPU. On the GPU looking would cost a sync: they make their row NaN instead;
    `validate()` looks and raises.

    >>> indices, nnz = torch.tensor([[3], [0]], dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    >>> rows = ELL(torch.ones(2, 1), indices, nnz, (2, 4))
    >>> rows.to_dense()[0].tolist()
    [0.0, 0.0, 0.0, 1.0]
    """

    values: Tensor
    indices: Tensor
    nnz_per_row: Tensor
    shape: tuple[int, ...]
    source: Tensor | LinearSource | None = None

    def __post_init__(self) -> None:
        _check_parts("rowsparse.ELL", self, nnz_per_row=self.nnz_per_row)
        m = self.num_rows
        if self.values.dim() != 2 or self.values.shape[0] != m:
            raise ValueError(
                f"rowsparse.ELL: values must have shape [M, capacity] with M = {m} from shape {self.shape}, "
                f"got {list(self.values.shape)}."
            )
        checks.shape("rowsparse.ELL", "indices", self.indices, tuple(self.values.shape), "[M, capacity]", "like values")
        checks.shape("rowsparse.ELL", "nnz_per_row", self.nnz_per_row, (m,), "[M]", "like values")
        for name in ("indices", "nnz_per_row"):
            if getattr(self, name).dtype is not torch.int32:
                raise TypeError(
                    f"rowsparse.ELL: {name} must be int32, got {checks.name_of(getattr(self, name).dtype)}. "
                    f"Convert it with {name}.int()."
                )
        _check_source("rowsparse.ELL", self)

    @property
    def capacity(self) -> int:
        """Slots per row."""
        return self.values.shape[1]

    @property
    def overflowed(self) -> Tensor:
        """Bool `[]` on the device: whether any row has more entries than slots."""
        return (self.nnz_per_row > self.capacity).any()

    def validate(self) -> "ELL":
        """Looks at the contents, which costs one sync, and returns self.

        Raises:
            ValueError: an index outside [-1, N), a count below 0, or an overflowed row without a source.
        """
        check_indices("rowsparse.ELL", self.indices, self.num_columns)
        if bool((self.nnz_per_row < 0).any()):
            raise ValueError(f"rowsparse.ELL: nnz_per_row must be at least 0, got {int(self.nnz_per_row.min())}.")
        if self.source is None and bool(self.overflowed):
            raise ValueError(
                f"rowsparse.ELL: nnz_per_row must be at most capacity = {self.capacity} without a source, "
                f"got {int(self.nnz_per_row.max())}. Give the dense source or more slots."
            )
        return self

    def __repr__(self) -> str:
        return self._describe(f"capacity={self.capacity}")


@dataclass(frozen=True, eq=False, repr=False)
class CSR(_RowSparse):
    """Compressed sparse rows.

    Args:
        row_offsets: `[M + 1]`, int64: row r holds the entries `row_offsets[r]` to `row_offsets[r + 1]`. Offsets are
            true counts: a row that ends beyond the buffer overflowed and is to be read from `source`.
        indices: `[max_nnz]`, int32 columns, ascending in each row; entries past `row_offsets[-1]` are padding.
        values: `[max_nnz]`, float.
        shape: `(..., N)` with M the product of the leading dimensions.
        source: `[M, N]`, dense, right at least for the overflowed rows; None promises that no row overflowed.

    Raises:
        ValueError: the tensors' shapes or devices do not fit each other, or N is not below 2^31.
        TypeError: row_offsets is not int64, indices is not int32, the values are not floating, or the source has
            another dtype.

    >>> rows = CSR(torch.tensor([0, 1, 1]), torch.tensor([2], dtype=torch.int32), torch.ones(1), (2, 3))
    >>> rows.to_dense().tolist()
    [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    """

    row_offsets: Tensor
    indices: Tensor
    values: Tensor
    shape: tuple[int, ...]
    source: Tensor | None = None

    def __post_init__(self) -> None:
        _check_parts("rowsparse.CSR", self, row_offsets=self.row_offsets)
        checks.tensors("rowsparse.CSR", source=self.source)
        checks.shape(
            "rowsparse.CSR", "row_offsets", self.row_offsets, (self.num_rows + 1,), "[M + 1]", f"for shape {self.shape}"
        )
        if self.values.dim() != 1:
            raise ValueError(f"rowsparse.CSR: values must have shape [nnz], got {list(self.values.shape)}.")
        checks.shape("rowsparse.CSR", "indices", self.indices, tuple(self.values.shape), "[nnz]", "like values")
        for name, dtype in (("row_offsets", torch.int64), ("indices", torch.int32)):
            if getattr(self, name).dtype is not dtype:
                raise TypeError(
                    f"rowsparse.CSR: {name} must be {checks.name_of(dtype)}, "
                    f"got {checks.name_of(getattr(self, name).dtype)}. Convert it with {name}.to({dtype})."
                )
        _check_source("rowsparse.CSR", self)

    @property
    def max_nnz(self) -> int:
        """Length of the buffers; the true count is `row_offsets[-1]`, on the device."""
        return self.values.shape[0]

    @property
    def nnz_per_row(self) -> Tensor:
        """`[M]`, int64: how many entries each row has."""
        return self.row_offsets.diff()

    @property
    def overflowed(self) -> Tensor:
        """Bool `[]` on the device: whether any row ends beyond the buffer."""
        return self.row_offsets[-1] > self.max_nnz

    def validate(self) -> "CSR":
        """Looks at the contents, which costs one sync, and returns self.

        Raises:
            ValueError: offsets that do not start at 0 or that decrease, an index outside [-1, N), or an overflowed
                row without a source.
        """
        nnz = int(self.row_offsets[-1])
        if int(self.row_offsets[0]) != 0 or bool((self.row_offsets.diff() < 0).any()):
            raise ValueError("rowsparse.CSR: row_offsets must start at 0 and never decrease.")
        check_indices("rowsparse.CSR", self.indices[:nnz], self.num_columns)
        if self.source is None and nnz > self.max_nnz:
            raise ValueError(
                f"rowsparse.CSR: row_offsets[-1] must be at most len(values) = {self.max_nnz} without a source, "
                f"got {nnz}. Give the dense source or longer buffers."
            )
        return self

    def __repr__(self) -> str:
        return self._describe(f"max_nnz={self.max_nnz}")


@dataclass(frozen=True, eq=False, repr=False)
class TwELL(_RowSparse):
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
        ValueError: the tensors' shapes or devices do not fit each other, tile is out of range, or N is not below 2^31.
        TypeError: indices or counts have another dtype, the values are not floating, or the source has another dtype.

    An operator that reads a TwELL brings its entries together first, as `rowsparse.convert` does: it is a format to
    write.

    Source: the seed on sparse feed-forward blocks, sections 3.1 to 3.3.

    >>> rows = pack(torch.tensor([[0.0, 2.0, 0.0, 3.0]]), format="twell", tile=2, slots=1)
    >>> rows.indices.tolist(), rows.nnz_per_tile.tolist()
    ([[[1], [1]]], [[1, 1]])
    """

    values: Tensor
    indices: Tensor
    nnz_per_tile: Tensor
    shape: tuple[int, ...]
    tile: int
    source: Tensor | LinearSource | None = None

    def __post_init__(self) -> None:
        operator = "rowsparse.TwELL"
        _check_parts(operator, self, nnz_per_tile=self.nnz_per_tile)
        check_tile(operator, self.tile)
        m, tiles = self.num_rows, -(-self.num_columns // self.tile)
        if self.values.dim() != 3 or tuple(self.values.shape[:2]) != (m, tiles):
            raise ValueError(
                f"{operator}: values must have shape [M, T, slots] with M = {m} and T = {tiles} from shape "
                f"{self.shape} in tiles of {self.tile}, got {list(self.values.shape)}."
            )
        checks.shape(operator, "indices", self.indices, tuple(self.values.shape), "[M, T, slots]", "like values")
        checks.shape(operator, "nnz_per_tile", self.nnz_per_tile, (m, tiles), "[M, T]", "like values")
        for name, dtype in (("indices", tile_index_dtype(self.tile)), ("nnz_per_tile", torch.int16)):
            if getattr(self, name).dtype is not dtype:
                raise TypeError(
                    f"{operator}: {name} must be {checks.name_of(dtype)} for tiles of {self.tile}, "
                    f"got {checks.name_of(getattr(self, name).dtype)}. Convert it with {name}.to({dtype})."
                )
        _check_source(operator, self)

    @property
    def slots(self) -> int:
        """Slots per row and tile."""
        return self.values.shape[2]

    @property
    def nnz_per_row(self) -> Tensor:
        """`[M]`, int32: how many entries each row has."""
        return self.nnz_per_tile.sum(1, dtype=torch.int32)

    @property
    def overflowed(self) -> Tensor:
        """Bool `[]` on the device: whether any row has more entries in a tile than slots."""
        return (self.nnz_per_tile > self.slots).any()

    def validate(self) -> "TwELL":
        """Looks at the contents, which costs one sync, and returns self.

        Raises:
            ValueError: an index outside its tile or beyond N, a count below 0, or an overflowed row without a source.
        """
        operator = "rowsparse.TwELL"
        if bool((self.nnz_per_tile < 0).any()):
            raise ValueError(f"{operator}: nnz_per_tile must be at least 0, got {int(self.nnz_per_tile.min())}.")
        if self.source is None and bool(self.overflowed):
            raise ValueError(
                f"{operator}: nnz_per_tile must be at most slots = {self.slots} without a source, "
                f"got {int(self.nnz_per_tile.max())}. Give the source or more slots."
            )
        held = torch.arange(self.slots, device=self.device) < self.nnz_per_tile[..., None]
        first = torch.arange(self.values.shape[1], device=self.device)[:, None] * self.tile
        width = (self.num_columns - first).clamp(max=self.tile)
        wrong = held & ((self.indices < 0) | (self.indices >= width))
        if bool(wrong.any()):
            raise ValueError(
                f"{operator}: indices must lie in [0, tile) with tile = {self.tile}, and below N = "
                f"{self.num_columns} in the last tile, got {int(self.indices[wrong][0])}."
            )
        return self

    def __repr__(self) -> str:
        return self._describe(f"tile={self.tile}, slots={self.slots}")


Rows = ELL | CSR | TwELL
"""Any row-sparse container."""


def tile_index_dtype(tile: int) -> torch.dtype:
    """What holds a column within a tile."""
    return torch.uint8 if tile <= 256 else torch.int16


def check_tile(operator: str, tile: int) -> None:
    checks.positive(operator, "tile", tile, "It is the number of columns per tile.")
    if tile > 32767:
        raise ValueError(f"{operator}: tile must be at most 32767, got {tile}.")


def threshold_dtype(dtype: torch.dtype) -> torch.dtype:
    """What thresholds and statistics are kept in beside weights of a dtype."""
    return torch.promote_types(dtype, torch.float32)


def made(cls: type, **parts: Any) -> Any:
    """A container or source of what an operator has returned: its parts fit, and to look again would cost host time."""
    if torch.compiler.is_compiling():
        return cls(**parts)
    found: Any = object.__new__(cls)
    found.__dict__.update(parts)
    return found


def _map(rows: Any, function: Any) -> Any:
    """The same with a function of each tensor."""

    def apply(value: Any) -> Any:
        if isinstance(value, LinearSource):
            return _map(value, function)
        return function(value) if isinstance(value, Tensor) else value

    return replace(rows, **{f.name: apply(getattr(rows, f.name)) for f in fields(rows)})


def _check_parts(operator: str, rows: Any, **counts: Tensor) -> None:
    checks.tensors(operator, indices=rows.indices, **counts)
    if not isinstance(rows.source, LinearSource):
        checks.tensors(operator, source=rows.source)
    checks.floating(operator, values=rows.values)
    shape = rows.shape
    if not isinstance(shape, tuple) or not shape or not all(isinstance(size, int | torch.SymInt) for size in shape):
        raise ValueError(f"{operator}: shape must be a tuple (..., N) of ints, got {shape!r}.")
    checks.columns(operator, "shape", shape[-1])


def _check_source(operator: str, rows: Any) -> None:
    tensors = {f.name: getattr(rows, f.name) for f in fields(rows) if f.name not in ("shape", "values", "tile")}
    checks.same_device(operator, "values", rows.values.device, **tensors)
    if rows.source is not None:
        expected = (rows.num_rows, rows.num_columns)
        checks.shape(operator, "source", rows.source, expected, "[M, N]", f"for shape {rows.shape}")
        if isinstance(rows.source, Tensor) and rows.source.dtype is not rows.values.dtype:
            raise TypeError(
                f"{operator}: source must be {checks.name_of(rows.values.dtype)} like values, "
                f"got {checks.name_of(rows.source.dtype)}. Convert it with source.to(values.dtype)."
            )


def check_indices(operator: str, indices: Tensor, n: int) -> None:
    """Raises where a column is outside [0, n) and not -1. Waits for the device."""
    if indices.numel() == 0:
        return
    low, high = (int(bound) for bound in indices.aminmax())
    if low < -1 or high >= n:
        raise ValueError(
            f"{operator}: indices must lie in [0, N) with N = {n}, or be -1 for no entry, got {low} to {high}."
        )


def _register(cls: type) -> None:
    # As a pytree node a container can enter and leave a compiled region.
    sizes = [f.name for f in fields(cls) if f.name in ("shape", "tile", "squared")]
    names = [f.name for f in fields(cls) if f.name not in sizes]
    _pytree.register_pytree_node(
        cls,
        lambda rows: ([getattr(rows, name) for name in names], tuple(getattr(rows, size) for size in sizes)),
        lambda tensors, given: cls(**dict(zip(names, tensors, strict=True)), **dict(zip(sizes, given, strict=True))),
        serialized_type_name=f"gossamer.rowsparse.{cls.__name__}",
    )


for _cls in (LinearSource, ELL, CSR, TwELL):
    _register(_cls)
