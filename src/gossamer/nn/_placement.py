"""Where the latents of an autoencoder are: all of them here, or a slice of them on each rank of a group."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer import sae
from gossamer.rowsparse import Rows
from gossamer.sae.sharded import add_parts, check_group, copy_to_ranks, sum_over

DIMENSION = {"W_enc": 1, "W_dec": 0, "b_enc": 0, "scaled_b_enc": 0, "log_threshold": 0}
DIMENSION |= {"b_gate": 0, "b_mag": 0, "r_mag": 0, "firing_counts": 0, "steps_since_fired": 0}
"""Along which dimension a tensor of an autoencoder lists the latents."""
WHOLE = {"b_dec", "scaled_b_dec", "threshold", "W_skip", "input_scale", "steering"}
"""Tensors that every rank holds whole."""


class Here:
    """All latents are here. A module asks its placement for each sum, choice and product over all latents."""

    latents: range | None = None
    """The slice of this rank, or None for all."""

    def encode(self, x: Tensor, W_enc: Tensor, b_enc: Tensor | None, **options: Any) -> tuple[Any, Tensor]:
        """(latents, l0 of each row)"""
        rows = sae.encode(x, W_enc, b_enc, **options)
        return rows, rows.l0

    def decode(self, rows: Rows, W_dec: Tensor, b_dec: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
        """The reconstruction `[..., d_out]`."""
        return sae.decode(rows, W_dec, b_dec, out_dtype=out_dtype)

    def estimate(self, rows: Rows, W_dec: Tensor) -> Tensor:
        """A product with a few columns of a decoder, of which a row holds half or less: sparse products are slower."""
        return rows.to_dense() @ W_dec.to(rows.dtype)

    def highest(self, keys: Tensor, count: int) -> tuple[Tensor, Tensor | None]:
        """(indices of the keys that may be among the `count` highest, which of them are, or None for all); no two
        keys are equal."""
        return keys.topk(count).indices, None

    def any(self, flags: Tensor) -> Tensor:
        return flags.any()

    def least(self, value: Tensor) -> Tensor:
        """The least of the values of all ranks."""
        return value

    def add_parts(self, part: Tensor) -> Tensor:
        """A sum over all latents, from that over the latents here; differentiable."""
        return part

    def copied(self, x: Tensor) -> Tensor:
        """x, for results that `add_parts` sums."""
        return x

    def gathered(self, model: Any, rank: int | None) -> Any:
        return copy.deepcopy(model).cpu()

    def __str__(self) -> str:
        return ""


@dataclass(frozen=True)
class OnRanks(Here):
    """A slice on each rank of a group."""

    group: Any
    latents: range

    @property
    def _whole_group(self) -> Any:
        """The group, which None does not name to an operator."""
        return dist.group.WORLD if self.group is None else self.group

    def encode(self, x: Tensor, W_enc: Tensor, b_enc: Tensor | None, **options: Any) -> tuple[Any, Tensor]:
        rows = sae.encode(x, W_enc, b_enc, **options, group=self._whole_group)
        return rows, add_parts(rows.l0, self.group)

    def decode(self, rows: Rows, W_dec: Tensor, b_dec: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
        return sae.decode(rows, W_dec, b_dec, out_dtype=out_dtype, group=self._whole_group)

    def estimate(self, rows: Rows, W_dec: Tensor) -> Tensor:
        return sae.decode(rows, W_dec, group=self._whole_group)

    def highest(self, keys: Tensor, count: int) -> tuple[Tensor, Tensor | None]:
        _, size = check_group("nn.shard_sae", self.group)
        mine, which = keys.topk(min(count, len(keys)))
        padded = torch.cat([mine, mine.new_full((count - len(mine),), -1)])
        found = [torch.empty_like(padded) for _ in range(size)]
        dist.all_gather(found, padded, group=self.group)
        return which, mine >= torch.cat(found).topk(count).values[-1]

    def any(self, flags: Tensor) -> Tensor:
        return sum_over(flags.any().int(), self.group) > 0

    def least(self, value: Tensor) -> Tensor:
        dist.all_reduce(value, dist.ReduceOp.MIN, group=self.group)
        return value

    def add_parts(self, part: Tensor) -> Tensor:
        return add_parts(part, self.group)

    def copied(self, x: Tensor) -> Tensor:
        return copy_to_ranks(x, self.group)

    def gathered(self, model: Any, rank: int | None) -> Any:
        here, size = check_group("nn.shard_sae: gathered", self.group)
        ranges = [slice_of(model.d_sae, r, size) for r in range(size)]
        memo: dict[int, Any] = {id(self): HERE}
        for name, tensor in tensors_of(model):
            found = tensor.detach()
            if name in DIMENSION:
                found = joined(found, DIMENSION[name], ranges, here, self.group, rank in (None, here))
            found = found.clone() if found.device.type == "cpu" else found.cpu()
            memo[id(tensor)] = like(tensor, found)
        return copy.deepcopy(model, memo) if rank in (None, here) else None

    def __deepcopy__(self, memo: dict[int, Any]) -> OnRanks:
        return copy.copy(self)

    def __str__(self) -> str:
        return f", latents={self.latents.start}:{self.latents.stop}"


HERE = Here()


def tensors_of(model: torch.nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def slice_of(d_sae: int, rank: int, size: int) -> range:
    return range(rank * d_sae // size, (rank + 1) * d_sae // size)


def like(tensor: Tensor, found: Tensor) -> Tensor:
    return torch.nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else found


def as_bytes(tensor: Tensor) -> Tensor:
    """A view that every backend sends, whatever the dtype."""
    return tensor.view(-1).view(torch.uint8)


def joined(part: Tensor, dim: int, ranges: list[range], rank: int, group: Any, keep: bool) -> Tensor:
    """The slices of all ranks, one after the other and on the CPU, because the whole may be too large for a GPU."""
    shape = list(part.shape)
    shape[dim] = ranges[-1].stop if keep else 0
    whole = torch.empty(shape, dtype=part.dtype, device="cpu")
    for r, held in enumerate(ranges):
        shape[dim] = len(held)
        sent = part.contiguous() if r == rank else part.new_empty(shape)
        dist.broadcast(as_bytes(sent), group=group, group_src=r)
        if keep:
            whole.narrow(dim, held.start, len(held)).copy_(sent)
    return whole
