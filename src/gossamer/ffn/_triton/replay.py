"""Repeats the launches of a call: eager, the host takes longer than the device for all but large blocks.

The first call of a shape launches as usual and records: each launch bound to all but its pointers, and for each pointer
which tensor it came from. A tensor is an operand, a result, or lies between two launches. A repetition takes the
pointers of its own operands and results, and one piece of memory for all that lies between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer._core import launch

_plans = launch.Plans()


class Launched(NamedTuple):
    """A launch, or None where it cannot be repeated, and what it takes from call to call: tensors, tensor descriptors
    and None."""

    bound: launch.Bound | None
    heads: Sequence[Any]


class _Recorded(NamedTuple):
    """launches: each with the getter of what it takes out of the list (pointers of operands and results, addresses of
    the memory between, descriptors, None). sizes: bytes of each piece of memory. descriptors: (number of an operand,
    its descriptor without it)."""

    launches: tuple[tuple[launch.Bound, Callable[[Sequence[Any]], tuple[Any, ...]]], ...]
    sizes: tuple[int, ...]
    descriptors: tuple[tuple[int, Any], ...]


def repeat(call: launch.Call, operands: Sequence[Tensor | None], results: Sequence[Tensor]) -> bool:
    """Launches what was recorded of such a call, or returns False."""
    device = results[0].get_device()
    plan = _plans.get(call.key, device, call.addresses)
    if plan is None:
        return False
    launches, sizes, descriptors = plan.launches[0]
    table = [*call.pointers, *[result.data_ptr() for result in results]]
    if sizes:
        room = torch.empty(sum(sizes), dtype=torch.uint8, device=results[0].device)
        at = room.data_ptr()
        for size in sizes:
            table.append(at)
            at += size
    table += [_of(descriptor, operands[number]) for number, descriptor in descriptors]
    table.append(None)
    stream = torch._C._cuda_getCurrentRawStream(device)
    for bound, taken in launches:
        bound(stream, *taken(table))
    return True


def _of(descriptor: Any, base: Tensor | None) -> Any:
    """The same descriptor of another tensor, or of none, so that a record keeps no operand alive."""
    made = object.__new__(type(descriptor))
    made.__dict__.update(vars(descriptor), base=base)
    return made


def record(
    call: launch.Call, operands: Sequence[Tensor | None], results: Sequence[Tensor], launched: Sequence[Launched | None]
) -> None:
    """Keeps the launches of a call, unless one of them cannot be repeated, or tensors share their first element, so
    that a pointer does not tell which of them was meant. Operands are what the launches read: none is a copy."""
    done = [each for each in launched if each is not None]
    own = [None if t is None else t.data_ptr() for t in (*operands, *results)]
    known = [pointer for pointer in own if pointer is not None]
    if any(each.bound is None for each in done) or len(set(known)) < len(known):
        return
    table = {pointer: number for number, pointer in enumerate(own) if pointer is not None}
    tensors = [head for each in done for head in each.heads if isinstance(head, Tensor)]
    between = {t.data_ptr(): t.nbytes for t in tensors if t.data_ptr() not in table}
    table |= {pointer: len(own) + number for number, pointer in enumerate(between)}
    descriptors: list[tuple[int, Any]] = []

    def number_of(head: Any) -> int:
        if head is None:
            return -1
        if isinstance(head, Tensor):
            return table[head.data_ptr()]
        descriptors.append((table[head.base.data_ptr()], _of(head, None)))
        return len(own) + len(between) + len(descriptors) - 1

    launches = tuple((each.bound, itemgetter(*map(number_of, each.heads))) for each in done)
    # Every piece begins on 256 bytes, as the allocator's would.
    sizes = tuple(-(-size // 256) * 256 for size in between.values())
    _plans.keep(call.key, results[0].device, _Recorded(launches, sizes, tuple(descriptors)))  # type: ignore[arg-type]
