"""Variants of the decode kernels beside each other, for whoever tunes them.

Usage: python benchmarks/sae/tune_decode.py [PART...] [--search]. Parts: check, host, host_backward, small,
large, encode, dense, backward.
Every timing interleaves its candidates in one process; figures to publish come from `gossamer bench sae`. With
--search, tiles are varied as well. Set OUT to a folder to keep the numbers as JSON.
"""

import cProfile
import io
import itertools
import json
import os
import pstats
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.peers import jumprelu_sae_kernels
from gossamer import gemm, sae
from gossamer._core import tuning
from gossamer.rowsparse._triton import matmul, overflow, pack, sampled_matmul, transpose
from gossamer.sae._triton import _entries as entries
from gossamer.sae._triton import decode, encode_rows

DEVICE = torch.device("cuda")
SEARCH = "--search" in sys.argv
RESULTS: dict[str, Any] = {}
# (BLOCK_M, BLOCK_N, BLOCK_D, SPLITS, warps, stages) by "at most 64 rows".
TILES = {
    True: [
        (32, bn, bd, splits, warps, stages)
        for bn, bd, splits, warps, stages in (
            (64, 64, 22, 4, 3),
            (64, 64, 44, 4, 3),
            (64, 64, 66, 4, 3),
            (64, 64, 44, 4, 4),
            (32, 64, 44, 4, 5),
            (64, 128, 44, 4, 3),
            (64, 128, 44, 8, 3),
            (32, 128, 44, 4, 4),
            (32, 128, 66, 8, 4),
            (128, 64, 44, 4, 3),
        )
    ],
    False: [
        (bm, bn, bd, splits, 8 if bm * bd >= 128 * 128 else 4, stages)
        for bm, bn, bd, splits, stages in itertools.product((64, 128), (32, 64), (64, 128, 256), (1, 16, 32), (3, 4))
    ],
}
SMALL = [
    (32, 65536, 768, 64),
    (256, 65536, 768, 64),
    (32, 131072, 512, 128),
    (32, 65536, 2304, 72),
    (32, 65536, 3584, 72),
    (32, 262144, 2304, 100),
    (32, 32768, 2048, 100),
]


def acts_of(m: int, n: int, l0: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[m, n] with l0 positive entries a row at random columns."""
    x = torch.zeros(m, n, dtype=dtype, device=DEVICE)
    columns = (
        torch.randint(n, (m, l0), device=DEVICE) if l0 < n // 8 else torch.rand(m, n, device=DEVICE).topk(l0).indices
    )
    return x.scatter_(1, columns, torch.rand(m, l0, device=DEVICE, dtype=dtype) + 0.1)


def graphed(call: Callable[..., Any], copies: list[Any] | None = None) -> Callable[[], Any]:
    """Ten calls in a graph; with copies, each on another of them, so that none finds its input in the cache."""
    arguments = [(copies[i % len(copies)],) if copies else () for i in range(10)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(*arguments[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for argument in arguments:
            call(*argument)
    return graph.replay


def replayed(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median microseconds of each in a graph of ten calls, in another order in each round."""
    replays = {name: graphed(call) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name in random.sample(list(replays), len(replays)):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            replays[name]()
            end.record()
            end.synchronize()
            if turn:
                times[name].append(begin.elapsed_time(end) * 100)
    return {name: statistics.median(found) for name, found in times.items()}


def timed(
    candidates: dict[str, Callable[[], Any]], rounds: int = 7, budget: float = 2e-3, div: int = 1
) -> dict[str, float]:
    """Median microseconds a call, candidates interleaved, with a cache flush in front of every burst."""
    flush = torch.empty(256 << 20, dtype=torch.int8, device=DEVICE)
    calls = {}
    for name, call in candidates.items():
        call()
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        calls[name] = max(4, min(50, int(budget * 1e3 / max(start.elapsed_time(end), 1e-3))))
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, call in candidates.items():
            flush.random_(0, 2)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            call()
            start.record()
            for _ in range(calls[name]):
                call()
            end.record()
            end.synchronize()
            samples[name].append(start.elapsed_time(end) * 1e3 / calls[name] / div)
    return {name: statistics.median(s) for name, s in samples.items()}


def show(part: str, label: str, row: dict[str, float]) -> None:
    RESULTS.setdefault(part, {})[label] = row
    print(part, label, " ".join(f"{k}={v:.1f}" for k, v in row.items()), flush=True)


def check() -> None:
    torch.manual_seed(0)
    for m, n, d, l0, dtype in [
        (32, 65536, 768, 64, torch.float32),
        (4096, 65536, 2304, 72, torch.bfloat16),
        (7, 5001, 77, 50, torch.float32),
        (32, 65536, 768, 16384, torch.float32),
        (32, 65536, 768, 16384, torch.bfloat16),
        (300, 8192, 256, 3000, torch.bfloat16),
        (1000, 8191, 255, 100, torch.float16),
    ]:
        acts, w = acts_of(m, n, l0, dtype), torch.randn(n, d, device=DEVICE, dtype=dtype)
        rows = slice(0, 64)
        want = acts[rows].double() @ w.double()
        plain = (acts[rows] @ w).double()
        got = sae.decode(acts, w, method="auto", capacity=tuning.break_even(m, n, d, w))
        again = sae.decode(acts, w, method="auto", capacity=tuning.break_even(m, n, d, w))
        error, base = ((v - want).norm() / want.norm() for v in (got[rows].double(), plain))
        line = {"error": error.item() * 1e6, "torch": base.item() * 1e6, "same": float(torch.equal(got, again))}
        show("check", f"{m},{n},{d},{l0},{str(dtype)[6:]}", line)
    acts, w = acts_of(512, 8192, 70).requires_grad_(), torch.randn(8192, 320, device=DEVICE, requires_grad=True)
    g = torch.randn(512, 320, device=DEVICE)
    for cap in (128, 40):
        ga, gw = torch.autograd.grad(sae.decode(acts, w, capacity=cap), (acts, w), g)
        ea, ew = (g.double() @ w.double().T) * (acts != 0), acts.double().T @ g.double()
        errors = {
            "acts": ((ga - ea).norm() / ea.norm()).item() * 1e6,
            "weight": ((gw - ew).norm() / ew.norm()).item() * 1e6,
        }
        show("check", f"backward capacity {cap}", errors)


def host() -> None:
    """Host microseconds a call, in bursts short enough that the device never holds the host up."""
    acts, w = acts_of(32, 65536, 64), torch.randn(65536, 768, device=DEVICE)
    capacity = tuning.break_even(32, 65536, 768, w)
    calls: dict[str, Callable[[], Any]] = {
        "dense": lambda: acts @ w,
        "auto": lambda: sae.decode(acts, w),
        "op": lambda: torch.ops.gossamer.sae_decode.default(acts, w, None, capacity, False, None),
        "launcher": lambda: decode.decode(acts, w, None, capacity, False, None),
        "jumprelu-sae-kernels": lambda: jumprelu_sae_kernels.decode_fixed(acts, w, 512, validate=False),
    }
    with torch.inference_mode():
        for attempt in range(4):
            show("host", f"us, attempt {attempt}", enqueued(calls))
        profiled(calls["auto"])


def host_backward() -> None:
    """The same of a backward pass so small that the device keeps up with the host."""
    m, n, d = 64, 4096, 256
    acts, w = acts_of(m, n, 20).requires_grad_(), torch.randn(n, d, device=DEVICE, requires_grad=True)
    out, plain, g = sae.decode(acts, w, capacity=64), acts @ w, torch.randn(m, d, device=DEVICE)
    x, weight = acts.detach(), w.detach()
    values, indices, nnz = pack.pack_ell(x, 64)
    offsets, keys, _ = transpose.transpose_keys(indices, nnz, n)
    products = torch.randn(indices.shape, device=DEVICE)
    dtype, ops = torch.float32, torch.ops.gossamer
    calls: dict[str, Callable[[], Any]] = {
        "zeros": lambda: torch.zeros(1000, device=DEVICE),
        "dense": lambda: torch.autograd.grad(plain, (acts, w), g, retain_graph=True),
        "auto": lambda: torch.autograd.grad(out, (acts, w), g, retain_graph=True),
        "transpose": lambda: transpose.transpose_keys(indices, nnz, n),
        "transpose op": lambda: ops.transpose_keys.default(indices, nnz, n),
        "both": lambda: matmul.matmul_bwd(g, indices, keys, offsets, values, nnz, x, weight, dtype),
        "both op": lambda: ops.matmul_bwd.default(g, indices, keys, offsets, values, nnz, x, weight, dtype),
        "put": lambda: sampled_matmul.sampled_matmul(g, weight, indices, nnz, x, True, True, products),
        "put op": lambda: ops.sampled_matmul.default(g, weight, indices, nnz, x, True, True, products),
    }
    for attempt in range(2):
        show("host_backward", f"us, attempt {attempt}", enqueued(calls))
    profiled(lambda: (calls["transpose op"](), calls["both op"](), calls["put op"]()))


def enqueued(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median host microseconds a call."""
    row = {}
    for name, call in calls.items():
        samples = []
        for _ in range(30):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(20):
                call()
            samples.append((time.perf_counter() - start) / 20 * 1e6)
        row[name] = statistics.median(samples)
    return row


def profiled(call: Callable[[], Any]) -> None:
    """Prints where the host's time goes."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(300):
        call()
    profile.disable()
    torch.cuda.synchronize()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(24)
    print("\n".join(line[:100] for line in text.getvalue().splitlines() if line.strip()[:1].isdigit()))


def small() -> None:
    for m, n, d, l0 in SMALL:
        copies, w = [acts_of(m, n, l0) for _ in range(10)], torch.randn(n, d, device=DEVICE)
        turn = itertools.cycle(copies)
        calls: dict[str, Callable[..., Any]] = {
            "dense": lambda x: x @ w,
            "jumprelu-sae-kernels": lambda x: jumprelu_sae_kernels.decode_fixed(x, w, 512, validate=False),
            "auto": lambda x: sae.decode(x, w),
            "fused": lambda x: decode.decode(x, w, None, n, False, None),
        }
        row = timed({name: lambda call=call: call(next(turn)) for name, call in calls.items()})
        show("small", f"eager {m},{n},{d},{l0}", row | {"ratio": row["jumprelu-sae-kernels"] / row["auto"]})
        row = timed({k: graphed(calls[k], copies) for k in ("jumprelu-sae-kernels", "auto", "fused")}, div=10)
        show("small", f"graph {m},{n},{d},{l0}", row | {"ratio": row["jumprelu-sae-kernels"] / row["auto"]})
        if not SEARCH:
            continue
        original, variants = tuning.decode_tile, {}
        shapes = itertools.product((256, 512), (1, 2), (8, 16, 32), (128, 256, 512))
        for groups, warps, e, bytes_d in shapes:
            scan, gather = groups // (32 * warps), e * bytes_d // 16 // (32 * warps)
            if scan == 8 and 2 <= gather <= 16:
                tile = {"BLOCK": groups * 4, "VEC": 4, "BLOCK_E": e, "BLOCK_D": bytes_d // 4}
                tuning.decode_tile = lambda *_, tile=tile, warps=warps: (tile, warps)
                decode._decode_fwd._compiled.clear()
                decode._plans.clear()
                variants[f"{groups}g/{e}x{bytes_d}B/{warps}w"] = graphed(calls["auto"], copies)
        row = timed(variants, rounds=5, div=10)
        show("small", f"tiles {m},{n},{d},{l0}", dict(sorted(row.items(), key=lambda item: item[1])[:14]))
        tuning.decode_tile = original
        decode._decode_fwd._compiled.clear()
        decode._plans.clear()


def large() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        m, n, d, l0 = 4096, 65536, 2304, 72
        acts, w = acts_of(m, n, l0, dtype), torch.randn(n, d, device=DEVICE, dtype=dtype)
        values, indices, nnz = pack.pack_ell(acts, 1024, False)
        calls: dict[str, Callable[[], Any]] = {
            "jumprelu-sae-kernels": lambda: jumprelu_sae_kernels.decode_fixed(acts, w, 512, validate=False),
            "auto": lambda: sae.decode(acts, w),
            "pack": lambda: pack.pack_ell(acts, 1024, False),
            "count": lambda: pack.count_rows(acts),
            "gather": lambda: matmul.matmul(values, indices, nnz, None, w, None, None),
            "clone": lambda: acts.clone(),
        }
        row = timed(calls)
        show("large", str(dtype)[6:], row | {"ratio": row["jumprelu-sae-kernels"] / row["auto"]})
        if not SEARCH:
            continue
        original, variants = tuning.gather_tile, {}
        for e, bytes_d, warps in itertools.product((1, 2, 4, 8), (128, 256, 512, 1024), (1, 2)):
            if 1 <= e * bytes_d // 16 // (32 * warps) <= 8:
                tile = {"BLOCK_E": e, "BLOCK_D": bytes_d // acts.element_size()}
                tuning.gather_tile = lambda *_, tile=tile, warps=warps: (tile, warps)
                matmul._matmul_fwd._compiled.clear()
                matmul._plans.clear()
                variants[f"{e}x{bytes_d}B/{warps}w"] = graphed(calls["gather"])
        row = timed(variants, rounds=5, div=10)
        show("large", f"gather tiles {str(dtype)[6:]}", dict(sorted(row.items(), key=lambda item: item[1])[:12]))
        tuning.gather_tile = original
        matmul._matmul_fwd._compiled.clear()


def encode() -> None:
    m, d, n, k = 4096, 2304, 65536, 64
    x, bias = torch.randn(m, d, device=DEVICE, dtype=torch.bfloat16), torch.randn(n, device=DEVICE).bfloat16() * 0.1
    w, threshold = (torch.randn(d, n, device=DEVICE) * d**-0.5).bfloat16(), torch.full((n,), 3.1, device=DEVICE)
    calls: dict[str, Callable[[], Any]] = {
        "gemm": lambda: torch.addmm(bias, x, w),
        "jumprelu": lambda: sae.encode(x, w, bias, activation=gemm.JumpReLU(threshold)),
        "relu": lambda: sae.encode(x, w, bias - 3.1, activation="relu"),
        "topk": lambda: sae.encode(x, w, bias, activation=gemm.TopK(k)),
        "batchtopk": lambda: sae.encode(x, w, bias, activation=gemm.BatchTopK(k)),
    }
    show("encode", f"{m},{d},{n}", timed(calls, rounds=5))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for call in calls.values():
            call()
        torch.cuda.synchronize()
    kernels = {event.key[:40]: event.self_device_time_total / event.count for event in profile.key_averages()}
    show("encode", "kernels", dict(sorted(kernels.items(), key=lambda item: -item[1])[:14]))
    original, variants = entries.tile_of, {}
    for words in (64, 128, 256) if SEARCH else ():
        entries.tile_of = lambda *_, words=words: ({"BLOCK": words * 8, "VEC": 8}, 1)
        encode_rows._encode_row._compiled.clear()
        variants[str(words)] = graphed(calls["jumprelu"])
    if SEARCH:
        show("encode", "words a warp", timed(variants | {"gemm": graphed(calls["gemm"])}, rounds=3, div=10))
    entries.tile_of = original


def dense() -> None:
    for m, n, d, dtype in [
        (32, 65536, 768, torch.float32),
        (32, 65536, 768, torch.bfloat16),
        (256, 65536, 768, torch.float32),
        (256, 65536, 768, torch.bfloat16),
        (4096, 65536, 2304, torch.bfloat16),
        (2048, 16384, 2304, torch.float32),
    ]:
        acts, w = torch.randn(m, n, device=DEVICE, dtype=dtype), torch.randn(n, d, device=DEVICE, dtype=dtype)
        for precision in ("highest", "high") if dtype is torch.float32 else ("highest",):
            torch.set_float32_matmul_precision(precision)
            nnz = (acts != 0).sum(1, dtype=torch.int32)
            out = torch.empty(m, d, dtype=dtype, device=DEVICE)

            def tiles() -> None:
                space = overflow.workspace(m, n, w)
                if space[1] is not None:
                    space[1].zero_()
                overflow.forward(acts, w, None, out, nnz, 32, space)

            calls = {
                "dense": lambda: acts @ w,
                "auto": lambda: sae.decode(acts, w),
                "tiles": tiles,
            }
            row = timed(calls, rounds=5)
            show("dense", f"{m},{n},{d},{str(dtype)[6:]},{precision}", row | {"ratio": row["dense"] / row["auto"]})
            if not SEARCH:
                continue
            original, variants = tuning.dense_tile, {}
            for bm, bn, bd, splits, warps, stages in TILES[m <= 64]:
                size = (bm * bn + bn * bd) * w.element_size() * stages
                if size > 220_000 or (m <= 256) != (splits > 1):
                    continue
                tile = {"BLOCK_M": bm, "BLOCK_N": bn, "BLOCK_D": bd, "SPLITS": splits}
                tuning.dense_tile = lambda *_, t=tile, w=warps, s=stages: (t, w, s)
                overflow._overflow_fwd._compiled.clear()
                variants[f"{bm}x{bn}x{bd}/{splits}s/{warps}w/{stages}"] = graphed(calls["tiles"])
            row = timed(variants, rounds=3, div=10)
            show("dense", f"tiles {m},{str(dtype)[6:]},{precision}", dict(sorted(row.items(), key=lambda i: i[1])[:8]))
            tuning.dense_tile = original
            overflow._overflow_fwd._compiled.clear()
            torch.set_float32_matmul_precision("highest")
    for l0 in (256, 1024, 2048, 4096, 16384):
        acts, w = acts_of(32, 65536, l0), torch.randn(65536, 768, device=DEVICE)
        calls = {
            "dense": lambda: acts @ w,
            "auto": lambda: sae.decode(acts, w),
            "gather": lambda: decode.decode(acts, w, None, 65536, False, None),
            "tiles": lambda: decode.decode(acts, w, None, 32, False, None),
        }
        show("dense", f"L0 {l0}", timed(calls))


def backward() -> None:
    for m, dtype in ((4096, torch.bfloat16), (4096, torch.float32), (16384, torch.bfloat16)):
        n, d, l0 = 65536, 2304, 72
        acts, w = (
            acts_of(m, n, l0, dtype).requires_grad_(),
            torch.randn(n, d, device=DEVICE, dtype=dtype).requires_grad_(),
        )
        g = torch.randn(m, d, device=DEVICE, dtype=dtype)
        out, plain = sae.decode(acts, w), acts @ w
        capacity = tuning.break_even(m, n, d, w)
        values, indices, nnz = pack.pack_ell(acts.detach(), capacity)
        offsets, keys, _ = transpose.transpose_keys(indices, nnz, n)
        products = torch.randn(indices.shape, device=DEVICE)
        calls: dict[str, Callable[[], Any]] = {
            "dense": lambda: torch.autograd.grad(plain, (acts, w), g, retain_graph=True),
            "auto": lambda: torch.autograd.grad(out, (acts, w), g, retain_graph=True),
            "transpose": lambda: transpose.transpose_keys(indices, nnz, n),
            "weight": lambda: matmul.matmul_bwd(g, indices, keys, offsets, values, nnz, None, None, dtype),
            "both": lambda: matmul.matmul_bwd(g, indices, keys, offsets, values, nnz, None, w.detach(), dtype),
            "acts": lambda: sampled_matmul.sampled_matmul(g, w.detach(), indices, nnz, None, True, True, None),
            "put": lambda: sampled_matmul.sampled_matmul(g, w.detach(), indices, nnz, None, True, True, products),
            "values": lambda: sampled_matmul.sampled_matmul(g, w.detach(), indices, nnz, None, False, True, None),
            "zeros": lambda: torch.zeros_like(acts),
        }
        row = timed(calls, rounds=3)
        show("backward", f"{m} {str(dtype)[6:]}", row | {"ratio": row["dense"] / row["auto"]})
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            torch.autograd.grad(out, (acts, w), g, retain_graph=True)
            torch.cuda.synchronize()
        kernels = {event.key[:40]: event.self_device_time_total for event in profile.key_averages()}
        show("backward", f"kernels {m} {str(dtype)[6:]}", dict(sorted(kernels.items(), key=lambda item: -item[1])[:12]))
        if not SEARCH:
            continue
        original, variants = tuning.scatter_tile, {}
        for e, warps in itertools.product((32, 128), (1, 2, 4, 8)):
            tuning.scatter_tile = lambda tile={"BLOCK_E": e, "BLOCK_D": 16}, warps=warps: (tile, warps)
            sampled_matmul._sampled_matmul._compiled.clear()
            variants[f"{e}/{warps}w"] = graphed(calls["put"])
        row = timed(variants, rounds=3, div=10)
        show("backward", f"scatter tiles {m} {str(dtype)[6:]}", dict(sorted(row.items(), key=lambda item: item[1])))
        tuning.scatter_tile = original
        sampled_matmul._sampled_matmul._compiled.clear()
        original, variants = tuning.bwd_tile, {}
        for e, step, bytes_d, warps, registers in (
            (8, 4, 512, 1, 80),
            (8, 4, 512, 1, 96),
            (8, 4, 512, 1, None),
            (8, 8, 512, 1, 96),
            (4, 4, 512, 1, 64),
            (4, 4, 512, 1, 80),
            (8, 4, 256, 1, 64),
            (8, 8, 256, 1, 64),
            (4, 4, 1024, 1, 96),
            (8, 4, 1024, 2, 80),
        ):
            size = w.element_size()
            tile = {"BLOCK_E": e, "STEP": step, "BLOCK_D": bytes_d // size, "VEC": 16 // size}
            tuning.bwd_tile = lambda *_, found=(tile, warps, registers): found
            matmul._matmul_bwd._compiled.clear()
            matmul._matmul_bwd_long._compiled.clear()
            variants[f"{e},{step}x{bytes_d}B/{warps}w/{registers}"] = graphed(calls["both"])
        row = timed(variants, rounds=3, div=10)
        show("backward", f"tiles {m} {str(dtype)[6:]}", dict(sorted(row.items(), key=lambda item: item[1])))
        tuning.bwd_tile = original
        matmul._matmul_bwd._compiled.clear()
        matmul._matmul_bwd_long._compiled.clear()


if __name__ == "__main__":
    parts = {part.__name__: part for part in (check, host, host_backward, small, large, encode, dense, backward)}
    for name in [a for a in sys.argv[1:] if a != "--search"] or parts:
        with torch.no_grad() if name not in ("check", "backward", "host_backward") else torch.enable_grad():
            parts[name]()
    if folder := os.environ.get("OUT"):
        (Path(folder) / "tune_decode.json").write_text(json.dumps(RESULTS, indent=1))
