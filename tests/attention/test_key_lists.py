"""Lists of the keys that a group of queries takes, and the bits beside them."""

import pytest
import torch

from gossamer.attention import Selection

kernels = pytest.importorskip("gossamer.attention._triton.key_lists")
pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("parts", [1, 2, 8])
@pytest.mark.parametrize(
    "tq, tk, causal, lengths", [(70, 150, True, None), (200, 90, True, [90, 5]), (130, 40, False, [0, 33])]
)
def test_what_any_query_takes(
    tq: int, tk: int, causal: bool, lengths: list[int] | None, parts: int, device: torch.device,
    generator: torch.Generator,
) -> None:  # fmt: skip
    mask = torch.rand(2, 2, tq, tk, device=device, generator=generator) < 0.1
    mask[..., 7] = False
    words = Selection.from_mask(mask).words
    given = None if lengths is None else torch.tensor(lengths, device=device)
    ends = torch.tensor(lengths or [tk, tk], device=device)[:, None, None, None]
    offset = tk - tq if lengths is None else (ends - tq).clamp(min=min(tk - tq, 0))
    key, query = torch.arange(tk, device=device), torch.arange(tq, device=device)[:, None]
    seen = mask & (key < ends) & ((key <= query + offset) & (query + offset < ends) if causal else True)
    lists, counts = kernels.key_lists(words, given, tq, causal, parts)
    groups = -(-tq // (64 * parts))
    assert lists.shape[:3] == (groups, 4, 1 + 2 * parts) and counts.shape == (groups, 4, 1)
    for group in range(groups):
        rows = seen[:, :, group * 64 * parts : (group + 1) * 64 * parts]
        for scope, taken in enumerate(rows.flatten(0, 1)):
            keys = taken.any(0).nonzero().squeeze(1)
            listed = lists[group, scope, :, : len(keys)]
            assert counts[group, scope] == len(keys) and torch.equal(listed[0].long(), keys)
            bits = ((listed[1:, None] >> torch.arange(32, device=device)[:, None]) & 1).flatten(0, 1)
            assert torch.equal(bits[: len(taken)].bool(), taken[:, keys]) and not bits[len(taken) :].any()


def test_some_groups(device: torch.device, generator: torch.Generator) -> None:
    words = Selection.from_mask(torch.rand(1, 300, 80, device=device, generator=generator) < 0.2).words
    whole = kernels.key_lists(words, None, 300, False, 1)
    part = kernels.key_lists(words, None, 300, False, 1, first=2, most=2)
    count = int(part[1].max())
    assert torch.equal(part[1], whole[1][2:4]) and torch.equal(part[0][0, 0, 0, :10], whole[0][2, 0, 0, :10]) and count
