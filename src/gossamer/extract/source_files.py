"""Names, sizes and times of the source's files at the start of a run. A call that goes on must find them unchanged.

They stand in a file of their own: a time of change says nothing about rows, and all other files follow from the rows
alone.
"""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from gossamer._core import files
from gossamer.extract import folder as disk
from gossamer.extract.source import Array

NAME = "source-files.json"


def compare(operator: str, folder: Path, arrays: Sequence[Array], done: int) -> None:
    """Raises ValueError where a file that holds some of the first `done` rows is not as it was."""
    way_out = "Remove it: then the digests of the rows alone tell whether the source is the same."
    before = disk.read_json(operator, folder / NAME, way_out)
    if before is None:
        return
    try:
        noted = [(one["name"], one["size"], one["mtime_ns"]) for one in before]
    except (TypeError, KeyError):
        raise disk.Damaged(operator, folder / NAME, "it does not describe files", way_out) from None
    first = 0
    for number, array in enumerate(arrays):
        if array.path is None or first >= done:
            return
        first += array.length
        now = _look(array.path)
        if number >= len(noted):
            change = f"there were {len(noted)} files"
        elif (name := noted[number][0]) != now["name"]:
            change = f"{name} stood in its place"
        elif (size := noted[number][1]) != now["size"]:
            change = f"it had {size:,} bytes, and has {now['size']:,}"
        elif (time := noted[number][2]) != now["mtime_ns"]:
            change = f"it was last changed {_spell(time)}, and now {_spell(now['mtime_ns'])}"
        else:
            continue
        raise ValueError(
            f"{operator}: source: {array.path} is not as it was when {folder} was begun: {change}. Give the files as "
            f"they were, or name another folder. If the rows are the same all the same, remove {folder / NAME}: then "
            "their digests alone are compared."
        )


def note(folder: Path, arrays: Sequence[Array] | None, done: int) -> None:
    """Describes the source's files. A source without files removes the description of a run that finished nothing."""
    found = [_look(array.path) for array in arrays or () if array.path is not None]
    file = folder / NAME
    if found:
        if not file.is_file() or disk.read_json("extract", file, "") != found:
            disk.write_json(file, found)
    elif not done:
        files.remove(file)


def _look(path: Path) -> dict[str, Any]:
    """The name without its folder: files that were moved with their times are the same."""
    stat = path.stat()
    return {"name": path.name, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _spell(nanoseconds: int) -> str:
    return datetime.fromtimestamp(nanoseconds / 1e9).isoformat(" ", "microseconds")
