"""TopK and JumpReLU with their defaults on the residual stream of the demo's byte model, by variance explained.

Usage: python benchmarks/nn/residual_stream.py [--seconds-model 60] [--d-sae 1024] [--steps 600] [--l0 10 20 40]
--out FILE.json [--plot FILE.png]. Trains the demo's model once, then each autoencoder with Adam on the same
rows in the same order, at one rate that falls over the last quarter.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.provenance import provenance
from demo import measure
from demo.model import ByteModel, ModelConfig
from demo.text import load_corpus
from demo.train import Clock, activations, train_model, variance_explained
from gossamer import nn

POOL_CONTEXTS, VALIDATION_CONTEXTS = 1024, 64


def stream(seconds: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows `[M, d_model]` of the residual stream of text that the model was trained on, and of other text."""
    corpus, generator = load_corpus(None, seed=0, min_bytes=10_000), torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = ByteModel(ModelConfig()).to(device)
    train = corpus.train.to(device)
    options = {"batch_size": 8, "generator": generator, "show": lambda done, line: None}
    train_model(model, train, clock=Clock(seconds), **options)
    rows = [activations(model, train, n_contexts=32, generator=generator) for _ in range(POOL_CONTEXTS // 32)]
    unseen = measure.contexts(corpus.validation.to(device), VALIDATION_CONTEXTS, model.config.context)
    with torch.no_grad():
        return torch.cat(rows), model.residual(unseen).flatten(0, 1)


def train_one(kind: str, l0: int, rows: Tensor, unseen: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    if kind == "topk":
        model: Any = nn.TopKSAE(rows.shape[1], options.d_sae, l0, device=rows.device)
    else:
        model = nn.JumpReLUSAE(rows.shape[1], options.d_sae, target_l0=l0, device=rows.device)
    model.initialize_(rows[: 8 * options.batch])
    rate = options.rate
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    generator, begun, course = torch.Generator().manual_seed(1), time.perf_counter(), []
    for step in range(options.steps):
        optimizer.param_groups[0]["lr"] = rate * min(1.0, 4 * (1 - step / options.steps))
        x = rows[torch.randint(len(rows), (options.batch,), generator=generator).to(rows.device)]
        loss = model.loss(x)
        optimizer.zero_grad()
        loss.loss.backward()
        optimizer.step()
        if step % 10 == 0:
            explained = variance_explained(x, loss.reconstruction.detach()).item()
            course.append({"step": step, "l0": loss.l0.item(), "variance_explained": explained})
    model.eval()
    with torch.no_grad():
        found = model.loss(unseen)
    return {
        "kind": kind,
        "target": l0,
        "l0": found.l0.item(),
        "variance_explained": variance_explained(unseen, found.reconstruction).item(),
        "silent_100_calls": (model.steps_since_fired > 100).float().mean().item(),
        "seconds": time.perf_counter() - begun,
        "course": course,
    }


def plot(runs: list[dict[str, Any]], file: Path) -> None:
    """L0 and explained variance of the training batches, of each run."""
    figure = Figure(figsize=(9, 3), layout="constrained")
    l0, explained = figure.subplots(1, 2)
    for run in runs:
        style = {"color": f"C{sorted({r['target'] for r in runs}).index(run['target'])}", "linewidth": 1.5}
        style |= {"linestyle": "-" if run["kind"] == "jumprelu" else ":", "label": f"{run['kind']}, {run['target']}"}
        steps = [record["step"] for record in run["course"]]
        l0.plot(steps, [record["l0"] for record in run["course"]], **style)
        explained.plot(steps, [record["variance_explained"] for record in run["course"]], **style)
    l0.set(title="L0", xlabel="step", yscale="log")
    explained.set(title="Variance explained", xlabel="step", ylim=(0.3, 1))
    explained.legend(fontsize=8)
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds-model", type=float, default=60.0)
    parser.add_argument("--d-sae", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--l0", type=int, nargs="+", default=[10, 20, 40])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    made = provenance(" ".join(["python", *sys.argv]), Path(__file__).parents[2], device)
    rows, unseen = stream(options.seconds_model, device)
    made |= {"rows": len(rows), "d_in": rows.shape[1], "d_sae": options.d_sae, "runs": []}
    for l0 in options.l0:
        for kind in ("topk", "jumprelu"):
            made["runs"].append(train_one(kind, l0, rows, unseen, options))
            options.out.write_text(json.dumps(made, indent=1) + "\n")
            print({name: value for name, value in made["runs"][-1].items() if name != "course"}, flush=True)
    if options.plot:
        plot(made["runs"], options.plot)


if __name__ == "__main__":
    main()
