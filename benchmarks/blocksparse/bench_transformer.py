"""Training steps of a transformer with block-sparse attention beside one with dense attention, as time and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from benchmarks.engine import Case, Provider
from gossamer.blocksparse import Layout, global_tokens, sliding_window
from gossamer.nn import BlockSparseAttention

WINDOW, GLOBAL = 256, 64
"""Tokens on either side that a query meets, and first tokens that meet all and that all meet."""

Attend = Callable[[Tensor, Tensor, Tensor, Layout], Tensor]


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """4 layers of 512 with 8 heads, batch 1, mixed precision; one layer of 64 for `quick` and on the CPU."""
    if quick or device.type == "cpu":
        yield _training(256, 64, 1, 2, 32)
        return
    for T in (1024, 2048, 4096, 8192):
        yield _training(T, 512, 4, 8, 64)


def longformer(T: int, block: int, device: torch.device) -> Layout:
    """A window around the diagonal, and the first tokens by row and column, in whole blocks as the peers have them."""
    first = global_tokens((T, T), block, GLOBAL, elements=False, device=device)
    return sliding_window((T, T), block, WINDOW, elements=False, device=device).union(first)


class Layer(nn.Module):
    """Attention and a feed-forward block, each behind a norm."""

    def __init__(self, width: int, heads: int, device: torch.device) -> None:
        super().__init__()
        self.attention = BlockSparseAttention(width, heads, device=device)
        self.norms = nn.ModuleList(nn.LayerNorm(width, device=device) for _ in range(2))
        self.up, self.down = (nn.Linear(*s, device=device) for s in ((width, 4 * width), (4 * width, width)))

    def forward(self, x: Tensor, layout: Layout, attend: Attend | None) -> Tensor:
        normed = self.norms[0](x)
        if attend is None:
            x = x + self.attention(normed, layout=layout)
        else:
            heads = attend(*self.attention.project(normed), layout)
            x = x + self.attention.o_proj(heads.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def dense(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    """Every key; by cuDNN on the GPU, for PyTorch's own choice can be half as fast on Hopper."""
    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16):
        return F.scaled_dot_product_attention(q, k, v)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v)


def materialised(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    """The same keys as the layout's, by a matrix of scores, as in the published comparison."""
    height, width = layout.block_size
    present = layout.to_dense().repeat_interleave(height, 0).repeat_interleave(width, 1)
    scores = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
    present = present[: scores.shape[2], : scores.shape[3]]
    return scores.masked_fill(~present, -torch.inf).softmax(-1).to(v.dtype) @ v


def _training(T: int, width: int, layers: int, heads: int, block: int) -> Case:
    def make(device: torch.device, generator: torch.Generator) -> list[tuple[Any, ...]]:
        torch.manual_seed(0)
        model = nn.ModuleList(Layer(width, heads, device) for _ in range(layers))
        x = torch.randn(1, T, width, device=device, generator=generator)
        return [(model, x, longformer(T, block, device))]

    def step(
        model: nn.ModuleList, x: Tensor, layout: Layout, attend: Attend | None, recomputed: bool = False
    ) -> tuple[Tensor, ...]:
        """A result and the gradients of the first layer's projections, which have come through all others."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda and x.dtype is torch.float32):
            out = x
            for layer in model:
                given = out, layout, attend
                out = checkpoint(layer, *given, use_reentrant=False) if recomputed else layer(*given)
        parameters = dict(model.named_parameters())
        grads = torch.autograd.grad(out.square().mean(), list(parameters.values()))
        found = dict(zip(parameters, grads))
        return out.detach(), *(found[f"0.attention.{name}_proj.weight"] for name in "qkv")

    def reference(model: nn.ModuleList, x: Tensor, layout: Layout, attend: Attend = materialised) -> tuple[Tensor, ...]:
        # A copy: graphs have captured the model itself.
        wide = deepcopy(model).double()
        # Layers are computed again one by one: the float64 scores of all of them fill a GPU of 80 GB.
        return tuple(y.double() for y in step(wide, x.double(), layout, attend, recomputed=True))

    def dense_result(output: tuple[Tensor, ...], *inputs: Any) -> tuple[Tensor, ...]:
        """Dense attention attends to every block, so its error is that against its own reference."""
        own, wanted = reference(*inputs, attend=dense), reference(*inputs)
        return tuple(a + (b.double() - c) for a, b, c in zip(wanted, output, own))

    density = float(longformer(T, block, torch.device("cpu")).to_dense().double().mean())
    products = 8 * T * width**2 + 16 * T * width**2
    flops = int(layers * (3 * products + 7 * 2 * T * T * width * density))
    return Case(
        room="blocksparse",
        name="transformer_training",
        parameters={"T": T, "width": width, "layers": layers, "heads": heads, "block": block},
        dtype=torch.float32,
        make=make,
        providers=(
            Provider("gossamer", partial(step, attend=None), ours=True, capturable=True),
            Provider("dense SDPA, cuDNN", partial(step, attend=dense), result=dense_result, capturable=True),
            Provider("materialised", partial(step, attend=materialised), capturable=True),
        ),
        reference=reference,
        bytes=layers * 12 * width**2 * 4,
        flops=flops,
        sweep="T",
        grad=True,
        error=_error,
        budget=5e-2,
    )


def _error(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
    """Largest error of a tensor, over its norm."""
    return float(torch.stack([(a.double() - b).norm() / b.norm() for a, b in zip(got, want, strict=True)]).max())
