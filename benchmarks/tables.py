"""docs/benchmarks.md, and the tables of other documents, from the files of `benchmarks/results/`.

`python -m benchmarks.tables` writes them; with `--check` it only says whether they are up to date, as
`make lint` asks. The plot is drawn, and not compared: other versions of matplotlib draw other bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from benchmarks.engine.random_cases import summary
from benchmarks.pages import SECTIONS

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE, CHOOSING, TRAINING, SELECTED, README, PLOT = (
    ROOT / "benchmarks" / "results",
    ROOT / "docs" / "benchmarks.md",
    ROOT / "docs" / "choosing.md",
    ROOT / "docs" / "training.md",
    ROOT / "docs" / "sparse-attention.md",
    ROOT / "README.md",
    ROOT / "docs" / "decode.png",
)
BEGIN, END = "<!-- measured: python -m benchmarks.tables -->", "<!-- /measured -->"
_GRAPH = ", CUDA graph"
HEADLINES = (
    (f"decode, 64 of 65,536 latents, batch 32{_GRAPH}", "sae", "sae/decode/B=32,F=65536,D=768,L0=64,float32"),
    ("SAELens's training step, JumpReLU, patched", "integrations-saelens", "training_step/SAE=jumprelu"),
    ("gated layer, 4,096 tokens, Llama 3 8B", "gemm", "gemm/linear_glu/M=4096,K=4096,N=14336,bfloat16"),
    (
        "feed-forward block, 29 of 5,632 neurons, 16,384 tokens (H100)",
        "ffn-gated",
        "M=16384,K=2048,N=5632,nnz=29,shared=0%",
    ),
    (
        f"both passes of such a block in training{_GRAPH}",
        "ffn-training",
        "training/M=16384,K=2048,N=5632,nnz=29,shared=0%",
    ),
    (
        "attention, 25% of its blocks of 128, 8,192 tokens (H100)",
        "blocksparse-attention",
        "/attention/T=8192,H=16,D=128,block=128,density=25",
    ),
    (
        f"selection of 2,048 of 131,072 keys a query, and attention (H100){_GRAPH}",
        "attention-selected",
        "selected_attention/B=1,T=131072",
    ),
    (
        f"attention of one query, 2,048 of 131,072 keys{_GRAPH}",
        "attention-32768-8192",
        "sparse_decode/B=1,T=131072,H=16,G=16",
    ),
)
"""README's rows: a description, the file, and a part of the case's id."""
FIRST = ("dense", "dense SDPA", "dense SDPA, cuDNN", "SAELens")
"""Providers that compute a case as it is usually computed without gossamer."""

BREAK_EVENS = (
    ("`sae.decode`", "sae", "sweep_l0", "gossamer"),
    ("`sae.decode`, TF32 allowed", "sae", "sweep_l0", "gossamer at tf32"),
    ("`gemm.linear_pack`, ReLU", "gemm", "linear_pack_relu", "gossamer"),
    ("`gemm.linear_pack`, JumpReLU, and `sae.decode`", "gemm", "linear_pack_decode", "gossamer"),
    ("step of `nn.TopKSAE`", "nn", "train_topk", "gossamer"),
    ("step of `nn.BatchTopKSAE`", "nn", "train_batchtopk", "gossamer"),
    ("step of `nn.JumpReLUSAE`", "nn", "train_jumprelu", "gossamer"),
    ("`ffn.gated`", "ffn-blocks", "gated", "gossamer"),
    ("`ffn.plain`, gathering", "ffn-plain", "plain", "gossamer, gather"),
    ("`attention.sparse_attention`", "attention", "sparse_attention", "gossamer"),
    ("the same, forward and backward", "attention", "sparse_attention_training", "gossamer"),
    ("`attention.sparse_attention`, one query", "attention", "sparse_decode", "gossamer"),
    ("`blocksparse.attention` (H100)", "blocksparse", "attention", "gossamer"),
    ("the same, forward and backward (H100)", "blocksparse", "attention_training", "gossamer"),
    ("`blocksparse.matmul`, all block-sparse (H100)", "blocksparse", "matmul", "gossamer"),
    ("`blocksparse.matmul` with a dense matrix (H100)", "blocksparse", "matmul_with_dense", "gossamer"),
)
"""The rows of docs/choosing.md: a description, how files begin, the name of their cases, and our provider."""


def read(file: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / file).read_text())
    return content


def environment(content: dict[str, Any]) -> str:
    device, versions = content["device"], content["versions"]
    if "driver" not in device:
        return f"{device['name']}, {device['threads']} threads, PyTorch {versions['torch']}"
    return (
        f"{device['name']} ({device['runtime']}, driver {device['driver']}), PyTorch {versions['torch']}, Triton "
        f"{versions['triton']}"
    )


def provenance(content: dict[str, Any]) -> str:
    """The command as it is called today. Older results have the names of before: the benchmarks left the package."""
    command = content["command"].replace("gossamer bench sae --saelens", "python -m benchmarks integrations")
    command = command.replace("gossamer bench", "python -m benchmarks")
    return f"{environment(content)}, commit {content['commit']}, `{command}`"


def page() -> str:
    parts = [
        "# Benchmarks",
        "",
        "`python -m benchmarks.tables` makes these tables from files in [benchmarks/results](../benchmarks/results).",
        "A file names hardware, versions, commit and command, and has more cases and peers than a table. All providers",
        "of a case are checked against float64 and timed in turn in one run, on inputs that rotate beyond the cache.",
        "Commands stand here as they are called today, and in older files by a former name.",
        "[Evidence](evidence.md) has the figures and tables of the five documents that gossamer started from.",
        "",
        "Times are medians in microseconds: eager, and in parentheses replayed from a CUDA graph. The ratio is the",
        "fastest peer's time over gossamer's, by graphs where both have one: above 1 gossamer is faster. Memory is the",
        "peak that a call allocates, gossamer's over the dense way's.",
    ]
    for section in SECTIONS:
        content = read(f"{section.file}.json")
        cases = [c for c in content["cases"] if c["name"] in section.names and section.shown(c["parameters"])]
        cases.sort(key=lambda case: section.names.index(case["name"]))
        link = f"[{section.file}.json](../benchmarks/results/{section.file}.json)"
        parts += ["", f"## {section.title}", "", section.text, "", f"{provenance(content)}: {link}.", ""]
        parts += times(cases, named=len(section.names) > 1)
    return "\n".join([*parts, *others(), *tests()]) + "\n"


def times(cases: list[dict[str, Any]], named: bool) -> list[str]:
    """A row for each case: our first provider, the dense way, the fastest peer."""
    rows = []
    for case in cases:
        found = {p["name"]: p for p in case["providers"] if p["eager"]}
        ours = next(p for p in found.values() if p["ours"])
        peers = {p["name"]: over(p, ours) for p in found.values() if is_peer(p, ours)}
        dense, fastest = next((found[name] for name in FIRST if name in found), None), min(peers, key=peers.__getitem__)
        memory = ours["peak_bytes"] / dense["peak_bytes"] if dense and dense["peak_bytes"] else None
        rows.append(
            [
                f"{case['name']}, {label(case)}" if named else label(case),
                clock(ours),
                clock(dense),
                f"{clock(found[fastest])} {fastest}",
                f"{peers[fastest]:.2f}",
                "" if memory is None else f"{memory:.0%}",
            ]
        )
    return table(["", "gossamer", "dense", "fastest peer", "ratio", "memory"], rows)


def others() -> list[str]:
    """Links to the files that no table shows, a line for each room or kind."""
    shown = {section.file for section in SECTIONS}
    links: dict[str, list[str]] = {}
    for stem in sorted(path.stem for path in RESULTS.glob("*.json")):
        kind, _, rest = stem.partition("-")
        if stem not in shown and kind != "tests":
            links.setdefault(kind, []).append(f"[{rest}](../benchmarks/results/{stem}.json)")
    return ["", "## Every other result", "", *(f"- {kind}: {', '.join(some)}" for kind, some in links.items())]


def label(case: dict[str, Any]) -> str:
    given = case["parameters"].items()
    shown = [f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}" for name, value in given]
    return ", ".join([*shown, case["dtype"]])


def clock(provider: dict[str, Any] | None) -> str:
    if provider is None:
        return ""
    graph = f" ({micro(provider['graph'])})" if provider["graph"] else ""
    return micro(provider["eager"]) + graph


def micro(timing: dict[str, Any]) -> str:
    number = timing["median"] * 1e6
    return f"{number:,.{max(0, 2 - math.floor(math.log10(number)))}f}"


def is_peer(provider: dict[str, Any], ours: dict[str, Any]) -> bool:
    return not provider["ours"] and provider["precision"] == ours["precision"] and provider["name"] != "GEMM alone"


def over(peer: dict[str, Any], ours: dict[str, Any]) -> float:
    kind = "graph" if peer["graph"] and ours["graph"] else "eager"
    ratio: float = peer[kind]["median"] / ours[kind]["median"]
    return ratio


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] + ["---:"] * (len(head) - 1), *rows)]


def headlines() -> list[str]:
    """README's table: ratios alone."""
    rows = []
    for what, file, wanted in HEADLINES:
        (case,) = [case for case in read(f"{file}-{card(what)}.json")["cases"] if wanted in case["id"]]
        kind = "graph" if what.endswith(_GRAPH) else "eager"
        found = {p["name"]: p for p in case["providers"] if p[kind]}
        ours = next(p for p in found.values() if p["ours"])
        peers = [p for p in found.values() if is_peer(p, ours)]
        first = next(p for p in peers if p["name"] in FIRST)
        peer = min(peers, key=lambda p: p[kind]["median"])
        rows.append(
            [
                what,
                f"{first[kind]['median'] / ours[kind]['median']:.2g}",
                f"{peer[kind]['median'] / ours[kind]['median']:.3g} ({peer['name']})",
                f"{ours['peak_bytes'] / first['peak_bytes']:.0%}",
            ]
        )
    head = ["on one NVIDIA H200, or H100", "dense way's time over gossamer's", "fastest peer's over gossamer's"]
    return table([*head, "gossamer's memory over the dense way's"], rows)


def card(what: str) -> str:
    """The end of files on the card of a row, an H200 where it does not say so."""
    return "nvidia-h100-80gb-hbm3" if "(H100)" in what else "nvidia-h200"


def density(case: dict[str, Any]) -> tuple[str, float] | None:
    """The parameter that says how much of a case is there, and the share that is."""
    given = case["parameters"]
    for part, whole in (("L0", "F"), ("L0", "N"), ("k", "F"), ("nnz", "N"), ("k", "T")):
        if isinstance(given.get(part), int) and whole in given:
            return part, given[part] / given[whole]
    if "sparsity" in given:
        return "sparsity", 1 - given["sparsity"] / 100
    return ("density", given["density"] / 100) if "density" in given else None


def break_evens() -> list[str]:
    """Of each problem, and each of its sizes, how gossamer's time compares with the dense way's by density."""
    rows = []
    for what, file, name, ours in BREAK_EVENS:
        cases = [
            case
            for path in sorted(RESULTS.glob(f"{file}-*{card(what)}.json"))
            for case in json.loads(path.read_text()).get("cases", ())
            if case["name"] == name
        ]
        sizes: dict[str, list[tuple[float, float]]] = {}
        for case in cases:
            found = {p["name"]: p for p in case["providers"] if p["eager"]}
            share, us = density(case), found.get(ours)
            same = [p for n, p in found.items() if n.startswith("dense") and us and p["precision"] == us["precision"]]
            if share and us and same:
                given = [(key, value) for key, value in case["parameters"].items() if key != share[0]]
                shown = [f"{key} {value:,}" if isinstance(value, int) else f"{key} {value}" for key, value in given]
                size = ", ".join([*shown, case["dtype"]])
                sizes.setdefault(size, []).append((share[1], min(over(peer, us) for peer in same)))
        rows += [[what, size, *_faster(sorted(ratios))] for size, ratios in sizes.items()]
        rows += (
            [] if sizes else [[what, f"not measured yet: `python -m benchmarks {file.partition('-')[0]}`", "", "", ""]]
        )
    head = ["on one NVIDIA H200, or H100", "size", "dense time over gossamer's", "faster up to", "slower from"]
    return table(head, rows)


def _faster(ratios: list[tuple[float, float]]) -> list[str]:
    """The dense way's time over ours at the lowest density, the densest before which we are faster, the first after."""
    first = f"{ratios[0][1]:.3g} at {percent(ratios[0][0])}"
    slower = next((share for share, ratio in ratios if ratio < 1), None)
    up_to = max((share for share, _ in ratios if slower is None or share < slower), default=None)
    single = len(ratios) == 1
    return [
        first,
        "" if up_to is None or single else percent(up_to),
        "" if single and slower is None else "none measured" if slower is None else percent(slower),
    ]


def percent(share: float) -> str:
    return f"{share:.2%}" if share < 0.01 else f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


def sweeps() -> list[str]:
    """The committed sweeps at random shapes, room by room, and how each was made."""
    rows, said = [], []
    for room, content in _swept().items():
        without = ", without Liger" if room == "gemm" and not content["versions"].get("liger-kernel") else ""
        said.append(f"- {room}: {provenance(content)}{without}.")
        for kind, label in (("dense", "dense PyTorch"), ("best", "the best peer")):
            figures = content["summary"].get(kind, {}).get(room, {"cases": 0})
            if figures["cases"]:
                rows.append([f"`{room}`", label, *_figures(figures), f"{figures['slower_by_5%_and_3us']:.1%}"])
    head = ["cases of", "beside", *SWEPT, "slower by 5% and 3 us"]
    return [*table(head, rows), "", *said] if rows else [NO_SWEEP]


def slower() -> list[str]:
    """README's line for each room that was swept, beside dense PyTorch; and its mean where least is there."""
    rows = []
    for room, content in _swept().items():
        shares = _by_density(room, content).items()
        mean = next((f"{found['geometric_mean']:.2f}, {label}" for label, found in shares if found["cases"]), "")
        rows.append([f"`{room}`", *_figures(content["summary"]["dense"][room]), mean])
    head = ["at random shapes, beside dense PyTorch", *SWEPT, "geometric mean at the lowest density"]
    return table(head, rows) if rows else [NO_SWEEP]


def densities() -> list[str]:
    """Of each room of which every swept case has a density, how it compares with dense PyTorch by density."""
    rows = []
    for room, content in _swept().items():
        for label, figures in _by_density(room, content).items():
            if figures["cases"]:
                worst = figures["worst"][0]["id"].split("/", 1)[1].replace(",", ", ")
                rows.append([f"`{room}`", f"{label} {THERE[room]}", *_figures(figures), worst])
    return table(["cases of", "what is there", *SWEPT, "which"], rows) if rows else [NO_SWEEP]


def _by_density(room: str, content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    cases = [(density(case), case) for case in content["cases"] if case["room"] == room]
    if room not in THERE or not all(found for found, _ in cases):
        return {}
    held = {
        label: [case for found, case in cases if found and least <= found[1] < most]
        for (least, most), label in DENSITIES.items()
    }
    return {label: summary(some)["dense"].get(room, {"cases": 0}) for label, some in held.items()}


DENSITIES = {
    (0, 0.01): "up to 1%",
    (0.01, 0.05): "1% to 5%",
    (0.05, 0.25): "5% to 25%",
    (0.25, math.inf): "25% or more",
}
THERE = {
    "sae": "of the latents of a row",
    "rowsparse": "of the columns of a row",
    "ffn": "of a token's neurons",
    "attention": "of the keys",
    "blocksparse": "of the blocks",
}
"""The whole of which a density is a share; other rooms have no density."""


NO_SWEEP = "No sweep is committed yet. `python -m benchmarks sweep` makes one."
SWEPT = ["cases", "below 1.00", "below 0.95", "geometric mean", "worst"]
"""Ratios are the peer's time over gossamer's."""


def _figures(figures: dict[str, Any]) -> list[str]:
    shares = [f"{figures[name]:.1%}" for name in ("below_1.00", "below_0.95")]
    return [f"{figures['cases']:,}", *shares, f"{figures['geometric_mean']:.2f}", f"{figures['worst'][0]['ratio']:.2f}"]


def _swept() -> dict[str, dict[str, Any]]:
    """Of each room the newest of the committed sweeps."""
    found: dict[str, dict[str, Any]] = {}
    read = (json.loads(path.read_text()) for path in RESULTS.glob("sweep-*.json"))
    for content in sorted(read, key=lambda content: str(content["started"])):
        found |= {case["room"]: content for case in content["cases"]}
    return dict(sorted(found.items()))


def selecting() -> list[str]:
    """Dense attention's time over that of selection and attention together, by length."""
    content = read("attention-selected-nvidia-h100-80gb-hbm3.json")
    by: dict[int, dict[str, str]] = {}
    for case in content["cases"]:
        for (name, ours), label in SELECTING.items():
            found = {p["name"]: p for p in case["providers"] if p["eager"]}
            beside = next((found[first] for first in FIRST if first in found), None)
            if case["name"] == name and ours in found and beside is not None:
                dense, us = (p["graph"] or p["eager"] for p in (beside, found[ours]))
                ratio = dense["median"] / us["median"]
                eager = "" if found[ours]["graph"] else ", eager"
                by.setdefault(case["parameters"]["T"], {})[label] = f"{ratio:.2f}{eager}"
    rows = [[f"{T:,}", *(row.get(label, "") for label in SELECTING.values())] for T, row in sorted(by.items())]
    return [*table(["T", *SELECTING.values()], rows), "", f"{provenance(content)}."]


SELECTING = {
    ("selected_attention", "gossamer"): "a selection for each layer",
    ("selected_attention_shared", "gossamer"): "one selection for four layers",
    ("selected_attention", "gossamer, units of four"): "each layer, in units of four keys",
    ("selected_attention_shared", "gossamer, units of four"): "four layers, in units of four keys",
}
"""The columns of docs/sparse-attention.md: the name of their cases, and our provider."""


def tests() -> list[str]:
    """The last runs of the tests on GPUs."""
    lines = [
        "",
        "## Tests on a GPU",
        "",
        "The same tests run on a CPU, in Triton's interpreter and on a GPU. These are the last runs on GPUs, oldest "
        "first. The files have earlier runs, and the cause of each failure, which was corrected before the next run.",
    ]
    for file in ("tests-nvidia-h200.json", "tests-nvidia-h100-80gb-hbm3.json"):
        content = read(file)
        rows = []
        for run in content["runs"][-LAST_RUNS:]:
            what = [word for word in run["command"].split() if word.startswith("tests")] or [run["command"]]
            counts = [str(run["counts"].get(name, 0)) for name in ("passed", "failed", "skipped")]
            rooms = dict.fromkeys(name.removeprefix("tests/").partition("/")[0] for name in what)
            rows.append([", ".join(f"`{room}`" for room in rooms), f"`{run['commit']}`", *counts])
        link = f"[{file}](../benchmarks/results/{file})"
        head = ["tests of", "commit", "passed", "failed", "skipped"]
        lines += ["", f"{environment(content)}: {link}.", "", *table(head, rows)]
    return lines


LAST_RUNS = 5


def dictionaries() -> list[str]:
    """The share of a known dictionary that autoencoders find, seed by seed."""
    content = read("nn-dictionary-cpu.json")
    rows = []
    for name, setting in sorted(content["settings"].items()):
        groups = f" of {setting['groups']} groups" if setting["groups"] else ""
        shape = f"{setting['atoms']} atoms, {setting['active']} a row{groups}, d_in {setting['d_in']}, d_sae "
        shape += f"{setting['d_sae']:,}, {setting['batch']:,} rows, {setting['steps']:,} steps"
        for kind, module in MODULES.items():
            runs = [r for r in content["runs"] if (r["setting"], r["kind"], r["rate"]) == (name, kind, 1e-3)]
            runs.sort(key=lambda run: run["seed"])
            found = ", ".join(f"{run['recovered']:.1%}" for run in runs)
            if runs:
                rows.append([shape, f"`{module}`", found, ", ".join(f"{run['l0']:.2f}" for run in runs)])
    return table(["rows", "", "found, of each seed", "L0"], rows)


MODULES = {"jumprelu": "JumpReLUSAE", "batchtopk": "BatchTopKSAE", "topk": "TopKSAE"}
MODULES |= {"matryoshka": "MatryoshkaSAE", "matryoshka-batchtopk": "MatryoshkaBatchTopKSAE"}
MODULES |= {"gated": "GatedSAE", "standard": "StandardSAE"}


def stream() -> list[str]:
    """The variance of a residual stream that autoencoders explain."""
    by: dict[int, dict[str, dict[str, Any]]] = {}
    for run in read("nn-stream-cpu.json")["runs"]:
        by.setdefault(run["target"], {})[run["kind"]] = run
    rows = []
    for target, runs in sorted(by.items()):
        topk, jumprelu = runs["topk"], runs["jumprelu"]
        explained = [f"{run['variance_explained']:.1%}" for run in (topk, jumprelu)]
        rows.append([str(target), *explained, f"{jumprelu['l0']:.1f}"])
    return table(["target", "TopK explains", "JumpReLU explains", "at L0"], rows)


def filled(text: str, *tables: list[str]) -> str:
    """A page whose marked parts hold the given tables, in order."""
    before, *parts = text.split(BEGIN)
    made = ("\n".join([BEGIN, *lines, END]) for lines in tables)
    return before + "".join(lines + part.split(END)[1] for lines, part in zip(made, parts, strict=True))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a file is out of date")
    options = parser.parse_args(arguments)
    wanted = {
        PAGE: page(),
        README: filled(README.read_text(), headlines(), slower()),
        CHOOSING: filled(CHOOSING.read_text(), break_evens(), densities(), sweeps()),
        TRAINING: filled(TRAINING.read_text(), dictionaries(), stream()),
        SELECTED: filled(SELECTED.read_text(), selecting()),
    }
    if options.check:
        stale = [path for path, text in wanted.items() if not path.is_file() or path.read_text() != text]
        for path in stale:
            print(f"{path.relative_to(ROOT)} differs from benchmarks/results/: run python -m benchmarks.tables")
        return int(bool(stale) or not PLOT.is_file())
    for path, text in wanted.items():
        path.write_text(text)
    from benchmarks.decode_plot import draw

    draw(read("sae-nvidia-h200.json"), PLOT)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
