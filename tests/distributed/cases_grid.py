"""Four processes: latents over pairs, data over the pairs of pairs."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from gossamer import nn
from tests.distributed.cases_nn import ROWS, assert_same, batches, make, one_process, train


def case_shards_of_data_parallel(rank: int, world: int, device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("data", "latents"))
    data, latents = mesh.get_group("data"), mesh.get_group("latents")
    x, compared = batches(2 * ROWS, device), []
    for kind in ("topk", "batchtopk", "jumprelu"):
        model = nn.shard_sae(make(kind, device), latents)
        module = DistributedDataParallel(nn.data_parallel_sae(model, data), process_group=data)
        here = dist.get_rank(data)
        losses = train(module, lambda batch: module(batch).loss, x[:, here * ROWS : (here + 1) * ROWS])  # noqa: B023
        for loss in losses:
            dist.all_reduce(loss, group=data)
        compared.append((kind, model.gathered(), [loss / 2 for loss in losses]))
    for kind, gathered, losses in compared:
        one, wanted = one_process(kind, x, 2, device)
        assert_same(gathered.state_dict(), one.state_dict(), kind)
        assert_same(dict(enumerate(losses)), dict(enumerate(wanted)), kind)
