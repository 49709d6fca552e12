"""Text as tokens on disk: the tokenizer, memory-mapped shards of tokens, and the batches of each step."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer._core import files
from gossamer._core.documents import documents

END = "<|endoftext|>"
SHARD_TOKENS = 1 << 26
VALIDATION, VALIDATION_TOKENS = 50, 1 << 20
"""One document in so many is kept for validation, until it has so many tokens; of fewer documents the end is."""
_AT_ONCE, _TO_LEARN = 256, 100_000_000
"""Documents that are tokenised together; characters that a tokenizer learns from."""
_MANIFEST, _TOKENIZER = "corpus.json", "tokenizer.json"
_OPERATOR = "train.pack"


def read_text(sources: Iterable[Path]) -> Iterator[str]:
    """The documents of text files and of folders of `.txt` and `.jsonl` files: of `.jsonl` one a line, its string
    or that under "text", of any other the whole file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a file that is not UTF-8 or not JSON, a folder without text.

    >>> list(read_text([Path("notes.txt")]))  # doctest: +SKIP
    """
    for source in sources:
        yield from documents(_OPERATOR, source)


def read_dataset(name: str) -> Iterator[str]:
    """The documents of a data set of Hugging Face, `name` or `name:configuration`: the column `text` of its split
    `train`, streamed. Needs `datasets`.

    Raises:
        ValueError: no such column, or `datasets` is not installed.

    >>> read_dataset("HuggingFaceFW/fineweb-edu:sample-10BT")  # doctest: +SKIP
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        way = "run pip install '.[train]' in a clone of the repository"
        raise ValueError(f"{_OPERATOR}: a data set needs datasets: {way}.") from error
    path, _, configuration = name.partition(":")
    for row in load_dataset(path, configuration or None, split="train", streaming=True):
        if not isinstance(row.get("text"), str):
            raise ValueError(f"{_OPERATOR}: data set {name} must have a column text, got {', '.join(row)}.")
        yield row["text"]


def learn_tokenizer(texts: Iterable[str], vocabulary: int) -> Any:
    """A byte-level BPE tokenizer of so many tokens, from the first 100 million characters. Needs `tokenizers`.

    >>> learn_tokenizer(["a text", "another text"], 300).encode("a text").ids  # doctest: +SKIP
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first(texts, _TO_LEARN), trainer)
    return tokenizer


def _first(texts: Iterable[str], characters: int) -> Iterator[str]:
    for text in texts:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return


def pack(
    texts: Iterable[str], tokenizer: Any, folder: Path, *, progress: Callable[[int], Any] = lambda tokens: None
) -> None:
    """Writes documents as shards of tokens, with the tokenizer, for `Corpus`. The manifest comes last, so that a folder
    without one is not whole.

    Args:
        texts: a document each; one in 50 goes to validation, and of fewer the last fiftieth of the tokens.
        tokenizer: of `tokenizers`, with a token `<|endoftext|>` or `</s>`, which ends each document.
        folder: made if it is not there.
        progress: called with the number of tokens so far.

    Raises:
        ValueError: a tokenizer without such a token; no text; a folder with tokens of another tokenizer.
        OSError: the disk is full, say: errno is what the system says.

    >>> pack(read_text([Path("books")]), tokenizer, Path("corpus"))  # doctest: +SKIP
    """
    end = next((found for name in (END, "</s>", "<eos>") if (found := tokenizer.token_to_id(name)) is not None), None)
    if end is None:
        raise ValueError(f"{_OPERATOR}: tokenizer must have a token {END}, </s> or <eos>, which ends a document.")
    files.make_folder(_OPERATOR, "out", folder)
    known = folder / _TOKENIZER
    if (folder / _MANIFEST).exists() and known.exists() and known.read_text(encoding="utf-8") != tokenizer.to_str():
        raise ValueError(
            f"{_OPERATOR}: {folder} holds tokens of another tokenizer, which runs may need. Name another folder, or "
            f"give that tokenizer, {known}."
        )
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32
    shards: list[dict[str, Any]] = []
    held: dict[str, list[np.ndarray]] = {"train": [], "validation": []}
    sizes, total, number = {"train": 0, "validation": 0}, 0, 0

    def write(part: str) -> None:
        name = f"{part}-{sum(shard['part'] == part for shard in shards):05}.npy"
        tokens = np.concatenate(held[part])
        files.write_whole(_OPERATOR, folder / name, lambda path: np.save(path, tokens))
        shards.append({"part": part, "name": name, "tokens": len(tokens), "sha256": files.digest(folder / name)})
        held[part].clear()
        sizes[part] = 0

    stream = iter(texts)
    while some := list(itertools.islice(stream, _AT_ONCE)):
        for encoding in tokenizer.encode_batch_fast(some, add_special_tokens=False):
            ids = np.array([*encoding.ids, end], dtype)
            validates = number % VALIDATION == VALIDATION - 1 and sizes["validation"] < VALIDATION_TOKENS
            part = "validation" if validates else "train"
            held[part].append(ids)
            sizes[part], total, number = sizes[part] + len(ids), total + len(ids), number + 1
            if sizes["train"] >= SHARD_TOKENS:
                write("train")
        progress(total)
    if not total:
        raise ValueError(f"{_OPERATOR}: the text must have at least one document, got none.")
    if number < VALIDATION and held["train"]:
        tokens = np.concatenate(held["train"])
        cut = len(tokens) * (VALIDATION - 1) // VALIDATION
        held = {"train": [tokens[:cut]], "validation": [tokens[cut:]]}
    for part in ("train", "validation"):
        if held[part]:
            write(part)
    manifest = {"vocabulary": tokenizer.get_vocab_size(), "end": end, "documents": number, "shards": shards}
    for name, content in ((_TOKENIZER, tokenizer.to_str()), (_MANIFEST, json.dumps(manifest, indent=1))):
        files.write_text(_OPERATOR, folder / name, content)


class Corpus:
    """Shards of tokens that `pack` wrote, verified, and read through memory maps.

    Args:
        folder: of the shards.

    Attributes:
        vocabulary, end: the number of tokens, and the one that ends a document.
        tokens: how many there are for training.

    Raises:
        FileNotFoundError: the folder has no manifest: nothing was packed, or packing was interrupted.
        ValueError: a shard that is not what `pack` wrote.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / _MANIFEST).exists():
            raise FileNotFoundError(f"train.Corpus: {folder} holds no {_MANIFEST}: pack a text there first.")
        try:
            found = json.loads((folder / _MANIFEST).read_text())
            self.vocabulary, self.end, self._shards = found["vocabulary"], found["end"], found["shards"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"train.Corpus: {folder / _MANIFEST} is damaged: {error}. Pack the text again.") from error
        self.tokens = sum(shard["tokens"] for shard in self._shards if shard["part"] == "train")
        for shard in self._shards:
            file = folder / shard["name"]
            if not file.exists() or files.digest(file) != shard["sha256"]:
                raise ValueError(
                    f"train.Corpus: shard {file} is not as it was packed: it is missing, corrupt or truncated. Remove "
                    f"the folder {folder} and pack the text again; checkpoints stay good."
                )

    def tokenizer(self) -> Any:
        """The tokenizer. Needs `tokenizers`."""
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self.folder / _TOKENIZER))

    def windows(self, part: str, length: int) -> Windows:
        """All windows of `length + 1` tokens of a part, `"train"` or `"validation"`, that share one token each."""
        maps = [np.load(self.folder / s["name"], mmap_mode="r") for s in self._shards if s["part"] == part]
        return Windows(maps, length)


@dataclass
class Windows:
    """Windows of length + 1 tokens over memory-mapped shards; each token but a shard's last few is predicted once."""

    shards: list[np.ndarray]
    length: int

    def __post_init__(self) -> None:
        counts = [max(len(shard) - 1, 0) // self.length for shard in self.shards]
        self._ends = np.cumsum(counts, dtype=np.int64)
        self._order: tuple[tuple[int, int], np.ndarray] | None = None

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, number: int) -> np.ndarray:
        shard = int(np.searchsorted(self._ends, number, side="right"))
        first = (number - (int(self._ends[shard - 1]) if shard else 0)) * self.length
        return self.shards[shard][first : first + self.length + 1]

    def batch(self, numbers: Iterable[int]) -> Tensor:
        """int64 `[B, length + 1]`."""
        return torch.from_numpy(np.stack([self[number] for number in numbers]).astype(np.int64))

    def shuffled(self, first: int, count: int, seed: int) -> list[int]:
        """Windows number first to first + count - 1 of an endless sequence in which each epoch has an order of its own:
        a function of its arguments alone, so that a position says all about where training stands in its data."""
        found = []
        for number in range(first, first + count):
            epoch, place = divmod(number, len(self))
            if self._order is None or self._order[0] != (seed, epoch):
                self._order = (seed, epoch), np.random.default_rng((seed, epoch)).permutation(len(self))
            found.append(int(self._order[1][place]))
        return found
