"""What the row-sparse containers share: their buffers, their source, and how looking at entries settles them."""

import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, fields
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from gossamer._core import checks
from gossamer._core.versions import version_of


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

    Source: this package's own; "Sparser, Faster, Lighter Transformer Language Models" keeps a dense backup of them.

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


class Packed(NamedTuple):
    """The buffers of a container as operators take them: incomplete in rows that overflowed, which `source` restores.

    `counts` is `nnz_per_row` of an `ELL`, `row_offsets` of a `CSR`, `nnz_per_tile` of a `TwELL`. What stands in a slot
    without an entry may be anything.
    """

    values: Tensor
    indices: Tensor
    counts: Tensor
    source: Any


def _settling(part: str) -> Any:
    return property(lambda rows: getattr(rows.settle().packed, part))


# The fields of a container: its buffers with every entry in them, and what is left of its source.
VALUES, INDICES, COUNTS = _settling("values"), _settling("indices"), _settling("counts")
SOURCE: Any = property(lambda rows: rows._packed.source)


Self = TypeVar("Self", bound="RowSparse")


class RowSparse:
    """What the formats share.

    They are dataclasses, frozen, whose fields are views of one record, `_packed`. Frozen by `__setattr__` and not by
    the decorator: `torch.compile` would look at every field of a dataclass that says it is frozen, and settle it.
    """

    COUNTS_NAME: ClassVar[str]
    SIZES: ClassVar[tuple[str, ...]]
    """What the format calls its counts, and its sizes beside `shape`, of which the last is that of a list."""

    shape: tuple[int, ...]
    source: Any
    _packed: Packed
    _watched: tuple[tuple[Tensor, int], ...]

    def _hold(
        self, values: Tensor, indices: Tensor, counts: Tensor, source: Tensor | LinearSource | None, **sizes: Any
    ) -> None:
        for name, value in {**sizes, "_packed": Packed(values, indices, counts, source)}.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_watched", _watched(source))

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}: dataclasses.replace makes another container.")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}.")

    @property
    def packed(self) -> Packed:
        """(values, indices, counts, source) as they are, without waiting for the device: see `Packed`.

        Raises:
            RuntimeError: a tensor of the source has been changed in place since the container was made. Nothing
                counts changes under `torch.compile`, of inference tensors, and by replays of a CUDA graph.
        """
        if self._watched and not torch.compiler.is_compiling():
            for tensor, version in self._watched:
                if tensor._version != version:
                    raise RuntimeError(
                        f"rowsparse.{type(self).__name__}: a tensor that rows which overflowed are read from has been "
                        "changed in place since they were packed. Call rows.settle() before the change, which takes "
                        "those entries over, or pack a copy."
                    )
        return self._packed

    def settle(self: Self) -> Self:
        """Takes every entry into the buffers and forgets the source, in place; returns self.

        Waits for the device, once where no row overflowed. Then the buffers stay the same tensors; otherwise they are
        new, wide enough for the fullest row. Gradients go on reaching what was packed. To look at `values`, `indices`
        or the counts of a container with a source settles it. Without a source there is nothing to do, nor to wait for.

        Raises:
            NotImplementedError: under CUDA-graph capture or `torch.compile`.
            RuntimeError: the source has been changed in place since.

        >>> rows = pack(torch.ones(1, 5), capacity=2)
        >>> rows.capacity, rows.settle().capacity
        (2, 5)
        """
        if self._packed.source is not None:
            from gossamer.rowsparse.settle import settled

            values, indices, counts = settled(self)
            self._hold(values, indices, counts, None)
        return self

    @property
    def num_rows(self) -> int:
        """M: the product of the leading dimensions."""
        return math.prod(self.shape[:-1])

    @property
    def num_columns(self) -> int:
        """N: the size of the last dimension."""
        return self.shape[-1]

    @property
    def overflowed(self) -> Tensor:
        """Bool `[]` on the device: whether any row has more entries than there are slots for."""
        return (self._packed.counts > self._packed.values.shape[-1]).any()

    @property
    def dtype(self) -> torch.dtype:
        return self._packed.values.dtype

    @property
    def device(self) -> torch.device:
        return self._packed.values.device

    @property
    def requires_grad(self) -> bool:
        values, _, _, source = self._packed
        return values.requires_grad or (source is not None and source.requires_grad)

    def detach(self: Self) -> Self:
        """The same entries, cut from the autograd graph."""
        return self._map_tensors(lambda tensor: tensor.detach())

    def clone(self: Self) -> Self:
        """A copy of everything, of the source too; no sync."""
        return self._map_tensors(lambda tensor: tensor.clone())

    def to(self: Self, *args: Any, **kwargs: Any) -> Self:
        """As `torch.Tensor.to`: a dtype converts values and a dense source, another device settles and moves all.

        A `LinearSource` stays in its dtype: in another it would keep other entries. What it gives is converted.
        """
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        # As tensors have it, "cuda" is whichever device is current.
        here = self.device
        if device is not None and device != here and (device.type != here.type or device.index is not None):
            self.settle()

        def convert(tensor: Tensor) -> Tensor:
            return tensor.to(device, dtype if tensor.is_floating_point() else None, non_blocking)

        values, indices, counts, source = self.packed
        kept = convert(source) if isinstance(source, Tensor) else source
        return self.rebuilt(convert(values), convert(indices), convert(counts), kept)

    def cpu(self: Self) -> Self:
        """The same entries on the CPU; on another device the container settles first."""
        return self.to("cpu")

    def to_dense(self) -> Tensor:
        """The dense `[..., N]` tensor; repeated indices are added up."""
        from gossamer.rowsparse.pack import unpack

        return unpack(self)  # type: ignore[arg-type]

    def __matmul__(self, weight: Tensor) -> Tensor:
        """`rowsparse.matmul(rows, weight)`; under `torch.compile`, which takes `@` for one of tensors, write that."""
        from gossamer.rowsparse.matmul import matmul

        return matmul(self, weight) if isinstance(weight, Tensor) else NotImplemented  # type: ignore[arg-type]

    def __getitem__(self: Self, key: Any) -> Self:
        """Rows by their leading dimensions, as of a tensor: `rows[3]`, `rows[2:5]`, `rows[mask]`. Columns stay whole.

        No sync, and rows that overflowed stay exact; but a `CSR` settles where it is indexed by integers of a tensor or
        list. As with `reshape`, whether an edit of one container shows in the other is not promised.

        Raises:
            IndexError: more indices than leading dimensions, or one out of range.
        """
        from gossamer.rowsparse.select import select

        return select(self, key)

    def reshape(self: Self, *shape: Any) -> Self:
        """Other leading dimensions, the same N last: `rows.reshape(-1, N)`. No sync; buffers and source are shared.

        Raises:
            ValueError: the sizes do not fit, or the last is not N.
        """
        wanted = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        leading, last = tuple(wanted[:-1]), wanted[-1] if wanted else None
        # Lists, which `torch.compile` can follow where it cannot follow a generator or `min` with a default.
        known = math.prod([size for size in leading if size != -1])
        if leading.count(-1) == 1 and known and self.num_rows % known == 0:
            leading = tuple(self.num_rows // known if size == -1 else size for size in leading)
        if last != self.num_columns or math.prod(leading) != self.num_rows or any([size < 0 for size in leading]):
            raise ValueError(
                f"rowsparse.{type(self).__name__}: reshape changes leading dimensions: the last size must stay N = "
                f"{self.num_columns} and the others hold M = {self.num_rows} rows, got {tuple(wanted)}."
            )
        return self.rebuilt(*self.packed, shape=(*leading, last))

    def map(self: Self, function: Callable[[Tensor], Tensor]) -> Self:
        """A function of each value, elementwise, that leaves 0 at 0: `rows.map(lambda v: 2 * v)`. Settles first.

        Args:
            function: takes values of any shape and returns as many, floating, differentiable where that is wanted.

        Raises:
            ValueError: function(0) is not 0, which entries alone could not hold, or the shape is another.
            TypeError: what it returns is no floating tensor.

        >>> pack(torch.tensor([[0.0, 3.0]])).map(torch.square).to_dense().tolist()
        [[0.0, 9.0]]
        """
        from gossamer.rowsparse.edit import map_values

        return map_values(self, function)

    def where(self: Self, mask: Tensor) -> Self:
        """The values where a mask holds, 0 elsewhere; entries stay where they are. Settles first.

        Args:
            mask: bool, to be broadcast to `shape`: `[N]` chooses columns, `[..., 1]` rows. What is to be chosen by
                value `map` does.

        Raises:
            TypeError: mask is not a bool tensor.
            ValueError: its shape or device does not fit.

        >>> pack(torch.tensor([[2.0, 3.0]])).where(torch.tensor([True, False])).to_dense().tolist()
        [[2.0, 0.0]]
        """
        from gossamer.rowsparse.edit import where

        return where(self, mask)

    def ablate(self: Self, columns: Any) -> Self:
        """Sets columns to 0, for instance latents whose part one wants to see. Settles first; differentiable.

        Args:
            columns: an int, a list of them, or an integer tensor, in [0, N).

        Raises:
            TypeError: they are not whole numbers.
            ValueError: one is out of range.

        >>> pack(torch.tensor([[2.0, 3.0]])).ablate(1).to_dense().tolist()
        [[2.0, 0.0]]
        """
        from gossamer.rowsparse.edit import ablate

        return ablate(self, columns)

    def to_torch_sparse(self, layout: torch.layout = torch.sparse_csr) -> Tensor:
        """The entries as a sparse tensor of PyTorch: `[M, N]` in CSR, `shape` in COO. Settles first; differentiable.

        Repeated columns are added up, and slots without an entry left out.

        Raises:
            ValueError: another layout.

        >>> pack(torch.eye(2)).to_torch_sparse().crow_indices().tolist()
        [0, 1, 2]
        """
        from gossamer.rowsparse.convert import to_torch_sparse

        return to_torch_sparse(self, layout)  # type: ignore[arg-type]

    def __getstate__(self) -> dict[str, Any]:
        # Pickled, copied and sent to another process as what it holds, not with all that it was made from.
        self.settle()
        return dict(self.__dict__)

    def _map_tensors(self: Self, function: Callable[[Tensor], Tensor]) -> Self:
        values, indices, counts, source = self.packed
        if isinstance(source, LinearSource):
            given = {f.name: getattr(source, f.name) for f in fields(source)}
            source = unchecked_source(
                **{name: function(t) if isinstance(t, Tensor) else t for name, t in given.items()}
            )
        elif source is not None:
            source = function(source)
        return self.rebuilt(function(values), function(indices), function(counts), source)

    def rebuilt(
        self: Self,
        values: Tensor,
        indices: Tensor,
        counts: Tensor,
        source: Tensor | LinearSource | None,
        shape: tuple[int, ...] | None = None,
    ) -> Self:
        """A container of the same kind with these buffers."""
        given = {"tile": self.__dict__["tile"]} if "tile" in self.__dict__ else {}
        return unchecked(type(self), values, indices, counts, self.shape if shape is None else shape, source, **given)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={getattr(self, name)}" for name in ("shape", *self.SIZES))
        overflow = "none possible" if self.source is None else "kept exact through source"
        return (
            f"{type(self).__name__}({sizes}, dtype={checks.name_of(self.dtype)}, device={self.device}, "
            f"overflow={overflow})"
        )


def _watched(source: "Tensor | LinearSource | None") -> tuple[tuple[Tensor, int], ...]:
    """Each tensor of a source beside how often it has been changed in place; () where nobody counts."""
    if source is None or torch.compiler.is_compiling():
        return ()
    tensors = (source,) if isinstance(source, Tensor) else (source.x, source.weight, source.bias, source.threshold)
    return tuple([(t, version_of(t)) for t in tensors if t is not None and not t.is_inference()])


def unchecked(
    cls: Any,
    values: Tensor,
    indices: Tensor,
    counts: Tensor,
    shape: tuple[int, ...],
    source: Tensor | LinearSource | None = None,
    tile: int | None = None,
) -> Any:
    """A container of what an operator has returned: its parts fit, and to look again would cost host time."""
    given: dict[str, Any] = {"shape": shape} if tile is None else {"shape": shape, "tile": tile}
    if torch.compiler.is_compiling():
        return cls(values=values, indices=indices, source=source, **{cls.COUNTS_NAME: counts}, **given)
    rows: Any = object.__new__(cls)
    rows.__dict__.update(given, _packed=Packed(values, indices, counts, source), _watched=_watched(source))
    return rows


def unchecked_source(**parts: Any) -> LinearSource:
    """A `LinearSource` of parts that fit."""
    if torch.compiler.is_compiling():
        return LinearSource(**parts)
    source: LinearSource = object.__new__(LinearSource)
    source.__dict__.update(parts)
    return source
