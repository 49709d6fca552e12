"""Shards on their way to the disk: one is written in a thread while the next is made."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.extract import folder as disk
from gossamer.extract.ranks import Ranks
from gossamer.extract.source import checksum
from gossamer.extract.statistics import Statistics
from gossamer.extract.text import Text
from gossamer.rowsparse import Rows
from gossamer.rowsparse.formats import offsets_of


class Shard:
    """The entries of the rows from `first` on, on the host, and the statistics of these rows alone."""

    def __init__(self, number: int, first: int, statistics: Statistics) -> None:
        self.number, self.first, self.rows, self.nonfinite = number, first, 0, 0
        self.statistics = statistics
        self.source: str | None = None
        self._counts: list[Tensor] = []
        self._indices: list[Tensor] = []
        self._values: list[Tensor] = []

    def append(self, batch: Tensor, latents: Rows) -> None:
        """The latents of a batch of rows."""
        self.source = self.source or checksum(batch)
        self.nonfinite += self.statistics.update(latents, self.first + self.rows)
        self.rows += latents.num_rows
        self._counts.append(latents.counts.cpu())
        self._indices.append(latents.indices.cpu())
        self._values.append(latents.values.cpu())

    def tensors(self) -> dict[str, Tensor]:
        offsets = offsets_of(torch.cat(self._counts))
        return {"row_offsets": offsets, "indices": torch.cat(self._indices), "values": torch.cat(self._values)}


class Writer:
    """Writes the shards of a folder, of all ranks round by round, and the statistics of all of them.

    At most one shard waits here, so memory holds two. An error in writing one is raised at the next `put` or `wait`;
    `close` waits for the shards that were put.
    """

    def __init__(
        self, folder: Path, manifest: dict[str, Any], totals: Statistics, text: Text | None, ranks: Ranks
    ) -> None:
        self._folder, self._manifest, self._totals, self._text, self._ranks = folder, manifest, totals, text, ranks
        self._thread = ThreadPoolExecutor(1, "gossamer-write")
        self._pending: Future[None] | None = None

    def close(self) -> None:
        self._thread.shutdown()

    def put(self, shard: Shard, complete: bool) -> None:
        """This rank's part of a round: a shard, or one without rows; `complete` if it is the last round."""
        self.wait()
        # Here, for the thread does not know the stream that they are computed on.
        state = {name: tensor.cpu() for name, tensor in shard.statistics.state().items()}
        self._pending = self._thread.submit(self._commit, shard, state, complete)

    def wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _commit(self, shard: Shard, state: dict[str, Tensor], complete: bool) -> None:
        found = self._ranks.share(lambda: (self._write(shard), state, shard.nonfinite))
        self._ranks.share(lambda: self._settle(found, complete) if self._ranks.rank == 0 else None)

    def _write(self, shard: Shard) -> dict[str, Any] | None:
        """A shard's file, and how the manifest describes it."""
        if not shard.rows:
            return None
        tensors = shard.tensors()
        if self._text is not None:
            tensors["tokens"] = self._text.tokens[shard.first : shard.first + shard.rows]
            tensors["starts"] = self._text.starts[shard.first : shard.first + shard.rows]
        found: dict[str, Any] = dict(disk.write("extract", self._folder / disk.shard_name(shard.number), tensors))
        return found | {"rows": shard.rows, "nnz": tensors["indices"].shape[0], "source": shard.source}

    def _settle(self, found: list[tuple[dict[str, Any] | None, dict[str, Tensor], int]], complete: bool) -> None:
        """The statistics up to the end of a round. They count once the manifest names them, which is replaced last."""
        before = self._manifest["statistics"]
        for described, state, nonfinite in found:
            if described is not None:
                self._totals.add(state)
                self._manifest["shards"].append(described)
                self._manifest["nonfinite"] += nonfinite
        number = len(self._manifest["shards"]) - 1
        if number >= 0 and (before is None or before["file"] != disk.statistics_name(number)):
            file = self._folder / disk.statistics_name(number)
            self._manifest["statistics"] = disk.write("extract", file, self._totals.state())
        self._manifest["complete"] = complete
        disk.write_manifest(self._folder, self._manifest)
        if before not in (None, self._manifest["statistics"]):
            (self._folder / before["file"]).unlink(missing_ok=True)
