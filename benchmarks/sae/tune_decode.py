"""Tiles of `sae.decode`, forward and backward, and of the scan of `sae.encode`, beside those that are shipped.

Usage: python -m benchmarks.sae.tune_decode [PART...]. Parts: one_launch, gather, dense, scatter, backward, scan. Needs
Triton: a GPU, or GOSSAMER_INTERPRET=1. Each in CUDA graphs of ten calls.
"""

from __future__ import annotations

import itertools
import sys

import torch
from torch import Tensor

from benchmarks import tune
from gossamer import gemm, sae
from gossamer._core.launch import Tile
from gossamer.rowsparse._triton import list_entries, matmul, overflow, pack, sampled_matmul, transpose, unpack
from gossamer.rowsparse.records import Matmul, MatmulBwd, SampledMatmul, TransposeKeys
from gossamer.sae._triton import decode, encode
from gossamer.sae.records import SaeDecode

CUDA = tune.DEVICE.type == "cuda"
DTYPES = (torch.bfloat16, torch.float32) if CUDA else (torch.float32,)
MANY = (4096, 65536, 2304, 72) if CUDA else (16, 256, 32, 8)
"""M, d_sae, d_in, L0 of a batch; and, below, of steps."""
FEW = (
    [(32, 65536, 768, 64), (256, 65536, 768, 64), (32, 131072, 512, 128), (32, 65536, 2304, 72), (32, 65536, 3584, 72)]
    if CUDA
    else [(2, 2112, 16, 8)]
)
DENSE = [(32, 65536, 768), (256, 65536, 768), (4096, 65536, 2304)] if CUDA else [(4, 1100, 16)]


def acts_of(m: int, n: int, l0: int, dtype: torch.dtype) -> Tensor:
    """[m, n] with l0 positive entries a row, or fewer where columns repeat."""
    x = torch.zeros(m, n, dtype=dtype, device=tune.DEVICE)
    columns = torch.randint(n, (m, l0), device=tune.DEVICE)
    return x.scatter_(1, columns, torch.rand(m, l0, device=tune.DEVICE, dtype=dtype) + 0.1)


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=tune.DEVICE).to(dtype)


def one_launch(results: tune.Results) -> None:
    """Groups of columns that a program scans, and the tile of the gather after it."""
    for m, n, d, l0 in FEW:
        # Each call another input, so that none finds its own in the cache.
        turn = itertools.cycle([acts_of(m, n, l0, torch.float32) for _ in range(10)])
        w = normal(n, d, dtype=torch.float32)
        call = lambda: decode.decode(SaeDecode(next(turn), w, None, n, None))  # noqa: E731
        calls: tune.Calls = {"as shipped": call, "dense": lambda: next(turn) @ w}
        for groups, e, columns in itertools.product((128, 256, 512), (8, 16, 32), (32, 64, 128)):
            changes = (
                (
                    pack,
                    "scan_tile",
                    lambda n, size, groups=groups, **_: {"BLOCK": groups * 16 // size, "VEC": 16 // size},
                ),
                (decode, "gather_tile", lambda *_, e=e, columns=columns: {"BLOCK_E": e, "BLOCK_D": columns}),
            )
            calls[f"{groups} groups, {e} entries x {columns} columns"] = tune.under(call, *changes)
        results.add(f"one launch {m}, {n}, {d}, {l0}", tune.replayed(calls), best=10, against="as shipped")


def gather(results: tune.Results) -> None:
    m, n, d, l0 = MANY
    for dtype in DTYPES:
        acts, w = acts_of(m, n, l0, dtype), normal(n, d, dtype=dtype)
        lists = list_entries.list_slots(acts, min(n, 1024))
        call = lambda: matmul.matmul(Matmul(*lists, None, w, None, None))  # noqa: E731
        calls: tune.Calls = {"as shipped": call}
        for e, size in itertools.product((1, 2, 4, 8), (128, 256, 512, 1024)):
            tile = {"BLOCK_E": e, "BLOCK_D": size // dtype.itemsize}
            calls[f"{e} entries x {size} bytes"] = tune.under(call, (matmul, "gather_tile", lambda *_, tile=tile: tile))
        calls = tune.sound(calls, acts.double() @ w.double())
        results.add(f"gather {dtype}", tune.replayed(calls), best=10, against="as shipped")


def dense(results: tune.Results) -> None:
    """Rows that overflow, all of them."""
    for (m, n, d), dtype in itertools.product(DENSE, DTYPES):
        acts, w = normal(m, n, dtype=dtype), normal(n, d, dtype=dtype)
        rows, out = overflow.Overflow(acts, torch.stack([(acts != 0).sum(1)] * 2), 32), w.new_empty(m, d)

        def call() -> Tensor:
            overflow.forward(rows, w, None, out)
            return out

        calls: tune.Calls = {"as shipped": call, "dense": lambda: acts @ w}
        heights = (16,) if m <= 16 else (32,) if m <= 64 else (64, 128)
        for bm, bn, bd, splits, warps, stages in itertools.product(
            heights, (32, 64), (64, 128), (1, 16, 32, 44, 66), (4, 8), (3, 4)
        ):
            fits = (bm * bn + bn * bd) * dtype.itemsize * stages <= 220_000
            if fits and (m <= 256) == (splits > 1) and (CUDA or splits == 16):
                sizes = {"BLOCK_M": bm, "BLOCK_N": bn, "BLOCK_D": bd, "SPLITS": splits}
                tile = Tile(sizes, warps, stages)
                name = f"{bm} x {bn} x {bd}, {splits} splits, {warps} warps, {stages} stages"
                calls[name] = tune.under(call, (overflow, "fwd_tile", lambda *_, tile=tile: tile))
        calls = tune.sound(calls, acts.double() @ w.double())
        results.add(f"dense {m}, {n}, {d}, {dtype}", tune.replayed(calls), best=10, against="dense")


class Backward:
    """The operands of a backward pass of `sae.decode`."""

    def __init__(self, dtype: torch.dtype) -> None:
        m, n, d, l0 = MANY
        self.weight, self.grad = normal(n, d, dtype=dtype), normal(m, d, dtype=dtype)
        self.acts = acts_of(m, n, l0, dtype)
        self.values, self.indices, self.spans = list_entries.list_slots(self.acts, min(n, 512))
        self.offsets, self.keys, _ = transpose.transpose_keys(TransposeKeys(self.indices, self.spans, n))


def scatter(results: tune.Results) -> None:
    """The gradient of dense activations, from products at entries."""
    for dtype in DTYPES:
        x = Backward(dtype)
        products = torch.randn(x.indices.shape, device=tune.DEVICE)
        given = SampledMatmul(x.grad, x.weight, x.indices, x.spans, None, True, True, products)
        call = lambda: sampled_matmul.sampled_matmul(given)[1]  # noqa: E731
        calls: tune.Calls = {"as shipped": call}
        for columns in (256, 512, 2048):
            calls[f"{columns} columns a warp"] = tune.under(call, (unpack, "FILL", columns))
        results.add(f"scatter {dtype}", tune.replayed(tune.sound(calls, call())), against="as shipped")


def backward(results: tune.Results) -> None:
    """The gradients of the weight and of values, at once."""
    for dtype in DTYPES:
        x = Backward(dtype)
        given = MatmulBwd(x.grad, x.indices, x.keys, x.offsets, x.values, x.spans, None, x.weight, dtype, None)
        call = lambda: matmul.matmul_bwd(given)  # noqa: E731
        calls: tune.Calls = {"as shipped": call}
        for e, step, size, warps, registers in (
            *((8, 4, 512, 1, registers) for registers in (80, 96, None)),
            *((4, 4, 512, 1, registers) for registers in (64, 80)),
            *((8, step, 256, 1, 64) for step in (4, 8)),
            *((8, 8, 512, 1, 96), (4, 4, 1024, 1, 96), (8, 4, 1024, 2, 80)),
        ):
            sizes = {"BLOCK_E": e, "STEP": step, "BLOCK_D": size // dtype.itemsize, "VEC": 16 // dtype.itemsize}
            tile = Tile(sizes, warps, registers=registers)
            name = f"{e} entries, steps of {step}, {size} bytes, {warps} warps, {registers} registers"
            calls[name] = tune.under(call, (matmul, "bwd_tile", lambda *_, tile=tile: tile))
        results.add(f"backward {dtype}", tune.replayed(tune.sound(calls, call())), against="as shipped")


def scan(results: tune.Results) -> None:
    """Words of a row of pre-activations that a warp of the encoder looks at."""
    m, n, d, _ = MANY
    dtype = DTYPES[0]
    x, w, threshold = normal(m, d, dtype=dtype), normal(d, n, dtype=dtype) / d**0.5, torch.full((n,), 3.1)
    activation = gemm.JumpReLU(threshold.to(tune.DEVICE))
    call = lambda: sae.encode(x.requires_grad_(), w, None, activation).counts  # noqa: E731
    calls: tune.Calls = {"as shipped": call, "product": lambda: x.detach() @ w}
    for groups in (64, 128, 256):
        calls[f"{groups} groups"] = tune.under(call, (encode, "GROUPS", groups))
    product = calls.pop("product")
    results.add("scan", tune.replayed(tune.sound(calls, call()) | {"product": product}), against="as shipped")


PARTS = {part.__name__: part for part in (one_launch, gather, dense, scatter, backward, scan)}

if __name__ == "__main__":
    torch.manual_seed(0)
    found = tune.Results(__file__)
    for name in sys.argv[1:] or PARTS:
        with torch.set_grad_enabled(name == "scan"):
            PARTS[name](found)
    found.keep()
