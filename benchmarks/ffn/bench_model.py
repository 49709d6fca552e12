"""Whole decoders whose feed-forward blocks are sparse: the architectures of Tables 1 and 4 of Cetin et al., "Sparser,
Faster, Lighter Transformer Language Models", with random weights and as many entries as the paper reports."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.engine import Case, Provider
from benchmarks.train.step import go, made, make_sparse
from gossamer.train import Config, Transformer, preset

ENTRIES = (29, 10, 100, 300, 911, 60, 1)
"""The paper's mean is first: a run that is cut short has what matters most."""
MODELS = (("1.5b", 29), ("2b", 24), ("1b", 33), ("0.5b", 39))
"""Table 1's, and their mean entries: reported for the smallest and the largest, and between for one."""
BUDGET = 5e-2
"""Of logits in 16 bits behind tens of layers; the dense providers are held to it as well."""


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """bfloat16 on a GPU; float32 on the CPU, and small."""
    if quick or device.type == "cpu":
        small = {"layers": 3, "hidden": 64, "intermediate": 160, "vocabulary": 256, "length": 64}
        for gated, activation in ((True, "relu"), (False, "relu"), (True, "silu")):
            yield _model(preset("small", **(small if quick else {}), gated=gated, activation=activation), 2, 8)
        return
    for gated in (True, False):
        for name, entries in MODELS:
            yield _model(preset(name, dtype="bfloat16", gated=gated), 8, entries)
    for entries in ENTRIES[1:]:
        yield _model(preset("1.5b", dtype="bfloat16"), 8, entries)
    yield _model(preset("1.5b", dtype="bfloat16", activation="silu"), 8, 0)
    for entries in (10, 911):
        yield _model(preset("1.5b", dtype="bfloat16", gated=False), 8, entries)


def make(config: Config, batch: int, entries: int, device: torch.device) -> tuple[Tensor, Transformer]:
    """Token numbers `[batch, length]` and a model whose blocks have `entries` entries a token, on average."""
    model = made(config, device).requires_grad_(False)
    generator = torch.Generator(device).manual_seed(1)
    ids = torch.randint(config.vocabulary, (batch, config.length), device=device, generator=generator)
    if config.activation == "relu":
        make_sparse(model, ids, entries)
    return ids, model.to(model.dtype)


def logits(ids: Tensor, model: Transformer) -> Tensor:
    """`Transformer.logits` of weights that need no autocast."""
    return F.linear(model.stream(ids)[0], model.model.embed_tokens.weight)


def _model(config: Config, batch: int, entries: int) -> Case:
    sparse, dtype = config.activation == "relu", getattr(torch, config.dtype)

    def through(method: str, compiled: bool = False) -> Callable[..., Tensor]:
        stance = "default" if compiled else "force_eager"

        def call(ids: Tensor, model: Transformer) -> Tensor:
            go(model, method, False)
            with torch.compiler.set_stance(stance):
                return logits(ids, model)

        return call

    def inputs(device: torch.device, generator: torch.Generator) -> list[tuple[Any, ...]]:
        ids, model = make(config, batch, entries, device)
        for layer in model.model.layers:
            layer.compile(fullgraph=True, dynamic=False)
        return [(ids, model)]

    def steady(ids: Tensor, model: Transformer) -> tuple[Tensor, Transformer]:
        """A block knows how sparse it was some calls ago."""
        for _ in range(6):
            through("auto")(ids, model)
        return ids, model

    def first(out: Tensor, *_: Any) -> tuple[Tensor]:
        """The first sequence, every 16th position: float64 takes its time."""
        return (out[0, ::16],)

    def reference(ids: Tensor, model: Transformer) -> tuple[Tensor]:
        exact = copy.deepcopy(model).double()
        exact.dtype = torch.float64
        return first(through("plain PyTorch")(ids[:1], exact))

    tokens, hidden, n = batch * config.length, config.hidden, config.intermediate
    ours = ("gather", "fused") if config.gated and sparse else ()
    weights = config.layers * (4 * hidden**2 + n * hidden) + config.vocabulary * hidden
    attention = config.layers * 2 * tokens * config.length * hidden
    return Case(
        room="ffn",
        name="model" if sparse and config.gated else "model, plain" if sparse else "model, silu",
        parameters={
            "layers": config.layers, "hidden": hidden, "N": n, "tokens": tokens, "entries": entries if sparse else "all"
        },
        dtype=dtype,
        make=inputs,
        providers=(
            Provider("gossamer", through("auto"), ours=True, prepare=steady, result=first),
            Provider("gossamer, torch.compile", through("auto", True), ours=True, prepare=steady, result=first),
            *(Provider(f"gossamer, {way}", through(way), ours=True, result=first) for way in ours),
            Provider("dense", through("plain PyTorch"), result=first),
            Provider("torch.compile", through("plain PyTorch", True), result=first),
        ),
        reference=reference,
        bytes=weights * dtype.itemsize,
        flops=2 * tokens * weights + attention,
        sweep="entries" if config == preset("1.5b", dtype="bfloat16") else None,
        energy=True,
        budget=BUDGET if dtype.itemsize == 2 else None,
        tokens=tokens,
    )  # fmt: skip
