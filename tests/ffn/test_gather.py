"""Rows whose entries are gathered one by one, and what is left to others."""

import pytest
import torch

from tests.ffn.dense import call, check, dense, operands


def test_rows_of_very_different_density(device: torch.device, generator: torch.Generator) -> None:
    a = operands((33, 24, 600, 20), torch.float32, device, generator)
    a["x"][[3, 17, 32]] *= 64
    a["x"][20] = 0
    check(a, call(a, method="gather"))


@pytest.mark.kernels
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("k, d, dtype, tolerance", [(24, 20, torch.float32, 1e-4), (32, 48, torch.float16, 1e-2)])
def test_light_rows_alone(
    gated: bool, k: int, d: int, dtype: torch.dtype, tolerance: float, device: torch.device, generator: torch.Generator
) -> None:
    """Heavy rows are listed, in any order, and not written; entries are counted of all."""
    from gossamer.ffn._triton import gather, heavy
    from gossamer.ffn._triton.entry_lists import Weights
    from gossamer.ffn._triton.sparse_ffn import pack

    a = operands((21, k, 600, d), dtype, device, generator)
    a["x"][[3, 17]] *= 64
    a["x"][20] = 0
    counts = (a["x"] @ a["gate"].t() + a["gate_bias"] > 0).sum(1)
    limit = int(counts.sort().values[-3])
    up, up_bias = (a["up"], a["up_bias"]) if gated else (None, None)
    want = dense(a["x"], a["gate"], up, a["down"], "relu", gate_bias=a["gate_bias"], up_bias=up_bias)
    packed = pack(a["x"], a["gate"], a["gate_bias"], None)[0]
    fits = (packed[2] <= 16).all(1)
    light = fits & (counts <= limit)
    assert light[20] and not light[3] and light.sum() > 10
    out, nnz = a["x"].new_full((21, d), 7.0), torch.empty(21, dtype=torch.int32, device=device)
    listed = torch.empty(25, dtype=torch.int32, device=device)
    heavy.start(listed, limit)
    weights = Weights(a["gate"], a["gate_bias"], None, up, up_bias, a["down"].t().contiguous())
    gather.gather(packed, a["x"], weights, None, out, nnz, listed, False)
    torch.testing.assert_close(out[light], want[light], rtol=tolerance, atol=tolerance)
    assert nnz.tolist() == counts.tolist() and listed[0] == (~light).sum()
    assert sorted(listed[4 : 4 + int(listed[0])].tolist()) == (~light).nonzero().flatten().tolist()


def test_stages_where_they_fit() -> None:
    from gossamer.ffn._triton import gather

    def of(k: int, d: int, size: int = 2, warps: int = 16) -> tuple[int, int | None]:
        return gather.stages_and_registers(k, d, size, warps)

    assert of(2048, 2048) == of(0, 8192) == of(8192, 8192) == (3, 96)
    assert of(16384, 16384) == of(2040, 2048) == of(2048, 2048, 4) == (1, None)
    assert of(16384, 1024, warps=8) == (3, None)
