"""`torch.compile(fullgraph=True)`: operators inside a region, containers across its border, gradients through it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree

from gossamer import rowsparse, sae
from gossamer.testing import random_rows, random_slots

N, D = 150, 24
PACKINGS: list[dict[str, Any]] = [{}, {"capacity": 6}, {"capacity": 3}]


def inputs(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    acts = random_rows((2, 4, N), l0=[0, 1, 5, 9, N, 3, 7, 2], device=device, generator=generator)
    W, b = (torch.randn(shape, device=device, generator=generator) for shape in ((N, D), (D,)))
    return acts.requires_grad_(), W.requires_grad_(), b.requires_grad_()


def agree(function: Callable[..., Any], compiled: Callable[..., Any], *args: Any) -> None:
    """Same results and gradients, compiled and not."""
    leaves = [arg for arg in _pytree.tree_leaves(args) if isinstance(arg, Tensor) and arg.requires_grad]
    results = []
    for call in (function, compiled(function)):
        out = call(*args)
        tensors = [t for t in _pytree.tree_leaves(out) if isinstance(t, Tensor)]
        total = sum((t.nan_to_num().square().sum() for t in tensors if t.requires_grad), torch.zeros(()))
        grads = torch.autograd.grad(total, leaves, allow_unused=True) if leaves else ()
        results.append((out, grads))
    (out, grads), (other, other_grads) = results
    assert type(out) is type(other)
    for eager, fast in zip(_pytree.tree_leaves((out, grads)), _pytree.tree_leaves((other, other_grads))):
        # Inductor may add a bias apart from the product, which rounds otherwise; gradients are twice the output's size.
        torch.testing.assert_close(fast, eager, equal_nan=True, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", PACKINGS, ids=str)
def test_pack_and_multiply(options: dict[str, Any], device: torch.device, compiled) -> None:
    acts, W, _ = inputs(device)
    agree(lambda acts, W: rowsparse.matmul(rowsparse.pack(acts, **options), W), compiled, acts, W)


@pytest.mark.parametrize("options", PACKINGS, ids=str)
@pytest.mark.parametrize("shape", [(8, N), (-1, N), ((4, 2, 1, N),), (2, -1, 2, N)], ids=str)
def test_reshape(shape: Any, options: dict[str, Any], device: torch.device, compiled) -> None:
    acts, W, _ = inputs(device)
    agree(lambda acts, W: rowsparse.matmul(rowsparse.pack(acts, **options).reshape(*shape), W), compiled, acts, W)


@pytest.mark.parametrize("options", PACKINGS, ids=str)
def test_a_container_leaves(options: dict[str, Any], device: torch.device, compiled) -> None:
    agree(lambda acts: rowsparse.pack(acts, **options), compiled, inputs(device)[0])


@pytest.mark.parametrize("packed", [False, True])
def test_a_container_enters(packed: bool, device: torch.device, compiled) -> None:
    rows = random_slots((2, 4, N), 6, packed=packed, device=device)
    agree(rowsparse.matmul, compiled, rows, inputs(device)[1])
    agree(lambda rows: rows.to_dense(), compiled, rows)
    agree(sae.decode, compiled, rows, *inputs(device)[1:])


@pytest.mark.parametrize("options", PACKINGS, ids=str)
def test_a_container_enters_and_leaves(options: dict[str, Any], device: torch.device, compiled) -> None:
    acts, W, _ = inputs(device)
    rows, x = rowsparse.pack(acts.detach(), **options), torch.randn(2, 4, D, device=device, requires_grad=True)
    # Unpacked, for the source of a row that did not overflow is left unwritten.
    agree(lambda x, W, rows: rowsparse.sampled_matmul(x, W, rows).to_dense(), compiled, x, W, rows)
    assert type(compiled(rowsparse.sampled_matmul)(x, W, rows)) is type(rows)
    agree(rowsparse.transpose, compiled, rows)
    agree(lambda acts, rows: rowsparse.transpose(rows).to_dense() @ acts.reshape(8, N), compiled, acts, rows)


@pytest.mark.parametrize(
    "options",
    [{}, {"capacity": 6}, {"capacity": N}],
    ids=str,
)
@pytest.mark.parametrize("with_bias", [True, False])
def test_decode(options: dict[str, Any], with_bias: bool, device: torch.device, compiled) -> None:
    acts, W, b = inputs(device)
    b = b if with_bias else None
    agree(lambda acts, W, b: sae.decode(acts, W, b, **options).relu(), compiled, acts, W, b)
    frozen = acts.detach(), W.detach(), None if b is None else b.detach()
    agree(lambda acts, W, b: sae.decode(acts, W, b, **options).relu(), compiled, *frozen)


def test_under_autocast(device: torch.device, compiled) -> None:
    acts, W, b = inputs(device)

    def decode(acts: Tensor, W: Tensor, b: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return sae.decode(acts, W, b, capacity=6)

    out = compiled(decode)(acts, W, b)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out, decode(acts, W, b))


def test_sizes_are_dynamic_too(device: torch.device, compiled) -> None:
    """Sizes of buffers that follow from the batch do not compile anew for every batch."""

    def there_and_back(x: Tensor) -> Tensor:
        packed = rowsparse.pack(x, capacity=10)
        return rowsparse.transpose(rowsparse.pack(x)).to_dense() + packed.to_dense().t()

    torch._dynamo.reset()
    fast = compiled(there_and_back)
    with torch._dynamo.config.patch(recompile_limit=3):
        for m in (2, 3, 5, 8, 13, 20):
            x = random_rows((m, N), l0=4, device=device)
            torch.testing.assert_close(fast(x), 2 * x.t())


def test_dynamic_shapes(device: torch.device, compiled) -> None:
    """One graph serves every batch size."""
    _, W, b = inputs(device)

    def decode(acts: Tensor) -> Tensor:
        return sae.decode(acts, W, b, capacity=6)

    fast = compiled(decode)
    for m in (3, 5, 8, 20):
        acts = random_rows((m, N), l0=4, device=device).requires_grad_()
        torch._dynamo.mark_dynamic(acts, 0)
        out = fast(acts)
        torch.testing.assert_close(out, acts @ W + b)
        out.sum().backward()
        torch.testing.assert_close(acts.grad, W.sum(1) * (acts != 0))
