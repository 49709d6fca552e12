"""Checkpoints of a run: one safetensors file each, written whole or not at all, with checksums."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from gossamer._core import files
from gossamer.extract.ranks import Ranks
from gossamer.train.model import whole

_OPERATOR = "train"
_MOMENTS = ("exp_avg", "exp_avg_sq")
Held = Mapping[str, Tensor]


def found(folder: Path) -> list[tuple[int, Path]]:
    """Steps and files of the checkpoints in a folder, the oldest first.

    Raises:
        ValueError: a file of another's, which only its name makes a checkpoint.
    """
    steps = {}
    for file in folder.glob("step-*.safetensors"):
        if not (number := file.stem.removeprefix("step-")).isdecimal():
            raise ValueError(f"{_OPERATOR}: {file} is no checkpoint, named after its step. Move it to another folder.")
        steps[int(number)] = file
    return sorted(steps.items())


def save(
    folder: Path, step: int, held: Held, optimizer: Optimizer, keep: int, write: bool = True, ranks: Ranks | None = None
) -> None:
    """Writes tensors and moments after `step` optimizer steps, and removes all but the last `keep` checkpoints.

    The position in the data and all random numbers of training follow from the step and the seed, so nothing else is
    needed for the same bits.

    Args:
        folder: of the checkpoints.
        step: optimizer steps that were done.
        held: parameters and buffers by name, on one rank or sharded; then all ranks call it.
        optimizer: Adam or AdamW of the parameters.
        keep: how many checkpoints stay.
        write: False on ranks that only take part.
        ranks: those that have tensors of their own each; the file has all of them. Rank 0 needs main memory for twice
            the file, and the others for three times their own tensors.

    Raises:
        OSError: the disk is full, say. Older checkpoints stay as they are.
    """
    parts = dict(held)
    for name, tensor in held.items():
        if isinstance(tensor, nn.Parameter):
            parts |= {f"{moment}/{name}": optimizer.state[tensor][moment] for moment in _MOMENTS}
    tensors: dict[str, Tensor] = {}
    for found_there in [whole(parts, write)] if ranks is None else ranks.share(lambda: whole(parts, True)):
        tensors |= found_there
    if not write:
        return
    sums = json.dumps({name: _checksum(tensor) for name, tensor in tensors.items()})
    file, metadata = folder / f"step-{step:08}.safetensors", {"format": "pt", "step": str(step), "crc32": sums}
    files.make_folder(_OPERATOR, "out", folder)
    files.write_whole(_OPERATOR, file, lambda path: save_file(tensors, path, metadata))
    for _, old in found(folder)[:-keep]:
        files.remove(old)


def load(file: Path, held: Held, optimizer: Optimizer, *, partly: bool = False) -> int:
    """Puts a checkpoint, `partly` with tensors of other ranks, into tensors and their optimizer; returns its step.

    Raises:
        ValueError: a file that is corrupt or truncated, or of another model. Nothing is changed then.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
        sums = json.loads(metadata["crc32"])
        step = int(metadata["step"])
        broken = [name for name, tensor in tensors.items() if sums.get(name) != _checksum(tensor)]
    except (SafetensorError, KeyError, OSError, ValueError, AttributeError) as error:
        raise ValueError(_broken(file, str(error))) from error
    if broken:
        raise ValueError(_broken(file, f"{broken[0]} has another checksum"))
    trained = [name for name, tensor in held.items() if isinstance(tensor, nn.Parameter)]
    wanted = held.keys() | {f"{moment}/{name}" for name in trained for moment in _MOMENTS}
    if wanted - tensors.keys() if partly else wanted != tensors.keys():
        raise ValueError(f"{_OPERATOR}: checkpoint {file} is of another model: {sorted(wanted ^ tensors.keys())[:3]}.")
    with torch.no_grad():
        for name, tensor in held.items():
            tensor.copy_(_like(tensor, tensors[name]))
        for name in trained:
            parameter = held[name]
            state = {moment: _like(parameter, tensors[f"{moment}/{name}"]) for moment in _MOMENTS}
            # A fused optimizer keeps its count beside its moments.
            optimizer.state[parameter] = {"step": torch.tensor(float(step), device=parameter.device), **state}
    return step


def _like(parameter: Tensor, tensor: Tensor) -> Tensor:
    tensor = tensor.to(parameter.device)
    if isinstance(parameter, DTensor):
        # Each rank has read the file: nothing has to be sent.
        return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return tensor


def _checksum(tensor: Tensor) -> int:
    raw: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return zlib.crc32(raw)


def _broken(file: Path, why: str) -> str:
    older = [str(other) for _, other in found(file.parent) if other < file]
    way = f"the same command then goes on from {older[-1]}" if older else "the same command then begins anew"
    return f"{_OPERATOR}: checkpoint {file} is corrupt or truncated: {why}. Remove it: {way}."
