"""Streaming extraction: what is on disk, with every source."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gossamer.extract import Extraction, extract
from gossamer.extract import folder as disk
from gossamer.extract.source import Array
from gossamer.extract.text import Text
from gossamer.rowsparse import Rows
from tests.extract.extraction import D_IN, D_SAE, SIZES, Killed, activations, contents, model, one_run, stop_at, threads

pytestmark = pytest.mark.native


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
    assert contents(tmp_path / "out") == one_run(tmp_path / "whole", x, sae) and not threads()


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

    with pytest.raises(Killed):
        extract(Rows(), sae, tmp_path / "out", progress=stop_at(160), **SIZES)
    source = Rows()
    extract(source, sae, tmp_path / "out", **SIZES)
    # The last finished file is compared before the next is made.
    assert source.asked == [0, 64, 128] and contents(tmp_path / "out") == one_run(tmp_path / "whole", x, sae)
    for length, message in ((310, "310 rows by its length, and gave 44 from row 256"), (290, "gave 44 from row 256")):
        with pytest.raises(ValueError, match=message):
            extract(Rows(length), sae, tmp_path / str(length), **SIZES)
    with pytest.raises(ValueError, match="a token for each of its rows in text, got 299 tokens and 300 rows"):
        extract(Rows(tokens=299), sae, tmp_path / "tokens", **SIZES)


def test_errors(device: torch.device, tmp_path: Path) -> None:
    sae, x = model(device), activations(100)
    out = tmp_path / "out"
    with pytest.raises(TypeError, match=r"sae must have encode\(x\) and W_enc \[d_in, d_sae\], as .* have, got Linear"):
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

        def encode(self, x: Tensor) -> Rows:
            m = x.shape[0]
            indices = torch.tensor([0, -1, 2], dtype=torch.int32, device=device).repeat(m)
            starts = 3 * torch.arange(m, device=device)
            spans = torch.stack([starts, torch.full_like(starts, 3)])
            return Rows(torch.ones(3 * m, device=device), indices, spans, (m, 8))

    found = extract(activations(10), Gaps(), tmp_path, **SIZES)
    assert found.firing_counts.tolist() == [10, 0, 10, 0, 0, 0, 0, 0] and found.nnz == 20
