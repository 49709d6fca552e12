"""What tests of `extract` run it with, and look at."""

import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer import nn
from gossamer.extract import extract

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
    """The bytes of all files by their names."""
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.is_file()}


def one_run(folder: Path, source: Any, sae: Any) -> dict[str, bytes]:
    """The files that one run leaves in a folder."""
    extract(source, sae, folder, **SIZES)
    return contents(folder)


def stop_at(rows: int) -> Any:
    """A `progress` that kills the run."""

    def progress(done: int, _: int | None) -> None:
        if done >= rows:
            raise Killed

    return progress


def flip(file: Path, at: float = 0.5, bit: int = 0) -> None:
    """Another bit at some share of a file's length, as a disk may do it."""
    content = bytearray(file.read_bytes())
    content[int(at * len(content))] ^= 1 << bit
    file.write_bytes(content)


def threads() -> list[str]:
    """Ours that live."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("gossamer")]


class Killed(BaseException):
    pass
