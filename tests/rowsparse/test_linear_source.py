"""Containers whose overflowed rows are computed again from a linear layer."""

import pytest
import torch
from torch import Tensor

from gossamer import sae
from gossamer.rowsparse import Rows, matmul, pack, sampled_matmul, transpose
from gossamer.rowsparse.linear_source import LinearSource
from gossamer.testing import assert_close, assert_exact, random_rows
from tests import strategies


def layer(
    m: int, k: int, n: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator, bound: bool = True
) -> tuple[LinearSource, Tensor]:
    """A source of small integers, which no dtype rounds, and its dense [M, N] in float64."""
    options = {"dtype": dtype, "device": device, "generator": generator, "integers": True}
    x, weight, bias = (random_rows(shape, l0=min(k, 9), **options) for shape in ((m, k), (n, k), (1, n)))
    bias = bias[0].float() if bound else None
    threshold = torch.randint(-5, 9, (n,), device=device, generator=generator).float() if bound else None
    z = x.double() @ weight.double().t() + (0 if bias is None else bias)
    dense = torch.where(z <= (0 if threshold is None else threshold.clamp(min=0)), 0, z)
    return LinearSource(x, weight, bias, threshold), dense


def packed(source: LinearSource, dense: Tensor, over: Tensor, dtype: torch.dtype) -> Rows:
    """The rows of `dense`, of which those of the bool [M] `over` have no slots to hold them."""
    m, n = dense.shape
    rows = pack(dense.to(dtype), capacity=n)
    spans = torch.where(over, m * n + 1, rows.packed.spans)
    # Nothing may read their slots.
    values = torch.where(over[:, None], float("nan"), rows.packed.values.view(m, n))
    return strategies.changed(rows, values=values.flatten(), spans=spans, source=source)


@pytest.mark.parametrize("m, k, n, d", [(1, 3, 20, 5), (5, 40, 130, 17), (70, 24, 90, 64)])
@pytest.mark.parametrize("bound", [False, True])
def test_products(
    m: int,
    k: int,
    n: int,
    d: int,
    bound: bool,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
    mode: str,
) -> None:
    if mode == "interpreter" and m > 5:
        pytest.skip("large for the interpreter")
    source, dense = layer(m, k, n, dtype, device, generator, bound)
    every = torch.arange(m, device=device)
    weight = torch.randn(n, d, device=device, generator=generator).to(dtype)
    bias = torch.randn(d, device=device, generator=generator)
    exact, plain = dense @ weight.double(), dense.to(dtype) @ weight
    for over in (every % 3 == 0, every < 0, every >= 0):
        rows = packed(source, dense, over, dtype)
        with torch.no_grad():
            assert_exact(rows.to_dense(), dense)
            assert_close(matmul(rows, weight), reference64=exact, plain=plain)
            assert_close(matmul(rows, weight, out_dtype=torch.float32), reference64=exact, plain=plain.float())
            assert_close(
                sae.decode(rows, weight, bias), reference64=exact + bias.double(), plain=plain + bias.to(dtype)
            )


def test_special_values(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    """NaN is kept, and stays in its row."""
    source, dense = layer(4, 20, 50, dtype, device, generator)
    source.x[1, 3] = float("nan")
    dense[1] = float("nan")
    rows = packed(source, dense, torch.tensor([True, True, False, True], device=device), dtype)
    with torch.no_grad():
        out = matmul(rows, torch.eye(50, dtype=dtype, device=device))
    assert_exact(out, dense)
    assert_exact(rows.to_dense(), dense)


def test_other_operators(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    source, dense = layer(6, 20, 50, dtype, device, generator)
    rows = packed(source, dense, torch.arange(6, device=device) % 2 == 0, dtype)
    assert_exact(transpose(rows).to_dense(), dense.t())
    x, weight = (random_rows(s, l0=4, dtype=dtype, device=device, integers=True) for s in ((6, 8), (50, 8)))
    assert_exact(sampled_matmul(x, weight, rows).to_dense(), (x.double() @ weight.double().t()) * (dense != 0))
    with torch.autocast(device.type, torch.bfloat16), torch.no_grad():
        out = matmul(rows, weight)
    assert out.dtype is (torch.bfloat16 if dtype is not torch.float64 else dtype)
    assert_close(out, reference64=dense @ weight.double(), plain=dense.bfloat16() @ weight.bfloat16())


@pytest.mark.parametrize("needed", [("x", "weight", "bias"), ("x",), ("weight",), ("bias",)])
def test_gradients(
    needed: tuple[str, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """Those of the rows that are computed again; the lists have their own."""
    source, dense = layer(6, 20, 50, dtype, device, generator)
    over = torch.arange(6, device=device) % 2 == 0
    leaves = {"x": source.x, "weight": source.weight, "bias": source.bias}
    leaves = {name: leaf.clone().requires_grad_(name in needed) for name, leaf in leaves.items()}
    rows = packed(LinearSource(**leaves, threshold=source.threshold), dense, over, dtype)
    weight, grad = (random_rows(s, l0=3, dtype=dtype, device=device, integers=True) for s in ((50, 8), (6, 8)))
    weight.requires_grad_()
    matmul(rows, weight).backward(grad)
    # Of z, where it is active, in the rows that overflowed.
    inner = (grad.double() @ weight.detach().double().t()) * (dense != 0) * over[:, None]
    wanted = {
        "x": inner @ source.weight.double(),
        "weight": inner.t() @ source.x.double(),
        "bias": inner.sum(0),
    }
    for name, leaf in leaves.items():
        if name in needed:
            assert_exact(leaf.grad, wanted[name], name=name)
        else:
            assert leaf.grad is None
    assert_exact(weight.grad, dense.t() @ grad.double(), name="decoder")
