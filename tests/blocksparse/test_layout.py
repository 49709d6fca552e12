"""Layouts against the definition of their parts, entry by entry."""

import itertools
import math

import pytest
import torch

from gossamer.blocksparse import Layout

SHAPES = [(1, 1), (3, 5), (2, 7, 1), (2, 3, 17, 40), (1, 130, 33), (2, 20, 300), (0, 4), (4, 0), (0, 3, 3)]


def random_mask(shape: tuple[int, ...], density: float, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(sum(shape))
    return torch.rand(shape, device=device, generator=generator) < density


def flattened(mask: torch.Tensor) -> torch.Tensor:
    return mask.reshape(math.prod(mask.shape[:-2]), *mask.shape[-2:])


def expected(mask: torch.Tensor) -> dict[str, list[int]]:
    mask = flattened(mask).cpu()
    blocks = mask.nonzero().tolist()
    number = {tuple(block): i for i, block in enumerate(blocks)}
    every = itertools.product(*map(range, mask.shape))
    return {
        "col_indices": [c for _, _, c in blocks],
        "row_indices": [z * mask.shape[1] + r for z, r, _ in blocks],
        "transpose_order": [number[tuple(b)] for b in sorted(blocks, key=lambda b: (b[0], b[2], b[1]))],
        "positions": [number.get(block, -1) for block in every],
    }


@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parts(shape: tuple[int, ...], density: float, device: torch.device) -> None:
    mask = random_mask(shape, density, device)
    nnz = int(mask.sum())
    for capacity in (None, nnz + 300, max(mask.numel(), 1)):
        layout = Layout.from_mask(mask, 16, capacity=capacity)
        assert torch.equal(layout.to_dense(), mask) and int(layout.nnz) == nnz and not layout.overflowed
        for name, entries in expected(mask).items():
            got = getattr(layout, name).tolist()
            assert got[: len(entries)] == entries, name
            assert set(got[len(entries) :]) <= {-1}, name
        flat = flattened(mask)
        assert layout.row_offsets.tolist() == [0, *flat.sum(2).flatten().cumsum(0).tolist()]
        assert layout.col_offsets.tolist() == [0, *flat.sum(1).flatten().cumsum(0).tolist()]


def test_overflow(device: torch.device) -> None:
    mask = random_mask((2, 9, 9), 0.5, device)
    full, short = Layout.from_mask(mask, 16), Layout.from_mask(mask, 16, capacity=30)
    assert short.overflowed and short.capacity == 30 and torch.equal(short.to_dense(), mask)
    for name in ("row_offsets", "col_offsets", "positions"):
        assert torch.equal(getattr(short, name), getattr(full, name))
    for name in ("col_indices", "row_indices"):
        assert torch.equal(getattr(short, name), getattr(full, name)[:30])
    assert torch.equal(short.transpose_order, full.transpose_order[:30].clamp(max=29))


@pytest.mark.native
def test_compile(compiled, device: torch.device) -> None:
    mask = random_mask((2, 9, 9), 0.5, device)
    layout = compiled(lambda mask: Layout.from_mask(mask, 32, capacity=162))(mask)
    assert torch.equal(layout.transpose_order, Layout.from_mask(mask, 32, capacity=162).transpose_order)


@pytest.mark.gpu
def test_capture() -> None:
    mask = random_mask((2, 9, 9), 0.5, torch.device("cuda"))
    Layout.from_mask(mask, 32, capacity=162)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layout = Layout.from_mask(mask, 32, capacity=162)
        with pytest.raises(NotImplementedError, match="capacity=None waits for the device"):
            Layout.from_mask(mask, 32)
    mask.copy_(~mask)
    graph.replay()
    assert torch.equal(layout.to_dense(), mask)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"mask": torch.ones(3)}, r"mask must have shape \[..., rows, cols\], got \[3\]"),
        ({"block_size": 48}, "block_size must be 16, 32, 64 or 128, or a pair of these, got 48"),
        ({"size": (32, 33)}, r"size must be of 2 x 2 blocks of 16 x 16 like mask, got \(32, 33\)"),
        ({"capacity": 0}, "capacity must be at least 1, got 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_errors(change, message: str) -> None:
    with pytest.raises(ValueError, match=f"blocksparse.Layout.from_mask: {message}"):
        Layout.from_mask(**{"mask": torch.ones(2, 2), "block_size": 16, **change})
