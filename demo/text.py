"""The demo's text: files read as bytes and split into training and validation, by file where that is possible."""

from __future__ import annotations

import os
import random
import sysconfig
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

MAX_BYTES = 64 * 2**20
VALIDATION_SHARE = 0.1
LOWEST_SHARE, HIGHEST_SHARE = 0.05, 0.2
FILE_SEPARATOR = b"\0"
# Installed packages are not the library; tests and tables of characters are long and say little.
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}
_BINARY_PROBE_BYTES = 4096


@dataclass(frozen=True)
class Corpus:
    """Text as bytes.

    train, validation: uint8 ``[n_train]`` and ``[n_validation]``; files are joined by a zero byte.
    source: where the text came from, for people to read. n_files: how many files were read.
    """

    train: Tensor
    validation: Tensor
    source: str
    n_files: int


def load_corpus(path: Path | None, *, seed: int, min_bytes: int) -> Corpus:
    """Read the file or folder ``path``, or Python's standard library when it is None.

    About a tenth of the bytes (5% to 20%) is kept for validation, as whole files. Where files are too large for that,
    or there is only one, it is the last tenth of all of them joined. At most 64 MiB are read. In a folder, hidden and
    binary files are left out.

    Raises ValueError when nothing is there, it cannot be read, or the text is shorter than ``min_bytes`` in either
    part.
    """
    files, source = _find_files(path)
    random.Random(seed).shuffle(files)
    texts, size = [], 0
    for file in files:
        text = _read(file, MAX_BYTES - size, binary=len(files) == 1)
        if text:
            texts.append(text)
            size += len(text)
        if size >= MAX_BYTES:
            break
    train, validation = _split(texts)
    if min(len(train), len(validation)) < min_bytes:
        raise ValueError(
            f"demo: the text must leave at least {min_bytes:,} bytes for training and as many for validation, "
            f"got {len(train):,} and {len(validation):,} from {source}; give a longer file, or a folder of text files."
        )
    return Corpus(_to_tensor(train), _to_tensor(validation), source, len(texts))


def _find_files(path: Path | None) -> tuple[list[Path], str]:
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        files = sorted(f for f in _walk(root, _NOT_LIBRARY) if f.suffix == ".py")
        if not files:
            raise ValueError(
                f"demo: the standard library must be installed as source files, found no *.py under {root}; "
                "give a text with --text PATH."
            )
        return files, f"the Python {sysconfig.get_python_version()} standard library"
    with _reading(path):
        if path.is_file():
            return [path], str(path)
        if path.is_dir():
            files = sorted(_walk(path))
            if not files:
                raise ValueError(f"demo: --text must hold at least one file, got the empty folder {path}.")
            return files, str(path)
        what = "is neither" if path.exists() else "does not exist"
    raise ValueError(f"demo: --text must name a file or folder, got {path}, which {what}.")


def _walk(root: Path, left_out: AbstractSet[str] = frozenset()) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [s for s in subfolders if not s.startswith(".") and s not in left_out]
        for name in names:
            file = Path(folder, name)
            if not name.startswith(".") and file.is_file():
                yield file


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"demo: --text must be readable, got {path}: {error.strerror}; name another file or folder."
        ) from error


def _read(file: Path, limit: int, *, binary: bool) -> bytes:
    """The first ``limit`` bytes of a file; nothing of one whose head looks binary, unless ``binary`` is wanted."""
    with _reading(file), file.open("rb") as opened:
        head = opened.read(min(limit, _BINARY_PROBE_BYTES))
        if b"\0" in head and not binary:
            return b""
        return head + opened.read(limit - len(head))


def _split(texts: list[bytes]) -> tuple[bytes, bytes]:
    total = sum(map(len, texts))
    train, validation, size = [], [], 0
    for text in texts:
        if size < VALIDATION_SHARE * total and size + len(text) <= HIGHEST_SHARE * total:
            validation.append(text)
            size += len(text)
        else:
            train.append(text)
    if size < LOWEST_SHARE * total:
        joined = FILE_SEPARATOR.join(texts)
        cut = round(len(joined) * (1 - VALIDATION_SHARE))
        return joined[:cut], joined[cut:]
    return FILE_SEPARATOR.join(train), FILE_SEPARATOR.join(validation)


def _to_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
