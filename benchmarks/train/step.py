"""Whole optimizer steps of the paper's models, dense and on lists of active entries: tokens a second, memory, energy.

    python -m benchmarks.train.step --preset 1.5b --entries 29 --json benchmarks/results/train-step-<gpu>.json

The model is `gossamer train`'s, with random weights and tokens, in bfloat16 with float32 weights and moments. A short
run does not become sparse, so `--entries` makes the blocks sparse: each gate gets a bias, which no optimizer moves, and
a direction of the stream in which some tokens are far more active than others. The bias is the one with which a layer
lets through that many neurons of a token on average, by the tokens that come in. The learning rate is 0, so that the
number stays. One step is the forward and backward pass of `--parts` micro-batches, clipping, AdamW, and in a way with
L1 the recipe: its gradient, the count of dead neurons and their new weights.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.provenance import provenance
from gossamer import nn
from gossamer.cli.energy import energy_counter
from gossamer.nn.rotary_embedding import RotaryEmbedding
from gossamer.sparsity import DeadNeuronTracker, reinitialize_
from gossamer.train import Config, Transformer, preset
from gossamer.train.model import STD, THETA

WAYS: dict[str, tuple[str, bool]] = {
    "dense": ("plain PyTorch", False),
    "gated_mlp": ("fused", False),
    "dense with L1": ("fused", True),
    "lists": ("gather", True),
}
"""The method of blocks, and whether the loss has L1 in it."""
WARM, MEASURED = 3, 8
L1 = 2e-5
SPREAD = 0.2
"""Standard deviations that the pre-activations of a token gain for each unit of its activity, of mean 1, at most 5."""


def made(config: Config, device: torch.device) -> Transformer:
    """The model, made on the device."""
    with torch.device("meta"):
        model = Transformer(config)
    model.to_empty(device=device)
    model.rotary = RotaryEmbedding(config.hidden // config.heads, THETA).to(device)
    generator = torch.Generator(device).manual_seed(config.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1) if parameter.dim() == 1 else parameter.normal_(0, STD, generator=generator)
    return model


@torch.no_grad()
def make_sparse(model: Transformer, tokens: Tensor, entries: float) -> None:
    """Gives each gate its part in the direction of activity, and its bias; `tokens` as in a call of the model."""
    weight = model.model.embed_tokens.weight
    direction = F.normalize(torch.randn(weight.shape[1], device=weight.device), dim=0)
    activity = torch.empty(weight.shape[0], 1, device=weight.device).exponential_().clamp_(max=5)
    weight.add_(0.1 * STD * weight.shape[1] ** 0.5 * activity * direction)
    for block in model.blocks():
        layer = _first(block)
        deviation = STD * layer.in_features**0.5
        # A token of activity a has about 0.1 * sqrt(hidden) * a in this direction.
        layer.weight.sub_((layer.weight @ direction)[:, None] * direction)
        layer.weight.add_(SPREAD * deviation / (0.1 * layer.in_features**0.5) * direction)
    let_through(model, tokens, entries)


@torch.no_grad()
def let_through(model: Transformer, tokens: Tensor, entries: float) -> None:
    """Sets each gate's bias for so many entries of a token, layer by layer, for each changes the next layer's input."""

    def shift(block: Any, args: tuple[Tensor]) -> None:
        layer = _first(block)
        x = args[0].flatten(0, 1).float()
        z = x[:: max(1, x.shape[0] // 1024)] @ layer.weight.t()
        bias = -z.flatten().topk(round(entries * z.shape[0])).values[-1].expand(layer.out_features)
        if layer.bias is None:
            layer.bias = torch.nn.Parameter(bias.clone(), requires_grad=False)
        else:
            layer.bias.copy_(bias)

    hooks = [block.register_forward_pre_hook(shift) for block in model.blocks()]
    with torch.compiler.set_stance("force_eager"):
        model(tokens)
    for hook in hooks:
        hook.remove()


def _first(block: Any) -> torch.nn.Linear:
    """The layer whose results the activation takes."""
    layer: torch.nn.Linear = block.gate_proj if hasattr(block, "gate_proj") else block.up_proj
    return layer


class Plain(nn.MLP):
    """A block in plain PyTorch, gated or not, whose class a block of the model takes."""

    def forward(self, x: Tensor) -> Tensor:
        active = F.silu if self.activation == "silu" else F.relu
        if hasattr(self, "gate_proj"):
            return self.down_proj(active(self.gate_proj(x)) * self.up_proj(x))
        return self.down_proj(active(self.up_proj(x)))


def go(model: Transformer, method: str, penalised: bool) -> None:
    """Sends the blocks a way of their own, or through plain PyTorch; `penalised`: whether calls return their
    activity."""
    kind = nn.GatedMLP if model.config.gated else nn.MLP
    for block in model.blocks():
        block.__class__ = Plain if method == "plain PyTorch" else kind
        block.l1 = penalised
        if method != "plain PyTorch":
            block.method = method


class Steps:
    """Optimizer steps of one model, whose blocks go one of several ways."""

    def __init__(self, model: Transformer, parts: int) -> None:
        self.model, self.parts = model, parts
        groups = [{"params": [p for p in model.parameters() if p.requires_grad]}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self.tracker = DeadNeuronTracker()

    def step(self, tokens: Tensor) -> Tensor:
        """The mean L0 by layer; zeros where it is not known."""
        for part in range(self.parts):
            out = self.model(tokens[part])
            loss = out.loss
            if out.activity is not None:
                loss = loss + L1 * out.activity.l1.mean()
                self.tracker.add(out.activity.fired)
            (loss / self.parts).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if out.activity is None:
            return torch.zeros(self.model.config.layers)
        dead = self.tracker.step()
        for gate, silent in zip(self.model.gates(), dead):
            # The function does all its work, and no neuron moves.
            reinitialize_(gate, silent & (out.loss < 0))
        return out.activity.l0


def measured(steps: Steps, tokens: Tensor, way: str, compiled: bool) -> dict[str, Any]:
    """Tokens a millisecond, peak memory, energy and entries of one way."""
    device = tokens.device
    gpu = device.type == "cuda"
    count = tokens.shape[0] * tokens.shape[1] * (tokens.shape[2] - 1)
    joules = energy_counter(device)
    go(steps.model, *WAYS[way])
    with nullcontext() if compiled else torch.compiler.set_stance("force_eager"):
        for _ in range(WARM):
            l0 = steps.step(tokens)
        if gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        energy = joules() if joules else 0
        moments = [_moment(gpu)]
        for _ in range(MEASURED):
            l0 = steps.step(tokens)
            moments.append(_moment(gpu))
        if gpu:
            torch.cuda.synchronize()
        energy = joules() - energy if joules else 0
    seconds = [a.elapsed_time(b) / 1e3 if gpu else b - a for a, b in pairwise(moments)]
    return {
        "tokens/ms": count / statistics.median(seconds) / 1e3, "seconds": seconds,
        "peak_bytes": torch.cuda.max_memory_allocated() if gpu else None,
        "mJ/token": energy / (MEASURED * count) if energy else None, "l0": l0.tolist(),
    }  # fmt: skip


def _moment(gpu: bool) -> Any:
    if not gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--preset", default="1.5b")
    parser.add_argument("--entries", default="29", help="of a token on average; several with commas")
    parser.add_argument("--plain", action="store_true", help="blocks without a gate")
    parser.add_argument("--micro-batch", type=int)
    parser.add_argument("--parts", type=int, default=2, help="micro-batches of a step")
    parser.add_argument("--recompute", default="no,yes", help="whether layers are checkpointed: no, yes, or both")
    parser.add_argument("--eager", default="no,yes", help="compiled (no), eager (yes), or both")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = provenance(
        shlex.join(["python", "-m", "benchmarks.train.step", *sys.argv[1:]]), Path(__file__).parents[2], device
    )
    changes = {"micro_batch": given.micro_batch, "batch": given.micro_batch} if given.micro_batch else {}
    try:
        dtype = "bfloat16" if device.type == "cuda" else "float32"
        config = preset(given.preset, gated=not given.plain, compile=True, dtype=dtype, **changes)
    except ValueError as error:
        parser.error(str(error))
    # A layer that is not compiled any more would be measured as one that is.
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # type: ignore[attr-defined]
    model = made(config, device)
    generator = torch.Generator(device).manual_seed(1)
    shape = (given.parts, config.micro_batch, config.length + 1)
    tokens = torch.randint(0, config.vocabulary, shape, device=device, generator=generator)
    counts = [float(entries) for entries in given.entries.split(",")]
    make_sparse(model, tokens[0], counts[0])
    steps = Steps(model, given.parts)
    found |= {"parameters": config.parameters, "entries": counts[0], "tokens": tokens[0].numel(), "cases": []}
    for entries in counts:
        if entries != counts[0]:
            let_through(model, tokens[0], entries)
        for eager, recompute, way in product(*(x.split(",") for x in (given.eager, given.recompute, given.ways))):
            if way == "dense" and entries != counts[0]:
                continue  # plain PyTorch computes the same, however many entries there are
            model.config = replace(config, recompute=recompute == "yes")
            case: dict[str, Any] = {"way": way, "recompute": recompute == "yes", "compile": eager == "no"}
            case |= {"entries": entries} if len(counts) > 1 else {}
            try:
                case |= measured(steps, tokens, way, eager == "no")
            except torch.OutOfMemoryError:
                case["error"] = "out of memory"
                steps.optimizer.zero_grad()
                torch.cuda.empty_cache()
            found["cases"].append(case)
            print(_shown(case), flush=True)
            if given.json:
                given.json.write_text(json.dumps(found, indent=1) + "\n")


def _shown(case: dict[str, Any]) -> str:
    how = "compiled" if case["compile"] else "eager"
    head = f"{case['way']:14} {how:8} {'recompute' if case['recompute'] else '':9}"
    if "error" in case:
        return f"{head} {case['error']}"
    peak, energy = case["peak_bytes"] or math.nan, case["mJ/token"] or math.nan
    entries = statistics.mean(case["l0"])
    return f"{head} {case['tokens/ms']:8.2f} tokens/ms {peak / 2**30:6.1f} GiB {energy:8.3f} mJ/token  L0 {entries:.1f}"


if __name__ == "__main__":
    main()
