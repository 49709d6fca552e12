"""A block's forward and backward pass on lists of active entries: each kernel's candidates, then the whole.

Usage: python -m benchmarks.ffn.tune_training [--whole] [--plain] [M,entries[,percent of rows that are dense] ...].
bf16, K 2,048, N 5,632, or 8,192 in a plain block, a random pattern with so many entries a row. Beside the whole stand
dense PyTorch, `gemm.gated_mlp` and the operators of `rowsparse`, put together by hand. --whole leaves the candidates
out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import tune
from gossamer import ffn, gemm
from gossamer._core.compiling import together
from gossamer.ffn._triton import sparse_training, train_columns, train_rows
from gossamer.ffn._triton.entry_lists import Tile, Weights, column_lists
from gossamer.ffn.records import SparseTraining, SparseTrainingBwd
from gossamer.gemm.linear_pack import linear_pack_operator
from gossamer.gemm.records import LinearPack
from gossamer.rowsparse.matmul import matmul_operator, sampled_operator
from gossamer.rowsparse.records import Matmul, SampledMatmul, TransposeKeys
from gossamer.rowsparse.transpose import transpose_keys

CUDA = tune.DEVICE.type == "cuda"
PLAIN = "--plain" in sys.argv
K, N = (2048, 8192 if PLAIN else 5632) if CUDA else (32, 512)
SHAPES = [(16384, 29), (16384, 60), (16384, 100), (16384, 300), (8192, 29)]

UP = {
    f"{e} entries, {w} bytes wide, {s} stages, {r}": Tile(e, w, r, s)
    for e, w, s, r in ((1, 4096, 3, 96), (2, 4096, 3, 128), (1, 2048, 3, 96), (2, 2048, 1, 96), (1, 4096, 4, 96))
}  # fmt: skip
ROWS = {
    f"{e} entries, slices of {c} bytes, {r}": Tile(e, c, r)
    for e, c, r in (
        (4, 512, None), (8, 512, None), (4, 1024, None), (8, 1024, None), (4, 512, 64), (8, 512, 80), (2, 512, None),
        (16, 512, None), (4, 256, None), (8, 256, None), (4, 2048, None),
    )
}  # fmt: skip
COLUMNS = {
    f"{e} entries, slices of {c} bytes, {r}": Tile(e, c, r)
    for e, c, r in (
        (4, 1024, None), (4, 1024, 80), (8, 1024, 128), (8, 1024, None), (4, 1024, 88), (4, 1024, 96), (8, 1024, 120),
        (2, 1024, 80), (16, 1024, None), (4, 2048, None), (8, 2048, None), (2, 2048, None), (16, 512, None),
    )
}  # fmt: skip


class Operands:
    """Random operands of a block with about `entries` active ones a row, `heavy` of 100 rows nearly dense, and what a
    pass makes of them."""

    def __init__(self, m: int, entries: int, heavy: int = 0) -> None:
        generator = torch.Generator(tune.DEVICE).manual_seed(0)
        dtype = torch.bfloat16 if CUDA else torch.float32

        def draw(rows: int, columns: int, scale: int) -> Tensor:
            return (torch.randn(rows, columns, device=tune.DEVICE, generator=generator) / scale**0.5).to(dtype)

        self.x, self.grad = draw(m, K, 1), draw(m, K, 1)
        self.gate, self.down = draw(N, K, K), draw(N, K, N)
        self.up = None if PLAIN else draw(N, K, K)
        bound = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(1 - entries / N)).item()
        self.bias = torch.full((N,), -bound, device=tune.DEVICE, dtype=dtype)
        if heavy:
            # Rows here and there, with nearly all entries.
            self.x[:, 0], self.gate[:, 0] = 0, 0.25
            self.x[:: 100 // heavy, 0] = 16
        self.limit = max(128, 2 * entries)
        self.room = -(-m * (entries + max(8, entries // 4)) // 16) * 16
        self.capacity, self.slots = entries + 8 * round(entries**0.5), 16 if entries < 128 else 32
        self.leaves = [t.requires_grad_() for t in (self.x, self.gate, self.up, self.down) if t is not None]

    def dense(self) -> Tensor:
        gate = torch.relu(torch.nn.functional.linear(self.x, self.gate, self.bias))
        return (gate if self.up is None else gate * (self.x @ self.up.t())) @ self.down

    def gated_mlp(self) -> Tensor:
        assert self.up is not None
        return gemm.gated_mlp(self.x, self.gate, self.up, self.down.t(), activation="relu", gate_bias=self.bias)

    def ours(self, down: Tensor | None = None) -> Tensor:
        """`ffn.gated` and `ffn.plain`, which know nothing of the density."""
        down = self.down.t() if down is None else down
        if self.up is None:
            return ffn.plain(self.x, self.gate, down, up_bias=self.bias, method="gather")
        return ffn.gated(self.x, self.gate, self.up, down, gate_bias=self.bias, method="gather")

    def by_hand(self) -> Tensor:
        """The operators of `rowsparse`."""
        call = LinearPack(self.x, self.gate, self.bias, None, self.capacity, False)
        values, indices, spans = linear_pack_operator(call)
        if self.up is not None:
            values = (
                values * sampled_operator(SampledMatmul(self.x, self.up, indices, spans, None, False, True, None))[0]
            )
        return matmul_operator(Matmul(values, indices, spans, None, self.down, None, None))

    @property
    def operands(self) -> tuple[Any, ...]:
        return self.x, self.gate, self.bias, None, self.up, None, self.down.t()

    def lists(self) -> tuple[Tensor, ...]:
        options = (False, self.limit, self.room)
        with torch.no_grad():
            out, _, _, _, *kept = sparse_training.sparse_training(
                SparseTraining(*self.operands, None, *options, self.slots, 0)
            )
            dx, gate, up, down, _ = sparse_training.sparse_training_bwd(
                SparseTrainingBwd(self.grad, None, *self.operands, *kept, False)
            )
        return (out, dx, gate, down.t()) if self.up is None else (out, dx, gate, up, down.t())

    def step(self, forward: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        out = forward()
        return out, *torch.autograd.grad(out, self.leaves, self.grad)


def exact(of: Operands) -> tuple[Tensor, ...]:
    """In float64."""
    wide = [t.detach().double().requires_grad_() for t in of.leaves]
    x, gate, *up, down = wide
    hidden = torch.relu(x @ gate.t() + of.bias.double())
    hidden = hidden * (x @ up[0].t()) if up else hidden
    out = hidden @ down
    return out.detach(), *torch.autograd.grad(out, wide, of.grad.double())


def parts(of: Operands, results: tune.Results, label: str) -> None:
    """The candidates of each kernel."""
    with torch.no_grad():
        weights, room = Weights(of.gate, of.bias, None, of.up, None, of.down), of.room
        lists, _ = sparse_training.lists_of(of.x, weights, of.limit, room, of.slots, 0)
        nnz, heavy = int(lists.offsets[-1]), int(lists.heavy[0])
        print(f"{label}: {nnz / of.x.shape[0]:.1f} entries a row, {heavy} heavy rows, {int(lists.fired.max())} at most")
        values = train_rows.forward(lists, of.x, weights, None, False)[1]
        turned = column_lists(lists.values, values, lists.columns, lists.offsets, N, False)

        def down_gradients(tile: Tile = train_columns.DOWN) -> tuple[Tensor, Tensor]:
            hidden = turned.hidden, None
            found, _, dots = train_columns.weight_gradients(turned, hidden, of.grad, of.down, product=True, tile=tile)
            assert dots is not None
            return found, dots

        dots = down_gradients()[1]
        rows, columns = train_columns.hidden_gradients(turned, dots, lists.values, values, None, False)
        dx, second = torch.empty_like(of.x), None if of.up is None else (rows[1], of.up)
        pair = columns[0], None if of.up is None else columns[1]
        small = {
            "gate and lists": lambda: sparse_training.lists_of(of.x, weights, of.limit, room, of.slots, 0)[0][0],
            "column lists": lambda: column_lists(lists.values, values, lists.columns, lists.offsets, N, False).hidden[
                :nnz
            ],
            "hidden gradients": lambda: train_columns.hidden_gradients(turned, dots, lists.values, values, None, False)[
                0
            ][:, :nnz],
        }
        long_columns, long_offsets = lists.columns.int(), lists.offsets.long()
        small["transpose_keys"] = lambda: transpose_keys(TransposeKeys(long_columns, long_offsets, N))[0]
        for name, call in small.items():
            results.add(f"{label}: {name}", tune.kernels(call))
        results.add(f"{label}: small", tune.replayed(small))
        candidates: dict[str, tune.Calls] = {
            "up and down": {
                name: lambda tile=tile: train_rows.forward(lists, of.x, weights, None, False, tile)[0]
                for name, tile in UP.items()
            },
            "up and down, by down": {
                name: lambda tile=tile: train_rows.forward(lists, of.x, weights, None, False, tile=tile)[0]
                for name, tile in ROWS.items()
            },
            "dx": {
                name: lambda tile=tile: (
                    train_rows.multiply_rows(lists.columns, lists.offsets, (rows[0], of.gate), second, None, dx, tile)
                    or dx
                )
                for name, tile in ROWS.items()
            },
            "down gradient": {name: lambda tile=tile: down_gradients(tile)[0] for name, tile in COLUMNS.items()},
            "gate and up gradients": {
                name: lambda tile=tile: train_columns.weight_gradients(turned, pair, of.x, of.gate, tile=tile)[:2]
                for name, tile in COLUMNS.items()
            },
        }
        for name, calls in candidates.items():
            together(lambda calls=calls: [call() for call in calls.values()] and None)()
            calls = tune.sound(calls, next(iter(calls.values()))())
            results.add(f"{label}: {name}", tune.replayed(calls))


def whole(of: Operands, results: tune.Results, label: str) -> None:
    calls: tune.Calls = {
        "lists": of.lists,
        "ffn": lambda: of.step(of.ours),
        # As `nn.Linear` has it: the weight is transposed in both passes, and the gradient once more.
        "ffn, W_down by rows": lambda: of.step(lambda: of.ours(of.down.t().contiguous())),
        "dense": lambda: of.step(of.dense),
        "by hand": lambda: of.step(of.by_hand),
    }
    if not PLAIN:
        calls["gated_mlp"] = lambda: of.step(of.gated_mlp)
    want = exact(of)
    names = ("out", "x", "gate", "down") if PLAIN else ("out", "x", "gate", "up", "down")
    for name, call in calls.items():
        wrong = dict(zip(names, map(tune.error, call(), want), strict=True))
        results.note(f"{label}: errors of {name}", **wrong)
    del want
    first, second = of.lists(), of.lists()
    print("the same twice:", all(torch.equal(a, b) for a, b in zip(first, second, strict=True)))
    del first, second
    peaks = {}
    for name, call in calls.items():
        if CUDA:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            call()
            peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
    results.note(f"{label}: MiB", **peaks)
    results.add(f"{label}: replayed", tune.replayed(calls, repeat=3), against="dense")
    results.add(f"{label}: eager", tune.eager(calls), against="dense")


def main(arguments: list[str]) -> None:
    shapes: list[Any] = [tuple(map(int, a.split(","))) for a in arguments if not a.startswith("--")]
    results = tune.Results(__file__)
    for shape in shapes or (SHAPES if CUDA else [(40, 6)]):
        of, label = Operands(*shape), f"M, entries, dense rows: {shape}"
        if "--whole" not in arguments:
            parts(of, results, label)
        whole(of, results, label)
    results.keep()


if __name__ == "__main__":
    main(sys.argv[1:])
