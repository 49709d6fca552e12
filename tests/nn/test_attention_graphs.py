"""`GatedSparseAttention` in a CUDA graph: in inference, in a training step, and a token at a time behind a cache."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.attention import AdaptiveK
from gossamer.nn import GatedSparseAttention
from tests.graphs import follows

pytestmark = pytest.mark.gpu

# Products may be rounded otherwise under capture, and a key at the edge of a selection change places with another.
NEAR = {"rtol": 0.05, "atol": 0.05}
OPTIONS: list[dict[str, Any]] = [{}, {"adaptive": AdaptiveK("entropy", 8, 24, 40)}, {"k_base": 200, "k_max": 200}]


def layer(device: torch.device, **options: Any) -> GatedSparseAttention:
    torch.manual_seed(0)
    made = GatedSparseAttention(
        64, 4, num_kv_heads=2, **{"k_base": 24, "k_min": 8, "k_max": 40, "d_indexer": 16, **options}
    )
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.2)
    return made.to(device)


@pytest.mark.parametrize("options", OPTIONS, ids=["top-k", "adaptive", "dense"])
def test_layer(options: dict[str, Any], device: torch.device) -> None:
    module, x = layer(device, **options), torch.randn(2, 150, 64, device=device)
    with torch.no_grad():
        follows(lambda: (module(x),), x, **NEAR)


@pytest.mark.parametrize("gradient", ["none", "straight_through"])
def test_training_step(gradient: str, device: torch.device) -> None:
    module, x = layer(device, indexer_gradient=gradient), torch.randn(2, 150, 64, device=device).requires_grad_()
    learns = [p for name, p in module.named_parameters() if gradient != "none" or "indexer" not in name]

    def call() -> Sequence[Tensor]:
        out = module(x)
        return (out.detach(), *torch.autograd.grad(out.square().mean(), (x, *learns)))

    follows(call, x, **NEAR)


@pytest.mark.parametrize("page_size", [None, 16])
@torch.no_grad()
def test_decoding_step(page_size: int | None, device: torch.device) -> None:
    """The captured step goes on from wherever the cache is, up to what it was captured to read."""
    module, x = layer(device).eval(), torch.randn(2, 110, 64, device=device)
    cache, token = module.cache(2, 128, page_size), torch.empty(2, 1, 64, device=device)
    module(x[:, :100], cache=cache)
    lengths = cache.lengths.clone()

    def back() -> None:
        cache.lengths.copy_(lengths)
        cache.longest = 100

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        token.copy_(x[:, 100:101])
        module(token, cache=cache)
        back()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module(token, cache=cache)
    back()
    whole = module(x)
    for t in range(100, 110):
        token.copy_(x[:, t : t + 1])
        graph.replay()
        torch.testing.assert_close(out, whole[:, t : t + 1], **NEAR)
    assert cache.lengths.tolist() == [110, 110]
