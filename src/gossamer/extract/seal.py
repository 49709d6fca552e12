"""Checksums of tensors, and of files of them: a file's seal covers its tensors and its metadata.

A seal is the SHA-256 of the JSON `[described, [[name, dtype, shape, SHA-256 of the bytes], ...]]` with sorted keys and
names. It is made of the tensors' own checksums, so that those are computed while a shard still grows, in a thread
beside the one that writes, and it stands within the file, which a checksum of the file's bytes could not.
"""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from gossamer._core import checks


def raw(tensor: Tensor) -> Any:
    """A tensor's bytes, without a copy where it lies contiguous on the host."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def checksum(tensor: Tensor) -> str:
    return hashlib.sha256(raw(tensor)).hexdigest()


def of_json(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def seal(described: Mapping[str, Any], tensors: Mapping[str, Tensor], known: Mapping[str, str] | None = None) -> str:
    """The seal of a file with these tensors. `known` holds the checksums of some of them."""
    known = known or {}
    parts = [
        [name, checks.name_of(tensor.dtype), list(tensor.shape), known.get(name) or checksum(tensor)]
        for name, tensor in sorted(tensors.items())
    ]
    return of_json([described, parts])


class Growing:
    """The checksums of tensors that come piece by piece, computed in a thread."""

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self._thread = thread
        self._digests: dict[str, Any] = {}
        self._last: Future[None] | None = None

    def append(self, pieces: Mapping[str, Tensor]) -> None:
        """`pieces`, on the host, must stay as they are."""
        self._last = self._thread.submit(self._update, pieces)

    def found(self) -> dict[str, str]:
        # One thread: with the last piece all are done.
        if self._last is not None:
            self._last.result()
        return {name: digest.hexdigest() for name, digest in self._digests.items()}

    def _update(self, pieces: Mapping[str, Tensor]) -> None:
        for name, piece in pieces.items():
            self._digests.setdefault(name, hashlib.sha256()).update(raw(piece))
