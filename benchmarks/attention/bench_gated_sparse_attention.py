"""`nn.GatedSparseAttention` as a whole: with its indexer, dense, by plain PyTorch, and one token behind a cache.

Results are checked at the last 64 tokens, in float64, over the keys that each way selects itself; dense attention over
all of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention.bench_select_topk import drifting
from benchmarks.attention.bench_sparse_attention import pinned
from benchmarks.engine import Case, Provider
from benchmarks.peers.plain_gated_sparse_attention import PlainGatedSparseAttention
from gossamer.nn import GatedSparseAttention

ROWS = 64


def cases(
    device: torch.device,
    quick: bool,
    *,
    lengths: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    batch: int = 1,
) -> Iterator[Case]:
    """The published layer: hidden size 2,048, 16 heads, k 2,048; a small one for `quick` and on the CPU."""
    if quick or device.type == "cpu":
        for T in lengths or (256,):
            yield _layer(T, 64, 4, min(32, T // 2), dtype or torch.float32, batch)
            yield _training(T, 64, 4, min(32, T // 2), dtype or torch.float32, batch)
        return
    for T in lengths or (1024, 2048, 4096, 8192, 32768, 131072):
        yield _layer(T, 2048, 16, min(2048, T // 2), dtype or torch.bfloat16, batch)
        if T <= 32768:
            yield _training(T, 2048, 16, min(2048, T // 2), dtype or torch.bfloat16, batch)


def _layers(
    T: int, width: int, heads: int, k: int, dtype: torch.dtype, B: int, device: torch.device, generator: torch.Generator
) -> list[tuple[Any, ...]]:
    """The layer, the same in its warm-up with dense attention, plain PyTorch of the same weights, and x."""
    torch.manual_seed(0)
    layer = GatedSparseAttention(width, heads, k_base=k, k_min=min(k, 256), k_max=2 * k)
    plain = PlainGatedSparseAttention(width, heads, k_base=k, k_min=min(k, 256), k_max=2 * k)
    plain.load_state_dict(layer.state_dict())
    layer, plain = (each.to(device, dtype) for each in (layer, plain))
    dense = copy.copy(layer)
    dense.dense = True
    # Neighbouring tokens select much the same keys, as in trained models: 64 of them together some 1.4 times as
    # many as each.
    x = drifting((B, T, width), 1, device, generator, share=0.9997)
    x = (x + 0.03 * torch.randn(x.shape, device=device, generator=generator)).to(dtype)
    return [(layer, dense, plain, x)]


def _case(
    T: int,
    width: int,
    heads: int,
    k: int,
    dtype: torch.dtype,
    B: int,
    run: Callable[..., Any],
    result: Callable[..., tuple[Tensor]],
    training: bool,
    *more: Provider,
) -> Case:
    """`run` and `result` take which of the layers it is before all inputs."""
    names = ("gossamer", "gossamer, dense", "plain PyTorch")
    reaches = (("cpu", "cuda"), ("cpu", "cuda"), ("cpu", "cuda") if T <= 4096 else ())
    ways = (
        Provider(
            name, partial(run, which), ours=which == 0, result=partial(result, which), devices=devices,
            capturable=which < 2,
        )
        for which, (name, devices) in enumerate(zip(names, reaches))
    )  # fmt: skip
    return Case(
        room="attention",
        name="gated_sparse_attention" + "_training" * training,
        parameters={"B": B, "T": T, "hidden": width, "H": heads, "k": k},
        dtype=dtype,
        make=partial(_layers, T, width, heads, k, dtype, B),
        providers=(*ways, *more),
        reference=_reference,
        bytes=B * ((6 if training else 2) * T * width + (12 if training else 6) * width * width) * dtype.itemsize,
        flops=B * least_flops(T, width, k, training),
        grad=training,
        sweep="T",
        tokens=B * T,
    )


def stages(T: int, width: int, k: int, n: int = 4, d: int = 64, item: int = 2) -> dict[str, tuple[int, int]]:
    """The least FLOPs and bytes of each stage of a causal layer, whose indexer has n heads of d; `item` bytes a number.

    A stage reads its inputs and weights and writes its results once. A selection has a bit for each query and key.
    """
    seen, taken = T * (T + 1) // 2, sum(min(t + 1, k) for t in range(T))
    rows = n * d + d + n

    def product(outputs: int) -> tuple[int, int]:
        return 2 * T * width * outputs, item * (T * width + width * outputs + T * outputs)

    return {
        "q, k, v projections": product(3 * width),
        "gate projections": product(2 * width),
        "output projection": product(width),
        "indexer's projections": product(rows),
        "indexer's scores and selection": (2 * n * d * seen, item * T * rows + seen // 8),
        "attention, queries and keys": (2 * width * taken, item * 2 * T * width + seen // 8),
        "attention, weights and values": (2 * width * taken, item * 2 * T * width),
    }


def least_flops(T: int, width: int, k: int, training: bool) -> int:
    """Of all stages; in training three times those that learn, which the indexer does not."""
    passes = 3 if training else 1
    return sum(flops * (1 if "indexer" in name else passes) for name, (flops, _) in stages(T, width, k).items())


def _training(T: int, width: int, heads: int, k: int, dtype: torch.dtype, B: int) -> Case:
    """A layer forward and backward, the indexer frozen. Outputs are checked as in inference, gradients by the tests."""

    def run(which: int, *inputs: Any) -> tuple[Tensor, ...]:
        layer, x = inputs[which], inputs[3].detach().requires_grad_()
        with _attention_of(layer, x):
            out = layer(x)
        learns = [p for name, p in layer.named_parameters() if "indexer" not in name]
        grads = torch.autograd.grad(out, (x, *learns), x.detach())
        return out.detach(), *grads

    def result(which: int, output: tuple[Tensor, ...], *inputs: Any) -> tuple[Tensor]:
        return _over_own_keys(which, output[0], *inputs)

    return _case(T, width, heads, k, dtype, B, run, result, True)


def _layer(T: int, width: int, heads: int, k: int, dtype: torch.dtype, B: int) -> Case:
    def run(which: int, *inputs: Any) -> Tensor:
        with _attention_of(inputs[which], inputs[3]):
            return inputs[which](inputs[3])

    def decode(layer: GatedSparseAttention, x: Tensor, cache: Any) -> Tensor:
        # The same token again and again: the cache forgets it.
        cache.lengths.fill_(T - 1)
        cache.longest = T - 1
        return layer(x, cache=cache)

    def prepare_decode(layer: GatedSparseAttention, _: Any, __: Any, x: Tensor) -> tuple[Any, ...]:
        cache = layer.cache(B, T)
        layer(x[:, :-1], cache=cache)
        return layer, x[:, -1:], cache

    def decoded(out: Tensor, *inputs: Any) -> tuple[Tensor]:
        wanted = _reference(*inputs)[0].clone()
        wanted[:, -1:] = out[:1].double()
        return (wanted,)

    one = Provider(
        "gossamer, one token behind a cache", decode, ours=True, prepare=prepare_decode, result=decoded, partial=True
    )
    return _case(T, width, heads, k, dtype, B, run, _over_own_keys, False, one)


def _attention_of(layer: GatedSparseAttention, x: Tensor) -> Any:
    """cuDNN pinned where the layer asks PyTorch for attention; to say so takes time, which others need not."""
    return pinned(x) if layer.selects_all(x.shape[1]) else nullcontext()


@torch.no_grad()
def _reference(layer: GatedSparseAttention, dense: Any, plain: Any, x: Tensor) -> tuple[Tensor]:
    return (_exact(layer, x, layer.select(*layer.index(x)).to_mask() if x.shape[1] <= 4096 else _last(layer, x)),)


@torch.no_grad()
def _over_own_keys(which: int, out: Tensor, *inputs: Any) -> tuple[Tensor]:
    """Of the layer, the dense or the plain one; over other keys the error counts, that against the same in float64."""
    layer, x = inputs[0], inputs[3]
    if which == 0:
        return (out[:1, -ROWS:],)
    taken = None if which == 1 else _best(inputs[2], x)
    return (_reference(*inputs)[0] + (out[:1, -ROWS:].double() - _exact(layer, x, taken)),)


def _last(layer: GatedSparseAttention, x: Tensor) -> Tensor:
    """Mask of what the last tokens select, which depends on none before them."""
    q, k, w = layer.index(x)
    return layer.select(q[:, :, -ROWS:], k, w[:, -ROWS:]).to_mask()


def _best(plain: PlainGatedSparseAttention, x: Tensor) -> Tensor:
    """Mask of what the plain layer's last tokens select."""
    scores = plain.scores(*plain.index(x))[:, -ROWS:]
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., : plain.k_base]
    return torch.zeros_like(scores, dtype=torch.bool).scatter(2, best, True)[:, None]


def _exact(layer: GatedSparseAttention, x: Tensor, taken: Tensor | None) -> Tensor:
    """The last tokens of the first sequence in float64, over taken keys [B, 1, >= ROWS, T] or all."""
    wide = copy.deepcopy(layer).double()
    x = x[:1].double()
    T, rows = x.shape[1], slice(x.shape[1] - ROWS, x.shape[1])
    split = (1, -1, layer.num_heads, layer.head_dim)
    q, k, v = (p(part).view(split) for p, part in ((wide.q_proj, x[:, rows]), (wide.k_proj, x), (wide.v_proj, x)))
    v = v * wide.value_gate.gate_proj(x).sigmoid().view(split)
    cos, sin = (angle[:, None].double() for angle in layer.rotary_emb(torch.arange(T, device=x.device)))
    q, k = (
        t * c + torch.cat([-t.chunk(2, -1)[1], t.chunk(2, -1)[0]], -1) * s
        for t, c, s in ((q, cos[rows], sin[rows]), (k, cos, sin))
    )
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * layer.head_dim**-0.5
    seen = torch.ones(ROWS, T, dtype=torch.bool, device=x.device).tril(T - ROWS)
    if taken is not None:
        seen = seen & taken[:1, :, -ROWS:]
    out = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).flatten(2)
    return wide.o_proj(out * wide.output_gate.gate_proj(x[:, rows]).sigmoid())
