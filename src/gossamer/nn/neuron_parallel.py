"""Tensor parallelism of feed-forward blocks: each rank has some of the neurons."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from gossamer.ffn import Activity
from gossamer.nn.mlp import MLP, GatedMLP, Outputs
from gossamer.sae.sharded import add_parts, copy_to_ranks, sum_over

_OPERATOR = "nn.NeuronParallel"


class NeuronParallel(ParallelStyle):
    """Spreads the neurons of an `nn.GatedMLP` or `nn.MLP` over the ranks of a mesh of one dimension.

    Each rank computes its own neurons with the operators of one process, sparse ones too, and one `all_reduce` adds
    their results; the gradient of x takes another. x and the result are the same on all ranks. Parameters become
    DTensors, for optimizers, gradient clipping, checkpoints, and `fully_shard` over another dimension of the mesh. With
    `l1=True` the activity is that of all neurons, and `unlisted` that of the rank with the most.

    Raises:
        TypeError: another module.
        ValueError: a number of neurons that is no multiple of the ranks.

    Source: Shoeybi et al. 2019, "Megatron-LM", section 3.

    >>> from torch.distributed.tensor.parallel import parallelize_module
    >>> parallelize_module(block, mesh, NeuronParallel())  # doctest: +SKIP
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) not in (GatedMLP, MLP):
            raise TypeError(f"{_OPERATOR}: module must be an nn.GatedMLP or nn.MLP, got {type(module).__name__}.")
        block: Any = module
        neurons, ranks = block.down_proj.in_features, device_mesh.size()
        if neurons % ranks:
            raise ValueError(f"{_OPERATOR}: intermediate_size must be a multiple of the {ranks} ranks, got {neurons}.")
        for name, layer in module.named_children():
            if not isinstance(layer, nn.Linear):
                continue
            down = name == "down_proj"
            for kind, parameter in layer.named_parameters():
                place = (Replicate() if kind == "bias" else Shard(1)) if down else Shard(0)
                spread = distribute_tensor(parameter.detach(), device_mesh, [place], src_data_rank=self.src_data_rank)
                layer.register_parameter(kind, nn.Parameter(spread, parameter.requires_grad))
        parallel: Any = _ParallelGated if isinstance(module, GatedMLP) else _ParallelPlain
        module.__class__, module.group = parallel, device_mesh.get_group()  # type: ignore[assignment]
        return module


class _Parallel(nn.Module):
    """A block whose parameters are DTensors, and which computes with the part of each that this rank has."""

    kind: ClassVar[Any]
    group: Any
    down_proj: nn.Linear

    def forward(self, x: Tensor) -> Any:
        """As the block's, on the same x on all ranks."""
        bias: Any = self.down_proj.bias
        with self._local():
            found = self.kind.forward(self, copy_to_ranks(x, self.group))
        out = add_parts(found.out if isinstance(found, Outputs) else found, self.group)
        out = out if bias is None else out + bias.to_local().to(out.dtype)
        if not isinstance(found, Outputs):
            return out
        l1, l0, fired, unlisted = found.activity
        counts = torch.cat((unlisted[None], fired))
        parts = [torch.empty_like(counts) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, counts, group=self.group)
        unlisted, fired = torch.stack(parts)[:, 0].max(), torch.cat([part[1:] for part in parts])
        return Outputs(out, Activity(add_parts(l1, self.group), sum_over(l0, self.group), fired, unlisted))

    @contextmanager
    def _local(self) -> Iterator[None]:
        """Layers have this rank's parts as parameters, and down_proj no bias, which all ranks would add."""
        layers = [layer for layer in self.children() if isinstance(layer, nn.Linear)]
        kept = [dict(layer._parameters) for layer in layers]
        try:
            for layer in layers:
                parameters: Any = layer._parameters
                for name, parameter in parameters.items():
                    once = layer is self.down_proj and name == "bias"
                    parameters[name] = None if parameter is None or once else parameter.to_local()
            yield
        finally:
            for layer, whole in zip(layers, kept):
                layer._parameters.update(whole)


class _ParallelGated(_Parallel, GatedMLP):
    kind = GatedMLP


class _ParallelPlain(_Parallel, MLP):
    kind = MLP
