"""Whether the files of a folder are still as they were written."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

from gossamer.extract import folder as disk

# Checksums are computed without Python's lock. More threads than this wait for the disk.
_THREADS = 4


def faults(operator: str, folder: Path, files: Sequence[dict[str, Any]], verified: Callable[[int], Any]) -> list[str]:
    """The faults of files that a manifest describes by "file" and "sha256"; `verified` is called after each."""

    def fault(described: dict[str, Any]) -> str | None:
        file = folder / described["file"]
        try:
            disk.load(operator, file, described["sha256"])
        except disk.Damaged as error:
            return f"{file.name} is damaged ({error.reason})"
        except FileNotFoundError:
            return f"{file.name} is gone"
        return None

    found = []
    pool = ThreadPoolExecutor(_THREADS, "gossamer-verify")
    try:
        for number, said in enumerate(pool.map(fault, files)):
            if said is not None:
                found.append(said)
            verified(number)
    finally:
        pool.shutdown(cancel_futures=True)
    return found


def complain(operator: str, folder: Path, found: list[str]) -> NoReturn:
    """Names all that is wrong in one error."""
    raise ValueError(f"{operator}: in {folder}, {'; '.join(found)}. {disk.WAY_OUT}")
