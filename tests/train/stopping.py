"""Runs that end before their last step, and files that such an end leaves."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gossamer.train import checkpoint

ROOT = Path(__file__).parents[2]


class Stopped(Exception):
    """The end of a run from within."""


def stop(at: int) -> Callable[[dict[str, float]], None]:
    def show(record: dict[str, float]) -> None:
        if record["step"] == at:
            raise Stopped

    return show


def curve(folder: Path) -> list[dict[str, Any]]:
    """What a run has logged, but for times and memory."""
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{key: record[key] for key in record if key not in ("tokens/s", "peak_bytes")} for record in records]


def killed(code: str, *arguments: object, times: int, longest: float) -> int:
    """Starts code in a process that prints a line as it begins, and kills it at random moments, so many times or until
    it has ended before; then it may end. Returns how often it was killed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    moments = random.Random(0)
    for count in range(times + 1):
        command = [sys.executable, "-c", code, *map(str, arguments)]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
        if count < times:
            assert process.stdout is not None and process.stdout.readline() == b"began\n"
            time.sleep(moments.uniform(0, longest))
            process.send_signal(signal.SIGKILL)
        if process.wait() != -signal.SIGKILL:
            assert process.returncode == 0
            break
    return count


def harm(file: Path, how: str) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes({"truncated": content[:-100], "changed": content, "empty": b""}[how])


def fill_disk(patch: pytest.MonkeyPatch, step: int) -> None:
    """The checkpoint of this step does not fit."""
    kept = checkpoint.save_file

    def full(tensors: Any, path: Path, metadata: dict[str, str]) -> None:
        if metadata["step"] == str(step):
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        kept(tensors, path, metadata)

    patch.setattr(checkpoint, "save_file", full)
