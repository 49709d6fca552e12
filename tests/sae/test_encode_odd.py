"""sae.encode where rows of pre-activations do not fill 16 bytes: kernels see further columns, which nobody keeps."""

from typing import Any

import pytest
import torch

from gossamer import gemm, sae
from gossamer.sae import encode_path
from gossamer.testing import assert_close, assert_exact
from tests.sae.dense import encode_with_l0

ACTIVATIONS = {
    "relu": lambda threshold: "relu",
    "jumprelu": lambda threshold: gemm.JumpReLU(threshold, 0.5),
    "scalar": lambda threshold: gemm.JumpReLU(threshold[0], 0.5, ste_to_input=True),
    "topk": lambda threshold: gemm.TopK(5),
    "abstopk": lambda threshold: gemm.AbsTopK(5),
    "batchtopk": lambda threshold: gemm.BatchTopK(5),
}
CALLS = [
    *((name, {}) for name in ACTIVATIONS),
    *((name, {"capacity": 2}) for name in ("relu", "jumprelu", "scalar")),
    *((name, {"capacity": "exact"}) for name in ("relu", "jumprelu", "scalar")),
]


@pytest.fixture(autouse=True)
def filled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products, as large ones."""
    monkeypatch.setattr(encode_path, "FILLED", 0)


def test_thresholds_that_are_nan(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    """Everything exceeds them; there is no column behind the last."""
    x, W = (torch.randn(s, device=device, generator=generator).to(dtype) for s in ((3, 4), (4, 37)))
    nan = torch.tensor(float("nan"), device=device)
    calls: list[dict[str, Any]] = [{"capacity": "exact"}, {"capacity": 37}]
    for threshold in (nan, nan.repeat(37)):
        for options in calls:
            rows, l0 = encode_with_l0(x, W, activation=gemm.JumpReLU(threshold), **options)
            rows.validate()
            assert rows.shape == (3, 37) and (l0 == 37).all()
            assert_exact(rows.to_dense(), x @ W)


@pytest.mark.parametrize("name, options", CALLS, ids=str)
@pytest.mark.parametrize(
    "m, n, biased",
    [
        *((9, 37, biased) for biased in ("not", "same", "float32")),
        (2, 2061, "same"),
        # Rows that begin on 16 bytes, of a length that is no multiple of 16.
        (9, 40, "same"),
        (2, 2056, "same"),
        *(pytest.param(2, 2061, biased, marks=pytest.mark.full) for biased in ("not", "float32")),
    ],
)
def test_entries_and_gradients(
    name: str, options: dict[str, Any], m: int, n: int, biased: str, dtype: torch.dtype, device: torch.device,
    generator: torch.Generator,
) -> None:  # fmt: skip
    x, W = (
        torch.randint(-2, 3, shape, device=device, generator=generator).to(dtype).requires_grad_()
        for shape in ((m, 4), (4, n))
    )
    b = None
    if biased != "not":
        b = torch.randint(-1, 2, (n,), device=device, generator=generator).float()
        b = (b.to(dtype) if biased == "same" else b).requires_grad_()
    threshold = torch.full((n,), 1.5, device=device, requires_grad=True)
    activation = ACTIVATIONS[name](threshold)
    rows, l0 = encode_with_l0(x, W, b, activation, **options)
    if rows.packed.source is not None:
        assert rows.packed.source.shape == (m, n)
    exact = [None if t is None else t.detach().double().requires_grad_() for t in (x, W, b)]
    z = exact[0] @ exact[1] + (0 if exact[2] is None else exact[2])
    if name.endswith("topk"):
        flat = z.reshape(1, -1) if name == "batchtopk" else z
        kept = flat if name == "abstopk" else flat.relu()
        # Of equal ones those of lowest index.
        order = torch.sort(kept.abs(), dim=1, descending=True, stable=True).indices[:, : 5 * m // len(flat)]
        wanted = torch.where(torch.zeros_like(flat).scatter(1, order, 1) > 0, kept, 0).view(m, n)
    else:
        wanted = torch.where(z > (0 if name == "relu" else 1.5), z, 0)
    assert_exact(rows.to_dense(), wanted.detach())
    assert_exact(l0, (wanted != 0).sum(1).double())
    if name != "scalar":
        leaves = [t for t in (x, W, b) if t is not None]
        weights = torch.randint(-1, 2, (m, n), device=device, generator=generator)
        ours = torch.autograd.grad((rows.to_dense() * weights).sum(), leaves)
        theirs = torch.autograd.grad((wanted * weights).sum(), [t for t in exact if t is not None])
        for a, c in zip(ours, theirs, strict=True):
            assert_close(a, reference64=c, plain=c.to(a.dtype))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_nan_stays_in_the_columns_there_are(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """A row of x with NaN makes all its pre-activations NaN, those of the further columns too were they products."""
    x, W = torch.ones(3, 4, dtype=dtype, device=device), torch.ones(4, 7, dtype=dtype, device=device)
    x[1, 2] = float("nan")
    rows = sae.encode(x, W, None, ACTIVATIONS[name](torch.full((7,), 5.0, device=device)))
    assert int(rows.indices.max()) <= 6 and int(rows.counts.max()) <= 7
    assert rows.to_dense()[1].isnan().sum() == (5 if name in ("topk", "abstopk") else 7)


@pytest.mark.kernels
def test_rows_begin_on_16_bytes(device: torch.device) -> None:
    x, W = torch.ones(3, 4, device=device).half(), torch.ones(4, 7, device=device).half()
    assert sae.encode(x, W, capacity=2).packed.source.stride() == (16, 1)


@pytest.mark.parametrize("kind", [gemm.TopK, gemm.BatchTopK])
def test_a_scale_selects_among_the_columns_there_are(
    kind: Any, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """What has no column is -inf, and 0 times that would be NaN, which is the largest of all."""
    x, W = (torch.randn(shape, device=device, generator=generator).to(dtype) for shape in ((3, 4), (4, 37)))
    scale = torch.rand(37, device=device, generator=generator) + 0.5
    rows = sae.encode(x, W, None, kind(5, scale))
    assert int(rows.packed.indices.max()) < 37 and not rows.to_dense().isnan().any()


@pytest.mark.gpu
def test_gradient_for_b_dec_of_large_weights(device: torch.device, generator: torch.Generator) -> None:
    """It has the digits of float32, though weights are bfloat16."""
    shapes = ((64, 512), (512, 4096), (64, 4096))
    x, W_enc, weights = (torch.randn(*shape, generator=generator, device=device).bfloat16() for shape in shapes)
    b_dec = torch.zeros(512, device=device, requires_grad=True)
    for layout in (W_enc, W_enc.t().contiguous().t()):
        acts = sae.encode(x, layout, None, gemm.TopK(8), b_dec=b_dec).to_dense()
        (got,) = torch.autograd.grad((acts * weights).sum(), b_dec)
        wanted = -((acts != 0) * weights.double()).sum(0) @ W_enc.double().t()
        assert (got.double() - wanted).norm() < 1e-4 * wanted.norm()
