"""Up to 16 rows, which have kernels of their own."""

import pytest
import torch

from gossamer._core.ops import INTERPRET
from gossamer.ffn.records import SparseFfn
from gossamer.ffn.sparse_ffn import sparse_ffn
from tests.ffn.dense import call, check, operands


@pytest.mark.parametrize("m", [0, 1, 3, 5, 16, 17])
@pytest.mark.parametrize("n", [0, 5, 300])
def test_few_rows(m: int, n: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    if INTERPRET and dtype is torch.float16 and m not in (3, 5):
        pytest.skip("two numbers of rows tell what a dtype does")
    a = operands((m, 24, n, 33), dtype, device, generator, shift=1.0)
    for activation in ("relu", "relu2") if m == 5 else ("relu",):
        check(a, call(a, method="gather", activation=activation), activation)


@pytest.mark.kernels
@pytest.mark.parametrize("m", [1, 3, 7])
@pytest.mark.parametrize("shared", [0.0, 0.9])
def test_any_tiles(m: int, shared: float, device: torch.device, generator: torch.Generator) -> None:
    """Lists that are looked at in several parts, the last one not full, columns of the result beyond the last, and
    more columns of a program than one product over up takes; with tensor cores and without."""
    from gossamer.ffn._triton.few import Tile, project

    sizes = (m, 21 if m == 3 else 24, 300, 40)
    a = operands(sizes, torch.float16 if m == 7 else torch.float32, device, generator, 1.0, shared=shared)
    kept = a["x"] @ a["gate"].t() + a["gate_bias"] > 0
    parts = 4 if m == 7 else 1
    for tile in (
        Tile((16, 64, 64), (4, 2, None), (64 * parts, 16, parts), (4, None), 16),
        Tile((64, 32, 64), (4, 2, None), (1024, 64, parts), (4, None), 8),
        Tile((64, 32, 64), (4, 2, None), (32 * parts, 16, parts), (4, None), 16),
    ):
        for down in (a["down"], a["down"].t().contiguous().t()):
            out, nnz = a["x"].new_empty(m, 40), torch.empty(m, dtype=torch.int32, device=device)
            given = (a["x"], a["gate"], a["gate_bias"], None, a["up"], a["up_bias"], down, a["down_bias"])
            project(given, out, nnz, False, tile)
            check(a, out)
            assert nnz.tolist() == kept.sum(1).tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("m", [4, 16])
def test_wide_blocks(m: int, device: torch.device, generator: torch.Generator) -> None:
    """So many columns that Hopper's programs take 128 each, with W_down by rows and by columns."""
    a = operands((m, 512, 14336, 512), torch.bfloat16, device, generator, shift=1.5)
    for down in (a["down"], a["down"].t().contiguous().t()):
        given = {**a, "down": down}
        check(given, call(given, method="gather"))


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("bias", [-64.0, 64.0])
def test_nothing_and_everything_active(m: int, bias: float, device: torch.device, generator: torch.Generator) -> None:
    a = operands((m, 24, 300, 40), torch.float32, device, generator)
    a["gate_bias"].fill_(bias)
    check(a, call(a, method="gather"))


def test_entries_are_counted(device: torch.device, generator: torch.Generator) -> None:
    for m in (1, 16):
        a = operands((m, 24, 300, 40), torch.float32, device, generator, shift=1.0)
        kept = a["x"] @ a["gate"].t() + a["gate_bias"] > 0
        parts = (a["x"], a["gate"], a["gate_bias"], None, None, None, a["down"], None)
        for counted in (False, True):
            _, nnz = sparse_ffn(SparseFfn(*parts, True, counted))
            assert nnz.tolist() == (kept.sum(1).tolist() if counted else [])


@pytest.mark.gpu
def test_replays_on_two_streams_beside_others(generator: torch.Generator) -> None:
    """Each stream and each graph has lists of its own."""
    device = torch.device("cuda", torch.cuda.current_device())
    a = operands((16, 512, 9000, 512), torch.bfloat16, device, generator, shift=1.0)
    expected = call(a, method="gather")
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    outs = []
    for graph in graphs:
        with torch.cuda.graph(graph):
            outs.append([call(a, method="gather") for _ in range(3)])
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    others = torch.randn(2048, 2048, device=device)
    eager = [expected, expected]
    for i in range(200):
        for j, (graph, stream) in enumerate(zip(graphs, streams)):
            with torch.cuda.stream(stream):
                graph.replay()
                if i % 10 == 0:
                    eager[j] = call(a, method="gather")
        if i % 20 == 0:
            with torch.cuda.stream(streams[2]):
                torch.mm(others, others)
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in (*outs[0], *outs[1], *eager))
