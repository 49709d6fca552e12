"""The folder of an extraction, read shard by shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from gossamer.extract import folder as disk
from gossamer.extract.statistics import LOWEST, Statistics
from gossamer.extract.text import mark, spell
from gossamer.rowsparse import Rows


class Extraction:
    """The folder that `extract` wrote, read shard by shard. Checksums verify the statistics here, a shard when it is
    first read, and every file in `check`.

    Args:
        folder: the `out` of an `extract`, finished or not.

    Attributes:
        manifest: the settings, the shards with their rows and entries, and whether the source came to its end.
        d_sae, rows, nnz: sizes of the matrix so far.
        firing_counts: int64 `[d_sae]`, rows in which each latent fired.
        maximum: float32 `[d_sae]`, the largest magnitude of each latent, 0 if it never fired.
        histogram: int64 `[d_sae, 32]`; bin b counts magnitudes in [2^(b - 24), 2^(b - 23)), the first and the last bin
            also count all below and above.
        top_values, top_positions: float32 and int64 `[d_sae, top]`, the largest magnitudes of each latent and the rows
            they stand in, of equal ones the first; position -1 where it fired less often.
        has_text: whether the source knew the token of each row, so that `context` works.

    Raises:
        FileNotFoundError: no manifest there.
        ValueError: a file of it is damaged.

    >>> import tempfile; folder = tempfile.mkdtemp()
    >>> extract(torch.randn(10, 4), gossamer.nn.TopKSAE(4, 16, k=2), folder) and Extraction(folder).read(0).shape
    (10, 16)
    """

    firing_counts: Tensor
    maximum: Tensor
    histogram: Tensor
    top_values: Tensor
    top_positions: Tensor

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._verified: set[str] = set()
        manifest, state = self._look()
        self.manifest: dict[str, Any] = manifest
        self.d_sae: int = manifest["settings"]["d_sae"]
        self.has_text = "text" in manifest["settings"]
        self._vocabulary: dict[int, str] | None = None
        self.rows = sum(shard["rows"] for shard in manifest["shards"])
        self.nnz = sum(shard["nnz"] for shard in manifest["shards"])
        for name, tensor in state.items():
            setattr(self, name, tensor)

    def _look(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The manifest and the statistics that it names."""
        for attempt in range(5):
            manifest = _manifest(self.folder)
            if manifest["statistics"] is None:
                settings = manifest["settings"]
                return manifest, Statistics(settings["d_sae"], settings["top"], torch.device("cpu")).state()
            named = manifest["statistics"]
            try:
                return manifest, disk.load("Extraction", self.folder / named["file"], named["sha256"])
            except FileNotFoundError:
                # An extraction that goes on meanwhile has replaced it: the manifest names the next one by now.
                if attempt == 4:
                    raise
        raise AssertionError

    @classmethod
    def check(cls, folder: str | Path, progress: Callable[[int, int], Any] | None = None) -> Extraction:
        """The extraction in a folder, once the checksum of every file of it is verified.

        Args:
            folder: the `out` of an `extract`, finished or not.
            progress: called after each shard with (rows verified, rows in all).

        Raises:
            FileNotFoundError: no manifest there.
            ValueError: files that are damaged or gone, all of them named in one error.

        >>> import tempfile; folder = tempfile.mkdtemp()
        >>> extract(torch.randn(10, 4), gossamer.nn.TopKSAE(4, 16, k=2), folder) and Extraction.check(folder)
        Extraction(rows=10, d_sae=16, nnz=..., shards=1, complete)
        """
        path, found = Path(folder), None
        manifest, wrong = _manifest(path), []
        try:
            found = cls(path)
            manifest = found.manifest
        except FileNotFoundError:
            wrong.append(f"{manifest['statistics']['file']} is gone")
        except disk.Damaged as error:
            wrong.append(f"{manifest['statistics']['file']} is damaged ({error.reason})")
        wrong += disk.faults(path, disk.vocabulary_of(manifest["settings"]))
        done = list(accumulate(shard["rows"] for shard in manifest["shards"]))
        tell = progress or (lambda done, rows: None)
        wrong += disk.faults(path, manifest["shards"], lambda number: tell(done[number], done[-1]))
        if found is None or wrong:
            disk.complain("Extraction", path, wrong)
        return found

    def __len__(self) -> int:
        """The number of shards."""
        return len(self.manifest["shards"])

    def read(self, shard: int) -> Rows:
        """One shard as `Rows` `(rows, d_sae)` on the CPU. The first time its checksum is verified.

        Raises:
            IndexError: no such shard.
            FileNotFoundError: its file is gone.
            ValueError: its file is damaged.
        """
        described = self._described(shard)
        tensors = self._load(described)
        shape = (described["rows"], self.d_sae)
        offsets = tensors["row_offsets"]
        return Rows(tensors["values"], tensors["indices"], torch.stack([offsets[:-1], offsets.diff()]), shape)

    def tokens(self, shard: int) -> Tensor:
        """The token of each row of a shard, int32 `[rows]`.

        Raises:
            ValueError: the source had no tokens, or a file is damaged.
            IndexError: no such shard.
            FileNotFoundError: its file is gone.
        """
        self._check_text()
        return self._load(self._described(shard))["tokens"]

    def context(self, row: int, before: int = 24, after: int = 12) -> tuple[str, str, str]:
        """The text before the token of a row, the token, and the text after it.

        Args:
            row: one below `rows`.
            before, after: tokens at most; fewer where the text that the model read as one begins or ends.

        Raises:
            ValueError: the source had no tokens, a file is damaged, or before or after is negative.
            IndexError: no such row.
            FileNotFoundError: a file is gone.
        """
        self._check_text()
        if min(before, after) < 0:
            raise ValueError(f"Extraction: before and after must be at least 0, got {before} and {after}.")
        if not 0 <= row < self.rows:
            raise IndexError(f"Extraction: row must be at least 0 and below {self.rows}, got {row}.")
        first = max(row - before, 0)
        tokens, starts = self._tokens(first, min(row + after + 1, self.rows))
        begins = starts.nonzero().flatten() + first
        first_kept = max([first, *begins[begins <= row].tolist()])
        last_kept = min([first + len(tokens), *begins[begins > row].tolist()])
        if self._vocabulary is None:
            file = self.folder / disk.VOCABULARY
            way_out = "The same call of extract writes it again."
            found = disk.read_json("Extraction", file, way_out)
            if found is None:
                raise FileNotFoundError(f"Extraction: {file} is gone. {way_out}")
            if not isinstance(found, dict) or disk.faults(self.folder, disk.vocabulary_of(self.manifest["settings"])):
                raise disk.Damaged("Extraction", file, "its checksum differs", way_out)
            self._vocabulary = {int(token): piece for token, piece in found.items()}
        pieces = [self._vocabulary.get(token, "") for token in tokens.tolist()]
        at = row - first
        return mark(
            spell(pieces[first_kept - first : at]),
            spell(pieces[at : at + 1]),
            spell(pieces[at + 1 : last_kept - first]),
        )

    @staticmethod
    def magnitude(bin: int) -> float:
        """Where a bin of the histogram begins."""
        return 2.0 ** (bin + LOWEST)

    def _described(self, shard: int) -> dict[str, Any]:
        """The manifest's entry for a shard; negative numbers count from the end."""
        try:
            described: dict[str, Any] = self.manifest["shards"][shard]
        except IndexError:
            raise IndexError(
                f"Extraction: shard must be below {len(self)}, the number of shards, got {shard}."
            ) from None
        return described

    def _load(self, shard: dict[str, Any]) -> dict[str, Tensor]:
        """The tensors of a shard, verified once."""
        name = shard["file"]
        sha256 = None if name in self._verified else shard["sha256"]
        tensors = disk.load("Extraction", self.folder / name, sha256)
        self._verified.add(name)
        return tensors

    def _check_text(self) -> None:
        if not self.has_text:
            raise ValueError(
                f"Extraction: {self.folder} holds no tokens; extract from a source that has them, as "
                "integrations.transformers.Activations does."
            )

    def _tokens(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Tokens and starts of rows first to end, of as many shards as that takes."""
        tokens, starts, at = [], [], 0
        for shard in self.manifest["shards"]:
            low, high = max(first - at, 0), min(end - at, shard["rows"])
            if low < high:
                path = self.folder / shard["file"]
                with disk.reading("Extraction", path), safe_open(path, framework="pt") as file:
                    tokens.append(file.get_slice("tokens")[low:high])
                    starts.append(file.get_slice("starts")[low:high])
            at += shard["rows"]
        return torch.cat(tokens), torch.cat(starts)

    def __iter__(self) -> Iterator[Rows]:
        return (self.read(shard) for shard in range(len(self)))

    def __repr__(self) -> str:
        state = "complete" if self.manifest["complete"] else "unfinished"
        return f"Extraction(rows={self.rows}, d_sae={self.d_sae}, nnz={self.nnz}, shards={len(self)}, {state})"


def _manifest(folder: Path) -> dict[str, Any]:
    manifest = disk.read_manifest("Extraction", folder)
    if manifest is None:
        raise FileNotFoundError(f"Extraction: {folder} holds no {disk.MANIFEST}. Name a folder that extract wrote.")
    return manifest
