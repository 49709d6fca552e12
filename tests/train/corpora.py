"""Corpora made up for tests, without a tokenizer to learn."""

import hashlib
import json
from pathlib import Path

import numpy as np


def write_corpus(folder: Path, *, tokens: int, vocabulary: int) -> None:
    """A text of words that follow each other by a rule, half of the time, in two shards and one for validation."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    shards = []
    for part, name, size in (
        ("train", "train-00000.npy", tokens // 2),
        ("train", "train-00001.npy", tokens - tokens // 2),
        ("validation", "validation-00000.npy", max(tokens // 10, 200)),
    ):
        found = rng.integers(0, vocabulary, size)
        for i in np.flatnonzero(rng.random(size - 1) < 0.7) + 1:
            found[i] = (found[i - 1] * 5 + 7) % vocabulary
        np.save(folder / name, found.astype(np.uint16))
        digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        shards.append({"part": part, "name": name, "tokens": size, "sha256": digest})
    manifest = {"vocabulary": vocabulary, "end": 0, "documents": 3, "shards": shards}
    (folder / "corpus.json").write_text(json.dumps(manifest))
