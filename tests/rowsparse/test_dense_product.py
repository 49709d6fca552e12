"""The plain product with copies of odd operands, and what it is taken to cost."""

import pytest
import torch

from gossamer.rowsparse.dense_product import dense_product, dense_seconds, padded_product
from gossamer.testing import assert_close


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("turned", ["neither", "x", "weight", "both"])
@pytest.mark.parametrize("m, n, d", [(5, 13, 7), (8, 16, 24), (3, 16, 9), (1, 1, 1), (0, 5, 3), (4, 0, 3), (4, 3, 0)])
def test_rows_are_filled_up(m: int, n: int, d: int, turned: str, bias: bool, dtype: torch.dtype) -> None:
    x = torch.randn(n, m).to(dtype).t() if turned in ("x", "both") else torch.randn(m, n).to(dtype)
    weight = torch.randn(d, n).to(dtype).t() if turned in ("weight", "both") else torch.randn(n, d).to(dtype)
    added = torch.randn(d).to(dtype) if bias else None
    out = padded_product(x, weight, added)
    assert out.shape[1] * dtype.itemsize % 16 == 0
    plain = x @ weight if added is None else torch.addmm(added, x, weight)
    reference = x.double() @ weight.double() + (0 if added is None else added.double())
    assert_close(out[:m, :d], reference64=reference, plain=plain)


def test_slices_and_zeros_behind_the_columns() -> None:
    x, weight = torch.randn(6, 19)[:, 2:15], torch.randn(13, 30)[:, ::2]
    assert torch.allclose(padded_product(x, weight)[:, :15], x @ weight, atol=1e-5)
    filled = torch.nn.functional.pad(x, (0, 3))
    assert torch.allclose(dense_product(filled, weight, None, None), x @ weight, atol=1e-5)


def test_gradients_come_through_the_copies() -> None:
    x, weight, bias = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 5), (5, 7), (7,)))
    torch.autograd.gradcheck(lambda *given: padded_product(*given)[:, :7], (x, weight, bias))


@pytest.mark.parametrize("out_dtype", [None, torch.float32, torch.bfloat16])
def test_a_bias_of_another_dtype_is_added_as_it_is(out_dtype: torch.dtype | None) -> None:
    x, weight, bias = torch.ones(2, 3).half(), torch.ones(3, 4).half(), torch.full((4,), 2.0**-12)
    out = dense_product(x, weight, bias, out_dtype)
    assert out.dtype is (out_dtype or torch.float16)
    assert (out == (3 + 2.0**-12 if out_dtype is torch.float32 else 3)).all()


@pytest.mark.usefixtures("h200")
def test_what_odd_sizes_cost() -> None:
    """Seconds of 8,192 x 8,192 x 8,192 at 585 TFLOP/s, and no more than a half more where rows have to be copied."""
    even, odd = (dense_seconds(8192, n, 8192, 2, False, 99) for n in (8192, 8191))
    assert even == pytest.approx(1.88e-3, rel=0.01) and even < odd < 1.5 * even
    assert dense_seconds(0, 5, 7, 2, False, 99) < 1e-5
