"""A block's forward and backward pass on lists of active entries: each kernel's candidates.

Usage: python -m benchmarks.ffn.tune_training [--plain] [M,entries[,percent of rows that are dense] ...].
bf16, K 2,048, N 5,632, or 8,192 in a plain block, a random pattern with so many entries a row. The whole block is a
case of `bench_training`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from benchmarks import tune
from gossamer._core.compiling import together
from gossamer.ffn._triton import sparse_training, train_columns, train_rows
from gossamer.ffn._triton.entry_lists import Tile, Weights, column_lists
from gossamer.rowsparse.records import TransposeKeys
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
        self.slots = 16 if entries < 128 else 32


def parts(of: Operands, results: tune.Results, label: str) -> None:
    """The candidates of each kernel."""
    with torch.no_grad():
        weights, room = Weights(of.gate, of.bias, None, of.up, None, of.down), of.room
        lists, _ = sparse_training.lists_of(of.x, weights, of.limit, room, of.slots, 0)
        nnz, heavy = int(lists.offsets[-1]), int(lists.rows[1, 0])
        print(f"{label}: {nnz / of.x.shape[0]:.1f} entries a row, {heavy} heavy rows, {int(lists.fired.max())} at most")
        train_rows.forward(lists, of.x, weights, None, False)
        gate, values = lists.values[0], None if of.up is None else lists.values[1]
        turned = column_lists(gate, values, lists.columns, lists.offsets, N, False)

        def down_gradients(tile: Tile = train_columns.DOWN) -> tuple[Tensor, Tensor]:
            hidden = turned.hidden, None
            found, _, dots = train_columns.weight_gradients(turned, hidden, of.grad, of.down, product=True, tile=tile)
            assert dots is not None
            return found, dots

        dots = down_gradients()[1]
        rows, columns = train_columns.hidden_gradients(turned, dots, gate, values, None, False)
        dx, second = torch.empty_like(of.x), None if of.up is None else (rows[1], of.up)
        pair = columns[0], None if of.up is None else columns[1]
        small = {
            "gate and lists": lambda: sparse_training.lists_of(of.x, weights, of.limit, room, of.slots, 0)[0][0],
            "column lists": lambda: column_lists(gate, values, lists.columns, lists.offsets, N, False).hidden[:nnz],
            "hidden gradients": lambda: train_columns.hidden_gradients(turned, dots, gate, values, None, False)[0][
                :, :nnz
            ],
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


def main(arguments: list[str]) -> None:
    shapes: list[Any] = [tuple(map(int, a.split(","))) for a in arguments if not a.startswith("--")]
    results = tune.Results(__file__)
    for shape in shapes or (SHAPES if CUDA else [(40, 6)]):
        of, label = Operands(*shape), f"M, entries, dense rows: {shape}"
        parts(of, results, label)
    results.keep()


if __name__ == "__main__":
    main(sys.argv[1:])
