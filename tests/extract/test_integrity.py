"""Streaming extraction: what is noticed when a disk flips a bit, a source changes or a manifest is lost."""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from gossamer._core import files
from gossamer.extract import Extraction, extract
from gossamer.extract.text import Text
from tests.extract.extraction import SIZES, Killed, activations, contents, flip, model, stop_at, threads

pytestmark = pytest.mark.native
MANIFEST = "manifest.json"


def interrupted(source: Any, sae: Any, out: Path, rows: int = 224) -> None:
    """Three of five shards are left, if one is written while the next is made."""
    with pytest.raises(Killed):
        extract(source, sae, out, progress=stop_at(rows), **SIZES)


class Rows:
    """A source of the kind of a language model, with or without text."""

    def __init__(self, x: Tensor, text: bool = False) -> None:
        self.x, self.asked = x, []
        if text:
            tokens = torch.arange(len(x), dtype=torch.int32) % 3
            self.text = Text(tokens, tokens == 0, {0: "zero", 1: "one", 2: "\udcff"})

    def __len__(self) -> int:
        return len(self.x)

    def rows_from(self, start: int) -> Any:
        self.asked.append(start)
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
    with pytest.raises(ValueError, match=message + r" \(.*\)\. Put a whole copy back; or remove it and manifest\.json"):
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
    # The way out that the error names.
    (tmp_path / name).unlink()
    (tmp_path / MANIFEST).unlink()
    extract(x, sae, tmp_path, **SIZES)
    extract(x, sae, tmp_path / "expected", **SIZES)
    shutil.move(tmp_path / "expected", tmp_path.with_name(tmp_path.name + "-expected"))
    assert contents(tmp_path) == contents(tmp_path.with_name(tmp_path.name + "-expected"))


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


def test_the_seal_as_the_docs_define_it(device: torch.device, tmp_path: Path) -> None:
    """Without a line of ours: whoever has Python can verify a shard."""
    extract(activations(), model(device), tmp_path, **SIZES)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    for entry in [*manifest["shards"], manifest["statistics"]]:
        with safe_open(tmp_path / entry["file"], framework="np") as file:
            described = json.loads((file.metadata() or {}).get("gossamer", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        parts = [
            [name, str(array.dtype), list(array.shape), hashlib.sha256(array.tobytes()).hexdigest()]
            for name, array in sorted(tensors.items())
        ]
        assert described.pop("sha256", entry["sha256"]) == entry["sha256"]
        assert hashlib.sha256(json.dumps([described, parts], sort_keys=True).encode()).hexdigest() == entry["sha256"]


@pytest.mark.parametrize("finished", [False, True])
def test_a_source_that_changed_behind_its_first_batch(finished: bool, device: torch.device, tmp_path: Path) -> None:
    sae, x = model(device), activations()
    other = x.clone()
    other[64] += 1
    sources: dict[str, Callable[[Tensor], Any]] = {
        "tensor": lambda rows: rows,
        "iterator": lambda rows: iter(rows.split(50)),
        "rows": Rows,
    }
    for name, source in sources.items():
        out = tmp_path / name
        if finished:
            extract(source(x), sae, out, **SIZES)
        else:
            # Two shards: the last of them is the one that differs.
            interrupted(source(x), sae, out, 160)
        before = contents(out)
        if finished and name == "iterator":
            # It is not read again.
            assert extract(source(other), sae, out, **SIZES).rows == 300
            continue
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
    extract(other, sae, tmp_path / "expected", **SIZES)
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def test_source_files_that_changed(device: torch.device, tmp_path: Path) -> None:
    sae, x = model(device), activations()
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()

    def write(parts: dict[str, Tensor]) -> None:
        for name, rows in parts.items():
            np.save(source / name, rows.numpy())
            os.utime(source / name, ns=(10**18, 10**18))

    write({"a.npy": x[:100], "b.npy": x[100:210], "c.npy": x[210:]})
    interrupted(source, sae, out)
    done = Extraction(out).rows
    assert done in (128, 192)

    def refused(message: str) -> None:
        before = contents(out)
        with pytest.raises(ValueError, match=message):
            extract(source, sae, out, **SIZES)
        assert contents(out) == before

    # The first batches are those of before, and neither size nor rows at the beginning of any shard say anything.
    changed = x[100:210].clone()
    changed[20] += 1
    write({"b.npy": changed})
    os.utime(source / "b.npy", ns=(10**18, 10**18 + 1000))
    refused(
        r"source: .*b\.npy is not as it was when .*out was begun: it was last changed .* Give the files as they were"
    )
    write({"b.npy": x[100:210]})
    save_file({"x": x[100:210]}, source / "b.safetensors")
    (source / "b.npy").unlink()
    refused(r"b\.safetensors is not as it was .*: b\.npy stood in its place")
    (source / "b.safetensors").unlink()
    write({"b.npy": torch.cat([x[100:210], x[:1]])})
    refused(r"b\.npy is not as it was .*: it had 7,168 bytes, and has 7,232")
    # Rows that are not finished yet may change; here, what they look like alone does.
    write({"b.npy": x[100:210]})
    os.utime(source / "c.npy")
    assert extract(source, sae, out, **SIZES).rows == 300
    # The same rows in a new file: the way out that the error names.
    os.utime(source / "a.npy")
    refused(r"a\.npy is not as it was .* remove .*source-files\.json: then their digests alone are compared")
    (out / "source-files.json").unlink()
    assert extract(source, sae, out, **SIZES).rows == 300 and (out / "source-files.json").exists()
    write({"a.npy": x[:100].flip(0)})
    (out / "source-files.json").unlink()
    refused("its rows from 0 on differ")
    (out / "source-files.json").write_text("3")
    refused(r"source-files\.json is damaged: .* Remove it: then the digests of the rows alone")
    extract(x, sae, tmp_path / "expected", **SIZES)
    assert contents(out) == contents(tmp_path / "expected")


def test_a_source_without_rows(device: torch.device, tmp_path: Path) -> None:
    sae, x = model(device), activations()
    np.save(tmp_path / "none.npy", x[:0].numpy())
    for number, empty in enumerate((x[:0], [], iter(()), [x[:0], x[:0]], tmp_path / "none.npy", Rows(x[:0]))):
        with pytest.raises(ValueError, match=r"extract: source has no rows\. Give at least one"):
            extract(empty, sae, tmp_path / str(number), **SIZES)
        # Nothing was begun that another source could not have.
        assert extract(x, sae, tmp_path / str(number), **SIZES).rows == 300


def damages(manifest: bytes) -> dict[str, bytes | None]:
    """What may become of a manifest."""
    said = json.loads(manifest)
    found: dict[str, bytes | None] = {"gone": None, "flipped": manifest.replace(b'"nnz": 384', b'"nnz": 385', 1)}
    for length in (0, 1, len(manifest) // 3, len(manifest) // 2, len(manifest) - 3):
        found[f"cut to {length}"] = manifest[:length]
    for name in ("version", "settings", "shards", "statistics", "complete"):
        found[f"no {name}"] = json.dumps({key: said[key] for key in said if key != name}).encode()
    changes = ({"settings": 1}, {"shards": [{}]}, {"complete": 1}, {"sha256": "0"})
    found |= {str(change): json.dumps(said | change).encode() for change in changes}
    return found | {"other bytes": b"\xff\xfe", "other json": b"[1]"}


@pytest.mark.parametrize("kind", ["topk", "jumprelu"])
def test_a_damaged_manifest_is_made_again(kind: str, device: torch.device, tmp_path: Path) -> None:
    """From the shards, with the statistics: the bytes of a run without a break."""
    sae, x = model(device, kind), activations()
    x[70, 3] = float("inf")
    whole, out = tmp_path / "whole", tmp_path / "out"
    extract(Rows(x, text=True), sae, whole, **SIZES)
    cases = damages((whole / MANIFEST).read_bytes()).items()
    if kind == "jumprelu":
        cases = [case for case in cases if case[0] in ("gone", "cut to 0")]
    for name, damage in cases:
        shutil.copytree(whole, out)
        (out / MANIFEST).unlink()
        if damage is not None:
            (out / MANIFEST).write_bytes(damage)
            assert damage != (whole / MANIFEST).read_bytes(), name
            with pytest.raises(ValueError, match=r"manifest\.json is damaged: .* The same call of extract makes it"):
                Extraction(out)
            with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
                Extraction.check(out)
        # What the statistics were is of no account.
        (out / "statistics-000004.safetensors").write_bytes(b"")
        source = Rows(x, text=True)
        assert extract(source, sae, out, **SIZES).manifest["nonfinite"] > 0
        # The whole shards are not extracted again; the last one of them is compared.
        assert source.asked == [0, 192, 256], name
        assert contents(out) == contents(whole), name
        shutil.rmtree(out)


def test_a_manifest_made_again_of_an_unfinished_run(device: torch.device, tmp_path: Path) -> None:
    """Of shards that make no whole number of files, of one that is short, and of those before a gap."""
    sae = model(device)
    for rows, removed, first in ((300, (3, 4), 192), (300, (2,), 128), (256, (), 256), (40, (), 0)):
        x, out = activations(rows), tmp_path / f"{rows} {removed}"
        extract(x, sae, out, **SIZES)
        shutil.copytree(out, tmp_path / "expected", dirs_exist_ok=False)
        for number in removed:
            (out / f"shard-{number:06d}.safetensors").unlink()
        (out / MANIFEST).write_bytes((out / MANIFEST).read_bytes()[:99])
        source = Rows(x)
        extract(source, sae, out, **SIZES)
        assert source.asked[-1] == first and contents(out) == contents(tmp_path / "expected"), rows
        shutil.rmtree(tmp_path / "expected")
    # An iterator is compared as it passes.
    (out := tmp_path / "300 (2,)").joinpath(MANIFEST).unlink()
    x = activations()
    x[128] += 1
    with pytest.raises(ValueError, match="its rows from 128 on differ"):
        extract(iter(x.split(50)), sae, out, **SIZES)


def test_killed_as_a_manifest_is_made_again(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sae, x = model(device), activations()
    whole, out = tmp_path / "whole", tmp_path / "out"
    extract(x, sae, whole, **SIZES)
    original = files._settle
    shutil.copytree(whole, out)
    (out / MANIFEST).write_text("{")
    for writes in range(5):
        left = [writes]

        def stop(inside: Path, file: Path, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            original(inside, file)

        monkeypatch.setattr(files, "_settle", stop)
        with pytest.raises(Killed):
            extract(x, sae, out, **SIZES)
        monkeypatch.undo()
        (out / MANIFEST).write_text("{")
    extract(x, sae, out, **SIZES)
    assert contents(out) == contents(whole)


def test_shards_that_do_not_fit_are_no_manifest(device: torch.device, tmp_path: Path) -> None:
    sae, x = model(device), activations()
    extract(x, sae, tmp_path, **SIZES)
    (tmp_path / MANIFEST).write_text("{")

    def refused(message: str, source: Any = x, **changed: Any) -> None:
        before = contents(tmp_path)
        with pytest.raises(ValueError, match=message):
            extract(source, sae, tmp_path, **(SIZES | changed))
        assert contents(tmp_path) == before

    refused("was begun with top = 5, not 6", top=6)
    refused("was begun with shard_rows = 64, not 128", shard_rows=128)
    sae.W_enc.data[0, 0] += 1
    refused("was begun with sae = another one")
    sae = model(device)
    shard, kept = tmp_path / "shard-000003.safetensors", (tmp_path / "shard-000003.safetensors").read_bytes()
    flip(shard)
    refused(r"shard-000003\.safetensors is damaged: its checksum differs\. Put a whole copy back; or remove it")
    shard.write_bytes((tmp_path / "shard-000002.safetensors").read_bytes())
    refused(r"has no whole manifest\.json, and shard-000003\.safetensors does not say whose it is")
    shard.write_bytes(kept)
    other = x.clone()
    other[64] += 1
    with pytest.raises(ValueError, match="its rows from 64 on differ"):
        extract(other, sae, tmp_path, **SIZES)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    (tmp_path / MANIFEST).write_text('{"name": "of another program"}')
    refused(r"manifest\.json is damaged: .* There are no shards to make it again from\. Remove it")


def test_any_flipped_bit_in_a_shard_without_a_manifest(device: torch.device, tmp_path: Path) -> None:
    """Whatever part of what it says of itself is lost, it is an error that says what to do, and nothing is written."""
    sae, x = model(device), activations(200)
    extract(x, sae, tmp_path, **SIZES)
    (tmp_path / MANIFEST).write_text("{")
    rng, shard, before = random.Random(0), tmp_path / "shard-000001.safetensors", contents(tmp_path)
    for limit in [700] * 60 + [2**40] * 20:
        flip(shard, rng.randrange(min(len(before[shard.name]), limit)) / len(before[shard.name]), rng.randrange(8))
        damaged = contents(tmp_path)
        with pytest.raises(ValueError, match=r"extract: .* (Put a whole copy back|[Nn]ame another folder)"):
            extract(x, sae, tmp_path, **SIZES)
        assert contents(tmp_path) == damaged
        shard.write_bytes(before[shard.name])
    assert extract(x, sae, tmp_path, **SIZES).rows == 200
