"""docs/paths.md: every path that a function may go on a GPU, with its condition, from the source.

`python -m benchmarks.paths` writes the page; with `--check` it only says whether the page is up to date, as `make lint`
asks.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path

import gossamer
from gossamer._core.operator import PATHS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "paths.md"
MOST = 45
"""Paths of all functions together. A path that gains less than a tenth in a case that users have is not worth it."""
HEAD = """# Paths

On a GPU the functions below go one of several paths. The host chooses by shapes, dtypes, layout, device, and counts
that it knows without waiting. A profiler shows the path of a call as a range: `gossamer::gemm.linear_glu/hopper`.
Every function that has no row here goes one path. On a CPU all of them are plain PyTorch.

`python -m benchmarks.paths` makes this table from the source.

| function | path | taken with | steps |
|---|---|---|---|
"""


def page() -> str:
    """The text of docs/paths.md."""
    for room in ("rowsparse", "gemm", "sae", "ffn", "attention", "blocksparse"):
        for module in pkgutil.iter_modules([str(Path(gossamer.__path__[0]) / room)], f"gossamer.{room}."):
            if not module.ispkg:
                importlib.import_module(module.name)
    rows = []
    for function, paths in sorted(PATHS.items()):
        names = ", ".join(f"`{name}`" for name in function.split(", "))
        for path, sentence in paths.items():
            condition, _, steps = sentence.partition(": ")
            rows.append(f"| {names} | `{path}` | {condition} | {steps} |\n")
    return f"{HEAD}{''.join(rows)}\n{len(rows)} paths of {len(PATHS)} functions.\n"


def main(arguments: list[str]) -> int:
    text = page()
    if "--check" not in arguments:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        print("docs/paths.md is not that of the source: run python -m benchmarks.paths", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
