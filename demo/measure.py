"""Measurements of the demo: the model's loss, the SAE's quality, and dense against sparse in time and memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine.timing import Timing, burst, calls_for, synchronize
from demo.model import Block, ByteModel
from demo.model import layer_by_layer as plain_mlp
from demo.train import Clock, Show, bits_per_byte, variance_explained
from gossamer import sae as sae_ops
from gossamer import sparsity
from gossamer.nn import JumpReLUSAE

LARGE_D_SAE, LARGE_D_IN, LARGE_BATCH, LARGE_L0 = 65_536, 768, 32, 64
SMALLEST_LARGE_D_SAE = 4096
BURST_SECONDS = 0.02
MAX_ROUNDS = 50
MEMORY_SHARE = 0.5
GENERATED, GENERATED_BYTES = 8, 32
TIMED_BYTES = 4

Splice = Callable[[Tensor], Tensor]


def contexts(text: Tensor, n_contexts: int, length: int) -> Tensor:
    """At most n_contexts windows `[n, length]` int64, evenly spread over a text and without overlap."""
    n = max(1, min(n_contexts, len(text) // length))
    starts = torch.linspace(0, len(text) - length, n, dtype=torch.float64, device=text.device).long()
    return text[starts[:, None] + torch.arange(length, device=text.device)].long()


@torch.inference_mode()
def evaluate(model: ByteModel, tokens: Tensor, splice: Splice | None = None) -> float:
    """Bits per byte on tokens `[B, T + 1]`."""
    losses = [bits_per_byte(model(c[:, :-1], splice), c[:, 1:]) * len(c) for c in tokens.split(32)]
    return (torch.stack(losses).sum() / len(tokens)).item()


@torch.inference_mode()
def layer_by_layer(model: ByteModel, tokens: Tensor) -> dict[str, Any]:
    """The model with its feed-forward computed layer by layer on tokens `[B, T + 1]`, beside the fused one.

    Bits per byte, each block's fraction of active neurons, the largest difference of a logit, and how many of the
    likeliest bytes that both go on with are the same.
    """
    losses, active, difference = [], [], 0.0
    for chunk in tokens.split(32):
        gates: list[Tensor] = []
        logits = model(chunk[:, :-1], gates=gates)
        losses.append(bits_per_byte(logits, chunk[:, 1:]) * len(chunk))
        active.append(torch.stack([(gate > 0).float().mean() for gate in gates]) * len(chunk))
        difference = max(difference, _difference(model(chunk[:, :-1]), logits))
    n, begun = len(tokens), tokens[:GENERATED, : tokens.shape[1] // 2]
    ours = model.generate(begun, GENERATED_BYTES)[:, begun.shape[1] :]
    theirs = model.generate(begun, GENERATED_BYTES, gates=[])[:, begun.shape[1] :]
    return {
        "bits_per_byte": (torch.stack(losses).sum() / n).item(),
        "active_fraction_per_block": (torch.stack(active).sum(0) / n).tolist(),
        "largest_logit_difference": difference,
        "generated": ours.numel(),
        "generated_alike": int((ours == theirs).sum()),
    }


@torch.inference_mode()
def compare_mlp(model: ByteModel, tokens: Tensor, *, seconds: float) -> dict[str, Any]:
    """The feed-forward of the middle block, fused against layer by layer, on what it meets in tokens `[B, T]`."""
    block = model.blocks[model.middle - 1]
    assert isinstance(block, Block)
    mlp, x = block.mlp, block.ffn_norm(model.residual(tokens)).flatten(0, 1)
    calls = (lambda: plain_mlp(mlp, x), lambda: mlp(x))
    difference = _difference(calls[0](), calls[1]())
    plain, fused = interleaved(calls, x.device, seconds)
    return {
        "tokens": len(x),
        "dtype": str(x.dtype).removeprefix("torch."),
        "plain": _row(plain, calls[0], x.device),
        "fused": _row(fused, calls[1], x.device),
        "speed_up": plain.median / fused.median,
        "largest_difference": difference,
    }


@torch.inference_mode()
def sparse_feed_forward(model: ByteModel, tokens: Tensor, *, seconds: float) -> dict[str, Any]:
    """The model with its feed-forward computed sparse on tokens `[B, T + 1]`, beside layer by layer.

    How many of the likeliest bytes that both go on with are the same, the seconds that one of them takes, and of each
    block its entries a byte and the path that it takes in the end.
    """
    mlps = [block.mlp for block in model.blocks if isinstance(block, Block)]
    begun = tokens[:GENERATED, : tokens.shape[1] // 2]
    for mlp in mlps:
        mlp.method = "auto"
    try:
        ours = model.generate(begun, GENERATED_BYTES)[:, begun.shape[1] :]
        theirs = model.generate(begun, GENERATED_BYTES, gates=[])[:, begun.shape[1] :]
        calls = (lambda: model.generate(begun, TIMED_BYTES, gates=[]), lambda: model.generate(begun, TIMED_BYTES))
        plain, sparse = interleaved(calls, tokens.device, seconds)
        found = sparsity.report(model, list(tokens[:, :-1].split(32)), measure=False).layers
        layers = [
            {
                "neurons": layer.num_neurons,
                "mean": layer.mean,
                "p99": layer.quantile(0.99),
                "max": layer.max,
                "dead": layer.dead,
                "path": mlp.last_path,
            }
            for layer, mlp in zip(found.values(), mlps, strict=True)
        ]
    finally:
        for mlp in mlps:
            mlp.method = "fused"
    made = len(begun) * TIMED_BYTES
    return {
        "generated": ours.numel(),
        "generated_alike": int((ours == theirs).sum()),
        "seconds_a_byte": sparse.median / made,
        "seconds_a_byte_layer_by_layer": plain.median / made,
        "speed_up": plain.median / sparse.median,
        "layers": layers,
    }


def dense_encode(sae: JumpReLUSAE, x: Tensor) -> Tensor:
    """The plain PyTorch encoder: x `[M, d_in]` -> activations `[M, d_sae]`."""
    pre = torch.addmm(sae.b_enc, x, sae.W_enc)
    return torch.where(pre > sae.threshold, pre, 0)


def dense_decode(sae: JumpReLUSAE, acts: Tensor) -> Tensor:
    """The plain PyTorch decoder: activations `[M, d_sae]` -> `[M, d_in]`."""
    return torch.addmm(sae.b_dec, acts, sae.W_dec)


def dense_forward(sae: JumpReLUSAE, x: Tensor) -> Tensor:
    """The plain PyTorch reconstruction of x `[..., d_in]`."""
    flat = x.flatten(0, -2)
    return dense_decode(sae, dense_encode(sae, flat)).view_as(x)


@torch.inference_mode()
def quality(sae: JumpReLUSAE, x: Tensor) -> dict[str, Any]:
    """L0, variance explained and the difference between the dense and the sparse path on x `[M, d_in]`."""
    rows, acts = sae.encode(x), dense_encode(sae, x)
    sparse, dense = sae.decode(rows), dense_decode(sae, acts)
    return {
        "tokens": len(x),
        "l0": _l0(rows.to_dense()),
        "l0_dense": _l0(acts),
        "variance_explained": variance_explained(x, sparse).item(),
        "variance_explained_dense": variance_explained(x, dense).item(),
        "largest_difference": _difference(sparse, dense),
        "latents_that_fired": int((acts != 0).any(0).sum()),
        "d_sae": acts.shape[1],
    }


@torch.inference_mode()
def splice_losses(model: ByteModel, sae: JumpReLUSAE, tokens: Tensor, clean: float) -> dict[str, float]:
    """Bits per byte on tokens `[B, T + 1]` with the residual stream replaced by its reconstruction, or by zero.

    clean: bits per byte on the same tokens with the stream left alone.
    loss_recovered is the share of what zeroing costs that the reconstruction saves: (zero - spliced) / (zero - clean),
    or NaN where zeroing costs nothing.
    """
    spliced = evaluate(model, tokens, sae)
    dense = evaluate(model, tokens, lambda x: dense_forward(sae, x))
    zero = evaluate(model, tokens, torch.zeros_like)
    recovered = (zero - spliced) / (zero - clean) if zero > clean else float("nan")
    return {"clean": clean, "spliced": spliced, "spliced_dense": dense, "zero": zero, "loss_recovered": recovered}


def large_sae(device: torch.device, seed: int) -> tuple[JumpReLUSAE, Tensor]:
    """A random SAE of a real one's size and an input `[32, d_in]` on which it has a mean L0 of 64.

    d_sae is 65,536, or a smaller power of two where making it would take more than half of the free memory.
    """
    d_sae, free = LARGE_D_SAE, free_bytes(device)
    while free is not None and d_sae > SMALLEST_LARGE_D_SAE and 4 * 4 * d_sae * LARGE_D_IN > free * MEMORY_SHARE:
        d_sae //= 2
    torch.manual_seed(seed)
    with torch.no_grad():
        sae = JumpReLUSAE(LARGE_D_IN, d_sae, device=device).eval()
        x = torch.randn(LARGE_BATCH, LARGE_D_IN, device=device)
        pre = torch.addmm(sae.b_enc, x, sae.W_enc).flatten()
        threshold = pre.topk(LARGE_BATCH * LARGE_L0 + 1).values[-1]
        sae.log_threshold.fill_(threshold.log())
    return sae, x


@torch.inference_mode()
def compare(name: str, sae: JumpReLUSAE, x: Tensor, *, seconds: float, show: Show) -> dict[str, Any]:
    """Dense against sparse on x `[M, d_in]`: time per call, peak memory, L0, and the largest absolute difference.

    Three pairs: decoding dense activations, decoding rows that are already packed, and the whole forward pass.
    """
    rows = sae.encode(x)
    acts = rows.to_dense()
    calls: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
        "decode": (lambda: dense_decode(sae, acts), lambda: sae_ops.decode(acts, sae.W_dec, sae.b_dec)),
        "decode, packed": (lambda: dense_decode(sae, acts), lambda: sae.decode(rows)),
        "forward": (lambda: dense_forward(sae, x), lambda: sae(x)),
    }
    clock, operations = Clock(seconds), []
    for number, (operation, (dense, sparse)) in enumerate(calls.items()):
        show(number / len(calls), operation)
        difference = _difference(dense(), sparse())
        times = interleaved((dense, sparse), x.device, (seconds - clock.elapsed) / (len(calls) - number))
        operations.append(
            {
                "operation": operation,
                "dense": _row(times[0], dense, x.device),
                "sparse": _row(times[1], sparse, x.device),
                "speed_up": times[0].median / times[1].median,
                "largest_difference": difference,
            }
        )
    show(1.0, "done")
    return {
        "name": name,
        "batch": len(x),
        "d_in": x.shape[1],
        "d_sae": acts.shape[1],
        "l0": _l0(acts),
        "l0_dense": _l0(dense_encode(sae, x)),
        "dtype": str(x.dtype).removeprefix("torch."),
        "operations": operations,
    }


def interleaved(calls: tuple[Callable[[], Tensor], ...], device: torch.device, seconds: float) -> list[Timing]:
    counted = [lambda _, call=call: call() for call in calls]
    repeats = [calls_for(call, device, BURST_SECONDS, 1) for call in counted]
    clock = Clock(seconds)
    bursts: list[list[float]] = [[] for _ in calls]
    while len(bursts[0]) < 3 or (clock.share() < 1 and len(bursts[0]) < MAX_ROUNDS):
        for call, repeat, taken in zip(counted, repeats, bursts, strict=True):
            taken.append(burst(call, repeat, device))
    return [Timing.of(taken, repeat) for taken, repeat in zip(bursts, repeats, strict=True)]


def _row(timing: Timing, call: Callable[[], Tensor], device: torch.device) -> dict[str, Any]:
    return {
        "median_seconds": timing.median,
        "p20_seconds": timing.p20,
        "p80_seconds": timing.p80,
        "peak_bytes": _peak_bytes(call, device),
    }


def _peak_bytes(call: Callable[[], Tensor], device: torch.device) -> int | None:
    """Most memory that a call takes beyond what was held before it; None on a CPU, which does not count it."""
    if device.type != "cuda":
        return None
    synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def free_bytes(device: torch.device) -> int | None:
    """Memory that can still be taken on a device; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return available
    return available if limit == "max" else min(available, int(limit) - int(used))


def _l0(acts: Tensor) -> float:
    return (acts != 0).sum(-1, dtype=torch.float32).mean().item()


def _difference(first: Tensor, second: Tensor) -> float:
    return (first - second).abs().max().item()
