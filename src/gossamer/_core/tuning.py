"""The rates and abilities of GPUs. Tiles, splits and thresholds stand beside the operators that follow them.

Rates of Hopper are measured (see benchmarks/results); those of any other GPU are a guess by the number of its
multiprocessors, and `gossamer doctor` says so. Nothing is searched at run time: a kernel compiles once per dtype and
tile.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gossamer._core.ops import INTERPRET


@dataclass(frozen=True)
class Rates:
    """The rates of one GPU: bytes/s of copies and of row gathers, FLOP/s of dense products by precision."""

    copy: float
    gather: float
    ieee: float
    tf32: float
    half: float
    programs: int
    measured: bool


_H200 = Rates(copy=4.2e12, gather=5.5e12, ieee=45e12, tf32=330e12, half=650e12, programs=132, measured=True)
_H100 = Rates(copy=3.0e12, gather=5.0e12, ieee=45e12, tf32=330e12, half=650e12, programs=132, measured=False)


# Dynamo traces a cached function as if it had no cache, and warns. The functions that others call are constants to it.


@torch.compiler.assume_constant_result
def rates(index: int) -> Rates:
    """The rates of CUDA device `index`."""
    return _rates(index)


@cache
def _rates(index: int) -> Rates:
    properties = torch.cuda.get_device_properties(index)
    if (properties.major, properties.minor) == (9, 0):
        return _H200 if properties.total_memory > 100e9 else _H100
    units = properties.multi_processor_count
    scale = units / _H100.programs
    return Rates(1.5e12 * scale, 2.5e12 * scale, 15e12 * scale, 100e12 * scale, 200e12 * scale, units, False)


@torch.compiler.assume_constant_result
def dependent_launch(device: torch.device) -> bool:
    """Whether a kernel may start while the one before it drains: Hopper and newer."""
    return _generation(device) >= 9


@torch.compiler.assume_constant_result
def hopper(device: torch.device) -> bool:
    """Whether kernels written for Hopper alone run there."""
    return _generation(device) == 9


@cache
def _generation(device: torch.device) -> int:
    """The major compute capability of a GPU of NVIDIA, or 0."""
    if device.type != "cuda" or torch.version.hip:
        return 0
    return torch.cuda.get_device_capability(device)[0]


def programs(device: torch.device) -> int:
    """How many programs run at once at one per multiprocessor."""
    return 4 if device.type != "cuda" else rates(device.index or 0).programs


@torch.compiler.assume_constant_result
def tf32() -> bool:
    """Whether float32 products may use TF32, by `torch.set_float32_matmul_precision` or
    `torch.backends.cuda.matmul.fp32_precision`."""
    return torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32"


def dot_precision(operand: Tensor, inner: int) -> dict[str, Any]:
    """PRECISION and UPCAST of a kernel's tl.dot. The interpreter multiplies in float32: its bfloat16 dot is wrong.

    Three TF32 products stand in for a float32 one where the inner dimension is long: their rounding is then below that
    of the sum. A short one takes float32 arithmetic.
    """
    if INTERPRET or torch.version.hip or operand.dtype is not torch.float32:
        return {"PRECISION": "ieee", "UPCAST": INTERPRET}
    return {"PRECISION": "tf32" if tf32() else "tf32x3" if inner >= 16384 else "ieee", "UPCAST": False}
