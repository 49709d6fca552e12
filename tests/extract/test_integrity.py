"""Streaming extraction: a disk flips a bit, a source changes, a manifest is damaged or lost."""

import json
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gossamer.extract import Extraction, extract
from gossamer.extract.text import Text
from tests.extract.extraction import SIZES, Killed, activations, contents, flip, model, one_run, stop_at, threads

pytestmark = pytest.mark.native
MANIFEST = "manifest.json"


def interrupted(source: Any, sae: Any, out: Path, rows: int = 224) -> None:
    """Three of five shards are left, if one is written while the next is made."""
    with pytest.raises(Killed):
        extract(source, sae, out, progress=stop_at(rows), **SIZES)


class Rows:
    """A source of the kind of a language model, with or without text."""

    def __init__(self, x: Tensor, text: bool = False) -> None:
        self.x = x
        if text:
            tokens = torch.arange(len(x), dtype=torch.int32) % 3
            self.text = Text(tokens, tokens == 0, {0: "zero", 1: "one", 2: "\udcff"})

    def __len__(self) -> int:
        return len(self.x)

    def rows_from(self, start: int) -> Any:
        return iter(self.x[start:].split(50))


@pytest.mark.parametrize("at", [0.0, 0.03, 0.5, 0.999])
@pytest.mark.parametrize("name", ["shard-000001.safetensors", "statistics-000004.safetensors"])
def test_a_flipped_bit(name: str, at: float, device: torch.device, tmp_path: Path) -> None:
    """In a length, in a header, in the midst or at the end: no call takes the file for what was written."""
    sae, x = model(device), activations()
    whole = extract(x, sae, tmp_path, **SIZES)
    flip(tmp_path / name, at)
    before = contents(tmp_path)
    message = name.replace(".", "[.]") + " is damaged"
    with pytest.raises(ValueError, match=message + r".* Put a whole copy back, or extract to another folder\."):
        Extraction.check(tmp_path)
    with pytest.raises(ValueError, match=rf"(extract|Extraction): .*{message}"):
        extract(x, sae, tmp_path, **SIZES)
    if name.startswith("shard"):
        found = Extraction(tmp_path)
        assert torch.equal(found.read(0).values, whole.read(0).values)
        for _ in range(2):
            with pytest.raises(ValueError, match=rf"Extraction: .*{message}"):
                found.read(1)
    else:
        with pytest.raises(ValueError, match=rf"Extraction: .*{message}"):
            Extraction(tmp_path)
    assert contents(tmp_path) == before and not threads()
    flip(tmp_path / name, at)
    assert extract(x, sae, tmp_path, **SIZES).rows == 300


def test_any_flipped_bit(device: torch.device, tmp_path: Path) -> None:
    extract(activations(100), model(device), tmp_path, **SIZES)
    rng = random.Random(0)
    for name in ("shard-000000.safetensors", "statistics-000001.safetensors", MANIFEST):
        whole = (tmp_path / name).read_bytes()
        # As many in the header as behind it.
        for at in [rng.randrange(min(len(whole), limit)) / len(whole) for limit in (600, 2**40) for _ in range(40)]:
            flip(tmp_path / name, at, rng.randrange(8))
            with pytest.raises(ValueError, match=rf"Extraction: .*{name.replace('.', '[.]')} is damaged"):
                Extraction.check(tmp_path)
            (tmp_path / name).write_bytes(whole)
    assert Extraction.check(tmp_path).rows == 100


def test_a_flipped_bit_before_a_run_goes_on(device: torch.device, tmp_path: Path) -> None:
    sae, x = model(device), activations()
    interrupted(x, sae, tmp_path)
    done = Extraction.check(tmp_path).rows
    assert done in (128, 192)
    flip(tmp_path / "shard-000001.safetensors", bit=6)
    before, seen = contents(tmp_path), []
    with pytest.raises(ValueError, match=r"extract: in .*, shard-000001\.safetensors is damaged \(its checksum"):
        extract(x, sae, tmp_path, progress=lambda *args: seen.append(args), **SIZES)
    assert contents(tmp_path) == before and seen == [(rows, 300) for rows in range(64, done + 1, 64)]
    flip(tmp_path / "shard-000001.safetensors", bit=6)
    seen.clear()
    extract(x, sae, tmp_path, progress=lambda *args: seen.append(args), **SIZES)
    # Through what is verified, and on from there.
    rows = [*range(64, done + 1, 64), *range(done + 32, 300, 32), 300]
    assert seen == [(row, 300) for row in rows] and not threads()


def test_a_run_stopped_while_it_verifies(device: torch.device, tmp_path: Path) -> None:
    sae, x = model(device), activations()
    extract(x, sae, tmp_path, **SIZES)
    with pytest.raises(Killed):
        extract(x, sae, tmp_path, progress=stop_at(64), **SIZES)
    with pytest.raises(Killed):
        Extraction.check(tmp_path, progress=stop_at(64))
    assert not threads()


def test_check_names_all_that_is_wrong(device: torch.device, tmp_path: Path) -> None:
    sae, source = model(device), Rows(activations(), text=True)
    extract(source, sae, tmp_path, **SIZES)
    flip(tmp_path / "vocabulary.json")
    with pytest.raises(ValueError, match=r"in .*, vocabulary\.json is damaged \(its checksum differs\)\. "):
        Extraction.check(tmp_path)
    with pytest.raises(ValueError, match=r"vocabulary\.json is damaged: .* The same call of extract writes it again"):
        Extraction(tmp_path).context(3)
    extract(source, sae, tmp_path, **SIZES)
    assert Extraction.check(tmp_path).context(3)[1] == "zero"
    seen: list[Any] = []
    assert Extraction.check(str(tmp_path), lambda *args: seen.append(args)).rows == 300
    assert seen == [(rows, 300) for rows in (64, 128, 192, 256, 300)]
    for name in ("shard-000001.safetensors", "shard-000003.safetensors", "statistics-000004.safetensors"):
        flip(tmp_path / name)
    flip(tmp_path / "vocabulary.json")
    (tmp_path / "shard-000002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"^Extraction: in ") as raised:
        Extraction.check(tmp_path)
    for name, what in (
        ("shard-000001.safetensors", "damaged (its checksum differs)"),
        ("shard-000002.safetensors", "gone"),
        ("shard-000003.safetensors", "damaged (its checksum differs)"),
        ("statistics-000004.safetensors", "damaged (its checksum differs)"),
        ("vocabulary.json", "damaged (its checksum differs)"),
    ):
        assert f"{name} is {what}" in str(raised.value)
    assert "shard-000000" not in str(raised.value)
    for name in ("statistics-000004.safetensors", "vocabulary.json"):
        (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=r"statistics-000004\.safetensors is gone; vocabulary\.json is gone; shard-0"):
        Extraction.check(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"holds no manifest\.json"):
        Extraction.check(tmp_path / "none")


def test_checksums_as_the_docs_define_them(device: torch.device, tmp_path: Path) -> None:
    """Without a line of ours: `sha256sum` verifies a file."""
    extract(activations(), model(device), tmp_path, **SIZES)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    for entry in [*manifest["shards"], manifest["statistics"]]:
        said = subprocess.run(["sha256sum", tmp_path / entry["file"]], capture_output=True, text=True, check=True)
        assert said.stdout.split()[0] == entry["sha256"]


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b"\xff\xfe", None, "flipped", "another program's"])
def test_a_damaged_manifest(damage: Any, device: torch.device, tmp_path: Path) -> None:
    """An error from every call, and nothing is written."""
    sae, x, file = model(device), activations(100), tmp_path / MANIFEST
    extract(x, sae, tmp_path, **SIZES)
    whole = file.read_bytes()
    changed = {"flipped": whole.replace(b'"nnz": 384', b'"nnz": 385', 1), "another program's": b'{"name": "other"}'}
    damage = changed.get(damage, damage)
    file.unlink() if damage is None else file.write_bytes(damage)
    before = contents(tmp_path)
    message = r"but no manifest\.json that says whose it is" if damage is None else r"manifest\.json is damaged: "
    with pytest.raises(ValueError, match=message):
        extract(x, sae, tmp_path, **SIZES)
    with pytest.raises(FileNotFoundError if damage is None else ValueError, match=r"manifest\.json"):
        Extraction(tmp_path)
    assert contents(tmp_path) == before
    file.write_bytes(whole)
    assert extract(x, sae, tmp_path, **SIZES).rows == 100


@pytest.mark.parametrize("finished", [False, True])
def test_a_source_that_changed_behind_its_first_batch(finished: bool, device: torch.device, tmp_path: Path) -> None:
    sae, x = model(device), activations()
    other = x.clone()
    other[64] += 1
    sources: dict[str, Callable[[Tensor], Any]] = {"tensor": lambda rows: rows, "rows": Rows}
    for name, source in sources.items():
        out = tmp_path / name
        if finished:
            extract(source(x), sae, out, **SIZES)
        else:
            # Two shards: the last of them is the one that differs.
            interrupted(source(x), sae, out, 160)
        before = contents(out)
        if finished and name == "rows":
            other[256] += 1
        with pytest.raises(ValueError, match=rf"{out} was begun with another source: its rows from (64|256) on differ"):
            extract(source(other), sae, out, **SIZES)
        assert contents(out) == before and not threads()
        extract(source(x), sae, out, **SIZES)


def test_rows_that_are_not_finished_may_change(device: torch.device, tmp_path: Path) -> None:
    """Nothing is mixed: the files are those of the new source."""
    sae, x = model(device), activations()
    interrupted(x, sae, tmp_path / "out", 160)
    other = torch.cat([x[:128], x[128:].flip(0)])
    extract(other, sae, tmp_path / "out", **SIZES)
    assert contents(tmp_path / "out") == one_run(tmp_path / "whole", other, sae)


def test_a_source_without_rows(device: torch.device, tmp_path: Path) -> None:
    sae, x = model(device), activations()
    np.save(tmp_path / "none.npy", x[:0].numpy())
    for number, empty in enumerate((x[:0], [], iter(()), [x[:0], x[:0]], tmp_path / "none.npy", Rows(x[:0]))):
        with pytest.raises(ValueError, match=r"extract: source has no rows\. Give at least one"):
            extract(empty, sae, tmp_path / str(number), **SIZES)
        # Nothing was begun that another source could not have.
        assert extract(x, sae, tmp_path / str(number), **SIZES).rows == 300
