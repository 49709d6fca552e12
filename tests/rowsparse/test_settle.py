"""Looking at entries settles them: what is edited, replaced, sliced or differentiated concerns every entry."""

import copy
import importlib
import io
import pickle
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer import gemm, nn, rowsparse, sae
from gossamer.rowsparse import CSR, ELL, TwELL, matmul, pack
from gossamer.sae.smallest import smallest
from gossamer.testing import dense64, random_rows

COUNTS = [0, 3, 20, 7, 1, 40]
PACKINGS: list[dict[str, Any]] = [
    {"capacity": 4},
    {"capacity": 40},
    {"format": "csr", "max_nnz": 25},
    {"format": "csr"},
    {"format": "twell", "tile": 8, "slots": 2},
]
EVERY = pytest.mark.parametrize("options", PACKINGS, ids=str)


def dense(generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """Six rows, of which some overflow, in two leading dimensions."""
    return random_rows((2, 3, 40), l0=COUNTS, dtype=dtype, device=generator.device, generator=generator, integers=True)


@EVERY
def test_looking_shows_every_entry(options: dict[str, Any], generator: torch.Generator) -> None:
    x = dense(generator)
    for look in (lambda r: r.values, lambda r: r.indices, lambda r: r.nnz_per_row, lambda r: r.settle()):
        rows = pack(x, **options)
        look(rows)
        assert rows.source is None and not rows.overflowed and rows.validate() is rows
        assert rows.nnz_per_row.tolist() == COUNTS
        assert torch.equal(rows.to_dense(), x)


@EVERY
def test_edits_concern_every_entry(options: dict[str, Any], generator: torch.Generator) -> None:
    x, weight = dense(generator), torch.eye(40, device=generator.device)
    rows = pack(x, **options)
    rows.values.mul_(2)
    assert torch.equal(matmul(rows, weight), 2 * x)
    rows = pack(x, **options)
    assert torch.equal(replace(rows, values=3 * rows.values).to_dense(), 3 * x)
    wanted = x.clone()
    wanted[..., [2, 5]] = 0
    assert torch.equal(pack(x, **options).ablate([2, 5]).to_dense(), wanted)
    mask = torch.rand(3, 1, device=x.device) < 0.5
    assert torch.equal(pack(x, **options).where(mask).to_dense(), torch.where(mask, x, 0))
    assert torch.equal(pack(x, **options).map(torch.square).to_dense(), x.square())


def test_a_latent_is_ablated_by_its_index(generator: torch.Generator) -> None:
    x = dense(generator)
    rows = pack(x, capacity=4)
    rows.values[rows.indices == 7] = 0
    wanted = x.clone()
    wanted[..., 7] = 0
    assert torch.equal(rows.to_dense(), wanted)


@EVERY
def test_gradients_reach_every_entry(options: dict[str, Any], generator: torch.Generator) -> None:
    x, weight = dense(generator), torch.randn(40, 5, device=generator.device, generator=generator)
    leaf = x.clone().requires_grad_()
    rows = pack(leaf, **options)
    # Whoever looks first may have gradients off.
    with torch.no_grad():
        rows.settle()
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
        rows = pack(x, **options)
        picked = rows[key]
        assert torch.equal(picked.to_dense(), x[(*key, slice(None)) if isinstance(key, tuple) else key]), key
        assert torch.equal(dense64(picked.settle()), x[(*key, slice(None)) if isinstance(key, tuple) else key].double())
    assert torch.equal(pack(x, **options)[:, [2, 0, 2]].to_dense(), x[:, [2, 0, 2]])
    rows = pack(x, **options).reshape(-1, 40)
    assert rows.shape == (6, 40) and torch.equal(rows.to_dense(), x.view(6, 40))
    assert torch.equal(pack(x, **options).clone().to_dense(), x)
    with pytest.raises(IndexError, match="indexed by their leading dimensions"):
        rows[0, 0]
    with pytest.raises(ValueError, match="the last size must stay N = 40"):
        rows.reshape(40, 6)


def test_rows_of_a_csr_that_overflowed_are_valid(device: torch.device) -> None:
    """Their offsets end behind the buffer, further than a row has columns."""
    rows = pack(torch.ones(4, 6, device=device), format="csr", max_nnz=20)[2:]
    assert rows.validate().overflowed and torch.equal(rows.to_dense(), torch.ones(2, 6, device=device))


@EVERY
def test_copies_and_torch(options: dict[str, Any], generator: torch.Generator) -> None:
    x = dense(generator)
    file = io.BytesIO()
    torch.save(pack(x, **options), file)
    file.seek(0)
    for rows in (
        pickle.loads(pickle.dumps(pack(x, **options))),
        copy.deepcopy(pack(x, **options)),
        torch.load(file),
        pack(x, **options).cpu(),
        rowsparse.from_torch_sparse(pack(x, **options).to_torch_sparse(torch.sparse_coo)),
    ):
        assert rows.shape == (2, 3, 40) and torch.equal(rows.to_dense().cpu(), x.cpu())
    assert torch.equal(pack(x, **options).to_torch_sparse().to_dense(), x.view(6, 40))
    both = rowsparse.cat([pack(x, **options), pack(2 * x, **options)])
    assert torch.equal(both.to_dense(), torch.cat([x, 2 * x]))


def test_what_has_changed_since_is_said(generator: torch.Generator) -> None:
    x = dense(generator)
    rows, settled = pack(x, capacity=4), pack(x, capacity=4).settle()
    before = x.clone()
    x.zero_()
    for use in (rows.to_dense, rows.settle, lambda: matmul(rows, torch.ones(40, 2, device=x.device)), lambda: rows[0]):
        with pytest.raises(RuntimeError, match="has been changed in place since"):
            use()
    assert torch.equal(settled.to_dense(), before)
    weight = torch.randn(40, 8, device=x.device, generator=generator)
    rows, _ = gemm.linear_pack(torch.ones(2, 8, device=x.device), weight, tile=8, slots=1)
    weight.mul_(2)
    with pytest.raises(RuntimeError, match="has been changed in place since"):
        rows.to_dense()


def test_a_bandwidth_keeps_its_gradient(generator: torch.Generator) -> None:
    """Entries of value 0 in the window are entries of settled rows too, and move the threshold."""
    x = torch.randn(5, 6, device=generator.device, generator=generator)
    W = torch.randn(6, 30, device=generator.device, generator=generator)
    found = []
    for settles in (False, True):
        threshold = torch.full((30,), 0.5, device=x.device, requires_grad=True)
        rows = sae.encode(x, W, activation=gemm.JumpReLU(threshold, 0.8), capacity=3)
        rows = rows.settle() if settles else rows
        loss = (rows.to_dense() * torch.arange(30.0, device=x.device)).sum()
        found.append(torch.autograd.grad(loss, threshold)[0])
    assert found[0].any()
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("make", [ELL, CSR, TwELL])
def test_frozen(make: Any) -> None:
    rows = pack(torch.eye(3), format=make.__name__.lower())
    with pytest.raises(FrozenInstanceError):
        rows.values = torch.ones(1)


def test_compile_refuses_to_look(compiled: Any) -> None:
    x = torch.ones(2, 9)
    with pytest.raises(Exception, match=r"torch.compile"):
        compiled(lambda x: pack(x, capacity=2).values.sum())(x)
    for waits in (lambda x: rowsparse.convert(pack(x), "csr"), lambda x: sae.encode(x, x.new_ones(9, 4), format="csr")):
        with pytest.raises(Exception, match=r"waits for the device, which torch.compile cannot trace"):
            compiled(waits)(x)


@pytest.mark.parametrize(
    "rows, message",
    [
        (ELL(torch.ones(1, 2), torch.tensor([[3, 1]]).int(), torch.tensor([2]).int(), (1, 4)), "must ascend"),
        (CSR(torch.tensor([0, 1, 3]), torch.tensor([3, 2, 0]).int(), torch.ones(3), (2, 4)), "must ascend"),
        (ELL(torch.ones(1, 1), torch.zeros(1, 1).int(), torch.tensor([9]).int(), (1, 4), torch.ones(1, 4)), "at most"),
    ],
)
def test_validate_finds_more(rows: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rows.validate()


@pytest.mark.parametrize(
    "operator, use",
    [
        ("rowsparse.unpack", lambda rows: rows.to_dense()),
        ("rowsparse.matmul", lambda rows: rows @ torch.ones(4, 3).to(rows.device)),
        ("sae.decode", lambda rows: sae.decode(rows, torch.ones(4, 3).to(rows.device))),
        ("sae.decode", lambda rows: sae.decode(rows, torch.ones(4, 3).to(rows.device), method="exact")),
    ],
)
def test_overflow_without_a_source_is_never_zero(operator: str, use: Any, device: torch.device, mode: str) -> None:
    """It raises where the host can see it, and is NaN where it cannot."""
    counts = torch.tensor([1, 3], device=device).int()
    rows = ELL(torch.ones(2, 1, device=device), torch.zeros(2, 1, device=device).int(), counts, (2, 4))
    if mode == "cpu":
        with pytest.raises(ValueError, match=f"^{operator}: a row has more entries than slots, and the container no"):
            use(rows)
    else:
        assert use(rows).isnan().any(1).tolist() == [False, True]


def without_a_source(options: dict[str, Any], device: torch.device) -> Any:
    """Rows that have lost entries: a promise broken."""
    rows = pack(torch.ones(4, 32, device=device), **options)
    values, indices, counts, _ = rows.packed
    return rows.rebuilt(values, indices, counts, None)


@pytest.mark.parametrize("options", [PACKINGS[0], PACKINGS[2], PACKINGS[4]], ids=str)
@pytest.mark.parametrize(
    "use",
    [
        lambda rows, whole: rowsparse.cat([rows, whole]).to_dense()[:4],
        lambda rows, whole: rowsparse.cat([whole, rows]).to_dense()[4:],
        lambda rows, whole: rows[[3, 1, 2]].to_dense(),
        lambda rows, whole: rows[1:].to_dense(),
        lambda rows, whole: rows.map(torch.square).where(torch.ones(4, 1, device=rows.device) > 0).to_dense(),
    ],
    ids=["cat first", "cat last", "integers", "slice", "map"],
)
def test_edits_lose_nothing_unsaid(use: Any, options: dict[str, Any], device: torch.device, mode: str) -> None:
    rows = without_a_source(options, device)
    wide = {"ell": {"capacity": 32}, "csr": {}, "twell": {"slots": 8}}[options.get("format", "ell")]
    whole = pack(torch.ones(4, 32, device=device), **{**options, **wide})
    try:
        got = use(rows, whole)
    except ValueError as error:
        assert "more entries than slots, and the container no source" in str(error)
    else:
        assert mode != "cpu" and got.isnan().any()


@pytest.mark.parametrize("options", [PACKINGS[0], PACKINGS[2], PACKINGS[4]], ids=str)
@pytest.mark.parametrize(
    "use",
    [
        lambda rows: rows.map(torch.square),
        lambda rows: rows.where(torch.ones(4, 1, device=rows.device) > 0),
        lambda rows: rows.ablate([1]),
    ],
    ids=["map", "where", "ablate"],
)
def test_what_is_missing_is_not_shown_as_zeros(use: Any, options: dict[str, Any], device: torch.device) -> None:
    rows = without_a_source(options, device)
    if device.type == "cpu":
        with pytest.raises(ValueError, match="more entries than slots, and the container no source"):
            use(rows)
    else:
        assert use(rows).values.isnan().any()


@pytest.mark.native
@pytest.mark.parametrize("options", [PACKINGS[0], PACKINGS[2], PACKINGS[4]], ids=str)
def test_a_pattern_that_is_incomplete(options: dict[str, Any], device: torch.device) -> None:
    rows, weight = without_a_source(options, device), torch.ones(32, 8, device=device)
    if device.type == "cpu":
        with pytest.raises(ValueError, match="more entries than slots, and the container no source"):
            rowsparse.sampled_matmul(torch.ones(4, 8), weight, rows)
    else:
        assert rowsparse.sampled_matmul(torch.ones(4, 8, device=device), weight, rows).to_dense().isnan().any()


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
    counts = torch.tensor([1, 3], device=device).int()
    rows = ELL(torch.ones(2, 1, device=device), torch.zeros(2, 1, device=device).int(), counts, (2, 4))
    # The public function looks for itself where only indices reach the kernel.
    if mode == "cpu" or (device.type == "cpu" and "transpose" in request.node.name):
        with pytest.raises(ValueError, match="more entries than slots, and the container no source"):
            use(rows)
        return
    got = use(rows)
    wrong = got < -(1 << 39) if got.dtype is torch.int64 else got.isnan()
    assert wrong.all() if wrong.dim() != 1 or got.dtype is torch.int64 else wrong.tolist() == [False, True]


@pytest.fixture
def unsettled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may settle."""

    def settled(rows: Any) -> None:
        raise AssertionError("a hot path has settled a container")

    monkeypatch.setattr(importlib.import_module("gossamer.rowsparse.settle"), "settled", settled)


@pytest.mark.usefixtures("unsettled")
def test_operators_settle_nothing(device: torch.device, generator: torch.Generator) -> None:
    x, weight = dense(generator), torch.randn(40, 8, device=device, generator=generator, requires_grad=True)
    with pytest.raises(AssertionError, match="a hot path has settled"):
        pack(x, capacity=4).values  # noqa: B018
    for options in PACKINGS:
        rows = pack(x, **options)
        (rows @ weight).sum().backward()
        rows[0].reshape(-1, 40).clone().to_dense()
        rowsparse.transpose(rows).to_dense()
        rowsparse.sampled_matmul(torch.randn(2, 3, 8, device=device, generator=generator), weight, rows).to_dense()
        torch.utils._pytree.tree_map(lambda tensor: tensor, rows).to_dense()
    rows, _ = gemm.linear_pack(torch.randn(6, 8, device=device, generator=generator), weight)
    rows.detach().to(torch.float16).to_dense()


@pytest.mark.native
@pytest.mark.usefixtures("unsettled")
def test_autoencoders_settle_nothing(device: torch.device, generator: torch.Generator) -> None:
    x = torch.randn(6, 8, device=device, generator=generator)
    for kind in (nn.TopKSAE, nn.BatchTopKSAE, nn.JumpReLUSAE):
        options = {"capacity": 2} if kind is nn.JumpReLUSAE else {"k": 3}
        model = kind(8, 40, device=device, **options)
        model.density.pinned = "sparse"
        for _ in range(2):
            model.loss(x).loss.backward()
        model.eval()(x)
        model.decode(model.encode(x))
