"""How sparse a model's blocks are, by layer, position and token, and the time that each gains: as a table and JSON."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from gossamer._core.files import write_text
from gossamer.ffn import SparseBlock
from gossamer.ffn.block import Block, run
from gossamer.sparsity.statistics import Batch, LayerStatistics, Recorder, observe, run_batches, sparse_blocks

COMMON = 2**-14
"""The share of all tokens that a common one has at least, as in the paper."""
NOISE = 0.05
"""A difference in time that counts for none."""
LEAST = 1e-3
"""Seconds that calls are repeated for between two readings of the clock."""


@dataclass(frozen=True)
class Measured:
    """Seconds of one block on its input in the last batch.

    Args:
        path: the path that it takes, as in `ffn.gated`.
        pairs: seconds (on that path, in plain PyTorch), one measured right after the other, several times.
    """

    path: str
    pairs: tuple[tuple[float, float], ...]

    @property
    def ratios(self) -> tuple[float, float, float]:
        """The 10th percentile, the median and the 90th percentile of plain PyTorch's seconds over those of the path."""
        return _ratios(self.pairs)


def _ratios(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    found = sorted(dense / sparse for sparse, dense in pairs)
    last = len(found) - 1
    return (found[round(0.1 * last)], median(found), found[round(0.9 * last)]) if found else (math.nan,) * 3


@dataclass(frozen=True)
class Report:
    """The result of `report`. `print` it for its table, `save` it as text and JSON.

    Args:
        layers: `LayerStatistics` by the name of the block's module.
        measured: times by the same names; empty where none were taken.
        names: the spelling of a token by its number.
        missed: blocks that were not called, or not as sparse ones, as those with a hook are not.
    """

    layers: dict[str, LayerStatistics]
    measured: dict[str, Measured]
    names: Callable[[int], str] = str
    missed: tuple[str, ...] = ()

    def table(self) -> list[dict[str, Any]]:
        """A row for each layer: its name, its counts, and times in seconds."""
        rows = []
        for name, found in self.layers.items():
            row: dict[str, Any] = {"layer": name, "neurons": found.num_neurons, "tokens": found.tokens}
            row |= {"mean": found.mean, "p99": found.quantile(0.99), "max": found.max}
            row["dead"] = found.dead
            if name in self.measured:
                times = self.measured[name]
                sparse, dense = (median(seconds) for seconds in zip(*times.pairs))
                row |= {"path": times.path, "dense": dense, "sparse": sparse}
                row |= dict(zip(("p10", "speed-up", "p90"), times.ratios))
            rows.append(row)
        return rows

    def tokens(self, layer: str | None = None, *, common: float = COMMON) -> list[tuple[int, int, float]]:
        """Tokens from the one with the fewest entries to the one with the most: (token, how often, mean entries).

        Args:
            layer: the name of one, or None for the mean of all that know their tokens.
            common: the share of the tokens that a token of the list has, beside being there at all.

        Raises:
            ValueError: no such layer.
        """
        entries, counts, layers = self._sums("token", layer)
        kept = (counts >= max(common * float(counts.sum()), layers, 1)).nonzero().flatten()
        means = entries[kept].double() / counts[kept]
        order = means.argsort(stable=True)
        often = counts[kept] // max(layers, 1)
        return [(int(kept[i]), int(often[i]), float(means[i])) for i in order]

    def positions(self, layer: str | None = None) -> Tensor:
        """Mean entries by position in the sequence, `[T]`; NaN where no token was.

        Args:
            layer: the name of one, or None for the mean of all.

        Raises:
            ValueError: no such layer.
        """
        entries, counts, _ = self._sums("position", layer)
        return entries.double() / counts

    def _sums(self, kind: str, layer: str | None) -> tuple[Tensor, Tensor, int]:
        """(entries, tokens) by position or token, summed over layers on the CPU, and how many layers know any."""
        if layer is not None and layer not in self.layers:
            raise ValueError(
                f"sparsity.Report: layer must be one of {', '.join(map(repr, self.layers))}, got {layer!r}."
            )
        some = self.layers.values() if layer is None else [self.layers[layer]]
        pairs = [torch.stack([getattr(s, f"{kind}_{of}").cpu() for of in ("entries", "tokens")]) for s in some]
        sums = torch.zeros(2, max((pair.shape[1] for pair in pairs), default=0), dtype=torch.int64)
        for pair in pairs:
            sums[:, : pair.shape[1]] += pair
        return sums[0], sums[1], sum(bool(pair[1].any()) for pair in pairs)

    @property
    def ratios(self) -> tuple[float, float, float]:
        """The 10th percentile, the median and the 90th percentile of plain PyTorch's time of all blocks over ours; NaN
        where none was measured."""
        rounds = zip(*(times.pairs for times in self.measured.values()))
        return _ratios([(sum(sparse for sparse, _ in taken), sum(dense for _, dense in taken)) for taken in rounds])

    @property
    def verdict(self) -> str:
        """Whether the model's blocks gain, by how much and by which path, in a sentence or two.

        No verdict is given where the spread of the measurements has 1 in it, as on a machine that does other things.
        """
        share = sum(s.mean for s in self.layers.values()) / sum(s.num_neurons for s in self.layers.values())
        active = f"{share:.1%} of the neurons are active for a token, on average."
        if not self.measured:
            return f"Not measured: {active} Call report(..., measure=True) to time the blocks."
        paths = Counter(times.path for times in self.measured.values())
        shown = ", ".join(f"{name} in {count}" for name, count in paths.most_common())
        gain = sum(t.ratios[1] > 1 + NOISE and t.ratios[0] > 1 for t in self.measured.values())
        low, middle, high = self.ratios
        times = (
            f"plain PyTorch takes {middle:.2f} times as long as gossamer for its blocks, on the last batch "
            f"({low:.2f} to {high:.2f} in eight of ten measurements)"
        )
        if low > 1 and middle > 1 + NOISE:
            said = f"This model gains: {times}."
        elif high < 1 and middle < 1 - NOISE:
            said = f"This model does not gain: {times}. Leave its blocks dense."
        elif low < 1 - NOISE or high > 1 + NOISE:
            said = f"No verdict: {times}. Measure again on a machine that does nothing else, or with larger batches."
        else:
            said = f"This model gains nothing and loses nothing: {times}."
        return f"{said} {gain} of {len(self.measured)} layers gain. Paths: {shown}. {active}"

    def save(self, folder: Path | str) -> None:
        """Writes `report.txt` and `report.json`: verdict, layers, mean entries by position and by token."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tokens = [{"token": t, "name": self.names(t), "count": n, "mean": mean} for t, n, mean in self.tokens()]
        content = {"verdict": self.verdict, "layers": self.table(), "positions": self.positions().tolist()}
        write_text("sparsity.Report.save", folder / "report.txt", f"{self}\n")
        data = json.dumps(_plain(content | {"tokens": tokens}), indent=1)
        write_text("sparsity.Report.save", folder / "report.json", data + "\n")

    def __str__(self) -> str:
        rows = [{key: _short(key, value) for key, value in row.items()} for row in self.table()]
        widths = {key: max(len(key), *(len(row.get(key, "")) for row in rows)) for key in rows[0]}
        lines = [
            "  ".join(f"{row.get(key, ''):>{widths[key]}}" for key in widths) for row in ({k: k for k in widths}, *rows)
        ]
        lines.append(self.verdict)
        for title, some in (("fewest", self.tokens()[:6]), ("most", self.tokens()[:-7:-1])):
            if some:
                said = ", ".join(f"{self.names(token)!r} {mean:.1f}" for token, _, mean in some)
                lines.append(f"tokens with the {title} entries: {said}")
        if self.missed:
            lines.append(f"not called, or not as a sparse block: {', '.join(self.missed)}")
        return "\n".join(lines)


def report(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    names: Callable[[int], str] = str,
    measure: bool = True,
    progress: Callable[[int, int | None], Any] | None = None,
) -> Report:
    """How sparse a model's blocks are by layer, position and token, which neurons are dead, and the gain of each block.

    The model reads the batches in evaluation mode, without gradients. Counting waits for nothing. Then, with `measure`,
    the last batch is read again until each block knows how sparse it is, and once more, and each block is timed on its
    input, on the path that it takes by then and in plain PyTorch; that waits for the device.

    Args:
        model: `nn` modules or a model of transformers after `integrations.transformers.patch(model, sparse=True)`.
        batches: arguments of calls of the model: a tensor, keyword arguments as transformers' tokenizers give them, or
            a tuple of arguments. Rows that an `attention_mask` leaves out are not counted.
        names: the spelling of a token by its number, as `lambda token: tokenizer.decode([token])`.
        measure: whether blocks are timed.
        progress: called after each batch with (batches done, batches in all or None).

    Returns:
        A `Report`.

    Raises:
        ValueError: no sparse block in model, or no batch.

    Source: Cetin et al., "Sparser, Faster, Lighter Transformer Language Models", section 4.3 and figures 6, 7, 10
    and 11.

    >>> mlp = gossamer.nn.GatedMLP(8, 24, activation="relu")
    >>> report(mlp, [torch.ones(2, 5, 8)], measure=False).positions().shape
    torch.Size([5])
    """
    every, last = sparse_blocks("sparsity.report", model), list[Batch]()
    with Recorder(model) as recorder:

        def before(batch: Batch) -> None:
            recorder.read(batch)
            last[:] = [batch]

        run_batches(model, batches, before, progress)
    if not recorder.layers:
        raise ValueError(
            "sparsity.report: batches must reach a sparse block without gradients, but none was called. A block whose "
            "activation is no ReLU calls none, and one that batches do not go through."
        )
    blocks = {name: block for name, block in every.items() if name in recorder.layers}
    measured = _time_blocks(model, blocks, last[0]) if measure else {}
    return Report(recorder.layers, measured, names, tuple(name for name in every if name not in blocks))


def _time_blocks(model: nn.Module, blocks: dict[str, SparseBlock], batch: Batch) -> dict[str, Measured]:
    """Times blocks on their inputs when the model reads a batch, on the path that they take once they know it."""
    run_batches(model, [batch] * max(block.density.rows.lag for block in blocks.values()))
    measured: dict[str, Measured] = {}

    def measure(name: str, block: Block) -> None:
        path = blocks[name].last_path
        if path is not None and name not in measured and block.x.numel():
            sparse, dense = (lambda one=one: run("sparsity.report", block, one, None) for one in (path, "dense"))
            measured[name] = Measured(path, pairs(sparse, dense, block.x.device))

    observe("sparsity.report", blocks, measure)
    try:
        run_batches(model, [batch])
    finally:
        for sparse_block in blocks.values():
            sparse_block.observer = None
    return measured


def pairs(first: Callable[[], Any], second: Callable[[], Any], device: torch.device) -> tuple[tuple[float, float], ...]:
    """Seconds of two calls, 15 times; waits for the device. The two are timed one right after the other, in turn
    the one and the other first, so that a load that comes and goes meets both."""
    calls, repeats = (first, second), []
    for call in calls:
        _timed(call, 1, device)
        repeats.append(max(1, min(64, round(LEAST / max(_timed(call, 1, device), 1e-7)))))
    taken = []
    for number in range(15):
        times = {at: _timed(calls[at], repeats[at], device) for at in ((0, 1) if number % 2 == 0 else (1, 0))}
        taken.append((times[0], times[1]))
    return tuple(taken)


def _timed(call: Callable[[], Any], repeats: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / repeats


def _short(key: str, value: Any) -> str:
    if key in ("dense", "sparse"):
        return f"{value * 1e6:.1f} us"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _plain(value: Any) -> Any:
    """NaN, which JSON does not have, as null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
