"""A feed-forward block whose gate is sparse, as an operator."""

from typing import Any

import torch
from torch import Tensor

from gossamer._core.ops import INTERPRET, register
from gossamer.ffn._torch import sparse_ffn as _cpu
from gossamer.ffn.costs import sampled_groups


def _fake(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    m, down_weight, step = x.shape[0], rest[5], rest[9]
    nnz = x.new_empty(m if step else 0, dtype=torch.int32)
    counted = sampled_groups(m, step) if x.is_cuda or INTERPRET else 1
    return x.new_empty(m, down_weight.shape[0]), nnz, nnz.new_empty(counted)


sparse_ffn = register(
    "sparse_ffn(Tensor x, Tensor gate_weight, Tensor? gate_bias, Tensor? threshold, Tensor? up_weight, "
    "Tensor? up_bias, Tensor down_weight, Tensor? down_bias, bool squared, bool united, SymInt step) "
    "-> (Tensor, Tensor, Tensor)",
    cpu=_cpu.sparse_ffn,
    strided=("x", "gate_weight", "up_weight", "down_weight"),
    fake=_fake,
)
