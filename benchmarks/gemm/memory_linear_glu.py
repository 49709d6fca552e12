"""The memory of one call of `gemm.linear_glu`, beside eager PyTorch and Liger, and the tokens of a KV cache in it.

Usage: python benchmarks/gemm/memory_linear_glu.py [--quick] [--device cpu] [--out DIR].
A call's memory is the most that is allocated during it less what was before: its result and what it makes on the way,
without weights and x. The workspace that gossamer's kernel for Hopper keeps from call to call, one for all layers, is
added to it; that of cuBLAS, which the model's other products need anyway, is left out. PyTorch counts whole blocks,
which may be up to 1 MiB larger than a tensor. Calls are those of inference, in bfloat16, at the shapes of Llama 3's
three sizes and 512 to 65,536 tokens. Every result is checked against float64; the exit code is 1 if one is wrong or
gossamer fails. Liger is left out where liger-kernel is not installed, and a call where it does not fit in memory.

The last table is of a server that prefills in chunks of 512 tokens: the bytes that gossamer takes less than another
way, and how many more tokens' keys and values they hold, over all layers. The saving counts once, not once a layer:
only one layer's activations are alive at a time. It is a gain where the gated MLP is what memory has to last for.

On the CPU, or with --quick, the picture is of a toy shape. PyTorch counts no peak on the CPU: there, bytes are those of
the tensors [tokens, intermediate] that are alive at one time on a GPU, without a workspace, and are labelled so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.engine import report
from benchmarks.engine.command import command_line, slug
from benchmarks.engine.runner import CaseResult, Settings, run_case
from benchmarks.gemm.bench_linear_glu import linear_glu
from benchmarks.provenance import parsed, provenance
from gossamer.cli.environment import describe

ROOT = Path(__file__).resolve().parents[2]
CHUNK, ITEM = 512, torch.bfloat16.itemsize
# The providers by the benchmark's names, and how many tensors [tokens, intermediate] each holds at most: gate (for
# eager PyTorch its activation), up and their product, of which gossamer makes the last alone.
WAYS = {"gossamer": "gossamer", "dense": "eager", "Liger": "Liger"}
ALIVE = {"gossamer": 1, "eager": 3, "Liger": 3}


@dataclass(frozen=True)
class Model:
    """The public configuration of a model's KV cache and its gated MLPs."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int

    def call(self, tokens: int) -> Shape:
        return tokens, self.hidden, self.intermediate

    @property
    def kv_bytes(self) -> int:
        """Of one token's keys and values over all layers, in bfloat16."""
        return 2 * self.layers * self.kv_heads * self.head_dim * ITEM


# Gemma's activation is another (GELU), which changes nothing about what is held; the layers with a sliding window are
# counted as if they kept every token.
MODELS = (
    Model("Llama 3 8B",    32,  8, 128,  4096, 14336),
    Model("Llama 3 70B",   80,  8, 128,  8192, 28672),
    Model("Llama 3 405B", 126,  8, 128, 16384, 53248),
    Model("Mistral 7B",    32,  8, 128,  4096, 14336),
    Model("Qwen2.5 7B",    28,  4, 128,  3584, 18944),
    Model("Qwen2.5 72B",   80,  8, 128,  8192, 29568),
    Model("Gemma 2 9B",    42,  8, 256,  3584, 14336),
    Model("Gemma 2 27B",   46, 16, 128,  4608, 36864),
)  # fmt: skip
TOY = Model("toy", 2, 2, 32, 256, 704)
TOKENS, TOY_TOKENS = tuple(512 << i for i in range(8)), (64, 128, 256)
Peaks = dict[str, int]
Shape = tuple[int, int, int]  # tokens, hidden, intermediate


def from_shapes(shape: Shape) -> Peaks:
    return {name: count * shape[0] * shape[2] * ITEM for name, count in ALIVE.items()}


def run(shape: Shape, device: torch.device, seed: int) -> tuple[CaseResult, Peaks, int]:
    """The benchmark's case of this shape, checked and hardly timed; bytes of each way, and gossamer's workspace."""
    case = linear_glu(*shape, torch.bfloat16)
    ways = WAYS if find_spec("liger_kernel") else WAYS.keys() - {"Liger"}
    chosen = tuple(replace(p, name=WAYS[p.name], capturable=False) for p in case.providers if p.name in ways)
    case, settings = replace(case, providers=chosen, energy=False), Settings(rounds=1, burst=0.0)
    if device.type != "cuda":
        return run_case(case, device, settings, seed), from_shapes(shape), 0
    from gossamer._core.launch import scratch  # needs Triton, without which the CPU does

    scratch._streams.clear()  # so that it is this shape's, and not the largest so far
    result = run_case(case, device, settings, seed)
    workspace = sum(buffer.nbytes for buffer in scratch._streams.values())
    found = {o.provider.name: o.peak for o in result.outcomes if o.status == "ok" and o.peak is not None}
    return result, {way: peak + (workspace if way == "gossamer" else 0) for way, peak in found.items()}, workspace


def gains(model: Model, peaks: Peaks) -> dict[str, dict[str, int]]:
    """Against each other way: bytes that gossamer saves on a chunk, and the whole tokens of KV cache they hold."""
    if "gossamer" not in peaks:
        return {}
    saved = {name: peak - peaks["gossamer"] for name, peak in peaks.items() if name != "gossamer"}
    return {name: {"saved_bytes": b, "kv_tokens": b // model.kv_bytes} for name, b in saved.items()}


def kv_table(gained: dict[Model, dict[str, dict[str, int]]], source: str) -> Table:
    table = Table(title=f"KV cache gained on a chunk of {CHUNK} tokens; {source}", title_justify="left")
    for column in ("model", "KV a token", "saved on eager", "tokens gained", "saved on Liger", "tokens gained"):
        table.add_column(column, justify="left" if column == "model" else "right", no_wrap=True)
    for model, found in gained.items():
        cells = []
        for gain in (found.get("eager"), found.get("Liger")):
            cells += [f"{gain['saved_bytes'] / 2**20:,.1f} MiB", str(gain["kv_tokens"])] if gain else ["", ""]
        table.add_row(model.name, f"{model.kv_bytes / 2**10:,.0f} KiB", *cells)
    return table


def plot(model: Model, peaks: dict[int, Peaks], source: str, device: str, path: Path) -> None:
    """Memory of a call against tokens, each way a line."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    # Two of them lie on one line: the later is dashed and lets the earlier through.
    for name, style in zip(ALIVE, ("o-", "s-", "^--")):
        points = [(tokens, found[name] / 2**20) for tokens, found in peaks.items() if name in found]
        if points:
            axes.plot(*zip(*points), style, label=name, markersize=4, linewidth=2.5 if name == "gossamer" else 1.2)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="memory of one call (MiB)")
    shape = f"hidden = {model.hidden}, intermediate = {model.intermediate}, bfloat16"
    axes.set_title(f"gemm linear_glu, {model.name}: {shape}\n{device}, {source}", fontsize=10)
    axes.set_xticks(list(peaks), [str(tokens) for tokens in peaks])
    axes.set_xticks([], minor=True)
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=130)


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, torch.device]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of the random inputs, 0 by default")
    return parsed(parser, arguments, "toy shape in the picture, as always on the CPU")


def main(arguments: Sequence[str]) -> None:
    options, device = parse(arguments)
    measured = device.type == "cuda"
    if measured:
        torch.cuda.set_device(device.index or 0)  # Liger launches on the current device
    source = "measured" if measured else "from shapes, not measured, without workspace"
    hardware, console = describe(device), report.make_console()
    stem = f"gemm-memory-{slug(hardware['name'])}{'-quick' if options.quick else ''}"
    path = options.out / f"{stem}.json"
    content: dict[str, Any] = {
        **provenance(command_line("python benchmarks/gemm/memory_linear_glu.py", [*arguments]), ROOT, device),
        "settings": {"seed": options.seed, "quick": options.quick, "chunk": CHUNK, "bytes": source},
        "calls": [],
    }
    pictured, lengths = ((TOY,), TOY_TOKENS) if options.quick else (MODELS[:3], TOKENS)
    chunks = [model.call(CHUNK) for model in MODELS]
    calls = [model.call(tokens) for model in pictured for tokens in lengths] + (chunks if measured else [])
    peaks = {} if measured else {shape: from_shapes(shape) for shape in chunks}
    if measured and not find_spec("liger_kernel"):
        console.print("Liger is left out: liger-kernel is not installed")
    failed: list[str] = []
    for shape in track(list(dict.fromkeys(calls)), "calls", console=console):
        result, peaks[shape], workspace = run(shape, device, options.seed)
        notes = [f"{n.split(':')[0]} does not fit" if "OutOfMemoryError" in n else n for n in report.notes(result)]
        what = "{} tokens, {} to {}".format(*shape)
        failed += [f"{what}: {note}" for note in notes if result.failed and not note.endswith("does not fit")]
        names = zip(("tokens", "hidden", "intermediate"), shape)
        content["calls"].append({**dict(names), "bytes": peaks[shape], "workspace_bytes": workspace, "notes": notes})
        said = [f"{name} {peak / 2**20:,.1f} MiB" for name, peak in peaks[shape].items()]
        said += [f"{workspace / 2**20:,.1f} MiB of gossamer's are workspace"] if workspace else []
        console.print(f"{what}: {'; '.join([*said, *notes])}", markup=False)
    gained = {model: gains(model, peaks[model.call(CHUNK)]) for model in MODELS}
    content["kv_cache"] = [
        {**asdict(model), "kv_bytes_per_token": model.kv_bytes, "against": found} for model, found in gained.items()
    ]
    report.write_json(path, content)
    console.print(f"wrote {path}", markup=False)
    for model in pictured:
        picture = options.out / f"{stem}-{slug(model.name)}.png"
        lines = {tokens: peaks[model.call(tokens)] for tokens in lengths}
        plot(model, lines, source, hardware["name"], picture)
        console.print(f"wrote {picture}", markup=False)
    console.print(kv_table(gained, source))
    if failed:
        sys.exit("memory_linear_glu: " + "; ".join(failed))


if __name__ == "__main__":
    main(sys.argv[1:])
