"""One process of a group that runs cases: `python -m tests.distributed.worker FOLDER RANK WORLD DEVICE MODULE...`.

A case is a function `case_*(rank, world, device)` that raises where something is wrong. What each raised goes to
`FOLDER/RANK.json`. A rank that fails must not keep the others waiting: cases communicate first and assert afterwards.
"""

import importlib
import json
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.conftest import poisoned


def main(folder: Path, rank: int, world: int, device: str, modules: list[str]) -> None:
    torch.set_num_threads(1)
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        setattr(owner, name, poisoned(getattr(owner, name)))
    where = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(where)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=(folder / "store").as_uri(),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    found = {}
    for module in modules:
        cases = vars(importlib.import_module(module))
        for name in [name for name in cases if name.startswith("case_")]:
            begun = time.perf_counter()
            torch.manual_seed(0)
            try:
                cases[name](rank, world, where)
                found[name] = ""
            except Exception:
                found[name] = traceback.format_exc()
            print(f"{name} {time.perf_counter() - begun:.1f} s {'failed' if found[name] else ''}", flush=True)
            (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:])
