"""Runs in a folder, which a process of the same settings goes on with to the bit."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer
from torch.utils import deterministic

from gossamer._core import files
from gossamer.extract.ranks import Ranks
from gossamer.train import checkpoint

Record = dict[str, float]


class Resumable:
    """The base of runs: `config.json`, `log.jsonl` and `checkpoints/` of a folder.

    Attributes:
        config, folder, device: as the run was made.
        step: optimizer steps that were done.
        records: those of `log.jsonl`.
        keep: how many checkpoints stay.
        rank: 0, or this process's number among several. The others only take part.
    """

    config: Any
    folder: Path
    device: torch.device
    optimizer: Optimizer
    keep: int
    rank = 0
    derived: Collection[str] = ()
    """Fields of the configuration that follow from others."""

    def _resume(self, held: checkpoint.Held, ranks: Ranks | None = None) -> None:
        """Goes on where the folder's last checkpoint stands, or begins a run there; `ranks` as in `checkpoint.save`."""
        self.step, self.records = 0, list[Record]()
        file, settings = self.folder / "config.json", type(self.config)
        files.make_folder("train", "out", self.folder)
        if file.exists() and (different := self.config.differences(settings.load(file), self.derived)):
            raise ValueError(
                f"train: {self.folder} holds a run of other settings: {different}. Name another folder, or give the "
                "same settings."
            )
        if saved := self._saved():
            self.step = checkpoint.load(saved[-1][1], held, self.optimizer, partly=ranks is not None)
        if self.rank == 0:
            self.config.save(file)
        log = self.folder / "log.jsonl"
        if log.exists():
            # Steps after the checkpoint come again, and a killed process may have left half a line.
            lines = [line for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
            self.records = [record for record in map(self._record, lines) if record["step"] <= self.step]
        if self.rank == 0:
            files.write_text("train", log, "".join(json.dumps(record) + "\n" for record in self.records))

    def _record(self, line: str) -> Record:
        try:
            record: Record = json.loads(line)
            return record | {"step": int(record["step"])}
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"train: {self.folder / 'log.jsonl'} is damaged at the line {line!r:.80}. Remove the line."
            ) from error

    def _saved(self) -> list[tuple[int, Path]]:
        return checkpoint.found(self.folder / "checkpoints")

    def _save(self, held: checkpoint.Held, ranks: Ranks | None = None) -> None:
        folder, write = self.folder / "checkpoints", self.rank == 0
        checkpoint.save(folder, self.step, held, self.optimizer, self.keep, write, ranks)

    def _log(self, record: Record, show: Callable[[Record], Any]) -> None:
        self.records.append(record)
        if self.rank == 0:
            with (self.folder / "log.jsonl").open("a") as log:
                log.write(json.dumps(record) + "\n")
            show(record)

    def _refuse_numbers(self, found: str, way: str) -> NoReturn:
        """Ends a run whose numbers are not finite."""
        saved = self._saved()
        good = f"The checkpoint of step {saved[-1][0]} is good." if saved else "There is no checkpoint yet."
        raise FloatingPointError(f"train: {found}. {good} {way}")

    def _now(self) -> Any:
        """A moment, by the device's own clock: the host launches steps before they run."""
        if self.device.type != "cuda":
            return time.perf_counter()
        moment = torch.cuda.Event(enable_timing=True)
        moment.record()
        return moment


def ask_cublas() -> None:
    """Lets cuBLAS, which looks once, when it is first used, give the same bits: PyTorch asks for this setting."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def reproducible() -> Iterator[None]:
    """Lets the same steps give the same bits: by default the backward pass of attention adds in any order."""
    ask_cublas()
    flags: Any = deterministic
    before = torch.are_deterministic_algorithms_enabled(), flags.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    flags.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        flags.fill_uninitialized_memory = before[1]
