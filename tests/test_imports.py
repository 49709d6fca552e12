"""What may be imported by whom: the CPU path without Triton, and rooms that import downwards only."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gossamer

ROOT = Path(gossamer.__file__).parent
# From the ground floor up; a room may import rooms of lower rank.
RANK = {
    "_core": 0,
    "rowsparse": 1,
    "gemm": 2,
    "sae": 3,
    "ffn": 3,
    "attention": 3,
    "blocksparse": 3,
    "sparsity": 4,
    "_warm_up": 4,
    "nn": 5,
    "extract": 6,
    "testing": 6,
    "train": 7,
    "integrations": 7,
    "cli": 8,
    "__main__": 9,
}

BLOCKED = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ImportError("Triton is blocked in this test")

sys.meta_path.insert(0, Block())
import torch
import gossamer, gossamer.rowsparse, gossamer.sae, gossamer.testing
from gossamer import gemm, rowsparse, sae

x, w = gossamer.testing.random_rows((4, 400), l0=5).requires_grad_(), torch.randn(400, 8).requires_grad_()
for rows in (rowsparse.pack(x, capacity=capacity) for capacity in (None, "exact", 2)):
    rows.to_dense(), rows.l0
    rowsparse.sampled_matmul(torch.randn(4, 8), w, rows)
    for out in (rowsparse.matmul(rows, w), rowsparse.matmul(rowsparse.transpose(rows), torch.randn(4, 8))):
        out.sum().backward(retain_graph=True)
for capacity in (None, 8):
    sae.decode(x, w, torch.zeros(8), capacity=capacity).sum().backward()
for recompute in (False, True):
    gemm.linear_glu(torch.randn(4, 8), torch.randn(6, 8).requires_grad_(), recompute=recompute).sum().backward()
rows = gemm.linear_pack(torch.randn(4, 8), w)
rowsparse.matmul(rows.complete(), w.detach())
rowsparse.matmul(rows, w).sum().backward()
print("loaded:", sorted(name for name in sys.modules if name.split(".")[0] == "triton"))
"""


def test_the_cpu_path_works_without_triton() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "loaded: []"


def test_a_library_is_imported_when_it_is_asked_for() -> None:
    asked = "import sys, gossamer; print('torch' in sys.modules, callable(gossamer.integrations.transformers.patch))"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["False", "True"], done.stderr
    assert {"sae_lens", "transformers"} <= set(dir(gossamer.integrations))
    with pytest.raises(AttributeError, match=r"module 'gossamer\.integrations' has no attribute 'jax'"):
        _ = gossamer.integrations.jax


def wrong_imports(file: Path) -> Iterator[str]:
    parts = file.relative_to(ROOT).with_suffix("").parts
    room, kernels = parts[0], parts[1] if len(parts) > 2 else ""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                yield f"line {node.lineno}: imports are absolute"
            named = node.module == "gossamer"
            names = [f"gossamer.{alias.name}" for alias in node.names] if named else [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            other = name.split(".")[1:]
            if not name.startswith("gossamer") or not other or other[0] not in RANK:
                continue
            if other[0] != room and RANK[other[0]] >= RANK[room]:
                yield f"line {node.lineno}: {room} imports {name}"
            if kernels in ("_torch", "_triton", "_gluon"):
                # A general kernel leaves to Hopper's own what that can do.
                backends = {"_torch", "_triton", "_gluon"} - {kernels, "_gluon" if kernels == "_triton" else ""}
                if backends & set(other):
                    yield f"line {node.lineno}: {kernels} imports {name}"


def test_imports_point_down() -> None:
    files = sorted(file for file in ROOT.rglob("*.py") if file != ROOT / "__init__.py")
    assert [f"{file.relative_to(ROOT)}, {found}" for file in files for found in wrong_imports(file)] == []
