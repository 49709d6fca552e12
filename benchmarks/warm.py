"""Compiles the kernels of a sweep in several processes, so that the sweep itself spends its time on measuring.

    python benchmarks/warm.py --processes 9 --seconds 90 [--room ROOM ...] [--seed 0] [--cases 200]

Each process calls gossamer's provider of its share of the cases, and leaves Triton's cache filled.
"""

import argparse
import multiprocessing
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.engine.random_cases import draw_cases
from benchmarks.engine.runner import Settings, run_case


def _warm(share: int, options: argparse.Namespace, deadline: float) -> None:
    device = torch.device("cuda")
    torch.cuda.set_per_process_memory_fraction(1 / options.processes)
    folder = Path(__file__).parent
    rooms = options.room or sorted(file.parent.name for file in folder.glob("*/sweep.py"))
    drawn = [draw_cases(folder, room, options.cases, options.seed, device, False) for room in rooms]
    cases = [case for turn in zip(*drawn) for case in turn]
    called = failed = 0
    for case in cases[share :: options.processes]:
        if time.monotonic() > deadline:
            break
        ours = tuple(provider for provider in case.providers if provider.ours)
        settings = Settings(rounds=2, burst=0.0, verify=False, limit=0.0)
        # A case that does not fit beside the other processes compiles in the sweep.
        failed += run_case(replace(case, providers=ours), device, settings, options.seed).failed
        called += 1
    print(f"process {share}: {called} cases called, {failed} of them without an end", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=9, help="side by side, each with its share of the memory")
    parser.add_argument("--seconds", type=float, default=90.0, help="start no further case after this time")
    parser.add_argument("--room", action="append", help="of the sweep; repeatable, all by default")
    parser.add_argument("--seed", type=int, default=0, help="of the sweep")
    parser.add_argument("--cases", type=int, default=200, help="of each room")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_warm, args=(i, options, deadline)) for i in range(options.processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


if __name__ == "__main__":
    main()
