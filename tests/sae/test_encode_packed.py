"""sae.encode where it packs tile by tile as it computes: without gradients, on Hopper."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer import gemm
from gossamer._core import tuning
from gossamer._core.calls import Checked
from gossamer.rowsparse.linear_source import LinearSource
from gossamer.sae import count_fired, decode, encode, encode_path
from gossamer.testing import assert_exact, dense64
from tests.sae.dense import encode_with_l0, selected, valued, whole

module = sys.modules["gossamer.sae.encode"]


@pytest.mark.parametrize("activation", ["relu", "jumprelu"])
@pytest.mark.parametrize("capacity", [None, 4, 144])
def test_packed_tile_by_tile(
    activation: str,
    capacity: int | None,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The way without gradients on Hopper, whichever device this is; with them, and in a window, the other one."""
    monkeypatch.setattr(encode_path, "packs_in_product", lambda m, weight: True)
    monkeypatch.setattr(module, "_checked", Checked())
    n = 2304
    x, W, W_dec = (whole(shape, 2, generator, dtype) for shape in ((2, 3, 12), (12, n), (n, 5)))
    b_enc, b_dec, threshold = whole((n,), 3, generator, dtype) - 9, whole((12,), 1, generator, dtype), None
    if activation == "jumprelu":
        threshold = whole((n,), 4, generator, torch.float32)
    options = {"activation": activation, "threshold": threshold, "b_dec": b_dec, "capacity": capacity}
    rows, l0 = encode_with_l0(x, W, b_enc, **valued(**options))
    z = (x.double() - b_dec.double()) @ W.double() + b_enc.double()
    acts = torch.where(selected(z, activation, threshold=threshold), z, 0)
    assert isinstance(rows.source, LinearSource) and len(rows.packed.values) == 6 * (capacity or 128)
    assert l0.dtype is torch.float32 and torch.equal(l0, (acts != 0).sum(-1).float())
    assert_exact(dense64(rows), acts)
    assert_exact(decode(rows, W_dec), acts @ W_dec.double())
    assert count_fired(rows).tolist() == (acts != 0).flatten(0, 1).sum(0).tolist()
    with torch.no_grad():
        assert isinstance(encode(x, W.clone().requires_grad_(), b_enc, **valued(**options)).source, LinearSource)
    assert isinstance(encode(x, W.clone().requires_grad_(), b_enc, **valued(**options)).source, Tensor)
    # More slots than the tiles have, which would overflow before them.
    assert isinstance(encode(x, W, b_enc, **valued(**options | {"capacity": 145})).source, Tensor)
    # Rows that overflowed are computed from a copy of x.
    rows = encode(x, W, b_enc, **valued(**options | {"b_dec": None}))
    kept = rows.to_dense()
    x.zero_()
    assert torch.equal(rows.to_dense(), kept) and (bool(rows.overflowed.any()) or capacity != 4)
    if threshold is not None:
        # A window is looked for where thresholds learn.
        learns = options | {"threshold": threshold.clone().requires_grad_()}
        assert not isinstance(encode(x, W, b_enc, **valued(bandwidth=2.0, **learns)).source, LinearSource)


@pytest.mark.native
def test_packed_tile_by_tile_compiled(
    device: torch.device, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch, compiled: Any
) -> None:
    monkeypatch.setattr(encode_path, "packs_in_product", lambda m, weight: True)
    monkeypatch.setattr(module, "_checked", Checked())
    x, W, W_dec = (whole(shape, 2, generator, torch.float32) for shape in ((7, 12), (12, 2304), (2304, 5)))
    threshold = torch.full((2304,), 9.0, device=device)
    call = lambda x: decode(encode(x, W, activation=gemm.JumpReLU(threshold), capacity=40), W_dec)  # noqa: E731
    assert isinstance(encode(x, W, activation=gemm.JumpReLU(threshold), capacity=40).source, LinearSource)
    assert_exact(compiled(call)(x), call(x).double())


@pytest.mark.gpu
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("jump", [False, True])
def test_many_rows_on_hopper(jump: bool, half: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    """The call that users make, with a row that overflows its slots, one that overflows a tile, and one without an
    entry."""
    if not tuning.hopper(device):
        pytest.skip("Hopper's kernel packs in the product")
    m, n = 512, 65536
    x, W = whole((m, 16), 2, generator, half), whole((16, n), 2, generator, half)
    b_enc, threshold = torch.full((n,), -24.0, device=device).to(half), None
    W[:, 512:768] = 2
    x[3], x[7], x[11], x[7, :8] = 6, 0, 0, 2
    if jump:
        threshold = torch.arange(n, device=device) % 4 + 0.5
    rows, l0 = encode_with_l0(x, W, b_enc, **valued("jumprelu" if jump else "relu", threshold=threshold))
    assert isinstance(rows.source, LinearSource)
    z = x.float() @ W.float() + b_enc.float()
    acts = torch.where(selected(z, "jumprelu" if jump else "relu", threshold=threshold), z, 0)
    over = rows.packed.spans.sum(0) > len(rows.packed.values)
    assert bool(over[3]) and bool(over[7]) and not bool(over.all())
    assert l0[3] > 1024 > l0[7] and l0[11] == 0
    assert torch.equal(l0, (acts != 0).sum(-1).float())
    assert torch.equal(rows.to_dense().float(), acts)
