"""`blocksparse.repeat(interleave=True)` at the published sizes (batch 4, n x n, 0 to 75% sparse), and joins."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.engine import Case, Provider
from benchmarks.peers import block_sparse as peers
from gossamer import blocksparse

REPEATS = 4


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """n 1,024 to 8,192, blocks of 64, float32 and bfloat16; small float32 ones for `quick` and on the CPU."""
    if quick or device.type == "cpu":
        yield _repeat_interleave(256, 32, 50, torch.float32)
        yield _cat(256, 32, 50, torch.float32)
        yield _adapt(256, 32, 64, 50, torch.float32)
        return
    for dtype in (torch.bfloat16, torch.float32):
        for n, sparsity in peers.PUBLISHED:
            yield _repeat_interleave(n, 64, sparsity, dtype)
    for sparsity in (25, 75):
        yield _cat(4096, 64, sparsity, torch.bfloat16)
        for block, to in ((64, 128), (64, 16)):
            yield _adapt(4096, block, to, sparsity, torch.bfloat16)


def _repeat_interleave(n: int, block: int, sparsity: int, dtype: torch.dtype) -> Case:
    def with_layout(x: Tensor, mask: Tensor) -> tuple:
        return peers.from_dense(x, mask), peers.layout_of(mask.repeat_interleave(REPEATS, 0), n)

    return peers.case_of_one(
        "repeat_interleave", n, block, sparsity, dtype, 1 + REPEATS,
        providers=(
            Provider(
                "gossamer, layout given",
                lambda x, layout: blocksparse.repeat(x, (REPEATS, 1, 1), interleave=True, layout=layout),
                ours=True,
                prepare=with_layout,
                result=peers.to_dense,
                capturable=True,
            ),
            peers.gossamer(lambda x: blocksparse.repeat(x, (REPEATS, 1, 1), interleave=True)),
            peers.dense(lambda x: x.repeat_interleave(REPEATS, 0)),
            *peers.blksprs(
                "blksprs",
                prepare=lambda bs, x, mask: (bs.ops.to_sparse(x, mask, block), mask, REPEATS, block, {}),
                call=lambda bs, x, mask, times, size, cache: bs.ops.repeat_interleave(
                    x, mask, times, size, layout_cache=cache
                )[0],
                result=lambda bs, out, x, mask: bs.ops.to_dense(out, mask.repeat_interleave(REPEATS, 0), block),
            ),
        ),
        reference=lambda x, mask: (x.double().repeat_interleave(REPEATS, 0),),
        sweep=peers.sweep_of(block, sparsity, dtype),
    )  # fmt: skip


def _cat(n: int, block: int, sparsity: int, dtype: torch.dtype) -> Case:
    providers = peers.gossamer(lambda x: blocksparse.cat([x, x], -1)), peers.dense(lambda x: torch.cat([x, x], -1))
    reference = lambda x, mask: (torch.cat([x, x], -1).double(),)  # noqa: E731
    return peers.case_of_one("cat", n, block, sparsity, dtype, 3, providers=providers, reference=reference)


def _adapt(n: int, block: int, to: int, sparsity: int, dtype: torch.dtype) -> Case:
    def prepare(x: Tensor, mask: Tensor) -> tuple:
        blocks = peers.from_dense(x, mask)
        return blocks, blocksparse.adapt(blocks.layout, to)

    return peers.case_of_one(
        "adapt_layout", n, block, sparsity, dtype, 2,
        parameters={"n": n, "block": block, "to": to, "sparsity": sparsity},
        providers=(
            Provider("gossamer", blocksparse.adapt, ours=True, prepare=prepare, result=peers.to_dense, capturable=True),
            *peers.blksprs(
                "blksprs",
                prepare=lambda bs, x, mask: (bs.ops.to_sparse(x, mask, block), mask, block, to),
                call=lambda bs, *given: bs.ops.adapt_layout(*given),
                result=lambda bs, out, x, mask: bs.ops.to_dense(*out, to),
            ),
        ),
        reference=lambda x, mask: (x.double(),),
    )  # fmt: skip
