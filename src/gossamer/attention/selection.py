"""Which keys each query attends to: the `Selection` container and its conversions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torch.utils import _pytree

from gossamer._core import checks
from gossamer._core.operator import register
from gossamer.attention._torch import selection as _cpu
from gossamer.attention.records import QUERIES, MaskOfWords, WordsOfMask


@dataclass(frozen=True, eq=False)
class Selection:
    """The keys that each query attends to: 64 queries share a word a key, Tq * Tk / 8 bytes a scope.

    One object can serve many layers.

    Args:
        words: int64 `[B, S, n, Tk]` with n = ceil(Tq / 64): bit i of `words[b, s, m, j]` says that query 64 m + i takes
            key j. S is 1 where all heads share the selection, or one for each group or head. Bits of queries from Tq on
            are 0.
        num_queries: Tq.

    Raises:
        ValueError: words have another shape.
        TypeError: words are not int64.

    Source: Gated Sparse Attention (arXiv 2601.15305); the order of bits suits a tile of 64 queries by keys.

    >>> Selection.from_mask(torch.tensor([[[True, False], [True, True]]])).words.tolist()
    [[[[3, 2]]]]
    """

    words: Tensor
    num_queries: int

    def __post_init__(self) -> None:
        operator = "attention.Selection"
        words: Any = self.words
        if not isinstance(words, Tensor):
            return  # PyTorch rebuilds nodes of a pytree with placeholders
        if self.words.dtype is not torch.int64:
            raise TypeError(
                f"{operator}: words must be int64, got {checks.name_of(self.words.dtype)}. "
                "Build a selection with Selection.from_mask or Selection.from_indices."
            )
        blocks = -(-self.num_queries // QUERIES)
        if self.words.dim() != 4 or self.words.shape[2] != blocks:
            raise ValueError(
                f"{operator}: words must have shape [B, S, n, Tk] with n = ceil(num_queries / 64) = {blocks}, "
                f"got {list(self.words.shape)}."
            )

    @property
    def num_keys(self) -> int:
        """Tk."""
        return self.words.shape[3]

    @property
    def device(self) -> torch.device:
        return self.words.device

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Selection:
        """The same selection on another device."""
        return Selection(self.words.to(device, non_blocking=non_blocking), self.num_queries)

    def __repr__(self) -> str:
        """One line, for which nothing is asked of the device."""
        batch, scopes = self.words.shape[:2]
        return (
            f"Selection(batch={batch}, scopes={scopes}, num_queries={self.num_queries}, num_keys={self.num_keys}, "
            f"device={self.device})"
        )

    @classmethod
    def from_mask(cls, mask: Tensor) -> Selection:
        """From a dense mask, True where a query takes a key.

        Args:
            mask: bool `[B, Tq, Tk]`, or `[B, S, Tq, Tk]` with a mask for each group or head; any strides.

        Raises:
            ValueError: mask has another number of dimensions.
            TypeError: mask is not bool.

        >>> Selection.from_mask(torch.ones(1, 3, 4, dtype=torch.bool)).words.tolist()
        [[[[7, 7, 7, 7]]]]
        """
        operator = "attention.Selection.from_mask"
        checks.tensors(operator, mask=mask)
        if mask.dtype is not torch.bool:
            raise TypeError(
                f"{operator}: mask must be bool, True where a query takes a key, got {checks.name_of(mask.dtype)}. "
                "Use mask != 0."
            )
        if mask.dim() not in (3, 4):
            raise ValueError(f"{operator}: mask must have shape [B, Tq, Tk] or [B, S, Tq, Tk], got {list(mask.shape)}.")
        mask = mask[:, None] if mask.dim() == 3 else mask
        return cls(_words_of_mask(WordsOfMask(mask)), mask.shape[2])

    def to_mask(self) -> Tensor:
        """Dense bool `[B, S, Tq, Tk]`."""
        return _mask_of_words(MaskOfWords(self.words, self.num_queries))

    @classmethod
    def from_indices(cls, indices: Tensor, num_keys: int, mask: Tensor | None = None) -> Selection:
        """From the keys of each query, in any order.

        Args:
            indices: int `[B, Tq, k]` or `[B, S, Tq, k]`; -1 is no key, and a repeated key counts once.
            num_keys: Tk. On the CPU an index outside [-1, Tk) raises; on the GPU, where looking would make the host
                wait, it is left out.
            mask: bool like indices, False where an index is to be left out, or None.

        Raises:
            ValueError: shapes do not fit; on the CPU, an index outside [-1, Tk).
            TypeError: indices is no integer tensor, or mask not bool.

        >>> Selection.from_indices(torch.tensor([[[2, 0], [1, -1]]]), 3).words.tolist()
        [[[[1, 2, 1]]]]
        """
        operator = "attention.Selection.from_indices"
        checks.whole(operator, indices=indices)
        checks.tensors(operator, mask=mask)
        if indices.dim() not in (3, 4):
            raise ValueError(
                f"{operator}: indices must have shape [B, Tq, k] or [B, S, Tq, k], got {list(indices.shape)}."
            )
        if mask is not None:
            if mask.dtype is not torch.bool:
                raise TypeError(f"{operator}: mask must be bool, got {checks.name_of(mask.dtype)}. Use mask != 0.")
            checks.shape(operator, "mask", mask, tuple(indices.shape), "[B, Tq, k]", "like indices")
            indices = torch.where(mask, indices, -1)
        if indices.device.type == "cpu" and indices.numel():
            low, high = (int(bound) for bound in indices.aminmax())
            if low < -1 or high >= num_keys:
                raise ValueError(
                    f"{operator}: indices must lie in [0, Tk) with Tk = {num_keys}, or be -1 for no key, got {low} to "
                    f"{high}."
                )
        indices = (indices[:, None] if indices.dim() == 3 else indices).long()
        # One column more than Tk takes indices that name no key.
        at = torch.where((indices < 0) | (indices >= num_keys), num_keys, indices)
        dense = torch.zeros(*indices.shape[:3], num_keys + 1, dtype=torch.bool, device=indices.device)
        dense.scatter_(3, at, True)
        return cls.from_mask(dense[..., :num_keys])

    def to_indices(self, k: int | None = None) -> tuple[Tensor, Tensor]:
        """(indices int64 `[B, S, Tq, k]`, ascending and -1 behind the last; mask bool, True where there is a key).

        k is the number of slots; None looks for the most keys that a query has, which makes the host wait. A query of
        more than k keys gives the first k.
        """
        mask = self.to_mask()
        if k is None:
            checks.no_sync("attention.Selection.to_indices", "k=None", "Give k.")
            k = int(mask.sum(-1).max()) if mask.numel() else 0
        place = mask.cumsum(-1) - 1
        out = torch.full((*mask.shape[:3], k + 1), -1, dtype=torch.int64, device=mask.device)
        keys = torch.arange(mask.shape[3], device=mask.device).expand_as(mask)
        out.scatter_(3, torch.where(mask & (place < k), place, k), keys)
        indices = out[..., :k]
        return indices, indices >= 0

    def to_block_mask(self, block_size: int = 128) -> BlockMask:
        """FlexAttention's `BlockMask` of the same selection, for heads in as many scopes as there are.

        `block_size` is the edge of its blocks, a multiple of 64. The mask's function reads the words. Where S > 1, head
        h of FlexAttention must be scope h.
        """
        if block_size % QUERIES or block_size < QUERIES:
            raise ValueError(
                f"attention.Selection.to_block_mask: block_size must be a multiple of {QUERIES}, got {block_size}."
            )
        words, scopes = self.words, self.words.shape[1]
        heads = scopes if scopes > 1 else None

        def takes(b: Tensor, h: Tensor, q: Tensor, j: Tensor) -> Tensor:
            return (words[b, h if heads else 0, q // QUERIES, j] >> (q % QUERIES)) & 1 != 0

        # create_block_mask would make the whole mask, 16 bytes a pair.
        partial, full = _blocks(self, block_size)
        sizes = (self.num_queries, self.num_keys)
        listed = (*_ordered(partial), *_ordered(full))
        return BlockMask.from_kv_blocks(*listed, BLOCK_SIZE=block_size, mask_mod=takes, seq_lengths=sizes)

    @classmethod
    def from_block_mask(cls, block_mask: BlockMask) -> Selection:
        """From FlexAttention's `BlockMask`, with a scope for each of its heads; its function is asked for every pair.

        Args:
            block_mask: of B sequences, S heads, Tq queries and Tk keys. Where blocks are full, its function has no say,
                as in FlexAttention.

        Raises:
            TypeError: block_mask is no `BlockMask`.

        >>> mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 3, 4, device="cpu")  # doctest: +SKIP
        >>> Selection.from_block_mask(mask).to_indices()[0].tolist()  # doctest: +SKIP
        [[[[0, -1, -1], [0, 1, -1], [0, 1, 2]]]]
        """
        operator = "attention.Selection.from_block_mask"
        if not isinstance(block_mask, BlockMask):
            raise TypeError(
                f"{operator}: block_mask must be a BlockMask of torch.nn.attention.flex_attention, got "
                f"{type(block_mask).__name__}. A dense mask goes to Selection.from_mask."
            )
        b, heads, tq, tk = block_mask.shape
        device = block_mask.kv_num_blocks.device
        mask = _dense_blocks(block_mask.kv_num_blocks, block_mask.kv_indices, block_mask)
        mask &= create_mask(block_mask.mask_mod, b, heads, tq, tk, device=str(device))
        if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
            mask |= _dense_blocks(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, block_mask)
        return cls.from_mask(mask)


def everything(batch: int, num_queries: int, num_keys: int, device: torch.device) -> Selection:
    """The selection in which each query takes each key."""
    words = torch.full((batch, 1, -(-num_queries // QUERIES), num_keys), -1, dtype=torch.int64, device=device)
    if num_queries % QUERIES:
        words[:, :, -1] = (1 << num_queries % QUERIES) - 1
    return Selection(words, num_queries)


def _blocks(selection: Selection, size: int) -> tuple[Tensor, Tensor]:
    """(blocks with some pairs taken, blocks with all): bool `[B, S, ceil(Tq / size), ceil(Tk / size)]`."""
    padding = (0, -selection.num_keys % size, 0, -selection.words.shape[2] % (size // QUERIES))
    words = torch.nn.functional.pad(selection.words, padding)
    words = words.unflatten(3, (-1, size)).unflatten(2, (-1, size // QUERIES))
    full = (words == -1).all(5).all(3)
    return (words != 0).any(5).any(3) & ~full, full


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(how many of each row are set, their columns first and ascending), as FlexAttention has them."""
    order = torch.argsort((~blocks).to(torch.int8), dim=-1, stable=True)
    return blocks.sum(-1).int(), order.int()


def _dense_blocks(counts: Tensor, indices: Tensor, block_mask: BlockMask) -> Tensor:
    """bool `[B, S, Tq, Tk]`: the first counts of the listed blocks of a row."""
    *_, tq, tk = block_mask.shape
    rows, columns = block_mask.BLOCK_SIZE
    width = max(indices.shape[3], -(-tk // columns))
    listed = torch.arange(indices.shape[3], device=indices.device) < counts[..., None]
    # One column more takes blocks that are not listed.
    blocks = torch.zeros(*indices.shape[:3], width + 1, dtype=torch.bool, device=indices.device)
    blocks.scatter_(3, torch.where(listed, indices, width).long(), True)
    whole = blocks[..., :width].repeat_interleave(rows, 2).repeat_interleave(columns, 3)
    return whole[:, :, :tq, :tk].contiguous()


torch.serialization.add_safe_globals([Selection])

_pytree.register_pytree_node(
    Selection,
    lambda selection: ([selection.words], selection.num_queries),
    lambda tensors, num_queries: Selection(next(iter(tensors)), num_queries),
    serialized_type_name="gossamer.attention.Selection",
)


def _fake_words(call: WordsOfMask) -> Tensor:
    b, s, tq, tk = call.mask.shape
    return call.mask.new_empty((b, s, -(-tq // QUERIES), tk), dtype=torch.int64)


def _fake_mask(call: MaskOfWords) -> Tensor:
    words = call.words
    return words.new_empty((*words.shape[:2], call.num_queries, words.shape[3]), dtype=torch.bool)


@register(WordsOfMask, cpu=_cpu.words_of_mask, fake=_fake_words, repeats=True)
def _words_of_mask() -> Any:
    from gossamer.attention._triton.selection import words_of_mask

    return words_of_mask


@register(MaskOfWords, cpu=_cpu.mask_of_words, fake=_fake_mask, repeats=True)
def _mask_of_words() -> Any:
    from gossamer.attention._triton.selection import mask_of_words

    return mask_of_words
