"""Block-sparse attention as a module, against a plain one that masks a matrix of scores."""

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer import blocksparse
from gossamer.blocksparse import Layout, select_blocks
from gossamer.nn import BlockSparseAttention
from gossamer.testing import assert_close

THETA = 100.0
"""The base of the rotary embeddings that `Reference` computes."""


class Reference(nn.Module):
    """The same parameters, by plain PyTorch; what a query does not meet is masked in a matrix of scores."""

    def __init__(self, module: BlockSparseAttention, dtype: torch.dtype) -> None:
        super().__init__()
        self.theta = None if module.rotary_emb is None else THETA
        self.head_dim, self.causal, self.clips = module.head_dim, module.causal, []
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            given = getattr(module, name)
            made = nn.Linear(given.in_features, given.out_features, bias=given.bias is not None, dtype=dtype)
            self.add_module(name, made.to(given.weight.device))
        self.relative_tables = nn.ParameterList(
            nn.Parameter(torch.zeros_like(table, dtype=dtype)) for table in module.relative_tables
        )
        state = {k: v for k, v in module.state_dict().items() if "rotary" not in k}
        self.load_state_dict(state, strict=True)

    def turned(self, x: Tensor) -> Tensor:
        if self.theta is None:
            return x
        # Angles are computed in float32 there and here.
        frequencies = self.theta ** -(torch.arange(0, self.head_dim, 2, device=x.device).float() / self.head_dim)
        angles = (torch.arange(x.shape[2], device=x.device)[:, None].float() * frequencies).repeat(1, 2)
        low, high = x.chunk(2, -1)
        return (x * angles.cos().to(x.dtype) + torch.cat([-high, low], -1) * angles.sin().to(x.dtype)).to(x.dtype)

    def forward(
        self, x: Tensor, context: Tensor, present: Tensor, lengths: Tensor | None = None, positions: Any = ()
    ) -> Tensor:
        q, k, v = (
            layer(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer, y in ((self.q_proj, x), (self.k_proj, context), (self.v_proj, context))
        )
        q, k = self.turned(q), self.turned(k)
        k, v = (y.repeat_interleave(q.shape[1] // k.shape[1], 1) for y in (k, v))
        s = q @ k.transpose(2, 3)
        for table, (of_q, of_k) in zip(self.relative_tables, positions):
            clip = table.shape[1] // 2
            row = (of_k[..., None, :] - of_q[..., None]).clamp(-clip, clip) + clip
            row = row.view(-1, 1, *row.shape[-2:]).expand(*s.shape[:2], -1, -1)
            s = s + (q @ table.transpose(1, 2)).gather(3, row)
        tq, tk = s.shape[2:]
        i, j = torch.arange(tq, device=x.device)[:, None], torch.arange(tk, device=x.device)
        if self.causal:
            present = present & (j <= i + tk - tq)
        if lengths is not None:
            present = present & (j < lengths[:, None, None, None])
            if self.causal:
                present = present & (i + tk - tq < lengths[:, None, None, None])
        p = (s * self.head_dim**-0.5).masked_fill(~present, -math.inf).softmax(-1).nan_to_num(0)
        return self.o_proj((p @ v).transpose(1, 2).flatten(2))


def elements(layout: Layout) -> Tensor:
    height, width = layout.block_size
    wide = layout.to_dense().repeat_interleave(height, -2).repeat_interleave(width, -1)
    return wide[..., : layout.size[0], : layout.size[1]]


def random_layout(device: torch.device, lead: tuple[int, ...], tq: int, tk: int) -> Layout:
    g = torch.Generator(device).manual_seed(0)
    mask = torch.rand(*lead, -(-tq // 16), -(-tk // 16), device=device, generator=g) < 0.5
    mask[..., 0] = True
    return Layout.from_mask(mask, 16, size=(tq, tk))


def compare(
    module: BlockSparseAttention, x: Tensor, context: Tensor | None, layout: Layout, *, lengths: Tensor | None = None,
    positions: Any = (), given: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Result and gradients of x and of every parameter."""
    ours = module(x.requires_grad_(), context, lengths=lengths, **(given or {}))
    # All of one sign: sums that cancel have no scale by which their rounding could be judged.
    towards = torch.linspace(0.5, 1.5, ours.numel(), device=x.device, dtype=x.dtype).view_as(ours)
    grads = torch.autograd.grad(ours, [x, *module.parameters()], towards)
    results = []
    for dtype in (torch.float64, x.dtype):
        reference, leaf = Reference(module, dtype), x.detach().to(dtype).requires_grad_()
        other = leaf if context is None else context.to(dtype)
        out = reference(leaf, other, elements(layout), lengths, positions)
        names = dict(reference.named_parameters())
        leaves = [leaf, *(names[name] for name, _ in module.named_parameters())]
        results.append((out, *torch.autograd.grad(out, leaves, towards.to(dtype))))
    labels = ["out", "x", *(name for name, _ in module.named_parameters())]
    # Of one tensor plain PyTorch may be nearly exact by luck: what it errs by in its worst is allowed in each.
    errors = [(plain - want).abs().max() / want.abs().max() for want, plain in zip(*results) if want.any()]
    worst = torch.stack(errors).max()
    for name, a, want, plain in zip(labels, (ours, *grads), *results):
        unlucky = want + (plain - want).abs().clamp(min=float(worst * want.abs().max()))
        assert_close(a, reference64=want, plain=unlucky, name=name)


def made(device: torch.device, **options: Any) -> BlockSparseAttention:
    torch.manual_seed(0)
    module = BlockSparseAttention(48, 4, device=device, **options)
    for table in module.relative_tables:
        nn.init.normal_(table)
    return module


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2, "bias": True}, {"head_dim": 16}], ids=str)
def test_given_layout(options: dict[str, Any], causal: bool, device: torch.device) -> None:
    layout = random_layout(device, (4,), 50, 50)
    module = made(device, layout=layout, causal=causal, **options)
    x = torch.randn(2, 50, 48, device=device)
    compare(module, x, None, layout, lengths=torch.tensor([50, 20], device=device))


def test_context_and_layout_of_the_call(device: torch.device) -> None:
    layout = random_layout(device, (), 20, 50)
    x, context = torch.randn(2, 20, 48, device=device), torch.randn(2, 50, 48, device=device)
    compare(made(device, causal=True), x, context, layout, given={"layout": layout})


def test_rotary_embeddings(device: torch.device) -> None:
    layout = random_layout(device, (2, 1), 40, 40)
    module = made(device, layout=layout, num_kv_heads=2, rope_theta=THETA)
    compare(module, torch.randn(2, 40, 48, device=device), None, layout)


def test_relative_positions(device: torch.device) -> None:
    layout = random_layout(device, (2, 4), 40, 40)
    module = made(device, layout=layout, relative_clips=(6, 2))
    order, pitch = torch.arange(40, device=device), torch.arange(80, device=device).view(2, 40) * 7 % 5
    positions = [(order, order), (pitch, pitch)]
    x = torch.randn(2, 40, 48, device=device)
    compare(module, x, None, layout, positions=positions, given={"relative_positions": [order, pitch]})
    compare(module, x, None, layout, positions=[(order, order)] * 2)


def test_selected_blocks(device: torch.device) -> None:
    lengths = torch.tensor([64, 40], device=device)
    select = functools.partial(select_blocks, block_size=16, top_k=2, window=1)
    module = made(device, layout=select, causal=True)
    x = torch.randn(2, 64, 48, device=device)
    q, k, _ = module.project(x)
    layout = select(q, k, causal=True, lengths=lengths)
    assert 0 < int(layout.nnz) < 2 * 4 * 10
    compare(module, x, None, layout, lengths=lengths)


@pytest.mark.parametrize("bias", [False, True])
def test_takes_the_place_of_multihead_attention(bias: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    dense = nn.MultiheadAttention(48, 4, bias=bias, batch_first=True, device=device)
    full = Layout.from_mask(torch.ones(3, 3, device=device).bool(), 16, size=(40, 40))
    module = BlockSparseAttention.from_multihead(dense.eval(), full)
    x = torch.randn(2, 40, 48, device=device)
    torch.testing.assert_close(module(x), dense(x, x, x, need_weights=False)[0], atol=1e-5, rtol=1e-5)
    assert not module.training
    with pytest.raises(ValueError, match="got one with dropout, batch_first=False"):
        BlockSparseAttention.from_multihead(nn.MultiheadAttention(48, 4, dropout=0.1))


def test_parameters() -> None:
    names = {f"{name}_proj.weight" for name in "qkvo"}
    assert set(BlockSparseAttention(48, 4).state_dict()) == names
    module = BlockSparseAttention(48, 4, 2, bias=True, rope_theta=1e4, relative_clips=(3,))
    tables = {"relative_tables.0", "rotary_emb.inv_freq"}
    assert set(module.state_dict()) == names | tables | {f"{name}_proj.bias" for name in "qkvo"}
    assert module.k_proj.weight.shape == (24, 48) and module.relative_tables[0].shape == (4, 7, 12)


@pytest.mark.native
def test_compiles(compiled, device: torch.device) -> None:
    module = made(device, layout=random_layout(device, (4,), 50, 50), relative_clips=(3,))
    x = torch.randn(2, 50, 48, device=device)
    torch.testing.assert_close(compiled(module)(x), module(x))


def test_errors() -> None:
    x = torch.randn(2, 20, 48)
    with pytest.raises(ValueError, match=r"nn.BlockSparseAttention: layout must be given"):
        BlockSparseAttention(48, 4)(x)
    with pytest.raises(TypeError, match=r"nn.BlockSparseAttention: layout must be a blocksparse.Layout, .* got int"):
        BlockSparseAttention(48, 4, layout=16)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"num_kv_heads must divide num_heads, .* got 3, 4 and 12"):
        BlockSparseAttention(48, 4, 3)
    with pytest.raises(ValueError, match=r"relative_positions must hold positions for 1 terms .* got 2"):
        layout = Layout.from_mask(torch.ones(2, 2).bool(), 16, size=(20, 20))
        BlockSparseAttention(48, 4, layout=layout, relative_clips=(3,))(x, relative_positions=[torch.arange(20)] * 2)
    with pytest.raises(ValueError, match="context must be None with rotary embeddings"):
        BlockSparseAttention(48, 4, rope_theta=1e4)(x, x)


def test_shapes_are_named(device: torch.device) -> None:
    layout = Layout.from_mask(torch.ones(2, 2, device=device).bool(), 16)
    with pytest.raises(ValueError, match=r"num_heads must divide hidden_size where head_dim is None, got 4 and 130"):
        BlockSparseAttention(130, 4, layout=layout)
    layer = BlockSparseAttention(32, 4, layout=layout, device=device)
    for x in (torch.ones(2, 32, 30, device=device), torch.ones(32, 32, device=device)):
        with pytest.raises(ValueError, match=r"x must have shape \[B, T, hidden_size\] with hidden_size = 32, got"):
            layer(x)
    with pytest.raises(ValueError, match=r"blocksparse.causal: size must be \(M, N\), two ints of at least 0, got 300"):
        blocksparse.causal(300, 32)  # type: ignore[arg-type]


def test_state_dicts_without_frequencies(device: torch.device) -> None:
    """Attention layers of other libraries save none: those of the module's own theta stay."""
    layout = Layout.from_mask(torch.ones(2, 2, device=device).bool().tril(), 16)
    one, two = (BlockSparseAttention(32, 4, 2, layout=layout, rope_theta=1e4, device=device) for _ in range(2))
    state = {name: x for name, x in one.state_dict().items() if "rotary" not in name}
    assert two.load_state_dict(state).missing_keys == [] and "rotary_emb.inv_freq" not in state
    x = torch.randn(1, 32, 32, device=device)
    assert torch.equal(one(x), two(x))


def test_a_layout_function_that_takes_too_little() -> None:
    layout = Layout.from_mask(torch.ones(2, 2).bool(), 16)
    module = BlockSparseAttention(32, 4, layout=lambda q, k: layout)
    with pytest.raises(TypeError, match=r"nn.BlockSparseAttention: layout must take q, k, causal=... and lengths="):
        module(torch.randn(1, 32, 32))
    module.layout = lambda q, k, **_: layout
    assert module(torch.randn(1, 32, 32)).shape == (1, 32, 32)


def test_positions_are_whole_numbers(device: torch.device) -> None:
    layout = Layout.from_mask(torch.ones(1, 1, 1, device=device).bool(), 16, size=(10, 10))
    module = BlockSparseAttention(32, 2, layout=layout, rope_theta=10000.0).to(device)
    x = torch.randn(2, 10, 32, device=device)
    with pytest.raises(TypeError, match=r"nn\.BlockSparseAttention: position_ids must be int32 or int64, got bool"):
        module(x, position_ids=torch.ones(2, 10, dtype=torch.bool, device=device))
    with pytest.raises(ValueError, match=r"position_ids must have shape \[T\] or \[B, T\] .* got \[9\]"):
        module(x, position_ids=torch.arange(9, device=device))
    state = {name: tensor for name, tensor in module.state_dict().items() if name != "rotary_emb.inv_freq"}
    assert len(state) < len(module.state_dict())
    module.load_state_dict(state, strict=True)


def test_a_window_is_a_window(device: torch.device) -> None:
    """What README shows: 24 keys behind a query and its own, not whole blocks of them."""
    layout = blocksparse.sliding_window((96, 96), 16, (24, 0), device=device)
    module = BlockSparseAttention(32, 4, 2, layout=layout, device=device)
    x = torch.randn(2, 96, 32, device=device)
    apart = torch.arange(96, device=device)[:, None] - torch.arange(96, device=device)
    mask = (apart >= 0) & (apart <= 24)
    q, k, v = module.project(x)
    dense = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(module(x), module.o_proj(dense.transpose(1, 2).flatten(2)), rtol=1e-4, atol=1e-5)
