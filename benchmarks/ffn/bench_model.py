"""Whole decoders whose feed-forward blocks are sparse: the architectures of Tables 1 and 4 of Cetin et al., "Sparser,
Faster, Lighter Transformer Language Models", with random weights and as many entries by layer as the paper reports."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine import Case, Provider
from benchmarks.ffn.model import Decoder, Layer, Sizes, make

PLAIN = 8192
LAYERS = ((38, 24), (18, 33), (8, 39))
"""Table 1's other models, and their mean entries: reported for the smallest and the largest, and between for one."""
ENTRIES = (29, 10, 100, 300, 911, 60, 1)
"""The paper's mean is first: a run that is cut short has what matters most."""
BUDGET = 5e-2
"""Of logits in 16 bits behind tens of layers; the dense providers are held to it as well."""


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """bfloat16 on a GPU; float32 on the CPU, and small."""
    if quick or device.type == "cpu":
        small = Sizes(3, 64, 160, 2, 256, 64) if quick else Sizes(6, 512, 1408, 8, 4096, 256)
        for gated, activation in ((True, "relu"), (False, "relu"), (True, "silu")):
            yield _model(small, 2 if quick else 1, gated, activation, 8, torch.float32)
        return
    half = torch.bfloat16
    yield _model(Sizes(), 8, True, "relu", ENTRIES[0], half)
    for layers, entries in LAYERS:
        yield _model(Sizes(layers), 8, True, "relu", entries, half)
    for layers, entries in ((Sizes().layers, ENTRIES[0]), *LAYERS):
        yield _model(Sizes(layers, intermediate=PLAIN), 8, False, "relu", entries, half)
    for entries in ENTRIES[1:]:
        yield _model(Sizes(), 8, True, "relu", entries, half)
    yield _model(Sizes(), 8, True, "silu", 0, half)
    for entries in (10, 911):
        yield _model(Sizes(intermediate=PLAIN), 8, False, "relu", entries, half)


def _model(sizes: Sizes, batch: int, gated: bool, activation: str, entries: int, dtype: torch.dtype) -> Case:
    def inputs(device: torch.device, generator: torch.Generator) -> list[tuple[Any, ...]]:
        options = {"batch": batch, "gated": gated, "activation": activation, "entries": entries}
        return [make(sizes, **options, dtype=dtype, device=device, generator=generator)]  # type: ignore[arg-type]

    def pinned(method: str) -> Callable[..., Tensor]:
        def call(ids: Tensor, model: Decoder) -> Tensor:
            for layer in model.layers:
                layer.mlp.method = method  # type: ignore[union-attr]
            return model(ids)

        return call

    def dense(ids: Tensor, model: Decoder) -> Tensor:
        return model(ids, dense=True)

    def steady(ids: Tensor, model: Decoder) -> tuple[Tensor, Decoder]:
        """A block knows how sparse it was some calls ago."""
        for _ in range(6):
            pinned("auto")(ids, model)
        return ids, model

    def first(out: Tensor, *_: Any) -> tuple[Tensor]:
        """The first sequence, every 16th position: float64 takes its time."""
        return (out[0, ::16],)

    def reference(ids: Tensor, model: Decoder) -> tuple[Tensor]:
        return first(copy.deepcopy(model).double()(ids[:1], dense=True))

    tokens, hidden = batch * sizes.length, sizes.hidden
    ours = ("gather", "fused") if gated and activation == "relu" else ()
    weights = sizes.layers * (4 * hidden**2 + sizes.intermediate * hidden) + sizes.vocabulary * hidden
    attention = sizes.layers * 2 * tokens * sizes.length * hidden
    return Case(
        room="ffn",
        name="model" if activation == "relu" and gated else "model, plain" if activation == "relu" else "model, silu",
        parameters={
            "layers": sizes.layers,
            "hidden": hidden,
            "N": sizes.intermediate,
            "tokens": tokens,
            "entries": entries if activation == "relu" else "all",
        },
        dtype=dtype,
        make=inputs,
        providers=(
            Provider("gossamer", pinned("auto"), ours=True, prepare=steady, result=first),
            Provider("gossamer, torch.compile", _compiled(False), ours=True, prepare=steady, result=first),
            *(Provider(f"gossamer, {way}", pinned(way), ours=True, result=first) for way in ours),
            Provider("dense", dense, result=first),
            Provider("torch.compile", _compiled(True), result=first),
        ),
        reference=reference,
        bytes=weights * dtype.itemsize,
        flops=2 * tokens * weights + attention,
        sweep="entries" if sizes == Sizes() and gated and activation == "relu" else None,
        energy=True,
        budget=BUDGET if dtype.itemsize == 2 else None,
        tokens=tokens,
    )


def _compiled(dense: bool) -> Callable[..., Tensor]:
    """Layer by layer, as models are: a compiled layer takes the path that the device alone would, by the counts of its
    block then."""
    through = torch.compile(Layer.forward, fullgraph=True, dynamic=False)

    def call(ids: Tensor, model: Decoder) -> Tensor:
        for layer in model.layers:
            layer.mlp.method = "auto"  # type: ignore[union-attr]
        return model(ids, dense, through)

    return call
