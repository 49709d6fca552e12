"""The plain product, and its time on a GPU."""

import pytest
import torch

from gossamer.rowsparse.dense_product import dense_product, dense_seconds


@pytest.mark.parametrize("out_dtype", [None, torch.float32, torch.bfloat16])
def test_a_bias_of_another_dtype_is_added_as_it_is(out_dtype: torch.dtype | None) -> None:
    x, weight, bias = torch.ones(2, 3).half(), torch.ones(3, 4).half(), torch.full((4,), 2.0**-12)
    out = dense_product(x, weight, bias, out_dtype)
    assert out.dtype is (out_dtype or torch.float16)
    assert (out == (3 + 2.0**-12 if out_dtype is torch.float32 else 3)).all()


@pytest.mark.usefixtures("h200")
def test_seconds() -> None:
    """8,192 x 8,192 x 8,192 at 585 TFLOP/s."""
    assert dense_seconds(8192, 8192, 8192, 2, False, 99) == pytest.approx(1.88e-3, rel=0.01)
    assert dense_seconds(0, 5, 7, 2, False, 99) < 1e-5
