"""Packing and reading of tokens."""

import errno
import json
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("tokenizers")

from gossamer.train import Corpus, data, learn_tokenizer, pack, read_dataset, read_text

pytestmark = pytest.mark.native
TEXTS = [f"document {i} says that {i} and {i * i} are größer than naught.\n" * 3 for i in range(120)]


@pytest.fixture(scope="module")
def tokenizer() -> object:
    return learn_tokenizer(TEXTS, 300)


@pytest.fixture
def folder(tokenizer: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(data, "SHARD_TOKENS", 1500)
    pack(TEXTS, tokenizer, tmp_path)
    return tmp_path


def test_what_was_packed_is_the_text(folder: Path) -> None:
    corpus = Corpus(folder)
    found = corpus.tokenizer()
    shards = sorted(folder.glob("train-*.npy"))
    assert len(shards) > 2 and np.load(shards[0]).dtype == np.uint16
    tokens = np.concatenate([np.load(shard) for shard in shards])
    assert len(tokens) == corpus.tokens
    texts = [found.decode(part) for part in np.split(tokens, np.flatnonzero(tokens == corpus.end) + 1)[:-1]]
    held = [found.decode(np.load(file)) for file in folder.glob("validation-*.npy")]
    assert texts == [text for i, text in enumerate(TEXTS) if i % 50 != 49]
    assert "".join(held) == TEXTS[49] + TEXTS[99]


def test_each_token_is_predicted_once_an_epoch_and_each_epoch_has_its_own_order(folder: Path) -> None:
    windows = Corpus(folder).windows("train", 16)
    predicted = sum(len(windows[number]) - 1 for number in range(len(windows)))
    assert predicted == sum((len(shard) - 1) // 16 * 16 for shard in windows.shards)
    for number in range(1, len(windows)):
        follows = windows[number][0] == windows[number - 1][-1]
        assert follows or number in windows._ends
    n = len(windows)
    first, second = windows.shuffled(0, n, 3), windows.shuffled(n, n, 3)
    assert sorted(first) == sorted(second) == list(range(n)) and first != second
    assert windows.shuffled(n - 3, 6, 3) == first[-3:] + second[:3], "a position says all"
    assert windows.shuffled(0, n, 4) != first


def test_a_batch_is_what_the_map_holds() -> None:
    windows = data.Windows([np.arange(10, dtype=np.uint16), np.arange(100, 117, dtype=np.uint16)], 4)
    assert len(windows) == 6
    wanted = torch.tensor([[4, 5, 6, 7, 8], [100, 101, 102, 103, 104], [112, 113, 114, 115, 116]])
    assert torch.equal(windows.batch([1, 2, 5]), wanted)


@pytest.mark.parametrize("harm", ["truncated", "changed", "missing", "empty"])
def test_a_shard_that_is_not_as_packed_is_refused(folder: Path, harm: str) -> None:
    file = folder / "train-00001.npy"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    if harm == "missing":
        file.unlink()
    else:
        file.write_bytes({"truncated": content[:-10], "changed": content, "empty": b""}[harm])
    with pytest.raises(ValueError, match=r"train-00001.npy is not as it was packed.* checkpoints stay good"):
        Corpus(folder)


@pytest.mark.parametrize("manifest", ['{"vocab', "{}", "[]"])
def test_a_manifest_that_is_damaged_is_named(folder: Path, manifest: str) -> None:
    (folder / "corpus.json").write_text(manifest)
    with pytest.raises(ValueError, match=r"corpus.json is damaged: .* Pack the text again"):
        Corpus(folder)


def test_of_few_documents_the_end_is_for_validation(tokenizer: object, tmp_path: Path) -> None:
    pack([" ".join(TEXTS)], tokenizer, tmp_path)
    parts = [np.load(tmp_path / f"{part}-00000.npy") for part in ("train", "validation")]
    whole = Corpus(tmp_path).tokenizer().encode(" ".join(TEXTS)).ids
    assert np.concatenate(parts).tolist() == [*whole, Corpus(tmp_path).end]
    assert len(parts[1]) == -(-(len(whole) + 1) // data.VALIDATION)


def test_packing_that_was_interrupted_leaves_nothing_that_is_taken_for_whole(
    tokenizer: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "SHARD_TOKENS", 1500)
    kept = np.save

    def full(path: Path, tokens: np.ndarray) -> None:
        if "00001" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        kept(path, tokens)

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(OSError, match=r"train-00001.npy could not be written: No space left on device") as caught:
        pack(TEXTS, tokenizer, tmp_path)
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(FileNotFoundError, match=r"holds no corpus.json"):
        Corpus(tmp_path)
    monkeypatch.setattr(np, "save", kept)
    pack(TEXTS, tokenizer, tmp_path)
    assert Corpus(tmp_path).tokens > 1500


def test_text_and_data_sets(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:3]))
    assert list(read_text([tmp_path])) == TEXTS[:3]
    pytest.importorskip("datasets")
    assert list(read_dataset(str(tmp_path))) == TEXTS[:3]
    (tmp_path / "a.jsonl").write_text('{"words": "x"}\n')
    with pytest.raises(ValueError, match="must have a column text, got words"):
        list(read_dataset(str(tmp_path)))


def test_no_text_and_no_end(tokenizer: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one document"):
        pack([], tokenizer, tmp_path)
    from tokenizers import Tokenizer, models

    with pytest.raises(ValueError, match="which ends a document"):
        pack(TEXTS, Tokenizer(models.BPE()), tmp_path)
