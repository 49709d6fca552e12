"""The folder that `sae.extract` writes to: a file counts once the manifest names it, and is whole by then."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from gossamer._core import files

_OPERATOR = "sae.extract"
MANIFEST, VOCABULARY = "manifest.json", "vocabulary.json"
_VERSION = 1
# What is read of a manifest. Other settings are compared, and may be missing on either side.
_MANIFEST: dict[str, Any] = {"settings": dict, "shards": list, "statistics": str | None, "source": str | None}
_MANIFEST |= {"nonfinite": int, "complete": bool}
_SETTINGS, _SHARD = {"d_sae": int, "top": int}, {"file": str, "rows": int, "nnz": int}
_OURS = re.compile(r"((shard|statistics)-\d{6}\.safetensors|vocabulary\.json)(\.partial)?|manifest\.json\.partial")


def begin(operator: str, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The manifest to go on with; what an interrupted run left unfinished beside it is removed."""
    manifest = read_manifest(folder)
    if manifest is None:
        # A run that was killed as it began leaves a manifest that is not in its place yet, and nothing else.
        files.remove(_partial(folder / MANIFEST))
        strangers = sorted(file.name for file in folder.iterdir() if _OURS.fullmatch(file.name))
        if strangers:
            raise ValueError(
                f"{operator}: {folder} holds {strangers[0]}, but no {MANIFEST} that says whose it is. Name another "
                "folder."
            )
        manifest = {"version": _VERSION, "settings": settings, "shards": [], "statistics": None, "source": None}
        manifest |= {"nonfinite": 0, "complete": False}
        # First of all, so that whatever is named like a file of ours is one from here on.
        write_manifest(folder, manifest)
    began = manifest["shards"] or manifest["complete"] or manifest["source"] is not None
    if not began and manifest["settings"] != settings:
        # Begun, and refused before the first row: nothing of those settings is there.
        files.remove(folder / VOCABULARY)
        manifest["settings"] = settings
        write_manifest(folder, manifest)
    for name in settings | manifest["settings"]:
        before, now = manifest["settings"].get(name), settings.get(name)
        if before != now:
            shown = "another one" if name in ("sae", "text") else f"{before!r}, not {now!r}"
            raise ValueError(
                f"{operator}: {folder} was begun with {name} = {shown}. Name another folder, or remove this one."
            )
    finished = {shard["file"] for shard in manifest["shards"]} | ({manifest["statistics"]} - {None})
    there = list(folder.iterdir())
    if lost := sorted(finished - {file.name for file in there}):
        raise ValueError(
            f"{operator}: {folder} lacks {lost[0]}, which its {MANIFEST} has as finished. Put the file back, or remove "
            "the folder and extract again."
        )
    for name in sorted(finished):
        # The header says how long a file has to be.
        with reading(operator, folder / name), safe_open(folder / name, framework="pt"):
            pass
    known = finished | {VOCABULARY}
    for file in there:
        if _OURS.fullmatch(file.name) and file.name not in known and (file.is_file() or file.suffix == ".partial"):
            files.remove(file)
    return manifest


def read_manifest(folder: Path) -> dict[str, Any] | None:
    manifest = read_json(folder / MANIFEST)
    if manifest is None:
        return None
    version = manifest.get("version") if isinstance(manifest, dict) else None
    if version != _VERSION:
        raise ValueError(f"sae.extract: {folder / MANIFEST} is no manifest of version {_VERSION}.")
    if not (
        _has(manifest, _MANIFEST)
        and _has(manifest["settings"], _SETTINGS)
        and all(_has(shard, _SHARD) for shard in manifest["shards"])
    ):
        raise ValueError(
            f"sae.extract: {folder / MANIFEST} is damaged: it does not say all that a manifest says. Remove its folder "
            "and extract again."
        )
    return dict(manifest)


def _has(found: Any, kinds: dict[str, Any]) -> bool:
    return isinstance(found, dict) and all(isinstance(found.get(name, ...), kind) for name, kind in kinds.items())


def read_json(file: Path) -> Any:
    """None where there is no such file."""
    if not file.is_file():
        return None
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"sae.extract: {file} is damaged: {error}. Remove its folder and extract again.") from error


def load(operator: str, file: Path) -> dict[str, Tensor]:
    with reading(operator, file):
        return load_file(file)


@contextmanager
def reading(operator: str, file: Path) -> Iterator[None]:
    """What may be wrong with a file of safetensors that is read, as an error that says what to do."""
    try:
        yield
    except FileNotFoundError as error:
        if file.exists():
            # safetensors finds no file where it may not read one.
            raise PermissionError(errno.EACCES, f"{operator}: {file} may not be read", str(file)) from error
        raise FileNotFoundError(
            f"{operator}: {file} is gone. Put it back, or remove its folder and extract again."
        ) from error
    except SafetensorError as error:
        raise ValueError(f"{operator}: {file} is damaged: {error}. Remove its folder and extract again.") from error


def write(file: Path, tensors: dict[str, Tensor]) -> None:
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    files.write_whole(_OPERATOR, file, _partial(file), lambda path: save_file(whole, path))


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    write_json(folder / MANIFEST, manifest)


def write_json(file: Path, content: dict[Any, Any]) -> None:
    text = json.dumps(content, indent=1) + "\n"
    files.write_whole(_OPERATOR, file, _partial(file), lambda path: path.write_text(text))


def _partial(file: Path) -> Path:
    """Where a file is written."""
    return file.with_name(file.name + ".partial")
