"""The peers compute the right thing: no comparison counts otherwise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.peers import torch_peers

ROOT = Path(__file__).parents[2]

KERNEL_PEERS = """
import torch
from benchmarks.peers import jumprelu_sae_kernels as peers
from benchmarks.peers.swiglu_in_place import swiglu_

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
for B, F, D, l0 in [(1, 5, 3, 2), (3, 1025, 40, 8), (2, 1100, 136, 33), (2, 64, 16, 0)]:
    acts = torch.zeros(B, F, device=device)
    for row in acts:
        row[torch.randperm(F)[:l0]] = torch.randn(l0, device=device)
    W_dec = torch.randn(F, D, device=device)
    for dtype in (torch.float32, torch.float16):
        a, W = acts.to(dtype), W_dec.to(dtype)
        want = a.double() @ W.double()
        outs = {
            "exact": peers.decode_exact(a, W),
            "fixed": peers.decode_fixed(a, W, max_l0=40),
            "unsafe": peers.decode_fixed(a, W, max_l0=40, validate=False),
        }
        for name, out in outs.items():
            assert out.dtype == torch.float32, name
            torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-4, msg=lambda m: f"{name} {B, F}: {m}")

acts = torch.ones(2, 1300, device=device)
W_dec = torch.ones(1300, 8, device=device)
assert peers.decode_fixed(acts, W_dec, max_l0=7, validate=False).unique().tolist() == [7.0]
try:
    peers.decode_fixed(acts, W_dec, max_l0=7)
except ValueError as error:
    assert "1300" in str(error) and "got 7" in str(error), error
else:
    raise AssertionError("an overflow was not reported")

both = torch.randn(3, 2 * 1100, device=device)
want = torch.nn.functional.silu(both[:, :1100]) * both[:, 1100:]
out = swiglu_(both)
assert out.data_ptr() == both[:, 1100:].data_ptr()
torch.testing.assert_close(out, want)
print("peers agree with dense")
"""


def test_kernels_of_peers_agree_with_dense() -> None:
    """In a process of its own: Triton reads TRITON_INTERPRET when a kernel is decorated."""
    interpret = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", KERNEL_PEERS],
        env={**os.environ, **interpret, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "agree" in done.stdout


@pytest.mark.parametrize("name", ["dense", "compiled", "sparse_csr", "embedding_bag"])
@pytest.mark.parametrize("shape", [(1, 7, 3), (5, 300, 33)])
def test_torch_peers_agree_with_dense(name: str, shape: tuple[int, int, int]) -> None:
    B, F, D = shape
    generator = torch.Generator().manual_seed(0)
    acts = torch.randn(B, F, generator=generator).relu() * (torch.rand(B, F, generator=generator) < 0.3)
    acts[-1] = 0
    W = torch.randn(F, D, generator=generator)
    torch.testing.assert_close(getattr(torch_peers, name)(acts, W), acts @ W)
