"""The container for matrices with few stored entries per row.

An *entry* is a stored slot: explicit zeros are legal, repeated columns add up, and an index of -1 means "no entry".
Each row has a *span* of slots, a start and a count, in buffers that all rows share, so that a kernel never asks how
the spans were laid out: slots of equal number for each row, or one span right behind the other. A row whose span ends
beyond the buffers has *overflowed*. It stays exact, because the container keeps the `source` of the matrix by
reference, and every operator computes such a row from there, without asking the host.
"""

import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree

from gossamer._core import checks
from gossamer._core.versions import version_of
from gossamer.rowsparse import entries
from gossamer.rowsparse.linear_source import LinearSource

MOST_SLOTS = (1 << 32) - 1
"""Slots of a buffer: a key of the transposition holds a slot in 32 bits."""


class Packed(NamedTuple):
    """The buffers of `Rows` as operators take them. They lack the entries of rows that overflowed, which `source` has.
    A slot without an entry may hold any number."""

    values: Tensor
    indices: Tensor
    spans: Tensor
    source: Tensor | LinearSource | None


def _looked_at(part: str) -> Any:
    return property(lambda rows: getattr(rows._whole(part), part))


# The fields of a container.
VALUES, INDICES = _looked_at("values"), _looked_at("indices")
SPANS: Any = property(lambda rows: rows._packed.spans)
SOURCE: Any = property(lambda rows: rows._packed.source)


class _Held:
    """The attributes of a container that are no fields of the dataclass below."""

    _packed: Packed
    _l0: Tensor | None
    _watched: tuple[tuple[Tensor, int], ...]


@dataclass(init=False, eq=False, repr=False)
class Rows(_Held):
    """A matrix `(..., N)` by the entries of its rows.

    Args:
        values: `[P]`, float: P slots, which all rows share.
        indices: `[P]`, int32: the column of each slot, ascending in each row; -1 marks a slot without an entry.
        spans: `[2, M]`, int64: row r has the slots from `spans[0, r]` on, `spans[1, r]` of them. A row whose span ends
            beyond P has overflowed and is computed from `source`. Rows share no slot.
        shape: `(..., N)` with M the product of the leading dimensions.
        source: `[M, N]`, dense, right at least in the rows that overflowed; None promises that no row overflowed.

    `values` and `indices` of a container that has a source wait for the device once, to make sure that no row
    overflowed; `rows.complete()` returns a container that holds every entry. `packed` has the buffers as they are.

    Raises:
        ValueError: the tensors' shapes or devices do not fit each other, P is not below 2^32, or N not below 2^31; on
            the CPU, an index outside [0, N) that is not -1, or a start or count below 0.
        TypeError: indices are not int32, spans not int64, values not floating, or the source has another dtype.

    To look at indices and spans on a GPU costs a sync: there a row that breaks the rule becomes NaN, or is computed
    from the source. `validate()` looks and raises. Under `torch.compile` nothing looks.

    >>> spans = torch.tensor([[0, 1], [1, 1]])
    >>> rows = Rows(torch.ones(2), torch.tensor([3, 0], dtype=torch.int32), spans, (2, 4))
    >>> rows.to_dense()[0].tolist()
    [0.0, 0.0, 0.0, 1.0]
    """

    shape: tuple[int, ...]
    values: Tensor = VALUES
    indices: Tensor = INDICES
    spans: Tensor = SPANS
    source: Tensor | LinearSource | None = SOURCE

    # A decorator that freezes would make torch.compile look at every field, of which some wait for the device.
    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}: dataclasses.replace makes another container.")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}.")

    def __init__(
        self,
        values: Tensor,
        indices: Tensor,
        spans: Tensor,
        shape: tuple[int, ...],
        source: Tensor | LinearSource | None = None,
    ) -> None:
        _check_parts(values, indices, spans, shape, source)
        room = values.shape[0]
        if type(spans) is Tensor and not torch.compiler.is_compiling() and not _wrapped(spans):
            if spans.device.type == "cpu":
                if bool((spans < 0).any()):
                    raise ValueError(f"rowsparse.Rows: spans must be at least 0, got {int(spans.min())}.")
                if int(entries.fitting(spans, room)[1].sum()) > room:
                    raise ValueError("rowsparse.Rows: spans of two rows must not share a slot.")
                _, held = entries.slots_of(spans, room)
                entries.check_indices("rowsparse.Rows", indices[held], shape[-1])
            else:
                # A row with a number below 0 overflows, and all do where spans hold more slots than there are; no sum
                # of a start and a count exceeds 64 bits.
                spans = torch.where((spans < 0).any(0), room + 1, spans).clamp(max=1 << 40)
                shared = entries.fitting(spans, room)[1].sum() > room
                spans = torch.where(shared, room + 1, spans)
        self._hold(Packed(values, indices, spans, source), shape, None)

    def _hold(self, packed: Packed, shape: tuple[int, ...], l0: Tensor | None) -> None:
        for name, value in (("shape", shape), ("_packed", packed), ("_l0", l0), ("_watched", _watched(packed.source))):
            object.__setattr__(self, name, value)

    @property
    def packed(self) -> Packed:
        """(values, indices, spans, source) as they are, without waiting for the device: see `Packed`.

        Raises:
            RuntimeError: a tensor of the source has been changed in place since the container was made. Nothing
                counts changes under `torch.compile`, of inference tensors, and by replays of a CUDA graph.
        """
        if self._watched and not torch.compiler.is_compiling():
            for tensor, version in self._watched:
                if tensor._version != version:
                    raise RuntimeError(
                        "rowsparse.Rows: a tensor that rows which overflowed are computed from has been changed in "
                        "place since they were packed. Take rows.complete() before the change, or pack a copy."
                    )
        return self._packed

    def _whole(self, part: str) -> Packed:
        packed = self.packed
        if packed.source is None:
            return packed
        checks.no_wait(
            "rowsparse.Rows",
            f"to look at {part} of a container with a source",
            "Give the container to an operator as it is, look at rows.packed, whose buffers lack rows that overflowed, "
            "or take rows.complete() outside.",
        )
        if bool(self.overflowed):
            raise RuntimeError(
                f"rowsparse.Rows: {part} lack the entries of rows that overflowed. Take "
                "rows = rows.complete(), which returns a container of every entry, or pack with a larger capacity."
            )
        return packed

    def complete(self) -> "Rows":
        """A container of every entry, without a source. Waits for the device, once where no row overflowed; then the
        result has the same buffers. Gradients go on reaching the matrix that was packed.

        Raises:
            NotImplementedError: under CUDA-graph capture or `torch.compile`.
            ValueError: an index is outside [0, N) and not -1.

        >>> rows = pack(torch.ones(1, 5), capacity=2)
        >>> rows.complete().values.tolist()
        [1.0, 1.0, 1.0, 1.0, 1.0]
        """
        return self if self._packed.source is None else entries.completed(self)

    @property
    def starts(self) -> Tensor:
        """`[M]`, int64: the first slot of each row."""
        return self._packed.spans[0]

    @property
    def counts(self) -> Tensor:
        """`[M]`, int64: how many entries each row has, also where they did not fit; slots with an index of -1 count."""
        return self._packed.spans[1]

    @property
    def overflowed(self) -> Tensor:
        """Bool `[]` on the device: whether the span of any row ends beyond the buffers."""
        return (self._packed.spans.sum(0) > self._packed.values.shape[0]).any()

    @property
    def l0(self) -> Tensor:
        """`[...]`, in float32 at least: how many values of each row differ from 0, without a sync. On a result
        of `sae.encode` it has the gradient of an L0 penalty for the threshold of a JumpReLU."""
        l0 = entries.count_nonzero(self) if self._l0 is None else self._l0
        return l0.view(self.shape[:-1])

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
        return self._packed.values.dtype

    @property
    def device(self) -> torch.device:
        return self._packed.values.device

    @property
    def requires_grad(self) -> bool:
        values, _, _, source = self._packed
        return values.requires_grad or (source is not None and source.requires_grad)

    def validate(self) -> "Rows":
        """Looks at the contents, which costs one sync, and returns self.

        Raises:
            ValueError: an index outside [-1, N), columns that do not ascend, a start or count below 0, or a row that
                overflowed without a source.
        """
        entries.validate(self)
        return self

    def detach(self) -> "Rows":
        """The same entries, cut from the autograd graph."""
        return self._map_tensors(lambda tensor: tensor.detach())

    def clone(self) -> "Rows":
        """A copy of everything, of the source too; no sync."""
        return self._map_tensors(lambda tensor: tensor.clone())

    def _map_tensors(self, function: Callable[[Tensor], Tensor]) -> "Rows":
        values, indices, spans, source = self.packed
        if source is not None:
            source = source.mapped(function) if isinstance(source, LinearSource) else function(source)
        l0 = None if self._l0 is None else function(self._l0)
        return unchecked(function(values), function(indices), function(spans), self.shape, source, l0)

    def to(self, *args: Any, **kwargs: Any) -> "Rows":
        """As `torch.Tensor.to`: a dtype converts values and a dense source; for another device the container is
        completed first, which waits.

        A `LinearSource` stays in its dtype: in another it would keep other entries. Its results are converted.
        """
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        # As tensors have it, "cuda" is whichever device is current.
        here = self.device
        moves = device is not None and device != here and (device.type != here.type or device.index is not None)
        values, indices, spans, source = (self.complete() if moves else self).packed

        def convert(tensor: Tensor) -> Tensor:
            return tensor.to(device, dtype if tensor.is_floating_point() else None, non_blocking)

        source = convert(source) if isinstance(source, Tensor) else source
        return unchecked(convert(values), convert(indices), convert(spans), self.shape, source)

    def cpu(self) -> "Rows":
        """The same entries on the CPU."""
        return self.to("cpu")

    def to_dense(self) -> Tensor:
        """The dense `[..., N]` tensor, without a sync, differentiable; repeated columns are added up."""
        from gossamer.rowsparse.pack import unpack

        return unpack(self)

    def __matmul__(self, weight: Tensor) -> Tensor:
        """`rowsparse.matmul(rows, weight)`; under `torch.compile`, which takes `@` for one of tensors, write that."""
        from gossamer.rowsparse.matmul import matmul

        return matmul(self, weight) if isinstance(weight, Tensor) else NotImplemented

    def __getitem__(self, key: Any) -> "Rows":
        """Rows by their leading dimensions, as of a tensor: `rows[3]`, `rows[2:5]`, `rows[mask]`. Columns stay whole.

        The result shares the buffers, without a sync; integers of a tensor or list, which may name a row twice, copy
        the entries and wait for the device.

        Raises:
            IndexError: more indices than leading dimensions, or one out of range.
        """
        from gossamer.rowsparse.edit import select

        return select(self, key)

    def reshape(self, *shape: Any) -> "Rows":
        """Other leading dimensions, the same N last: `rows.reshape(-1, N)`. No sync; buffers and source are shared.

        Raises:
            ValueError: the sizes do not fit, or the last is not N.
        """
        wanted = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        leading, last = tuple(wanted[:-1]), wanted[-1] if wanted else None
        # Lists, which `torch.compile` can follow where it cannot follow a generator or `min` with a default.
        known = math.prod([size for size in leading if size != -1])
        if leading.count(-1) == 1 and known and self.num_rows % known == 0:
            leading = tuple(self.num_rows // known if size == -1 else size for size in leading)
        if last != self.num_columns or math.prod(leading) != self.num_rows or any([size < 0 for size in leading]):
            raise ValueError(
                "rowsparse.Rows: reshape changes leading dimensions: the last size must stay N = "
                f"{self.num_columns} and the others hold M = {self.num_rows} rows, got {tuple(wanted)}."
            )
        values, indices, spans, source = self.packed
        return unchecked(values, indices, spans, (*leading, last), source, self._l0)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Rows":
        """A function of each value, elementwise, that leaves 0 at 0: `rows.map(lambda v: 2 * v)`. Completes first.

        Args:
            function: takes values of any shape and returns as many, floating, differentiable where that is wanted.

        Raises:
            ValueError: function(0) is not 0, which entries alone could not hold, or the shape is another.
            TypeError: the function returns no floating tensor.

        >>> pack(torch.tensor([[0.0, 3.0]])).map(torch.square).to_dense().tolist()
        [[0.0, 9.0]]
        """
        from gossamer.rowsparse.edit import map_values

        return map_values(self, function)

    def where(self, mask: Tensor) -> "Rows":
        """The values where a mask holds, 0 elsewhere; entries stay where they are. Completes first.

        Args:
            mask: bool, to be broadcast to `shape`: `[N]` chooses columns, `[..., 1]` rows. `map` chooses by value.

        Raises:
            TypeError: mask is not a bool tensor.
            ValueError: its shape or device does not fit.

        >>> pack(torch.tensor([[2.0, 3.0]])).where(torch.tensor([True, False])).to_dense().tolist()
        [[2.0, 0.0]]
        """
        from gossamer.rowsparse.edit import where

        return where(self, mask)

    def ablate(self, columns: Any) -> "Rows":
        """Sets columns to 0, for instance latents whose part one wants to see. Completes first; differentiable.

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
        """The entries as a sparse tensor of PyTorch: `[M, N]` in CSR, `shape` in COO. Completes first; differentiable.

        Repeated columns are added up, and slots without an entry left out.

        Raises:
            ValueError: another layout.

        >>> pack(torch.eye(2)).to_torch_sparse().crow_indices().tolist()
        [0, 1, 2]
        """
        from gossamer.rowsparse.convert import to_torch_sparse

        return to_torch_sparse(self, layout)

    def __getstate__(self) -> dict[str, Any]:
        # A pickle or a copy for another process has the entries, not the tensors that they were computed from.
        return dict(self.complete().__dict__)

    def __repr__(self) -> str:
        overflow = "none possible" if self.source is None else "kept exact through source"
        return (
            f"Rows(shape={self.shape}, slots={self._packed.values.shape[0]}, dtype={checks.name_of(self.dtype)}, "
            f"device={self.device}, overflow={overflow})"
        )


def _watched(source: Tensor | LinearSource | None) -> tuple[tuple[Tensor, int], ...]:
    """Each tensor of a source beside how often it has been changed in place; () where nobody counts."""
    if source is None or torch.compiler.is_compiling():
        return ()
    tensors = (source,) if isinstance(source, Tensor) else source.tensors
    return tuple([(t, version_of(t)) for t in tensors if t is not None and not t.is_inference()])


def unchecked(
    values: Tensor,
    indices: Tensor,
    spans: Tensor,
    shape: tuple[int, ...],
    source: Tensor | LinearSource | None = None,
    l0: Tensor | None = None,
) -> Rows:
    """A container of the results of an operator: they fit each other, and to look again would cost host time."""
    rows: Rows
    if torch.compiler.is_compiling():
        rows = Rows(values, indices, spans, shape, source)
        object.__setattr__(rows, "_l0", l0)
        return rows
    rows = object.__new__(Rows)
    packed = Packed(values, indices, spans, source)
    rows.__dict__.update(shape=shape, _packed=packed, _l0=l0, _watched=_watched(source))
    return rows


def check_container(operator: str, rows: Any, argument: str = "rows") -> None:
    if not isinstance(rows, Rows):
        raise TypeError(
            f"{operator}: {argument} must be rowsparse.Rows, got {type(rows).__name__}. "
            "Pack a dense tensor with rowsparse.pack first."
        )


def _check_parts(values: Tensor, indices: Tensor, spans: Tensor, shape: Any, source: Any) -> None:
    operator = "rowsparse.Rows"
    checks.tensors(operator, indices=indices, spans=spans)
    if not isinstance(source, LinearSource):
        checks.tensors(operator, source=source)
    checks.floating(operator, values=values)
    if not isinstance(shape, tuple) or not shape or not all(isinstance(size, int | torch.SymInt) for size in shape):
        raise ValueError(f"{operator}: shape must be a tuple (..., N) of ints, got {shape!r}.")
    checks.columns(operator, "shape", shape[-1])
    m = math.prod(shape[:-1])
    if values.dim() != 1 or values.shape[0] > MOST_SLOTS:
        raise ValueError(f"{operator}: values must have shape [P] with P below 2^32, got {list(values.shape)}.")
    checks.shape(operator, "indices", indices, tuple(values.shape), "[P]", "like values")
    checks.shape(operator, "spans", spans, (2, m), "[2, M]", f"for shape {shape}")
    for name, tensor, dtype in (("indices", indices, torch.int32), ("spans", spans, torch.int64)):
        if tensor.dtype is not dtype:
            raise TypeError(
                f"{operator}: {name} must be {checks.name_of(dtype)}, got {checks.name_of(tensor.dtype)}. "
                f"Convert it with {name}.to({dtype})."
            )
    others = {"indices": indices, "spans": spans, "source": source}
    checks.same_device(operator, "values", values.device, **others)
    if source is not None:
        checks.shape(operator, "source", source, (m, shape[-1]), "[M, N]", f"for shape {shape}")
        if isinstance(source, Tensor) and source.dtype is not values.dtype:
            raise TypeError(
                f"{operator}: source must be {checks.name_of(values.dtype)} like values, "
                f"got {checks.name_of(source.dtype)}. Convert it with source.to(values.dtype)."
            )


def _wrapped(tensor: Tensor) -> bool:
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def _flatten(rows: Rows) -> tuple[list[Any], tuple[int, ...]]:
    return [*rows.packed, rows._l0], rows.shape


def _unflatten(parts: Any, shape: tuple[int, ...]) -> Rows:
    # The parts have been looked at when the container was made.
    values, indices, spans, source, l0 = parts
    return unchecked(values, indices, spans, shape, source, l0)


# As a pytree node a container can enter and leave a compiled region; its leaves are the buffers as they are.
_pytree.register_pytree_node(Rows, _flatten, _unflatten, serialized_type_name="gossamer.rowsparse.Rows")
# `torch.load` may make these with its default, weights_only=True.
torch.serialization.add_safe_globals([Rows, Packed])
