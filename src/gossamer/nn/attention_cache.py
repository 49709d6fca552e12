"""The cache of a sequence in decoding: keys, values, and the keys that an indexer scores."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer._core import checks

_STEP = 256
"""How far apart the lengths are that a cache is read to, so that shapes, and with them launches, seldom change."""


class AttentionCache:
    """Keys, values and index keys of the sequences of one `GatedSparseAttention`, in one piece or in pages.

    `GatedSparseAttention.cache` makes one; the tensors may as well be an allocator's of your own. Sequences may differ
    in length. Nothing here makes the host wait for the device.

    Args:
        k, v: `[B, G, C, D]` with room for C tokens, or with page_table `[P, page_size, G, D]`, pools of pages.
        k_idx: `[B, C, d]`, or `[P, page_size, d]`.
        page_table: int64 `[B, n]`, the pages of each sequence in order, so that C = n * page_size; None for one piece.
            Where one sequence of a batch is shorter than another, its pages are written as far as the longest's.

    Attributes:
        lengths: int64 `[B]` on the device, how many tokens each sequence has.
        longest: at most as many tokens has any of them, known to the host.

    Raises:
        ValueError: shapes do not fit, or page_size is no power of two.

    >>> AttentionCache(torch.zeros(2, 1, 10, 8), torch.zeros(2, 1, 10, 8), torch.zeros(2, 10, 4)).capacity
    10
    """

    def __init__(self, k: Tensor, v: Tensor, k_idx: Tensor, page_table: Tensor | None = None) -> None:
        if k.dim() != 4 or k_idx.dim() != 3:
            raise ValueError(
                f"{OPERATOR}: k must have shape [B, G, C, D], or [P, page_size, G, D] with page_table, and k_idx "
                f"[B, C, d], or [P, page_size, d], got {list(k.shape)} and {list(k_idx.shape)}."
            )
        size = k.shape[1]
        checks.shape(OPERATOR, "v", v, tuple(k.shape), "[B, G, C, D]", "like k")
        tokens = (k.shape[0], k.shape[2] if page_table is None else size)
        checks.shape(OPERATOR, "k_idx", k_idx, (*tokens, k_idx.shape[2]), "[B, C, d]", "like k")
        if page_table is not None and (page_table.dim() != 2 or size & (size - 1)):
            raise ValueError(
                f"{OPERATOR}: page_table must have shape [B, n], and page_size be a power of two, got "
                f"{list(page_table.shape)} and {size}."
            )
        self.k, self.v, self.k_idx = k, v, k_idx
        self.page_table = None if page_table is None else page_table.long()
        batch = k.shape[0] if page_table is None else page_table.shape[0]
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=k.device)
        self.longest = 0

    @property
    def capacity(self) -> int:
        """C: tokens that a sequence can have."""
        return self.k.shape[2] if self.page_table is None else self.page_table.shape[1] * self.k.shape[1]

    @property
    def read_to(self) -> int:
        """Tk of the keys that are read: at least `longest`, and seldom another."""
        return min(self.capacity, -(-self.longest // _STEP) * _STEP)

    def clear(self) -> None:
        """Forgets all tokens."""
        self.lengths.zero_()
        self.longest = 0

    def positions(self, num_tokens: int) -> Tensor:
        """int64 `[B, num_tokens]`: where the next tokens will stand."""
        return self.lengths[:, None] + torch.arange(num_tokens, device=self.lengths.device)

    def append(self, k: Tensor, v: Tensor, k_idx: Tensor, lengths: Tensor | None = None) -> None:
        """Adds tokens to each sequence: k and v `[B, G, t, D]`, k_idx `[B, t, d]`; of t only lengths[b], if given."""
        tokens = k.shape[2]
        if self.longest + tokens > self.capacity:
            raise ValueError(
                f"{OPERATOR}: the cache has room for {self.capacity} tokens, of which up to {self.longest} are taken, "
                f"got {tokens} more. Make a larger one."
            )
        at = self.positions(tokens)
        if self.page_table is None:
            batch = torch.arange(at.shape[0], device=at.device)[:, None]
            self.k[batch, :, at] = k.transpose(1, 2)
            self.v[batch, :, at] = v.transpose(1, 2)
            self.k_idx[batch, at] = k_idx
        else:
            size = self.k.shape[1]
            page, slot = self.page_table.gather(1, at // size), at % size
            self.k[page, slot] = k.transpose(1, 2)
            self.v[page, slot] = v.transpose(1, 2)
            self.k_idx[page, slot] = k_idx
        self.lengths += tokens if lengths is None else lengths
        self.longest += tokens

    def index_keys(self, num_keys: int) -> Tensor:
        """k_idx of the first num_keys tokens in one piece, `[B, num_keys, d]`: pages are copied."""
        if self.page_table is None:
            return self.k_idx[:, :num_keys]
        return self._pages(self.k_idx, num_keys)

    def keys_and_values(self, num_keys: int) -> tuple[Tensor, Tensor]:
        """k and v of the first num_keys tokens in one piece, `[B, G, num_keys, D]`: pages are copied."""
        if self.page_table is None:
            return self.k[:, :, :num_keys], self.v[:, :, :num_keys]
        return self._pages(self.k, num_keys).transpose(1, 2), self._pages(self.v, num_keys).transpose(1, 2)

    def _pages(self, pool: Tensor, num_keys: int) -> Tensor:
        assert self.page_table is not None
        used = self.page_table[:, : -(-num_keys // pool.shape[1])]
        return pool[used].flatten(1, 2)[:, :num_keys]


OPERATOR = "nn.AttentionCache"
