"""An operator is one record: its arguments are the fields of a `NamedTuple`, which every part of the operator takes.

`register` derives the schema for PyTorch's dispatcher from the record, so that eager code, `torch.compile`, CUDA graphs
and `opcheck` all meet one operator, and returns an `Operator`, which is called with a record. Where no mode, transform,
tracer or profiler listens to the dispatcher, the call goes straight to the implementation: the dispatcher takes 3 of
the 20 us of a small operator.
"""

import functools
import inspect
import operator as accessors
import re
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from gossamer._core import autocast, ops
from gossamer._core.ranges import span, watched
from gossamer._core.replay import Repeated

Strided = Annotated[Tensor, "strided"]
"""A field that reaches the launcher with any strides. The launcher gets every other tensor contiguous."""
Written = Annotated[Tensor, "written"]
"""A field whose memory the operator writes. The operator's name then ends with an underscore."""

Record = TypeVar("Record", bound=tuple[Any, ...])
OPERATORS: dict[str, "Operator[Any]"] = {}
"""Every operator by the name that its schema has."""
PATHS: dict[str, Mapping[str, str]] = {}
"""Of each function that may go several paths on a GPU, "room.function": a sentence for each path, the condition under
which the path is taken and, after a colon, its steps."""

_WORDS = {Tensor: "Tensor", int: "SymInt", float: "float", bool: "bool", str: "str", torch.dtype: "ScalarType"}
_new = tuple.__new__  # a third of the time of calling the record


class Operator(Generic[Record]):
    """A registered operator: `operator(Record(...))` returns a tensor, a tuple of tensors, or None.

    `name` is "room.function", `paths` has a sentence for each path of a GPU, and `overload` is PyTorch's object.
    """

    def __init__(self, record: type[Record], overload: Any, choose_path: Any, paths: Mapping[str, str]) -> None:
        room, name = record.__module__.split(".")[1], overload._schema.name.split("::")[1]
        self.name, self.record, self.overload = f"{room}.{name.removeprefix(room + '_')}", record, overload
        self.choose_path, self.paths = choose_path, paths
        words = list(map(_word, _hints(record)))
        self._first = words.index("Tensor")
        self._tensors = _picker([place for place, word in enumerate(words) if "Tensor" in word])
        self.repeated: Repeated | None = None
        self._run: dict[str, Callable[..., Any]] = {}
        self._apply: dict[str, Callable[..., Any]] = {}

    def __call__(self, call: Record) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return self._dispatched(call)
        recording, tensors = torch.is_grad_enabled(), self._tensors(call)
        if not ops._PLAIN.issuperset(map(type, tensors)):
            return self._dispatched(call)
        if recording or ops._graph_task() != -1:
            for tensor in tensors:
                # A tensor that has outlived a transform of torch.func looks plain, and the dispatcher unwraps it; so
                # does a batch of gradients in a backward pass, which the dispatcher takes apart.
                if tensor is not None and (ops._is_batched(tensor) or (recording and ops._is_wrapped(tensor))):
                    return self._dispatched(call)
        first = call[self._first]
        # A question for the type makes a string each time.
        device = "cuda" if first.is_cuda else first.device.type
        run = self._run.get(device)
        if run is None or ops.listened():
            return self._dispatched(call)
        if recording and self._apply and ops._any_requires_grad(*tensors) and not ops._inference():
            return self._apply[device](*call)
        if self.repeated is not None and device == "cuda" and not torch._C._is_any_autocast_enabled():
            return self.repeated(call)
        return run(call)

    def _dispatched(self, call: Record) -> Any:
        # PyTorch before 2.12 puts plain tuples alone into a graph, no `NamedTuple`.
        return self.overload(*[tuple(field) if isinstance(field, tuple) else field for field in call])

    def again(self, call: Record) -> Any:
        """The results of a call on a GPU whose like was recorded, or None, and nothing computed. The caller knows that
        no gradient is needed, that nothing listens to the dispatcher, and that autocast is off."""
        return None if self.repeated is None else self.repeated(call, only=True)


def register(
    record: type[Record],
    *,
    cpu: Callable[[Record], Any],
    fake: Callable[[Record], Any],
    choose_path: Callable[[Record], str] | None = None,
    paths: Mapping[Any, str] | None = None,
    backward: Callable[[Record, Any, Any, Any], Mapping[str, Tensor | None]] | None = None,
    saved: tuple[str, ...] = (),
    keep: Callable[[Record, Any], tuple[Any, ...]] | None = None,
    differentiable: int | None = None,
    once_differentiable: str | None = None,
    repeats: bool = False,
) -> Callable[[Callable[..., Callable[[Record], Any]]], Operator[Record]]:
    """Decorates the function that imports an operator's GPU launcher, and makes it the operator.

    The first call on a GPU calls the decorated function, so that a machine without one never imports Triton. The
    function returns a launcher, which takes the record. With a parameter, the function gets the path of a call and
    returns the path's launcher. Without a parameter, the launcher calls `choose_path` itself.

    Args:
        record: a `NamedTuple` of the arguments. `SparseAttention` makes the operator "sparse_attention".
        cpu: `cpu(call)` computes on the CPU. Its annotation says how many tensors it returns.
        fake: `fake(call)` returns empty tensors of the results' shapes and dtypes.
        choose_path: `choose_path(call)` names the path that a GPU goes. A profiler shows the name as a range.
        paths: a sentence for each name that `choose_path` may return, as in `PATHS`.
        backward: `backward(call, kept, grads, needs)` returns gradients by the names of fields. `call` has the tensors
            of `saved`, None in place of other tensors, and every argument that is no tensor; `kept` is the tuple that
            `keep` returned; `grads` has None for a result that nothing used, and not for all; `needs` is a record of
            bools. Autocast is off.
        saved: the names of fields whose tensors `backward` reads.
        keep: `keep(call, results)` returns what `backward` reads besides: tensors, and values of other types.
        differentiable: the number of leading results that have a gradient; None for all that are floating.
        once_differentiable: the public function that has no second derivatives. `backward` then refuses to be
            differentiated, and an operator without `backward`, a step of a backward pass, refuses as well.
        repeats: whether equal calls on a GPU repeat the launches of the first ones (see `replay`). The launcher then
            follows from the call alone: from shapes, strides, dtypes, the device, the precision of float32 products
            and the arguments that are no tensors. It launches by `launch.Kernel` on the current stream, passes no
            address as an int, and does not compute with an epoch of `flags`.
    """

    def decorate(launchers: Callable[..., Callable[[Record], Any]]) -> Operator[Record]:
        schema = schema_of(record, get_type_hints(cpu)["return"])
        name = schema.split("(", 1)[0]
        ops._library.define(schema)
        overload = getattr(getattr(torch.ops, ops.NAMESPACE), name).default
        operator = OPERATORS[name] = Operator(record, overload, choose_path, paths or {})
        if paths is not None:
            PATHS[operator.name] = {**PATHS.get(operator.name, {}), **paths}
        launch = _launcher(operator, launchers)
        if repeats:
            tensors = [place for place, hint in enumerate(_hints(record)) if "Tensor" in _word(hint)]
            others = [place for place in range(len(_hints(record))) if place not in tensors]
            launch = operator.repeated = Repeated(launch, operator._tensors, tensors, _picker(others))
        operator._run = {
            "cpu": _without_autocast(launch if ops.INTERPRET else cpu, "cpu"),
            "cuda": _without_autocast(launch, "cuda"),
        }
        flat = {device: _flat(record, run) for device, run in operator._run.items()}
        for device, run in flat.items():
            ops._library.impl(name, run, device.upper())
        torch.library.register_fake(f"{ops.NAMESPACE}::{name}", _flat(record, fake), lib=ops._library)
        if once_differentiable is not None or backward is not None:
            function = _gradient(record, backward, saved, keep, differentiable, once_differentiable)
            ops._library.impl(name, ops._dispatched(overload, function), "Autograd", with_keyset=True)
            # Where nothing listens, no transform of torch.func needs what `Function.apply` does for it.
            operator._apply = {
                device: super(torch.autograd.Function, function(run)).apply for device, run in flat.items()
            }
        return operator

    return decorate


def forget() -> None:
    """No operator repeats the launches of an earlier call: for tests and benchmarks that change constants."""
    for operator in OPERATORS.values():
        if operator.repeated is not None:
            operator.repeated.forget()


def schema_of(record: Any, returns: Any) -> str:
    """The schema of an operator whose arguments are the fields of `record`, and whose results are as annotated.

    A field is a Tensor, int, float, bool, str or dtype, a tuple of one of these, of any length, or one of them or None.
    """
    hints = get_type_hints(record, include_extras=True)
    written = [field for field, hint in hints.items() if get_origin(hint) is Annotated and hint == Written]
    marks = {field: f"Tensor({letter}!)" for field, letter in zip(written, "abcdefgh")}
    fields = ", ".join(f"{marks.get(field) or _word(hint)} {field}" for field, hint in hints.items())
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", record.__name__).lower() + ("_" if written else "")
    if returns in (None, NoneType):
        return f"{name}({fields}) -> ()"
    if isinstance(returns, type) and issubclass(returns, tuple) and not get_args(returns):
        results = tuple(get_type_hints(returns).values())
    else:
        results = get_args(returns) if get_origin(returns) is tuple else (returns,)
    made = ", ".join(map(_word, results))
    return f"{name}({fields}) -> {made if len(results) == 1 else f'({made})'}"


def _hints(record: Any) -> tuple[Any, ...]:
    return tuple(get_type_hints(record, include_extras=True).values())


def _word(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _word(inner[0])
    if origin in (UnionType, Union):
        (kind,) = (arg for arg in inner if arg is not NoneType)
        return f"{_word(kind)}?"
    return f"{_word(inner[0])}[]" if origin is tuple else _WORDS[hint]


def _picker(places: list[int]) -> Callable[[Any], tuple[Any, ...]]:
    """The items of a sequence at these places."""
    if len(places) > 1:
        return accessors.itemgetter(*places)
    return lambda items: tuple([items[place] for place in places])


def _flat(record: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, which takes a record, with the fields as arguments."""
    return lambda *args: run(_new(record, args))


def _without_autocast(run: Callable[..., Any], device: str) -> Callable[..., Any]:
    """`run` without the caller's autocast: the public function has cast its operands already."""

    def call(given: Any) -> Any:
        if not torch._C._is_any_autocast_enabled():
            return run(given)
        with torch.autocast(device, enabled=False):
            return run(given)

    return call


def _launcher(operator: Operator[Any], launchers: Any) -> Callable[..., Any]:
    """Calls the launcher of a call's path with contiguous tensors, inside of a profiler's range."""
    record, choose_path = operator.record, operator.choose_path
    dense = [
        place
        for place, hint in enumerate(_hints(record))
        if "Tensor" in _word(hint) and not {"strided", "written"} & set(_marks(hint))
    ]
    found, by_path = functools.cache(launchers), bool(inspect.signature(launchers).parameters)

    def launch(call: Any) -> Any:
        for place in dense:
            tensor = call[place]
            if tensor is not None and not tensor.is_contiguous():
                call = _new(record, (*call[:place], tensor.contiguous(), *call[place + 1 :]))
        if choose_path is None or not (by_path or watched()):
            return found()(call)
        path = choose_path(call)
        run = found(path) if by_path else found()
        if not watched():
            return run(call)
        with span(f"gossamer::{operator.name}/{path}"):
            return run(call)

    return launch


def _marks(hint: Any) -> list[Any]:
    if get_origin(hint) is Annotated:
        return list(hint.__metadata__)
    return [mark for arg in get_args(hint) for mark in _marks(arg)]


def _gradient(
    record: Any, backward: Any, saved: tuple[str, ...], keep: Any, differentiable: int | None, once: str | None
) -> Callable[[Callable[..., Any]], Any]:
    """Makes the `autograd.Function` of a function that takes a record's fields."""
    fields, words = record._fields, list(map(_word, _hints(record)))
    others = [place for place, word in enumerate(words) if "Tensor" not in word]
    stored = [*map(fields.index, saved), *others]
    # Of (tensors of `saved`, other arguments, None): the place of each field.
    order = [stored.index(place) if place in stored else len(stored) for place in range(len(fields))]
    of_saved, of_others, of_all, names = _picker(stored[: len(saved)]), _picker(others), _picker(order), {*fields}

    def function(run: Callable[..., Any]) -> Any:
        def forward(ctx: Any, *args: Any) -> Any:
            if backward is None:
                ops._refuse(str(once))
            out = run(*args)
            if differentiable is not None:
                ctx.mark_non_differentiable(*out[differentiable:])
            ctx.set_materialize_grads(False)
            tensors, ctx.others = of_saved(args), of_others(args)
            if keep is not None:
                kept, ctx.kept = keep(_new(record, args), out), None
                if not ops._PLAIN.issuperset(map(type, kept)):
                    ctx.kept = [None if isinstance(value, Tensor) else value for value in kept]
                    kept = tuple([value if isinstance(value, Tensor) else None for value in kept])
                tensors += kept
            ctx.save_for_backward(*tensors)
            return out

        def gradient(ctx: Any, *grads: Any) -> Any:
            given = next((grad for grad in grads if grad is not None), None)
            if given is None:
                return (None,) * len(fields)
            if once is not None:
                ops.refuse_second(once)
            # Once: a checkpoint recomputes them a single time.
            tensors = ctx.saved_tensors
            call = _new(record, of_all((*tensors[: len(saved)], *ctx.others, None)))
            kept = tensors[len(saved) :]
            if keep is not None and ctx.kept is not None:
                kept = tuple([value if tensor is None else tensor for tensor, value in zip(kept, ctx.kept)])
            needs = _new(record, ctx.needs_input_grad)
            if autocast.enabled(given.device):
                # The forward pass has chosen the dtypes, whatever a backward pass runs under.
                with autocast.disabled(given.device):
                    made = backward(call, kept, grads, needs)
            else:
                made = backward(call, kept, grads, needs)
            assert made.keys() <= names, f"{record.__name__} has no field {made.keys() - names}"
            return tuple(map(made.get, fields))

        methods = {"forward": staticmethod(forward), "backward": staticmethod(gradient)}
        return type(record.__name__, (torch.autograd.Function,), methods)

    return function
