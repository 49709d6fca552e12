"""Long rows whose highest keys are found among listed ones, against a stable sort and the way that stores all keys."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer._core import tuning
from gossamer.attention import Selection, select_topk
from gossamer.attention.levels import GROWTH
from tests.attention.indexer import inputs
from tests.graphs import captured

candidates = pytest.importorskip("gossamer.attention._triton.candidates")
T = 36000


def listed(keys: Tensor, bound: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """Entries and counts as Hopper's kernel lists them, the former in any order; a list that is full has `slots`."""
    rows = len(keys)
    entries = torch.full((rows, candidates.LISTS, slots), 7, dtype=torch.int32)
    counts = torch.zeros(rows, candidates.LISTS, dtype=torch.int32)
    for row in range(rows):
        for column in (keys[row] >= bound[row]).nonzero().squeeze(1).flip(0).tolist():
            at = column // 64 % candidates.PARTS * 4 + column % 8 // 2
            if counts[row, at] < slots:
                entry = int(keys[row, column]) << 17 | (1 << 17) - 1 - column
                entries[row, at, counts[row, at]] = entry - (1 << 31)
                counts[row, at] += 1
    return entries, counts


@pytest.mark.kernels
@pytest.mark.parametrize("k, levels", [(1, 31744), (17, 31744), (17, 40)])
def test_the_highest_of_those_listed(k: int, levels: int, device: torch.device, generator: torch.Generator) -> None:
    """Rows that see 473 columns, to 600; one has too few entries, and one a list that is full."""
    rows, columns, slots = 128, 600, candidates.lists_of(k).slots
    keys = torch.randint(1, levels + 1, (rows, columns), generator=generator, device=device).cpu()
    visible = torch.arange(rows) + columns - rows + 1
    keys[torch.arange(columns) >= visible[:, None]] = 0
    bound = keys.sort(descending=True).values[:, min(3 * k + 5, 100)].clamp(min=1)
    entries, counts = listed(keys, bound, slots)
    counts[70, 5] = slots
    full = counts.amax(1) >= slots
    short = torch.zeros(rows, dtype=torch.bool)
    short[3] = True
    counts[3] = 0
    found = [torch.full((rows,), value, dtype=torch.int32, device=device) for value in (0, 9, 9)]
    found[0].copy_(bound)
    flags = torch.zeros(2, dtype=torch.int32, device=device)
    words = torch.zeros(1, 1, 2, columns, dtype=torch.int64, device=device)
    sizes = (0, rows, rows, columns, 1)
    lists = (entries.to(device), counts.to(device))
    candidates.launch_candidates(lists, (*found, flags), words, None, rows, sizes, k)
    assert flags.tolist() == (full | short).view(2, 64).any(1).int().tolist()
    assert (found[1] == 1).all() and (found[2] == -1).all()
    best = keys.sort(descending=True, stable=True).indices[:, :k]
    want = torch.zeros(rows, columns, dtype=torch.bool).scatter_(1, best, True)
    settled = ~(full | short)
    taken = (words[0, 0].cpu()[:, None] >> torch.arange(64)[:, None] & 1).view(rows, columns).bool()
    assert torch.equal(taken[settled], want[settled]) and not taken[~settled].any()


def test_pieces_hold_every_row_once() -> None:
    slabs = [(128, 512, 1), (640, 384, 1), (1152, 640, 1), (1792, 256, 1)]
    for most in (64, 192, 4096):
        found = candidates.cut(slabs, most)
        assert all(rows <= most and rows % 64 == first % 64 == 0 for first, rows in found)
        inside = [row for first, rows in found for row in range(first, first + rows)]
        assert inside == [*range(128, 1024), *range(1152, 2048)]
    # Rows of many batch elements that follow each other.
    assert candidates.cut([(64 * i, 64, 1) for i in range(32)], 4096) == [(0, 2048)]
    assert candidates.cut([(0, 2048, 1), (2048, 1024, 1)], 2048) == [(0, 1536), (1536, 1536)]


def test_lists_have_room_for_twice_what_is_expected() -> None:
    for k in (1, 64, 512, 2048, 4096):
        reach, slots = candidates.lists_of(k)
        assert reach * candidates.STRETCH > k
        assert candidates.LISTS * (slots - candidates.CLUSTER + 1) > 2 * reach * candidates.STRETCH
        assert slots > 2 * GROWTH
        # A list lies within memory whose addresses have their upper halves in common.
        assert candidates.ALIGNED % (4 * slots) == 0
        assert candidates.fits(k, 4096, T)
    assert not candidates.fits(8192, 4096, T)
    assert not candidates.fits(64, 4096, 32768) and not candidates.fits(64, 4096, (1 << 17) + 1)
    assert not candidates.fits(64, 1024, T)


class Scores:
    """In the place of Hopper's kernel: keys of whole numbers, so that no order of sums shows, stored or listed as it
    does."""

    def launch_index_keys(self, tiles, given, rows, sizes, scale, activation, sparing) -> None:
        (q, k), (_, _, lengths, out), (first, tq, padded, tk, stride, ahead) = tiles, given, sizes
        unit, listing = sparing.unit, sparing.bound is not None
        window, sinks = sparing.kept
        for row in range(rows):
            b, t = (first + row) // padded, (first + row) % padded
            if sparing.flags is not None and not sparing.flags[(first + row) // 64]:
                continue
            length = tk if lengths is None else int(lengths[b])
            seen = -(-min(t + max(length - tq, 0) + ahead, length) // unit) if t < tq else 0
            keys = (q[b, :, min(t, tq - 1)] @ k[b].mT).sum(0).long().clamp(0, 31742) + 1
            keys = keys.where(torch.arange(len(keys), device=keys.device) < seen, 0)
            if not listing:
                # As far as a tile reaches.
                out.view(rows, stride)[row] = torch.nn.functional.pad(keys, (0, stride - len(keys))).to(torch.int16)
                continue
            keys[: min(sinks, seen)] = keys[max(seen - window, 0) : seen] = 31744
            entries, counts = listed(
                keys[None].cpu(), sparing.bound[first + row, None].cpu(), stride // candidates.LISTS
            )
            out.view(rows, candidates.LISTS, -1)[row] = entries[0].to(out.device)
            counts = counts[0].where(counts[0] <= stride // candidates.LISTS - GROWTH, stride // candidates.LISTS)
            sparing.counts.view(rows, candidates.LISTS)[row] = counts.to(out.device)


@pytest.mark.kernels
def test_all_of_it_beside_all_keys(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds, lists, words and what is counted again, where rows of more than 256 keys are long: of two elements, one
    with the same key almost everywhere."""
    from gossamer.attention._gluon import select_topk as hopper
    from gossamer.attention._triton import select_topk as gpu

    for name, value in (("LEAST", 256), ("PARTS", 2), ("LISTS", 8), ("fits", lambda *_: True)):
        monkeypatch.setattr(candidates, name, value)
    monkeypatch.setattr(gpu, "choose_scores", lambda *_: "hopper")
    monkeypatch.setattr(hopper, "descriptors", lambda *tiles: tiles)
    monkeypatch.setattr(hopper, "launch_index_keys", Scores().launch_index_keys)
    pieces: list[Any] = []
    cut = candidates.cut
    monkeypatch.setattr(candidates, "cut", lambda *a: pieces.append(cut(*a)) or pieces[-1])
    generator = torch.Generator(device).manual_seed(0)
    tk = 1100
    q, k = (
        torch.randint(0, 12, shape, device=device, generator=generator).float()
        for shape in ((2, 1, 18, 16), (2, tk, 16))
    )
    k[0, 100:] = k[0, 100]
    w, lengths = torch.zeros(2, 18, 1, device=device), torch.tensor([tk, 700], device=device)
    options = {"k": 24, "window": 9, "sinks": 3, "lengths": lengths, "workspace": 1 << 19}
    assert both([q, k, w, None], monkeypatch, **options)[1] == 0.5
    assert pieces[-1] == [(0, 64), (64, 64)]


def both(given: list[Any], monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Selection, float]:
    """A selection, which is the same as by all keys; and the share of blocks that were counted again."""
    from gossamer.attention._triton import select_topk as gpu

    marks = []
    take = gpu._Call.take_candidates
    with monkeypatch.context() as patch:
        patch.setattr(gpu._Call, "take_candidates", lambda *a: marks.append(take(*a)) or marks[-1])
        found = select_topk(*given, **{"causal": True, **options})
        patch.setattr(gpu, "choose_keys", lambda *_: "all")
        want = select_topk(*given, **{"causal": True, **options})
    # A first call runs twice, to compile its kernels together.
    assert marks
    assert torch.equal(found.words, want.words)
    return found, float(marks[-1].float().mean())


def hopper(device: torch.device) -> None:
    if not tuning.hopper(device):
        pytest.skip("needs a Hopper GPU")


USUAL: list[dict[str, Any]] = [
    {"k": 2048},
    {"k": 1},
    {"k": 4096},
    {"k": 700, "causal": False},
    {"k": 2048, "workspace": 24 << 20},
    {"k": 512, "window": 300, "sinks": 5},
    {"k": 512, "window": 508, "sinks": 4, "lengths": [T - 1, 100]},
]


@pytest.mark.gpu
@pytest.mark.parametrize("options", USUAL, ids=str)
def test_the_same_as_by_all_keys(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    hopper(device)
    lengths = options.get("lengths")
    b, tq = (2, T) if lengths else (1, 3001 if options["k"] == 700 else T)
    given = inputs((b, 4, tq, T, 64), torch.bfloat16, device)
    lengths = None if lengths is None else torch.tensor(lengths, device=device)
    _, marked = both(list(given), monkeypatch, **{**options, "lengths": lengths})
    assert marked == 0


@pytest.mark.gpu
def test_two_heads_of_128(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    hopper(device)
    assert both(list(inputs((1, 2, 4096, 131072, 128), torch.float16, device)), monkeypatch, k=2048)[1] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("count, marked", [(7680, 0), (8192, 1)])
def test_a_list_ends_where_a_tile_may_not_fit(
    count: int, marked: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Of 256 slots 240 are taken, or all."""
    hopper(device)
    assert candidates.lists_of(2000).slots == 256
    given = list(inputs((1, 4, 2500, T, 64), torch.bfloat16, device))
    given[1][:, 10240 : 10240 + count] = float("nan")
    assert both(given, monkeypatch, k=2000)[1] == marked


@pytest.mark.gpu
@pytest.mark.parametrize("kept", [{}, {"window": 300, "sinks": 5}], ids=["", "window and sinks"])
@pytest.mark.parametrize("what", ["ties", "one place of four", "NaN", "equal"])
def test_what_lists_do_not_settle_is_counted_again(
    what: str, kept: dict[str, int], monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    hopper(device)
    q, k, w, bias = inputs((1, 4, 2500, T, 64), torch.bfloat16, device)
    if what == "ties":
        k = k[:, :8].repeat(1, T // 8, 1)
    elif what == "one place of four":
        k = k * (torch.arange(T, device=device) // 2 % 4 == 0)[:, None]
    elif what == "NaN":
        k[:, 10000:30000] = float("nan")
    else:
        q = torch.zeros_like(q)
    assert both([q, k, w, bias], monkeypatch, k=2000, **kept)[1] > 0.2


@pytest.mark.gpu
def test_a_graph_counts_again_what_it_must(device: torch.device) -> None:
    hopper(device)
    given = inputs((1, 4, 2500, T, 64), torch.bfloat16, device)
    graph, out = captured(lambda: select_topk(*given, k=500, causal=True))
    for keys in (torch.randn_like(given[1]), given[1][:, :3].repeat(1, T // 3, 1)):
        given[1].copy_(keys)
        out.words.fill_(-1)
        graph.replay()
        assert torch.equal(out.words, select_topk(*given, k=500, causal=True).words)


@pytest.mark.gpu
def test_memory_stays_within_the_workspace(device: torch.device) -> None:
    hopper(device)
    given = inputs((1, 4, 8192, 131072, 64), torch.bfloat16, device)
    workspace = 64 << 20
    select_topk(*given, k=2048, workspace=workspace, causal=True)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    out = select_topk(*given, k=2048, workspace=workspace, causal=True)
    kept = out.words.numel() * out.words.element_size()
    # Beside it a sample of k, thresholds and marks.
    assert torch.cuda.max_memory_allocated(device) - before <= kept + workspace + (3 << 20)


@pytest.mark.gpu
def test_many_short_elements(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Pieces go across batch elements."""
    hopper(device)
    given = list(inputs((40, 4, 60, T, 64), torch.bfloat16, device))
    lengths = torch.randint(0, T + 1, (40,), device=device)
    lengths[:3] = torch.tensor([0, 59, T])
    both(given, monkeypatch, k=300, lengths=lengths)
