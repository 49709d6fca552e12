"""The container: its promises, its refusals, and its edits."""

import copy
import dataclasses
import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree

from gossamer import gemm, nn, rowsparse, sae
from gossamer.rowsparse import Rows, matmul, pack
from gossamer.rowsparse.linear_source import LinearSource
from gossamer.sae.smallest import smallest
from gossamer.testing import assert_exact, dense64, random_rows, random_slots
from tests import strategies

INT = torch.int32
COUNTS = [0, 3, 20, 7, 1, 40]
PACKINGS: list[dict[str, Any]] = [{"capacity": 4}, {"capacity": 40}, {"room": 25}, {"capacity": "exact"}]
EVERY = pytest.mark.parametrize("options", PACKINGS, ids=str)


def built(**changes: Any) -> Rows:
    """Two rows of five columns; the second has two entries. One slot belongs to no row."""
    parts: dict[str, Any] = {
        "values": torch.tensor([1.0, 9.0, 2.0, 3.0]),
        "indices": torch.tensor([4, -1, 0, 2], dtype=INT),
        "spans": torch.tensor([[0, 2], [1, 2]]),
        "shape": (2, 5),
    }
    return Rows(**{**parts, **changes})


def linear(**changes: Any) -> LinearSource:
    """A source whose positive part is the same matrix."""
    weight = torch.tensor([[-1.0, 2.0], [-1.0, -1.0], [-1.0, 3.0], [0.0, -1.0], [1.0, -1.0]])
    return LinearSource(**{"x": torch.eye(2), "weight": weight, **changes})


def dense(generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """Six rows, of which some overflow, in two leading dimensions."""
    return random_rows((2, 3, 40), l0=COUNTS, dtype=dtype, device=generator.device, generator=generator, integers=True)


def test_attributes() -> None:
    rows = built(shape=(2, 1, 5))
    assert (rows.num_rows, rows.num_columns, rows.dtype, rows.device.type) == (2, 5, torch.float32, "cpu")
    assert rows.counts.tolist() == [1, 2] and rows.starts.tolist() == [0, 2]
    assert not rows.overflowed and not rows.requires_grad
    assert rows.to_dense().tolist() == [[[0, 0, 0, 0, 1]], [[2, 0, 3, 0, 0]]] and rows.l0.tolist() == [[1], [2]]
    assert rows.validate() is rows and rows.complete() is rows
    assert "shape=(2, 1, 5), slots=4" in repr(rows) and "none possible" in repr(rows)
    with pytest.raises(dataclasses.FrozenInstanceError):
        rows.shape = (2, 5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        rows.values = torch.ones(4)
    assert linear().shape == (2, 5)


def test_a_linear_source() -> None:
    """It moves and detaches with its container; its threshold keeps its dtype."""
    source = linear(weight=linear().weight.requires_grad_(), threshold=torch.full((5,), 0.1))
    rows = built(source=source)
    assert rows.requires_grad and "kept exact" in repr(rows) and rows.to_dense().tolist() == built().to_dense().tolist()
    half = rows.to(torch.float16)
    # In another dtype the source would keep other entries.
    assert half.dtype is torch.float16 and half.source.dtype is torch.float32
    assert half.to_dense().dtype is torch.float16 and half.to_dense().tolist() == built().to_dense().tolist()
    assert half.source.requires_grad and not half.detach().requires_grad
    leaves, spec = _pytree.tree_flatten(rows)
    assert all(isinstance(leaf, torch.Tensor) or leaf is None for leaf in leaves)
    again = _pytree.tree_unflatten(leaves, spec)
    assert isinstance(again.source, LinearSource) and again.source.weight is source.weight
    moved = rows.to("meta")
    assert moved.source is None and rows.source is source and moved.packed.values.device.type == "meta"


def test_to_and_detach() -> None:
    rows = built(values=built().values.requires_grad_(), source=torch.ones(2, 5))
    assert rows.requires_grad and "kept exact" in repr(rows)
    half = rows.to(torch.float16)
    assert half.dtype is half.source.dtype is torch.float16
    assert half.packed.indices.dtype is INT and half.packed.spans.dtype is torch.int64
    assert half.requires_grad and not half.detach().requires_grad and half.shape == rows.shape
    moved = rows.to("meta", torch.float64)
    assert {t.device.type for t in moved.packed[:3]} == {"meta"} and moved.source is None
    assert moved.dtype is torch.float64
    assert rows.to(torch.empty(0, dtype=torch.bfloat16)).dtype is torch.bfloat16
    assert built(source=torch.ones(2, 5, requires_grad=True)).requires_grad


def test_pytree_and_pickle() -> None:
    rows = built()
    leaves, spec = _pytree.tree_flatten([rows, {"a": rows}])
    assert all(isinstance(leaf, torch.Tensor) or leaf is None for leaf in leaves)
    again = _pytree.tree_unflatten(leaves, spec)[1]["a"]
    for other in (again, pickle.loads(pickle.dumps(rows))):
        assert type(other) is Rows and other.shape == rows.shape and other.source is None
        assert torch.equal(other.to_dense(), rows.to_dense())


def test_overflowed(device: torch.device) -> None:
    x = random_rows((3, 40), l0=[3, 9, 0], device=device)
    for rows in (pack(x, capacity=8), strategies.pack_as(x, room=11)):
        assert rows.overflowed.item() is True and rows.validate() is rows
    for rows in (pack(x, capacity=9), strategies.pack_as(x, room=12), pack(x, capacity="exact")):
        assert rows.overflowed.item() is False
    assert pack(x, capacity=40).source is None and pack(x, capacity=8).source is not None
    assert pack(x, capacity="exact").source is None


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"values": torch.ones(2, 2)}, ValueError, r"values must have shape \[P\] with P below 2\^32, got \[2, 2\]"),
        ({"indices": torch.zeros(3, dtype=INT)}, ValueError, r"indices must have shape \[P\] = \[4\] like values"),
        ({"spans": torch.zeros(2, 3).long()}, ValueError, r"spans must have shape \[2, M\] = \[2, 2\] for shape"),
        ({"shape": (3, 5)}, ValueError, r"spans must have shape \[2, M\] = \[2, 3\] for shape \(3, 5\)"),
        ({"indices": torch.zeros(4).long()}, TypeError, "indices must be int32, got int64"),
        ({"spans": torch.zeros(2, 2, dtype=INT)}, TypeError, "spans must be int64, got int32"),
        ({"source": torch.ones(2, 4)}, ValueError, r"source must have shape \[M, N\] = \[2, 5\]"),
        ({"source": torch.ones(2, 5, device="meta")}, ValueError, "source must be on cpu like values, got meta"),
        ({"source": torch.ones(2, 5).half()}, TypeError, "source must be float32 like values, got float16"),
        ({"source": linear(x=torch.ones(3, 2))}, ValueError, r"source must have shape \[M, N\] = \[2, 5\]"),
        ({"values": [1.0]}, TypeError, "values must be a torch.Tensor, got list"),
        ({"indices": [0]}, TypeError, "indices must be a torch.Tensor, got list"),
        ({"values": torch.ones(4).int()}, TypeError, "values must be float32, .* got int32"),
        ({"shape": 4}, ValueError, r"shape must be a tuple \(..., N\) of ints, got 4"),
        ({"shape": ()}, ValueError, r"shape must be a tuple \(..., N\) of ints, got \(\)"),
        ({"shape": (2, 2**31)}, ValueError, "shape must have at most 2\\^31 - 1 columns"),
        (
            {"indices": torch.tensor([5, -1, 0, 2], dtype=INT)},
            ValueError,
            "indices must lie in .* with N = 5, .* got 5",
        ),
        ({"indices": torch.tensor([4, -1, -2, 2], dtype=INT)}, ValueError, "indices must lie in .* got -2"),
        ({"spans": torch.tensor([[0, -2], [1, 2]])}, ValueError, "spans must be at least 0, got -2"),
        ({"spans": torch.tensor([[0, 2], [1, -1]])}, ValueError, "spans must be at least 0, got -1"),
        ({"spans": torch.tensor([[0, 0], [4, 4]])}, ValueError, "spans of two rows must not share a slot"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    """The constructor looks at numbers on the CPU, where that waits for nothing."""
    with pytest.raises(error, match=f"rowsparse.Rows: {message}"):
        built(**changes)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"spans": torch.tensor([[0, 2], [1, 3]])}, "spans must end at most at P = 4 without a source, got 5"),
        ({"indices": torch.tensor([4, -1, 3, 2], dtype=INT)}, "indices must ascend within a row"),
    ],
)
def test_validate_finds_more(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        built(**changes).validate()


def test_slots_of_no_row_hold_anything() -> None:
    indices = torch.tensor([4, 99, 0, 2], dtype=INT)
    assert built(indices=indices).validate().to_dense().tolist() == built().to_dense().tolist()
    assert built(spans=torch.zeros(2, 2).long(), indices=indices).to_dense().count_nonzero() == 0


def test_a_pytree_and_a_transform_do_not_look() -> None:
    """A container that crosses a compiled region was looked at when it was made, and vmap has no numbers to show."""
    rows = built()
    leaves, spec = _pytree.tree_flatten(rows)
    moved = [leaf + 9 if leaf is not None and leaf.dtype is INT else leaf for leaf in leaves]
    assert _pytree.tree_unflatten(moved, spec).indices.tolist() == [13, 8, 9, 11]
    spans = rows.spans[None].repeat(2, 1, 1)
    doubled = torch.vmap(lambda values, spans: Rows(values, rows.indices, spans, rows.shape).values * 2)
    assert torch.equal(doubled(rows.values[None].repeat(2, 1), spans)[1], 2 * rows.values)


@pytest.mark.gpu
def test_rows_that_break_a_rule_are_nan_on_a_gpu(device: torch.device) -> None:
    indices, values = torch.tensor([0, 1, 2], dtype=INT, device=device), torch.ones(3, device=device)
    weight = torch.randn(4, 8, device=device)

    def nan_rows(out: torch.Tensor) -> list[bool]:
        return out.isnan().flatten(1).any(1).tolist()

    for spans, wanted in (
        ([[-1, 1, 2], [1, 1, 1]], [True, False, False]),
        ([[0, 1, 2], [1, -1, 1]], [False, True, False]),
        ([[0, 1, 2], [1 << 62, 1, 1]], [True, False, False]),
        # Every slot three times: no operator has room for their transposition.
        ([[0, 0, 0], [3, 3, 3]], [True, True, True]),
    ):
        rows = Rows(values.requires_grad_(), indices, torch.tensor(spans, device=device), (3, 4))
        assert nan_rows(matmul(rows, weight)) == wanted and nan_rows(rows.to_dense()) == wanted
        matmul(rows, weight.requires_grad_()).sum().backward()
        rowsparse.transpose(rows)
        with pytest.raises(ValueError, match="spans must"):
            rows.validate()
    spans = torch.tensor([[0, 1, 2], [1, 1, 1]], device=device)
    for at in (9, -2):
        here = indices.clone()
        here[1] = at
        rows = Rows(values.detach(), here, spans, (3, 4))
        assert nan_rows(matmul(rows, weight.detach())) == [False, True, False]
        assert sae.tanh_l0(rows, torch.ones(4, device=device)).isnan().tolist() == [False, True, False]
        torch.cuda.synchronize()


@EVERY
def test_looking_changes_nothing(options: dict[str, Any], generator: torch.Generator) -> None:
    x = dense(generator)
    rows = strategies.pack_as(x, **options)
    before = rows.packed
    assert rows.counts.tolist() == COUNTS
    if bool(rows.overflowed):
        for look in ("values", "indices"):
            with pytest.raises(RuntimeError, match=f"{look} lack the entries of rows that overflowed. .*complete"):
                getattr(rows, look)
    else:
        assert rows.values is before.values and rows.indices is before.indices
    whole = rows.complete()
    assert all(a is b for a, b in zip(rows.packed, before))
    assert whole.source is None and not whole.overflowed and whole.validate() is whole
    assert whole.counts.tolist() == COUNTS and torch.equal(whole.to_dense(), x)


@EVERY
def test_edits_concern_every_entry(options: dict[str, Any], generator: torch.Generator) -> None:
    x, weight = dense(generator), torch.eye(40, device=generator.device)
    rows = strategies.pack_as(x, **options).complete()
    rows.values.mul_(2)
    assert torch.equal(matmul(rows, weight), 2 * x)
    rows = strategies.pack_as(x, **options).complete()
    assert torch.equal(replace(rows, values=3 * rows.values).to_dense(), 3 * x)
    rows.values[rows.indices == 7] = 0
    wanted = x.clone()
    wanted[..., 7] = 0
    assert torch.equal(rows.to_dense(), wanted)
    wanted = x.clone()
    wanted[..., [2, 5]] = 0
    assert torch.equal(strategies.pack_as(x, **options).ablate([2, 5]).to_dense(), wanted)
    mask = torch.rand(3, 1, device=x.device) < 0.5
    assert torch.equal(strategies.pack_as(x, **options).where(mask).to_dense(), torch.where(mask, x, 0))
    assert torch.equal(strategies.pack_as(x, **options).map(torch.square).to_dense(), x.square())


@EVERY
def test_gradients_reach_every_entry(options: dict[str, Any], generator: torch.Generator) -> None:
    x, weight = dense(generator), torch.randn(40, 5, device=generator.device, generator=generator)
    leaf = x.clone().requires_grad_()
    rows = strategies.pack_as(leaf, **options)
    # Gradients may be off where somebody looks, and on where somebody differentiates.
    with torch.no_grad():
        rows = rows.complete()
    values = rows.values
    loss = (rows @ weight).square().sum()
    at_values, at_x = torch.autograd.grad(loss, (values, leaf))
    assert at_values.isfinite().all()
    other = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad((other @ weight).square().sum(), other)
    # Sums of two products, in another order.
    torch.testing.assert_close(at_x, wanted * (x != 0), rtol=1e-5, atol=5e-5)
    torch.testing.assert_close(
        replace(rows.detach(), values=at_values).to_dense(), wanted * (x != 0), rtol=1e-5, atol=5e-5
    )


@EVERY
def test_rows_and_shapes_without_looking(options: dict[str, Any], generator: torch.Generator) -> None:
    x = dense(generator)
    for key in (1, slice(1, None), (0, 2), (..., 1), (slice(None), slice(0, 2)), torch.tensor([True, False])):
        picked = strategies.pack_as(x, **options)[key]
        wanted = x[(*key, slice(None)) if isinstance(key, tuple) else key]
        assert torch.equal(picked.to_dense(), wanted), key
        assert torch.equal(dense64(picked.complete()), wanted.double())
        assert torch.equal(picked.l0, (wanted != 0).sum(-1).float())
    assert torch.equal(strategies.pack_as(x, **options)[:, [2, 0, 2]].to_dense(), x[:, [2, 0, 2]])
    rows = strategies.pack_as(x, **options).reshape(-1, 40)
    assert rows.shape == (6, 40) and torch.equal(rows.to_dense(), x.view(6, 40))
    assert torch.equal(strategies.pack_as(x, **options).clone().to_dense(), x)
    with pytest.raises(IndexError, match="indexed by their leading dimensions"):
        rows[0, 0]
    with pytest.raises(ValueError, match="the last size must stay N = 40"):
        rows.reshape(40, 6)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda rows: rows.ablate("a"), TypeError, "Rows.ablate: columns must be an int, .*, got 'a'"),
        (lambda rows: rows.ablate(None), TypeError, "Rows.ablate: columns must be an int, .*, got None"),
        (lambda rows: rows.ablate([[1], [2, 3]]), TypeError, "Rows.ablate: columns must be an int, .*, got "),
        (lambda rows: rows.ablate([9]), ValueError, r"Rows.ablate: columns must lie in \[0, N\) with N = 3, got 9\. "),
        (lambda rows: rows.ablate([0, -2]), ValueError, r"N = 3, got -2\. "),
        (lambda rows: rows.map(3), TypeError, "Rows.map: function must be a function of a tensor, got int"),
        (lambda rows: rows["a"], TypeError, "indexed by their leading dimensions"),
        (lambda rows: rows.reshape(None), ValueError, "the last size must stay N = 3"),
        (lambda rows: rowsparse.cat(3), TypeError, "rowsparse.cat: rows must be a list of containers, got int"),
        (lambda rows: rowsparse.cat(rows), TypeError, "rowsparse.cat: rows must be a list of containers, got Rows"),
    ],
)
def test_edits_name_what_is_wrong(call: Callable[[Any], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(pack(torch.eye(3)))


def test_gradients_of_some_rows(generator: torch.Generator) -> None:
    """Rows share the buffers of the container they come from; a row that is taken twice has both gradients."""
    x = dense(generator)
    weight = torch.randn(40, 5, device=x.device, generator=generator)
    for key in (slice(1, None), [1, 1, 0]):
        for options in PACKINGS:
            leaf, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
            rows = strategies.pack_as(leaf, **options)[key]
            torch.testing.assert_close(rows @ weight, plain[key] @ weight, rtol=1e-5, atol=1e-5)
            (ours,) = torch.autograd.grad((rows @ weight).square().sum(), leaf)
            (wanted,) = torch.autograd.grad((plain[key] @ weight).square().sum(), plain)
            torch.testing.assert_close(ours, wanted * (x != 0), rtol=1e-4, atol=1e-4)


@EVERY
def test_copies_and_torch(options: dict[str, Any], generator: torch.Generator) -> None:
    x = dense(generator)
    file = io.BytesIO()
    torch.save(strategies.pack_as(x, **options), file)
    file.seek(0)
    for rows in (
        pickle.loads(pickle.dumps(strategies.pack_as(x, **options))),
        copy.deepcopy(strategies.pack_as(x, **options)),
        torch.load(file),
        strategies.pack_as(x, **options).cpu(),
        rowsparse.from_torch_sparse(strategies.pack_as(x, **options).to_torch_sparse(torch.sparse_coo)),
    ):
        assert rows.shape == (2, 3, 40) and torch.equal(rows.to_dense().cpu(), x.cpu())
    both = rowsparse.cat([strategies.pack_as(x, **options), strategies.pack_as(2 * x, **options), pack(x)])
    assert torch.equal(both.to_dense(), torch.cat([x, 2 * x, x]))


@pytest.mark.parametrize("packed", [False, True])
def test_l0_counts_values_that_differ_from_0(packed: bool, device: torch.device, generator: torch.Generator) -> None:
    rows = random_slots((2, 3, 40), 9, packed=packed, device=device, generator=generator, distinct=True)
    assert_exact(rows.l0, (dense64(rows) != 0).sum(-1).double())
    rows = pack(torch.tensor([[1.0, 2.0, 0.0]], device=device)).map(lambda v: torch.where(v > 1, v, 0))
    assert rows.l0.tolist() == [1] and rows.counts.tolist() == [2]


def test_a_changed_source_is_reported(generator: torch.Generator) -> None:
    x = dense(generator)
    rows, whole = pack(x, capacity=4), pack(x, capacity=4).complete()
    before = x.clone()
    x.zero_()
    for use in (
        rows.to_dense,
        rows.complete,
        lambda: matmul(rows, torch.ones(40, 2, device=x.device)),
        lambda: rows[0],
    ):
        with pytest.raises(RuntimeError, match=r"has been changed in\s+place since"):
            use()
    assert torch.equal(whole.to_dense(), before)
    weight = torch.randn(40, 8, device=x.device, generator=generator)
    rows = gemm.linear_pack(torch.ones(2, 8, device=x.device), weight, capacity=1)
    weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"has been changed in\s+place since"):
        rows.to_dense()


def test_a_bandwidth_keeps_its_gradient(generator: torch.Generator) -> None:
    """Entries of value 0 in the window are entries of completed rows too, and move the threshold."""
    x = torch.randn(5, 6, device=generator.device, generator=generator)
    W = torch.randn(6, 30, device=generator.device, generator=generator)
    found = []
    for completes in (False, True):
        threshold = torch.full((30,), 0.5, device=x.device, requires_grad=True)
        rows = sae.encode(x, W, activation=gemm.JumpReLU(threshold, 0.8), capacity=3)
        rows = rows.complete() if completes else rows
        loss = (rows.to_dense() * torch.arange(30.0, device=x.device)).sum()
        found.append(torch.autograd.grad(loss, threshold)[0])
    assert found[0].any()
    torch.testing.assert_close(*found)


def test_compile_refuses_to_wait(compiled: Any) -> None:
    x = torch.ones(2, 9)
    for waits in (
        lambda x: pack(x, capacity=2).values.sum(),
        lambda x: pack(x, capacity=2).complete().to_dense(),
        lambda x: sae.encode(x, x.new_ones(9, 4), capacity="exact"),
    ):
        with pytest.raises(Exception, match=r"waits for the device, which torch.compile cannot trace|torch.compile"):
            compiled(waits)(x)


USES = {
    "rowsparse.Rows.to_dense": lambda rows: rows.to_dense(),
    "rowsparse.matmul": lambda rows: rows @ torch.ones(4, 3).to(rows.device),
    "sae.decode": lambda rows: sae.decode(rows, torch.ones(4, 3).to(rows.device)),
    "slice": lambda rows: rows[0:].to_dense(),
    "integers": lambda rows: rows[[0, 1]].to_dense(),
    "cat": lambda rows: rowsparse.cat([rows, rows[:0]]).to_dense(),
    "map": lambda rows: rows.map(torch.square).where(torch.ones(2, 1, device=rows.device) > 0).ablate([1]).to_dense(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_overflow_without_a_source_is_never_zero(use: Any, device: torch.device, mode: str) -> None:
    """It raises where the host can see it, and is NaN where it cannot."""
    try:
        out = use(strategies.lost(device))
    except ValueError as error:
        assert "more entries than slots, and the container no source" in str(error)
    else:
        assert mode != "cpu" and out.isnan().any(1).tolist() == [False, True]


@pytest.mark.native
def test_an_incomplete_pattern(device: torch.device) -> None:
    rows, weight = strategies.lost(device), torch.ones(4, 8, device=device)
    if device.type == "cpu":
        with pytest.raises(ValueError, match="more entries than slots, and the container no source"):
            rowsparse.sampled_matmul(torch.ones(2, 8), weight, rows)
    else:
        assert rowsparse.sampled_matmul(torch.ones(2, 8, device=device), weight, rows).to_dense().isnan().any()


@pytest.mark.parametrize(
    "use",
    [
        lambda rows: rowsparse.transpose(rows).to_dense(),
        lambda rows: sae.count_fired(rows),
        lambda rows: smallest(rows),
        lambda rows: sae.tanh_l0(rows, torch.ones(4, device=rows.device)),
    ],
    ids=["transpose", "count_fired", "smallest", "tanh_l0"],
)
def test_nothing_is_counted_where_entries_are_missing(
    use: Any, device: torch.device, mode: str, request: pytest.FixtureRequest
) -> None:
    rows = strategies.lost(device)
    # The public function looks for itself where only indices reach a kernel, or nothing does.
    if mode == "cpu" or (device.type == "cpu" and request.node.callspec.id in ("transpose", "smallest")):
        with pytest.raises(ValueError, match="more entries than slots, and the container no source"):
            use(rows)
        return
    got = use(rows)
    wrong = got < -(1 << 39) if got.dtype is torch.int64 else got.isnan()
    assert wrong.all() if wrong.dim() != 1 or got.dtype is torch.int64 else wrong.tolist() == [False, True]


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """No container may be completed, nor looked at."""

    def complete(*_: Any) -> None:
        raise AssertionError("a hot path has waited for a container")

    monkeypatch.setattr("gossamer.rowsparse.entries.completed", complete)
    monkeypatch.setattr(Rows, "_whole", complete)


@pytest.mark.usefixtures("waiting")
def test_operators_wait_for_nothing(device: torch.device, generator: torch.Generator) -> None:
    x, weight = dense(generator), torch.randn(40, 8, device=device, generator=generator, requires_grad=True)
    with pytest.raises(AssertionError, match="a hot path has waited"):
        pack(x, capacity=4).values  # noqa: B018
    for options in PACKINGS:
        rows = strategies.pack_as(x, **options)
        (rows @ weight).sum().backward()
        rows[0].reshape(-1, 40).clone().to_dense()
        rowsparse.transpose(rows).to_dense()
        rowsparse.sampled_matmul(torch.randn(2, 3, 8, device=device, generator=generator), weight, rows).to_dense()
        torch.utils._pytree.tree_map(lambda tensor: tensor, rows).to_dense()
    rows = gemm.linear_pack(torch.randn(6, 8, device=device, generator=generator), weight)
    rows.detach().to(torch.float16).to_dense()


@pytest.mark.native
@pytest.mark.usefixtures("waiting")
def test_autoencoders_wait_for_nothing(device: torch.device, generator: torch.Generator) -> None:
    x = torch.randn(6, 8, device=device, generator=generator)
    for kind in (nn.TopKSAE, nn.BatchTopKSAE, nn.JumpReLUSAE):
        options = {"capacity": 2} if kind is nn.JumpReLUSAE else {"k": 3}
        model = kind(8, 40, device=device, **options)
        model.density.pinned = "sparse"
        for _ in range(2):
            model.loss(x).loss.backward()
        model.eval()(x)
