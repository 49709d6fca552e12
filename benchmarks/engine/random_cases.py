"""Cases drawn at random, and how often, how far and where gossamer is slower there.

Kernels are tuned on some shapes, and claims about these shapes break on others. So each room states ranges in
`benchmarks/<room>/sweep.py`: a text, `RANGES`, and `draw(random, device, quick)`, which gives a case of the sizes,
dtypes and densities that the room is for. The `draw` of a room with a second text, `WILD`, takes a fourth argument,
`wild`, and then draws from wider ranges.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from benchmarks.engine.case import Case, import_path

_COMPILED = "torch.compile"
"""Compiles for each shape anew, which takes longer than all the rest of a sweep."""
_WORST = 10
LIMIT = 0.25
"""Seconds that a provider of a case is timed for, at most; compiling, checking and capturing take time beside that."""


def log_uniform(random: Random, low: int, high: int, step: int = 1) -> int:
    """A multiple of `step` in [low, high] whose logarithm is about uniform; low itself where step is larger."""
    drawn = math.exp(random.uniform(math.log(low), math.log(high + 1)))
    return min(max(int(drawn) // step * step, low), high)


def beside_dense(case: Case) -> Case:
    """The case without peers but dense PyTorch, beside which a room is never to be slower in its ranges."""
    return replace(case, providers=tuple(p for p in case.providers if p.ours or p.name == "dense"))


def draw_cases(
    folder: Path, room: str | None, count: int, seed: int, device: torch.device, quick: bool, wild: bool = False
) -> list[Case]:
    """`count` cases of each room that has ranges, or of one; the same for the same seed, and the first of more.

    Rooms take turns, so that a run that is cut short has seen all of them. With `wild` rooms draw from their wider
    ranges, if they have any.

    Raises ValueError where no room has that name.
    """
    files = sorted(folder.glob("*/sweep.py"))
    rooms = [file.parent.name for file in files]
    if room is not None and room not in rooms:
        raise ValueError(f"benchmarks sweep: --room must be one of {', '.join(rooms)}, got {room!r}.")
    import_path(folder)
    found: list[list[Case]] = []
    for name in rooms if room is None else [room]:
        module = import_module(f"{folder.name}.{name}.sweep")
        random = Random(f"{name} {seed}")
        options = (random, device, quick, True) if wild and hasattr(module, "WILD") else (random, device, quick)
        drawn = (module.draw(*options) for _ in range(count))
        found.append([replace(case, sweep=None, energy=False, providers=tuple(_shown(case))) for case in drawn])
    return [case for turn in zip(*found) for case in turn]


def _shown(case: Case) -> Iterator[Any]:
    """Our first provider, which ratios speak of, and its peers."""
    ours = next(provider for provider in case.providers if provider.ours)
    for provider in case.providers:
        peer = not provider.ours and not provider.partial and provider.precision == ours.precision
        if provider is ours or (peer and provider.name != _COMPILED):
            yield provider


@dataclass(frozen=True)
class Ratio:
    """A case's times over ours: the dense way's, and the best peer's (which may be the dense way), by CUDA graphs where
    both have one."""

    room: str
    name: str
    id: str
    dense: float | None
    best: float
    peer: str
    ours: float
    """Seconds."""


def ratios(records: list[dict[str, Any]]) -> list[Ratio]:
    """Of every case, as a file of results has it, in which we and a peer were timed."""
    found = []
    for record in records:
        timed = [provider for provider in record["providers"] if provider["eager"]]
        ours = next((provider for provider in timed if provider["ours"]), None)
        peers = {p["name"]: _over(p, ours) for p in timed if not p["ours"] and ours is not None}
        if ours is None or not peers:
            continue
        peer = min(peers, key=peers.__getitem__)
        dense = min((ratio for name, ratio in peers.items() if name.startswith("dense")), default=None)
        seconds = (ours["graph"] or ours["eager"])["median"]
        found.append(Ratio(record["room"], record["name"], record["id"], dense, peers[peer], peer, seconds))
    return found


def _over(peer: dict[str, Any], ours: dict[str, Any]) -> float:
    kind = "graph" if peer["graph"] and ours["graph"] else "eager"
    ratio: float = peer[kind]["median"] / ours[kind]["median"]
    return ratio


def line(record: dict[str, Any]) -> str:
    """A case in one line."""
    found = ratios([record])
    if not found:
        return f"{escape(record['id'])}: [red]not timed[/]"
    (ratio,) = found
    told = [] if ratio.dense is None else [f"dense {ratio.dense:.2f}x"]
    told += [] if ratio.peer == "dense" else [f"{escape(ratio.peer)} {ratio.best:.2f}x"]
    return f"{escape(record['id'])}: {', '.join(told)}"


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """For each kind of peer: figures of `"room/name"` of cases, of `"room"` and of `"all"`. These are how many cases,
    geometric mean, shares below 1.00 and 0.95 and of those slower by more than 5% and 3 us, and the worst."""
    found = ratios(records)
    groups: dict[str, list[Ratio]] = {}
    for ratio in found:
        for name in (f"{ratio.room}/{ratio.name}", ratio.room, "all"):
            groups.setdefault(name, []).append(ratio)
    order = sorted(groups, key=lambda name: (name == "all", name))
    return {kind: {name: _figures(groups[name], kind) for name in order} for kind in ("dense", "best")}


def _figures(found: list[Ratio], kind: str) -> dict[str, Any]:
    chosen = [r for r in found if getattr(r, kind) is not None]
    values = sorted((getattr(r, kind), r.id) for r in chosen)
    slower = [r for r in chosen if r.ours > 1.05 * getattr(r, kind) * r.ours + 3e-6]
    if not values:
        return {"cases": 0}
    logs = [math.log(value) for value, _ in values]
    return {
        "cases": len(values),
        "geometric_mean": math.exp(sum(logs) / len(logs)),
        "below_1.00": sum(value < 1.0 for value, _ in values) / len(values),
        "below_0.95": sum(value < 0.95 for value, _ in values) / len(values),
        "slower_by_5%_and_3us": len(slower) / len(values),
        "worst": [{"id": case, "ratio": value} for value, case in values[:_WORST]],
    }


def tables(records: list[dict[str, Any]]) -> list[Table]:
    """The summary of a sweep, and the ten cases in which we are slowest beside the dense way."""
    told = summary(records)
    table = Table(title="peers' times over gossamer's, at random shapes", title_justify="left")
    for column in (
        "cases of",
        "beside",
        "cases",
        "geometric mean",
        "below 1.00",
        "below 0.95",
        "by 5% + 3 us",
        "worst",
    ):
        table.add_column(column, justify="left" if column in ("cases of", "beside") else "right")
    for kind, label in (("dense", "dense PyTorch"), ("best", "the best peer")):
        for name, figures in told[kind].items():
            if figures["cases"]:
                table.add_row(
                    escape(name), label, str(figures["cases"]), f"{figures['geometric_mean']:.2f}x",
                    f"{figures['below_1.00']:.1%}", f"{figures['below_0.95']:.1%}",
                    f"{figures['slower_by_5%_and_3us']:.1%}", f"{figures['worst'][0]['ratio']:.2f}x",
                )  # fmt: skip
    worst = Table(title=f"the {_WORST} worst, beside dense PyTorch", title_justify="left")
    worst.add_column("ratio", justify="right")
    worst.add_column("case", overflow="fold")
    for entry in told["dense"].get("all", {}).get("worst", []):
        worst.add_row(f"{entry['ratio']:.2f}x", escape(entry["id"]))
    return [table, worst]
