"""The check of `gossamer doctor`: public functions on small random data, each beside plain PyTorch in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gossamer import attention, blocksparse, ffn, gemm, rowsparse, sae
from gossamer._core.operator import forget
from gossamer._core.ops import INTERPRET
from gossamer.gemm.activations import Activation

# The largest difference from float64 at these sizes, relative to the largest element.
BUDGETS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
KINDS = {"_triton": "Triton", "_gluon": "Gluon"}


@dataclass(frozen=True)
class Check:
    """A call of the public function `name`, which variant of it, and its result in dense float64.

    The call may return a container, and a container may be the first of several results.
    """

    name: str
    variant: str
    compute: Callable[[], Any]
    want: Tensor
    budget: float = BUDGETS[torch.float32]

    def __str__(self) -> str:
        return f"{self.name} ({self.variant})" if self.variant else self.name

    def difference(self) -> float:
        """The largest difference between result and float64, relative to the largest element."""
        out = self.compute()
        out = out[0] if isinstance(out, tuple) else out
        got = out if isinstance(out, Tensor) else out.to_dense()
        if got.shape != self.want.shape:
            raise ValueError(f"shape {list(got.shape)} where {list(self.want.shape)} was expected")
        worst = ((got.double() - self.want).abs().max() / self.want.abs().max()).item()
        return float("inf") if worst != worst else worst


@contextmanager
def watched() -> Iterator[set[str]]:
    """The kinds of kernels that are launched within: "Triton" and "Gluon"; none where PyTorch computes everything."""
    kinds: set[str] = set()
    if not (torch.cuda.is_available() or INTERPRET):
        yield kinds
        return
    from gossamer._core.launch import Kernel

    call = Kernel.__call__
    # No launch is repeated from an earlier check.
    forget()

    def noted(kernel: Kernel, *arguments: Any, **options: Any) -> Any:
        kinds.add(KINDS[kernel.fn.fn.__module__.split(".")[2]])
        return call(kernel, *arguments, **options)

    Kernel.__call__ = noted  # type: ignore[method-assign, assignment]
    try:
        yield kinds
    finally:
        Kernel.__call__ = call  # type: ignore[method-assign]


def checks(device: torch.device) -> Iterator[Check]:
    """Every check, room by room; where a room cannot even make its inputs, one that says so."""
    for room in (_rowsparse, _sae, _gemm, _ffn, _attention, _blocksparse):
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int, generator: torch.Generator = generator) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device)

        try:
            yield from room(randn)
        except Exception as error:
            yield Check(room.__name__[1:], "inputs", partial(_raise, error), torch.ones(1))


Randn = Callable[..., Tensor]


def _raise(error: Exception) -> None:
    raise error


def _rowsparse(randn: Randn) -> Iterator[Check]:
    acts, weight, x = randn(7, 300), randn(300, 40), randn(7, 40)
    acts[acts < 1.5] = 0
    dense = acts.double()
    packs: dict[str, dict[str, Any]] = {"slots": {}, "overflowing": {"capacity": 2}, "exact": {"capacity": "exact"}}

    for name, options in packs.items():
        rows = rowsparse.pack(acts, **options)
        yield Check("rowsparse.pack", name, partial(rowsparse.pack, acts, **options), dense)
        yield Check("rowsparse.matmul", name, partial(rowsparse.matmul, rows, weight), dense @ weight.double())
        yield Check("rowsparse.transpose", name, partial(rowsparse.transpose, rows), dense.T)
    sampled = (x.double() @ weight.double().T) * (dense != 0)
    yield Check("rowsparse.sampled_matmul", "", partial(rowsparse.sampled_matmul, x, weight, rows), sampled)


def _sae(randn: Randn) -> Iterator[Check]:
    M, N, D, k = 7, 300, 40, 5
    acts, weight, bias = randn(M, N), randn(N, D), randn(D)
    acts[acts < 1.5] = 0
    dense = acts.double()
    want = dense @ weight.double() + bias.double()
    for name, capacity in (("", None), ("gathered", N)):
        yield Check("sae.decode", name, partial(sae.decode, acts, weight, bias, capacity=capacity), want)
    gradients = partial(_gradients, sae.decode, acts, weight)
    yield Check("sae.decode", "gradients", gradients, _gradients(torch.matmul, dense, weight.double()))
    x, W_enc, b_enc = randn(M, D), randn(D, N), randn(N)
    z = x.double() @ W_enc.double() + b_enc.double()
    threshold = torch.full((N,), 2.0, device=x.device)
    activations: dict[str, tuple[str | Activation, Tensor]] = {
        "relu": ("relu", z.relu()),
        "jumprelu": (gemm.JumpReLU(threshold), torch.where(z > 2.0, z, 0)),
        "topk": (gemm.TopK(k), _largest(z, k)),
        "batchtopk": (gemm.BatchTopK(k), _largest(z.flatten(), k * M).view_as(z)),
    }
    for name, (activation, want) in activations.items():
        yield Check("sae.encode", name, partial(sae.encode, x, W_enc, b_enc, activation), want)
    scale = W_enc.norm(dim=0)
    tanh = torch.tanh(scale.double() * dense).sum(-1)
    yield Check("sae.tanh_l0", "", lambda: sae.tanh_l0(rowsparse.pack(acts), scale), tanh)


def _gemm(randn: Randn) -> Iterator[Check]:
    # The second is one that Hopper has kernels of its own for.
    for dtype, (M, K, N) in {torch.float32: (7, 40, 300), torch.bfloat16: (256, 256, 512)}.items():
        variant = "" if dtype == torch.float32 else "bfloat16"
        x, gate, up, down = (t.to(dtype) for t in (randn(M, K), *(randn(*s) / 8 for s in ((N, K), (N, K), (K, N)))))
        x64, gate64, up64, down64 = x.double(), gate.double(), up.double(), down.double()
        hidden = F.silu(x64 @ gate64.t()) * (x64 @ up64.t())
        yield Check("gemm.linear_glu", variant, partial(gemm.linear_glu, x, gate, up), hidden, BUDGETS[dtype])
        block = partial(gemm.gated_mlp, x, gate, up, down)
        yield Check("gemm.gated_mlp", variant, block, hidden @ down64.t(), BUDGETS[dtype])
        pack = partial(gemm.linear_pack, x, gate)
        yield Check("gemm.linear_pack", variant, pack, (x64 @ gate64.t()).relu(), BUDGETS[dtype])


def _ffn(randn: Randn) -> Iterator[Check]:
    x, gate, up, down = randn(7, 40), randn(300, 40) / 6, randn(300, 40) / 6, randn(24, 300) / 6
    bias = torch.full((300,), -2.0, device=x.device)
    open_ = (x.double() @ gate.double().t() + bias.double()).relu()
    want = (open_ * (x.double() @ up.double().t())) @ down.double().t()
    plain = open_ @ down.double().t()
    for method in ("gather", "fused"):
        gated = partial(ffn.gated, x, gate, up, down, gate_bias=bias, method=method)
        yield Check("ffn.gated", method, gated, want)
        if method != "fused":
            yield Check("ffn.plain", method, partial(ffn.plain, x, gate, down, up_bias=bias, method=method), plain)


def _attention(randn: Randn) -> Iterator[Check]:
    H, D, k = 2, 64, 12
    # Out of so many keys Hopper has a kernel of its own.
    for dtype, variant, queries, keys in (
        (torch.float32, "", 80, 80),
        (torch.bfloat16, "bfloat16, many keys", 64, 8192),
    ):
        shapes = (1, H, queries, D), (1, keys, D), (1, queries, H), (H,)
        index = [randn(*shape).to(dtype) for shape in shapes]
        q, key, w, bias = (operand.double() for operand in index)
        seen = torch.ones(queries, keys, dtype=torch.bool, device=w.device).tril(keys - queries)
        gates = (torch.einsum("bhtd,bsd->bhts", q, key) / D**0.5 + bias[:, None, None]).sigmoid()
        scores = torch.einsum("bth,bhts->bts", w.sigmoid(), gates).masked_fill(~seen, 0)
        if dtype is torch.float32:
            yield Check("attention.indexer_scores", variant, partial(_scored, seen, *index), scores)
        selected = partial(_sum_of_selected, scores, *index, k=k, causal=True)
        yield Check("attention.select_topk", variant, selected, scores.topk(k).values.sum(-1), 1e-3)
    T, D = 80, 16
    q, key, v = (randn(1, H, T, D) for _ in range(3))
    near = torch.ones(T, T, dtype=torch.bool, device=v.device).tril().triu(1 - k)
    want = _attend(q, key, v, near)
    for variant, first in (("", 0), ("few queries", T - 1)):
        given = q[:, :, first:], key, v, attention.Selection.from_mask(near[None, first:])
        attend = partial(attention.sparse_attention, *given, causal=True)
        yield Check("attention.sparse_attention", variant, attend, want[:, :, first:])


def _blocksparse(randn: Randn) -> Iterator[Check]:
    size, block = 96, 32
    a, b = randn(size, size), randn(size, size)
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 1, 1]], device=a.device).bool()
    layout = blocksparse.Layout.from_mask(mask, block)
    present = mask.repeat_interleave(block, 0).repeat_interleave(block, 1)
    blocks, dense = blocksparse.from_dense(a, layout), a.double() * present
    yield Check("blocksparse.matmul", "", partial(blocksparse.matmul, blocks, b), dense @ b.double())
    half = torch.bfloat16
    x, y = randn(192, 192).to(half), randn(192, 128).to(half)
    wide = mask.repeat_interleave(64, 0).repeat_interleave(64, 1)
    multiply = partial(blocksparse.matmul, blocksparse.from_dense(x, blocksparse.Layout.from_mask(mask, 64)), y)
    yield Check("blocksparse.matmul", "bfloat16", multiply, (x.double() * wide) @ y.double(), BUDGETS[half])
    places = torch.arange(192, device=x.device).mul(7).remainder(50).expand(192, 192).contiguous()
    source, full = blocksparse.Layout.from_mask(mask, 64), blocksparse.Layout.full((3, 3), 64, device=x.device)
    given = blocksparse.from_dense(places, source), blocksparse.from_dense(x, source)
    add = partial(blocksparse.scatter, full, -1, *given, "sum", include_self=False)
    sums = torch.zeros(192, 192, dtype=torch.float64, device=x.device).scatter_add(-1, places, x.double() * wide)
    yield Check("blocksparse.scatter", "bfloat16", add, sums, BUDGETS[half])
    soft = dense.masked_fill(~present, float("-inf")).softmax(-1)
    yield Check("blocksparse.softmax", "", partial(blocksparse.softmax, blocks), soft)
    yield Check("blocksparse.BlockSparseTensor", "mT", lambda: blocks.mT, dense.T)
    for dtype, block in {torch.float32: 32, torch.bfloat16: 64}.items():
        T = 3 * block
        q, k, v = (randn(1, 2, T, 64).to(dtype) for _ in range(3))
        visible = mask.repeat_interleave(block, 0).repeat_interleave(block, 1)
        attend = partial(blocksparse.attention, q, k, v, blocksparse.Layout.from_mask(mask, block))
        variant = "" if dtype == torch.float32 else "bfloat16"
        yield Check("blocksparse.attention", variant, attend, _attend(q, k, v, visible), BUDGETS[dtype])


def _scored(seen: Tensor, *index: Tensor) -> Tensor:
    return attention.indexer_scores(*index, causal=True).masked_fill(~seen, 0)


def _sum_of_selected(scores: Tensor, *index: Any, **options: Any) -> Tensor:
    """Rounding may decide which key is the last; it does not change the sum of the scores."""
    return (attention.select_topk(*index, **options).to_mask()[:, 0] * scores).sum(-1)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask)


def _largest(z: Tensor, k: int) -> Tensor:
    values, indices = z.topk(k, dim=-1)
    return torch.zeros_like(z).scatter(-1, indices, values.relu())


def _gradients(decode: Callable[[Tensor, Tensor], Tensor], acts: Tensor, weight: Tensor) -> Tensor:
    """Both gradients of a sum of squares in one vector."""
    acts, weight = acts.detach().requires_grad_(), weight.detach().requires_grad_()
    grads = torch.autograd.grad(decode(acts, weight).square().sum(), (acts, weight))
    return torch.cat([grad.flatten() for grad in (grads[0] * (acts != 0), grads[1])])
