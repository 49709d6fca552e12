"""The folder that a command writes to."""

from __future__ import annotations

import tempfile
from pathlib import Path


def make_folder(path: Path, command: str) -> None:
    """Make the folder given as `--out`, so that a long run of `command` does not end with nowhere to write to.

    Raises ValueError where the folder, or a file in it, cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(
            f"{command}: --out must be a folder that can be written to, got {path}: {error.strerror}; name another one."
        ) from error
