"""One model trained dense and sparse, from the same seed on the same text: what L1 costs and what it leaves active.

    python -m benchmarks.train.compare corpus runs --steps 1500 --json benchmarks/results/train-100m-<gpu>.json

Each run is `train.Run` with a preset; a run that is there already goes on where it was stopped. Afterwards the blocks'
activations on unseen text are counted: entries of tokens, and neurons that 32 neighbouring tokens have in all.
`gossamer train report runs/*` draws the runs beside each other.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.provenance import provenance
from gossamer import sparsity
from gossamer.cli.energy import energy_counter
from gossamer.train import Corpus, Run, Transformer, preset

RUNS: dict[str, dict[str, Any]] = {
    "silu": {"activation": "silu"},
    "relu": {"activation": "relu"},
    "l1": {"activation": "relu", "l1": 5e-4, "reinitialize": 0.1, "method": "auto"},
    "l1-dense": {"activation": "relu", "l1": 5e-4, "reinitialize": 0.1},
    "l1-more": {"activation": "relu", "l1": 2e-3, "reinitialize": 0.1, "method": "auto"},
    "l1-no-reinitialisation": {"activation": "relu", "l1": 5e-4},
    "plain-l1": {"activation": "relu", "gated": False, "l1": 5e-4, "reinitialize": 0.1},
}
QUANTILES = (0.5, 0.9, 0.99, 1.0)
EVERY = 10
"""Steps between those that the result keeps."""


def counted(run: Run, patterns: Path | None) -> list[dict[str, Any]]:
    """By layer, on 16 sequences of unseen text: entries of tokens and of groups of 32, dead neurons. `patterns` gets
    the bits of three layers."""
    model = Transformer(replace(run.config, compile=False)).to(run.device)
    model.load_state_dict(run.model.state_dict())
    for block in model.blocks():
        block.l1 = False
    sequences = [run.held_out.batch([i])[:, :-1] for i in range(min(16, len(run.held_out)))]
    batches = [torch.cat((s, s[:, :1]), 1).to(run.device) for s in sequences]
    found = sparsity.report(model, batches, measure=False).layers.values()
    if patterns is not None:
        kept: dict[str, list[np.ndarray]] = {}

        def keep(name: str) -> Any:
            return lambda module, args, out: kept[name].append(np.packbits((out > 0).flatten(0, 1).cpu(), 1))

        gated, hooks = run.config.gated, []
        for i in sorted({1, run.config.layers // 2, run.config.layers - 1}):
            kept[f"layer{i:02}"] = []
            block = model.blocks()[i]
            part = block.gate_proj if gated else block.up_proj
            hooks.append(part.register_forward_hook(keep(f"layer{i:02}")))
        with torch.no_grad():
            for batch in batches:
                model(batch)
        for hook in hooks:
            hook.remove()
        np.savez_compressed(patterns, **{name: np.concatenate(parts) for name, parts in kept.items()})
    return [{"mean": s.mean, "quantiles": {str(q): s.quantile(q) for q in QUANTILES}, "dead": s.dead} for s in found]


def train_one(name: str, corpus: Corpus, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    changes = {"steps": given.steps, "seed": given.seed, "compile": given.compile, "vocabulary": corpus.vocabulary}
    changes |= {"micro_batch": given.micro_batch} if given.micro_batch else {}
    changes |= {"l1": given.l1} if given.l1 and "l1" in RUNS[name] else {}
    changes |= {key: json.loads(value) for key, _, value in (field.partition("=") for field in given.set)}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = preset(given.preset, dtype="bfloat16" if device.type == "cuda" else "float32", **{**RUNS[name], **changes})
    joules = energy_counter(device)
    run = Run(
        config, corpus, folder / name, device=device, validate_every=max(config.steps // 10, 1),
        checkpoint_every=max(config.steps // 4, 100),
    )  # fmt: skip
    begun, first, energy = time.perf_counter(), run.step, joules() if joules else 0

    def show(record: dict[str, float]) -> None:
        if record["step"] % max(config.steps // 20, 1) == 0 or record["step"] == 1:
            shown = ("step", "loss", "validation", "l0", "dead", "sparse layers", "tokens/s", "peak_bytes")
            print(name, *(f"{key} {record[key]:.5g}" for key in shown if key in record), flush=True)

    run.train(show)
    seconds, tokens = time.perf_counter() - begun, (config.steps - first) * config.tokens_per_step
    found: dict[str, Any] = {
        "config": vars(config), "parameters": config.parameters, "seconds": seconds,
        "median_tokens_per_second": float(np.median([record["tokens/s"] for record in run.records[2:]])),
        "settled": {key: _settled(run.records, key) for key in ("l0", "dead", "tokens/s", "peak_bytes")},
        "records": [r for r in run.records if r["step"] % EVERY == 0 or "validation" in r],
    }  # fmt: skip
    if joules and tokens:
        found["mJ_per_token"] = (joules() - energy) / tokens
    if config.activation != "silu":
        found["layers"] = counted(run, folder / f"patterns-{name}.npz")
    return found


def _settled(records: list[dict[str, float]], key: str) -> float:
    """The median of the last tenth of the steps."""
    return float(np.median([record.get(key, 0.0) for record in records[-(len(records) // 10 + 1) :]]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path, help="folder for the runs")
    parser.add_argument("--runs", default="silu,relu,l1", help=f"of {', '.join(RUNS)}")
    parser.add_argument("--preset", default="100m")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--micro-batch", type=int)
    parser.add_argument("--l1", type=float, help="instead of the weights of the runs that have one")
    parser.add_argument("--set", action="append", default=[], help="other fields of the preset, as --set layers=3")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    corpus, command = Corpus(given.corpus), shlex.join(["python", "-m", "benchmarks.train.compare", *sys.argv[1:]])
    found = provenance(command, Path(__file__).parents[2], device)
    found |= {"tokens": corpus.tokens, "runs": {}}
    for name in given.runs.split(","):
        found["runs"][name] = train_one(name, corpus, given.out, given)
        if given.json:
            given.json.write_text(json.dumps(found, indent=1) + "\n")
        gc.collect()
        torch.cuda.empty_cache()
    print(f"{'run':24} {'loss':>7} {'L0':>7} {'dead':>6} {'tokens/s':>10} {'peak GiB':>9} {'mJ/token':>9}")
    for name, run in found["runs"].items():
        last, settled = run["records"][-1], run["settled"]
        print(
            f"{name:24} {last['validation']:7.4f} {settled['l0']:7.1f} {settled['dead']:6.1%} "
            f"{settled['tokens/s']:10,.0f} {settled['peak_bytes'] / 2**30:9.1f} {run.get('mJ_per_token', 0):9.3f}"
        )


if __name__ == "__main__":
    main()
