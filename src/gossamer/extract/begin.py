"""How an extraction begins: anew, where an earlier run stood, or where whole shards end without a manifest."""

import re
from pathlib import Path
from typing import Any

import torch

from gossamer._core import files
from gossamer.extract import folder as disk
from gossamer.extract import source_files
from gossamer.extract.seal import seal
from gossamer.extract.statistics import Statistics
from gossamer.extract.text import Text
from gossamer.rowsparse import Rows

_SHARD = re.compile(r"shard-(\d{6})\.safetensors")
_OURS = re.compile(
    r"((shard|statistics)-\d{6}\.safetensors|vocabulary\.json|source-files\.json)(\.partial)?|manifest\.json\.partial"
)


def begin(operator: str, folder: Path, settings: dict[str, Any], text: Text | None) -> dict[str, Any]:
    """The manifest to go on with. Unfinished files of an interrupted run are removed."""
    damage: disk.Damaged | None = None
    try:
        manifest = disk.read_manifest(operator, folder)
    except disk.Damaged as error:
        manifest, damage = None, error
    # Shards behind a gap stay until they are extracted again.
    kept = set()
    if manifest is None:
        kept = {file.name for file in folder.iterdir() if _SHARD.fullmatch(file.name)}
        manifest = _rebuild(operator, folder, settings, kept) if kept else _new(operator, folder, settings, damage)
    if not manifest["shards"] and manifest["settings"] != settings:
        # An earlier call was refused before its first row: no file depends on its settings.
        files.remove(folder / disk.VOCABULARY)
        manifest["settings"] = settings
        disk.write_manifest(folder, manifest)
    _same_settings(operator, folder, manifest["settings"], settings)
    finished = {shard["file"] for shard in manifest["shards"]}
    if manifest["statistics"] is not None:
        finished.add(manifest["statistics"]["file"])
    there = list(folder.iterdir())
    if lost := sorted(finished - {file.name for file in there}):
        raise ValueError(
            f"{operator}: {folder} lacks {lost[0]}, which its {disk.MANIFEST} has as finished. Put the file back; or "
            f"remove {disk.MANIFEST}, and the same call goes on from the whole shards before it."
        )
    known = finished | kept | {disk.VOCABULARY, source_files.NAME}
    for file in there:
        if _OURS.fullmatch(file.name) and file.name not in known and (file.is_file() or file.suffix == ".partial"):
            files.remove(file)
    if text is not None:
        file, spelling = folder / disk.VOCABULARY, text.spelling()
        # Where it is not there, or not as it was written.
        if not file.is_file() or file.read_bytes() != spelling:
            disk.write_bytes(file, spelling)
    return manifest


def _new(operator: str, folder: Path, settings: dict[str, Any], damage: disk.Damaged | None) -> dict[str, Any]:
    """A manifest of nothing. It is written first of all: whatever is named like a file of ours is one from then on."""
    if damage is not None:
        raise ValueError(
            f"{operator}: {folder / disk.MANIFEST} is damaged: {damage.reason}. There are no shards to make it again "
            "from. Remove it, or name another folder."
        ) from damage
    # A run that was killed as it began leaves a manifest that is not in its place yet, and nothing else.
    files.remove(disk.partial(folder / disk.MANIFEST))
    strangers = sorted(file.name for file in folder.iterdir() if _OURS.fullmatch(file.name))
    if strangers:
        raise ValueError(
            f"{operator}: {folder} holds {strangers[0]}, but no {disk.MANIFEST} that says whose it is. Name another "
            "folder, or empty this one."
        )
    return _write_first(folder, settings, [], None, 0)


def _write_first(
    folder: Path, settings: dict[str, Any], shards: list[Any], statistics: dict[str, str] | None, nonfinite: int
) -> dict[str, Any]:
    manifest = {"version": disk.VERSION, "settings": settings, "shards": shards, "statistics": statistics}
    manifest |= {"nonfinite": nonfinite, "complete": False}
    disk.write_manifest(folder, manifest)
    return manifest


def _same_settings(operator: str, folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    for name in now | before:
        if before.get(name) != now.get(name):
            secret = name in ("sae", "text", "vocabulary")
            shown = "another one" if secret else f"{before.get(name)!r}, not {now.get(name)!r}"
            raise ValueError(
                f"{operator}: {folder} was begun with {name} = {shown}. Name another folder, or remove this one."
            )


def _rebuild(operator: str, folder: Path, settings: dict[str, Any], there: set[str]) -> dict[str, Any]:
    """The manifest and the statistics of the whole shards from the first on, by their own metadata.

    A shard that is not full was the last one, or not: only the source knows, so it is extracted again.
    """
    for name in sorted(there):
        described = disk.describe(operator, folder / name)
        number, written_with = described.get("number"), described.get("settings")
        if not isinstance(number, int) or disk.shard_name(number) != name or not isinstance(written_with, dict):
            raise ValueError(
                f"{operator}: {folder} has no whole {disk.MANIFEST}, and {name} does not say whose it is. Name another "
                "folder."
            )
        _same_settings(operator, folder, written_with, settings)
    d_sae = settings["d_sae"]
    totals, nonfinite = Statistics(d_sae, settings["top"], torch.device("cpu")), 0
    shards: list[dict[str, Any]] = []
    while (name := disk.shard_name(len(shards))) in there:
        described, tensors = disk.open_sealed(operator, folder / name)
        sha256 = disk.sealed(operator, folder / name, described, tensors)
        rows, nnz = tensors["row_offsets"].shape[0] - 1, tensors["indices"].shape[0]
        if rows != settings["shard_rows"]:
            break
        for first in range(0, rows, settings["batch_size"]):
            nonfinite += totals.update(_rows(tensors, first, settings["batch_size"], d_sae), len(shards) * rows + first)
        shards.append({"file": name, "rows": rows, "nnz": nnz, "source": described["source"], "sha256": sha256})
    statistics = None
    if shards:
        statistics = {"file": disk.statistics_name(len(shards) - 1), "sha256": seal({}, totals.state())}
        disk.write(folder / statistics["file"], totals.state())
    return _write_first(folder, settings, shards, statistics, nonfinite)


def _rows(tensors: dict[str, torch.Tensor], first: int, count: int, d_sae: int) -> Rows:
    offsets = tensors["row_offsets"][first : first + count + 1]
    low, high = int(offsets[0]), int(offsets[-1])
    spans = torch.stack([offsets[:-1] - low, offsets.diff()])
    return Rows(tensors["values"][low:high], tensors["indices"][low:high], spans, (spans.shape[1], d_sae))
