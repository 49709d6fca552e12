"""Small products in one launch, which multiplies every block, beside those of the pairs that meet."""

from typing import Any

import pytest
import torch

from tests.blocksparse.products import MIXES, run


@pytest.mark.kernels
@pytest.mark.parametrize("shallow", [True, False], ids=["every block", "pairs"])
@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: "".join("DS"[sparse] for sparse in mix))
@pytest.mark.parametrize("turned", [(False, False), (True, True)], ids=str)
def test_both_ways(mix, turned, shallow: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are no squares, and sizes that they do not divide; which kernel runs is counted."""
    from gossamer.blocksparse._triton import matmul as kernels

    launched: list[Any] = []
    launch = kernels.launch_matmul_small
    monkeypatch.setattr(kernels, "is_shallow", lambda *_: shallow)
    monkeypatch.setattr(kernels, "launch_matmul_small", lambda *given: (launched.append(given), launch(*given)))
    sizes, block = ((70, 96, 130), (32, 16, 64)) if mix[0] else ((40, 150, 70), (16, 64, 128))
    run(mix, turned, sizes, block, torch.float16, device, density=0.4)
    assert bool(launched) == shallow


@pytest.mark.native
@pytest.mark.parametrize(
    "given, tile",
    [
        # Enough tiles of 64, or halves of them; a step is 256 bytes, and no longer than K.
        ((64, 64, 256, 2, 132, 132), (64, 64, 128)),
        ((64, 64, 256, 2, 131, 132), (32, 32, 128)),
        ((16, 128, 20, 4, 4, 132), (16, 32, 32)),
        ((16, 16, 5, 2, 4, 132), (16, 16, 16)),
    ],
)
def test_tiles(given: tuple[int, ...], tile: tuple[int, int, int]) -> None:
    pytest.importorskip("triton")
    from gossamer.blocksparse._triton.matmul_small import tile_of

    assert tile_of(*given) == tile
