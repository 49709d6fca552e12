"""The keys that a group of neighbouring queries takes, listed, with the bits of the queries that take it beside each.

A group is PARTS blocks of 64 queries. Its list is one buffer of 1 + 2 * PARTS rows of int32: the keys, ascending, and
below each the bits of the group's queries, 32 a row, in which keys behind a query and queries behind their sequence
(with `causal`), and keys from a length on are cleared. A kernel that gathers by the list therefore needs no other rule
than the bits, and reads them side by side.

One program walks the words of a group, BLOCK keys at a time, and carries how many it has listed. A list has as many
slots as there are visible keys, so that it cannot overflow. Where groups are few, the keys are cut into segments, each
with a program, a list and a count of its own: `slots_of` finds the entries of the whole list.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch
from gossamer.attention._triton._indexer import valid_keys
from gossamer.attention.records import QUERIES

SEGMENT_TILE = 1024
"""Keys of a segment that a program looks at together."""


@triton.jit
def seen(word, key, first, end, LAST: tl.constexpr):
    """word, whose bit 0 is the query that stands at key `first`, without the bits of queries that stand before the key,
    or behind the sequence's keys, of which there are `end`. LAST is the last bit."""
    before, after = key - first, end - first
    kept = word & (tl.full(word.shape, -1, word.dtype) << tl.minimum(tl.maximum(before, 0), LAST).to(word.dtype))
    kept = tl.where(before > LAST, 0, kept)
    least = tl.minimum(tl.maximum(after, 0), LAST).to(word.dtype)
    return kept & tl.where(after > LAST, -1, ~(tl.full(least.shape, -1, word.dtype) << least))


@triton.jit
def positions(lengths_ptr, batch, Tq, Tk):
    """(how many keys a sequence has; the key beside which its first query stands, below 0 where that is in front of
    all keys). The last query stands beside the last key; a length moves none in front of the first key."""
    length = valid_keys(lengths_ptr, batch, Tk)
    return length, tl.maximum(length - Tq, tl.minimum(Tk - Tq, 0))


@triton.jit
def slots_of(slot, starts, each):
    """Where the entries of a group's whole list lie, if a segment has room for `each` and they begin at `starts`."""
    begun = starts[None, :] <= slot[:, None]
    segment = tl.sum(begun.to(tl.int32), axis=1) - 1
    return segment * each + slot - tl.max(tl.where(begun, starts[None, :], 0), axis=1)


@launch.kernel(do_not_specialize=["N", "first"])
def _key_lists_kernel(
    words_ptr, lengths_ptr, lists_ptr, counts_ptr, N, Tq, Tk, first, each, SCOPES: tl.constexpr, CAUSAL: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (batch and scope, group from `first` on, segment of `each` keys)."""
    scope, group, segment = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    part = (first + group) * PARTS + tl.arange(0, PARTS)
    out = group.to(tl.int64) * tl.num_programs(0) + scope
    capacity = tl.num_programs(2) * each
    words_ptr += (scope.to(tl.int64) * N + part)[:, None] * Tk
    lists_ptr += out * (1 + 2 * PARTS) * capacity + segment * each
    # Query i stands at key i + offset.
    length, offset = positions(lengths_ptr, scope // SCOPES, Tq, Tk)
    end = tl.minimum(length, (segment + 1) * each)
    if CAUSAL:
        end = tl.minimum(end, (first + group + 1) * (64 * PARTS) + offset)
    found = 0
    for start in tl.range(segment * each, end, BLOCK, num_stages=2):
        key = start + tl.arange(0, BLOCK)
        word = tl.load(words_ptr + key[None, :], mask=(part < N)[:, None] & (key < end)[None, :], other=0)
        if CAUSAL:
            word = seen(word, key[None, :], (part * 64 + offset)[:, None], length, 63)
        taken = tl.max((word != 0).to(tl.int32), axis=0)
        slot = found + tl.cumsum(taken, axis=0) - taken
        tl.store(lists_ptr + slot, key, mask=taken != 0)
        at = lists_ptr + slot[None, :] + ((1 + 2 * tl.arange(0, PARTS)) * capacity)[:, None]
        tl.store(at, word.to(tl.int32), mask=(taken != 0)[None, :])
        tl.store(at + capacity, (word >> 32).to(tl.int32), mask=(taken != 0)[None, :])
        found += tl.sum(taken, axis=0)
    tl.store(counts_ptr + out * tl.num_programs(2) + segment, found)


@triton.jit
def await_entry(plan_ptr, flag_ptr, entry):
    """Returns when all tiles of an entry of the plan are done; there is nothing to wait for before the first."""
    if entry >= 0:
        tiles = tl.load(plan_ptr + 2 + entry) - tl.load(plan_ptr + 1 + entry)
        while tl.atomic_add(flag_ptr, 0, sem="acquire") < tiles:
            pass


def keys_of_tile(parts: int) -> int:
    """Keys that a program looks at together: as many as registers hold, of whose words there are `parts` a key."""
    return 4096 if parts <= 2 else 4096 // parts


def key_lists(
    words: Tensor,
    lengths: Tensor | None,
    num_queries: int,
    causal: bool,
    parts: int,
    first: int = 0,
    most: int = 0,
    segments: int = 1,
) -> tuple[Tensor, Tensor]:
    """(lists int32 [groups, B * S, 1 + 2 * parts, capacity], counts int32 [groups, B * S, segments]) of groups from
    `first` on.

    `most` bounds the groups, 0 does not. A segment has capacity / segments slots.
    """
    b, s, n, tk = words.shape
    groups = launch.cdiv(n, parts) - first
    groups = min(groups, most) if most else groups
    # Keys that any of the queries may see, in whole cache lines; with lengths no query stands further back.
    seen = min(tk, (first + groups) * parts * QUERIES + tk - num_queries) if causal else tk
    each = launch.cdiv(max(seen, 1), 32 * segments) * 32
    lists = torch.empty(groups, b * s, 1 + 2 * parts, segments * each, dtype=torch.int32, device=words.device)
    counts = torch.empty(groups, b * s, segments, dtype=torch.int32, device=words.device)
    block, warps = (keys_of_tile(parts), 8) if segments == 1 else (SEGMENT_TILE, 4)
    meta = {"SCOPES": s, "CAUSAL": causal, "PARTS": parts, "BLOCK": block}
    args = (words, lengths, lists, counts, n, num_queries, tk, first, each)
    _key_lists_kernel((b * s, groups, segments), args, meta, num_warps=warps)
    return lists, counts


def plan_of(listed: Tensor, keys: int, serves: int) -> Tensor:
    """The plan of tiles of `keys` of the keys in lists, of which so many are `listed`: int32, a ticket, the offsets of
    the lists' tiles, and how many tiles of each list are done, for each of `serves` items of work on a tile."""
    entries = listed.numel()
    plan = torch.zeros(2 + entries * (1 + serves), dtype=torch.int32, device=listed.device)
    tiles = (listed.view(-1) + (keys - 1)) // keys
    torch.cumsum(tiles, 0, dtype=torch.int32, out=plan[2 : 2 + entries])
    return plan


EXAMPLES = {
    _key_lists_kernel: {"SCOPES": 1, "CAUSAL": True, "PARTS": 2, "BLOCK": keys_of_tile(2), "num_warps": 8},
}
