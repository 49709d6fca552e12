"""Decoding with a cache against one call over whole sequences."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.attention import AdaptiveK
from gossamer.nn import AttentionCache, GatedSparseAttention


def layer(device: torch.device, **options: Any) -> GatedSparseAttention:
    torch.manual_seed(0)
    given = {"k_base": 24, "k_min": 8, "k_max": 40, "d_indexer": 16, **options}
    made = GatedSparseAttention(64, 4, num_kv_heads=2, **given)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.2)
    return made.to(device)


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("page_size", [None, 8], ids=["one piece", "pages"])
@pytest.mark.parametrize(
    "options",
    [{}, {"adaptive": AdaptiveK("entropy", 8, 24, 40)}, {"k_base": 40}, {"value_gate": False, "output_gate": False}],
    ids=["", "adaptive", "dense at first", "no gates"],
)
@torch.no_grad()
def test_like_one_call(options: dict[str, Any], page_size: int | None, device: torch.device) -> None:
    """A prompt, single tokens, and pieces of few and of many tokens."""
    module = layer(device, **options)
    x = torch.randn(2, 100, 64, device=device)
    whole, cache = module(x), module.cache(2, 100, page_size)
    for first, last in ((0, 30), (30, 31), (31, 32), (32, 40), (40, 70), (70, 71), (71, 100)):
        close(module(x[:, first:last], cache=cache), whole[:, first:last])
    assert cache.longest == 100 and cache.lengths.tolist() == [100, 100]
    with pytest.raises(ValueError, match=r"AttentionCache: the cache has room for 1.. tokens, .* up to 100 are taken"):
        module(x[:, :5], cache=cache)
    cache.clear()
    close(module(x[:, :50], cache=cache), whole[:, :50])


@pytest.mark.parametrize("page_size", [None, 16], ids=["one piece", "pages"])
@torch.no_grad()
def test_sequences_of_different_length(page_size: int | None, device: torch.device) -> None:
    """Prompts of 50, 3 and 33 tokens, padded; then single tokens, and a piece that is padded as well."""
    module = layer(device)
    x = torch.randn(3, 90, 64, device=device)
    whole, lengths = module(x), torch.tensor([50, 3, 33], device=device)
    cache = module.cache(3, 96, page_size)
    prompt = x[:, :50].clone()
    for b, length in enumerate(lengths.tolist()):
        prompt[b, length:] = 7
    out = module(prompt, cache=cache, lengths=lengths)
    for b, length in enumerate(lengths.tolist()):
        close(out[b, :length], whole[b, :length])
    assert torch.equal(cache.lengths, lengths)
    sizes = (1, 1, 20, 1)
    for size in sizes:
        at = cache.lengths[:, None] + torch.arange(size, device=device)
        new = torch.full_like(lengths, size)
        if size > 1:
            new[0] = 4
        tokens = x.gather(1, at.clamp(max=89)[..., None].expand(-1, -1, 64))
        out = module(tokens, cache=cache, lengths=new)
        wanted = whole.gather(1, at.clamp(max=89)[..., None].expand(-1, -1, 64))
        for b, count in enumerate(new.tolist()):
            close(out[b, :count], wanted[b, :count])
    assert cache.lengths.tolist() == [57, 26, 56] and cache.longest == 73


@torch.no_grad()
def test_pages_in_any_order(device: torch.device) -> None:
    """What an allocator has handed out, in one pool with other sequences' pages, which are left alone."""
    module = layer(device)
    table = torch.randperm(40, device=device)[:14].view(2, 7)
    pools = (torch.full((40, 8, 2, 16), torch.nan, device=device) for _ in range(2))
    cache = AttentionCache(*pools, torch.full((40, 8, 16), torch.nan, device=device), table)
    assert cache.capacity == 56
    x = torch.randn(2, 56, 64, device=device)
    whole = module(x)
    for first, last in ((0, 40), (40, 41), (41, 56)):
        close(module(x[:, first:last], cache=cache), whole[:, first:last])
    others = torch.ones(40, dtype=torch.bool, device=device)
    others[table.flatten()] = False
    assert bool(cache.k[others].isnan().all()) and bool(cache.k[~others].isfinite().all())


@torch.no_grad()
def test_layers_share_a_selection(device: torch.device) -> None:
    first, second = layer(device), layer(device, n_idx_heads=2)
    x = torch.randn(1, 60, 64, device=device)
    shared = first.select(*first.index(x))
    whole = second(x, selection=shared)
    caches = first.cache(1, 64), second.cache(1, 64)
    for module, cache in zip((first, second), caches):
        module(x[:, :59], cache=cache)
    last = x[:, 59:]
    q, _, w = first.index(last)
    first(last, cache=caches[0])
    taken = first.select(q, caches[0].index_keys(64), w, lengths=caches[0].lengths)
    close(second(last, selection=taken, cache=caches[1]), whole[:, 59:])


def test_errors(device: torch.device) -> None:
    module, x = layer(device), torch.randn(1, 5, 64, device=device)
    with pytest.raises(NotImplementedError, match=r"gradients with a cache are not implemented. Use torch.no_grad"):
        module(x, cache=module.cache(1, 10))
    k, index = torch.zeros(2, 1, 12, 8), torch.zeros(2, 12, 4)
    with pytest.raises(ValueError, match=r"k must have shape \[B, G, C, D\]"):
        AttentionCache(k[0], k[0], index)
    with pytest.raises(ValueError, match=r"v must have shape \[B, G, C, D\] = \[2, 1, 12, 8\] like k"):
        AttentionCache(k, k[:1], index)
    with pytest.raises(ValueError, match=r"page_size be a power of two, got \[2, 3\] and 12"):
        AttentionCache(k.transpose(1, 2), k.transpose(1, 2), index, torch.zeros(2, 3))


@pytest.mark.parametrize("page_size", [None, 16], ids=["one piece", "pages"])
@pytest.mark.parametrize("k_base", [24, 200], ids=["selects", "dense"])
@torch.no_grad()
def test_memory_that_nobody_wrote(k_base: int, page_size: int | None, device: torch.device) -> None:
    """A cache and what pads a prompt hold NaN, which reaches no token."""
    module = layer(device, k_base=k_base, k_max=200)
    x = torch.randn(2, 90, 64, device=device)
    whole, lengths = module(x), torch.tensor([50, 33], device=device)
    cache = module.cache(2, 320, page_size)
    for tensor in (cache.k, cache.v, cache.k_idx):
        tensor.fill_(torch.nan)
    prompt = x[:, :50].clone()
    prompt[1, 33:] = torch.nan
    out = module(prompt, cache=cache, lengths=lengths)
    close(out[0], whole[0, :50])
    close(out[1, :33], whole[1, :33])
    for tokens in (1, 3, 20):
        first = cache.lengths.tolist()
        out = module(torch.stack([x[b, at : at + tokens] for b, at in enumerate(first)]), cache=cache)
        for b, at in enumerate(first):
            close(out[b], whole[b, at : at + tokens])
