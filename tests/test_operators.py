"""Every registered operator under `torch.library.opcheck`, with the arguments that the public functions give it."""

import functools
import itertools
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gossamer import gemm, rowsparse, sae
from gossamer._core import ops
from gossamer.sae.smallest import smallest
from gossamer.sae.squared_error import squared_error
from gossamer.testing import random_rows

N, D = 90, 12


class Recorder(TorchDispatchMode):
    """Keeps the arguments of every call of an operator of the library."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[tuple[Any, ...]]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == ops.NAMESPACE:
            # What runs in a backward pass has no gradient of its own.
            record = functools.partial(_copied, with_grad=torch._C._current_graph_task_id() == -1)
            self.calls[func.name()].append(tuple(record(arg) for arg in args))
        return func(*args, **(kwargs or {}))


def _copied(arg: Any, with_grad: bool) -> Any:
    if not isinstance(arg, Tensor):
        return arg
    return arg.detach().clone().requires_grad_(with_grad and arg.requires_grad)


def _kind(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return arg.dim(), arg.dtype, arg.requires_grad
    return tuple(arg) if isinstance(arg, list) else arg


def _leaves(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    acts = random_rows((3, N), l0=[2, 20, 0], device=device).requires_grad_()
    W, b = (torch.randn(shape, device=device).requires_grad_() for shape in ((N, D), (D,)))
    return acts, W, b


def _rowsparse(device: torch.device) -> None:
    acts, W, _ = _leaves(device)
    for options in ({"capacity": 8}, {"capacity": N}, {"format": "csr"}, {"format": "csr", "max_nnz": 5}):
        rows = rowsparse.pack(acts, **options)
        rowsparse.unpack(rows).sum().backward()
        rowsparse.matmul(rowsparse.pack(acts, **options), W).sum().backward()
        rowsparse.matmul(rowsparse.pack(acts.detach(), **options), W).sum().backward()
        rowsparse.matmul(rowsparse.pack(acts, **options), W.detach()).sum().backward()
        rowsparse.transpose(rows)
        x = torch.randn(3, D, device=device, requires_grad=True)
        # Every row overflows or none, for the source of one that does not is left unwritten.
        pattern = rows.detach() if options.get("capacity") == N else rowsparse.pack(acts.detach().abs() + 1, **options)
        rowsparse.sampled_matmul(x, W, pattern).values.sum().backward()
    # Every tile is full, for slots behind a tile's last entry are left unwritten.
    full = torch.rand(3, N, device=device) + 1
    rowsparse.unpack(rowsparse.pack(full.clone().requires_grad_(), format="twell", tile=18, slots=2)).sum().backward()
    rowsparse.unpack(rowsparse.pack(full, format="twell", tile=N)).sum()


def _decode(device: torch.device) -> None:
    for options in ({"capacity": 8}, {"capacity": N}, {"method": "exact"}):
        for bias in (True, False):
            acts, W, b = _leaves(device)
            sae.decode(acts, W, b if bias else None, **options).sum().backward()
        sae.decode(acts, W.detach(), **options).sum().backward()
        sae.decode(acts.detach(), W, **options).sum().backward()
        sae.decode(acts.detach(), W.detach(), b.detach(), out_dtype=torch.float16, **options)


def _encode(device: torch.device) -> None:
    x, W, b = (torch.randn(shape, device=device).requires_grad_() for shape in ((3, D), (D, N), (N,)))
    threshold = torch.full((N,), 0.5, device=device, requires_grad=True)
    for options in (
        {},
        {"activation": gemm.JumpReLU(threshold, 0.5), "capacity": 3},
        {"activation": gemm.JumpReLU(threshold, 0.5), "capacity": N},
        {"activation": gemm.JumpReLU(threshold, 0.5, ste_to_input=True), "capacity": 3},
        {"activation": gemm.TopK(4)},
        {"activation": gemm.BatchTopK(4)},
        {"activation": gemm.TopK(4, torch.rand(N, device=device))},
    ):
        rows, l0 = sae.encode_with_l0(x, W, b, **options)
        scale = torch.rand(N, device=device, requires_grad=True)
        (rows.to_dense().sum() + l0.sum() + sae.tanh_l0(rows, scale).sum()).backward()
        sae.count_fired(rows)
        smallest(rows, torch.ones(rows.num_columns, device=device))
    sae.encode(x.detach(), W, activation="relu", capacity=3).to_dense().sum().backward()
    sae.encode(x, W, b, gemm.BatchTopK(4), format="csr").to_dense().sum().backward()
    y = torch.randn(D, 3, device=device).t().requires_grad_()
    (grad,) = torch.autograd.grad(squared_error(x, y).sum(), y, create_graph=True)
    grad.square().sum().backward()


def _gemm(device: torch.device) -> None:
    for stacked, bias, recompute in itertools.product((False, True), repeat=3):
        x, gate, up, b = (
            torch.randn(shape, device=device).requires_grad_() for shape in ((3, D), (8, D), (8, D), (8,))
        )
        biases = {"gate_bias": b[:4] if stacked else b, "up_bias": None} if bias else {}
        out = gemm.linear_glu(x, gate, None if stacked else up, recompute=recompute, **biases)
        out.sum().backward()
    gemm.linear_glu(x.detach(), gate.detach(), activation="gelu")
    gemm.gated_mlp(x, gate, up, torch.randn(D, 8, device=device)).sum().backward()
    x, weight, W, b = (torch.randn(s, device=device).requires_grad_() for s in ((3, D), (N, D), (N, D), (N,)))
    jump = {"activation": gemm.JumpReLU(torch.rand(N, device=device))}
    # Every row overflows, for what does not is left unwritten in a source.
    for options in ({"tile": 16, "slots": 2}, {"format": "ell", "capacity": 5, "bias": b, **jump}):
        rows, _ = gemm.linear_pack(x, weight, **options)
        rowsparse.matmul(rows, W).sum().backward()
        rowsparse.matmul(rows.detach(), W.detach())
    rows = gemm.linear_pack(x.detach(), weight.detach(), tile=300)
    rowsparse.matmul(gemm.linear_pack(x, weight, activation="relu2", tile=16, slots=2)[0], W).sum().backward()


# A room keeps its own in tests/<room>/operator_calls.py.
ROOMS = sorted(file.parent.name for file in Path(__file__).parent.glob("*/operator_calls.py"))
CALLS = [import_module(f"tests.{room}.operator_calls").calls for room in ROOMS]
SCENARIOS = [_gemm, _rowsparse, _decode, _encode, *CALLS]


@functools.cache
def recorded(device: torch.device) -> dict[str, list[tuple[Any, ...]]]:
    """Operator -> its calls in all scenarios, one for each kind of arguments."""
    calls: dict[str, dict[Any, tuple[Any, ...]]] = defaultdict(dict)
    for scenario in SCENARIOS:
        torch.manual_seed(0)
        with Recorder() as recorder:
            scenario(device)
        for name, found in recorder.calls.items():
            for args in found:
                kind = tuple(map(_kind, args))
                calls[name].setdefault(kind, args)
    return {name: list(kinds.values()) for name, kinds in calls.items()}


def registered() -> list[str]:
    """Every operator of the library, as "gossamer::name"."""
    return sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{ops.NAMESPACE}::"))


@pytest.mark.parametrize("name", registered())
def test_opcheck(name: str, device: torch.device) -> None:
    calls = recorded(device).get(name)
    assert calls, f"no scenario calls {name}: add one to tests/<room>/operator_calls.py"
    operator = getattr(torch.ops.gossamer, name.split("::")[1]).default
    for args in calls:
        torch.library.opcheck(operator, args)


@pytest.mark.parametrize("name", registered())
def test_no_output_is_an_input(name: str, device: torch.device) -> None:
    operator = getattr(torch.ops.gossamer, name.split("::")[1]).default
    for args in recorded(device)[name]:
        with torch.no_grad():
            out = operator(*args)
        taken = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor) and arg.numel()}
        for tensor in out if isinstance(out, tuple | list) else () if out is None else (out,):
            assert tensor.numel() == 0 or tensor.untyped_storage().data_ptr() not in taken


FUNCTIONS = pytest.mark.parametrize(
    "name, call",
    [
        ("gemm.linear_glu: .* x ", lambda x: gemm.linear_glu(x, torch.ones(4, 6), torch.ones(4, 6))),
        ("gemm.gated_mlp: .* gate_weight ", lambda x: gemm.gated_mlp(torch.ones(5, 6), x, x, torch.ones(6, 3))),
        ("gemm.linear_pack: .* x ", lambda x: gemm.linear_pack(x, torch.ones(4, 6))[0].values),
        ("rowsparse.pack: .* x ", lambda x: rowsparse.pack(x).values),
        ("rowsparse.matmul: .* weight ", lambda x: rowsparse.matmul(rowsparse.pack(torch.ones(2, 3)), x)),
        ("rowsparse.ELL: .* values ", lambda x: rowsparse.matmul(_tangled(x), torch.ones(9, 2))),
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


def _tangled(values: Tensor) -> rowsparse.ELL:
    indices = torch.arange(6, dtype=torch.int32).expand(3, 6).contiguous()
    return rowsparse.ELL(values, indices, torch.full((3,), 6, dtype=torch.int32), (3, 9))
