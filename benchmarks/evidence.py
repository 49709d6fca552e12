"""docs/evidence.md: the figures and tables of the five documents that gossamer started from, from committed results.

    python -m benchmarks.evidence                       # draws the figures and writes the page
    python -m benchmarks.evidence --measure '*llama*'   # first runs the commands that match, on this machine

Without a pattern, `--measure` runs every command whose results the page shows. A command that needs a corpus or other
weights is named on the page and not run. Of several results of one command the newest is shown. With `--check` nothing
is written, and the exit code is 1 where the page differs from the results.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from benchmarks import evidence_plots as plots
from benchmarks.attention.bench_gated_sparse_attention import least_flops
from benchmarks.attention.bench_gated_sparse_attention import stages as counted
from benchmarks.evidence_plots import Content, cases, latest, named, seconds
from benchmarks.tables import ROOT, provenance, table

PAGE, PICTURES = ROOT / "docs" / "evidence.md", ROOT / "docs" / "evidence"


class Item(NamedTuple):
    """A figure or table: its name there, the command that measures it, and the stems of names that its result may have.

    draw: of a result, into a file. rows: of a result, the table's head and lines. said: where else its result is, or
    why there is none.
    """

    what: str
    command: str = ""
    stem: str = ""
    draw: Callable[[Content, Path], None] | None = None
    rows: Callable[[Content], list[list[str]]] | None = None
    said: str = ""

    @property
    def picture(self) -> Path:
        return PICTURES / f"{self.stem.split()[0].removesuffix('-*')}.png"


def two(number: float) -> str:
    return f"{number:.2f}"


def training(content: Content) -> list[list[str]]:
    """Tables 1 and 2 of blksprs."""
    ways = list(dict.fromkeys(run["way"] for run in content["runs"]))
    lines = [["tokens, inputs a step", *ways]]
    for key in sorted({(run["length"], run["batch"]) for run in content["runs"]}):
        of = {run["way"]: run for run in content["runs"] if (run["length"], run["batch"]) == key}
        if len(of) < len(ways):
            continue  # the run was stopped within this size
        cells = [f"{of[way]['peak_bytes'] / 2**30:.2f} GiB" for way in ways]
        if key[1] > 1:
            cells = [f"{cell}, {of[way]['seconds']:.1f} s" for cell, way in zip(cells, ways)]
        lines.append([f"{key[0]:,}, {key[1]}", *cells])
    share = content.get("largest_difference")
    same = "" if share is None else f"{share:.1e} of the first loss"
    return [*lines, ["losses of the same keys differ by", same, *[""] * (len(ways) - 2)]]


PIPELINES = {
    "torch.compile": "torch.compile",
    "torch.sparse": "torch.sparse",
    "exact": "gossamer exact",
    "fixed, validated": "gossamer fixed, validated",
    "fixed": "gossamer fixed",
    "`sae.decode`": "gossamer",
}


def pipelines(content: Content) -> list[list[str]]:
    """Dense time over that of each way, eager."""
    lines = [["dense time over that of, eager", *PIPELINES]]
    for case in cases(content, "decode"):
        if case["dtype"] == "float32" and case["parameters"]["B"] < 4096:
            dense = seconds(case, "dense", "eager")
            found = [seconds(case, name, "eager") for name in PIPELINES.values()]
            lines.append([plots.size(case), *(two(dense / x) if dense and x else "" for x in found)])
    return lines


READY = ("gossamer ELL", "gossamer CSR", "jumprelu-sae-kernels, fixed", "torch.sparse", "embedding_bag")


def ready(content: Content) -> list[list[str]]:
    """Dense time over that of each way from packed rows, by graphs where both have one."""
    lines = [["dense time over that of, by CUDA graphs where both can", *READY]]
    for case in [c for name in ("ready_l0", "ready_features", "decode_ready") for c in cases(content, name)]:
        if case["parameters"]["B"] < 4096:
            lines.append([plots.size(case), *(plots.ratio(case, "dense", name) for name in READY)])
    return lines


def memory(content: Content) -> list[list[str]]:
    """Inputs and peak of a call, in MB of 10^6 bytes."""
    ways = ("dense", "gossamer exact", "gossamer fixed, validated", "gossamer")
    lines = [["MB", *ways]]
    for case in cases(content, "memory"):
        peaks = [case["input_bytes"] + (named(case, way) or {}).get("peak_bytes", 0) for way in ways]
        given = case["parameters"]
        lines.append([f"B {given['B']:,}, {given['capacity']:,} slots", *(f"{peak / 1e6:.1f}" for peak in peaks)])
    return lines


def real(content: Content) -> list[list[str]]:
    """SAELens's forward pass with its own decoder and with ours."""
    lines = [["SAE", "SAELens's time over gossamer's", "by graphs", "largest error of a row"]]
    for case in cases(content, "sae_lens_forward"):
        times = [(seconds(case, "SAELens", kind), seconds(case, "gossamer", kind)) for kind in ("eager", "graph")]
        error = (named(case, "gossamer") or {})["error"]
        shown = [two(a / b) if a and b else "" for a, b in times]
        lines.append([str(case["parameters"]["SAE"]), *shown, f"{error:.1e}"])
    return lines


def gated(content: Content) -> list[list[str]]:
    """The article's ratios: throughput over that of cuBLAS with SwiGLU in place, and over cuBLAS alone."""
    models = {"llama_8b": "8B", "llama_70b": "70B", "llama_405b": "405B"}
    peers = {plots.IN_PLACE: "in place", "GEMM alone": "cuBLAS, not gated"}
    lines = [
        [
            "tokens; peer's time over gossamer's",
            *(f"{shown}, {what}" for shown in models.values() for what in peers.values()),
        ]
    ]
    by = {(c["name"], c["parameters"]["M"]): c for c in content["cases"]}
    for tokens in sorted({tokens for _, tokens in by}):
        made = [by.get((name, tokens)) for name in models]
        lines.append(
            [f"{tokens:,}", *(plots.ratio(case, peer, "gossamer") if case else "" for case in made for peer in peers)]
        )
    return lines


def accuracy(content: Content) -> list[list[str]]:
    """Relative differences, and absolute ones between gossamer and eager PyTorch."""
    known = ("largest", "mean") if "absolute" in content["sizes"][0] else ()
    absolute = {name: f"{name} abs(gossamer - eager)" for name in known}
    lines = [["M, K, N", "gossamer - eager", "gossamer - float64", "eager - float64", *absolute.values()]]
    for size in content["sizes"]:
        names = ("gossamer - eager", "gossamer - float64", "eager - float64")
        shown = [f"{size['relative'][name]['mean']:.2e}" for name in names]
        shown += [f"{size['absolute'][name]['mean']:.2e}" for name in absolute]
        lines.append([", ".join(f"{size[name]:,}" for name in "MKN"), *shown])
    return lines


def stages(content: Content, T: int = 4096, width: int = 2048, k: int = 2048) -> list[list[str]]:
    """FLOPs, bytes, intensity and least time of a layer's stages, at the ceilings that the result's device reached."""
    found = counted(T, width, k)
    ceilings, total = content["ceilings"], sum(flops for flops, _ in found.values())
    lines = [[f"T {T:,}, k {k:,}", "GFLOP", "of all", "MB", "FLOP a byte", "least us"]]
    for name, (flops, moved) in [*found.items(), ("all", (total, sum(moved for _, moved in found.values())))]:
        least = max(flops / ceilings["gemm"]["bfloat16"], moved / ceilings["bandwidth"]) * 1e6
        shown = [f"{flops / 1e9:.1f}", f"{flops / total:.1%}", f"{moved / 1e6:.1f}", f"{flops / moved:.0f}"]
        lines.append([name, *shown, f"{least:.0f}"])
    return lines


def layers(content: Content) -> list[list[str]]:
    """Time, tokens a second, rate of the least FLOPs, and peak memory of whole layers."""
    lines = [["layer, way", "us", "tokens/s", "TFLOP/s of the least", "peak MiB"]]
    for case in sorted(content["cases"], key=lambda c: (c["name"], c["parameters"]["T"])):
        tokens, training = case["parameters"]["B"] * case["parameters"]["T"], case["name"].endswith("training")
        sizes = [case["parameters"][name] for name in ("T", "hidden", "k")]
        least = case["parameters"]["B"] * least_flops(*sizes, training)
        for provider in case["providers"]:
            if provider["eager"] and "one token" not in provider["name"]:
                took = (provider["graph"] or provider["eager"])["median"]
                kind = ", forward and backward" if training else ""
                what = f"T {case['parameters']['T']:,}{kind}, {provider['name']}"
                rate = f"{least / took / 1e12:.0f}"
                peak = f"{provider['peak_bytes'] / 2**20:,.0f}"
                lines.append([what, f"{took * 1e6:,.0f}", f"{tokens / took:,.0f}", rate, peak])
    return lines


KINDS = {"model": "gated ReLU", "model, plain": "ReLU, not gated", "model, silu": "gated SiLU"}


def whole(content: Content) -> list[list[str]]:
    """The columns of forward execution and energy of Tables 1, 3, 4 and 5."""
    head = ["model", "dense tokens/ms", "sparse tokens/ms", "faster by", "dense mJ a token", "sparse mJ", "less by"]
    lines = [head]
    for case in sorted(content["cases"], key=lambda c: (c["name"], c["parameters"]["layers"], c["bytes"])):
        ours, dense = named(case, "gossamer"), named(case, "dense")
        if ours and dense and ours["eager"] and dense["eager"]:
            times = [p["eager"]["median"] * 1e3 for p in (dense, ours)]
            energy = [p["joules"] / case["tokens"] * 1e3 for p in (dense, ours)]
            given, kind = case["parameters"], KINDS[case["name"]]
            what = f"{kind}, {given['layers']} layers, {given['entries']} entries"
            shown = [f"{case['tokens'] / x:.0f}" for x in times] + [f"{times[0] / times[1] - 1:+.1%}"]
            shown += [two(x) for x in energy] + [f"{1 - energy[1] / energy[0]:.1%}"]
            lines.append([what, *shown])
    return lines


def steps(content: Content) -> list[list[str]]:
    """The columns of training steps of Table 1."""
    lines = [["way", "tokens/ms", "peak GB", "mJ a token"]]
    for case in content["cases"]:
        way = f"{case['way']}, {'recomputing' if case['recompute'] else 'keeping activations'}"
        if "entries" in case and case["way"] != "dense":
            way += f", {case['entries']:.0f} entries"
        shown = [f"{case['tokens/ms']:.1f}", f"{case['peak_bytes'] / 1e9:.1f}", f"{case['mJ/token']:.1f}"]
        lines.append([way, *shown])
    return lines


def runs(content: Content) -> list[list[str]]:
    """The cost of a training run, and the quality of its model."""
    lines = [["run", "validation loss", "entries", "dead neurons", "tokens/ms", "mJ a token", "peak GB"]]
    for name, run in content["runs"].items():
        loss = [record["validation"] for record in run["records"] if "validation" in record][-1]
        settled, costs = run["settled"], (run["median_tokens_per_second"] / 1e3, run["mJ_per_token"])
        shown = [f"{loss:.3f}", f"{settled['l0']:.0f}", f"{settled['dead']:.1%}", *map(two, costs)]
        lines.append([name, *shown, f"{settled['peak_bytes'] / 1e9:.1f}"])
    return lines


def settings(content: Content) -> list[list[str]]:
    """Table 2, of the run that is shown."""
    config = list(content["runs"].values())[-1]["config"]
    return [["hyperparameter", ""], *([name, str(value)] for name, value in config.items() if value is not None)]


def active(content: Content) -> list[list[str]]:
    """Entries of each layer after training, and its dead neurons."""
    lines = [["run, layer", "mean entries", "median", "99%", "largest", "dead neurons"]]
    for name, run in content["runs"].items():
        for number, layer in enumerate(run.get("layers", ())):
            of = [str(layer["quantiles"][q]) for q in ("0.5", "0.99", "1.0")]
            lines.append([f"{name}, {number}", f"{layer['mean']:.1f}", *of, f"{layer['dead']:,}"])
    return lines


BENCH = "python -m benchmarks"
GSA = f"{BENCH} attention --case 'gated_sparse_attention*' --length 1024 --length 2048 --length 4096 --length 8192"
GSA_STEM = "attention-gated-sparse-attention-1024-2048-4096-8192 attention-layer"
SCALE = "Not made: eight GPUs train each of its models of 1.5 billion parameters for days"
TASKS = "Not made: it needs those models, and seven question sets"
STEP = "python -m benchmarks.train.step --eager no --json benchmarks/results/train-step"
CORPUS = "python -m benchmarks.train.compare corpus runs --runs silu,relu,l1,l1-dense --preset 0.5b --set layers=3"
DRAWN = "Not measured: drawings or lists"
OPERATORS = ("matmul", "softmax", "scatter_reduce", "repeat_interleave")

DOCUMENTS: dict[str, tuple[Item, ...]] = {
    "blksprs: A Triton Library for Block-Sparse Matrix Operations": (
        *(
            Item(f"Figure 1{part}, {name}", f"{BENCH} blocksparse --case '{name}/*'",
                 f"blocksparse-{name.replace('_', '-')}", draw=plots.operator)
            for part, name in zip("abcd", OPERATORS)
        ),
        Item("Figure 1, Triton's own kernels", said="Not made: Triton 3 no longer has them"),
        Item("Tables 1 and 2", "python -m benchmarks.blocksparse.train", "blocksparse-train", rows=training,
             said="only the memory at 8,192 tokens; the other sizes and the seconds were not run"),
    ),
    "Sparse decoding of JumpReLU autoencoders": (
        Item("Summary, full pipeline, more baselines", f"{BENCH} sae", "sae", rows=pipelines),
        Item("Correctness of 486 inputs", "python -m pytest tests/sae/test_decode.py", said="the tests"),
        Item("Decoder alone, by L0 and by features", f"{BENCH} sae --case '*ready*'", "sae-ready", plots.ready, ready),
        Item("Graph of the full pipeline", f"{BENCH} sae", said="[decode.png](decode.png)"),
        Item("Real SAEs, end to end", f"{BENCH} integrations", "integrations integrations-saelens", rows=real),
        Item("Memory overhead", f"{BENCH} sae", "sae", rows=memory),
    ),
    "Fused SwiGLU": (
        Item("TFLOP/s of 8B, 70B and 405B; ratios", f"{BENCH} gemm --case 'llama*'", "gemm-llama", plots.gated, gated,
             said="405B at 65,536 tokens alone"),
        Item("Memory of 8B, 70B and 405B; KV cache", "python benchmarks/gemm/memory_linear_glu.py", "gemm-memory",
             plots.cache, said=", ".join(f"[{size}](../benchmarks/results/gemm-memory-nvidia-h200-llama-3-{size}.png)"
                                         for size in ("8b", "70b", "405b"))),
        Item("The kernel's product without gating", said="Not made: gossamer has no product without the gate"),
        Item("Numerical differences", "python benchmarks/gemm/accuracy_linear_glu.py", "gemm-accuracy", rows=accuracy),
        Item("Scores of Llama 3 8B", said="Not made: it needs the weights of Llama 3, and three question sets"),
        Item("Diagrams and code", said=DRAWN),
    ),
    "Gated sparse attention": (
        Item("Latency, tokens a second, memory", GSA, GSA_STEM, rows=layers),
        Item("FLOPs, least latency, arithmetic intensity", GSA, GSA_STEM, rows=stages),
        Item("Verification", f"{BENCH} attention --case gated_sparse_attention --verify-length 256 --atol 0.1",
             said="printed"),
        Item("Profiles", f"{BENCH} attention --case gated_sparse_attention --profile", said="printed; or --ncu"),
        Item("Traffic of memory by kernel", said="Not made: counters need ncu; the peak of a call stands above"),
        Item("Tables of tile sizes, of further steps, of files, options and ranges", said=DRAWN),
    ),
    "Sparser, Faster, Lighter Transformer Language Models": (
        Item("Figure 4; Tables 1, 3, 4, 5: forward, energy", f"{BENCH} ffn --case 'model*'", "ffn-model ffn-models",
             plots.models, whole),
        Item("Table 1: training of the 1.5B model", f"{STEP}-1.5b-nvidia.json --preset 1.5b --entries 29",
             "train-step-1.5b", rows=steps),
        Item("Table 1: training of the 2B model",
             f"{STEP}-2b-nvidia.json --preset 2b --entries 24 --recompute yes --ways dense,gated_mlp,lists",
             "train-step-2b", rows=steps),
        Item("Table 1: training of the 1B model",
             f"{STEP}-1b-nvidia.json --preset 1b --entries 33 --ways dense,lists", "train-step-1b", rows=steps),
        Item("Table 1: training of the 0.5B model",
             f"{STEP}-0.5b-nvidia.json --preset 0.5b --entries 39 --ways dense,lists", "train-step-0.5b", rows=steps),
        Item("Figure 5: training by entries",
             f"{STEP}-entries-nvidia.json --preset 1.5b --entries 29,10,60,100,300 --recompute no --ways dense,lists",
             "train-step-entries", plots.steps, steps),
        Item("Figures 2, 8 and 9, on 204M parameters", CORPUS, "train-wide-*", plots.curves),
        Item("Tables 1, 3 and 5, of those runs", CORPUS, "train-wide-*", rows=runs),
        Item("Table 2, of those runs", CORPUS, "train-wide-*", rows=settings),
        Item("Figures 6, 10 and 11, of those runs", CORPUS, "train-wide-*", rows=active),
        Item("Figures 6, 10 and 11: speed by layer", said="Not made: layers of a model are not timed apart"),
        Item("Figure 7: tokens and positions", said="Not made: the models of those runs are not kept"),
        Item("Figures 2, 6, 8 to 11 at 1.5B, Table 5's recipes", said=SCALE),
        Item("Figure 3, Table 6, accuracies", said=TASKS),
        Item("Figure 12", said="Not made: it needs an RTX PRO 6000"),
        Item("Figure 1, code listings", said=DRAWN),
    ),
}  # fmt: skip


def page() -> str:
    parts = [
        "# Evidence",
        "",
        "gossamer started from five documents. This page has their figures and tables as gossamer makes them on one",
        "GPU, or the reason why one is not made. `python -m benchmarks.evidence` writes the page from",
        "[benchmarks/results](../benchmarks/results); with `--measure` it runs the commands first.",
    ]
    for document, items in DOCUMENTS.items():
        parts += [
            "",
            f"## {document}",
            "",
            *table(["figure or table", "command", "result"], _index(items)),
        ]
        for item in items:
            content = latest(item.stem)
            if content is not None and (item.draw or item.rows):
                parts += ["", f"### {item.what}", "", f"{provenance(content)}."]
                parts += ["", f"![{item.what}](evidence/{item.picture.name})"] if item.draw else []
                if item.rows:
                    head, *lines = item.rows(content)
                    parts += ["", *table(head, lines)]
    return "\n".join(parts) + "\n"


def _index(items: tuple[Item, ...]) -> list[list[str]]:
    rows = []
    for item in items:
        parts = ["figure"] * bool(item.draw) + ["table"] * bool(item.rows)
        below = " and ".join(parts)
        if parts and not latest(item.stem):
            below = "not measured yet, for want of time on a GPU"
        command = f"`{item.command}`" if item.command else ""
        rows.append([item.what, command, "; ".join(text for text in (below, item.said) if text)])
    return rows


def draw() -> None:
    """All figures whose results are there."""
    PICTURES.mkdir(exist_ok=True)
    for items in DOCUMENTS.values():
        for item in items:
            content = latest(item.stem)
            if item.draw and content is not None:
                item.draw(content, item.picture)


def measure(patterns: list[str]) -> int:
    """Runs the commands that match; the number of those that failed, or 1 where none matches."""
    found = dict.fromkeys(item.command for items in DOCUMENTS.values() for item in items if item.stem)
    known = [command for command in found if " corpus " not in command]
    chosen = [c for c in known if any(fnmatchcase(c, pattern) for pattern in patterns or ["*"])]
    if not chosen:
        print(f"--measure must match one of these commands, got {', '.join(patterns)}:", *known, sep="\n  ")
    failed = 0
    for command in chosen:
        print(f"$ {command}", flush=True)
        _, *words = shlex.split(command)
        failed += subprocess.run([sys.executable, *words], cwd=ROOT).returncode != 0
    return failed + (not chosen)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--measure", nargs="*", metavar="GLOB", help="run the commands that match first; all by default"
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where the page is out of date")
    options = parser.parse_args(arguments)
    if options.check:
        stale = not PAGE.is_file() or PAGE.read_text() != page()
        return int(
            stale and not print("docs/evidence.md differs from benchmarks/results/: run python -m benchmarks.evidence")
        )
    failed = 0 if options.measure is None else measure(options.measure)
    draw()
    PAGE.write_text(page())
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
