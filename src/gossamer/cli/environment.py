"""Versions, hardware and driver."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import gossamer

DEVICE_HELP = "auto (the GPU if there is one; by torchrun, each its own), cpu, cuda, or without torchrun cuda:N."
DTYPE_HELP = "float32 or bfloat16; auto: bfloat16 on a GPU. Weights stay float32."
_PACKAGES = ("torch", "triton", "numpy", "safetensors", "sae-lens", "transformers", "liger-kernel", "blksprs")


def versions() -> dict[str, str | None]:
    """Versions of Python, gossamer and the packages that matter to it; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "gossamer": gossamer.__version__}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    # The metadata of the package may leave out the build, as in "2.11.0" of "2.11.0+cu130".
    found["torch"] = torch.__version__
    return found


def devices() -> list[torch.device]:
    """Every device of this machine that gossamer runs on: the CPU, then each GPU."""
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]


def describe(device: torch.device) -> dict[str, Any]:
    """Name, memory in bytes and, for a GPU, capability, L2 cache in bytes, CUDA or ROCm version and driver."""
    if device.type != "cuda":
        return {"type": device.type, "name": _cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "type": device.type,
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "multiprocessors": properties.multi_processor_count,
        "runtime": f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}",
        "driver": first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def first_line(*command: str) -> str | None:
    """The first line that a command prints, or None where it fails or prints none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else None


def resolve_device(name: str, command: str) -> torch.device:
    """The device that `--device` of a command names; "auto" is the first GPU, or the CPU where there is none.

    By torchrun "auto" and "cuda" are this process's own GPU. Raises ValueError for a name that is no device of this
    machine, and by torchrun for a GPU's number and for more processes than GPUs.
    """
    gpus = devices()[1:]
    if distributed.is_torchelastic_launched() and gpus and name != "cpu":
        if name not in ("auto", "cuda"):
            raise ValueError(
                f"{command}: --device must be auto, cuda or cpu by torchrun, which gives each process its own GPU, got "
                f"{name!r}. Choose GPUs by CUDA_VISIBLE_DEVICES."
            )
        if (count := int(os.environ["LOCAL_WORLD_SIZE"])) > len(gpus):
            raise ValueError(
                f"{command}: each process of torchrun must have its own GPU, and this machine has {len(gpus)} for "
                f"{count} processes. Start fewer processes, or give --device cpu."
            )
        return gpus[int(os.environ["LOCAL_RANK"])]
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    found = {str(device): device for device in devices()}
    if "cuda:0" in found:
        found["cuda"] = found["cuda:0"]
    if name not in found:
        rule = f"--device must be auto or a device of this machine ({', '.join(found)})"
        raise ValueError(f"{command}: {rule}, got {name!r}.")
    return found[name]


def resolve_dtype(name: str, device: torch.device) -> str:
    """The name of the dtype that `--dtype` of a command says."""
    return name if name != "auto" else "bfloat16" if device.type == "cuda" else "float32"


@contextmanager
def ranks(device: torch.device | None = None) -> Iterator[int]:
    """The processes that torchrun started, as those of `torch.distributed`; gives the number of this one. By NCCL where
    they compute together on GPUs, and by gloo where they only talk, or a device is not given."""
    if not distributed.is_torchelastic_launched():
        yield 0
        return
    gpu = device is not None and device.type == "cuda"
    if gpu:
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if gpu else "gloo")
    try:
        yield distributed.get_rank()
    finally:
        distributed.destroy_process_group()
