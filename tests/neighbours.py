"""A random search of all rooms: operands strided, turned, offset and expanded among NaN, with NaN in whatever takes no
part, give the results and gradients of contiguous clean copies, and those of dense float64.

`python -m tests.neighbours --cases 1000000 --seed 7` searches for long; `tests/test_neighbours.py` does for seconds.
"""

import argparse
import collections
import math
import random
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.strategies import laid_out

SIZES = (0, 1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65)
LAYOUTS = ("contiguous", "transposed", "strided", "misaligned")
Operands = dict[str, Any]
Results = list[Tensor | None]


@dataclass
class Case:
    """Sizes, choices and operands of one call, drawn from a seed."""

    seed: int
    clean: Operands = field(default_factory=dict)
    """Contiguous operands; what takes no part is 0 in them."""
    hidden: dict[str, tuple[Tensor, Any]] = field(default_factory=dict)
    """By operand: the elements that take no part, and the value that they may have."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.generator = torch.Generator().manual_seed(self.seed)
        self.dtype = self.pick(torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)

    def pick(self, *values: Any) -> Any:
        return self.random.choice(values)

    def size(self, most: int = 65) -> int:
        size: int = self.pick(*(size for size in SIZES if size <= most))
        return size

    def leading(self) -> tuple[int, ...]:
        return tuple(self.pick(0, 1, 2, 3) for _ in range(self.pick(0, 1, 1, 1, 2)))

    def draw(self, *shape: int, limit: int = 2, step: float = 1.0) -> Tensor:
        """Few whole numbers, times a step."""
        drawn = torch.randint(-limit, limit + 1, shape, generator=self.generator)
        return drawn.to(self.dtype) * step

    def chance(self, *shape: int, share: float = 0.5) -> Tensor:
        return torch.rand(shape, generator=self.generator) < share

    def give(self, name: str, x: Tensor, hidden: Tensor | None = None, value: Any = math.nan) -> Tensor:
        """An operand, of which the `hidden` elements take no part."""
        self.clean[name] = x
        if hidden is not None:
            self.clean[name] = torch.where(hidden.expand_as(x), torch.zeros_like(x), x)
            self.hidden[name] = hidden.expand_as(x), value
        return self.clean[name]

    def maybe(self, name: str, *shape: int, limit: int = 2, step: float = 1.0) -> None:
        if self.pick(True, False):
            self.give(name, self.draw(*shape, limit=limit, step=step))
        else:
            self.clean[name] = None

    def lay_out(self) -> Operands:
        """The operands in other memory, with anything where it takes no part. One that is expanded is changed in
        `clean`, too."""
        lying: Operands = {}
        for name, x in self.clean.items():
            if x is None:
                lying[name] = None
                continue
            if name in self.hidden:
                hidden, value = self.hidden[name]
                x = x.masked_fill(hidden, value)
            elif x.is_floating_point() and x.numel() and x.dim() and self.random.random() < 0.15:
                dim = self.random.randrange(x.dim())
                lying[name] = x.narrow(dim, 0, 1).expand(x.shape)
                self.clean[name] = lying[name].contiguous()
                continue
            lying[name] = laid_out(x, self.pick(*LAYOUTS))
        return lying


@dataclass
class Scenario:
    call: Callable[..., Results]
    """Of the operands by name, with the operators under test."""
    reference: Callable[..., Results] | None = None
    """The same in dense PyTorch; None in the place of a result that it leaves out."""
    gradients: bool = True


class Finding(Exception):
    """A difference, or an error that names no rule."""


def _run(
    call: Callable[..., Results], given: Operands, differentiable: bool, wide: bool = False
) -> tuple[Results, dict[str, Tensor | None]]:
    """Results of a call, and the gradients of its operands by name for weights that depend on shapes alone."""
    leaves = {}
    for name, x in given.items():
        if isinstance(x, Tensor) and x.is_floating_point():
            x = x.detach().double() if wide else x.detach()
            x.requires_grad_(differentiable)
        leaves[name] = x
    results = call(**leaves)
    grads: dict[str, Tensor | None] = {}
    if differentiable:
        generator = torch.Generator().manual_seed(0)
        total: Any = 0.0
        for result in results:
            if result is None or not result.requires_grad:
                continue
            weights = torch.randint(-2, 3, result.shape, generator=generator).to(result.dtype)
            total = total + (torch.where(result.isfinite(), result, 0) * weights).sum()
        if isinstance(total, Tensor):
            named = {name: x for name, x in leaves.items() if isinstance(x, Tensor) and x.requires_grad}
            found = torch.autograd.grad(total, list(named.values()), allow_unused=True)
            grads = dict(zip(named, found))
    return [None if result is None else result.detach() for result in results], grads


def _compare(what: str, got: Tensor, wanted: Tensor, times: float, dtype: torch.dtype) -> None:
    if got.shape != wanted.shape:
        raise Finding(f"{what}: shape {list(got.shape)} for {list(wanted.shape)}")
    if not got.is_floating_point():
        if not torch.equal(got, wanted.to(got.dtype)):
            raise Finding(f"{what}: whole numbers differ")
        return
    got, wanted = got.double(), wanted.double()
    finite = wanted.isfinite()
    others = [torch.where(finite, 0, x).nan_to_num(nan=7e307) for x in (got, wanted)]
    if not torch.equal(*others):
        raise Finding(f"{what}: NaN or infinity in other places")
    if not bool(finite.any()):
        return
    scale = 1 + float(wanted[finite].abs().max())
    off = float((got - wanted)[finite].abs().max())
    if not off <= times * torch.finfo(dtype).eps * scale:
        raise Finding(f"{what}: off by {off:.3g} of {scale:.3g}")


def check(scenario: Callable[[Case], Scenario], seed: int) -> str:
    """ "ran", or "refused" where the library names a rule both ways; raises `Finding` otherwise."""
    case = Case(seed)
    made = scenario(case)
    lying = case.lay_out()
    differentiable = made.gradients and case.pick(True, True, False)
    outcomes: list[Any] = []
    for given in (lying, case.clean):
        try:
            outcomes.append(_run(made.call, given, differentiable))
        except (ValueError, TypeError, NotImplementedError) as error:
            text = str(error).split(".")[0]
            if text not in ("rowsparse", "sae", "gemm", "ffn", "attention", "blocksparse"):
                raise Finding(traceback.format_exc()) from error
            outcomes.append(str(error))
        except Exception as error:
            raise Finding(traceback.format_exc()) from error
    one, other = outcomes
    if isinstance(one, str) or isinstance(other, str):
        if type(one) is not type(other):
            raise Finding(f"refused one way: {one if isinstance(one, str) else other}")
        return "refused"
    for i, (a, b) in enumerate(zip(one[0], other[0], strict=True)):
        if a is not None and b is not None:
            _compare(f"result {i}, clean copies", a, b, 16, case.dtype)
    for name in one[1]:
        a, b = one[1][name], other[1].get(name)
        if (a is None) != (b is None):
            raise Finding(f"gradient of {name}: one way only")
        if a is not None and b is not None:
            _compare(f"gradient of {name}, clean copies", a, b, 32, case.dtype)
    if made.reference is None:
        return "ran"
    wanted, grads = _run(made.reference, case.clean, differentiable, wide=True)
    whole = all(w is not None for w in wanted)
    for i, (a, b) in enumerate(zip(other[0], wanted, strict=True)):
        if a is not None and b is not None:
            _compare(f"result {i}, float64", a, b, 32, case.dtype)
    for name, b in grads.items() if whole else ():
        a = other[1].get(name)
        if a is not None:
            _compare(f"gradient of {name}, float64", a, torch.zeros_like(a) if b is None else b, 128, case.dtype)
    return "ran"


def search(cases: int, seed: int, seconds: float = math.inf, report: Callable[[str], None] = print) -> int:
    """Runs cases in turn; how many findings there were. Each is reported with its scenario and seed."""
    from tests.neighbour_scenarios import SCENARIOS

    found, begun, said = 0, time.monotonic(), time.monotonic()
    counts: collections.Counter[str] = collections.Counter()
    for i in range(cases):
        scenario = SCENARIOS[i % len(SCENARIOS)]
        try:
            counts[f"{scenario.__name__} {check(scenario, seed + i)}"] += 1
        except Finding as finding:
            found += 1
            report(f"FINDING {scenario.__name__} seed {seed + i}: {finding}")
        except Exception:
            found += 1
            report(f"FINDING {scenario.__name__} seed {seed + i}, outside of a call: {traceback.format_exc()}")
        if time.monotonic() - said > 20:
            said = time.monotonic()
            report(f"{i + 1} cases, {found} findings, {said - begun:.0f} s")
        if time.monotonic() - begun > seconds:
            break
    report(", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    report(f"{sum(counts.values()) + found} cases, {found} findings, {time.monotonic() - begun:.0f} s")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=math.inf)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    raise SystemExit(search(options.cases, options.seed, options.seconds, lambda text: print(text, flush=True)) > 0)
