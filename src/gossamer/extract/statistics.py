"""Statistics of every latent: how often, how strongly and where it fires. All of them on one device."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.rowsparse import Rows

BINS, LOWEST = 32, -24
"""Bin b of the histogram counts magnitudes in [2^(b + LOWEST), 2^(b + LOWEST + 1)); the outer ones also the rest."""


class Statistics:
    """Of `d_sae` latents, over some rows. Only whole numbers are added up: no order of addition shows."""

    NAMES = ("firing_counts", "maximum", "histogram", "top_values", "top_positions")

    def __init__(self, d_sae: int, top: int, device: torch.device) -> None:
        self._least = torch.zeros(d_sae, device=device)
        self.firing_counts = torch.zeros(d_sae, dtype=torch.int64, device=device)
        self.maximum = torch.zeros(d_sae, device=device)
        self.histogram = torch.zeros(d_sae, BINS, dtype=torch.int64, device=device)
        self.top_values = torch.zeros(d_sae, top, device=device)
        self.top_positions = torch.full((d_sae, top), -1, dtype=torch.int64, device=device)

    def following(self, device: torch.device) -> Statistics:
        """Empty statistics for later rows, which ignore values too small to be among the largest of all."""
        d_sae, top = self.top_values.shape
        found = Statistics(d_sae, top, device)
        found._least.copy_(self._bar())
        return found

    def add(self, state: dict[str, Tensor]) -> None:
        """Adds the statistics of rows that stand behind all of these."""
        self.firing_counts += state["firing_counts"]
        torch.maximum(self.maximum, state["maximum"], out=self.maximum)
        self.histogram += state["histogram"]
        column, rank = (state["top_positions"] >= 0).nonzero(as_tuple=True)
        self._keep_top(column, state["top_positions"][column, rank], state["top_values"][column, rank])

    def state(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.NAMES}

    def restore(self, state: dict[str, Tensor]) -> None:
        for name in self.NAMES:
            getattr(self, name).copy_(state[name])

    def update(self, rows: Rows, first: int) -> int:
        """Adds rows that stand at `first` and after; how many of their entries are not finite, and so left out."""
        counts = rows.counts
        position = first + torch.repeat_interleave(torch.arange(counts.shape[0], device=counts.device), counts)
        value = rows.values.float().abs()
        held = value.isfinite() & (value > 0)
        unusual = int((~value.isfinite()).sum())
        column, position, value = rows.indices.long()[held], position[held], value[held]
        d_sae = self.firing_counts.shape[0]
        self.firing_counts += torch.bincount(column, minlength=d_sae)
        self.maximum.scatter_reduce_(0, column, value, "amax")
        # frexp's exponent is one above that of the leading bit.
        octave = (torch.frexp(value).exponent - 1 - LOWEST).clamp(0, BINS - 1)
        self.histogram += torch.bincount(column * BINS + octave, minlength=d_sae * BINS).view(d_sae, BINS)
        self._keep_top(column, position, value)
        return unusual

    def _keep_top(self, column: Tensor, position: Tensor, value: Tensor) -> None:
        """The largest values of each latent; of equal ones the first."""
        top = self.top_values.shape[1]
        if top == 0:
            return
        # Kept values came first, so an equal value does not replace one.
        better = value > self._bar()[column]
        column, position, value = column[better], position[better], value[better]
        fired = torch.unique(column)
        columns = torch.cat([fired.repeat_interleave(top), column])
        values = torch.cat([self.top_values[fired].reshape(-1), value])
        positions = torch.cat([self.top_positions[fired].reshape(-1), position])
        order = torch.sort(values, descending=True, stable=True).indices
        order = order[torch.sort(columns[order], stable=True).indices]
        columns = columns[order]
        rank = torch.arange(columns.shape[0], device=columns.device) - torch.searchsorted(columns, columns)
        kept = rank < top
        at = columns[kept], rank[kept]
        self.top_values[at], self.top_positions[at] = values[order][kept], positions[order][kept]

    def _bar(self) -> Tensor:
        """The bound above which a value is among the largest of a latent: `[d_sae]`."""
        return torch.maximum(self._least, self.top_values[:, -1]) if self.top_values.shape[1] else self._least
