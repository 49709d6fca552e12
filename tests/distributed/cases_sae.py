"""encode and decode of a group, against those of one process on the whole."""

import math
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gossamer import gemm, sae
from gossamer.rowsparse import Rows, pack
from gossamer.sae.encode_path import RANKED
from gossamer.sae.sharded import add_parts
from gossamer.testing import assert_close, assert_exact
from tests.sae.dense import encode_with_l0, valued

NAN, INF = math.nan, math.inf
ACTIVATIONS = ("relu", "jumprelu", "topk", "batchtopk")


def cuts(n: int, world: int, draw: random.Random) -> list[int]:
    """Where slices begin and end: uneven, and now and then empty."""
    return [0, *sorted(draw.randint(0, n) for _ in range(world - 1)), n]


def whole(shape: tuple[int, ...], limit: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Small whole numbers: no dtype rounds their products and sums, and many of them tie."""
    return torch.randint(-limit, limit + 1, shape).to(device, dtype)


def part(tensor: Tensor | None, ends: slice) -> Tensor | None:
    """This rank's slice of the last dimension, as a leaf; a scalar is no matter of slices."""
    if tensor is None or tensor.dim() == 0:
        return tensor
    return tensor[..., ends].detach().clone(memory_format=torch.contiguous_format).requires_grad_(tensor.requires_grad)


def encode(*args: Any, group: Any = None, **options: Any) -> Rows:
    return sae.encode(*args, **options, group=dist.group.WORLD if group is None else group)


def decode(*args: Any, group: Any = None) -> Tensor:
    return sae.decode(*args, group=dist.group.WORLD if group is None else group)


def encode_on_ranks(*args: Any, group: Any = None, **options: Any) -> tuple[Rows, Tensor]:
    """(this rank's latents, L0 over all ranks)"""
    rows = encode(*args, group=group, **options)
    return rows, add_parts(rows.l0, group)


def mine(ends: slice, x: Tensor, W: Tensor, b: Tensor | None, **options: Any) -> tuple[Rows, Tensor]:
    sliced = {name: part(options.pop(name), ends) for name in ("threshold", "scale") if name in options}
    return encode_on_ranks(x, part(W, ends), part(b, ends), **valued(**sliced, **options))


def columns_of(rows: Rows) -> list[list[int]]:
    rows = rows.complete()
    return [rows.indices[first : first + count].tolist() for first, count in rows.spans.t().tolist()]


def check(got: tuple[Rows, Tensor], want: tuple[Rows, Tensor], ends: slice) -> None:
    (rows, l0), (reference, reference_l0) = got, want
    dense = reference.to_dense()[..., ends]
    assert_exact(rows.to_dense(), dense.double())
    counts = (dense.flatten(0, -2) if dense.dim() > 1 else dense[None]).ne(0).sum(1)
    assert rows.shape == tuple(dense.shape) and rows.dtype is dense.dtype
    assert rows.counts.tolist() == counts.tolist()
    assert all(held == sorted(set(held)) for held in columns_of(rows))
    assert l0.dtype is reference_l0.dtype and torch.equal(l0, reference_l0)
    assert torch.equal(sae.count_fired(rows), sae.count_fired(reference)[ends])


def draws(activation: str, rank: int, world: int, device: torch.device) -> None:
    draw = random.Random(7)
    dtypes = [torch.float32, torch.bfloat16, torch.float16] + [torch.float64] * (device.type == "cpu")
    compared = []
    for _ in range(60):
        leading = tuple(draw.randint(0, 4) for _ in range(draw.randint(0, 3)))
        d, n, dtype = draw.randint(0, 6), draw.randint(1, 40), draw.choice(dtypes)
        x, W = whole((*leading, d), 2, dtype, device), whole((d, n), 1, dtype, device)
        b = whole((n,), 3, torch.float32, device) / 4 if draw.random() < 0.7 else None
        options: dict[str, Any] = {"activation": activation}
        if draw.random() < 0.5:
            options["b_dec"] = whole((d,), 1, torch.float32, device)
        if activation == "jumprelu":
            options["threshold"] = whole(draw.choice([(n,), ()]), 3, torch.float32, device)
        if activation in RANKED:
            options["k"] = draw.randint(1, n)
            if draw.random() < 0.3:
                options["scale"] = torch.randint(1, 4, (n,)).to(device, dtype)
        if "topk" not in activation and draw.random() < 0.6:
            options["capacity"] = draw.randint(1, 8)
        bounds = cuts(n, world, draw)
        ends = slice(bounds[rank], bounds[rank + 1])
        compared.append((mine(ends, x, W, b, **options), encode_with_l0(x, W, b, **valued(**options)), ends))
    for got, want, ends in compared:
        check(got, want, ends)


def case_relu(rank: int, world: int, device: torch.device) -> None:
    draws("relu", rank, world, device)


def case_jumprelu(rank: int, world: int, device: torch.device) -> None:
    draws("jumprelu", rank, world, device)


def case_topk(rank: int, world: int, device: torch.device) -> None:
    draws("topk", rank, world, device)


def case_abstopk(rank: int, world: int, device: torch.device) -> None:
    draws("abstopk", rank, world, device)


def case_batchtopk(rank: int, world: int, device: torch.device) -> None:
    draws("batchtopk", rank, world, device)


def case_ties(rank: int, world: int, device: torch.device) -> None:
    """By hand: every latent ties, on all ranks."""
    ends = slice(5 * rank, 5 * rank + 5)
    W = torch.ones(1, 5 * world, device=device)
    W[0, 5 * world - 1] = 2
    x = torch.tensor([[1.0], [2.0], [1.0]], device=device)
    rows = [mine(ends, x, W, None, activation=name, k=3)[0] for name in ("topk", "batchtopk")]
    found = [[[5 * rank + i for i in row] for row in columns_of(each)] for each in rows]
    last = 5 * world - 1
    # 4, then the twos in order of row and column: the row of twos takes what is left before the third row's 2.
    wanted = [[[0, 1, last]] * 3, [[last], [*range(7), last], []]]
    for each, expected in zip(found, wanted):
        assert each == [[column for column in row if ends.start <= column < ends.stop] for row in expected]


def case_not_a_number_and_infinity(rank: int, world: int, device: torch.device) -> None:
    b = torch.tensor([0.0, NAN, 3.0, -NAN, INF, -INF, -1.0, 2.0, -0.0, NAN], device=device)
    # One NaN is as large as another, whatever else its bits say.
    b.view(torch.int32)[9] |= 0x3FFFFF
    compared = []
    for dtype in (torch.float32, torch.bfloat16):
        x, W = torch.zeros(3, 4, device=device, dtype=dtype), torch.zeros(4, 10, device=device, dtype=dtype)
        for first in range(11):
            bounds = [0, *[first] * (world - 1), 10]
            ends = slice(bounds[rank], bounds[rank + 1])
            for options in (
                {"activation": "topk", "k": 2},
                {"activation": "topk", "k": 4},
                {"activation": "batchtopk", "k": 2},
                {"activation": "batchtopk", "k": 4},
            ):
                compared.append((mine(ends, x, W, b, **options), encode_with_l0(x, W, b, **valued(**options)), ends))
    for got, want, ends in compared:
        check(got, want, ends)


def case_nothing_to_keep(rank: int, world: int, device: torch.device) -> None:
    W = torch.ones(4, 6 * world, device=device)
    ends = slice(6 * rank, 6 * rank + 6)
    for shape in ((3, 4), (0, 4), (2, 0, 4), (4,)):
        x = torch.zeros(shape, device=device)
        for activation in ACTIVATIONS:
            options = {"k": 5} if "topk" in activation else {}
            if activation == "jumprelu":
                options = {"threshold": torch.zeros((), device=device)}  # type: ignore[dict-item]
            rows, l0 = mine(ends, x, W, None, activation=activation, **options)
            assert rows.shape == (*shape[:-1], 6) and not rows.counts.any()
            out = decode(rows, W.t()[ends].contiguous(), torch.ones(4, device=device))
            assert out.shape == shape and (out == 1).all() and not l0.any()


def case_k_above_everything(rank: int, world: int, device: torch.device) -> None:
    """No rank knows how many latents there are: all that is positive is kept."""
    x, W = whole((5, 3), 2, torch.float32, device), whole((3, 4 * world), 2, torch.float32, device)
    ends = slice(4 * rank, 4 * rank + 4)
    for activation in ("topk", "batchtopk"):
        rows, _ = mine(ends, x, W, None, activation=activation, k=100)
        assert_exact(rows.to_dense(), (x @ W).relu()[:, ends].double())


def gradients(ends: slice, device: torch.device, activation: str, kind: str, sharded: bool) -> list[Tensor]:
    """Loss and gradients of x, W_enc, W_dec, b_enc, b_dec and threshold: this rank's slices of those of the whole."""
    capacity = 2 if kind == "overflow" else None
    generator = torch.Generator().manual_seed(3)
    dtype = torch.float64 if device.type == "cpu" else torch.float32

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).to(device, dtype).requires_grad_()

    x, W_enc, W_dec, b_enc, b_dec = drawn(2, 3, 7), drawn(7, 30), drawn(30, 7), drawn(30), drawn(7)
    threshold, weights = drawn(*[30] * (kind != "scalar")), drawn(2, 3, 7).detach()
    options: dict[str, Any] = {"activation": activation, "b_dec": b_dec}
    if activation == "jumprelu":
        options |= {"threshold": threshold, "bandwidth": 0.8, "ste_to_input": kind == "ste"}
    if activation in ("topk", "batchtopk"):
        options |= {"k": 6, "scale": (W_dec.detach() ** 2).sum(1)}
    if "topk" not in activation:
        options |= {"capacity": capacity}
    if sharded:
        W_enc, W_dec, b_enc = part(W_enc, ends), part(W_dec.t(), ends).detach().t().clone(), part(b_enc, ends)  # type: ignore
        W_dec.requires_grad_()
        for name in ("threshold", "scale"):
            if name in options:
                options[name] = part(options[name], ends)
        rows, l0 = encode_on_ranks(x, W_enc, b_enc, **valued(**options))
        out = decode(rows, W_dec, b_dec)
    else:
        rows, l0 = encode_with_l0(x, W_enc, b_enc, **valued(**options))
        out = sae.decode(rows, W_dec, b_dec)
    loss = (out.sin() * weights).sum() + 0.1 * (l0 * torch.arange(1, 7, device=device).view(2, 3)).sum()
    leaves = [x, W_enc, W_dec, b_enc, b_dec]
    leaves += [options["threshold"]] if activation == "jumprelu" else []
    grads = list(torch.autograd.grad(loss, leaves))
    if not sharded:
        grads = [
            grads[0],
            grads[1][:, ends],
            grads[2][ends],
            grads[3][ends],
            grads[4],
            *(part(g, ends) for g in grads[5:]),
        ]  # type: ignore
    return [loss.detach(), out.detach(), *grads]


def case_gradients(rank: int, world: int, device: torch.device) -> None:
    draw, compared = random.Random(1), []
    for activation in ACTIVATIONS:
        for kind in ("", "overflow", "scalar", "ste", "nothing on rank 0"):
            bounds = [0] * world + [30] if kind.startswith("nothing") else cuts(30, world, draw)
            ends = slice(bounds[rank], bounds[rank + 1])
            got = gradients(ends, device, activation, kind, True)
            compared.append((f"{activation} {kind}", got, gradients(ends, device, activation, kind, False)))
    tolerance = 1e-11 if device.type == "cpu" else 2e-4
    for kind, got, want in compared:
        for name, ours, theirs in zip(("loss", "out", "x", "W_enc", "W_dec", "b_enc", "b_dec", "threshold"), got, want):
            message = f"{kind} {name}: {(ours - theirs).abs().max() if ours.numel() else 0}"
            assert torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance), message


def case_only_what_needs_a_gradient_is_reduced(rank: int, world: int, device: torch.device) -> None:
    """And what is sent is no [M, d_sae]."""
    m, n, k = 64, 500, 4
    sent: list[int] = []
    real = dist.all_reduce, dist.all_gather

    def reduce(tensor: Tensor, **options: Any) -> None:
        sent.append(tensor.numel() * tensor.element_size())
        real[0](tensor, **options)

    def gather(out: list[Tensor], tensor: Tensor, **options: Any) -> None:
        sent.append(tensor.numel() * tensor.element_size())
        real[1](out, tensor, **options)

    dist.all_reduce, dist.all_gather = reduce, gather
    try:
        x = torch.randn(m, 12, device=device)
        W = torch.randn(12, n, device=device, requires_grad=True)
        b_dec = torch.zeros(12, device=device, requires_grad=True)
        forward, backward = {}, {}
        for activation in ("relu", "topk", "batchtopk"):
            options = {} if activation == "relu" else {"k": k}
            rows = encode(x, W, **valued(activation, b_dec=b_dec, **options))
            forward[activation] = sent.copy()
            sent.clear()
            rows.packed.values.sum().backward()
            backward[activation] = sent.copy()
            sent.clear()
    finally:
        dist.all_reduce, dist.all_gather = real
    assert forward == {"relu": [], "topk": [4 * m * k], "batchtopk": [4096] * 4 + [8 * (m + 1)]}
    assert backward == {name: [12 * 4] for name in forward}


def case_decode(rank: int, world: int, device: torch.device) -> None:
    """The sum over ranks is no less exact than one product, and b_dec is in it once."""
    compared = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        acts = torch.nn.functional.relu(torch.randn(2, 3, 40 * world) - 0.5).to(device, dtype)
        W, b = torch.randn(40 * world, 9).to(device, dtype), 10 + torch.randn(9).to(device)
        ends = slice(40 * rank, 40 * rank + 40)
        for capacity in (None, "exact"):
            rows = pack(acts[..., ends].contiguous(), capacity=capacity)  # type: ignore[arg-type]
            compared.append((decode(rows, W[ends], b), acts, W, b))
    for out, acts, W, b in compared:
        assert out.dtype is W.dtype
        plain = (acts.float() @ W.float() + b).to(W.dtype) if W.dtype is torch.float32 else acts @ W + b.to(W.dtype)
        assert_close(out, reference64=acts.double().cpu() @ W.double().cpu() + b.double().cpu(), plain=plain)


def case_autocast(rank: int, world: int, device: torch.device) -> None:
    x, W = whole((5, 6), 2, torch.float32, device), whole((6, 8 * world), 1, torch.float32, device).requires_grad_()
    b = whole((8 * world,), 3, torch.float32, device)
    ends = slice(8 * rank, 8 * rank + 8)
    compared = []
    for activation in ("relu", "topk", "batchtopk"):
        options = {} if activation == "relu" else {"k": 3}
        with torch.autocast(device.type, torch.bfloat16):
            got = mine(ends, x, W, b, activation=activation, **options)
            want = encode_with_l0(x, W, b, **valued(activation, **options))
            out = decode(got[0], W.t()[ends], torch.ones(6, device=device))
            whole_out = sae.decode(want[0], W.t(), torch.ones(6, device=device))
        out.float().sum().backward()
        compared.append((got, want, out, whole_out))
    for got, want, out, whole_out in compared:
        assert got[0].dtype is torch.bfloat16 and out.dtype is torch.bfloat16
        check(got, want, ends)
        assert_exact(out, whole_out.double())


def case_groups(rank: int, world: int, device: torch.device) -> None:
    """A group is not always everyone, and its ranks are its own."""
    members = [0, world - 1]
    group = dist.new_group(members)
    x, W = whole((5, 3), 2, torch.float32, device), whole((3, 20), 2, torch.float32, device)
    if rank in members:
        place = members.index(rank)
        ends = slice(10 * place, 10 * place + 10)
        compared = []
        for activation in ("topk", "batchtopk"):
            got = mine(ends, x, W, None, activation=activation, k=3, group=group)
            compared.append((got, encode_with_l0(x, W, **valued(activation, k=3))))
        out = decode(got[0], W.t()[ends].contiguous(), group=group)
        for got, want in compared:
            check(got, want, ends)
        assert_exact(out, sae.decode(want[0], W.t()).double())
    else:
        with pytest.raises(ValueError, match=r"sae\.encode: group must contain this process, of rank 1"):
            encode(x, W, activation="relu", group=group)


def case_errors(rank: int, world: int, device: torch.device) -> None:
    x, W = torch.ones(2, 3, device=device), torch.ones(3, 4, device=device)
    with pytest.raises(ValueError, match=r"encode: capacity belongs to .* got 2 for .* Leave"):
        encode(x, W, activation=gemm.TopK(2), capacity=2)
    with pytest.raises(ValueError, match=r"sae\.encode: x must have shape .* d_in = 3 like W_enc"):
        encode(x[:, :2], W, activation="relu")
    with pytest.raises(ValueError, match=r"sae\.encode: activation must be .* got 'batchtopk'"):
        encode(x, W, activation="batchtopk")
    with pytest.raises(TypeError, match=r"sae\.decode: acts must be .* got Tensor. Pack"):
        decode(x, W)
    rows = encode(x, W, activation="relu")
    with pytest.raises(ValueError, match=r"sae\.decode: W_dec must have shape \[d_sae, d_in\]"):
        decode(rows, W)
    with pytest.raises(ValueError, match=r"sae\.decode: b_dec must have shape"):
        decode(rows, W.t(), torch.ones(2, device=device))
    with pytest.raises(TypeError, match=r"sae\.encode: x and W_enc must have one dtype"):
        encode(x.half(), W, activation=gemm.BatchTopK(1))


def case_compile(
    rank: int, world: int, device: torch.device, kinds: tuple[str, ...] = ("jumprelu", "topk", "batchtopk")
) -> None:
    """In one graph."""
    if world > 2:
        return  # the same graphs again, and to trace them takes time
    x, W = torch.randn(6, 8, device=device), torch.randn(8, 15 * world, device=device)
    mine = W[:, 15 * rank : 15 * rank + 15].clone().requires_grad_()
    threshold = torch.full((15,), 0.3, device=device, requires_grad=True)
    compared = []
    for activation in kinds:
        options = {"threshold": threshold, "bandwidth": 0.5} if activation == "jumprelu" else {"k": 4}

        def loss(x: Tensor, activation: str = activation, options: dict[str, Any] = options) -> Tensor:
            rows, l0 = encode_on_ranks(x, mine, **valued(activation, **options))
            return decode(rows, mine.t()).sin().sum() + l0.sum()

        torch._dynamo.reset()
        compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
        both = [function(x) for function in (compiled, loss)]
        compared.append([(value.detach(), *torch.autograd.grad(value, mine)) for value in both])
    for got, want in compared:
        torch.testing.assert_close(got, want)
