"""Command, commit, versions and hardware, without which a measurement says nothing; options of scripts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import gossamer
from gossamer._core.files import make_folder
from gossamer.cli.environment import describe, first_line, resolve_device, versions

RESULTS = Path(__file__).parent / "results"


def parsed(
    parser: argparse.ArgumentParser, arguments: Sequence[str], quick: str
) -> tuple[argparse.Namespace, torch.device]:
    """A script's options beside --device, --quick, which the CPU implies, and --out; `quick` says what is small."""
    parser.add_argument("--device", default="auto", help="auto (the GPU if there is one), cpu, cuda, cuda:1, ...")
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--out", type=Path, metavar="DIR", default=RESULTS, help="where results go")
    options = parser.parse_args(arguments)
    try:
        device = resolve_device(options.device, parser.prog)
        make_folder(parser.prog, "--out", options.out)
    except ValueError as error:
        parser.error(str(error))
    options.quick |= device.type == "cpu"
    return options, device


def provenance(command: str, root: Path, device: torch.device) -> dict[str, Any]:
    """The head of a file of results: command, time of its start, commit at `root`, versions and hardware."""
    return {
        "command": command,
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(root),
        "versions": versions(),
        "device": describe(device),
    }


def commit(root: Path) -> str | None:
    """The git commit of the checkout at `root` or around it, with `+` where tracked files differ from it.

    None unless git tracks the package there: an installed one may lie in the `.venv` of any project.
    `GOSSAMER_COMMIT` in the environment stands in for it where the tree was copied without its history.
    """
    if "GOSSAMER_COMMIT" in os.environ:
        return os.environ["GOSSAMER_COMMIT"]
    git = ("git", "-C", str(root))
    if first_line(*git, "ls-files", "--error-unmatch", gossamer.__file__) is None:
        return None
    head = first_line(*git, "rev-parse", "--short=12", "HEAD")
    if head is None:
        return None
    changed = first_line(*git, "status", "--porcelain", "--untracked-files=no")
    return head + ("+" if changed else "")
