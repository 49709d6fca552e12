"""Two trees beside each other on one device: the same cases, in turns, each tree in a process of its own.

    git worktree add /tmp/before COMMIT
    python benchmarks/trees.py /tmp/before . --room sae --case 'decode/*' --rounds 5 --out trees.json

For each case that both have, gossamer's first provider is timed eager and, where it can be captured, as a CUDA graph.
A line has the second tree's times over the first's, and the largest of the first tree's times over its smallest.
"""

import argparse
import json
import os
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import median
from typing import Any

Answer = dict[str, Any]


def serve() -> None:
    """The process of one tree: names of cases, then a timing for each name that it is asked for."""
    import torch

    try:
        from benchmarks.engine.case import load_cases
        from benchmarks.engine.timing import burst, calls_for, capture
    except ModuleNotFoundError:  # a commit whose engine was a part of the package
        from gossamer.cli.bench.case import load_cases
        from gossamer.cli.bench.timing import burst, calls_for, capture

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the output of a case goes to the errors
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    folder = Path.cwd() / "benchmarks"
    quick = device.type == "cpu"
    cases = {case.id: case for room in sys.argv[2:] for case in load_cases(folder, room, None, device, quick)}
    print(json.dumps(sorted(cases)), file=answers, flush=True)
    held: tuple[str, Any] = ("", None)
    for line in sys.stdin:
        name = json.loads(line)
        case = cases[name]
        answer: Answer = {}
        try:
            with torch.enable_grad() if case.grad else torch.inference_mode():
                if held[0] != name:
                    held = ("", None)
                    provider = next(p for p in case.providers if p.ours)
                    inputs = case.make(device, torch.Generator(device).manual_seed(0))
                    prepare = provider.prepare or (lambda *tensors: tensors)
                    arguments = [prepare(*copy) for copy in inputs]

                    def call(i: int, call: Any = provider.call, arguments: Any = arguments) -> Any:
                        return call(*arguments[i % len(arguments)])

                    call(0)
                    calls = calls_for(call, device, 0.01, len(arguments))
                    graph = None
                    if provider.capturable and device.type == "cuda":
                        graph, _ = capture(call, calls, device)
                        graph.replay()
                    held = (name, (call, calls, graph))
                call, calls, graph = held[1]
                answer["eager"] = burst(call, calls, device)
                if graph is not None:
                    answer["graph"] = burst(lambda _: graph.replay(), 1, device) / calls
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps(answer), file=answers, flush=True)


class Tree:
    """The process that times a tree's cases."""

    def __init__(self, root: Path, rooms: list[str]) -> None:
        path = os.pathsep.join(filter(None, (str(root / "src"), str(root), os.environ.get("PYTHONPATH"))))
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--serve", *rooms],
            cwd=root, env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.cases: list[str] = self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("benchmarks/trees.py: a tree's process ended; its output is above.")
        return json.loads(line)

    def time(self, case: str) -> Answer:
        assert self.process.stdin is not None
        print(json.dumps(case), file=self.process.stdin, flush=True)
        return self._answer()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs=2, type=Path, help="the one before and the one after")
    parser.add_argument("--room", action="append", required=True, help="of the cases; repeatable")
    parser.add_argument("--case", action="append", help="a glob of names or ids without the room; repeatable")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON of every time, written after each case")
    options = parser.parse_args()
    trees = [Tree(root.resolve(), options.room) for root in options.trees]
    common = [case for case in trees[1].cases if case in trees[0].cases]
    globs = options.case or ["*"]
    wanted = [c for c in common if any(fnmatchcase(c, f"*/{g}") or fnmatchcase(c, g) for g in globs)]
    found: dict[str, list[list[Answer]]] = {}
    print("second tree's time over the first's (first's own spread): eager, CUDA graph", flush=True)
    for case in wanted:
        times = [[tree.time(case) for tree in trees] for _ in range(options.rounds)]
        found[case] = times
        errors = [answer["error"] for pair in times for answer in pair if "error" in answer]
        print(f"{case}: {errors[0] if errors else told(times)}", flush=True)
        if options.out:
            options.out.write_text(json.dumps(found, indent=1) + "\n")


def told(times: list[list[Answer]]) -> str:
    parts = []
    for kind in ("eager", "graph"):
        first, second = ([pair[i].get(kind) for pair in times] for i in (0, 1))
        if None not in first + second:
            spread = max(first) / min(first)
            ratio, before = median(second) / median(first), 1e6 * median(first)
            parts.append(f"{kind} {ratio:.3f} ({spread:.3f}) of {before:.1f} us")
    return ", ".join(parts)


if __name__ == "__main__":
    serve() if sys.argv[1:2] == ["--serve"] else main()
