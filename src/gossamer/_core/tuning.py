"""Choices that depend on the GPU: tiles, splits, and where a sparse product stops paying.

Figures for Hopper are measured (see benchmarks/results); any other GPU uses the same tiles and a model of bytes and
operations over its rates, and `gossamer doctor` says that they are unmeasured. Nothing is searched at run time: a
kernel compiles once per dtype and tile.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gossamer._core.ops import INTERPRET

Tile = tuple[dict[str, Any], int]
"""Compile-time sizes and warps of a kernel."""


@dataclass(frozen=True)
class Rates:
    """What one GPU sustains: bytes/s of copies and of row gathers, FLOP/s of dense products by precision."""

    copy: float
    gather: float
    ieee: float
    tf32: float
    half: float
    programs: int
    measured: bool


_H200 = Rates(copy=4.2e12, gather=5.5e12, ieee=45e12, tf32=330e12, half=650e12, programs=132, measured=True)
_H100 = Rates(copy=3.0e12, gather=5.0e12, ieee=45e12, tf32=330e12, half=650e12, programs=132, measured=False)


@cache
def rates(index: int) -> Rates:
    """The rates of CUDA device `index`."""
    properties = torch.cuda.get_device_properties(index)
    if (properties.major, properties.minor) == (9, 0):
        return _H200 if properties.total_memory > 100e9 else _H100
    units = properties.multi_processor_count
    scale = units / _H100.programs
    return Rates(1.5e12 * scale, 2.5e12 * scale, 15e12 * scale, 100e12 * scale, 200e12 * scale, units, False)


@cache
def dependent_launch(device: torch.device) -> bool:
    """Whether a kernel may start while the one before it drains: Hopper and newer."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device)[0] >= 9


@cache
def hopper(device: torch.device) -> bool:
    """Whether kernels written for Hopper alone run there."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device)[0] == 9


def programs(device: torch.device) -> int:
    """How many programs run at once at one per multiprocessor."""
    return 4 if device.type != "cuda" else rates(device.index or 0).programs


def one_program_a_row(m: int, n: int) -> bool:
    """Whether rows alone fill the GPU, so that the scan needs no exchange between programs."""
    return m >= 512 or n <= 2048


def scan_tile(m: int, n: int, element_size: int) -> Tile:
    """Tile of the scan: one program a row, or chunks of rows. One warp a program: nothing waits for another warp."""
    vector = 16 // element_size
    return {"BLOCK": 256 * vector, "VEC": vector}, 1


def gather_tile(m: int, d: int, element_size: int) -> Tile:
    """Tile of the row gather: a warp reads 512 bytes of a row at once, four rows in flight.

    With few rows the tile is tall and narrow instead: more programs, and fewer steps that wait for memory.
    """
    if m < 512:
        return {"BLOCK_E": 32 if m <= 64 and d <= 3072 else 16, "BLOCK_D": 128 // element_size}, 1
    return {"BLOCK_E": 4, "BLOCK_D": 512 // element_size}, 1


def decode_tile(m: int, n: int, d: int, element_size: int) -> Tile:
    """Tile of the one-launch decode: scan and gather in programs of one warp, all of them at work at once."""
    vector = 16 // element_size
    groups = 256 if n <= 65536 else 512
    return {"BLOCK": groups * vector, "VEC": vector, **gather_tile(m, d, element_size)[0]}, 1


def sampled_tile(d: int, element_size: int) -> Tile:
    """Tile of the sampled product."""
    return {"BLOCK_E": 8, "BLOCK_D": 256 if element_size == 2 else 64}, 1


def scatter_tile() -> Tile:
    """Tile that puts ready products among zeros: enough warps to write at memory bandwidth."""
    return {"BLOCK_E": 32, "BLOCK_D": 16}, 8


def bwd_tile(element_size: int) -> tuple[dict[str, Any], int, int]:
    """(tile, warps, registers) of the gradients of a row gather: a warp reads 512 bytes of up to eight rows at once.

    80 registers make three warps of what would otherwise be two, and spill nothing.
    """
    return {"BLOCK_E": 8, "STEP": 4, "BLOCK_D": 512 // element_size, "VEC": 16 // element_size}, 1, 80


def bwd_long_tile(tile: dict[str, Any]) -> Tile:
    """The same where a weight row has many entries."""
    return {"BLOCK_E": 8 * tile["BLOCK_E"], "BLOCK_D": tile["BLOCK_D"], "VEC": tile["VEC"]}, 8


def pack_rows(m: int, n: int, element_size: int) -> int:
    """Rows of pre-activations in memory at one time: 24 MiB stay in the L2, and 1,024 rows make a fast product."""
    return max(1, min(m, max(1024, (24 << 20) // (n * element_size) // 128 * 128)))


def linear_source_tile(m: int, weight: Tensor) -> tuple[dict[str, int], int]:
    """(tile, warps) of the product that computes overflowed rows again."""
    if weight.element_size() != 2:
        return {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}, 4
    if m <= 64:
        return {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 32}, 4
    return {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64 if hopper(weight.device) else 32}, 8


def one_row(x: Tensor, gate_weight: Tensor, up_weight: Tensor) -> bool:
    """Whether a gated product is of a single row and weights with contiguous rows."""
    return x.shape[0] == 1 and gate_weight.stride(1) == up_weight.stride(1) == 1


def glu_row_tile(k: int, element_size: int) -> Tile:
    """Tile of the gated product of a single row, which takes as long as reading the weights: a program a column, of
    one warp where rows of weights are not cut evenly by more."""
    vector = 16 // element_size
    warps = 4 if k * element_size % 8192 == 0 else 1
    return {"BLOCK_K": (128 * warps if warps > 1 else 64) * vector, "VEC": vector}, warps


def glu_tile(m: int, device: torch.device) -> tuple[dict[str, Any], int, int]:
    """(tile, warps, stages) of the gated product through pointers; two accumulators of BLOCK_M x BLOCK_N."""
    if m <= 16:
        return {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 256 if hopper(device) else 128, "GROUP_M": 8}, 4, 3
    block_m = 32 if m <= 32 else 64 if m <= 64 else 128
    stages = 4 if m <= 128 and hopper(device) else 3
    return {"BLOCK_M": block_m, "BLOCK_N": 64, "BLOCK_K": 64, "GROUP_M": 8}, 8 if block_m == 128 else 4, stages


def glu_on_hopper(m: int, n: int, k: int, device: torch.device) -> bool:
    """Whether the kernel written for Hopper is for a gated product [m, k] to [m, n].

    With few rows many small programs read the weights faster. With up to 128, too, where tiles of 128 columns would
    keep less than half of the GPU at work, unless K is long enough for programs to share them.
    """
    if not hopper(device) or m <= 16:
        return False
    tiles = -(-n // 128)
    return m > 128 or 2 * tiles > programs(device) or glu_cuts(tiles, -(-k // 64), device) > 1


def glu_stages(m: int) -> tuple[int, int]:
    """(rows of a tile, stages in shared memory) of the gated product on Hopper."""
    return (64, 5) if m <= 64 else (128, 4 if m <= 2048 else 3)


def glu_cuts(tiles: int, steps: int, device: torch.device) -> int:
    """Into how many runs the gated product on Hopper cuts the steps along K of few tiles."""
    cuts = max(1, min(4, programs(device) // tiles, steps // 10))
    return cuts if steps - steps // cuts >= 40 else 1


def glu_schedule(tiles_m: int, tiles_n: int, steps: int, device: torch.device) -> tuple[int, int, int]:
    """(programs, tiles that one program computes alone, programs abreast) of the gated product's tiles on Hopper.

    The other tiles are shared along K, which costs as much as some 10 steps where all programs are at work, and 40
    where most were idle: a partial sum out and in again, and one more start.
    """
    units, tiles = programs(device), tiles_m * tiles_n
    if tiles <= units:
        cuts = glu_cuts(tiles, steps, device)
        if cuts == 1:
            return tiles, tiles, 1
        count, whole = tiles * cuts, 0
    else:
        idle = -tiles % units / units
        if idle * steps < 10:
            return units, tiles, 1
        count, whole = units, (tiles // units - 1) * units
    shared = tiles - whole
    abreast = next(a for a in (4, 3, 2, 1) if tiles_m % a == 0 and count % a == 0 and shared % a == 0)
    return count, whole, abreast


def gates_beside(d: int) -> bool:
    """Whether a tile of a product of d along K takes longer on Hopper than one warp a warpgroup needs to gate it, so
    that the backward pass of a gated block is one kernel up to its gate."""
    return d >= 3072


@torch.compiler.assume_constant_result
def tf32() -> bool:
    """Whether float32 products may use TF32, by `torch.set_float32_matmul_precision`."""
    return torch.get_float32_matmul_precision() != "highest"


def dot_precision(operand: Tensor, inner: int) -> dict[str, Any]:
    """PRECISION and UPCAST of a kernel's tl.dot. The interpreter multiplies in float32: its bfloat16 dot is wrong.

    Three TF32 products stand in for a float32 one where the inner dimension is long: what they round is then below what
    the sum rounds. A short one takes float32 arithmetic.
    """
    if INTERPRET or torch.version.hip or operand.dtype is not torch.float32:
        return {"PRECISION": "ieee", "UPCAST": INTERPRET}
    return {"PRECISION": "tf32" if tf32() else "tf32x3" if inner >= 16384 else "ieee", "UPCAST": False}


def dense_tile(m: int, n: int, d: int, weight: Tensor) -> tuple[dict[str, Any], int, int]:
    """(tile with SPLITS, warps, stages) of the dense product of overflowed rows [m, n] @ [n, d]."""
    wide = m > 64
    block_m = 128 if wide else 16 if m <= 16 else 32 if m <= 32 else 64
    block_d = 128 if wide and weight.element_size() == 2 else 64
    tiles = -(-m // block_m) * -(-d // block_d)
    # Two waves of programs, each long enough to hide its start.
    splits = max(1, min(2 * programs(weight.device) // tiles, n // 512))
    inner = 32 if wide and weight.element_size() > 2 else 64
    return {"BLOCK_M": block_m, "BLOCK_N": inner, "BLOCK_D": block_d, "SPLITS": splits}, 8 if block_d == 128 else 4, 3


def break_even(m: int, n: int, d: int, weight: Tensor) -> int:
    """Entries per row up to which gathering beats the dense product; rows beyond go through dense tiles.

    Half of the modelled break-even, so that a batch in which only some rows are dense stays ahead of dense as well.
    """
    if weight.device.type != "cuda":
        # Measured on x86, in nanoseconds: a dense product takes 0.0125 a multiplication and 0.22 a weight, an entry
        # takes 40 to find and 0.2 a column to gather.
        return min(n, max(32, int(n * d * max(0.0125, 0.22 / max(m, 1)) / (40 + 0.2 * d))))
    r = rates(weight.device.index)
    size = weight.element_size()
    flops = r.half if size == 2 else r.tf32 if tf32() else r.ieee
    dense = max(2.0 * m * n * d / flops, n * d * size / r.copy)
    # An empty batch, or rows without columns, take any.
    per_entry = max(m * d, 1) * size / r.gather
    return max(32, min(n, int(0.5 * dense / per_entry)))


def dense_is_faster(m: int, n: int, d: int, weight: Tensor) -> bool:
    """Whether the plain product wins at any density, because it takes hardly longer than a launch.

    Two launches of ours take some 20 us of the host, a plain product 10. A single row is a GEMV at memory speed, a few
    rows in float32 are not.
    """
    if weight.device.type != "cuda":
        return m * n * d <= 1 << 24
    megabytes = 64 if m == 1 else 16 if weight.element_size() == 4 and not tf32() else 24
    return n * d * weight.element_size() <= megabytes << 20 and m <= 64


def one_launch_decode(m: int, n: int) -> bool:
    """Whether scan and gather share a launch: few rows, where a launch costs as much as the work."""
    return m < 512 and n > 2048
