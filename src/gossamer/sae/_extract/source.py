"""Rows of activations, from memory, from files that are mapped and not read, or from an iterator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor


class Array:
    """Something with a shape `[..., d]` and slices of its first dimension, as rows `[length, d]`."""

    def __init__(self, data: Any, shape: tuple[int, ...], name: str) -> None:
        self.data, self.name = data, name
        self.inner = 1
        for size in shape[1:-1]:
            self.inner *= size
        self.length, self.d = shape[0] * self.inner, shape[-1]

    def read(self, first: int, count: int) -> Tensor:
        """Rows first to first + count."""
        begin, end = first // self.inner, -(-(first + count) // self.inner)
        piece = self.data[begin:end]
        tensor = piece if isinstance(piece, Tensor) else torch.from_numpy(np.array(piece))
        rows = tensor.reshape(-1, self.d)
        return rows[first - begin * self.inner :][:count]


class Source:
    """Arrays one after another, or an iterator of batches.

    `length` is the number of rows, None where only the iterator knows.
    """

    def __init__(self, source: Any, key: str | None) -> None:
        self.arrays: list[Array] | None = None
        self.stream: Iterator[Any] | None = None
        if isinstance(source, Tensor | np.ndarray):
            self.arrays = [_array(source, "source")]
        elif isinstance(source, str | Path):
            self.arrays = [_open(path, key) for path in _files(Path(source))]
        elif isinstance(source, list | tuple) and source and all(isinstance(item, str | Path) for item in source):
            self.arrays = [_open(path, key) for item in source for path in _files(Path(item))]
        elif isinstance(source, Iterable):
            self.stream = iter(source)
        else:
            raise TypeError(
                "sae.extract: source must be a tensor, an array, a path or paths of .safetensors and .npy, or an "
                f"iterable of batches, got {type(source).__name__}."
            )
        self.length = None if self.arrays is None else sum(array.length for array in self.arrays)

    def batches(self, size: int, start: int, d_in: int) -> Iterator[Tensor]:
        """Batches `[size, d_in]` from row `start` on, the last one smaller: cut the same wherever they start."""
        pieces, held = [], 0
        for piece in self._pieces(size, start, d_in):
            while piece.shape[0]:
                taken = piece[: size - held]
                pieces.append(taken)
                held += taken.shape[0]
                piece = piece[taken.shape[0] :]
                if held == size:
                    yield torch.cat(pieces) if len(pieces) > 1 else pieces[0]
                    pieces, held = [], 0
        if held:
            yield torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def _pieces(self, size: int, start: int, d_in: int) -> Iterator[Tensor]:
        if self.arrays is not None:
            for array in self.arrays:
                _check_width(array.d, d_in, array.name)
            for array in self.arrays:
                first, start = min(start, array.length), max(start - array.length, 0)
                while first < array.length:
                    count = min(size, array.length - first)
                    yield array.read(first, count)
                    first += count
            return
        assert self.stream is not None
        for number, batch in enumerate(self.stream):
            array = _array(batch, f"batch {number} of source")
            _check_width(array.d, d_in, array.name)
            first, start = min(start, array.length), max(start - array.length, 0)
            yield array.read(first, array.length - first)


def _check_width(d: int, d_in: int, name: str) -> None:
    if d != d_in:
        raise ValueError(f"sae.extract: {name} must have shape [..., d_in] with d_in = {d_in} like the SAE, got {d}.")


def _array(data: Any, name: str) -> Array:
    if not isinstance(data, Tensor | np.ndarray):
        raise TypeError(f"sae.extract: {name} must be a tensor or an array, got {type(data).__name__}.")
    if data.ndim < 2:
        raise ValueError(f"sae.extract: {name} must have shape [..., d_in], got {list(data.shape)}.")
    return Array(data, tuple(data.shape), name)


def _files(path: Path) -> list[Path]:
    """The file itself, or the files of a folder in the order of their names."""
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if file.suffix in (".safetensors", ".npy"))
        if not found:
            raise ValueError(f"sae.extract: {path} holds no .safetensors and no .npy file.")
        return found
    if not path.is_file():
        raise FileNotFoundError(f"sae.extract: there is no file {path}.")
    return [path]


def _open(path: Path, key: str | None) -> Array:
    try:
        if path.suffix == ".npy":
            return _array(np.load(path, mmap_mode="r"), str(path))
        if path.suffix != ".safetensors":
            raise TypeError(f"sae.extract: {path} must end in .safetensors or .npy.")
        file = safe_open(path, framework="pt")
        names = list(file.keys())
    except (SafetensorError, ValueError, EOFError) as error:
        raise ValueError(f"sae.extract: {path} is not a whole {path.suffix} file: {error}.") from error
    if key is None and len(names) != 1:
        raise ValueError(f"sae.extract: {path} holds {', '.join(names) or 'no tensor'}; name one with key.")
    name = names[0] if key is None else key
    if name not in names:
        raise ValueError(f"sae.extract: {path} holds {', '.join(names)}, and no {name}.")
    piece = file.get_slice(name)
    shape = tuple(piece.get_shape())
    if len(shape) < 2:
        raise ValueError(f"sae.extract: {name} of {path} must have shape [..., d_in], got {list(shape)}.")
    return Array(piece, shape, str(path))
