"""Activations of Hugging Face models: the output or input of one of their modules when they read text."""

from __future__ import annotations

import difflib
import inspect
import re
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gossamer._core import checks
from gossamer._core.documents import documents
from gossamer._core.modes import evaluating
from gossamer.extract.text import Text

_OPERATOR = "integrations.transformers.Activations"
_DOCUMENTS_AT_ONCE = 256


class Activations:
    """The output or input of one module of a model that reads text, a row a token: a source for `gossamer.extract`.

    Documents are tokenised one after another and cut into contexts of `context_size` tokens. Where the tokenizer has a
    BOS token, one stands at the beginning of each context and before each document in it; it fills its place in the
    context, but is no row: the activation there belongs to no text. Attention crosses from one document to the
    next within a context, as it does in most training. The last context is shorter and is read by itself, so nothing is
    padded.

    The text is tokenised at once, when this is made, and takes about 12 bytes of memory a token; the model runs while
    rows are asked for, always on the same batches of contexts, so that its rows are the same bits wherever reading
    begins. It stops behind `hook`.

    Args:
        model: a model of transformers, or another `nn.Module` called with `input_ids` int64 `[B, T]`; used where it is,
            in evaluation mode.
        tokenizer: its tokenizer.
        texts: a `pathlib.Path` or several, of text files (`.jsonl`: a document a line, its string or that under "text";
            any other: a document a file) or folders of `.txt` and `.jsonl` files; or an iterable of strings, a document
            each.
        hook: the name of a module of the model, as `model.named_modules()` has it, such as "model.layers.12".
        context_size: tokens the model reads as one, BOS included.
        batch_size: contexts at once.
        which: the module's "output", or its first "input"; of a tuple the first. It must be `[B, T, d]`.

    Attributes:
        text: the token of each row, and where one text ends and another begins.

    Raises:
        ValueError: no such module, sizes that do not fit, a tokenizer with more tokens than the model, a file that is
            not UTF-8 or not JSON; while rows are read, a module that does not run or gives no `[B, T, d]`.
        TypeError: arguments of another kind.
        FileNotFoundError: no such file.

    >>> source = Activations(model, tokenizer, ["a text", "another text"], "transformer.h.1", context_size=16)
    >>> extract(source, TopKSAE(d_in=32, d_sae=64, k=4), folder)
    Extraction(rows=..., d_sae=64, nnz=..., shards=1, complete)
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        texts: Path | Iterable[Path] | Iterable[str],
        hook: str,
        *,
        context_size: int = 128,
        batch_size: int = 16,
        which: str = "output",
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"{_OPERATOR}: model must be a torch.nn.Module, got {type(model).__name__}.")
        if not callable(tokenizer) or not hasattr(tokenizer, "convert_tokens_to_string"):
            raise TypeError(f"{_OPERATOR}: tokenizer must be one of transformers, got {type(tokenizer).__name__}.")
        checks.positive(_OPERATOR, "context_size", context_size, "It is the number of tokens that the model reads.")
        checks.positive(_OPERATOR, "batch_size", batch_size, "It is the number of contexts at once.")
        if which not in ("output", "input"):
            raise ValueError(f'{_OPERATOR}: which must be "output" or "input", got {which!r}.')
        limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        if context_size < 2 or (isinstance(limit, int) and 0 < limit < context_size):
            rule = "at least 2" if context_size < 2 else f"at most {limit}, the positions that the model has"
            raise ValueError(f"{_OPERATOR}: context_size must be {rule}, got {context_size}.")
        self._model, self._module, self._hook, self._which = model, _module(model, hook), hook, which
        self._ids, self._is_row, self.text = _pack(tokenizer, texts, context_size)
        embeddings: Any = getattr(model, "get_input_embeddings", None)
        embedding = None if embeddings is None else embeddings()
        known = getattr(embedding, "num_embeddings", None)
        if known is not None and self._ids.size and int(self._ids.max()) >= known:
            raise ValueError(
                f"{_OPERATOR}: tokenizer gave token {int(self._ids.max())}, and the model knows {known}. Give the "
                "tokenizer that belongs to the model."
            )
        weight = getattr(embedding, "weight", None)
        self._device = next(model.parameters()).device if weight is None else weight.device
        whole = self._ids.size // context_size * context_size
        self._context_size = context_size
        # Places of the batches among the tokens, and the rows that stand before each.
        self._edges = np.unique([*range(0, whole, batch_size * context_size), whole, self._ids.size])
        sizes = np.zeros(0, np.int64)
        if self._ids.size:
            sizes = np.add.reduceat(self._is_row, self._edges[:-1], dtype=np.int64)
        self._rows_before = np.concatenate([[0], np.cumsum(sizes)])

    def __len__(self) -> int:
        """The number of rows."""
        return self.text.tokens.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return self.rows_from(0)

    def rows_from(self, start: int) -> Iterator[Tensor]:
        """Batches `[n, d]` of the rows from `start` on; the model reads no context that lies wholly before it."""
        first = int(np.searchsorted(self._rows_before, start, side="right")) - 1
        for number in range(first, len(self._edges) - 1):
            rows = self._rows(self._edges[number], self._edges[number + 1])
            yield rows[max(start - int(self._rows_before[number]), 0) :]

    def losses(self, *edits: Callable[[Tensor], Tensor], batches: int = 8) -> list[float]:
        """The model's cross-entropy on the first contexts, with its rows as each of the edits returns them.

        Args:
            edits: from rows `[n, d]` of the hook to as many of the same dtype; the identity gives the model's own loss.
            batches: of `batch_size` contexts.

        Returns:
            Of each edit the mean, in nats a token, over tokens that are rows; nothing of a model without logits.

        >>> own, without = source.losses(lambda rows: rows, torch.zeros_like)
        """
        sums = torch.zeros(len(edits), 2, dtype=torch.float64)
        for first, end in list(pairwise(self._edges))[:batches]:
            ids = self._contexts(self._ids, first, end).long()
            is_row = self._contexts(self._is_row, first, end)
            for edit, total in zip(edits, sums):
                out = self._run(ids, partial(_edited, is_row, edit))
                logits = getattr(out, "logits", out)
                if not isinstance(logits, Tensor):
                    return []
                logits = logits.to(ids.device)[:, :-1][is_row[:, 1:]].float()
                loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:][is_row[:, 1:]], reduction="sum")
                total += torch.tensor([float(loss), len(logits)])
        return (sums[:, 0] / sums[:, 1]).tolist()

    def _contexts(self, of: np.ndarray, first: int, end: int) -> Tensor:
        return torch.from_numpy(of[first:end].copy()).reshape(-1, min(self._context_size, end - first)).to(self._device)

    def __repr__(self) -> str:
        return f"Activations(rows={len(self)}, hook={self._hook!r}, which={self._which!r})"

    def _rows(self, first: int, end: int) -> Tensor:
        ids = self._contexts(self._ids, first, end).long()
        found = self._run(ids)
        value = _first(found)
        if not isinstance(value, Tensor) or value.dim() != 3 or value.shape[:2] != ids.shape:
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"{_OPERATOR}: the {self._which} of {self._hook} must have shape [B, T, d] = "
                f"[{ids.shape[0]}, {ids.shape[1]}, d], got {shape}. Name another hook."
            )
        is_row = torch.from_numpy(self._is_row[first:end]).to(value.device)
        return value.detach().flatten(0, 1)[is_row]

    def _run(self, ids: Tensor, put: Callable[[Any], Any] | None = None) -> Any:
        """The hook's view when the model reads ids; with `put`, the model's output where it goes on with put(view)."""

        def meet(found: Any) -> Any:
            if put is None:
                raise _Found(found)
            met.append(True)
            return put(found)

        def meet_input(module: Any, given: Any, named: Any) -> Any:
            changed = meet((*given, *named.values(), None)[0])
            return ((changed, *given[1:]), named) if given else ((), {**named, next(iter(named)): changed})

        met: list[bool] = []
        if self._which == "output":
            handle = self._module.register_forward_hook(lambda module, given, output: meet(output))
        else:
            handle = self._module.register_forward_pre_hook(meet_input, with_kwargs=True)
        options = {"use_cache": False} if "use_cache" in inspect.signature(self._model.forward).parameters else {}
        try:
            with torch.no_grad(), evaluating(self._model):
                out = self._model(input_ids=ids, **options)
        except _Found as found:
            return found.value
        finally:
            handle.remove()
        if met:
            return out
        raise ValueError(f"{_OPERATOR}: {self._hook} did not run when the model read text. Name another hook.")


def _edited(is_row: Tensor, edit: Callable[[Tensor], Tensor], found: Any) -> Any:
    """A hook's view with other rows; the activation of a BOS token, which is no row, stays."""
    value, is_row = _first(found), is_row.to(_first(found).device)
    new = value.clone()
    new[is_row] = edit(value[is_row])
    if hasattr(found, "to_tuple"):
        return replace(found, **{next(iter(found)): new})
    return (new, *found[1:]) if isinstance(found, tuple | list) else new


def _first(found: Any) -> Any:
    """The activation of a hook's view, which may be a tuple or an output of transformers."""
    return found[0] if isinstance(found, tuple | list) or hasattr(found, "to_tuple") else found


class _Found(Exception):
    """Carries a hook's view out of the model, which need not go on."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def _module(model: nn.Module, hook: str) -> nn.Module:
    names = [name for name, _ in model.named_modules() if name]
    if hook not in names:
        near = difflib.get_close_matches(str(hook), names, n=3, cutoff=0.3) or names[:3]
        raise ValueError(
            f"{_OPERATOR}: hook must name a module of the model, got {hook!r}. Near it: {', '.join(near)}; "
            "model.named_modules() has all."
        )
    return model.get_submodule(hook)


def _pack(tokenizer: Any, texts: Any, context_size: int) -> tuple[np.ndarray, np.ndarray, Text]:
    """Tokens in contexts one after another (int32), which of them are rows (bool), and the text of the rows."""
    bos = tokenizer.bos_token_id
    ids, is_row, starts = array("i"), bytearray(), bytearray()
    for document in _tokenised(tokenizer, texts):
        rest, begins = np.asarray(document, dtype=np.int32), True
        while rest.size:
            at = len(ids) % context_size
            begins = begins or at == 0
            if begins and bos is not None:
                ids.append(bos)
                is_row.append(0)
                at = (at + 1) % context_size
                if at == 0:
                    continue
            taken, rest = rest[: context_size - at], rest[context_size - at :]
            ids.frombytes(taken.tobytes())
            is_row += b"\1" * taken.size
            starts += bytes([begins]) + bytes(taken.size - 1)
            begins = False
    # NumPy makes no array of an empty buffer.
    packed = np.frombuffer(ids, np.int32) if ids else np.empty(0, np.int32)
    rows = np.frombuffer(is_row, np.bool_) if ids else np.empty(0, np.bool_)
    begins_text = np.frombuffer(starts, np.bool_) if ids else np.empty(0, np.bool_)
    tokens = packed[rows]
    vocabulary = _vocabulary(tokenizer, np.flatnonzero(np.bincount(tokens)).tolist())
    return packed, rows, Text(torch.from_numpy(tokens), torch.from_numpy(begins_text), vocabulary)


def _tokenised(tokenizer: Any, texts: Any) -> Iterator[list[int]]:
    documents = _documents(texts)
    while some := list(islice(documents, _DOCUMENTS_AT_ONCE)):
        yield from tokenizer(some, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


def _documents(texts: Any) -> Iterator[str]:
    if isinstance(texts, Path):
        texts = [texts]
    if isinstance(texts, str | bytes) or not isinstance(texts, Iterable):
        raise TypeError(
            f"{_OPERATOR}: texts must be a pathlib.Path or several, or an iterable of strings, got "
            f"{type(texts).__name__}. A file is Path(name), a single text [text]."
        )
    for number, item in enumerate(texts):
        if isinstance(item, Path):
            yield from documents(_OPERATOR, item)
        elif isinstance(item, str):
            yield item
        else:
            raise TypeError(f"{_OPERATOR}: item {number} of texts must be a string or a Path, got {item!r:.80}.")


def _vocabulary(tokenizer: Any, ids: list[int]) -> dict[int, str]:
    """The spelling of each token, the space before a word included; bytes of characters in pieces are surrogates."""
    vocabulary = {}
    for token, raw in zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True):
        # A decoder may leave out a space at the beginning of a text, and so the token stands behind a letter.
        piece = tokenizer.convert_tokens_to_string(["a", raw]).removeprefix("a")
        if "\N{REPLACEMENT CHARACTER}" in piece or re.fullmatch("<0x[0-9A-F]{2}>", raw):
            piece = _bytes_of(raw).decode(errors="surrogateescape")
        vocabulary[token] = piece
    return vocabulary


def _bytes_of(raw: str) -> bytes:
    """The bytes that a byte-level token, or a byte that stands for itself as "<0x0A>", is written for."""
    if re.fullmatch("<0x[0-9A-F]{2}>", raw):
        return bytes([int(raw[3:5], 16)])
    if all(character in _BYTES for character in raw):
        return bytes(_BYTES[character] for character in raw)
    return raw.encode()


# Byte-level tokenizers write a byte as the Latin-1 character of its number where that can be seen, and the others, in
# their order, as the characters from 256 on.
_SEEN = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_HIDDEN = [byte for byte in range(256) if byte not in _SEEN]
_BYTES = {chr(byte): byte for byte in _SEEN} | {chr(256 + number): byte for number, byte in enumerate(_HIDDEN)}
