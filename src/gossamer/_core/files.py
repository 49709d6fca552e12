"""Files that are whole or not there."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_whole(file: Path, partial: Path, write: Callable[[Path], Any]) -> None:
    """Has `write` fill a file in a folder of its own, `partial`, and moves it to its place once the disk has it: even a
    power cut leaves the old file or the new one. In a folder, because what `write` calls may begin with a file of
    another name beside the one that it is asked for, as safetensors does."""
    inside = partial / file.name
    try:
        partial.mkdir(exist_ok=True)
        write(inside)
        # As the user's files are: one of safetensors is its owner's alone.
        mode = partial.stat().st_mode & 0o666
        if inside.stat().st_mode & 0o666 != mode:
            inside.chmod(mode)
        _settle(inside, file)
    finally:
        remove(partial)


def remove(path: Path) -> None:
    """Removes a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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
