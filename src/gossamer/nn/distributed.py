"""Autoencoders over several processes: their latents spread over them, or their data."""

import copy
import warnings
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from gossamer.nn._placement import DIMENSION, WHOLE, OnRanks, as_bytes, like, slice_of, tensors_of
from gossamer.nn.jumprelu import JumpReLUSAE
from gossamer.nn.sae import SAELoss, SparseAutoencoder
from gossamer.sae.sharded import check_group, sum_over

Kind = TypeVar("Kind", bound=SparseAutoencoder)


def shard_sae(model: Kind, group: Any = None) -> Kind:
    """Spreads the latents of an autoencoder over the ranks of a group: each holds a slice, and all work on every row.

    The module that comes back is called, trained and evaluated as the model is, on the same x on all ranks, and gives
    the same reconstruction and loss on all. Its gradients need no reduction: each rank steps an optimizer of its own,
    and b_dec stays the same everywhere. Clipping by the norm of all gradients has to add their squares
    up over the ranks. `model.gathered()` is the whole again.

    Args:
        model: an autoencoder of `gossamer.nn`, the same on all ranks: from one seed, or one file. It is not changed; on
            the CPU it may be larger than a GPU, and the slice is moved there with `.to(device)`.
        group: a `torch.distributed` process group; None is all processes.

    Returns:
        A module of the model's class, with `W_enc [d_in, d_sae_r]`, `W_dec [d_sae_r, d_in]`,
        `b_enc`, thresholds and firing statistics of its own latents, and b_dec, W_skip and BatchTopK's threshold whole.
        Rank r of W holds the latents from r * d_sae // W to (r + 1) * d_sae // W.

    Raises:
        TypeError: another module.
        ValueError: no process group, or fewer latents than ranks.
        NotImplementedError: a tensor in the model that this function does not know how to spread.

    Source: Gao et al. 2024, "Scaling and evaluating sparse autoencoders", on sharding over latents.

    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> shard_sae(TopKSAE(4, 16, k=2))
    TopKSAE(d_in=4, d_sae=16, k=2, latents=0:16)
    >>> torch.distributed.destroy_process_group()
    """
    operator = "nn.shard_sae"
    _check(operator, model)
    if model.sharded:
        raise TypeError(f"{operator}: model must be whole, got one that nn.shard_sae made. Give model.gathered().")
    rank, size = check_group(operator, group)
    if model.d_sae < size:
        raise ValueError(f"{operator}: model must have a latent for each of {size} ranks, got d_sae = {model.d_sae}.")
    latents, memo = slice_of(model.d_sae, rank, size), {}
    for name, tensor in tensors_of(model):
        if name in DIMENSION:
            part = tensor.detach().narrow(DIMENSION[name], latents.start, len(latents))
            memo[id(tensor)] = like(tensor, part.clone(memory_format=torch.contiguous_format))
        elif name not in WHOLE:
            raise NotImplementedError(f"{operator}: model has {name}, and how to spread that is not known here.")
    sharded: Any = copy.deepcopy(model, memo)
    sharded._placement = OnRanks(group, latents)
    return sharded


def _check(operator: str, model: Any) -> None:
    if not isinstance(model, SparseAutoencoder):
        raise TypeError(f"{operator}: model must be an autoencoder of gossamer.nn, got {type(model).__name__}.")


class DataParallel(torch.nn.Module):
    """See `data_parallel_sae`."""

    def __init__(self, model: SparseAutoencoder, group: Any) -> None:
        super().__init__()
        self.model, self.group = model, group
        self._has_warned = False

    def __call__(self, x: Tensor, *args: Any, **options: Any) -> SAELoss:
        """Initialises a fresh module before hooks of a wrapper run, which may put parameters together from slices."""
        if self.training and isinstance(self.model, JumpReLUSAE) and self.model.is_fresh:
            if _ranks_may_have_finished():
                raise RuntimeError(
                    "nn.data_parallel_sae: inside of Join no rank can count on the others, and a JumpReLUSAE with a "
                    "target starts from the rows of all ranks. Call its loss once, or model.initialize_(x) with the "
                    "same x on all ranks, before Join."
                )
            _initialize_together(self.model, x, self.group)
        return super().__call__(x, *args, **options)

    def forward(self, x: Tensor, *args: Any, **options: Any) -> SAELoss:
        """`model.loss` of this rank's rows, and the statistics of those of all ranks."""
        alone = _ranks_may_have_finished()
        if alone and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "nn.data_parallel_sae: inside of torch.distributed.algorithms.join.Join the statistics (firing counts, "
                "dead latents, thresholds, steering) are those of one rank's rows.",
                stacklevel=2,
            )
        self.model._rows_on = None if alone else (self.group,)
        try:
            return self.model.loss(x, *args, **options)  # type: ignore[operator]
        finally:
            self.model._rows_on = None


def _ranks_may_have_finished() -> bool:
    """Whether DistributedDataParallel calls this inside of `Join`, where it answers for ranks without a batch: with its
    own reductions, so that any other would wait for ever, or meet one of these."""
    active = DistributedDataParallel._get_active_ddp_module()
    return active is not None and bool(active._join_config.enable)


def data_parallel_sae(model: Kind, group: Any = None) -> DataParallel:
    """The loss of an autoencoder as a module, for DistributedDataParallel or fully_shard: each rank has its own rows.

    Both act when a module's `forward` is called, and an autoencoder's is its reconstruction. This one's is
    `model.loss(x)`. It also keeps the statistics right: firing counts are those of the rows of all ranks, and so are
    the steps since a latent fired; every rank has the same. DistributedDataParallel alone would overwrite them by those
    of rank 0. That takes a reduction of d_sae numbers a step.

    DistributedDataParallel and fully_shard average gradients over ranks: with as many rows on each, the result is that
    of one process with all of them. Ranks with unequal numbers of batches train under
    `torch.distributed.algorithms.join.Join` around DistributedDataParallel; statistics there are those of one rank's
    rows, which a warning says. `BatchTopKSAE` lets the rows of a rank compete with one another and not with those
    of other ranks, so it is that of W batches and not of one; its threshold is the mean of those of the ranks.

    Args:
        model: an autoencoder or `Transcoder` of this package, or the result of `shard_sae`, for a group across the
            shards. Its parameters and buffers become those of the group's first rank.
        group: a `torch.distributed` process group, that of the wrapper; None is all processes.

    Returns:
        A module whose `forward(x)` is `model.loss(x)` (of a `Transcoder`, `forward(x, y)`), with the model as its
        attribute `model`. `mse`, `l0` and the rest are those of this rank's rows.

    Raises:
        TypeError: another module.
        ValueError: no process group.
        NotImplementedError: a buffer in the model of which this function does not know how ranks agree on it.

    Source: Li et al. 2020, "PyTorch Distributed" (DistributedDataParallel); the statistics are new.

    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> trained = torch.nn.parallel.DistributedDataParallel(data_parallel_sae(TopKSAE(4, 16, k=2)))
    >>> trained(torch.randn(3, 4)).loss.backward()
    >>> del trained  # before its group: the other way round PyTorch may wait for itself for ever
    >>> torch.distributed.destroy_process_group()
    """
    operator = "nn.data_parallel_sae"
    _check(operator, model)
    check_group(operator, group)
    for name, _ in model.named_buffers():
        if name not in ("firing_counts", "steps_since_fired", "threshold", "input_scale", "steering"):
            raise NotImplementedError(f"{operator}: model has the buffer {name}, on which ranks cannot agree here.")
    for _, tensor in tensors_of(model):
        dist.broadcast(as_bytes(tensor.detach()), group=group, group_src=0)
    if isinstance(model, JumpReLUSAE):
        model.look_up_whether_fresh()
    return DataParallel(model, group)


@torch.no_grad()
def _initialize_together(model: JumpReLUSAE, x: Tensor, group: Any) -> None:
    """`model.initialize_` of the rows of all ranks; where parameters are spread over ranks, slices of the same."""
    W_enc, W_dec = _full(model.W_enc), _full(model.W_dec)
    found = model.measured(x, W_enc, W_dec)
    mean = type(found)(*(sum_over(part, group) / dist.get_world_size(group) for part in found))
    for name, start in model.begin_(W_enc, mean).items():
        parameter = model.get_parameter(name)
        if isinstance(parameter, DTensor):
            start = distribute_tensor(start, parameter.device_mesh, parameter.placements)
        parameter.copy_(start)


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
