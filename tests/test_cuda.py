"""What only a GPU can show: graphs, no waiting, streams, threads, several devices, memory, and very large tensors."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer import blocksparse, gemm, rowsparse, sae
from gossamer.testing import assert_close, assert_exact, random_rows
from tests.graphs import captured
from tests.syncs import without_a_sync

pytestmark = pytest.mark.gpu

SHAPES = [(7, 700, 40), (7, 5000, 40), (600, 5000, 40)]
CAPTURABLE: list[dict[str, Any]] = [{"capacity": 16}, {"capacity": 64}, {"capacity": 80}, {}]


def integers(shape: tuple[int, ...], l0: int | list[int], seed: int = 0, **options: Any) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return random_rows(shape, l0=l0, device="cuda", generator=generator, integers=True, **options)


def filled(m: int, n: int, seed: int) -> Tensor:
    """[m, n] of rows with 0 to 79 entries, others each time."""
    return integers((m, n), [(7 * row + 13 * seed) % 80 for row in range(m)], seed)


def _whole(x: Tensor) -> blocksparse.Layout:
    rows, columns = x.shape
    return blocksparse.Layout.full((-(-rows // 16), -(-columns // 16)), 16, size=(rows, columns), device=x.device)


@pytest.mark.parametrize("options", CAPTURABLE, ids=str)
@pytest.mark.parametrize("m, n, d", SHAPES)
def test_graph(m: int, n: int, d: int, options: dict[str, Any]) -> None:
    """A captured decode serves other data, rows that overflow among them, as often as one likes."""
    acts, W, b = filled(m, n, 0), integers((n, d), d), integers((d,), d)
    with torch.no_grad():
        decode = lambda: sae.decode(acts, W, b, **options)  # noqa: E731
        graph, out = captured(decode)
        for seed in range(1, 5):
            acts.copy_(filled(m, n, seed))
            eager = decode()
            graph.replay()
            reference = acts.double() @ W.double() + b.double()
            assert_exact(out, reference, name=f"replay {seed}")
            assert_exact(eager, reference, name=f"eager beside replay {seed}")


@pytest.mark.parametrize("m, n, d", SHAPES)
def test_graph_of_a_training_step(m: int, n: int, d: int) -> None:
    acts, W, grad = filled(m, n, 0), integers((n, d), d).requires_grad_(), integers((m, d), d)
    acts.requires_grad_()

    def step() -> tuple[Tensor, ...]:
        out = sae.decode(acts, W, capacity=16)
        return (out, *torch.autograd.grad(out, (acts, W), grad))

    graph, results = captured(step)
    for seed in (1, 2):
        with torch.no_grad():
            acts.copy_(filled(m, n, seed))
        graph.replay()
        x, w, g = acts.detach().double(), W.detach().double(), grad.double()
        for ours, want in zip(results, (x @ w, (g @ w.t()) * (x != 0), x.t() @ g)):
            assert_exact(ours, want)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, W: rowsparse.pack(x, capacity="exact"),
        lambda x, W: sae.encode(W.t(), W, capacity="exact"),
        lambda x, W: rowsparse.pack(x).values,
        lambda x, W: blocksparse.Layout.from_mask(x > 0, 16),
        lambda x, W: blocksparse.split(blocksparse.from_dense(x, _whole(x)), 2, 0),
    ],
    ids=["pack", "encode", "values", "layout", "split"],
)
def test_what_waits_cannot_be_captured(call) -> None:
    x, W = filled(4, 500, 0), integers((500, 8), 8)
    call(x, W)
    graph = torch.cuda.CUDAGraph()
    message = "waits for the device, which a CUDA graph cannot capture"
    with pytest.raises(NotImplementedError, match=message), torch.cuda.graph(graph):
        call(x, W)
    torch.cuda.synchronize()


@pytest.mark.parametrize("m, n, d", SHAPES)
def test_nothing_waits(m: int, n: int, d: int) -> None:
    acts, W, b = filled(m, n, 0).requires_grad_(), integers((n, d), d).requires_grad_(), integers((d,), d)
    x = integers((m, d), d).requires_grad_()

    def everything() -> None:
        for options in CAPTURABLE:
            sae.decode(acts, W, b, **options).sum().backward()
            with torch.inference_mode():
                sae.decode(acts, W, b, **options)
        for options in ({}, {"capacity": 16}):
            rows = rowsparse.pack(acts, **options)
            rowsparse.matmul(rows, W).sum().backward()
            rowsparse.matmul(rowsparse.transpose(rows.detach()), x).sum().backward()
            rowsparse.sampled_matmul(x, W, rows.detach()).packed.values.sum().backward()
            rowsparse.pack(acts, **options).to_dense().sum().backward()
            repr(rows), rows.overflowed

    everything()
    with without_a_sync():
        everything()


def test_float32_follows_the_matmul_precision() -> None:
    """Rows that overflow are dense products: as inexact as plain PyTorch with TF32, and only with TF32."""
    n = 6000
    before = torch.get_float32_matmul_precision()
    try:
        for m in (8, 300):
            acts = random_rows((m, n), l0=[n, 30] * (m // 2), device="cuda")
            W = torch.randn(n, 96, device="cuda")
            for precision in ("highest", "high", "highest"):
                torch.set_float32_matmul_precision(precision)
                for _ in range(2):
                    out = sae.decode(acts, W, capacity=64)
                    assert_close(out, reference64=acts.double() @ W.double(), plain=acts @ W, name=f"{m}, {precision}")
    finally:
        torch.set_float32_matmul_precision(before)


def in_threads(work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads() -> None:
    """Threads that share a stream, a shape and a decoder do not disturb each other."""
    W = integers((4000, 64), 64)
    wrong: list[str] = []

    def work(which: int) -> None:
        batches = [filled(6, 4000, 10 * which + i) for i in range(6)]
        references = [x.double() @ W.double() for x in batches]
        with torch.inference_mode():
            results = [(i % 6, sae.decode(batches[i % 6], W, capacity=32)) for i in range(600)]
        bad = sum(not torch.equal(out.double(), references[i]) for i, out in results)
        if bad:
            wrong.append(f"thread {which}: {bad} of 600 results are wrong")

    in_threads(work)
    assert not wrong, wrong


def test_threads_that_encode() -> None:
    """As above: what one launch's programs tell each other must not reach another launch of the same shape."""
    x, W = torch.randn(6, 40, device="cuda"), torch.randn(40, 20000, device="cuda")
    threshold = torch.full((20000,), 15.0, device="cuda")
    batches = [scale * x for scale in (0.5, 1.0, 2.0)]
    with torch.inference_mode():
        wanted = [torch.where(z > threshold, z, 0) for z in (torch.addmm(W[0].new_zeros(20000), b, W) for b in batches)]
    wrong: list[str] = []

    def work(which: int) -> None:
        with torch.inference_mode():
            for turn in range(300):
                i = (turn + which) % 3
                rows = sae.encode(batches[i], W, W.new_zeros(20000), activation=gemm.JumpReLU(threshold))
                if turn % 10 == 0 and not torch.equal(rows.to_dense(), wanted[i]):
                    wrong.append(f"thread {which}: turn {turn} is wrong")

    in_threads(work)
    assert not wrong, wrong


def test_lists_that_share_sectors() -> None:
    """Rows with as many entries as slots, whose lists end and begin in one sector: no gather may see an old one."""
    m, n, d, k = 448, 65536, 4224, 100
    W = integers((n, d), d)
    batches = [integers((m, n), k, seed) for seed in range(4)]
    wanted = [x @ W for x in batches]
    with torch.inference_mode():
        for turn in range(300):
            x = batches[turn % 4]
            for name, out in (
                ("decode", sae.decode(x, W, capacity=k)),
                ("matmul", rowsparse.matmul(rowsparse.pack(x, capacity=k), W)),
            ):
                assert torch.equal(out, wanted[turn % 4]), f"{name}, turn {turn}"


@pytest.mark.parametrize("m, n, d", SHAPES)
@pytest.mark.usefixtures("compiled")
def test_graphs_that_inductor_makes(m: int, n: int, d: int) -> None:
    """Its warm-up runs eagerly on memory that it takes back: nothing may be kept from there."""
    W, b = integers((n, d), d), integers((d,), d)
    fast = torch.compile(lambda x: sae.decode(x, W, b, capacity=16) + 1, mode="reduce-overhead", fullgraph=True)
    packed = torch.compile(lambda x: rowsparse.matmul(rowsparse.pack(x, capacity=16), W), mode="reduce-overhead")
    with torch.no_grad():
        for seed in range(6):
            x = filled(m, n, seed)
            assert_exact(fast(x).clone(), x.double() @ W.double() + b.double() + 1, name=f"decode {seed}")
            assert_exact(packed(x).clone(), x.double() @ W.double(), name=f"matmul {seed}")
            assert_exact(sae.decode(x, W, b, capacity=16), x.double() @ W.double() + b.double(), name=f"eager {seed}")


def test_latents_that_always_fire() -> None:
    """Long columns of the weight gradient, beside short ones."""
    m, n, d = 3000, 4000, 64
    acts, W, grad = integers((m, n), 20), integers((n, d), d).requires_grad_(), integers((m, d), d)
    acts[:, ::700] = 1
    (ours,) = torch.autograd.grad(sae.decode(acts, W, capacity=64), W, grad)
    assert_exact(ours, acts.double().t() @ grad.double())


def test_streams() -> None:
    """Concurrent streams have flags of their own."""
    W = integers((20000, 512), 512)
    streams = [torch.cuda.Stream() for _ in range(3)]
    batches = [filled(32, 20000, seed) for seed in range(len(streams))]
    results: list[list[Tensor]] = [[] for _ in streams]
    torch.cuda.synchronize()
    with torch.inference_mode():
        for _ in range(50):
            for stream, x, outs in zip(streams, batches, results):
                with torch.cuda.stream(stream):
                    outs.append(sae.decode(x, W, capacity=32))
    torch.cuda.synchronize()
    for x, outs in zip(batches, results):
        for out in outs:
            assert_exact(out, x.double() @ W.double())


def test_many_shapes() -> None:
    """More shapes than the host keeps prepared launches for, twice over."""
    W = integers((3000, 64), 64)
    with torch.inference_mode():
        for _ in range(2):
            for m in range(1, 100):
                x = filled(m, 3000, m)
                assert_exact(sae.decode(x, W, capacity=32), x.double() @ W.double(), name=f"{m} rows")


def test_second_device() -> None:
    """Tensors of a device that is not the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    acts, W, b = (t.to("cuda:1") for t in (filled(7, 4000, 0), integers((4000, 64), 64), integers((64,), 64)))
    reference = acts.double() @ W.double() + b.double()
    for _ in range(3):
        for capacity in (16, 4000):
            assert_exact(sae.decode(acts, W, b, capacity=capacity), reference)
    leaves = acts.clone().requires_grad_(), W.clone().requires_grad_()
    out = sae.decode(*leaves, capacity=16)
    assert_exact(out, reference - b.double())
    out.sum().backward()
    assert_exact(leaves[1].grad, acts.double().sum(0)[:, None].expand_as(W))
    assert torch.cuda.current_device() == 0
    with pytest.raises(ValueError, match="acts must be on cuda:1 like W_dec, got cuda:0"):
        sae.decode(acts.to("cuda:0"), W)


def test_float64_is_refused() -> None:
    with pytest.raises(TypeError, match=r"acts is float64 on cuda:0; float64 runs on the CPU only. Use acts.float\(\)"):
        sae.decode(torch.ones(2, 5, device="cuda").double(), torch.ones(5, 3, device="cuda").double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_weight_gradient_needs_no_dense_buffer(dtype: torch.dtype) -> None:
    """At d_sae 65,536 and d_in 2,304, forward and backward stay far below a [B, d_sae] buffer beside the gradient."""
    B, F, D = 4096, 65536, 2304
    acts = random_rows((B, F), l0=72, dtype=dtype, device="cuda", positive=True, distinct=False)
    W = torch.randn(F, D, device="cuda", dtype=dtype).requires_grad_()
    grad = torch.randn(B, D, device="cuda", dtype=dtype)
    for packed in (False, True):
        given = rowsparse.pack(acts, capacity=128) if packed else acts
        sae.decode(given, W).backward(grad)
        W.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        sae.decode(given, W).backward(grad)
        peak = torch.cuda.max_memory_allocated() - before
        allowed = W.numel() * W.element_size() + B * F * acts.element_size() // 4
        assert peak < allowed, f"{peak / 2**20:.0f} MiB, {allowed / 2**20:.0f} allowed"
        W.grad = None


def fits(gigabytes: float) -> None:
    """Skips where the GPU has too little memory left."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < gigabytes * 1e9:
        pytest.skip(f"needs {gigabytes:g} GB of free GPU memory")


@pytest.mark.full
def test_more_than_2_to_the_31_activations() -> None:
    """Rows on both sides of 2^31 elements, one of which overflows, forward and backward."""
    fits(40)
    M, N, D = 40_000, 65_536, 48
    x = torch.zeros(M, N, dtype=torch.float16, device="cuda")
    places = torch.tensor([0, 17, 32_767, 32_768, 33_000, M - 1], device="cuda")
    x[places, :3] = 1
    x[places, -2:] = 2
    x[33_000, :400] = 1
    x.requires_grad_()
    W = integers((N, D), D, dtype=torch.float16).requires_grad_()
    some = x.detach()[places].double()
    reference = some @ W.detach().double()
    for capacity in (16, 512):
        with torch.no_grad():
            out = sae.decode(x, W, capacity=capacity)
            assert_exact(out[places], reference)
            assert int((out != 0).any(1).sum()) == len(places)
        out = sae.decode(x, W, capacity=capacity)
        assert_exact(out[places], reference)
        grads = torch.autograd.grad(out, (x, W), torch.ones_like(out))
        assert_exact(grads[0][places], W.detach().double().sum(1) * (some != 0))
        assert int((grads[0] != 0).any(1).sum()) == len(places)
        assert_exact(grads[1], some.sum(0)[:, None].expand(N, D))
        del grads, out
    rows = rowsparse.pack(x.detach(), capacity=16)
    assert rows.counts[places].tolist() == (some != 0).sum(1).tolist()
    assert torch.equal(rows.to_dense(), x)


@pytest.mark.full
def test_more_than_2_to_the_31_weights() -> None:
    fits(30)
    N, D = 1_100_000, 2048
    W = torch.zeros(N, D, dtype=torch.float16, device="cuda")
    W[-5:] = integers((5, D), D, dtype=torch.float16)
    x = torch.zeros(3, N, dtype=torch.float16, device="cuda")
    x[0, -3:], x[1, 0], x[2, -300:] = 2, 1, 1
    W.requires_grad_()
    for capacity in (16, 512):
        out = sae.decode(x, W, capacity=capacity)
        assert_exact(out, x[:, -5:].double() @ W.detach()[-5:].double())
        (grad,) = torch.autograd.grad(out, W, torch.ones_like(out))
        assert_exact(grad[-300:], x[:, -300:].double().sum(0)[:, None].expand(300, D))
        assert int((grad != 0).any(1).sum()) == 301
        del grad, out


@pytest.mark.full
def test_more_rows_than_a_grid_axis_holds() -> None:
    """Blocks of rows are more than 65,535 here; and 2^31 elements again, in many short rows."""
    fits(40)
    M, N, D = 8_400_000, 260, 8
    x = torch.zeros(M, N, dtype=torch.float16, device="cuda")
    places = torch.tensor([0, 4_194_240, 4_194_304, 8_388_480, M - 1], device="cuda")
    x[places, 7] = 3
    x[places[1:], :64] = 1
    x.requires_grad_()
    W = integers((N, D), D, dtype=torch.float16).requires_grad_()
    some = x.detach()[places].double()
    out = sae.decode(x, W, capacity=16)
    assert_exact(out[places], some @ W.detach().double())
    assert int((out != 0).any(1).sum()) == len(places)
    grads = torch.autograd.grad(out, (x, W), torch.ones_like(out))
    assert_exact(grads[0][places], W.detach().double().sum(1) * (some != 0))
    assert_exact(grads[1], some.sum(0)[:, None].expand(N, D))


@pytest.mark.full
def test_more_columns_than_a_grid_axis_holds() -> None:
    fits(10)
    N, D = 4_300_000, 8
    x = torch.zeros(2, N, device="cuda")
    x[0, -40:], x[1, 3] = 1, 2
    W = integers((N, D), D).requires_grad_()
    x.requires_grad_()
    out = sae.decode(x, W, capacity=16)
    assert_exact(out, x.detach().double() @ W.detach().double())
    grads = torch.autograd.grad(out, (x, W), torch.ones_like(out))
    assert_exact(grads[0], W.detach().double().sum(1) * (x != 0))
    assert_exact(grads[1], x.detach().double().sum(0)[:, None].expand(N, D))
