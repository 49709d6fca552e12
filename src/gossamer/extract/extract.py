"""Activations through an autoencoder, as a stream, to shards of row-sparse latents on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import ExitStack, closing
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer import rowsparse
from gossamer._core import checks, files
from gossamer._core.modes import evaluating
from gossamer.extract import folder as disk
from gossamer.extract.extraction import Extraction
from gossamer.extract.ranks import Ranks
from gossamer.extract.source import Source, raw
from gossamer.extract.statistics import Statistics
from gossamer.extract.writer import Shard, Writer
from gossamer.rowsparse import Rows
from gossamer.rowsparse.entries import listed
from gossamer.rowsparse.formats import spans_of

# The part of a module's state that follows from the rows it has seen, and on which no latent depends.
_STATISTICS = ("firing_counts", "steps_since_fired")


def extract(
    source: Any,
    sae: Any,
    out: str | Path,
    *,
    key: str | None = None,
    batch_size: int = 4096,
    shard_rows: int = 65536,
    top: int = 16,
    progress: Callable[[int, int | None], Any] | None = None,
) -> Extraction:
    """Encodes rows of activations and writes the latents to safetensors, with statistics of each latent.

    A run can be killed at any moment: the same call verifies the files by their checksums and goes on where the last
    whole shard ended. In the end the files have the bytes of a run that was never interrupted (on the same kind of
    device, versions and number of threads). Memory holds two batches and the entries of two shards, whatever the
    source's size: one is read, and one written, while another is encoded.

    Where `torch.distributed` is initialised, all ranks call it with the same arguments, on a file system that they
    share, and divide the rows by whole shards. The files are those of one process, and a run that was stopped goes on
    with any number of ranks.

    Args:
        source: a tensor or array `[..., d_in]`; a path or paths of `.safetensors` and `.npy` files, or a folder of
            them, which are mapped; `integrations.transformers.Activations`, or another object with `len(source)` rows
            and `rows_from(start)`, which gives the batches from a row on; or an iterable of batches `[..., d_in]`,
            which must come again from the start when a run is resumed. Rows at the beginning of finished shards are
            compared with those of the first run, also where that is finished. Where a source knows its tokens, they
            are written beside the rows.
        sae: a module with `encode(x)` to row-sparse or dense latents, and `W_enc` `[d_in, d_sae]`: `nn.TopKSAE`,
            `nn.JumpReLUSAE`, or an SAE of SAELens. Batches go to its device and dtype.
        out: the folder of shards. Made if it is not there.
        key: the tensor of each `.safetensors` file; None if it holds one.
        batch_size: rows at once. Batches are cut alike in every run.
        shard_rows: rows a file; a multiple of batch_size.
        top: how many of its largest values to keep of each latent.
        progress: called after each batch with (rows done, rows in all or None), and before that after each file of an
            earlier run that is verified. With several ranks each estimates from its own.

    Returns:
        The finished `Extraction`.

    Raises:
        ValueError: sizes that do not fit, a source without rows, a damaged file, or an `out` that was begun with other
            settings, another SAE, another source or more rows, that another run writes to, that lacks a file it had
            finished, that holds the source or files that only look like shards, or that is a file.
        TypeError: a source or an sae of another kind.
        FileNotFoundError: no such file.
        OSError: the disk is full, for example; errno is the system's. Whole shards stay as they are.
        RuntimeError: another rank failed, or is gone.

    Source: streaming extraction, as interpretability work needs it over billions of tokens.

    >>> import tempfile; model = gossamer.nn.TopKSAE(4, 16, k=2)
    >>> extract(torch.randn(10, 4), model, tempfile.mkdtemp())
    Extraction(rows=10, d_sae=16, nnz=..., shards=1, complete)
    """
    operator = "extract"
    with ExitStack() as stack:
        ranks = stack.enter_context(Ranks(operator))
        rows, settings = _prepare(operator, ranks, source, sae, key, batch_size, shard_rows, top)
        stack.enter_context(closing(rows))
        folder = Path(out)
        files.make_folder(operator, "out", folder)
        for array in rows.arrays or ():
            if array.path is not None and array.path.resolve().parent == folder.resolve():
                raise ValueError(f"{operator}: out must be another folder than that of the source, got {folder}.")
        if ranks.rank == 0:
            ranks.share(lambda: _begin(operator, folder, stack, settings, rows))
        else:
            ranks.share(lambda: None)
        manifest = disk.read_manifest(operator, folder)
        assert manifest is not None
        ranks.share(lambda: _verify(operator, folder, ranks, manifest, rows.length, progress))
        _same_source(operator, folder, ranks, [shard["source"] for shard in manifest["shards"]], rows, shard_rows)
        if manifest["complete"]:
            return Extraction(folder)
        device = sae.W_enc.device
        totals = Statistics(sae.W_enc.shape[1], top, torch.device("cpu"))
        if (named := manifest["statistics"]) is not None:
            totals.restore(disk.load(operator, folder / named["file"], named["sha256"]))
        statistics, number, complete = totals.following(device), len(manifest["shards"]), False
        stack.enter_context(evaluating(sae))
        writer = stack.enter_context(closing(Writer(folder, manifest, totals, rows.text, ranks)))
        while not complete:
            # Round by round, a shard each, so that a stopped run leaves whole rounds.
            begun = number * shard_rows
            shard = Shard(number + ranks.rank, begun + ranks.rank * shard_rows, statistics)
            for batch in rows.read(shard.first, shard_rows):
                with torch.no_grad():
                    shard.append(batch, _entries(sae.encode(batch)))
                if progress is not None:
                    done = begun + shard.rows * ranks.size
                    progress(done if rows.length is None else min(done, rows.length), rows.length)
            _check_rows(operator, shard, shard_rows, rows.length)
            number += ranks.size
            statistics = shard.statistics.following(device)
            # At once: a short shard that did not say that it is the last would be gone on from at another place.
            complete = shard.rows < shard_rows if rows.length is None else number * shard_rows >= rows.length
            writer.put(shard, complete)
        writer.wait()
        return Extraction(folder)


def _prepare(
    operator: str, ranks: Ranks, source: Any, sae: Any, key: str | None, batch_size: int, shard_rows: int, top: int
) -> tuple[Source, dict[str, Any]]:
    """The source and the settings, once they are known to be right, and alike on all ranks."""
    W_enc = getattr(sae, "W_enc", None)
    if not callable(getattr(sae, "encode", None)) or not isinstance(W_enc, Tensor) or W_enc.dim() != 2:
        raise TypeError(
            f"{operator}: sae must have encode(x) and W_enc [d_in, d_sae], as modules of nn and of SAELens have, "
            f"got {type(sae).__name__}."
        )
    checks.positive(operator, "batch_size", batch_size, "It is the number of rows at once.")
    checks.positive(operator, "shard_rows", shard_rows, "It is the number of rows a file.")
    if shard_rows % batch_size:
        raise ValueError(
            f"{operator}: shard_rows must be a multiple of batch_size = {batch_size}, got {shard_rows}. "
            "A batch that spans two files could not be computed alike after an interruption."
        )
    if not isinstance(top, int) or top < 0:
        raise ValueError(f"{operator}: top must be an int of at least 0, got {top!r}.")
    if getattr(sae, "hook_z_reshaping_mode", False):
        raise ValueError(
            f"{operator}: sae takes rows of heads. Call sae.turn_off_forward_pass_hook_z_reshaping() and give rows "
            "[..., d_in]."
        )
    rows = Source(source, key, batch_size, W_enc)
    if rows.length is None and ranks.size > 1:
        raise ValueError(
            f"{operator}: source must be one that can be read from any row on, for {ranks.size} processes share its "
            "rows: a tensor, an array, files, or an object with rows_from(start) and a length, got "
            f"{type(source).__name__}. Write it to files first, or extract in one process."
        )
    settings = {
        "d_in": W_enc.shape[0],
        "d_sae": W_enc.shape[1],
        "dtype": checks.name_of(W_enc.dtype),
        "batch_size": batch_size,
        "shard_rows": shard_rows,
        "top": top,
        "sae": _fingerprint(sae),
    }
    if rows.text is not None:
        settings["text"] = rows.text.fingerprint()
        settings["vocabulary"] = hashlib.sha256(rows.text.spelling()).hexdigest()
    if rows.length == 0:
        raise _without_rows(operator)
    ranks.check_alike(settings | {"rows": rows.length})
    return rows, settings


def _begin(operator: str, folder: Path, stack: ExitStack, settings: dict[str, Any], rows: Source) -> None:
    """Takes the folder for the time of the call, or finds that it belongs to another run."""
    stack.enter_context(disk.locked(operator, folder))
    manifest = disk.begin(operator, folder, settings, rows.text)
    done = sum(shard["rows"] for shard in manifest["shards"])
    if rows.length is not None and (done > rows.length or (manifest["complete"] and done != rows.length)):
        state = "is complete with" if manifest["complete"] else "holds"
        raise ValueError(
            f"{operator}: {folder} {state} {done} rows, and the source has {rows.length}. Name another folder for it."
        )


def _entries(latents: Any) -> Rows:
    """The entries of latents, one row right behind the other, in as many slots."""
    if isinstance(latents, Tensor):
        latents = latents.to_dense() if latents.is_sparse else latents
        return rowsparse.pack(latents.reshape(-1, latents.shape[-1]), capacity="exact")
    row, columns, values = listed(latents)
    spans = spans_of(torch.bincount(row, minlength=latents.num_rows))
    return Rows(values, columns.int(), spans, (latents.num_rows, latents.num_columns))


def _fingerprint(sae: Any) -> str:
    """A digest of an SAE's tensors and settings, which is the same again after a restart."""
    named: dict[str, Any] = dict(sae.state_dict()) if isinstance(sae, torch.nn.Module) else dict(vars(sae))
    named = {name: t for name, t in named.items() if isinstance(t, Tensor) and name not in _STATISTICS}
    config = getattr(sae, "cfg", None)
    to_dict = getattr(config, "to_dict", None)
    described = dict(to_dict()) if callable(to_dict) else {}
    for name in ("device", "metadata"):
        described.pop(name, None)
    described |= {"class": type(sae).__name__, "k": getattr(sae, "k", None)}
    described["activation"] = repr(vars(sae).get("_modules", {}).get("activation_fn"))
    digest = hashlib.sha256(json.dumps(described, sort_keys=True, default=repr).encode())
    for name, tensor in sorted({"W_enc": sae.W_enc, **named}.items()):
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        digest.update(raw(tensor))
    return digest.hexdigest()


def _check_rows(operator: str, shard: Shard, shard_rows: int, length: int | None) -> None:
    """A source that knows its length has given as many rows as that promised."""
    if length is not None and shard.rows != max(min(shard_rows, length - shard.first), 0):
        raise ValueError(
            f"{operator}: the source has {length} rows by its length, and gave {shard.rows} from row {shard.first} on, "
            f"where {max(min(shard_rows, length - shard.first), 0)} were due. Give a source whose length is the number "
            "of its rows."
        )


def _verify(
    operator: str,
    folder: Path,
    ranks: Ranks,
    manifest: dict[str, Any],
    length: int | None,
    progress: Callable[[int, int | None], Any] | None,
) -> None:
    """Each rank looks at its shards of earlier runs."""
    shards = manifest["shards"]
    done = list(accumulate(shard["rows"] for shard in shards))

    def verified(number: int) -> None:
        if progress is not None:
            progress(done[min((number + 1) * ranks.size, len(done)) - 1], length)

    if wrong := disk.faults(folder, shards[ranks.rank :: ranks.size], verified):
        disk.complain(operator, folder, wrong)


def _same_source(operator: str, folder: Path, ranks: Ranks, known: list[str], rows: Source, shard_rows: int) -> None:
    """Compares rows at the beginning of finished shards with those that the shards were made of: of every shard where
    rows lie in memory or in files, of the first and the last where a model makes them, of the first in an iterator."""
    first = rows.first()
    ranks.check_alike({"source": first})
    if first is None and rows.length is None:
        if not known:
            raise _without_rows(operator)
        # An iterator that gives nothing has perhaps given everything before: of a finished run nothing more is needed.
        return
    places = list(range(0, len(known) * shard_rows, shard_rows))
    if rows.arrays is None:
        places = sorted({*places[:1], *places[-1:]}) if rows.length is not None else places[:1]

    def compare() -> None:
        for place in places:
            if place // shard_rows % ranks.size != ranks.rank:
                continue
            if (rows.head(place) if place else first) != known[place // shard_rows]:
                raise ValueError(
                    f"{operator}: {folder} was begun with another source: its rows from {place} on differ. Name "
                    "another folder, or give the same rows from the start."
                )

    ranks.share(compare)


def _without_rows(operator: str) -> ValueError:
    return ValueError(
        f"{operator}: source has no rows. Give at least one; a generator that was read to its end gives no row again."
    )
