"""gemm.linear_glu, against the same in dense float64."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gossamer import gemm
from gossamer._core import tuning
from gossamer.gemm._torch.linear_glu import GATES
from gossamer.testing import assert_close
from tests import strategies
from tests.gemm.gated import Leaves, doubled, leaves_of, plain


def quartered(leaves: Leaves) -> Leaves:
    """Rounded to quarters, whose sums no order of addition rounds: few numbers of plain PyTorch may be right by
    luck."""
    return {name: (4 * leaf).round().clamp(-8, 8) / 4 for name, leaf in leaves.items()}


def luckless(usual: Tensor) -> Tensor:
    """With few elements plain PyTorch may be right by luck even where an activation is rounded in float32: four of its
    steps more."""
    return usual.double() * (1 + 4 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("activation", GATES)
@given(data=st.data())
def test_forward(activation: str, data: st.DataObject, dtype: torch.dtype, device: torch.device) -> None:
    leading = data.draw(strategies.LEADING)
    n, k = data.draw(st.integers(0, 70)), data.draw(st.integers(0, 70))
    generator = strategies.seeded(data.draw(strategies.SEEDS), device)
    leaves = leaves_of(7, n, k, generator, dtype, bias=data.draw(st.booleans()), stacked=data.draw(st.booleans()))
    leaves["x"] = torch.randn(*leading, k, device=device, generator=generator).to(dtype)
    leaves = {
        name: strategies.laid_out(leaf, data.draw(strategies.LAYOUTS)) for name, leaf in quartered(leaves).items()
    }
    out = gemm.linear_glu(**leaves, activation=activation)
    assert out.dtype is dtype and out.is_contiguous()
    assert_close(out, reference64=plain(activation, doubled(leaves)), plain=luckless(plain(activation, leaves)))


@pytest.mark.parametrize(
    "m, n, k",
    [
        (1, 130, 300),
        (9, 40, 328),
        (17, 129, 64),
        (33, 136, 264),
        (70, 72, 200),
        (300, 260, 129),
        (130, 256, 512),
        (200, 70, 403),
        (520, 520, 131),
        pytest.param(64, 14336, 512, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("stacked", [False, True])
def test_every_way_through_the_tiles(
    m: int, n: int, k: int, stacked: bool, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    for bias in (False, True):
        leaves = leaves_of(m, n, k, generator, dtype, bias=bias, stacked=stacked)
        for recompute in (False, True):
            leaf = leaves | {"x": leaves["x"].clone().requires_grad_()}
            out = gemm.linear_glu(**leaf, recompute=recompute)
            assert_close(out, reference64=plain("silu", doubled(leaves)), plain=plain("silu", leaves))


@pytest.mark.kernels
@pytest.mark.parametrize(
    "m, n, k", [(65, 40, 64), (128, 130, 48), pytest.param(100, 5632, 2048, marks=pytest.mark.gpu)]
)
def test_tiles_of_more_rows(
    m: int, n: int, k: int, device: torch.device, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 128 of them, where Hopper's own tiles would leave most of a GPU idle."""
    from gossamer.gemm._triton import linear_glu as kernels

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    leaves = leaves_of(m, n, k, generator, dtype)
    monkeypatch.setattr(kernels, "choose_path", lambda call: "tiles")
    with torch.no_grad():
        out = gemm.linear_glu(**leaves)
    assert_close(out, reference64=plain("silu", doubled(leaves)), plain=plain("silu", leaves))


@pytest.mark.parametrize("k", [1, 300, 1100, 4096, 8192])
def test_a_single_row(k: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    """In one step along K and in several, and where only some layouts have a kernel of their own."""
    leaves = leaves_of(1, 37, k, generator, dtype)
    # Weights of a size that leaves quarters other than 0.
    leaves = quartered(leaves | {name: leaves[name] * k**0.5 / 4 for name in ("gate_weight", "up_weight")})
    assert k == 1 or leaves["gate_weight"].count_nonzero() > 0.3 * leaves["gate_weight"].numel()
    for layout in ("contiguous", "strided", "misaligned", "transposed"):
        out = gemm.linear_glu(**{name: strategies.laid_out(leaf, layout) for name, leaf in leaves.items()})
        assert_close(out, reference64=plain("silu", doubled(leaves)), plain=luckless(plain("silu", leaves)))


@pytest.mark.native
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("m", [1, 5])
def test_calls_of_one_shape(
    m: int, stacked: bool, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """A GPU keeps launches of few rows: the next call may have other tensors, layouts and activations."""
    alive = []
    for odd, layout in (
        (None, "contiguous"),
        (None, "contiguous"),
        *((name, "misaligned") for name in ("x", "gate_weight", "up_weight", "gate_bias")),
        *((name, "strided") for name in ("x", "gate_weight", "up_weight", "gate_bias", "up_bias")),
        (None, "contiguous"),
    ):
        for activation in ("silu", "relu"):
            for bias in (None, torch.float32, dtype):
                leaves = quartered(leaves_of(m, 40, 64, generator, dtype, stacked=stacked, bias=bias is not None))
                given = dict(leaves)
                if bias is not None:
                    given |= {name: given[name].to(bias) for name in ("gate_bias", "up_bias")}
                if odd in given:
                    given[odd] = strategies.laid_out(given[odd], layout)
                out = gemm.linear_glu(**given, activation=activation)
                usual = luckless(plain(activation, leaves))
                assert_close(out, reference64=plain(activation, doubled(leaves)), plain=usual)
                # What is freed would come back at the same addresses.
                alive.append((given, out))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 5])
def test_a_launch_is_kept(m: int, device: torch.device, generator: torch.Generator, monkeypatch: Any) -> None:
    """For calls of its shape on any stream, of any tensors, and in a graph."""
    from gossamer.gemm._triton import linear_glu

    made, make = [], linear_glu._launch_linear_glu
    monkeypatch.setattr(linear_glu, "_launch_linear_glu", lambda *a: made.append(m) or make(*a))
    # Enough columns for tiles of 32 to keep a GPU at work.
    sets = [leaves_of(m, 8192, 64, generator, torch.bfloat16) for _ in range(4)]
    outs = [gemm.linear_glu(**leaves) for leaves in sets]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        outs.append(gemm.linear_glu(**sets[0]))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs.append(gemm.linear_glu(**sets[1]))
    graph.replay()
    # The first call and the second, which is recorded.
    assert len(made) == 2
    for leaves, out in zip([*sets, sets[0], sets[1]], outs):
        assert_close(out, reference64=plain("silu", doubled(leaves)), plain=luckless(plain("silu", leaves)))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "m, n, k",
    [(257, 14336, 4096), (500, 9008, 4096), (2100, 9000, 2048)],
)
def test_shared_tiles(m: int, n: int, k: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    """Tiles that do not fill a wave of programs, which cut them along K: again and again, from a graph, and on streams
    that overlap, with the same bits each time."""
    if tuning.hopper(generator.device):
        from gossamer.gemm._gluon import linear_glu as hopper

        tiles = -(-m // 128), -(-n // 128)
        assert hopper.schedule(*tiles, -(-k // 64), generator.device)[1] < tiles[0] * tiles[1]
    leaves = leaves_of(m, n, k, generator, dtype)
    usual = plain("silu", leaves)
    first = gemm.linear_glu(**leaves)
    assert_close(first, reference64=plain("silu", doubled(leaves)), plain=usual)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # In one case more than there are flags for that were zeroed ahead.
        captured = [gemm.linear_glu(**leaves) for _ in range(200 if m == 257 else 3)]
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for _ in range(10):
        outs = []
        for stream in streams:
            with torch.cuda.stream(stream):
                outs.append(gemm.linear_glu(**leaves))
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, first) for out in (*outs, *captured))


def test_not_a_number_and_infinity(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.tensor([[float("nan"), 1.0], [float("inf"), 1.0], [1.0, 1.0]], device=device)
    w = torch.tensor([[1.0, 0.5], [0.5, 1.0]], device=device)
    for activation in GATES:
        leaves = {"x": x.to(dtype), "gate_weight": w.to(dtype)}
        out = gemm.linear_glu(**leaves, activation=activation)
        # PyTorch's own float32 GELU of infinity is NaN on the CPU.
        assert not out[:2].isfinite().any() and out[2].isfinite().all()


@pytest.mark.parametrize("alias, name", [("swish", "silu"), ("gelu_new", "gelu_tanh"), ("linear", "identity")])
def test_names_of_hugging_face(alias: str, name: str, device: torch.device, generator: torch.Generator) -> None:
    leaves = leaves_of(3, 4, 5, generator, torch.float32)
    assert torch.equal(gemm.linear_glu(**leaves, activation=alias), gemm.linear_glu(**leaves, activation=name))


def test_a_function_under_autocast(device: torch.device, generator: torch.Generator) -> None:
    """The result has the dtype of autocast, also if the function's has not."""
    leaves = leaves_of(9, 8, 7, generator, torch.float32)
    with torch.autocast(device.type, torch.bfloat16):
        out = gemm.linear_glu(**leaves, activation=lambda gate: torch.exp(gate.float()))
    assert out.dtype is torch.bfloat16


@pytest.mark.parametrize("m", [0, 1, 9, 300])
@pytest.mark.parametrize("stacked", [False, True])
def test_out(m: int, stacked: bool, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    """The same bits as without `out`, at its place, call after call."""
    leaves = leaves_of(m, 72, 48, generator, dtype, stacked=stacked)
    leaves["x"] = leaves["x"].view(m, 1, 48)
    memory = torch.full((m + 2, 1, 72), 7.0, dtype=dtype, device=device)
    out = memory[1:-1]
    wanted = gemm.linear_glu(**leaves)
    for _ in range(4):
        out.fill_(float("nan"))
        version = out._version
        assert gemm.linear_glu(**leaves, out=out) is out
        # What autograd has saved of this memory is another's now.
        assert out._version > version
        assert torch.equal(out, wanted) and (memory[0] == 7).all() and (memory[-1] == 7).all()


@pytest.mark.native
def test_out_is_refused() -> None:
    """For tensors of a transform, and for an inference tensor outside inference mode."""
    with torch.inference_mode():
        kept = torch.empty(2, 6)
    with pytest.raises(ValueError, match=r"out must be no inference tensor outside inference mode"):
        gemm.linear_glu(**OK, out=kept)
    with torch.inference_mode():
        assert torch.equal(gemm.linear_glu(**OK, out=kept), gemm.linear_glu(**OK))
    with pytest.raises(NotImplementedError, match=r"out has no torch\.func\.vmap"):
        torch.func.vmap(lambda x: gemm.linear_glu(x, W64, W64, out=torch.empty(2, 6)))(torch.ones(3, 2, 4))


@pytest.mark.native
def test_out_compiled(device: torch.device, generator: torch.Generator, compiled: Any) -> None:
    leaves, out = leaves_of(9, 8, 7, generator, torch.float32), torch.empty(9, 8, device=device)
    compiled(lambda a, o: gemm.linear_glu(**a, out=o))(leaves, out)
    torch.testing.assert_close(out, gemm.linear_glu(**leaves))


X4, W64, B5 = torch.ones(2, 4), torch.ones(6, 4), torch.ones(5)
OK = {"x": X4, "gate_weight": W64, "up_weight": W64}


@pytest.mark.native
@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"x": torch.tensor(1.0)}, ValueError, r"gemm.linear_glu: x must have shape \[..., K\], got a scalar"),
        ({"x": None}, TypeError, r"x must be a torch.Tensor, got None"),
        ({"x": X4.long()}, TypeError, r"x must be float32.* got int64"),
        ({"gate_weight": torch.ones(6, 5)}, ValueError, r"gate_weight must have shape \[N, K\] with K = 4 like x, got"),
        ({"up_weight": torch.ones(5, 4)}, ValueError, r"up_weight must have shape \[N, K\] = \[6, 4\] like gate_w"),
        ({"gate_weight": torch.ones(5, 4), "up_weight": None}, ValueError, r"even number of rows, gate and up, got 5"),
        ({"gate_bias": B5}, ValueError, r"gate_bias must have shape \[N\] = \[6\] like the weights, got \[5\]"),
        ({"up_bias": torch.ones(6, device="meta")}, ValueError, r"up_bias must be on cpu like x, got meta"),
        ({"up_weight": W64.half()}, TypeError, r"x and up_weight must have one dtype, got float32 and float16"),
        ({"activation": "tanh"}, ValueError, r"activation must be one of silu, gelu, .* got 'tanh'"),
        ({"activation": None}, ValueError, r"activation must be one of .*, or a function, got None"),
        (
            {"out": torch.ones(2, 5)},
            ValueError,
            r"out must have shape \[..., N\] = \[2, 6\] like x and the weights, got",
        ),
        ({"out": torch.ones(6, 2).t()}, ValueError, r"out must be contiguous, got strides \[1, 2\]"),
        ({"out": torch.ones(2, 6).half()}, TypeError, r"x and out must have one dtype"),
        ({"out": W64.view(-1)[:12].view(2, 6)}, ValueError, r"out must have memory of its own"),
        ({"out": torch.ones(2, 6).requires_grad_()}, NotImplementedError, r"linear_glu: out has no gradient"),
        ({"out": "a"}, TypeError, r"out must be a torch.Tensor, got str"),
        (
            {"activation": torch.sum},
            ValueError,
            r"activation must return the gate's shape \[2, 6\], got \[\]",
        ),
        ({"activation": lambda gate: None}, ValueError, r"the gate's shape \[2, 6\], got NoneType"),
        ({"activation": torch.nn.GELU}, ValueError, r"activation must be one of .*, or a function, got <class"),
        ({"out": torch.ones(2, 6), "activation": torch.tanh}, ValueError, r"out must be None with a function"),
        ({"activation": ["silu"]}, ValueError, r"activation must be one of .* got \['silu'\]"),
        ({"x": X4.to_sparse()}, TypeError, r"x must be a strided tensor, got layout sparse_coo"),
    ],
)
def test_errors(change: dict[str, Any], error: type[Exception], message: str) -> None:
    """Also after a call of the same shapes that was right."""
    gemm.linear_glu(**OK)
    with pytest.raises(error, match=message):
        gemm.linear_glu(**(OK | change))
