"""The folder that `extract` writes to: a file counts once the manifest names it, and is whole by then."""

import errno
import hashlib
import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gossamer._core import files
from gossamer.extract.text import Text

MANIFEST, VOCABULARY = "manifest.json", "vocabulary.json"
VERSION = 1
WAY_OUT = "Put a whole copy back, or extract to another folder."
_WHOLE = r"(shard|statistics)-\d{6}\.safetensors|vocabulary\.json"
_OURS = re.compile(rf"{_WHOLE}|\.?({_WHOLE}|manifest\.json)\.partial")
# Checksums are computed without Python's lock. More threads than this wait for the disk.
_THREADS = 4
_HELD = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK)


class Damaged(ValueError):
    """A file that has changed since it was written."""

    def __init__(self, operator: str, file: Path, reason: str, way_out: str = WAY_OUT) -> None:
        super().__init__(f"{operator}: {file} is damaged: {reason}. {way_out}")
        self.reason = reason


def shard_name(number: int) -> str:
    return f"shard-{number:06d}.safetensors"


def statistics_name(number: int) -> str:
    """The file of statistics of the rows up to the end of shard `number`."""
    return f"statistics-{number:06d}.safetensors"


def begin(operator: str, folder: Path, settings: dict[str, Any], text: Text | None) -> dict[str, Any]:
    """The manifest to go on with. Unfinished files of an interrupted run are removed."""
    manifest = read_manifest(operator, folder)
    if manifest is None:
        # A run that was killed as it began leaves a manifest that is not in its place yet, and nothing else.
        files.remove(files.partial_of(folder / MANIFEST))
        if strangers := sorted(file.name for file in folder.iterdir() if _OURS.fullmatch(file.name)):
            raise ValueError(
                f"{operator}: {folder} holds {strangers[0]}, but no {MANIFEST} that says whose it is. Name another "
                "folder, or empty this one."
            )
    if manifest is None or (not manifest["shards"] and manifest["settings"] != settings):
        # No file depends on the settings of a call that was refused before its first row.
        manifest = {"version": VERSION, "settings": settings, "shards": [], "statistics": None, "nonfinite": 0}
        manifest["complete"] = False
        write_manifest(folder, manifest)
    before = manifest["settings"]
    for name in settings | before:
        if before.get(name) != settings.get(name):
            secret = name in ("sae", "text", "vocabulary")
            shown = "another one" if secret else f"{before.get(name)!r}, not {settings.get(name)!r}"
            raise ValueError(
                f"{operator}: {folder} was begun with {name} = {shown}. Name another folder, or remove this one."
            )
    known = {described["file"] for described in (*manifest["shards"], manifest["statistics"] or {"file": MANIFEST})}
    for file in list(folder.iterdir()):
        if _OURS.fullmatch(file.name) and file.name not in known and (file.is_file() or file.suffix == ".partial"):
            files.remove(file)
    if text is not None:
        _write_bytes(operator, folder / VOCABULARY, text.spelling())
    return manifest


@contextmanager
def locked(operator: str, folder: Path) -> Iterator[None]:
    """Holds a lock on the folder, of which the operating system lets go when its process ends, however it ends. Its
    file stays: removing it could take it from a run that has just opened it.

    Raises ValueError where another run holds it, and warns where the file system, or Windows, knows no such locks.
    """
    with (folder / ".lock").open("ab") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (OSError, ImportError) as error:
            if isinstance(error, OSError) and error.errno in _HELD:
                raise ValueError(
                    f"{operator}: another run writes to {folder}. Wait until it has ended, or name another folder."
                ) from error
            warnings.warn(
                f"{operator}: {folder} cannot be locked ({error}). See to it that no other run writes to it.",
                stacklevel=3,
            )
        yield


def read_manifest(operator: str, folder: Path) -> dict[str, Any] | None:
    """None where there is none; raises Damaged where it has changed since it was written."""
    file = folder / MANIFEST
    manifest = read_json(operator, file)
    if manifest is None:
        return None
    if not isinstance(manifest, dict) or manifest.pop("sha256", None) != _of_json(manifest):
        raise Damaged(operator, file, "its checksum differs")
    if manifest["version"] != VERSION:
        raise ValueError(f"{operator}: {file} is of version {manifest['version']}, and this gossamer reads {VERSION}.")
    return manifest


def read_json(operator: str, file: Path, way_out: str = WAY_OUT) -> Any:
    """None where there is no such file."""
    try:
        return json.loads(file.read_text()) if file.is_file() else None
    except ValueError as error:
        raise Damaged(operator, file, str(error), way_out) from error


def load(operator: str, file: Path, sha256: str | None) -> dict[str, Tensor]:
    """The tensors of a file with this checksum; None skips the comparison."""
    with reading(operator, file):
        if sha256 is not None and files.digest(file) != sha256:
            raise Damaged(operator, file, "its checksum differs")
        return load_file(file)


def vocabulary_of(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The description of the vocabulary of an extraction, if it has one."""
    return [{"file": VOCABULARY, "sha256": settings["vocabulary"]}] if "vocabulary" in settings else []


@contextmanager
def reading(operator: str, file: Path) -> Iterator[None]:
    """Turns the errors of reading a file of safetensors into errors with a way out."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{operator}: {file} is gone. {WAY_OUT}") from error
    except SafetensorError as error:
        raise Damaged(operator, file, str(error)) from error


def faults(
    folder: Path, known: Sequence[dict[str, Any]], verified: Callable[[int], Any] = lambda number: None
) -> list[str]:
    """The faults of files that a manifest describes by "file" and "sha256"; `verified` is called after each."""

    def fault(described: dict[str, Any]) -> str | None:
        file = folder / described["file"]
        if not file.is_file():
            return f"{file.name} is gone"
        return None if files.digest(file) == described["sha256"] else f"{file.name} is damaged (its checksum differs)"

    found = []
    pool = ThreadPoolExecutor(_THREADS, "gossamer-verify")
    try:
        for number, said in enumerate(pool.map(fault, known)):
            if said is not None:
                found.append(said)
            verified(number)
    finally:
        pool.shutdown(cancel_futures=True)
    return found


def complain(operator: str, folder: Path, found: list[str]) -> NoReturn:
    """Names all faults in one error."""
    raise ValueError(f"{operator}: in {folder}, {'; '.join(found)}. {WAY_OUT}")


def write(operator: str, file: Path, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Writes tensors; how a manifest describes the file."""
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    found = {"file": file.name}

    def fill(path: Path) -> None:
        save_file(whole, path)
        found["sha256"] = files.digest(path)

    files.write_whole(operator, file, fill)
    return found


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    content = json.dumps(manifest | {"sha256": _of_json(manifest)}, indent=1) + "\n"
    _write_bytes("extract", folder / MANIFEST, content.encode())


def _of_json(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _write_bytes(operator: str, file: Path, content: bytes) -> None:
    if not file.is_file() or file.read_bytes() != content:
        files.write_whole(operator, file, lambda path: path.write_bytes(content))
