"""Streaming extraction: what is on disk, in every interruption and with every source."""

import errno
import json
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from gossamer import nn
from gossamer._core import files
from gossamer.rowsparse import ELL
from gossamer.sae import Extraction, extract
from gossamer.sae._extract import folder as disk
from gossamer.sae._extract.source import Array
from gossamer.sae._extract.text import Text

pytestmark = pytest.mark.native

D_IN, D_SAE = 16, 192
SIZES = {"batch_size": 32, "shard_rows": 64, "top": 5}


def model(device: torch.device, kind: str = "topk", dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    if kind == "topk":
        return nn.TopKSAE(D_IN, D_SAE, 6, dtype=dtype, device=device)
    return nn.JumpReLUSAE(D_IN, D_SAE, initial_threshold=0.8, capacity=20, dtype=dtype, device=device)


def activations(rows: int = 300) -> Tensor:
    return torch.randn(rows, D_IN, generator=torch.Generator().manual_seed(1))


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def threads() -> list[str]:
    """Ours that live."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("gossamer")]


@pytest.mark.parametrize("kind", ["topk", "jumprelu"])
def test_what_is_on_disk(kind: str, dtype: torch.dtype, device: torch.device, tmp_path: Path) -> None:
    """Entries as `encode` has them, with rows that overflow, and statistics as of the dense matrix."""
    sae, x = model(device, kind, dtype), activations()
    seen: list[Any] = []
    found = extract(x, sae, tmp_path, progress=lambda *done: seen.append(done), **SIZES)
    parts = [sae.eval().encode(x[i : i + 32].to(device, dtype)) for i in range(0, 300, 32)]
    dense = torch.cat([part.to_dense() for part in parts]).cpu()
    if kind == "jumprelu":
        assert any(bool(part.overflowed.any()) for part in parts)
    assert len(found) == 5 and found.rows == 300 and found.nnz == int((dense != 0).sum())
    assert torch.equal(torch.cat([shard.to_dense() for shard in found]), dense)
    assert torch.equal(found.firing_counts, (dense != 0).sum(0))
    wide = dense.float()
    assert torch.equal(found.maximum, wide.amax(0))
    values = wide.t().sort(descending=True, stable=True)
    assert torch.equal(found.top_values, values.values[:, :5])
    positions = torch.where(found.top_values > 0, values.indices[:, :5], -1)
    assert torch.equal(found.top_positions, positions)
    octaves = (wide[wide > 0].log2().floor() + 24).long().bincount(minlength=32)
    assert torch.equal(found.histogram.sum(0), octaves)
    assert seen == [(min(done, 300), 300) for done in range(32, 332, 32)]
    assert "complete" in repr(found) and repr(Extraction(tmp_path)) == repr(found)


def test_a_model_in_training_counts_nothing_and_goes_on_training(device: torch.device, tmp_path: Path) -> None:
    sae = model(device).train()
    extract(activations(40), sae, tmp_path, **SIZES)
    assert sae.training and not sae.firing_counts.any()


def test_sources(device: torch.device, tmp_path: Path) -> None:
    """The same rows give the same bytes, wherever they come from and however they are cut."""
    sae, x = model(device), activations()
    extract(x, sae, tmp_path / "expected", **SIZES)
    files = tmp_path / "files"
    files.mkdir()
    np.save(files / "a.npy", x[:90].reshape(3, 30, D_IN).numpy())
    save_file({"acts": x[90:211].contiguous()}, files / "b.safetensors")
    save_file({"acts": x[211:].contiguous(), "tokens": torch.zeros(3)}, files / "c.safetensors")
    np.save(tmp_path / "all.npy", x.numpy())
    sources: dict[str, Any] = {
        "array": x.numpy(),
        "three dimensions": x.reshape(6, 50, D_IN),
        "npy": tmp_path / "all.npy",
        "folder": str(files),
        "files": [files / "a.npy", str(files / "b.safetensors"), files / "c.safetensors"],
        "iterator": iter(x.split(37)),
        "batches of batches": [x[:100].reshape(2, 50, D_IN), x[100:]],
    }
    for name, source in sources.items():
        extract(source, sae, tmp_path / f"out, {name}", key="acts", **SIZES)
        assert contents(tmp_path / f"out, {name}") == contents(tmp_path / "expected"), name


def test_dense_latents(device: torch.device, tmp_path: Path) -> None:
    class Dense(torch.nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner, self.W_enc = inner, inner.W_enc

        def encode(self, x: Tensor) -> Tensor:
            return self.inner.encode(x).to_dense()

    sae = model(device).eval()
    for name, one in {"packed": sae, "dense": Dense(sae)}.items():
        extract(activations(), one, tmp_path / name, **SIZES)
    packed, dense = (Extraction(tmp_path / name) for name in ("packed", "dense"))
    assert torch.equal(packed.top_positions, dense.top_positions)
    for shard in range(len(packed)):
        assert torch.equal(packed.read(shard).values, dense.read(shard).values)


def test_sizes_at_the_edge(device: torch.device, tmp_path: Path) -> None:
    sae = model(device)
    empty = extract(activations(0), sae, tmp_path / "empty", **SIZES)
    assert empty.rows == 0 and len(empty) == 0 and not empty.firing_counts.any()
    for rows in (1, 64, 128):
        assert extract(activations(rows), sae, tmp_path / str(rows), **SIZES).rows == rows
    assert extract(activations(10), sae, tmp_path / "none", **(SIZES | {"top": 0})).top_values.shape == (D_SAE, 0)


def test_values_that_are_not_finite(device: torch.device, tmp_path: Path) -> None:
    """They are stored, and left out of the statistics, which say how many there were."""
    x = activations(40)
    x[3] = float("nan")
    found = extract(x, model(device), tmp_path, **SIZES)
    assert found.manifest["nonfinite"] > 0 and found.maximum.isfinite().all()
    assert found.read(0).to_dense()[3].isnan().any()


class Killed(BaseException):
    pass


def test_interrupted_anywhere(device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped at every write in turn, half way through it and at its end: the same bytes as without."""
    sae, x = model(device), activations(200)
    extract(x, sae, tmp_path / "expected", **SIZES)
    places = {"save_file": disk, "_settle": files}
    original = {name: getattr(module, name) for name, module in places.items()}
    rng = random.Random(0)
    for attempt in range(30):
        left = [rng.randrange(1, 12)]

        def stop(name: str, *args: Any, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                if rng.random() < 0.5:
                    original[name](*args)
                else:
                    path = args[0 if name == "_settle" else 1]
                    path.write_bytes(b"half")
                    # As safetensors begins a file.
                    path.with_name(".tmp123456").write_bytes(b"half")
                raise Killed
            original[name](*args)

        for name in original:
            monkeypatch.setattr(places[name], name, lambda *args, name=name: stop(name, *args))
        # A kill runs no cleanup.
        monkeypatch.setattr(files, "remove", lambda path: None)
        out = tmp_path / str(attempt % 3)
        try:
            extract(x, sae, out, **SIZES)
        except Killed:
            # Not left to the garbage collector, which may wait for them while a lock is held that they need to end.
            assert not threads()
        finally:
            monkeypatch.undo()
    for attempt in range(3):
        extract(iter(x.split(50)), sae, tmp_path / str(attempt), **SIZES)
        assert contents(tmp_path / str(attempt)) == contents(tmp_path / "expected")


SCRIPT = """
import sys, time, torch
from gossamer import nn, sae
torch.manual_seed(0)
model = nn.TopKSAE(16, 192, 6)
x = torch.randn(4000, 16, generator=torch.Generator().manual_seed(1))
print("begun", flush=True)
sae.extract(x, model, sys.argv[1], batch_size=32, shard_rows=64, top=5, progress=lambda *_: time.sleep(0.002))
"""


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.full)])
def test_killed_for_good(kills: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "killed")]
    rng = random.Random(1)
    for _ in range(kills):
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(rng.uniform(0.01, 0.6))
        process.send_signal(signal.SIGKILL)
        process.wait()
    for name in ("killed", "expected"):
        subprocess.run([*command[:-1], str(tmp_path / name)], check=True, capture_output=True)
    assert contents(tmp_path / "killed") == contents(tmp_path / "expected")
    assert Extraction(tmp_path / "killed").rows == 4000


@pytest.mark.parametrize("left", ["", '{"version": 1'])
def test_killed_as_it_begins(left: str, device: torch.device, tmp_path: Path) -> None:
    """What the first manifest leaves where it was not moved to its place any more is no other run's."""
    sae, x = model(device), activations(100)
    partial = tmp_path / "out" / "manifest.json.partial"
    partial.mkdir(parents=True)
    (partial / "manifest.json").write_text(left)
    for name in ("out", "expected"):
        extract(x, sae, tmp_path / name, **SIZES)
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def test_who_may_read_it(device: torch.device, tmp_path: Path) -> None:
    """Who may read the user's other files."""
    extract(activations(100), model(device), tmp_path / "out", **SIZES)
    nn.save(model(device), tmp_path / "model")
    (tmp_path / "plain").touch()
    written = [*(tmp_path / "out").iterdir(), *(tmp_path / "model").iterdir()]
    assert {file.stat().st_mode for file in written} == {(tmp_path / "plain").stat().st_mode}


def test_two_runs_at_once(device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is an error, and the first goes on; after its end, even by SIGKILL, the folder is free."""
    sae, x = model(device), activations()

    def second(*_: Any) -> None:
        with pytest.raises(ValueError, match=r"another run writes to .* name another folder"):
            extract(x, sae, tmp_path / "out", **SIZES)

    extract(x, sae, tmp_path / "out", progress=second, **SIZES)
    extract(x, sae, tmp_path / "expected", **SIZES)
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")
    code = "import sys, time; from pathlib import Path; from gossamer.sae._extract.lock import Lock\n"
    code += "lock = Lock('a', Path(sys.argv[1])); lock.take(); print('taken', flush=True); time.sleep(100)"
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "out")], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline().strip() == b"taken"
    second()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert extract(x, sae, tmp_path / "out", **SIZES).rows == 300
    fcntl = pytest.importorskip("fcntl")

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(UserWarning, match="cannot be locked"):
        extract(x, sae, tmp_path / "out", **SIZES)


def test_a_shard_is_written_while_the_next_is_made(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One, and no more than one: it waits in memory until it is on the disk."""
    original, ahead, done = disk.save_file, threading.Event(), [0]

    def slow(tensors: Any, path: Path) -> None:
        if path.name.startswith("shard-000000"):
            assert threading.current_thread() is not threading.main_thread() and ahead.wait(20)
            time.sleep(0.3)
            assert done[0] == 128
        original(tensors, path)

    def progress(rows: int, _: int | None) -> None:
        done[0] = rows
        if rows == 128:
            ahead.set()

    monkeypatch.setattr(disk, "save_file", slow)
    assert extract(activations(), model(device), tmp_path, progress=progress, **SIZES).rows == 300


def test_a_file_that_cannot_be_read_on(device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the thread that reads ahead, which is still that of the call; and threads do not stay."""
    sae, x = model(device), activations()
    np.save(tmp_path / "x.npy", x.numpy())
    original = Array.read

    def read(self: Array, first: int, count: int) -> Tensor:
        if first >= 160 and self.path is not None:
            raise OSError("device removed")
        return original(self, first, count)

    monkeypatch.setattr(Array, "read", read)
    with pytest.raises(OSError, match="device removed"):
        extract(tmp_path / "x.npy", sae, tmp_path / "out", **SIZES)
    assert not threads()
    monkeypatch.undo()
    assert Extraction(tmp_path / "out").rows == 128
    extract(tmp_path / "x.npy", sae, tmp_path / "out", **SIZES)
    extract(x, sae, tmp_path / "expected", **SIZES)
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")
    assert not threads()


def test_a_source_that_says_where_it_begins(device: torch.device, tmp_path: Path) -> None:
    """Rows from any row on: asked for what is wanted, and believed no more than it gives."""
    sae, x = model(device), activations()

    class Rows:
        def __init__(self, length: int = 300, tokens: int | None = None) -> None:
            self.length, self.asked = length, []
            if tokens is not None:
                self.text = Text(torch.zeros(tokens, dtype=torch.int32), torch.zeros(tokens, dtype=torch.bool), {})

        def __len__(self) -> int:
            return self.length

        def rows_from(self, start: int) -> Any:
            self.asked.append(start)
            return iter(x[start:].split(50))

    def stop(done: int, _: int | None) -> None:
        if done >= 160:
            raise Killed

    with pytest.raises(Killed):
        extract(Rows(), sae, tmp_path / "out", progress=stop, **SIZES)
    source = Rows()
    extract(source, sae, tmp_path / "out", **SIZES)
    extract(x, sae, tmp_path / "expected", **SIZES)
    assert source.asked == [0, 128] and contents(tmp_path / "out") == contents(tmp_path / "expected")
    for length, message in ((310, "310 rows by its length, and gave 44 from row 256"), (290, "gave 44 from row 256")):
        with pytest.raises(ValueError, match=message):
            extract(Rows(length), sae, tmp_path / str(length), **SIZES)
    with pytest.raises(ValueError, match="a token for each of its rows in text, got 299 tokens and 300 rows"):
        extract(Rows(tokens=299), sae, tmp_path / "tokens", **SIZES)


@pytest.mark.parametrize(
    "failure",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        # As safetensors says it, in an error that is no OSError.
        SafetensorError('Error while serializing: I/O error: No space left on device (os error 28) at path "a/.tmpb"'),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_leaves_whole_shards(
    failure: Exception, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sae, x = model(device), activations()
    original, calls = disk.save_file, []

    def full(tensors: Any, path: Path) -> None:
        calls.append(path)
        if len(calls) == 5:
            path.write_bytes(b"half")
            raise failure
        original(tensors, path)

    monkeypatch.setattr(disk, "save_file", full)
    message = r"sae\.extract: .*out/shard-000002\.safetensors could not be written: No space left on device\. Finished "
    with pytest.raises(OSError, match=message + "files are kept: free space") as raised:
        extract(x, sae, tmp_path / "out", **SIZES)
    assert raised.value.errno == errno.ENOSPC
    monkeypatch.undo()
    found = Extraction(tmp_path / "out")
    assert found.rows == 128 and "unfinished" in repr(found)
    assert not list((tmp_path / "out").glob("*.partial"))
    assert int(found.firing_counts.sum()) == found.nnz
    extract(x, sae, tmp_path / "out", **SIZES)
    extract(x, sae, tmp_path / "expected", **SIZES)
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def test_an_error_of_safetensors_without_a_number(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise SafetensorError("Error while serializing: something else")

    monkeypatch.setattr(disk, "save_file", fails)
    with pytest.raises(OSError, match="could not be written: Error while serializing: something else"):
        extract(activations(), model(device), tmp_path, **SIZES)


def test_errors(device: torch.device, tmp_path: Path) -> None:
    sae, x = model(device), activations(100)
    out = tmp_path / "out"
    with pytest.raises(TypeError, match=r"sae must have encode\(x\) and W_enc \[d_in, d_sae\], got Linear"):
        extract(x, torch.nn.Linear(2, 2), out)
    with pytest.raises(ValueError, match="shard_rows must be a multiple of batch_size = 32, got 100"):
        extract(x, sae, out, batch_size=32, shard_rows=100)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        extract(x, sae, out, batch_size=0)
    with pytest.raises(ValueError, match="top must be an int of at least 0"):
        extract(x, sae, out, top=-1)
    for source, error, message in (
        (torch.randn(4, 9), ValueError, r"source must have shape \[\.\.\., d_in\] with d_in = 16 like the SAE, got 9"),
        (torch.randn(16), ValueError, r"source must have shape \[\.\.\., d_in\], got \[16\]"),
        ([x[:5], x[:5, :3]], ValueError, "batch 1 of source must have shape"),
        ([1, 2], TypeError, "batch 0 of source must be a tensor or an array, got int"),
        (3, TypeError, "source must be a tensor, an array, a path"),
        (tmp_path / "nothing.npy", FileNotFoundError, "there is no file"),
        (out, ValueError, "holds no .safetensors and no .npy file"),
    ):
        with pytest.raises(error, match=message):
            extract(source, sae, out, **SIZES)
    np.save(tmp_path / "short.npy", x.numpy())
    (tmp_path / "short.npy").write_bytes((tmp_path / "short.npy").read_bytes()[:-400])
    with pytest.raises(ValueError, match=r"is not a whole \.npy file"):
        extract(tmp_path / "short.npy", sae, out, **SIZES)
    save_file({"a": x, "b": x.clone()}, tmp_path / "two.safetensors")
    with pytest.raises(ValueError, match="holds a, b; name one with key"):
        extract(tmp_path / "two.safetensors", sae, out, **SIZES)
    with pytest.raises(ValueError, match="holds a, b, and no c"):
        extract(tmp_path / "two.safetensors", sae, out, key="c", **SIZES)
    (tmp_path / "two.safetensors").write_bytes((tmp_path / "two.safetensors").read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"is not a whole \.safetensors file"):
        extract(tmp_path / "two.safetensors", sae, out, key="a", **SIZES)


def test_another_run_in_the_same_folder(device: torch.device, tmp_path: Path) -> None:
    sae, x = model(device), activations(100)
    with pytest.raises(FileNotFoundError, match=r"holds no manifest\.json"):
        Extraction(tmp_path)
    extract(x, sae, tmp_path, **SIZES)
    before = contents(tmp_path)
    assert extract(x, sae, tmp_path, **SIZES).rows == 100
    with pytest.raises(ValueError, match="was begun with top = 5, not 6"):
        extract(x, sae, tmp_path, **(SIZES | {"top": 6}))
    with pytest.raises(ValueError, match="is complete with 100 rows, and the source has 300"):
        extract(activations(), sae, tmp_path, **SIZES)
    sae.W_enc.data[0, 0] += 1
    with pytest.raises(ValueError, match="was begun with sae = another one"):
        extract(x, sae, tmp_path, **SIZES)
    assert contents(tmp_path) == before
    shard = tmp_path / "shard-000000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"shard-000000\.safetensors is damaged"):
        Extraction(tmp_path).read(0)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        Extraction(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"version": 99}))
    with pytest.raises(ValueError, match="is no manifest of version 1"):
        Extraction(tmp_path)


def test_a_finished_run_and_another_source(device: torch.device, tmp_path: Path) -> None:
    """As many rows, and others: never the latents of the first. What has been read to its end is no other source."""
    sae, x = model(device), activations(128)
    found = extract(x, sae, tmp_path / "a", **SIZES)
    before = contents(tmp_path / "a")
    for other in (x + 5, iter((x + 5).split(50)), [x.flip(0)]):
        with pytest.raises(ValueError, match="a was begun with another source: its first batch differs"):
            extract(other, sae, tmp_path / "a", **SIZES)
    generator = iter(x.split(50))
    extract(generator, sae, tmp_path / "b", **SIZES)
    for again in (generator, x.split(31), x):
        assert repr(extract(again, sae, tmp_path / "b", **SIZES)) == repr(found)
    assert contents(tmp_path / "a") == contents(tmp_path / "b") == before
    for empty in ([], x[:0], iter(())):
        assert extract(empty, sae, tmp_path / "empty", **SIZES).rows == 0
    with pytest.raises(ValueError, match="empty was begun with another source"):
        extract(iter(x.split(50)), sae, tmp_path / "empty", **SIZES)
    assert not threads()


def test_files_that_are_gone(device: torch.device, tmp_path: Path) -> None:
    sae, x = model(device), activations(300)

    def stop(done: int, _: int | None) -> None:
        if done >= 200:
            raise Killed

    for name in ("shard-000001.safetensors", "statistics-000002.safetensors"):
        out = tmp_path / name
        with pytest.raises(Killed):
            extract(x, sae, out, progress=stop, **SIZES)
        kept = (out / name).read_bytes()
        (out / name).unlink()
        before = contents(out)
        with pytest.raises(
            ValueError, match=rf"{out} lacks {name}, which .* as finished\. Put the file back, or remove"
        ):
            extract(x, sae, out, **SIZES)
        assert contents(out) == before
        (out / name).write_bytes(kept)
        assert extract(x, sae, out, **SIZES).rows == 300
    (tmp_path / "shard-000001.safetensors" / "shard-000001.safetensors").unlink()
    found = Extraction(tmp_path / "shard-000001.safetensors")
    with pytest.raises(
        FileNotFoundError, match=r"sae\.Extraction: .*shard-000001\.safetensors is gone\. Put it back, or"
    ):
        found.read(1)
    with pytest.raises(ValueError, match=r"lacks shard-000001\.safetensors"):
        extract(x, sae, found.folder, **SIZES)


def test_a_damaged_manifest(device: torch.device, tmp_path: Path) -> None:
    sae, x = model(device), activations(100)
    extract(x, sae, tmp_path, **SIZES)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    for change in ({"settings": {}}, {"settings": 1}, {"shards": None}, {"shards": [{}]}, {"complete": 1}):
        (tmp_path / "manifest.json").write_text(json.dumps(manifest | change))
        for call in (lambda: Extraction(tmp_path), lambda: extract(x, sae, tmp_path, **SIZES)):
            with pytest.raises(ValueError, match=r"manifest\.json is damaged: .* Remove its folder and extract again"):
                call()
    for content in (json.dumps({"version": 1, "settings": {}}).encode(), b"\xff\xfe"):
        (tmp_path / "manifest.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"manifest\.json is damaged: .* Remove its folder and extract again"):
            Extraction(tmp_path)


def test_a_shard_that_is_not_there(device: torch.device, tmp_path: Path) -> None:
    found = extract(activations(100), model(device), tmp_path, **SIZES)
    assert found.read(-1).shape == found.read(1).shape == (36, D_SAE)
    for shard in (2, 99, -3):
        with pytest.raises(IndexError, match=rf"shard must be below 2, the number of shards, got {shard}\."):
            found.read(shard)


def test_out_that_is_a_file(device: torch.device, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=rf"sae\.extract: out must be a folder, .* got {out}: .* Name another one"):
            extract(activations(100), model(device), out, **SIZES)
        with pytest.raises(ValueError, match=rf"nn\.save: folder must be a folder, .* got {out}: "):
            nn.save(model(device), out)
    assert (tmp_path / "file").read_text() == "mine"


def test_files_of_others_are_left_alone(device: torch.device, tmp_path: Path) -> None:
    sae, x = model(device), activations(100)
    for name in ("shard-a.safetensors", "download.partial", "notes.txt"):
        (tmp_path / name).write_bytes(b"mine")
    (tmp_path / "x.partial").mkdir()
    extract(x, sae, tmp_path, **SIZES)
    assert all((tmp_path / name).read_bytes() == b"mine" for name in ("shard-a.safetensors", "download.partial"))
    (tmp_path / "manifest.json").unlink()
    before = contents_of_files(tmp_path)
    with pytest.raises(ValueError, match=r"holds shard-000000\.safetensors, but no manifest\.json"):
        extract(x, sae, tmp_path, **SIZES)
    assert contents_of_files(tmp_path) == before
    np.save(tmp_path / "acts.npy", x.numpy())
    with pytest.raises(ValueError, match="out must be another folder than that of the source"):
        extract(tmp_path / "acts.npy", sae, tmp_path, **SIZES)


def contents_of_files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.is_file()}


def test_what_makes_an_sae_another_one(device: torch.device, tmp_path: Path) -> None:
    x = activations(100)
    batch = nn.BatchTopKSAE(D_IN, D_SAE, 6, device=device)
    extract(x, batch, tmp_path / "batch", **SIZES)
    batch.firing_counts += 1
    extract(x, batch, tmp_path / "batch", **SIZES)
    batch.threshold += 0.5
    with pytest.raises(ValueError, match="sae = another one"):
        extract(x, batch, tmp_path / "batch", **SIZES)
    sae = model(device)
    extract(x, sae, tmp_path / "topk", **SIZES)
    sae.k += 1
    with pytest.raises(ValueError, match="sae = another one"):
        extract(x, sae, tmp_path / "topk", **SIZES)


def test_a_source_that_is_not_the_same_again(device: torch.device, tmp_path: Path) -> None:
    sae, x = model(device), activations(300)

    def interrupted(source: Any, out: Path) -> None:
        def stop(done: int, _: int | None) -> None:
            if done >= 160:
                raise Killed

        with pytest.raises(Killed):
            extract(source, sae, out, progress=stop, **SIZES)

    generator = iter(x.split(30))
    interrupted(generator, tmp_path / "a")
    with pytest.raises(ValueError, match="begun with another source"):
        extract(generator, sae, tmp_path / "a", **SIZES)
    with pytest.raises(ValueError, match="begun with another source"):
        extract(x.flip(0), sae, tmp_path / "a", **SIZES)
    with pytest.raises(ValueError, match="the source ended before row 128"):
        extract([x[:100]], sae, tmp_path / "a", **SIZES)
    extract(x.split(30), sae, tmp_path / "a", **SIZES)
    extract(x, sae, tmp_path / "b", **SIZES)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_odd_inputs(device: torch.device, tmp_path: Path) -> None:
    """Buffers that are filled again, dtypes side by side, other byte orders and layouts."""
    sae, x = model(device), activations(300)
    extract(x, sae, tmp_path / "expected", **SIZES)

    def refilled() -> Any:
        buffer = torch.empty(20, D_IN)
        for piece in x.split(20):
            yield buffer.copy_(piece)

    np.save(tmp_path / "big.npy", x.numpy().astype(">f4"))
    np.save(tmp_path / "fortran.npy", np.asfortranarray(x.reshape(3, 100, D_IN).numpy()))
    save_file({"x": x.reshape(2, 150, D_IN).clone()}, tmp_path / "deep.safetensors")
    sources: dict[str, Any] = {
        "refilled": refilled(),
        "other byte order": tmp_path / "big.npy",
        "other layout": tmp_path / "fortran.npy",
        "deep": tmp_path / "deep.safetensors",
        "with nothing in between": [x[:7], x[:0], x[:0].reshape(3, 0, D_IN), x[7:].double()],
        "strided": torch.stack([x, x], dim=1)[:, 1],
    }
    for name, source in sources.items():
        extract(source, sae, tmp_path / f"out, {name}", **SIZES)
        assert contents(tmp_path / f"out, {name}") == contents(tmp_path / "expected"), name
    mixed = [torch.full((5, D_IN), 100000), torch.zeros(5, D_IN, dtype=torch.float16)]
    assert extract(mixed, sae, tmp_path / "mixed", **SIZES).manifest["nonfinite"] == 0
    with pytest.raises(TypeError, match="must hold real numbers"):
        extract(x + 1j, sae, tmp_path / "complex", **SIZES)
    # A long inner dimension is not read whole for every batch.
    array = Array(lambda: x.reshape(1, 300, D_IN).numpy(), (1, 300, D_IN), "x")
    assert torch.equal(array.read(33, 50), x[33:83])


def test_latents_with_gaps(device: torch.device, tmp_path: Path) -> None:
    class Gaps(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.W_enc = torch.nn.Parameter(torch.zeros(D_IN, 8, device=device))

        def encode(self, x: Tensor) -> ELL:
            values = torch.ones(x.shape[0], 3, device=device)
            indices = torch.tensor([[0, -1, 2]], dtype=torch.int32, device=device).repeat(x.shape[0], 1)
            return ELL(values, indices, torch.full((x.shape[0],), 3, dtype=torch.int32, device=device), (x.shape[0], 8))

    found = extract(activations(10), Gaps(), tmp_path, **SIZES)
    assert found.firing_counts.tolist() == [10, 0, 10, 0, 0, 0, 0, 0] and found.nnz == 20
