"""Extraction of many rows on this machine: time, peak memory, the time to verify it, and the same bytes after kills.

Usage: python benchmarks/sae/extract_rows.py [--rows 1000000] [--d-sae 16384] [--kills 20] [--folder DIR]. Writes the
activations to a .npy file, extracts them once without a break, then again while it kills the run at random moments.
"""

import argparse
import hashlib
import json
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from gossamer import extract, nn
from gossamer.cli import environment

D_IN, K = 64, 32


def run(folder: Path, out: Path, d_sae: int) -> None:
    """One extraction, in a process of its own; prints seconds and peak memory."""
    torch.manual_seed(0)
    model = nn.TopKSAE(D_IN, d_sae, K)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print("begun", flush=True)
    start = time.perf_counter()
    found = extract.extract(folder / "activations.npy", model, out, shard_rows=16384)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    extract.Extraction.check(out)
    result = {"seconds": seconds, "check_seconds": time.perf_counter() - start}
    result |= {"rows": found.rows, "nnz": found.nnz, "peak_mib": peak / 1024}
    print(json.dumps(result | {"before_mib": before / 1024}))


def digests(out: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(out.iterdir())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--d-sae", type=int, default=16384)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run(options.folder, options.run, options.d_sae)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        rows = np.lib.format.open_memmap(folder / "activations.npy", "w+", np.float32, (options.rows, D_IN))
        for first in range(0, options.rows, 65536):
            piece = rows[first : first + 65536]
            piece[:] = np.random.default_rng(first).standard_normal(piece.shape, np.float32)
        rows.flush()
        command = [sys.executable, __file__, "--folder", str(folder), "--d-sae", str(options.d_sae), "--run"]
        whole = subprocess.run([*command, str(folder / "whole")], check=True, capture_output=True, text=True)
        result = json.loads(whole.stdout.splitlines()[-1])
        print("without a break:", result, flush=True)
        rng, kills = random.Random(0), 0
        while kills < options.kills:
            process = subprocess.Popen([*command, str(folder / "killed")], stdout=subprocess.PIPE)
            assert process.stdout is not None
            process.stdout.readline()
            # Now and then early, mostly late enough to have finished a file, and never so late that all are finished.
            time.sleep(rng.uniform(0.0, 1.6 * result["seconds"] / options.kills))
            if process.poll() is not None:
                sys.exit(f"the run finished after {kills} kills")
            kills += 1
            process.send_signal(signal.SIGKILL)
            process.wait()
        kept = json.loads((folder / "killed" / "manifest.json").read_text())
        print(f"after {kills} kills: {sum(shard['rows'] for shard in kept['shards'])} rows", flush=True)
        subprocess.run([*command, str(folder / "killed")], check=True, capture_output=True)
        same = digests(folder / "whole") == digests(folder / "killed")
        print(
            json.dumps(
                {
                    **result,
                    "kills": kills,
                    "identical": same,
                    "d_sae": options.d_sae,
                    "threads": torch.get_num_threads(),
                }
            )
        )
        print(json.dumps(environment.describe(torch.device("cpu")) | environment.versions()))
        if not same:
            sys.exit(1)


if __name__ == "__main__":
    main()
