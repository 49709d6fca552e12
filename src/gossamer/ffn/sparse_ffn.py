"""A feed-forward block whose gate is sparse, as an operator."""

from typing import Any

import torch
from torch import Tensor

from gossamer._core.operator import register
from gossamer.ffn._torch import sparse_ffn as _cpu
from gossamer.ffn.records import SparseFfn


def _fake(call: SparseFfn) -> tuple[Tensor, Tensor]:
    x, m = call.x, call.x.shape[0]
    nnz = x.new_empty(m if call.counted else 0, dtype=torch.int32)
    return x.new_empty(m, call.down_weight.shape[0]), nnz


@register(SparseFfn, cpu=_cpu.sparse_ffn, fake=_fake, repeats=True)
def sparse_ffn() -> Any:
    from gossamer.ffn._triton.sparse_ffn import sparse_ffn

    return sparse_ffn
