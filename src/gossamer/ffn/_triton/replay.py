"""Repeats the launches of a call: eager, the host takes longer than the device for all but large blocks.

The first call of a shape launches as usual and records: each launch bound to all but its pointers, and for each pointer
which tensor it came from. A tensor is an operand, a result, or lies between two launches. A repetition takes the
pointers of its own operands and results, and one piece of memory for all that lies between.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer._core import launch, tuning

_plans = launch.Plans()


class Launched(NamedTuple):
    """A launch, or None where it cannot be repeated, and what it takes from call to call: tensors, tensor descriptors
    and None."""

    bound: launch.Bound | None
    heads: Sequence[Any]


class Call(NamedTuple):
    """What identifies a call: `key` of all that launches follow from; pointers of its operands, and these united bit by
    bit."""

    key: Hashable
    pointers: list[int | None]
    addresses: int


class _Recorded(NamedTuple):
    """launches: each with the numbers of what it takes in the list (operands, results, memory between); a number with a
    descriptor stands for such a descriptor of the operand. sizes: bytes of each piece of memory."""

    launches: tuple[tuple[launch.Bound, tuple[Any, ...]], ...]
    sizes: tuple[int, ...]


def call_of(operands: Sequence[Tensor | None], *options: Hashable) -> Call:
    """The call of these operands, the first of which is a tensor."""
    found: list[Any] = []
    pointers: list[int | None] = []
    united = 0
    for t in operands:
        if t is None:
            found.append(None)
            pointers.append(None)
        else:
            pointer = t.data_ptr()
            found.append((t.shape, t.stride(), t.dtype))
            pointers.append(pointer)
            united |= pointer
    return Call((options, operands[0].get_device(), tuning.tf32(), tuple(found)), pointers, united)  # type: ignore[union-attr]


def repeat(call: Call, operands: Sequence[Tensor | None], results: Sequence[Tensor]) -> bool:
    """Launches what was recorded of such a call, or returns False."""
    device = results[0].get_device()
    plan = _plans.get(call.key, device, call.addresses)
    if plan is None:
        return False
    launches, sizes = plan.launches[0]
    table = [*call.pointers, *(result.data_ptr() for result in results)]
    room = torch.empty(sum(sizes), dtype=torch.uint8, device=results[0].device)
    at = room.data_ptr()
    for size in sizes:
        table.append(at)
        at += size
    stream = torch._C._cuda_getCurrentRawStream(device)
    for bound, heads in launches:
        given = []
        for head in heads:
            if type(head) is tuple:
                given.append(_of(head[1], operands[head[0]]))
            else:
                given.append(None if head is None else table[head])
        bound(stream, *given)
    return True


def _of(descriptor: Any, base: Tensor | None) -> Any:
    """The same descriptor of another tensor, or of none, so that a record keeps no operand alive."""
    made = object.__new__(type(descriptor))
    made.__dict__.update(vars(descriptor), base=base)
    return made


def record(
    call: Call, operands: Sequence[Tensor | None], results: Sequence[Tensor], launched: Sequence[Launched | None]
) -> None:
    """Keeps the launches of a call, unless one of them cannot be repeated, or tensors share their first element, so
    that a pointer does not tell which of them was meant. Operands are what the launches read: none is a copy."""
    done = [each for each in launched if each is not None]
    own = [None if t is None else t.data_ptr() for t in (*operands, *results)]
    known = [pointer for pointer in own if pointer is not None]
    if any(each.bound is None for each in done) or len(set(known)) < len(known):
        return
    table = {pointer: number for number, pointer in enumerate(own) if pointer is not None}
    sizes: list[int] = []

    def number_of(head: Any) -> Any:
        if head is None:
            return None
        if not isinstance(head, Tensor):
            return table[head.base.data_ptr()], _of(head, None)
        pointer = head.data_ptr()
        if pointer not in table:
            table[pointer] = len(own) + len(sizes)
            # Every part begins on 256 bytes, as the allocator's would.
            sizes.append(-(-head.nbytes // 256) * 256)
        return table[pointer]

    launches = tuple((each.bound, tuple(map(number_of, each.heads))) for each in done)
    _plans.keep(call.key, results[0].device, _Recorded(launches, tuple(sizes)))  # type: ignore[arg-type]


EXAMPLES: dict[object, dict[str, object]] = {}
"""No kernel."""
