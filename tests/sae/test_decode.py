"""Sparse decoding: every shape and input against dense float64."""

import itertools
import math
import time
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gossamer.rowsparse import pack
from gossamer.sae import decode
from gossamer.testing import assert_close, assert_exact, dense64, random_rows
from tests import strategies
from tests.conftest import DTYPES, MODE

NAN, INF = math.nan, math.inf

# Those of jumprelu-sae-kernels: B, d_sae, d_in, L0 for each dtype. The interpreter takes what it can bear.
CONFIGURATIONS = list(itertools.product((1, 4, 32), (256, 1024, 16384), (128, 512, 768), (1, 8, 100)))
if MODE == "interpreter":
    CONFIGURATIONS = [c for c in CONFIGURATIONS if c[0] <= 4 and c[1] <= 1024 and c[2] == 128]
# Of the largest the widest and the narrowest.
MARKED = [pytest.param(*c, marks=pytest.mark.full) if c[1:3] == (16384, 512) else c for c in CONFIGURATIONS]


def full(n: int) -> int:
    """Entries of a row that holds everything, or as many as the interpreter can bear."""
    return min(n, 200) if MODE == "interpreter" else n


@lru_cache(maxsize=1)
def configuration(
    B: int, F: int, D: int, l0: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(acts, W_dec, float64 reference, plain PyTorch)."""
    generator = strategies.seeded(B * F + D + l0, device)
    acts = random_rows((B, F), l0=l0, dtype=dtype, device=device, generator=generator, positive=True)
    W = torch.randn(F, D, device=device, generator=generator).to(dtype)
    return acts, W, acts.double() @ W.double(), acts @ W


@pytest.mark.parametrize("B, F, D, l0", MARKED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("listed", ["exact", "gathered", "as it comes"])
def test_configurations_of_the_seed(
    listed: str, dtype: torch.dtype, B: int, F: int, D: int, l0: int, device: torch.device
) -> None:
    acts, W, reference, plain = configuration(B, F, D, l0, dtype, device)
    latents = pack(acts, capacity="exact") if listed == "exact" else acts
    out = decode(latents, W, capacity=l0 if listed == "gathered" else None)
    assert out.dtype is dtype
    assert_close(out, reference64=reference, plain=plain)


@pytest.mark.kernels
def test_more_chunks_than_a_program_reads_at_a_time(
    dtype: torch.dtype, device: torch.device, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries in the first, in some and in the last of 150 chunks of a row, and a row without any."""
    from gossamer.sae._triton import decode as kernels

    scan = kernels.pack.scan_tile
    monkeypatch.setattr(kernels.pack, "scan_tile", lambda n, size, groups: scan(n, size, 32))
    chunk = 32 * 16 // dtype.itemsize
    acts = torch.zeros(3, 150 * chunk - 5, dtype=dtype, device=device)
    columns = torch.tensor([0, 1, 63 * chunk, 64 * chunk, 65 * chunk + 3, 129 * chunk, 150 * chunk - 6], device=device)
    acts[0, columns], acts[2, columns[1:4]] = 2, 3
    W = torch.randn(acts.shape[1], 24, device=device, generator=generator).to(dtype)
    with torch.no_grad():
        assert_close(decode(acts, W, capacity=20), reference64=acts.double() @ W.double(), plain=acts @ W)


@given(data=st.data())
def test_any_shape(data: st.DataObject, dtype: torch.dtype, device: torch.device) -> None:
    """Small integers, which no dtype rounds."""
    acts = data.draw(strategies.dense(dtype, device))
    n, depth = acts.shape[-1], data.draw(strategies.DEPTHS)
    W = data.draw(strategies.matrix(n, depth, dtype, device))
    b = data.draw(st.one_of(st.none(), strategies.matrix(1, depth, dtype, device).map(lambda b: b[0])))
    reference = acts.double() @ W.double()
    reference = reference if b is None else reference + b.double()
    for options in (
        {},
        {"capacity": data.draw(st.integers(1, 70))},
        {"capacity": max(n, 1)},
    ):
        out = decode(acts, W, b, **options)
        assert out.dtype is dtype
        assert_exact(out, reference, name=str(options))


@given(data=st.data())
def test_any_shape_backward(data: st.DataObject, dtype: torch.dtype, device: torch.device) -> None:
    """Gradients of acts at entries, of W_dec and of b_dec, with a capacity that some rows overflow."""
    acts = data.draw(strategies.dense(dtype, device)).clone().requires_grad_()
    n, depth = acts.shape[-1], data.draw(strategies.DEPTHS)
    W = data.draw(strategies.matrix(n, depth, dtype, device)).requires_grad_()
    b = data.draw(strategies.matrix(1, depth, dtype, device))[0].clone().requires_grad_()
    m = math.prod(acts.shape[:-1])
    grad = data.draw(strategies.matrix(m, depth, dtype, device)).reshape(*acts.shape[:-1], depth)
    flat, dense = grad.double().reshape(m, depth), acts.detach().double().reshape(m, n)
    for options in ({"capacity": data.draw(st.integers(1, 70))}, {}):
        ours = torch.autograd.grad(decode(acts, W, b, **options), (acts, W, b), grad)
        assert_exact(ours[0].reshape(m, n), (flat @ W.detach().double().t()) * (dense != 0), name=f"acts, {options}")
        assert_exact(ours[1], dense.t() @ flat, name=f"W_dec, {options}")
        assert_exact(ours[2], flat.sum(0), name=f"b_dec, {options}")


@given(data=st.data())
def test_containers(data: st.DataObject, dtype: torch.dtype, device: torch.device) -> None:
    rows = data.draw(strategies.containers(dtype, device))
    depth = data.draw(strategies.DEPTHS)
    W = data.draw(strategies.matrix(rows.num_columns, depth, dtype, device))
    b = data.draw(strategies.matrix(1, depth, dtype, device))[0]
    assert_exact(decode(rows, W, b), dense64(rows) @ W.double() + b.double())


@pytest.mark.parametrize("capacity", [40, None])
@pytest.mark.parametrize("with_bias", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize("m, n", [(7, 700), (7, 2100), (40, 5000), (600, 700), (520, 2100)])
def test_error_budget(
    capacity: int | None,
    with_bias: bool,
    m: int,
    n: int,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> None:
    """One launch or two, chunks of rows or whole rows, with rows that are empty and full, forward and backward."""
    if MODE == "interpreter" and m > 7:
        pytest.skip("large for the interpreter")
    elif MODE == "cpu" and dtype is torch.float16:
        m = min(m, 40)
    counts = [0, 1, 7, full(n)] + [20] * (m - 4)
    acts = random_rows((m, n), l0=counts, dtype=dtype, device=device, generator=generator).requires_grad_()
    d = 36 if MODE == "interpreter" else 72
    W = torch.randn(n, d, device=device, generator=generator).to(dtype).requires_grad_()
    b = torch.randn(d, device=device, generator=generator).requires_grad_() if with_bias else None
    inputs = (acts, W) if b is None else (acts, W, b)
    exact = [t.detach().double().requires_grad_() for t in inputs]

    def plain(acts: Tensor, W: Tensor, b: Tensor | None = None) -> Tensor:
        if b is not None and b.dtype is W.dtype:
            return torch.addmm(b, acts, W)
        out = acts @ W
        return out if b is None else (out + b).to(out.dtype)

    out = decode(acts, W, b, capacity=capacity)
    reference, usual = plain(*exact), plain(*inputs)
    # Where most of a few rows hold little, plain PyTorch's largest error is that of one row, and a matter of luck.
    magnitude = (exact[0].detach().square() @ exact[1].detach().square()).sqrt()
    assert_close(out, reference64=reference, plain=usual, length=n, magnitude=magnitude)
    grad = torch.randn(m, d, device=device, generator=generator).to(dtype)
    grads = torch.autograd.grad(out, inputs, grad)
    wanted = torch.autograd.grad(reference, exact, grad.double())
    usual_grads = torch.autograd.grad(usual, inputs, grad)
    for name, ours, want, other in zip(("acts", "W_dec", "b_dec"), grads, wanted, usual_grads):
        if name == "acts":
            want, other = want * (acts != 0), other * (acts != 0)
        assert_close(ours, reference64=want, plain=other, name=name)


@pytest.mark.parametrize("n", [16, 300, 2100])
def test_the_gradient_of_acts_lives_at_entries(
    n: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """For every shape, also those for which auto is the plain product."""
    acts = random_rows((6, n), l0=[0, 1, 2, 3, full(n), 5], dtype=dtype, device=device, generator=generator)
    acts.requires_grad_()
    W = random_rows((n, 8), l0=8, dtype=dtype, device=device, generator=generator, integers=True)
    decode(acts, W).sum().backward()
    assert_exact(acts.grad, W.double().sum(1) * (acts != 0))


@pytest.mark.parametrize("part", ["acts", "W_dec", "b_dec"])
@pytest.mark.parametrize("n", [40, 2100])
def test_any_layout(part: str, n: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    options = {"dtype": dtype, "device": device, "generator": generator, "integers": True}
    tensors = {
        "acts": random_rows((4, n), l0=[3, 0, 9, 30], **options),
        "W_dec": random_rows((n, 24), l0=24, **options),
        "b_dec": random_rows((24,), l0=24, **options),
    }
    for layout in ("transposed", "strided", "misaligned", "expanded"):
        changed = {**tensors, part: strategies.laid_out(tensors[part], layout)}
        if layout == "expanded" and part == "b_dec":
            changed["b_dec"] = tensors["b_dec"][:1].expand(24)
        exact = {name: tensor.double() for name, tensor in changed.items()}
        reference = exact["acts"] @ exact["W_dec"] + exact["b_dec"]
        for capacity in (5, n):
            for _ in range(1 if MODE == "interpreter" else 2):
                out = decode(*changed.values(), capacity=capacity)
                assert_exact(out, reference, name=f"{layout}, capacity {capacity}")
            leaves = [tensor.detach().requires_grad_() for tensor in changed.values()]
            assert_exact(decode(*leaves, capacity=capacity), reference, name=f"{layout}, capacity {capacity}, grad")


@pytest.mark.parametrize("n", [60, 2100])
def test_special_values(n: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    options = {"dtype": dtype, "device": device, "generator": generator, "integers": True}
    acts = random_rows((5, n), l0=4, **options)
    acts[0, 3], acts[1, 5], acts[2, 3], acts[2, n - 1], acts[3] = NAN, INF, INF, -INF, -0.0
    W = random_rows((n, 10), l0=10, **options)
    for chosen in ({}, {"capacity": 3}, {"capacity": n}):
        assert_exact(decode(acts, W, **chosen), acts.double() @ W.double(), name=str(chosen))


@pytest.mark.parametrize("n", [600, 2100])
def test_unselected_decoder_rows_do_not_show(
    n: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    # Seeded: the CPU judges a row by a sample, and a row that has its entries there is a dense product.
    options: dict[str, Any] = {"dtype": dtype, "device": device, "generator": generator, "integers": True}
    acts, W = random_rows((3, n), l0=[4, 0, 6], **options), random_rows((n, 10), l0=10, **options)
    acts[:, 11], acts[:2, 9], acts[2, 9] = 0, 0, 1
    W[11], W[9, 4] = NAN, INF
    selected = torch.where(acts[..., None] != 0, acts[..., None].double() * W.double(), 0).sum(1)
    assert_exact(decode(acts, W, capacity=20), selected)
    assert_exact(decode(pack(acts, capacity="exact"), W), selected)


def test_repeated_calls(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    """Nothing of a call stays behind for the next of the same shape: dense rows after sparse ones and back."""
    options = {"dtype": dtype, "device": device, "generator": generator, "integers": True}
    n, d = 2100, 8 if MODE == "interpreter" else 40
    W, b = random_rows((n, d), l0=d, **options), random_rows((d,), l0=d, **options)
    fillings = ([0, 0, 0], [3, 50, 1], [1, 0, 60], [9, 9, 9], [60, 60, 60], [0, 1, 0])
    for counts in fillings:
        for bias in (None, b):
            acts = random_rows((3, n), l0=counts, **options)
            reference = acts.double() @ W.double() + (0 if bias is None else bias.double())
            for capacity in (8, n):
                assert_exact(decode(acts, W, bias, capacity=capacity), reference, name=f"{counts}, {capacity}")
                out = decode(acts.reshape(3, 1, n), W, bias, capacity=capacity, out_dtype=torch.float32)
                assert out.dtype is torch.float32
                assert_exact(out.squeeze(1), reference, name=f"{counts}, {capacity}, 3-D")


@pytest.mark.parametrize("options", [{}, {"capacity": 16}], ids=str)
def test_out_dtype(
    options: dict[str, int], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """Sums are float32 whatever the inputs are: a float32 result of half inputs is a float32 result."""
    most = full(1500)
    for n, counts in ((100, [5, 100, 20, 0]), (1500, [5, most, 20, 0]), (1500, [most] * 4)):
        acts = random_rows((4, n), l0=counts, dtype=dtype, device=device, generator=generator)
        W = torch.randn(n, 64, device=device, generator=generator).to(dtype)
        out = decode(acts, W, out_dtype=torch.float32, **options)
        assert out.dtype is torch.float32
        plain, wide = acts.float() @ W.float(), (acts.double(), W.double())
        sums = {"length": n, "magnitude": (wide[0].square() @ wide[1].square()).sqrt()}
        assert_close(out, reference64=wide[0] @ wide[1], plain=plain, **sums, name=f"{n} columns, {counts}")


@pytest.mark.native
@pytest.mark.parametrize(
    "options",
    [{}, {"capacity": 2}, {"capacity": 9}],
    ids=str,
)
def test_gradcheck(options: dict[str, int]) -> None:
    acts = random_rows((2, 2, 9), l0=[0, 2, 9, 3], dtype=torch.float64)
    held = acts != 0
    values = acts[held].requires_grad_()
    W, b = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((9, 4), (4,)))
    torch.autograd.gradcheck(lambda v, W, b: decode(acts.masked_scatter(held, v), W, b, **options), (values, W, b))


@pytest.mark.native
@pytest.mark.parametrize("capacity", [4, 64])
@pytest.mark.parametrize("n", [900, 2100])
def test_bitwise_reproducible(
    capacity: int, n: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    acts = random_rows((12, n), l0=20, dtype=dtype, device=device, generator=generator)
    W = torch.randn(n, 40, device=device, generator=generator).to(dtype)
    grad = torch.randn(12, 40, device=device, generator=generator).to(dtype)
    results = []
    for _ in range(3):
        leaves = acts.clone().requires_grad_(), W.clone().requires_grad_()
        out = decode(*leaves, capacity=capacity)
        results.append((out, decode(acts, W, capacity=capacity), *torch.autograd.grad(out, leaves, grad)))
    for other in results[1:]:
        for first, second in zip(results[0], other):
            assert torch.equal(first, second)


@pytest.mark.parametrize("neighbours", ["sparse", "dense"])
@pytest.mark.parametrize("n", [900, 2100])
def test_bitwise_batch_invariant(
    neighbours: str, n: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator, scale: int
) -> None:
    """With a pinned capacity a row's bits do not depend on the rows beside it."""
    m = 3 * scale
    acts = random_rows((m, n), l0=30, dtype=dtype, device=device, generator=generator)
    if neighbours == "dense":
        acts[1:] = random_rows((m - 1, n), l0=full(n), dtype=dtype, device=device, generator=generator)
    W = torch.randn(n, 40, device=device, generator=generator).to(dtype)
    alone = decode(acts[:1], W, capacity=32)
    for rows in (2, m):
        assert torch.equal(decode(acts[:rows], W, capacity=32)[:1], alone)


@pytest.mark.native
@pytest.mark.parametrize("n", [100, 3000])
@pytest.mark.parametrize("capacity", [None, 8])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_autocast(
    n: int, capacity: int | None, half: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """Acts and decoder are cast, the bias stays float32, and gradients arrive in float32."""
    acts = random_rows((6, n), l0=[0, 1, 5, 20, n, 7], device=device, generator=generator).requires_grad_()
    W = torch.randn(n, 16, device=device, generator=generator).requires_grad_()
    b = torch.randn(16, device=device, generator=generator).requires_grad_()
    cast = acts.detach().to(half), W.detach().to(half)
    held, grad = acts != 0, torch.randn(6, 16, device=device, generator=generator).to(half)
    reference = cast[0].double() @ cast[1].double() + b.double()
    plain = (cast[0] @ cast[1] + b).to(half)
    for latents in (acts, pack(acts, capacity=16)):
        with torch.autocast(device.type, half):
            out = decode(latents, W, b, capacity=capacity)
        assert out.dtype is half
        assert_close(out, reference64=reference, plain=plain)
        grads = torch.autograd.grad(out, (acts, W, b), grad)
        assert all(g.dtype is torch.float32 for g in grads)
        wanted = (grad.double() @ cast[1].double().t()) * held, cast[0].double().t() @ grad.double()
        usual = (grad @ cast[1].t()) * held, cast[0].t() @ grad
        for ours, want, other in zip(grads, wanted, usual):
            assert_close(ours.to(half), reference64=want, plain=other)
        assert_close(grads[2], reference64=grad.double().sum(0), plain=grad.float().sum(0))


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"acts": torch.ones(2, 4)}, ValueError, r"W_dec must have shape \[d_sae, d_in\] with d_sae = 4 like acts"),
        ({"acts": torch.tensor(1.0)}, ValueError, r"W_dec must have shape .* acts \[..., d_sae\]"),
        ({"acts": torch.ones(2, 5).bool()}, TypeError, "acts must be float32, .* got bool"),
        ({"acts": [[1.0] * 5]}, TypeError, "acts must be a torch.Tensor, got list"),
        ({"acts": torch.ones(2, 5).half()}, TypeError, "acts and W_dec must have one dtype, got float16 and float32"),
        ({"acts": torch.ones(2, 5, device="meta")}, ValueError, "acts must be on cpu like W_dec, got meta"),
        ({"acts": pack(torch.ones(2, 4))}, ValueError, "W_dec must have shape .* 4 like acts"),
        ({"acts": pack(torch.ones(2, 5).half())}, TypeError, "acts and W_dec must have one dtype, got float16 and"),
        ({"W_dec": torch.ones(5)}, ValueError, r"W_dec must have shape .* got \[5\]"),
        ({"W_dec": torch.ones(5, 3).int()}, TypeError, "W_dec must be float32, .* got int32"),
        ({"b_dec": torch.ones(2)}, ValueError, r"b_dec must have shape \[d_in\] = \[3\] like W_dec, got \[2\]"),
        ({"b_dec": torch.ones(3).int()}, TypeError, "b_dec must be float32, .* got int32"),
        ({"b_dec": torch.ones(3, device="meta")}, ValueError, "b_dec must be on cpu like W_dec, got meta"),
        ({"b_dec": [1.0] * 3}, TypeError, "b_dec must be a torch.Tensor, got list"),
        ({"acts": pack(torch.ones(2, 5)), "b_dec": [1.0] * 3}, TypeError, "b_dec must be a torch.Tensor, got list"),
        ({"acts": torch.eye(5).to_sparse()}, TypeError, "acts must be a strided tensor, got layout sparse_coo"),
        ({"capacity": 0}, ValueError, "capacity must be at least 1, got 0"),
        ({"capacity": -3}, ValueError, "capacity must be at least 1, got -3"),
        ({"capacity": 1.5}, TypeError, "capacity must be an int, got float"),
        ({"out_dtype": torch.int64}, TypeError, "out_dtype must be"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_errors(change, error: type[Exception], message: str) -> None:
    arguments = {"acts": torch.ones(2, 5), "W_dec": torch.ones(5, 3), **change}
    with pytest.raises(error, match=f"sae.decode: {message}"):
        decode(**arguments)


@pytest.mark.native
def test_bias_and_wide_results_are_rounded_once(device: torch.device) -> None:
    acts, W = torch.ones(40, 301, device=device), torch.ones(301, 32, device=device)
    b = torch.full((32,), -300.75, device=device)
    for options in ({"capacity": 500}, {"capacity": 5}):
        assert (decode(acts.bfloat16(), W.bfloat16(), b, **options) == 0.25).all(), options
    for options in ({}, {"capacity": 500}):
        with torch.autocast(device.type, torch.bfloat16):
            wide = decode(acts, W + 1 / 128, out_dtype=torch.float32, **options)
        assert (wide == 301 * (1 + 1 / 128)).all(), options


@pytest.mark.parametrize("wide", [torch.float32, torch.float16])
def test_gradients_of_another_out_dtype(wide: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    """With an overflowed row, whose gradients are dense products of two dtypes."""
    dtype = torch.float16 if wide is torch.float32 else torch.float32
    acts = random_rows((5, 300), l0=[3, 20, 0, 300, 7], dtype=dtype, device=device, generator=generator, integers=True)
    W = random_rows((300, 8), l0=8, dtype=dtype, device=device, generator=generator, integers=True)
    acts.requires_grad_(), W.requires_grad_()
    grad = torch.ones(5, 8, dtype=wide, device=device)
    ours = torch.autograd.grad(decode(acts, W, capacity=8, out_dtype=wide), (acts, W), grad)
    assert_exact(ours[0], (grad.double() @ W.double().t()) * (acts != 0))
    assert_exact(ours[1], acts.double().t() @ grad.double())


@pytest.mark.native
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_any_default_dtype(default: torch.dtype, dtype: torch.dtype, device: torch.device) -> None:
    acts, W = (
        random_rows((9, 300), l0=7, dtype=dtype, device=device, integers=True),
        torch.ones(300, 8).to(device, dtype),
    )
    torch.set_default_dtype(default)
    try:
        for latents in (acts, pack(acts, capacity="exact")):
            assert_exact(decode(latents, W), acts.double() @ W.double())
        assert_exact(decode(acts, W, capacity=4), acts.double() @ W.double())
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.native
def test_meta_tensors() -> None:
    acts, W, b = (torch.ones(shape, device="meta") for shape in ((2, 3, 500), (500, 16), (16,)))
    for latents in (acts, pack(acts, capacity=8)):
        assert decode(latents, W, b, capacity=8 if latents is acts else None).shape == (2, 3, 16)
    assert decode(acts, W, b, capacity=8).device.type == "meta"


@pytest.mark.native
@pytest.mark.full
def test_cpu_speed(device: torch.device) -> None:
    """At least 40 times faster than the dense product; the best of several runs, for machines are noisy."""
    if device.type != "cpu":
        pytest.skip("about the CPU implementation")
    acts = random_rows((32, 65536), l0=64, positive=True)
    W = torch.randn(65536, 768)

    def best(call, calls: int) -> float:
        times = []
        for _ in range(calls):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return min(times)

    dense = sparse = math.inf
    with torch.inference_mode():
        for _ in range(6):
            dense = min(dense, best(lambda: acts @ W, 3))
            sparse = min(sparse, best(lambda: decode(acts, W), 20))
    assert dense / sparse >= 40, f"dense {dense * 1e3:.2f} ms, decode {sparse * 1e3:.3f} ms: {dense / sparse:.1f} times"
