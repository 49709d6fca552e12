"""The configuration of a run: sizes of the model, batches, optimizer, recipe; and the presets."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer._core import checks, files
from gossamer.sparsity import L1Schedule

if TYPE_CHECKING:
    from typing_extensions import Self

ACTIVATIONS = ("relu", "relu2", "silu")
METHODS = ("auto", "fused", "gather")
ON_OVERFLOW = ("compute", "raise")
_OPERATOR = "train.Config"


@dataclass(frozen=True)
class Settings:
    """The base of configurations: written beside a run, and compared with those of a process that goes on with it."""

    def save(self, file: Path) -> None:
        files.write_text("train", file, json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, file: Path) -> Self:
        """The configuration that `save` wrote."""
        try:
            return cls(**json.loads(file.read_text()))
        except (json.JSONDecodeError, TypeError) as error:
            raise ValueError(f"train: {file} is no configuration of this version: {error}.") from error

    def differences(self, other: Settings, derived: Collection[str] = ()) -> str:
        """The fields in which another configuration differs, for people to read; of those that follow from others none
        where another one differs."""
        pairs = ((field.name, getattr(other, field.name), getattr(self, field.name)) for field in fields(self))
        found = {name: f"{name} {old} there and {new} here" for name, old, new in pairs if old != new}
        return ", ".join([said for name, said in found.items() if name not in derived] or found.values())


@dataclass(frozen=True)
class Config(Settings):
    """A run of training. The defaults are the paper's (its Table 2), with its 1.5B layers.

    Args:
        layers, hidden, intermediate, heads, vocabulary: sizes of the Transformer++; `intermediate` is N of a block.
        activation: of the blocks, `"relu"`, `"relu2"` or `"silu"`.
        gated: whether blocks have a gate.
        method: how blocks compute in training: `"fused"` computes every neuron, `"gather"` goes on lists of active
            entries, and `"auto"` takes lists, layer by layer, once they are faster on a GPU.
        on_overflow: whether tokens that are in no list (`ffn.Activity.unlisted`) are computed by dense tiles, however
            many they are (`"compute"`), or a step with more of them than an eighth of a micro-batch ends the run before
            the optimizer changes anything (`"raise"`; the host waits for the device in each step).
        length: tokens of a sequence.
        batch: sequences of an optimizer step, over all ranks and micro-batches.
        micro_batch: sequences that a rank computes at once.
        steps: optimizer steps.
        lr, warmup, weight_decay, clip: of AdamW with betas (0.9, 0.95): the highest rate, reached after `warmup` steps
            and brought to 0 by a cosine; decay of matrices; largest norm of the gradient.
        l1, l1_warmup, l1_ramp: as in `sparsity.L1Schedule`.
        reinitialize: the rate of `sparsity.reinitialize_`, the paper's being 0.1; 0 leaves dead neurons dead.
        dtype: `"float32"`, or `"bfloat16"` for products and activations; weights, gradients and moments stay float32.
        recompute: whether a backward pass computes layers again instead of keeping their activations.
        compile: whether layers go through `torch.compile`.
        seed: of weights, of the order of sequences and of new weights of dead neurons.

    Raises:
        ValueError: a size below 1, an unknown activation or dtype, a batch that is no multiple of micro_batch.
        TypeError: a size that is no int, another field of another type.

    >>> Config(layers=2, hidden=64, intermediate=176, heads=2).parameters
    3246400
    """

    layers: int = 28
    hidden: int = 2048
    intermediate: int = 5632
    heads: int = 32
    vocabulary: int = 49_152
    activation: str = "relu"
    gated: bool = True
    method: str = "fused"
    on_overflow: str = "compute"
    length: int = 2048
    batch: int = 512
    micro_batch: int = 8
    steps: int = 30_000
    lr: float = 1e-3
    warmup: int = 600
    weight_decay: float = 0.1
    clip: float = 1.0
    l1: float = 0.0
    l1_warmup: int = 0
    l1_ramp: int = 0
    reinitialize: float = 0.0
    dtype: str = "float32"
    recompute: bool = False
    compile: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            "layers", "hidden", "intermediate", "heads", "vocabulary", "length", "batch", "micro_batch", "steps"
        ):  # fmt: skip
            checks.positive(_OPERATOR, name, getattr(self, name), "It is a size.")
        for name, hint in (("lr", "The paper's is 1e-3."), ("clip", "The paper's is 1.0.")):
            checks.number(_OPERATOR, name, getattr(self, name), hint)
        for name in ("warmup", "weight_decay", "reinitialize", "seed"):
            checks.number(_OPERATOR, name, getattr(self, name), "0 is allowed.", zero=True)
        for name in ("gated", "recompute", "compile"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{_OPERATOR}: {name} must be True or False, got {getattr(self, name)!r}.")
        self.schedule  # noqa: B018 - it checks its numbers
        known_values = {"activation": ACTIVATIONS, "dtype": ("float32", "bfloat16"), "method": METHODS}
        known_values["on_overflow"] = ON_OVERFLOW
        for name, known in known_values.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{_OPERATOR}: {name} must be one of {', '.join(known)}, got {getattr(self, name)!r}.")
        for name, size in (("hidden", 2 * self.heads), ("batch", self.micro_batch)):
            if getattr(self, name) % size:
                of = "twice heads" if name == "hidden" else "micro_batch"
                raise ValueError(f"{_OPERATOR}: {name} must be a multiple of {of} = {size}, got {getattr(self, name)}.")

    @property
    def schedule(self) -> L1Schedule:
        return L1Schedule(self.l1, self.l1_warmup, self.l1_ramp)

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.length

    @property
    def parameters(self) -> int:
        """Of the model; the output layer has the embedding's."""
        block = (3 if self.gated else 2) * self.hidden * self.intermediate
        layer = 4 * self.hidden**2 + block + 2 * self.hidden
        return self.layers * layer + (self.vocabulary + 1) * self.hidden


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "layers": 2, "hidden": 64, "intermediate": 176, "heads": 2, "vocabulary": 512, "length": 64, "batch": 16,
        "micro_batch": 8, "steps": 200, "warmup": 20, "lr": 3e-3,
    },
    "small": {
        "layers": 6, "hidden": 256, "intermediate": 704, "heads": 4, "vocabulary": 8192, "length": 256, "batch": 32,
        "micro_batch": 8, "steps": 2000, "warmup": 100, "lr": 2e-3,
    },
    "100m": {
        "layers": 12, "hidden": 768, "intermediate": 2048, "heads": 12, "vocabulary": 24_576, "length": 1024,
        "batch": 128, "micro_batch": 32, "steps": 1500, "warmup": 100,
    },
    "0.5b": {"layers": 8, "steps": 10_000, "recompute": True},
    "1b": {"layers": 18, "steps": 20_000, "recompute": True},
    "1.5b": {"layers": 28, "steps": 30_000, "recompute": True},
    "2b": {"layers": 38, "steps": 40_000, "recompute": True},
}  # fmt: skip
"""Sizes by name: the paper's four, and three that fit smaller machines and corpora."""


def preset(name: str, **changes: Any) -> Config:
    """A preset, with changes. A block without a gate gets 16/11 of the neurons, as in the paper (8,192 for 5,632), in
    multiples of 64. A batch that is given without a micro_batch has the largest one that divides it and the preset's.

    >>> preset("1.5b", gated=False).intermediate
    8192
    """
    if name not in PRESETS:
        raise ValueError(f"train.preset: name must be one of {', '.join(PRESETS)}, got {name!r}.")
    config = Config(**PRESETS[name])
    if not changes.get("gated", True) and "intermediate" not in changes:
        changes["intermediate"] = -(config.intermediate * 16 // -(11 * 64)) * 64
    batch = changes.get("batch")
    if isinstance(batch, int) and batch > 0 and "micro_batch" not in changes:
        changes["micro_batch"] = math.gcd(batch, config.micro_batch)
    names = [field.name for field in fields(Config)]
    if unknown := changes.keys() - names:
        raise ValueError(f"train.preset: changes must be of the fields {', '.join(names)}, got {', '.join(unknown)}.")
    return replace(config, **changes)
