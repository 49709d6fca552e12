"""`blocksparse.attention` beside dense attention and the peers, on random layouts, a different one for each head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.engine import Case, Provider
from gossamer.blocksparse import Layout, attention

Tensors = tuple[Tensor, ...]


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """B 1, T 8,192, 16 heads, bfloat16, not causal; small float32 cases for `quick` and on the CPU."""
    if quick or device.type == "cpu":
        for training in (False, True):
            yield attention_case(256, 2, 64, 64, 50, torch.float32, training)
        return
    for training in (False, True):
        for D in (64, 128):
            for block in (64, 128):
                for density in (50, 25, 10):
                    yield attention_case(8192, 16, D, block, density, torch.bfloat16, training)


def attention_case(T: int, H: int, D: int, block: int, density: int, dtype: torch.dtype, training: bool) -> Case:
    def make(device: torch.device, generator: torch.Generator) -> list[tuple[Any, ...]]:
        drawn = [torch.randn(1, H, T, D, device=device, generator=generator).to(dtype) for _ in range(4)]
        mask = torch.rand(H, T // block, T // block, device=device, generator=generator) * 100 < density
        # Dense attention has no empty rows, either.
        mask[..., 0] = True
        return [(*drawn, Layout.from_mask(mask, block))]

    run = _trained if training else _inferred
    result = partial(_first_head, training=training)
    share = density / 100
    # Blocks of the layout: two products of the forward pass, and five more of the backward pass.
    flops = int((7 if training else 2) * 2 * H * T * T * D * share)
    return Case(
        room="blocksparse",
        name="attention_training" if training else "attention",
        parameters={"T": T, "H": H, "D": D, "block": block, "density": density},
        dtype=dtype,
        make=make,
        providers=(
            Provider("gossamer", run(attention), ours=True, result=result, capturable=True),
            Provider(
                "dense SDPA, cuDNN", run(_dense), result=partial(_dense_result, training=training), capturable=True
            ),
            *_flex(run, result),
            *_cudnn(result, training, block, D),
            *_blksprs(run, training, block, D),
        ),
        reference=partial(_exact, training=training),
        bytes=(8 if training else 4) * H * T * D * dtype.itemsize,
        flops=flops,
        grad=training,
        sweep="density",
        error=_error,
        # Weights and their gradients are rounded to 16 bits for the products of a backward pass.
        budget=2e-2 if training and dtype.itemsize == 2 else None,
    )


def _error(got: Tensors, want: Tensors) -> float:
    """Largest error of a row, over its norm or the mean norm of rows, whichever is more: a short one may be a sum
    that cancels, which no relative error can judge."""
    errors = []
    for a, b in zip(got, want, strict=True):
        norm = b.norm(dim=-1)
        errors.append(((a.double() - b).norm(dim=-1) / norm.clamp(min=norm.mean())).max())
    return float(torch.stack(errors).max().nan_to_num(nan=torch.inf))


def _inferred(forward: Callable[..., Tensor]) -> Callable[..., Tensors]:
    def call(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, layout: Any) -> Tensors:
        return (forward(q, k, v, layout),)

    return call


def _trained(forward: Callable[..., Tensor]) -> Callable[..., Tensors]:
    def call(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, layout: Any) -> Tensors:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = forward(*leaves, layout)
        return out.detach(), *torch.autograd.grad(out, leaves, grad)

    return call


def _first_head(output: Tensors, *_: Any, training: bool) -> Tensors:
    """Head 0 is looked at: float64 for all of them would take longer than everything that is timed."""
    return tuple(x[:, 0] for x in output)


def _dense(q: Tensor, k: Tensor, v: Tensor, layout: Any) -> Tensor:
    """Every block, by cuDNN on the GPU: PyTorch's own choice can be half as fast on Hopper."""
    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16):
        return F.scaled_dot_product_attention(q, k, v)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v)


def _dense_result(
    output: Tensors, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, layout: Layout, training: bool
) -> Tensors:
    """Dense attention attends to every block, so its error is that against its own reference."""
    own, wanted = (_exact(q, k, v, grad, which, training) for which in (None, layout))
    got = _first_head(output, training=training)
    return tuple(a + (b.double() - c) for a, b, c in zip(wanted, got, own))


def _exact(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, layout: Layout | None, training: bool) -> Tensors:
    """Head 0 in float64, some queries at a time."""
    step, scale = 1024, q.shape[3] ** -0.5
    queries, keys, values, grads = (x[0, 0].double() for x in (q, k, v, grad))
    outs, dqs, dk, dv = [], [], torch.zeros_like(keys), torch.zeros_like(values)
    for first in range(0, len(queries), step):
        x, g = queries[first : first + step], grads[first : first + step]
        s = x @ keys.t() * scale
        if layout is not None:
            block = layout.block_size[0]
            rows = torch.arange(first, first + len(x), device=q.device) // block
            s = s.masked_fill(~layout.to_dense()[0, rows].repeat_interleave(block, 1), -torch.inf)
        p = s.softmax(-1)
        out = p @ values
        outs.append(out)
        if training:
            ds = p * (g @ values.t() - (g * out).sum(-1, keepdim=True)) * scale
            dqs.append(ds @ keys)
            dk += ds.t() @ x
            dv += p.t() @ g
    whole = (torch.cat(outs)[None],)
    return (*whole, torch.cat(dqs)[None], dk[None], dv[None]) if training else whole


_FLEX_TILES = {
    **dict.fromkeys(("BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"), 64),
    # One group of warps for 64 rows: of heads of 128 it would take two, as for its own 128 rows.
    "fwd_num_warps": 4,
}


_compiling_for: list[int] = []
"""The blocks that FlexAttention is compiled for, by a thread of autograd's."""


@cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    fit_backward_tiles()
    return torch.compile(flex_attention, fullgraph=True, dynamic=False)


def fit_backward_tiles() -> None:
    """Lets PyTorch compile FlexAttention's backward pass for blocks of 64 on Hopper: it drops the only tiles that it
    has there, 64 x 128, before it looks at those that were asked for (pytorch#176025)."""
    from torch._inductor.choices import InductorChoices

    own = InductorChoices.get_flex_attention_bwd_configs

    def configs(*args: Any, **kwargs: Any) -> list[Any]:
        found: list[Any] = own(*args, **kwargs)
        if _compiling_for != [64]:
            return found
        sizes = dict.fromkeys(("block_m1", "block_n1", "block_m2", "block_n2"), 64)
        return [replace(found[-1], num_stages=3, num_warps=4, **sizes)]

    InductorChoices.get_flex_attention_bwd_configs = configs  # type: ignore[method-assign]


def _flex(run: Callable[..., Any], result: Callable[..., Tensors]) -> list[Provider]:
    """FlexAttention with every present block as a full one, by both backends for long sequences: its own kernel in
    Triton, and FlashAttention's where that is installed."""

    def prepare(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, layout: Layout) -> tuple[Any, ...]:
        from torch.nn.attention.flex_attention import BlockMask

        mask = layout.to_dense()[None]
        counts = mask.sum(-1, dtype=torch.int32)
        order = torch.argsort(mask.int(), dim=-1, descending=True, stable=True).int()
        none = torch.zeros_like(counts), order
        given = {"BLOCK_SIZE": layout.block_size, "seq_lengths": layout.size}
        return q, k, v, grad, BlockMask.from_kv_blocks(*none, counts, order, **given)

    def flex(q: Tensor, k: Tensor, v: Tensor, mask: Any, backend: str) -> Any:
        # Its tiles must divide the blocks, and for blocks of 64 it does not choose them so by itself.
        tiles = _FLEX_TILES if mask.BLOCK_SIZE[0] == 64 and backend == "TRITON" else {}
        _compiling_for[:] = [mask.BLOCK_SIZE[0]]
        return _compiled_flex()(q, k, v, block_mask=mask, kernel_options={"BACKEND": backend, **tiles})

    def prepare_flash(*inputs: Any) -> tuple[Any, ...]:
        import flash_attn.cute  # type: ignore[import-not-found]  # noqa: F401

        return prepare(*inputs)

    return [
        Provider(
            f"FlexAttention, {backend}",
            run(partial(flex, backend=backend)),
            prepare=prepared,
            result=result,
            devices=("cuda",),
            capturable=True,
        )
        for backend, prepared in (("TRITON", prepare), ("FLASH", prepare_flash))
    ]


def _cudnn(result: Callable[..., Tensors], training: bool, block: int, d: int) -> list[Provider]:
    """cuDNN's block-sparse attention, from lists of keys made beforehand; blocks of 128 with heads of 128 alone."""
    if block not in (64, 128) or d not in (64, 128) or (block, d) == (128, 64):
        return []

    def prepare(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, layout: Layout) -> tuple[Any, ...]:
        from cudnn import block_sparse_attention as bsa  # type: ignore[import-not-found]

        mask = layout.to_dense()[None]
        counts = mask.sum(-1, dtype=torch.int32)
        # An even number of slots, which some of its kernels ask for.
        slots = min(-(-int(counts.max()) // 2) * 2, mask.shape[-1])
        order = torch.argsort(mask.int(), dim=-1, descending=True, stable=True).int()[..., :slots].contiguous()
        given = {"block_sparse_num": slots, "q2k_block_nums": counts, "sparse_block_size": block}
        return q, k, v, grad, bsa, order, given

    def call(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, bsa: Any, order: Tensor, given: dict[str, Any]) -> Tensors:
        out, lse = bsa.block_sparse_attention_forward(q, k, v, order, **given)
        if not training:
            return (out,)
        found = bsa.block_sparse_attention_backward(grad, q, k, v, out, lse, order, **given)
        return (out, *tuple(found)[:3])

    return [
        Provider(
            "cuDNN block-sparse",
            call,
            prepare=prepare,
            result=result,
            devices=("cuda",),
        )
    ]


def _blksprs(run: Callable[..., Any], training: bool, block: int, d: int) -> list[Provider]:
    """blksprs on compressed operands, its lookup tables made beforehand; its blocks are square in heads, too, and for
    blocks of 128 its attention raises."""
    if find_spec("blksprs") is None or d % block or block > 64:
        return []
    from blksprs.ops.conversion import to_dense, to_sparse  # type: ignore[import-not-found]
    from blksprs.ops.flash_attention import (  # type: ignore[import-not-found]
        flash_attention,
        flash_attention_build_layout_cache,
    )

    def prepare(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, layout: Layout) -> tuple[Any, ...]:
        whole = torch.ones(q.shape[1], q.shape[2] // block, d // block, device=q.device, dtype=torch.bool)
        given = [to_sparse(x[0].contiguous(), whole, block) for x in (q, k, v, grad)]
        mask = layout.to_dense()
        sizes = whole.shape[1], whole.shape[1], whole.shape[2]
        tables = flash_attention_build_layout_cache(mask, whole, whole, whole, *sizes, whole, whole.shape[2])
        return *given, (whole, mask, tables)

    def forward(q: Tensor, k: Tensor, v: Tensor, given: Any) -> Any:
        whole, mask, tables = given
        return flash_attention(q, whole, k, whole, v, whole, mask, block, layout_cache=tables)

    def result(output: Tensors, q: Tensor, *_: Any) -> Tensors:
        whole = torch.ones(q.shape[1], q.shape[2] // block, d // block, device=q.device, dtype=torch.bool)
        return tuple(to_dense(x, whole, block)[:1] for x in output)

    return [Provider("blksprs", run(forward), prepare=prepare, result=result, devices=("cuda",))]
