"""Words of selected keys, on the CPU."""

import torch
from torch import Tensor

_QUERIES = 64


def _bits(device: torch.device) -> Tensor:
    return torch.ones(_QUERIES, dtype=torch.int64, device=device) << torch.arange(_QUERIES, device=device)


def words_of_mask(mask: Tensor) -> Tensor:
    """Operator `words_of_mask`: bool [B, S, Tq, Tk] -> int64 [B, S, ceil(Tq / 64), Tk]."""
    b, s, tq, tk = mask.shape
    blocks = -(-tq // _QUERIES)
    out = torch.zeros(b, s, blocks, tk, dtype=torch.int64, device=mask.device)
    for i in range(_QUERIES):
        rows = mask[:, :, i::_QUERIES]
        # 1 << 63 is the sign: the sum of single bits is their union.
        out[:, :, : rows.shape[2]] |= rows.long() << i
    return out


def mask_of_words(words: Tensor, num_queries: int) -> Tensor:
    """Operator `mask_of_words`: the inverse of `words_of_mask`."""
    b, s, blocks, tk = words.shape
    bits = (words[:, :, :, None, :] & _bits(words.device)[:, None]) != 0
    return bits.reshape(b, s, blocks * _QUERIES, tk)[:, :, :num_queries].clone()
