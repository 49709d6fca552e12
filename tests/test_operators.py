"""Every registered operator under `torch.library.opcheck`, with the arguments that the public functions give it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer import attention, blocksparse, ffn, gemm, nn, rowsparse, sae
from tests.recorded import operator_of, recorded, registered


@pytest.mark.parametrize("name", registered())
def test_opcheck(name: str, device: torch.device) -> None:
    calls = recorded(device).get(name)
    assert calls, f"no scenario calls {name}: add one to tests/<room>/operator_calls.py"
    operator = operator_of(name)
    for args in calls:
        torch.library.opcheck(operator, args)


@pytest.mark.parametrize("name", registered())
def test_no_output_is_an_input(name: str, device: torch.device) -> None:
    operator = operator_of(name)
    for args in recorded(device)[name]:
        with torch.no_grad():
            out = operator(*args)
        taken = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor) and arg.numel()}
        for tensor in out if isinstance(out, tuple | list) else () if out is None else (out,):
            assert tensor.numel() == 0 or tensor.untyped_storage().data_ptr() not in taken


MOST = 14
"""Tensors that an operator takes."""


def test_operators_take_few_tensors() -> None:
    counts = {name: sum("Tensor" in str(a.type) for a in operator_of(name)._schema.arguments) for name in registered()}
    assert {name: count for name, count in counts.items() if count > MOST} == {}


FUNCTIONS = pytest.mark.parametrize(
    "name, call",
    [
        ("gemm.linear_glu: .* x ", lambda x: gemm.linear_glu(x, torch.ones(4, 6), torch.ones(4, 6))),
        ("gemm.gated_mlp: .* gate_weight ", lambda x: gemm.gated_mlp(torch.ones(5, 6), x, x, torch.ones(6, 3))),
        ("gemm.linear_pack: .* x ", lambda x: gemm.linear_pack(x, torch.ones(4, 6)).values),
        ("rowsparse.pack: .* x ", lambda x: rowsparse.pack(x).values),
        ("rowsparse.matmul: .* weight ", lambda x: rowsparse.matmul(rowsparse.pack(torch.ones(2, 3)), x)),
        ("rowsparse.Rows: .* values ", lambda x: rowsparse.matmul(_tangled(x), torch.ones(9, 2))),
        ("sae.encode: .* W_enc ", lambda x: sae.encode(torch.ones(2, 3), x, activation="relu").values),
        ("sae.decode: .* W_dec ", lambda x: sae.decode(rowsparse.pack(torch.ones(2, 3)), x)),
    ],
)


@FUNCTIONS
@pytest.mark.parametrize("nested", [False, True])
def test_differentiation_by_torch_func_is_refused(name: str, call: Any, nested: bool) -> None:
    """PyTorch's own error names neither the function nor a way out; also after a call that was checked."""
    x = torch.ones(3, 6)
    call(x)
    function = torch.func.vmap(call) if nested else call
    # The first function that is called says so, which may be what makes an operand.
    said = rf"({name.split(':')[0]}|rowsparse.pack): torch.func.grad, .* Use torch.autograd.grad"
    with pytest.raises(NotImplementedError, match=said):
        torch.func.vjp(function, x[None] if nested else x)


def test_vmap_calls_an_operator_for_each_item() -> None:
    x = torch.randn(5, 3, 6)
    w = torch.ones(4, 6)
    together = torch.func.vmap(lambda x: gemm.linear_glu(x, w, w))(x)
    assert torch.equal(together, torch.stack([gemm.linear_glu(item, w, w) for item in x]))


@FUNCTIONS
@pytest.mark.parametrize("transform", [False, True])
def test_forward_mode_is_refused(name: str, call: Any, transform: bool) -> None:
    """PyTorch would drop tangents, and give zeros; also after a call that was checked."""
    x = torch.ones(3, 6)
    call(x)
    with pytest.raises(NotImplementedError, match=name + "has a tangent. Use reverse mode"):
        if transform:
            torch.func.jvp(call, (x,), (x,))
        else:
            with torch.autograd.forward_ad.dual_level():
                call(torch.autograd.forward_ad.make_dual(x, x))


MANY = torch.ones(16, 16)
EVERY = attention.Selection.from_mask(torch.ones(1, 16, 16, dtype=torch.bool))
BLOCK = blocksparse.Layout.full((1, 1), 16)
FIRST = blocksparse.from_dense(torch.zeros(16, 16, dtype=torch.int64), BLOCK)


def _trained(x: Tensor, path: str) -> Tensor:
    model = nn.TopKSAE(16, 32, 4)
    model.density.pinned = path
    return model.loss(x).loss


@pytest.mark.parametrize(
    "name, call",
    [
        ("gemm.linear_glu", lambda x: gemm.linear_glu(x, MANY)),
        ("gemm.linear_glu", lambda x: gemm.linear_glu(x, MANY, recompute=True)),
        ("gemm.gated_mlp", lambda x: gemm.gated_mlp(x, MANY, MANY, MANY)),
        ("ffn.gated", lambda x: ffn.gated(x, MANY, MANY, MANY, method="gather")),
        ("sae.encode", lambda x: sae.encode(x, MANY, activation="relu").values),
        ("sae.encode", lambda x: sae.encode(MANY, x, activation="relu", capacity=3).to_dense()),
        ("sae.encode", lambda x: _trained(x, "sparse")),
        ("sae.encode", lambda x: _trained(x, "dense")),
        ("sae.decode", lambda x: sae.decode(x, MANY, capacity=4)),
        ("attention.indexer_scores", lambda x: attention.indexer_scores(x[None, None], x[None], MANY[None, :, :1])),
        ("attention.sparse_attention", lambda x: attention.sparse_attention(*[x[None, None]] * 3, EVERY)),
        ("blocksparse.attention", lambda x: blocksparse.attention(*[x[None, None]] * 3, BLOCK)),
        ("blocksparse.softmax", lambda x: blocksparse.softmax(blocksparse.from_dense(x, BLOCK)).values),
        (
            "blocksparse.scatter",
            lambda x: blocksparse.scatter(BLOCK, 0, FIRST, blocksparse.from_dense(x, BLOCK), "prod").values,
        ),
    ],
)
def test_second_derivatives_are_refused(name: str, call: Any) -> None:
    """By the name that was called."""
    x = torch.rand(16, 16, requires_grad=True)
    with pytest.raises(NotImplementedError, match=rf"^{name}: second derivatives are not implemented"):
        torch.autograd.grad(call(x).square().sum(), x, create_graph=True)


def _tangled(values: Tensor) -> rowsparse.Rows:
    indices, spans = torch.arange(6, dtype=torch.int32).repeat(3), torch.tensor([[0, 6, 12], [6, 6, 6]])
    return rowsparse.Rows(values.flatten(), indices, spans, (3, 9))
