"""Autoencoders trained with their defaults on rows that are sums of few known atoms: the share of atoms that they find.

Usage: python benchmarks/nn/recover_dictionary.py [--kinds jumprelu ...] [--settings "96 atoms" ...] [--seeds 3]
[--rates 1e-3 ...] --out FILE.json. Runs that the file has already are kept, and not trained again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.provenance import provenance
from gossamer import nn

KINDS = ("topk", "batchtopk", "jumprelu", "matryoshka", "standard", "gated")
ALL = (*KINDS, "matryoshka-batchtopk")
"""The last finds fewer of the 192 atoms than the tests ask of the others."""


@dataclass(frozen=True)
class Setting:
    """`atoms` unit directions in d_in, of which `active` make a row, with coefficients uniform in 0.5 to 1.5.

    Args:
        groups: 0, or how many groups of 8 atoms the active ones of a row come from.
        recovered: the share of atoms that are to be found.
    """

    atoms: int
    d_in: int
    active: int
    batch: int
    d_sae: int
    steps: int
    recovered: float
    groups: int = 0


SETTINGS = {
    "96 atoms": Setting(96, 48, 4, 1024, 192, 2000, 0.95),
    "192 atoms": Setting(192, 48, 5, 256, 384, 1500, 0.9),
    "96 correlated atoms": Setting(96, 48, 4, 1024, 192, 2000, 0.95, groups=2),
}
SHORT = Setting(48, 24, 3, 256, 96, 500, 0.85)
"""For a quick look, at a rate of 3e-3."""


@dataclass(frozen=True)
class Outcome:
    """The share of atoms found above cosine 0.9; L0 and the share of variance left on new rows; latents not fired in
    the last 100 steps."""

    recovered: float
    l0: float
    unexplained: float
    dead: float


def atoms(setting: Setting, seed: int) -> Tensor:
    drawn = torch.randn(setting.atoms, setting.d_in, generator=torch.Generator().manual_seed(1000 + seed))
    return torch.nn.functional.normalize(drawn, dim=1)


def rows(setting: Setting, seed: int) -> Callable[[int], Tensor]:
    """Draws as many rows as it is asked for, on the CPU, always others."""
    directions, generator = atoms(setting, seed), torch.Generator().manual_seed(2000 + seed)

    def draw(count: int) -> Tensor:
        chosen = torch.rand(count, setting.atoms, generator=generator)
        if setting.groups:
            group = torch.rand(count, setting.atoms // 8, generator=generator)
            kept = group.topk(setting.groups).indices
            # One half of the atoms from each of two groups, say.
            each = torch.rand(count, setting.groups, 8, generator=generator).topk(setting.active // setting.groups)
            chosen = (kept[:, :, None] * 8 + each.indices).flatten(1)
        else:
            chosen = chosen.topk(setting.active).indices
        size = 0.5 + torch.rand(chosen.shape, generator=generator)
        return torch.zeros(count, setting.atoms).scatter(1, chosen, size) @ directions

    return draw


def make(kind: str, setting: Setting, **options: Any) -> Any:
    if kind == "jumprelu":
        return nn.JumpReLUSAE(setting.d_in, setting.d_sae, target_l0=setting.active, **options)
    if kind in ("standard", "gated"):
        return {"standard": nn.StandardSAE, "gated": nn.GatedSAE}[kind](setting.d_in, setting.d_sae, **options)
    made = {"topk": nn.TopKSAE, "batchtopk": nn.BatchTopKSAE, "matryoshka": nn.MatryoshkaSAE}
    made["matryoshka-batchtopk"] = nn.MatryoshkaBatchTopKSAE
    return made[kind](setting.d_in, setting.d_sae, setting.active, **options)


def train(
    kind: str, setting: Setting, *, seed: int, device: torch.device, rate: float = 1e-3, **options: Any
) -> Outcome:
    """Adam, one rate, nothing else."""
    torch.manual_seed(seed)
    draw, model = rows(setting, seed), make(kind, setting, **options).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for _ in range(setting.steps):
        loss = model.loss(draw(setting.batch).to(device))
        optimizer.zero_grad()
        loss.loss.backward()
        optimizer.step()
    model.eval()
    x = draw(8192).to(device)
    with torch.no_grad():
        found = model.loss(x)
        left = (x - found.reconstruction).square().sum() / (x - x.mean(0)).square().sum()
        learnt = torch.nn.functional.normalize(model.W_dec.float(), dim=1)
        share = ((atoms(setting, seed).to(device) @ learnt.t()).amax(1) > 0.9).float().mean()
        dead = (model.steps_since_fired > 100).float().mean()
    return Outcome(*(value.item() for value in (share, found.l0, left, dead)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=ALL, default=ALL)
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3])
    parser.add_argument("--penalties", nargs="+", default=["step"], help="of jumprelu")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = torch.device(options.device)
    made: dict[str, Any] = {"runs": []}
    if options.out.exists():
        made = json.loads(options.out.read_text())
    made |= provenance(" ".join(["python", *sys.argv]), Path(__file__).parents[2], device)
    made["settings"] = {name: asdict(setting) for name, setting in SETTINGS.items()}
    names = ("kind", "setting", "seed", "rate", "penalty")
    for rate in options.rates:
        for name in options.settings:
            for kind in options.kinds:
                for penalty in options.penalties if kind == "jumprelu" else [None]:
                    for seed in range(options.seeds):
                        case = dict(zip(names, (kind, name, seed, rate, penalty)))
                        if any(run.items() >= case.items() for run in made["runs"]):
                            continue
                        more = {} if penalty is None else {"penalty": penalty}
                        begun = time.perf_counter()
                        found = train(kind, SETTINGS[name], seed=seed, device=device, rate=rate, **more)
                        made["runs"].append(case | asdict(found) | {"seconds": time.perf_counter() - begun})
                        options.out.write_text(json.dumps(made, indent=1) + "\n")
                        print(made["runs"][-1], flush=True)


if __name__ == "__main__":
    main()
