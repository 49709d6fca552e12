"""Training over several processes, against one."""

import copy
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gossamer import nn

D_IN, D_OUT, D_SAE, STEPS = 9, 5, 31, 6
ROWS = 4  # of a rank: few enough that latents stay silent for a step
KINDS = ("topk", "batchtopk", "jumprelu", "transcoder", "jumprelu steered", "standard", "gated", "matryoshka")
SHARDED = (*KINDS, "matryoshka of rows")
# With what sums over latents, or over the dead of them: few enough steps to die in, and more dead than are taken.
VARIANTS: dict[str, dict[str, Any]] = {
    "topk": {"aux_coefficient": 0.3, "aux_k": 2, "dead_after": 1},
    "batchtopk": {"aux_coefficient": 0.3, "aux_k": 5, "dead_after": 2},
    "transcoder": {"aux_coefficient": 0.3, "aux_k": 2, "dead_after": 1, "skip": True},
    "jumprelu": {"penalty": "quadratic", "target_l0": 3.0, "ste_to_input": True},
    "jumprelu tanh": {"penalty": "tanh", "pre_act_coefficient": 0.05, "dead_after": 1},
}


def make(kind: str, device: torch.device, seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    options = {"dtype": torch.float64 if device.type == "cpu" else torch.float32} | options
    kind, steered, rows = kind.split()[0], kind.endswith("steered"), kind.endswith("rows")
    if kind == "topk":
        return nn.TopKSAE(D_IN, D_SAE, 4, **options).to(device)
    if kind == "batchtopk":
        return nn.BatchTopKSAE(D_IN, D_SAE, 4, threshold_rate=0.25, **options).to(device)
    if kind == "matryoshka":
        if rows:
            return nn.MatryoshkaSAE(D_IN, D_SAE, 4, widths=(3, 20, 25, D_SAE), **options).to(device)
        return nn.MatryoshkaBatchTopKSAE(D_IN, D_SAE, 4, threshold_rate=0.25, widths=(7, D_SAE), **options).to(device)
    if kind in ("standard", "gated"):
        model = {"standard": nn.StandardSAE, "gated": nn.GatedSAE}[kind](D_IN, D_SAE, **options).to(device)
        torch.nn.init.normal_(model.W_enc, std=0.3)
        # So few latents fire that some stay silent for a step.
        torch.nn.init.constant_(model.b_enc if kind == "standard" else model.b_gate, -1.0)
        return model
    if kind == "transcoder":
        model = nn.Transcoder(D_IN, D_OUT, D_SAE, 4, **options).to(device)
        # From 0 nothing but the decoder would train in the first steps.
        torch.nn.init.normal_(model.W_dec, std=0.3)
        return model
    if steered:
        # Fresh: each way of training looks at its data by itself.
        options |= {"target_l0": 3.0, "warm_up": 4}
    else:
        options |= {"bandwidth": 0.3, "initial_threshold": 0.5, "l0_coefficient": 0.05}
    return nn.JumpReLUSAE(D_IN, D_SAE, **options).to(device)


def batches(rows: int, device: torch.device) -> Tensor:
    x = torch.randn(STEPS, rows, D_IN, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return x.to(device, torch.float64 if device.type == "cpu" else torch.float32)


def given(model: torch.nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """What the loss takes."""
    return (x, x[..., :D_OUT].square()) if isinstance(model, nn.Transcoder) else (x,)


def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """As sensitive to gradients as to their direction: Adam would divide rounding errors by themselves."""
    # The penalty that is steered begins heavy.
    steered = any("steering" in name for name, _ in model.named_buffers())
    return torch.optim.SGD(model.parameters(), lr=3e-4 if steered else 0.03, momentum=0.9)


def train(model: Any, loss: Any, x: Tensor) -> list[Tensor]:
    steps, losses = optimizer(model), []
    for batch in x:
        found = loss(batch)
        steps.zero_grad()
        found.backward()
        steps.step()
        losses.append(found.detach())
    return losses


def assert_same(got: Any, want: Any, what: str) -> None:
    """Statistics exactly, parameters within rounding."""
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        found = got[name].to(tensor.device)
        if tensor.is_floating_point():
            tolerance = 1e-9 if tensor.dtype is torch.float64 else 1e-3
            torch.testing.assert_close(
                found, tensor, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{what} {n}: {m}"
            )
        else:
            assert torch.equal(found, tensor), f"{what} {name}"


def case_sharded_training(rank: int, world: int, device: torch.device) -> None:
    """Losses, statistics, the threshold and, once gathered, the parameters are those of one process."""
    x, compared = batches(12, device).view(STEPS, 3, 4, D_IN), []
    for kind, options in [*((kind, {}) for kind in SHARDED), *VARIANTS.items()]:
        one = make(kind, device, **options)
        begun = {name: tensor.clone() for name, tensor in one.state_dict().items()}
        model = nn.shard_sae(one)
        parts = dict(model.named_parameters())
        assert all(torch.equal(one.state_dict()[name], tensor) for name, tensor in begun.items())
        losses = train(model, lambda batch: model.loss(*given(model, batch)).loss, x)  # noqa: B023
        wanted = train(one, lambda batch: one.loss(*given(one, batch)).loss, x)  # noqa: B023
        model.eval()
        one.eval()
        with torch.no_grad():
            terms, whole = model.loss(*given(model, x[0])), one.loss(*given(one, x[0]))
            pieces = [model.encode(x[0]).to_dense(), one.encode(x[0]).to_dense(), model(x[0]), one(x[0])]
        compared.append((kind, model, model.gathered(), one, losses, wanted, terms, whole, pieces, parts))
    for kind, model, gathered, one, losses, wanted, terms, whole, pieces, parts in compared:
        assert model.latents == range(rank * D_SAE // world, (rank + 1) * D_SAE // world)
        assert parts["W_enc"].shape == (D_IN, len(model.latents)) and parts["W_dec"].is_contiguous()
        assert isinstance(model, type(one)) and type(gathered) is type(one) and gathered.training is one.training
        assert_same(gathered.state_dict(), one.state_dict(), kind)
        assert_same(dict(enumerate(losses)), dict(enumerate(wanted)), kind)
        assert_same(dict(enumerate(terms)), dict(enumerate(whole)), kind)
        mine = slice(model.latents.start, model.latents.stop)
        assert_same({0: pieces[0], 1: pieces[2]}, {0: pieces[1][..., mine], 1: pieces[3]}, kind)
        assert one.firing_counts.any() and torch.equal(model.firing_counts, one.firing_counts[mine])
        assert repr(gathered) == repr(one) and f"latents={mine.start}:{mine.stop}" in repr(model)


def case_ranks_with_unequal_numbers_of_batches(rank: int, world: int, device: torch.device) -> None:
    """Under Join, where one rank has none at all: the run ends, and all ranks have the same parameters."""
    x, found = batches(ROWS, device), []
    for kind in KINDS:
        model = make(kind, device)
        if kind.endswith("steered"):
            with pytest.raises(RuntimeError, match=r"inside of Join .* starts from the rows of all"):
                train_unevenly(nn.data_parallel_sae(make(kind, device)), x[:1])
            model.initialize_(x[0])
        begun = {name: tensor.clone() for name, tensor in model.named_parameters()}
        parallel = nn.data_parallel_sae(model)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            train_unevenly(parallel, x[: (5, 3, 0)[rank]])
        ours = [str(each.message) for each in said if "nn.data_parallel_sae" in str(each.message)]
        assert len(ours) == (rank < 2) and all("statistics" in each for each in ours)
        # Outside of Join ranks agree on statistics again.
        parallel(*given(model, x[0])).loss.backward()
        whole = {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        sent = {name: [torch.empty_like(tensor) for _ in range(world)] for name, tensor in whole.items()}
        for name, tensor in whole.items():
            dist.all_gather(sent[name], tensor.contiguous())
        found.append((kind, begun, sent))
    for kind, begun, sent in found:
        for name, all_ranks in sent.items():
            assert all(torch.equal(each, all_ranks[0]) for each in all_ranks), f"{kind} {name}"
            assert name not in begun or not torch.equal(all_ranks[0], begun[name]), f"{kind} {name}"


def train_unevenly(parallel: torch.nn.Module, x: Tensor) -> None:
    trained = DistributedDataParallel(parallel)
    steps = optimizer(trained)
    with Join([trained]):
        for batch in x:
            steps.zero_grad()
            trained(*given(parallel.model, batch)).loss.backward()
            steps.step()


def case_sharded_and_saved(rank: int, world: int, device: torch.device) -> None:
    for kind in SHARDED:
        one = make(kind, device, dtype=torch.bfloat16)
        if kind.endswith("steered"):
            # What is loaded has begun, whatever it was before.
            one.initialize_(batches(12, device)[0].bfloat16())
        model = nn.shard_sae(one)
        gathered = model.gathered(rank=world - 1)
        if rank < world - 1:
            assert gathered is None
            continue
        assert_same(gathered.state_dict(), one.state_dict(), kind)
        gathered.W_enc.data.zero_()
        assert one.W_enc.any() and model.W_enc.any()
        layout = "sae_lens"
        if kind == "transcoder":
            one, layout = nn.Transcoder(D_IN, D_IN, D_SAE, 4, skip=True, device=device), "sparsify"
        with tempfile.TemporaryDirectory() as folder:
            with pytest.raises(TypeError, match=r"nn\.save_sae: model holds .* Save model\.gathered\(\)"):
                nn.save_sae(model, folder)
            nn.save_sae(one, Path(folder) / "one", layout=layout)
            assert_same(nn.load_sae(Path(folder) / "one").state_dict(), one.state_dict(), kind)


def case_shard_cross_layer(rank: int, world: int, device: torch.device) -> None:
    """Slices of each layer's latents give the loss of the whole, and the slices of its gradients."""
    x = batches(2 * ROWS, device)[0].view(ROWS, 2, D_IN)
    y = x[..., :D_OUT].square()
    for kind in (nn.Transcoder, nn.BatchTopKTranscoder):
        torch.manual_seed(0)
        whole = nn.CrossLayerTranscoder(kind(D_IN, size * D_OUT, D_SAE, 4, dtype=x.dtype) for size in (2, 1)).to(device)
        for layer in whole.layers:
            torch.nn.init.normal_(layer.W_dec, std=0.3)
        model = nn.CrossLayerTranscoder(nn.shard_sae(layer) for layer in whole.layers)
        got, want = model.loss(x, y), whole.loss(x, y)
        torch.testing.assert_close(got.loss, want.loss)
        got.loss.backward()
        want.loss.backward()
        for part, layer in zip(model.layers, whole.layers):
            held = slice(part.latents.start, part.latents.stop)
            torch.testing.assert_close(part.W_dec.grad, layer.W_dec.grad[held])
            torch.testing.assert_close(part.W_enc.grad, layer.W_enc.grad[:, held])
        torch.testing.assert_close(model.layers[0].b_dec.grad, whole.layers[0].b_dec.grad)


def case_shard_errors(rank: int, world: int, device: torch.device) -> None:
    with pytest.raises(TypeError, match=r"nn\.shard_sae: model must be an autoencoder of gossamer\.nn, got Linear"):
        nn.shard_sae(torch.nn.Linear(2, 2))  # type: ignore[type-var]
    model = make("topk", device)
    with pytest.raises(TypeError, match=r"nn\.shard_sae: model must be whole, got one that nn\.shard_sae made"):
        nn.shard_sae(nn.shard_sae(model))
    with pytest.raises(ValueError, match=f"a latent for each of {world} ranks, got d_sae = 1"):
        nn.shard_sae(nn.TopKSAE(4, 1, 1, device=device))
    model.register_buffer("more", torch.zeros(3))
    with pytest.raises(NotImplementedError, match=r"nn\.shard_sae: model has more"):
        nn.shard_sae(model)
    with pytest.raises(NotImplementedError, match=r"nn\.data_parallel_sae: model has the buffer more"):
        nn.data_parallel_sae(model)
    with pytest.raises(TypeError, match=r"nn\.data_parallel_sae: model must be an autoencoder"):
        nn.data_parallel_sae(torch.nn.Linear(2, 2))  # type: ignore[type-var]


def one_process(kind: str, x: Tensor, world: int, device: torch.device, **options: Any) -> tuple[Any, list[Tensor]]:
    """What data parallelism has to come to: for BatchTopK, batches that share a step."""
    one = make(kind, device, **options)
    if kind == "jumprelu steered":
        # Each rank looks at its own rows, and they start at the mean of what they see.
        seen = [one.measured(piece, one.W_enc, one.W_dec) for piece in x[0].chunk(world)]
        mean = type(seen[0])(*(torch.stack(found).mean(0) for found in zip(*seen)))
        for name, start in one.begin_(one.W_enc, mean).items():
            one.get_parameter(name).data.copy_(start)
    if kind not in ("batchtopk", "matryoshka"):
        return one, train(one, lambda batch: one.loss(*given(one, batch)).loss, x)
    # The statistics of each batch from the same begin, as the ranks have them.
    before = {name: buffer.clone() for name, buffer in one.named_buffers()}

    def together(batch: Tensor) -> Tensor:
        losses, found = [], []
        for piece in batch.chunk(world):
            for name, buffer in one.named_buffers():
                buffer.copy_(before[name])
            losses.append(one.loss(piece).loss)
            found.append({name: buffer.clone() for name, buffer in one.named_buffers()})
        fired = sum(each["firing_counts"] - before["firing_counts"] for each in found)
        one.firing_counts.copy_(before["firing_counts"] + fired)
        one.steps_since_fired.copy_(torch.where(fired > 0, 0, before["steps_since_fired"] + 1))
        one.threshold.copy_(torch.stack([each["threshold"] for each in found]).mean())
        before.update({name: buffer.clone() for name, buffer in one.named_buffers()})
        return torch.stack(losses).mean()

    return one, train(one, together, x)


def data_parallel(how: str, rank: int, world: int, device: torch.device) -> None:
    x, compared = batches(ROWS * world, device), []
    dead = [(kind, VARIANTS[kind]) for kind in ("topk", "transcoder", "jumprelu tanh")]
    for kind, options in (*((kind, {}) for kind in KINDS), *dead):
        # Another seed on each rank: what counts is rank 0's.
        model = make(kind, device, seed=rank, **options)
        module: Any = nn.data_parallel_sae(model)
        if how == "fsdp":
            fully_shard(module, mesh=init_device_mesh(device.type, (world,)))
        else:
            module = DistributedDataParallel(module)
        mine = x[:, rank * ROWS : (rank + 1) * ROWS]
        losses = train(module, lambda batch: module(*given(model, batch)).loss, mine)  # noqa: B023
        for loss in losses:
            dist.all_reduce(loss)
        state = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in model.state_dict().items()}
        compared.append((kind, options, copy.copy(state), [loss / world for loss in losses]))
    for kind, options, state, losses in compared:
        one, wanted = one_process(kind, x, world, device, **options)
        assert one.firing_counts.any() and one.steps_since_fired.any()
        assert_same(state, one.state_dict(), f"{how} {kind}")
        assert_same(dict(enumerate(losses)), dict(enumerate(wanted)), f"{how} {kind}")


def case_distributed_data_parallel(rank: int, world: int, device: torch.device) -> None:
    data_parallel("ddp", rank, world, device)


def case_fully_sharded_data_parallel(rank: int, world: int, device: torch.device) -> None:
    data_parallel("fsdp", rank, world, device)


def case_evaluation_leaves_the_statistics(rank: int, world: int, device: torch.device) -> None:
    for kind in KINDS:
        module = nn.data_parallel_sae(make(kind, device)).eval()
        before = copy.deepcopy(module.model.state_dict())
        x = batches(ROWS, device)[rank]
        assert torch.equal(module(*given(module.model, x)).reconstruction, module.model(x))
        assert_same(module.model.state_dict(), before, kind)
