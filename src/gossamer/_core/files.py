"""Files that are whole or not there."""

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError


def make_folder(operator: str, argument: str, folder: Path) -> None:
    """Makes a folder, if it is not there; raises ValueError where it, or a file in it, cannot be made: at once, and not
    after a long run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"{operator}: {argument} must be a folder that can be written to, got {folder}: {error.strerror}. Name "
            "another one."
        ) from error


def partial_of(file: Path) -> Path:
    """The folder in which a file is written."""
    return file.with_name(f".{file.name}.partial")


def write_whole(operator: str, file: Path, write: Callable[[Path], Any], partial: Path | None = None) -> None:
    """Has `write` fill a file in a folder of its own, and moves it to its place once the disk has it: even a power cut
    leaves the old file or the new one. In a folder, because `write` may begin with a file of another name beside the
    one that it is asked for, as safetensors does. `partial` is another folder for it than the usual one.

    Raises OSError that names the file, with the errno of the system.
    """
    partial = partial_of(file) if partial is None else partial
    inside = partial / file.name
    try:
        partial.mkdir(exist_ok=True)
        write(inside)
        # As the user's files are: one of safetensors is its owner's alone.
        mode = partial.stat().st_mode & 0o666
        if inside.stat().st_mode & 0o666 != mode:
            inside.chmod(mode)
        _settle(inside, file)
    except (OSError, SafetensorError) as error:
        raise _unwritten(operator, file, error) from error
    finally:
        remove(partial)


def write_text(operator: str, file: Path, text: str) -> None:
    """Writes text by `write_whole`."""
    write_whole(operator, file, lambda path: path.write_text(text, encoding="utf-8"))


def digest(file: Path) -> str:
    """SHA-256 of a file, as `sha256sum` has it."""
    found = hashlib.sha256()
    with file.open("rb") as opened:
        while piece := opened.read(1 << 20):
            found.update(piece)
    return found.hexdigest()


def remove(path: Path) -> None:
    """Removes a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _unwritten(operator: str, file: Path, error: OSError | SafetensorError) -> OSError:
    """safetensors raises an error of its own, that has the system's in its text alone."""
    reason, number = str(error), None
    if isinstance(error, OSError):
        reason, number = error.strerror or reason, error.errno
    elif found := re.search(r"([^:]+) \(os error (\d+)\)", reason):
        reason, number = found[1].strip(), int(found[2])
    message = (
        f"{operator}: {file} could not be written: {reason}. Free space, or mend the cause, and "
        "make the same call again."
    )
    return OSError(message) if number is None else OSError(number, message)


def _settle(inside: Path, file: Path) -> None:
    with inside.open("rb+") as handle:
        os.fsync(handle.fileno())
    inside.replace(file)
    if os.name == "posix":
        folder = os.open(file.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
