"""Random selections that drift as real ones do."""

import pytest
import torch

from benchmarks.inputs import random_selection


@pytest.mark.parametrize("near, far", [(0.9, 0.8), (0.85, 0.7), (0.95, 0.95)])
def test_neighbours_share_keys(near: float, far: float, device: torch.device, generator: torch.Generator) -> None:
    t, k = 2048, 512
    selection = random_selection(t, k, jaccard=(near, far), device=device, generator=generator)
    mask = selection.to_mask()[0, 0].float()
    assert torch.equal(mask.sum(1), torch.arange(1, t + 1, device=device).clamp(max=k).float())
    assert not mask.triu(1).any()
    # Where more is to choose from than is taken.
    later = mask[1500:]
    for distance, wanted in ((1, near), (64, far)):
        shared = (later[:-distance] * later[distance:]).sum(1)
        assert abs(float((shared / (2 * k - shared)).mean()) - wanted) < 0.05


def test_scopes_differ(device: torch.device, generator: torch.Generator) -> None:
    selection = random_selection(100, 10, batch=2, scopes=3, device=device, generator=generator)
    words = selection.words.flatten(0, 1)
    assert selection.words.shape == (2, 3, 2, 100)
    assert all(not torch.equal(words[i], words[j]) for i in range(6) for j in range(i))


@pytest.mark.parametrize("jaccard", [(0.8, 0.9), (1.0, 0.5), (0.5, 0.0)])
def test_errors(jaccard: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=r"random_selection: jaccard must fall within \(0, 1\), got"):
        random_selection(10, 2, jaccard=jaccard)
