"""Words of selected keys, on the CPU."""

import torch
from torch import Tensor

from gossamer.attention.records import QUERIES, MaskOfWords, WordsOfMask


def _bits(device: torch.device) -> Tensor:
    return torch.ones(QUERIES, dtype=torch.int64, device=device) << torch.arange(QUERIES, device=device)


def words_of_mask(call: WordsOfMask) -> Tensor:
    """Operator `words_of_mask`."""
    (mask,) = call
    b, s, tq, tk = mask.shape
    blocks = -(-tq // QUERIES)
    out = torch.zeros(b, s, blocks, tk, dtype=torch.int64, device=mask.device)
    for i in range(QUERIES):
        rows = mask[:, :, i::QUERIES]
        # 1 << 63 is the sign: the sum of single bits is their union.
        out[:, :, : rows.shape[2]] |= rows.long() << i
    return out


def mask_of_words(call: MaskOfWords) -> Tensor:
    """Operator `mask_of_words`."""
    words, num_queries = call
    b, s, blocks, tk = words.shape
    bits = (words[:, :, :, None, :] & _bits(words.device)[:, None]) != 0
    return bits.reshape(b, s, blocks * QUERIES, tk)[:, :, :num_queries].clone()
