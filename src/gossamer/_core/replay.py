"""Equal calls of an operator: the second one records its launches, and each later one runs these alone.

The host time of a launcher goes into views of its operands, choices, tensor descriptors, lists of arguments and keys of
compiled kernels. All of them follow from shapes, strides, dtypes and options, and take two to four times as long as the
launches. A `Recording` keeps the compiled launches, and for each of their pointers the operand or the allocation that
it points into, and its offset there. It holds no tensor, no memory and no stream, so it serves any operands of its key,
in eager calls and while a CUDA graph captures.

A launcher is recorded only if each of its steps is a launch, an allocation, a view, or a function of PyTorch that can
write its result where it is told: a mode of PyTorch's dispatcher looks on and refuses every other step, as it refuses a
pointer into memory that no step has made. Memory that launches of a stream share, `flags`, `scratch` and `counters` of
`launch`, is asked for anew.
"""

import functools
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import itemgetter
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gossamer._core.compiling import walking
from gossamer._core.ops import INTERPRET, profiler_enabled
from gossamer._core.ranges import NVIDIA_LOOKS
from gossamer._core.stream_memory import Epoch, alone, next_epoch, recorders, shared_stream

_guards: Any = torch._C._dynamo.guards
EMPTY = {"cuda": _guards._empty_strided_cuda, "cpu": _guards._empty_strided_cpu}
"""Allocate (shape, strides, dtype) on the current device, in half the time of `torch.empty_strided`."""

_aten = torch.ops.aten
_EMPTIES: tuple[Any, ...] = (_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default)
_EMPTIES += (_aten.new_empty.default, _aten.new_empty_strided.default)
_ZEROS = (_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default)
_MAKES: dict[Any, tuple[Callable[..., Any] | None, int]] = {
    **dict.fromkeys(_EMPTIES, (None, 0)),
    **dict.fromkeys(_ZEROS, (Tensor.zero_, 0)),
    **dict.fromkeys((_aten.clone.default, _aten._to_copy.default), (Tensor.copy_, 1)),
}
"""Steps by PyTorch that allocate, the functions that write the memory, and how many of the arguments these take."""
_IN_PYTHON: dict[Any, Callable[..., Any]] = {
    **{_aten.copy_.default: Tensor.copy_, _aten.zero_.default: Tensor.zero_, _aten.fill_.Scalar: Tensor.fill_},
    **{_aten.add_.Tensor: Tensor.add_, _aten.mm.out: torch.mm, _aten.addmm.out: torch.addmm},
}
"""Functions that take less time than the same by PyTorch's dispatcher, for steps that are taken often."""
_UNFIT = {torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_UNFIT |= {torch.Tag.inplace_view}
_ALLOCATION = {"dtype", "layout", "device", "pin_memory"}
_MOST_BYTES = 1 << 26
"""Of allocations that are no results. A recording holds them all until it ends, where a launcher may use memory again;
and calls that need more take the device longer than the host."""

Launch = tuple[Callable[..., Any], tuple[Any, ...]]
"""A compiled kernel's function, and its arguments between the stream and those of the kernel."""


class Memory(NamedTuple):
    """A place of memory: the tensor, None for a missing operand; and how a repetition makes it, by `maker(*given)`,
    None for operands. Memory that is not `owned` by a call is shared by a stream, which the maker takes first."""

    tensor: Tensor | None
    maker: Callable[..., Tensor] | None = None
    given: tuple[Any, ...] = ()
    owned: bool = False


STREAM = -1
"""The place of the stream among the values of a repetition, behind those of all other extras."""


class Computed(NamedTuple):
    """The extras that a repetition makes: (place, that of memory, bytes behind its beginning), (place, that of memory,
    function of the tensor there and what follows), and the places of epochs."""

    offsets: list[tuple[int, int, int]]
    objects: list[tuple[int, int, Callable[..., Any], tuple[Any, ...]]]
    epochs: list[int]


class Recorder(TorchDispatchMode):
    """Looks on while a launcher runs. `memory` begins with the operands; memory that steps make follows.

    A repetition has one list of values: the addresses of `memory`, and then `extras` from the last to the first. So a
    place below 0 is that of an extra, whatever memory there will be. A launch picks its arguments from this list.
    """

    def __init__(self, operands: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.complete, self._bytes = True, 0
        # Allocations stay alive while others are made, so that no address comes twice.
        self.memory = [Memory(x) for x in operands]
        self.launches: list[tuple[Callable[..., Any], list[int]]] = []
        self.extras: list[Any] = [None]  # the stream
        self.computed = Computed([], [], [])
        self._places = {_storage(x): place for place, x in enumerate(operands) if x is not None}
        self._device = next(x.device for x in operands if x is not None)

    def refuse(self) -> None:
        """The launcher cannot be recorded, and nothing of it is held any longer."""
        self.complete = False
        self.memory, self.launches, self.extras, self._places = [], [], [], {}
        self.computed = Computed([], [], [])

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function._can_decompose():
            # In inference mode, and below autograd, composite functions arrive whole.
            with self:
                return function.decompose(*args, **kwargs)
        made = function(*args, **kwargs)
        if not self.complete:
            return made
        if not function.is_view:
            self._step(function, made, args, kwargs)
        return made

    def _step(self, function: Any, made: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """A step by PyTorch that writes, or that makes a tensor: an allocation, and a step that writes it."""
        write, count = _MAKES.get(function, (writer_of(function, self._device.type), None))
        if count is None and write is None:
            self.refuse()
            return
        if write is not function:
            self._bytes += made.nbytes
            if made.device != self._device or self._bytes > 4 * _MOST_BYTES:
                self.refuse()
                return
            self.keep(made, EMPTY[self._device.type], tuple(made.shape), made.stride(), made.dtype, owned=True)
            if count is not None:
                args, kwargs = (made, *args[:count]), {}
            else:
                given = {argument.name for argument in write._schema.arguments}  # type: ignore[union-attr]
                kwargs = {name: value for name, value in kwargs.items() if name in given} | {"out": made}
        if write is not None:
            run = _run_below_autograd, (_IN_PYTHON.get(write, write), tuple(kwargs))
            self.add(run, (1, 1, 1), (*args, *kwargs.values()), {}, views=True)

    def keep(self, made: Tensor, maker: Callable[..., Any], *given: Any, owned: bool = False) -> None:
        """Memory that a step has made, and a repetition makes by `maker`; `owned` by this call alone."""
        self._places[_storage(made)] = len(self.memory)
        self.memory.append(Memory(made, maker, given, owned))

    def _place_of(self, x: Tensor) -> tuple[int, int]:
        """(place in `memory`, bytes behind its beginning) of a tensor."""
        place = self._places.get(_storage(x), -1)
        whole = self.memory[place].tensor if place >= 0 else None
        if whole is None:
            self.refuse()
            return -1, 0
        return place, x.data_ptr() - whole.data_ptr()

    def _extra(self, value: Any = None) -> int:
        self.extras.append(value)
        return -len(self.extras)

    def _argument(self, arg: Any, views: bool) -> int:
        """The place of a kernel's argument."""
        if isinstance(arg, Tensor) and arg.numel():
            place, offset = self._place_of(arg)
            if not (offset or views):
                return place
            if views:
                like = (offset, arg.dtype, arg.shape, arg.stride())
                self.computed.objects.append((self._extra(), place, _view, like))
            else:
                self.computed.offsets.append((self._extra(), place, offset))
        elif isinstance(arg, Tensor):
            # It has the address 0.
            self._extra(arg.new_empty(arg.shape) if views else 0)
        elif type(arg) is Epoch:
            self.computed.epochs.append(self._extra())
        elif hasattr(arg, "block_shape"):
            place, offset = self._place_of(arg.base)
            if offset or INTERPRET:
                self.refuse()
            kind = (type(arg), {**vars(arg), "base": None})
            self.computed.objects.append((self._extra(), place, _descriptor, kind))
        elif isinstance(arg, tuple) or (isinstance(arg, list) and any(isinstance(each, Tensor) for each in arg)):
            self.refuse()
        else:
            self._extra(arg)
        return -len(self.extras)

    def add(
        self, launch: Launch, grid: tuple[int, int, int], args: Sequence[Any], meta: Mapping[str, Any],
        views: bool = INTERPRET,
    ) -> None:  # fmt: skip
        """A launch that has just run. It takes addresses, or with `views` tensors."""
        if not self.complete:
            return
        run, between = launch
        picked = [*map(self._extra, grid), STREAM, *map(self._extra, between)]
        for arg in args:
            if self.complete:
                picked.append(self._argument(arg, views))
        picked += map(self._extra, meta.values())
        if self.complete:
            self.launches.append((run, picked))

    def recording(self, results: Any) -> "Recording | None":
        """The recording of a launcher that returned these results; None where it cannot be repeated."""
        made: list[Any] = [each[1:] for each in self.memory if each.maker is not None]
        steps = [place for place, each in enumerate(self.memory) if each.maker is not None]
        between = sum(each.tensor.nbytes for each in self.memory if each.owned and each.tensor is not None)
        returned: dict[int, Any] = {}
        for result in (results,) if isinstance(results, Tensor) else results or ():
            place, offset = self._place_of(result) if self.complete else (-1, 0)
            whole = self.memory[place] if place >= 0 else Memory(None)
            if offset or not whole.owned or place in returned or whole.tensor is None:
                return None
            if whole.tensor.dtype is not result.dtype:
                return None
            like: Any = tuple(result.shape), result.stride()
            if whole.tensor.nbytes == result.nbytes:
                made[steps.index(place)], like = (whole.maker, (*like, result.dtype), True), None
            returned[place] = like
            between -= whole.tensor.nbytes
        if not self.complete or between > _MOST_BYTES:
            return None
        launches = [(run, itemgetter(*picked)) for run, picked in self.launches]
        return Recording(self._device, made, self.extras[::-1], self.computed, launches, returned, type(results))


class Recording:
    """The allocations and launches of a call."""

    __slots__ = ("_computed", "_device", "_extras", "_kind", "_launches", "_made", "_returned", "_shares")

    def __init__(
        self, device: torch.device, made: Any, extras: list[Any], computed: Computed, launches: Any,
        returned: dict[int, Any], kind: type,
    ) -> None:  # fmt: skip
        self._device, self._made, self._extras, self._computed = device, made, extras, computed
        # By the places of results: None, or the shape and strides of a view.
        self._launches, self._returned, self._kind = launches, returned, kind
        self._shares = not all(owned for _, _, owned in made)

    def __call__(self, memory: list[Any], pointers: list[Any]) -> Any:
        """The results for operands `memory`, whose addresses are `pointers`."""
        stream = shared_stream(self._device) if self._shares else None
        for maker, given, owned in self._made:
            made = maker(*given) if owned else maker(stream, *given)
            memory.append(made)
            pointers.append(made.data_ptr())
        values = pointers + self._extras
        if stream is None and not INTERPRET:
            stream = torch._C._cuda_getCurrentRawStream(self._device.index)
        values[STREAM] = stream
        offsets, objects, epochs = self._computed
        for at, place, offset in offsets:
            values[at] = values[place] + offset
        for at, place, make, given in objects:
            values[at] = make(memory[place], *given)
        for at in epochs:
            values[at] = next_epoch()
        for run, pick in self._launches:
            run(*pick(values))
        results = [
            memory[place] if like is None else memory[place].as_strided(*like) for place, like in self._returned.items()
        ]
        if self._kind is Tensor:
            return results[0]
        return None if self._kind is NoneType else tuple(results)


class Repeated:
    """A launcher whose equal calls are recorded. `tensors` and `others` pick the fields of a record that are tensors,
    whose places are given, and that are none. The number of recordings is bounded."""

    __slots__ = ("_known", "_others", "_places", "_run", "_seen", "_tensors")
    _MOST = 512

    def __init__(self, run: Callable[..., Any], tensors: Any, places: list[int], others: Any) -> None:
        self._run, self._tensors, self._places, self._others = run, tensors, places, others
        # None if a call cannot be repeated.
        self._known: dict[Hashable, Recording | None] = {}
        self._seen: set[Hashable] = set()

    def forget(self) -> None:
        """From now on no call is known."""
        self._known.clear()
        self._seen.clear()

    def __call__(self, call: Any, only: bool = False) -> Any:
        """The results of a call; with `only`, None where there is no recording of it."""
        if walking or NVIDIA_LOOKS or profiler_enabled():
            return None if only else self._run(call)
        memory = [*self._tensors(call)]
        key: Any = [self._others(call), torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32"]
        pointers: list[int | None] = []
        united, last = 0, None
        for x in memory:
            if x is None:
                key.append(None)
                pointers.append(None)
            else:
                last, pointer = x, x.data_ptr()
                pointers.append(pointer)
                united |= pointer
                key += x.shape, x.stride(), x.dtype
        assert last is not None
        device = last.get_device()
        key = *key, device
        # Kernels are compiled for pointers on 16 bytes.
        if united % 16 or not (INTERPRET or torch._C._cuda_getDevice() == device):
            return None if only else self._run(call)
        try:
            found = self._known.get(key)
        except TypeError:  # PyTorch's dispatcher makes lists of tuples
            fields = [tuple(field) if isinstance(field, list) else field for field in call]
            return self(tuple.__new__(type(call), fields), only)
        if found is not None:
            return found(memory, pointers)
        if only:
            return None
        return self._run(call) if key in self._known else self._first_or_second(key, call, memory)

    def _first_or_second(self, key: Hashable, call: Any, operands: list[Tensor | None]) -> Any:
        if key not in self._seen:
            if len(self._seen) >= self._MOST:
                self._seen.clear()
            self._seen.add(key)
            return self._run(call)
        if len(self._known) >= self._MOST:
            for old in list(self._known)[: self._MOST // 2 + 1]:
                self._known.pop(old, None)
        # A call that fails is not recorded again.
        self._known[key] = None
        given = [None if x is None else alone(x) for x in operands]
        fields = [*call]
        for place, x in zip(self._places, given):
            fields[place] = x
        me, recorder = threading.get_ident(), Recorder(given)
        before, recorders[me] = recorders.get(me), recorder
        try:
            with recorder:
                results = self._run(tuple.__new__(type(call), fields))
        finally:
            del recorders[me]
            if before is not None:
                recorders[me] = before
        self._known[key] = recorder.recording(results)
        return results


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


@functools.cache
def writer_of(function: Any, device: str) -> Any:
    """The function of PyTorch that writes the result of this one, by a kernel of its own: others make the result anew,
    and copy it. The function itself if it writes; None if there is none, or the result follows from more than the
    arguments."""
    schema = function._schema
    if function.namespace != "aten" or _UNFIT & {*function.tags} or len(schema.returns) != 1:
        return None
    if schema.is_mutable:
        return function
    given = {argument.name: str(argument.type) for argument in schema.arguments}
    packet = function._overloadpacket
    for form in map(packet.__getattr__, packet.overloads()):
        wanted = {each.name: str(each.type) for each in form._schema.arguments if not each.is_out}
        same = {name: kind for name, kind in given.items() if name in wanted or name not in _ALLOCATION}
        if len(form._schema.arguments) == len(wanted) + 1 and wanted == same:
            has_kernel: Any = torch._C._dispatch_has_kernel_for_dispatch_key
            return form if has_kernel(form.name(), device.upper()) else None
    return None


def _run_below_autograd(
    x: int, y: int, z: int, stream: int, function: Any, names: tuple[str, ...], *args: Any
) -> None:  # fmt: skip
    """A step by PyTorch, which takes the place of a launch. The last arguments have names."""
    first = len(args) - len(names)
    with torch._C._AutoDispatchBelowAutograd():
        function(*args[:first], **dict(zip(names, args[first:])))


def _view(x: Tensor, offset: int, dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...]) -> Tensor:
    """A view of a tensor's memory, for steps that take no addresses: the tensor itself, if it is that view."""
    if x.dtype is dtype:
        if not offset and x.shape == shape and x.stride() == strides:
            return x
        return x.as_strided(shape, strides, x.storage_offset() + offset // dtype.itemsize)
    at = (x.storage_offset() * x.element_size() + offset) // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=x.device).set_(x.untyped_storage(), at, shape, strides)


def _descriptor(x: Tensor, kind: type, fields: dict[str, Any]) -> Any:
    """A tensor descriptor like one that is known, of other memory."""
    descriptor: Any = object.__new__(kind)
    descriptor.__dict__.update(fields, base=x)
    return descriptor
