"""Rows of activations: from memory, from files that are mapped and not read, from a model, or from an iterator."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gossamer._core.documents import files
from gossamer.extract.text import Text

# Rows that tell one source from another, of each shard: enough that no two sources agree in them by chance, and few
# enough that bringing them to the host, and reading them again before a run goes on, costs next to nothing.
_HEAD = 1024


def raw(tensor: Tensor) -> Any:
    """A tensor's bytes, without a copy where it lies contiguous on the host."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def checksum(batch: Tensor | None) -> str | None:
    """Of the rows of a shard's first batch that are compared; None without a batch."""
    return None if batch is None else hashlib.sha256(raw(batch[:_HEAD])).hexdigest()


class Array:
    """Something with a shape `[..., d]` and slices of its leading dimensions, as rows `[length, d]`.

    `data` gives it whenever it is read, so that a file is open no longer than that.
    """

    def __init__(self, data: Callable[[], Any], shape: tuple[int, ...], name: str, path: Path | None = None) -> None:
        self.data, self.shape, self.name, self.path = data, shape, name, path
        self.length, self.d = math.prod(shape[:-1]), shape[-1]

    def read(self, first: int, count: int) -> Tensor:
        """Rows first to first + count."""
        data = self.data()
        if data.ndim == 2 or (data.is_contiguous() if isinstance(data, Tensor) else data.flags.c_contiguous):
            piece = data.reshape(self.length, self.d)[first : first + count]
        else:
            piece = data[np.unravel_index(np.arange(first, first + count), self.shape[:-1])]
        # PyTorch takes no array of another byte order.
        return piece if isinstance(piece, Tensor) else torch.from_numpy(np.array(piece, piece.dtype.newbyteorder("=")))


class Source:
    """Rows of a source as batches `[size, d_in]` with the device and dtype of `like` `[d_in, ...]`, cut alike always;
    a `like` of shape `[0]` takes rows of any one width.

    `length` is the number of rows, None where only an iterator knows; `text` the tokens that the rows belong to, or
    None. `close` ends the thread that reads ahead. The garbage collector must not be left to do that: it would wait for
    the thread at any moment, even while a lock is held that the thread needs to end.
    """

    def __init__(self, source: Any, key: str | None, size: int, like: Tensor) -> None:
        self.arrays: list[Array] | None = None
        text = getattr(source, "text", None)
        self.text: Text | None = text if isinstance(text, Text) else None
        self.size, self.like = size, like
        # The width of all rows, and the array that gave it, if that is not `like`.
        self._width, self._wide = int(like.shape[0]), "the SAE"
        self._rows_from: Callable[[int], Iterable[Any]] | None = None
        if isinstance(source, Tensor | np.ndarray):
            self.arrays = [_array(source, "source")]
        elif isinstance(source, str | Path):
            self.arrays = _opened(key, source)
        elif isinstance(source, list | tuple) and source and all(isinstance(item, str | Path) for item in source):
            self.arrays = _opened(key, *source)
        elif callable(getattr(source, "rows_from", None)):
            self._rows_from = source.rows_from
        elif not isinstance(source, Iterable):
            raise TypeError(
                "extract: source must be a tensor, an array, a path or paths of .safetensors and .npy, an "
                "iterable of batches, or an object with rows_from(start) and a length, got "
                f"{type(source).__name__}."
            )
        self.length: int | None = None
        if self.arrays is not None:
            self._rows_from = self._read
            self.length = sum(array.length for array in self.arrays)
        elif self._rows_from is not None:
            self.length = len(source)
        if self.text is not None and self.text.tokens.shape[0] != self.length:
            raise ValueError(
                f"extract: source must have a token for each of its rows in text, got {self.text.tokens.shape[0]} "
                f"tokens and {self.length} rows."
            )
        # Of a source on a GPU there is nothing to read ahead.
        self._is_read_ahead = self.arrays is not None and not (isinstance(source, Tensor) and source.is_cuda)
        self._at = 0
        self._opened = self._open(source if self._rows_from is None else self._rows_from(0))
        self._batches: Iterator[Tensor] = self._opened

    def close(self) -> None:
        self._opened.close()

    def first(self) -> str | None:
        """The checksum of the very first batch, which `read` gives again; None if there is none."""
        self._seek(0)
        batch = next(self._batches, None)
        if batch is not None:
            self._batches = chain([batch], self._batches)
        return checksum(batch)

    def head(self, first: int) -> str | None:
        """The checksum of the batch at `first`, read apart from what `read` gives."""
        assert self._rows_from is not None
        found = self._rows_from(first) if self.arrays is None else self._read(first, min(self.size, _HEAD))
        with closing(self._cut(found)) as batches:
            return checksum(next(batches, None))

    def read(self, first: int, count: int) -> Iterator[Tensor]:
        """The batches of rows `first` to `first + count`, both multiples of `size`, as far as there are any."""
        self._seek(first)
        while self._at < first + count and (batch := next(self._batches, None)) is not None:
            self._at += batch.shape[0]
            yield batch

    def _seek(self, first: int) -> None:
        if first != self._at and self._rows_from is not None:
            self._opened.close()
            self._batches = self._opened = self._open(self._rows_from(first))
            self._at = first
        while self._at < first:
            batch = next(self._batches, None)
            self._at += 0 if batch is None else batch.shape[0]
            if batch is None or self._at > first:
                raise ValueError(
                    f"extract: the source ended before row {first}, where an earlier run stood. Give all of its "
                    "batches again, from the start."
                )

    def _open(self, found: Iterable[Any]) -> Generator[Tensor]:
        return ahead(self._cut(found), self.like.device) if self._is_read_ahead else self._cut(found)

    def _cut(self, found: Iterable[Any]) -> Generator[Tensor]:
        pieces: list[Tensor] = []
        held = 0
        for number, batch in enumerate(found):
            array = _array(batch, f"batch {number} of source")
            self._check_width(array)
            # Before they are joined: the common dtype of two may hold neither.
            piece = array.read(0, array.length).detach()
            if self._is_read_ahead and self.like.is_cuda:
                piece = piece.to(self.like.dtype).pin_memory()
            piece = piece.to(self.like.device, self.like.dtype, non_blocking=self._is_read_ahead)
            while piece.shape[0]:
                taken = piece[: self.size - held]
                piece = piece[taken.shape[0] :]
                pieces.append(taken)
                held += taken.shape[0]
                if held == self.size:
                    yield torch.cat(pieces) if len(pieces) > 1 else pieces[0]
                    pieces, held = [], 0
            if pieces and self.arrays is None:
                # The source may fill the same buffer again.
                pieces[-1] = pieces[-1].clone()
        if held:
            yield torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def _read(self, start: int, limit: int | None = None) -> Iterator[Tensor]:
        """The rows from `start` on, at most `limit`."""
        assert self.arrays is not None
        for array in self.arrays:
            self._check_width(array)
        for array in self.arrays:
            first, start = min(start, array.length), max(start - array.length, 0)
            while first < array.length and limit != 0:
                count = min(self.size, array.length - first, limit or self.size)
                yield array.read(first, count)
                first += count
                limit = None if limit is None else limit - count

    def _check_width(self, array: Array) -> None:
        if not self._width:
            self._width, self._wide = array.d, array.name
        if array.d != self._width:
            raise ValueError(
                f"extract: {array.name} must have shape [..., d_in] with d_in = {self._width} like {self._wide}, got "
                f"{array.d}. Leave it out, or give rows of one width."
            )


def ahead(batches: Iterator[Tensor], device: torch.device) -> Generator[Tensor]:
    """The same batches, each made in a thread while the one before is in use; on a GPU, by a stream of its own."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def make() -> tuple[Tensor | None, torch.cuda.Event | None]:
        if stream is None:
            return next(batches, None), None
        with torch.cuda.stream(stream):
            return next(batches, None), stream.record_event()

    with ThreadPoolExecutor(1, "gossamer-read") as thread:
        following = thread.submit(make)
        while True:
            batch, ready = following.result()
            if batch is None:
                return
            following = thread.submit(make)
            if ready is not None:
                current = torch.cuda.current_stream(device)
                current.wait_event(ready)
                batch.record_stream(current)
            yield batch


def _array(data: Any, name: str) -> Array:
    if not isinstance(data, Tensor | np.ndarray):
        raise TypeError(f"extract: {name} must be a tensor or an array, got {type(data).__name__}.")
    _check(tuple(data.shape), data.dtype, name)
    return Array(lambda: data, tuple(data.shape), name)


def _check(shape: tuple[int, ...], dtype: Any, name: str) -> None:
    if len(shape) < 2:
        raise ValueError(f"extract: {name} must have shape [..., d_in], got {list(shape)}.")
    if dtype.is_complex if isinstance(dtype, torch.dtype) else dtype.kind not in "fiub":
        raise TypeError(f"extract: {name} must hold real numbers, got {dtype}.")


def _opened(key: str | None, *paths: str | Path) -> list[Array]:
    found = (file for path in paths for file in files("extract", Path(path), (".safetensors", ".npy")))
    return [_open(file, key) for file in found]


def _open(path: Path, key: str | None) -> Array:
    try:
        if path.suffix == ".npy":
            data = np.load(path, mmap_mode="r")
            _check(data.shape, data.dtype, str(path))
            return Array(lambda: np.load(path, mmap_mode="r"), data.shape, str(path), path)
        if path.suffix != ".safetensors":
            raise TypeError(
                f"extract: {path} must end in .safetensors or .npy. Text needs a model that reads it: "
                "integrations.transformers.Activations, or --model and --hook."
            )
        file = safe_open(path, framework="pt")
        names = list(file.keys())
    except (SafetensorError, EOFError, ValueError) as error:
        if str(error).startswith("extract"):
            raise
        raise ValueError(f"extract: {path} is not a whole {path.suffix} file: {error}.") from error
    if key is None and len(names) != 1:
        raise ValueError(f"extract: {path} holds {', '.join(names) or 'no tensor'}; name one with key (--key).")
    name = names[0] if key is None else key
    if name not in names:
        raise ValueError(f"extract: {path} holds {', '.join(names)}, and no {name}. Name one with key (--key).")
    # The tensor is mapped: rows are read from the disk when they are asked for.
    tensor = file.get_tensor(name)
    if tensor.dim() < 2:
        raise ValueError(f"extract: {name} of {path} must have shape [..., d_in], got {list(tensor.shape)}.")
    return Array(lambda: tensor, tuple(tensor.shape), str(path), path)
