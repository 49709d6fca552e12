"""Blocks whose neurons are spread over ranks, against one process."""

import copy
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from gossamer import nn

NEURONS = 24


def pair(kind: Any, mesh: Any, shift: float = 0.0, **options: Any) -> tuple[Any, Any]:
    """A block of one process in float64, or float32 on a GPU, and the same spread over a mesh; with a shift of the
    gate's bias few neurons are active."""
    torch.manual_seed(0)
    cpu = mesh.device_type == "cpu"
    dtype = torch.float64 if cpu else torch.float32
    one = kind(8, NEURONS, "relu", device="cpu" if cpu else "cuda", dtype=dtype, **options)
    if shift:
        torch.nn.init.constant_(getattr(one, "gate_proj", one.up_proj).bias, shift)
    return one, parallelize_module(copy.deepcopy(one), mesh, nn.NeuronParallel())


def compare(one: Any, many: Any, x: Tensor, l1: bool) -> None:
    results, inputs = [], [x.clone().requires_grad_(), x.clone().requires_grad_()]
    for block, given in zip((one, many), inputs):
        found = block(given)
        out, penalty = (found.out, found.activity.l1) if l1 else (found, 0.0)
        (out.square().sum() + 0.3 * penalty).backward()
        results.append(found)
    if l1:
        torch.testing.assert_close(results[1].activity, results[0].activity)
    torch.testing.assert_close(*(found.out if l1 else found for found in results))
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    for name, parameter in many.named_parameters():
        assert isinstance(parameter, DTensor)
        torch.testing.assert_close(parameter.grad.full_tensor(), one.get_parameter(name).grad, msg=name)


def case_neurons_over_ranks(rank: int, world: int, device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (world,))
    for kind in (nn.GatedMLP, nn.MLP):
        for bias in (False, True):
            for l1 in (False, True):
                for method in ("fused", "gather"):
                    one, many = pair(kind, mesh, bias=bias, l1=l1, method=method)
                    assert many.up_proj.weight.to_local().shape == (NEURONS // world, 8)
                    compare(one, many, torch.randn(2, 5, 8, dtype=one.up_proj.weight.dtype, device=device), l1)
                    assert method != "gather" or many.last_path == "gather"


def case_sparse_inference_and_clipping(rank: int, world: int, device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (world,))
    for kind in (nn.GatedMLP, nn.MLP):
        one, many = pair(kind, mesh, method="gather", bias=True, shift=-0.8)
        x = torch.randn(6, 8, dtype=one.up_proj.weight.dtype, device=device)
        with torch.no_grad():
            torch.testing.assert_close(many(x), one(x))
        for block in (one, many):
            block(x).sum().backward()
        norms = [torch.nn.utils.clip_grad_norm_(block.parameters(), 0.1) for block in (one, many)]
        torch.testing.assert_close(norms[1].full_tensor(), norms[0])


def case_with_fully_shard(rank: int, world: int, device: torch.device) -> None:
    """A mesh of 1 over data and all over neurons: both kinds of DTensor in one parameter."""
    mesh = init_device_mesh(device.type, (1, world), mesh_dim_names=("data", "neurons"))
    one, many = pair(nn.GatedMLP, mesh["neurons"], l1=True)
    fully_shard(many, mesh=mesh["data"])
    compare(one, many, torch.randn(5, 8, dtype=one.up_proj.weight.dtype, device=device), True)


def case_refused(rank: int, world: int, device: torch.device) -> None:
    mesh, said = init_device_mesh(device.type, (world,)), []
    for block in (nn.GatedMLP(8, world * 4 + 1, device=device), torch.nn.Linear(8, 8, device=device)):
        try:
            parallelize_module(block, mesh, nn.NeuronParallel())
        except (ValueError, TypeError) as error:
            said.append(str(error))
    assert f"intermediate_size must be a multiple of the {world} ranks" in said[0] and "got Linear" in said[1]
