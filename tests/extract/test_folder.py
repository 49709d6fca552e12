"""Streaming extraction: its folder after kills, full disks and losses, and beside other runs and files."""

import errno
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from gossamer import nn
from gossamer._core import files
from gossamer.extract import Extraction, extract
from gossamer.extract import folder as disk
from tests.extract.extraction import D_IN, D_SAE, SIZES, Killed, activations, contents, model, one_run, stop_at, threads

pytestmark = pytest.mark.native


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
from gossamer import extract, nn
torch.manual_seed(0)
model = nn.TopKSAE(16, 192, 6)
x = torch.randn(4000, 16, generator=torch.Generator().manual_seed(1))
print("begun", flush=True)
for out in sys.argv[1:]:
    extract.extract(x, model, out, batch_size=32, shard_rows=64, top=5, progress=lambda *_: time.sleep(0.002))
"""


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.full)])
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
    subprocess.run([*command, str(tmp_path / "expected")], check=True, capture_output=True)
    assert contents(tmp_path / "killed") == contents(tmp_path / "expected")
    assert Extraction(tmp_path / "killed").rows == 4000


@pytest.mark.parametrize("left", ["", '{"version": 1'])
def test_killed_as_it_begins(left: str, device: torch.device, tmp_path: Path) -> None:
    """What the first manifest leaves where it was not moved to its place any more is no other run's."""
    sae, x = model(device), activations(100)
    partial = tmp_path / "out" / ".manifest.json.partial"
    partial.mkdir(parents=True)
    (partial / "manifest.json").write_text(left)
    extract(x, sae, tmp_path / "out", **SIZES)
    assert contents(tmp_path / "out") == one_run(tmp_path / "whole", x, sae)


def test_who_may_read_it(device: torch.device, tmp_path: Path) -> None:
    """Who may read the user's other files."""
    extract(activations(100), model(device), tmp_path / "out", **SIZES)
    nn.save_sae(model(device), tmp_path / "model")
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
    assert contents(tmp_path / "out") == one_run(tmp_path / "whole", x, sae)
    code = "import sys, time; from pathlib import Path; from gossamer.extract.folder import locked\n"
    code += "with locked('a', Path(sys.argv[1])):\n    print('taken', flush=True); time.sleep(100)"
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


def test_a_first_try_that_read_nothing(device: torch.device, tmp_path: Path) -> None:
    """Leaves the folder to whatever comes next."""
    wrong, right = nn.TopKSAE(12, 40, 3, device=device), model(device)
    with pytest.raises(ValueError, match="d_in = 12"):
        extract(activations(100), wrong, tmp_path, **SIZES)
    assert extract(activations(100), right, tmp_path, **SIZES).d_sae == right.d_sae
    with pytest.raises(ValueError, match="was begun with"):
        extract(activations(100), wrong, tmp_path, **SIZES)


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
    message = r"extract: .*out/shard-000002\.safetensors could not be written: No space left on device\. "
    with pytest.raises(OSError, match=message + "Free space") as raised:
        extract(x, sae, tmp_path / "out", **SIZES)
    assert raised.value.errno == errno.ENOSPC
    monkeypatch.undo()
    found = Extraction(tmp_path / "out")
    assert found.rows == 128 and "unfinished" in repr(found)
    assert not list((tmp_path / "out").glob("*.partial"))
    assert int(found.firing_counts.sum()) == found.nnz
    extract(x, sae, tmp_path / "out", **SIZES)
    assert contents(tmp_path / "out") == one_run(tmp_path / "whole", x, sae)


def test_an_error_of_safetensors_without_a_number(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise SafetensorError("Error while serializing: something else")

    monkeypatch.setattr(disk, "save_file", fails)
    with pytest.raises(OSError, match="could not be written: Error while serializing: something else"):
        extract(activations(), model(device), tmp_path, **SIZES)


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
    disk.write_manifest(tmp_path, {"version": 99})
    for call in (lambda: Extraction(tmp_path), lambda: extract(x, sae, tmp_path, **SIZES)):
        with pytest.raises(ValueError, match="is of version 99, and this gossamer reads 1"):
            call()


def test_a_finished_run_and_another_source(device: torch.device, tmp_path: Path) -> None:
    """As many rows, and others: never the latents of the first. What has been read to its end is no other source."""
    sae, x = model(device), activations(128)
    found = extract(x, sae, tmp_path / "a", **SIZES)
    before = contents(tmp_path / "a")
    for other in (x + 5, iter((x + 5).split(50)), [x.flip(0)]):
        with pytest.raises(ValueError, match="a was begun with another source: its rows from 0 on differ"):
            extract(other, sae, tmp_path / "a", **SIZES)
    generator = iter(x.split(50))
    extract(generator, sae, tmp_path / "b", **SIZES)
    for again in (generator, x.split(31), x):
        assert repr(extract(again, sae, tmp_path / "b", **SIZES)) == repr(found)
    assert contents(tmp_path / "a") == contents(tmp_path / "b") == before
    assert not threads()


def test_files_that_are_gone(device: torch.device, tmp_path: Path) -> None:
    sae, x = model(device), activations(300)
    for name in ("shard-000001.safetensors", "statistics-000002.safetensors"):
        out = tmp_path / name
        with pytest.raises(Killed):
            extract(x, sae, out, progress=stop_at(200), **SIZES)
        kept = (out / name).read_bytes()
        (out / name).unlink()
        before = contents(out)
        with pytest.raises((ValueError, FileNotFoundError), match=rf"{out}.*{name} is gone\. Put a whole copy"):
            extract(x, sae, out, **SIZES)
        assert contents(out) == before
        (out / name).write_bytes(kept)
        assert extract(x, sae, out, **SIZES).rows == 300
    (tmp_path / "shard-000001.safetensors" / "shard-000001.safetensors").unlink()
    found = Extraction(tmp_path / "shard-000001.safetensors")
    with pytest.raises(FileNotFoundError, match=r"Extraction: .*shard-000001\.safetensors is gone\. Put a whole copy"):
        found.read(1)


def test_a_shard_that_is_not_there(device: torch.device, tmp_path: Path) -> None:
    found = extract(activations(100), model(device), tmp_path, **SIZES)
    assert found.read(-1).shape == found.read(1).shape == (36, D_SAE)
    for shard in (2, 99, -3):
        with pytest.raises(IndexError, match=rf"shard must be below 2, the number of shards, got {shard}\."):
            found.read(shard)


def test_out_that_is_a_file(device: torch.device, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=rf"extract: out must be a folder .* got {out}: .* Name another one"):
            extract(activations(100), model(device), out, **SIZES)
        with pytest.raises(ValueError, match=rf"nn\.save_sae: folder must be a folder .* got {out}: "):
            nn.save_sae(model(device), out)
    assert (tmp_path / "file").read_text() == "mine"


def test_files_of_others_are_left_alone(device: torch.device, tmp_path: Path) -> None:
    sae, x = model(device), activations(100)
    for name in ("shard-a.safetensors", "download.partial", "notes.txt"):
        (tmp_path / name).write_bytes(b"mine")
    (tmp_path / "x.partial").mkdir()
    extract(x, sae, tmp_path, **SIZES)
    assert all((tmp_path / name).read_bytes() == b"mine" for name in ("shard-a.safetensors", "download.partial"))
    (tmp_path / "manifest.json").unlink()
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"shard-000000\.safetensors, but no manifest"):
        extract(x, sae, tmp_path, **SIZES)
    assert contents(tmp_path) == before
    np.save(tmp_path / "acts.npy", x.numpy())
    with pytest.raises(ValueError, match="out must be another folder than that of the source"):
        extract(tmp_path / "acts.npy", sae, tmp_path, **SIZES)


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
        with pytest.raises(Killed):
            extract(source, sae, out, progress=stop_at(160), **SIZES)

    generator = iter(x.split(30))
    interrupted(generator, tmp_path / "a")
    with pytest.raises(ValueError, match="begun with another source"):
        extract(generator, sae, tmp_path / "a", **SIZES)
    with pytest.raises(ValueError, match="begun with another source"):
        extract(x.flip(0), sae, tmp_path / "a", **SIZES)
    with pytest.raises(ValueError, match="the source ended before row 128"):
        extract([x[:100]], sae, tmp_path / "a", **SIZES)
    extract(x.split(30), sae, tmp_path / "a", **SIZES)
    assert contents(tmp_path / "a") == one_run(tmp_path / "whole", x, sae)
