"""What is sparse in a model, layer by layer, by position and by token, and what it gains: as tables and plots."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.ffn import SparseBlock
from gossamer.ffn.block import Block, run
from gossamer.sparsity._timing import pairs
from gossamer.sparsity.statistics import Batch, LayerStatistics, Recorder, observe, run_batches, sparse_blocks

COMMON = 2**-14
"""The share of all tokens that one has to be to count as common, as in the paper."""


LEAST_LAYERS = 3
"""Of a correlation."""
NOISE = 0.05
"""A difference in time that counts for none."""


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
    def sparse(self) -> float:
        """Seconds on that path, the median."""
        return median(sparse for sparse, _ in self.pairs)

    @property
    def dense(self) -> float:
        """Seconds in plain PyTorch, the median."""
        return median(dense for _, dense in self.pairs)

    @property
    def speed_up(self) -> float:
        """How many times as long plain PyTorch takes: the median over pairs."""
        return ratios(self.pairs)[1]

    @property
    def spread(self) -> tuple[float, float]:
        """The 10th and the 90th percentile of that over pairs."""
        return ratios(self.pairs)[::2]


def ratios(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """The 10th percentile, the median and the 90th percentile of dense over sparse seconds."""
    found = sorted(dense / sparse for sparse, dense in pairs)
    last = len(found) - 1
    return found[round(0.1 * last)], median(found), found[round(0.9 * last)]


@dataclass(frozen=True)
class Report:
    """What `report` found. `print` it for its table, `save` it for the plots.

    Args:
        layers: `LayerStatistics` by the name of the block's module.
        measured: times by the same names; empty where none were taken.
        names: of tokens, by their numbers.
        missed: blocks that were not called, or not as sparse ones, as those with a hook are not.
    """

    layers: dict[str, LayerStatistics]
    measured: dict[str, Measured]
    names: Callable[[int], str] = str
    missed: tuple[str, ...] = ()

    def table(self) -> list[dict[str, Any]]:
        """A row for each layer: its name, what `LayerStatistics` says of it, and times in seconds."""
        rows = []
        for name, found in self.layers.items():
            row: dict[str, Any] = {
                "layer": name,
                "neurons": found.num_neurons,
                "tokens": found.tokens,
                "mean": found.mean,
                "p99": found.quantile(0.99),
                "max": found.max,
                "union of 32": found.mean_union,
                "dead": found.dead,
            }
            if name in self.measured:
                times = self.measured[name]
                row |= {"path": times.path, "dense": times.dense, "sparse": times.sparse, "speed-up": times.speed_up}
                row |= dict(zip(("p10", "p90"), times.spread))
            rows.append(row)
        return rows

    def tokens(self, layer: str | None = None, *, common: float = COMMON) -> list[tuple[int, int, float]]:
        """Tokens from the one with the fewest entries to the one with the most: (token, how often, mean entries).

        Args:
            layer: the name of one, or None for the mean of all that know their tokens.
            common: the share of the tokens that one must be to be taken, and one in any case.

        Raises:
            ValueError: no such layer.
        """
        found = self._layers(layer)
        if not found:
            return []
        counts = sum(s.token_tokens.cpu() for s in found)
        entries = sum(s.token_entries.cpu() for s in found)
        assert isinstance(counts, Tensor) and isinstance(entries, Tensor)
        kept = (counts >= max(common * float(counts.sum()), len(found))).nonzero().flatten()
        means = entries[kept].double() / counts[kept]
        order = means.argsort(stable=True)
        often = counts[kept] // len(found)
        return [(int(kept[i]), int(often[i]), float(means[i])) for i in order]

    def positions(self, layer: str | None = None) -> Tensor:
        """Mean entries by position in the sequence, `[T]`; NaN where no token was.

        Args:
            layer: the name of one, or None for the mean of all.

        Raises:
            ValueError: no such layer.
        """
        found = [s for s in self._layers(layer, tokens=False) if s.position_tokens.numel()]
        longest = max((s.position_tokens.numel() for s in found), default=0)
        sums = torch.zeros(2, longest, dtype=torch.int64)
        for s in found:
            held = s.position_tokens.numel()
            sums[:, :held] += torch.stack((s.position_entries, s.position_tokens)).cpu()
        return sums[0].double() / sums[1]

    @property
    def correlation(self) -> float:
        """Pearson's coefficient of the layers' mean entries and their speed-up; NaN of fewer than three layers, for two
        always lie on a line."""
        both = [(self.layers[name].mean, times.speed_up) for name, times in self.measured.items()]
        if len(both) < LEAST_LAYERS:
            return math.nan
        return float(torch.corrcoef(torch.tensor(both, dtype=torch.float64).t())[0, 1])

    @property
    def speed_up(self) -> float:
        """Plain PyTorch's time of all blocks that were measured over ours, the median; NaN where none was."""
        return self._ratios[1]

    @property
    def spread(self) -> tuple[float, float]:
        """The 10th and the 90th percentile of that over measurements; NaN where none was."""
        return self._ratios[::2]

    @property
    def _ratios(self) -> tuple[float, float, float]:
        rounds = zip(*(times.pairs for times in self.measured.values()))
        sums = [(sum(sparse for sparse, _ in taken), sum(dense for _, dense in taken)) for taken in rounds]
        return ratios(sums) if sums else (math.nan, math.nan, math.nan)

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
        gain = sum(times.speed_up > 1 + NOISE and times.spread[0] > 1 for times in self.measured.values())
        low, middle, high = self._ratios
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

    def save(self, folder: Path | str) -> list[Path]:
        """Writes `report.txt`, `report.json` and, as PNG, the plots of layers, entries, positions and tokens; returns
        their paths. Needs matplotlib: `pip install 'gossamer[cli]'`."""
        from gossamer.sparsity._plots import plots

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        text, data = folder / "report.txt", folder / "report.json"
        text.write_text(f"{self}\n", encoding="utf-8")
        tokens = [{"token": t, "name": self.names(t), "count": n, "mean": mean} for t, n, mean in self.tokens()]
        content = {
            "verdict": self.verdict,
            "layers": self.table(),
            "positions": self.positions().tolist(),
            "tokens": tokens,
        }
        data.write_text(json.dumps(_plain(content), indent=1) + "\n", encoding="utf-8")
        written = [text, data]
        for name, figure in plots(self).items():
            written.append(folder / f"{name}.png")
            figure.savefig(written[-1], dpi=130)
        return written

    def __str__(self) -> str:
        rows = [{key: _short(key, value) for key, value in row.items()} for row in self.table()]
        widths = {key: max(len(key), *(len(row.get(key, "")) for row in rows)) for key in rows[0]}
        lines = [
            "  ".join(f"{row.get(key, ''):>{widths[key]}}" for key in widths) for row in ({k: k for k in widths}, *rows)
        ]
        lines.append(self.verdict)
        if 0 < len(self.measured) < LEAST_LAYERS:
            lines.append(f"no correlation of mean entries and speed-up: it takes {LEAST_LAYERS} layers that were timed")
        elif not math.isnan(self.correlation):
            lines.append(f"correlation of mean entries and speed-up: {self.correlation:.3f}")
        for title, some in (("fewest", self.tokens()[:6]), ("most", self.tokens()[:-7:-1])):
            if some:
                said = ", ".join(f"{self.names(token)!r} {mean:.1f}" for token, _, mean in some)
                lines.append(f"tokens with the {title} entries: {said}")
        if self.missed:
            lines.append(f"not called, or not as a sparse block: {', '.join(self.missed)}")
        return "\n".join(lines)

    def _layers(self, layer: str | None, tokens: bool = True) -> list[LayerStatistics]:
        if layer is not None and layer not in self.layers:
            raise ValueError(
                f"sparsity.Report: layer must be one of {', '.join(map(repr, self.layers))}, got {layer!r}."
            )
        found = list(self.layers.values()) if layer is None else [self.layers[layer]]
        return [s for s in found if not tokens or (s.token_tokens.numel() and bool(s.token_tokens.any()))]


def report(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    names: Callable[[int], str] = str,
    measure: bool = True,
    progress: Callable[[int, int | None], Any] | None = None,
) -> Report:
    """How sparse a model's blocks are by layer, position and token, which neurons are dead, and what each block gains.

    Counting waits for nothing. Then, with `measure`, the last batch is read again until each block knows how sparse it
    is, and once more, and each block timed on its input, on the path that it takes by then and in plain PyTorch; that
    waits for the device.

    Args:
        model: `nn` modules or a model of transformers after `integrations.transformers.patch(model, sparse=True)`.
        batches, progress: as in `statistics`.
        names: of a token by its number, as `lambda token: tokenizer.decode([token])`.
        measure: whether blocks are timed.

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
    measured = time_blocks(model, blocks, last[0]) if measure else {}
    return Report(recorder.layers, measured, names, tuple(name for name in every if name not in blocks))


def time_blocks(model: nn.Module, blocks: dict[str, SparseBlock], batch: Batch) -> dict[str, Measured]:
    """Times blocks on what they meet when the model reads a batch, on the path that they take once they know it."""
    run_batches(model, [batch] * max(block.density.rows.lag for block in blocks.values()))
    measured: dict[str, Measured] = {}

    def measure(name: str, block: Block) -> None:
        path = blocks[name].last_path
        if path is not None and name not in measured and block.x.numel():
            operator = "sparsity.report"
            sparse, dense = (lambda method=method: run(operator, block, method, None) for method in (path, "dense"))
            measured[name] = Measured(path, pairs(sparse, dense, block.x.device))

    observe("sparsity.report", blocks, measure)
    try:
        run_batches(model, [batch])
    finally:
        for sparse_block in blocks.values():
            sparse_block.observer = None
    return measured


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
