"""Kernel launches: what a key promises."""

import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language

from gossamer._core import launch  # noqa: E402
from gossamer._core.ops import INTERPRET  # noqa: E402


@triton.jit(do_not_specialize=["epoch"])
def _add_kernel(x_ptr, bias_ptr, out_ptr, N, epoch, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < N, other=0.0) + epoch
    if bias_ptr is not None:
        x += tl.load(bias_ptr + at, mask=at < N, other=0.0)
    tl.store(out_ptr + at, x, mask=at < N)


@pytest.mark.skipif(not INTERPRET, reason="kernels that are compiled take the key's word for it")
@pytest.mark.parametrize(
    "bias, n, block",
    [(None, 5, 8), (torch.float16, 5, 8), *((torch.float32, n, 8) for n in (1, 16, 1 << 31)), (torch.float32, 5, 16)],
)
def test_one_key_for_two_kernels(bias: torch.dtype | None, n: int, block: int) -> None:
    """What a compiled kernel takes for granted is an error in the interpreter where the key does not determine it."""
    add = launch.Kernel(_add_kernel)
    x, out = torch.ones(16), torch.empty(16)
    for epoch in (1, 2, 16):
        add("key", (1, 1, 1), (x, x, out, 5, epoch), {"BLOCK": 8})
        assert out[:5].tolist() == [2 + epoch] * 5
    vector = None if bias is None else torch.ones(16, dtype=bias)
    with pytest.raises(AssertionError, match=r"_add_kernel: one key, .*key.*, for two kernels"):
        add("key", (1, 1, 1), (x, vector, out, n, 1), {"BLOCK": block})
